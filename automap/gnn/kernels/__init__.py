"""Compiled: the simulation of a placement, and its lower bounds."""
