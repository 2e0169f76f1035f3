"""Measuring the profiles and links that a plan needs, searching for it, choosing ranks' devices."""
