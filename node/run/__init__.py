"""Runs: what an organiser defines, signs and invites to, and what a volunteer makes of it."""
