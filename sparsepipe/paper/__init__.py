"""Tables and figures of papers: their tasks, plans, printed values and report chapters."""
