"""The process group, sums in a fixed order, and the agreement of replicas and of stops."""
