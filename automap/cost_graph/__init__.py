"""The signatures of a skeleton as a graph of costs, for planners."""
