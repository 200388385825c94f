"""The tests, one folder a room; a package, so that test peers run as `python -m tests.…`."""
