"""What a plan is, what it costs and how it runs: cluster, problem, plan, space of plans, price, runtime."""
