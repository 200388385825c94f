"""One set of tests for the contract in protocols/network.py, run on both networks."""
