"""What exists only because a paper prints a table or a figure."""
