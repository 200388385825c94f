"""From an invite to training."""
