"""What a model is: an immutable operator graph with costs, factor rules and a traced batch.

Knows nothing of devices, plans or torch. Units: bytes, floating-point operations, elements.
"""
