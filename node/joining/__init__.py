"""What `potluck join` does, in order, from an invite to training."""
