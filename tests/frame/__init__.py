"""Tests of the frame: scripts, pinned versions, documents, and the bench with its link proxy."""
