"""Where metrics go: loggers, their history, trackers."""
