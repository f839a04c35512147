"""Searchers that price plans one after the other."""
