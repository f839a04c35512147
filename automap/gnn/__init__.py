"""Distributed training of graph neural networks with sampled mini-batches: what is placed, and what a placement costs.

The system is that of Luo, Bao and Wu (arXiv 2204.11224): graph stores, samplers, workers and parameter servers on
machines with limited network interfaces exchange flows whose sizes vary from iteration to iteration. `problem.py` says
what a problem is, `simulator.py` what a placement and an order of the flows cost, `plan.py` what is handed out.
"""
