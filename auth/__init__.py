"""Who may take part: tokens, signed requests, the allowlist. Ground floor, pure core."""
