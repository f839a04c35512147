"""Several searchers on one problem."""
