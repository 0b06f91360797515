"""Fakes that run inside workers: a class in a test module cannot be imported there."""
