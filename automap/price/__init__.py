"""What a plan costs: compiled tables of a problem, kernels over them, schedule, memory and the estimate."""
