"""The inner loops of planners, compiled."""
