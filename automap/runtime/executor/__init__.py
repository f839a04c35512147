"""Runs the stages of a plan operator by operator."""
