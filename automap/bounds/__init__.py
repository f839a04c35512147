"""Partial plans and their lower bounds."""
