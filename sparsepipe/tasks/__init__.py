"""The tasks, a file for each; ``task.py`` has the run they work on, ``result.py`` its result."""
