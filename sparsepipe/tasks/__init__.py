"""What a run does: one file a task, the run that it is given, and the result that it leaves."""
