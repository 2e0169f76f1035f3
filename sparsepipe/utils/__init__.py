"""Files, the host and memory; open to every room."""
