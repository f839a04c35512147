"""What is made of the plans that a search found."""
