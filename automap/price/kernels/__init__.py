"""The arithmetic of a price, compiled."""
