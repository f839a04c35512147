"""Rewrites of a graph that was read, towards the operators that are known."""
