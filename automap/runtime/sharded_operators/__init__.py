"""Operators that are split over ranks and need more than the plain kernel on the local operands, a file a family."""
