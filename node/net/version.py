"""The version of this potluck, without a query to the package metadata (which costs 70 ms).

It is the same as in pyproject.toml; tests/commands/test_version.py fails if the two differ.
"""

VERSION = "0.1.0"
