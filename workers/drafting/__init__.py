"""Drafters: one file a method, all behind the interface of ``drafter.py``."""
