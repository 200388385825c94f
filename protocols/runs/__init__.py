"""The signed definition of a run: every peer in the run serves it, and it is fetched from any."""
