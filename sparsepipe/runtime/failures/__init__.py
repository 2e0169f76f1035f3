"""Ranks that fail: which are missing, what each reports, and how all of them end."""
