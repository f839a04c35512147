"""Compiled arithmetic of the cost graph."""
