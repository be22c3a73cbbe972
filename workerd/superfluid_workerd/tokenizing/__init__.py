"""What adapters that read a model's vocabulary themselves have in common."""
