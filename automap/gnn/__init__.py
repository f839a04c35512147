"""Distributed training of graph neural networks with sampled mini-batches: placements of tasks, and their cost.

The system is that of Luo, Bao and Wu (arXiv 2204.11224): graph stores, samplers, workers and parameter servers on
machines with limited network interfaces exchange flows whose sizes vary from iteration to iteration. `problem.py` has
the problem document, `simulator.py` simulates a placement and an order of the flows, and `plan.py` has the plan
document.
"""
