"""Helpers for files, the host, processes and arguments, for all other packages to import."""
