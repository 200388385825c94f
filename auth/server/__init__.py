"""The auth server: its state in SQLite, its identity providers, its HTTP face."""
