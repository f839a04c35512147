"""Plans of a space sampled, changed and priced in bulk, compiled."""
