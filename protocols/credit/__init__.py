"""Records of who brought what to a run's rounds, each signed by the peer that saw it."""
