"""Lower bounds of partial plans, compiled."""
