"""Ranks that train together: workers, stages, messages, collectives and failures."""
