"""The node's side of who may take part: its pass, the auth server, renewal, and the revoked."""
