"""Searches for the plan whose slowest stage or transfer is fastest."""
