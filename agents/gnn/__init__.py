"""Who places the tasks of distributed GNN training: baselines, Metropolis search, exact enumeration, a masked DQN."""
