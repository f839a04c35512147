"""Short real runs of plans, and what they say of the price."""
