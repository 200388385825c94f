"""The version of potluck that this is, without asking the package index (that costs 70 ms).

pyproject.toml says the same; tests/commands/test_version.py fails when the two disagree.
"""

VERSION = "0.1.0"
