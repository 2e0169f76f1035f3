"""Measurements of missing profiles and links, searches for plans, and the devices of ranks."""
