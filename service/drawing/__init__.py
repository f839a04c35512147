"""Pictures of plans: what happens when, what is where, and where time and memory go."""
