"""The node's side of access: its pass, the auth server, renewal, and revocations."""
