"""Which plans there are: decisions, legal values, templates."""
