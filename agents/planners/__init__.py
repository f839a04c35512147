"""Planners that work on the structure of the cost."""
