"""Helpers of tests: small networks and data, harnesses for ranks and the command line, oracles."""
