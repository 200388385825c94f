"""The signed definition of a run: served by every peer that is in it, fetched from any of them."""
