"""Answers that cross over to other tools and back: files of lm-eval and EvalPlus, written and read."""
