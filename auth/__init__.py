"""Tokens, signed requests, the allowlist. Without I/O, except `auth.server`."""
