"""Pictures that runs and reports draw with matplotlib."""
