"""What the owner of a machine allows."""
