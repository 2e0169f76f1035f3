"""The process group, sums in a fixed order, averages of replicas, and agreement on stops."""
