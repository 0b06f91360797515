"""Fakes that run inside Ray workers: a class defined in a test module cannot be imported there."""
