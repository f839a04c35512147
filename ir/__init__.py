"""The representation of a model: an immutable operator graph with costs, factor rules and a traced batch.

It does not depend on devices, plans or torch. Units: bytes, floating-point operations, elements.
"""
