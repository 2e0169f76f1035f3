"""Profiles and links that a plan lacks are measured, plans searched for, devices given to ranks."""
