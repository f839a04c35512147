"""Published runs as problems, and the errors of the price by group."""
