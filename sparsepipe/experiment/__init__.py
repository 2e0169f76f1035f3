"""Experiments: typed configuration, run directories, and the tasks that fill them."""
