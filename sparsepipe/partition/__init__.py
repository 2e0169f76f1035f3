"""Which device computes which layers: costs, and searches for the best plan."""
