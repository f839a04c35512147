"""Choices among the plans that a search found, and advice where no plan fits."""
