"""The limits that the owner of a machine sets."""
