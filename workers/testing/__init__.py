"""Fakes that run inside workers; a class defined in a test module could not be imported there."""
