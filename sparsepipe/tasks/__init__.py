"""The tasks, a file for each, the run that they work on, and its result."""
