"""Runs schedules against costs instead of tensors: timelines, predictions, traces."""
