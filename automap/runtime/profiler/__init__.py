"""Measures this host: its processors and links."""
