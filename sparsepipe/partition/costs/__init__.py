"""Costs of layers, stages and transfers."""
