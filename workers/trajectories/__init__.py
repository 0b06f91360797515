"""Recorded draft-free runs: what they hold, how they are recorded, replayed with drafters, and diagnosed."""
