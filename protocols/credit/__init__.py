"""Records of each peer's contribution to a run's rounds, signed by the peers that saw it."""
