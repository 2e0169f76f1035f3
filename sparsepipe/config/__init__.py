"""The configuration: schema, checks and composition, from the command line to plain values."""
