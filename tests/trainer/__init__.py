"""The trainer of a volunteer, and its reports."""
