"""What a model is: an immutable operator graph with costs, factor rules and a traced batch.

Independent of devices, plans and torch. Units: bytes, floating-point operations, elements.
"""
