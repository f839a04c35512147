"""The DQN and what it learns from."""
