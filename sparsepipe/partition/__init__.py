"""Plans, which say which devices compute which layers: their costs, and searches for the best."""
