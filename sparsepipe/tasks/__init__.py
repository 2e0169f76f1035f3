"""The tasks, a file for each; ``task.py`` defines their run, ``result.py`` writes its result."""
