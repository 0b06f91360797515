"""Benchmarks: items and prompts (``catalog``), data sources (``data``), and scoring of stored generations
(``scoring``).

Nothing here imports torch, Ray, lm-eval, EvalPlus or datasets before a function that needs them is called.
"""
