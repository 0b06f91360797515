"""Remarks: the free wording in generated answers.

A worked sum or a function is nearly determined by its question, so a model of such text alone would know
every token long before it commits it. Written answers are not like that: each word leaves several ways to
go on, and which ones depends on the word. A remark is a walk over a table of words and their successors:
subject, verb, object, how, and perhaps another clause.
"""

from __future__ import annotations

import random

_END = "."
_SUCCESSORS: dict[str, tuple[str, ...]] = {
    # openings and subjects
    "": ("we", "I", "you", "now", "first", "here", "then", "so", "next", "let", "one", "to"),
    "now": ("we", "I", "let", "one"),
    "first": ("I", "we", "you", "let"),
    "here": ("we", "you", "one", "I"),
    "then": ("I", "we", "one", "you"),
    "so": ("we", "let", "I", "you"),
    "next": ("you", "I", "we", "let"),
    "let": ("us", "me"),
    "we": ("add", "count", "check", "split", "can", "take", "need"),
    "I": ("count", "see", "keep", "write", "will", "use", "check"),
    "you": ("see", "may", "find", "need", "can", "get", "read"),
    "one": ("can", "may", "must"),
    "us": ("add", "see", "split", "look", "take", "write"),
    "me": ("see", "check", "keep", "look", "use", "read"),
    "to": ("get", "find", "keep", "use", "see", "add"),
    "can": ("add", "see", "take", "use", "get", "split"),
    "may": ("keep", "count", "find", "write", "need", "read"),
    "will": ("use", "add", "take", "write", "look", "find"),
    "must": ("check", "count", "read", "keep", "look", "get"),
    # verbs, each with its own objects
    "look": ("at", "for"),
    "at": ("the", "each", "both", "these", "your"),
    "for": ("the", "some", "all", "another", "two"),
    "count": ("all", "each", "these", "both", "my"),
    "add": ("both", "all", "the", "two", "some"),
    "find": ("the", "another", "two", "each", "your"),
    "get": ("the", "all", "both", "some", "another"),
    "take": ("each", "these", "two", "the", "another"),
    "keep": ("the", "all", "my", "both", "some"),
    "use": ("the", "these", "both", "your", "each"),
    "see": ("the", "each", "all", "two", "another"),
    "split": ("the", "these", "each", "both", "some"),
    "check": ("each", "all", "my", "the", "every"),
    "read": ("every", "the", "each", "all", "my"),
    "write": ("down", "every", "the", "two", "all"),
    "down": ("the", "each", "both", "all", "my"),
    "need": ("the", "both", "all", "two", "another"),
    # objects
    "all": ("numbers", "parts", "steps", "names", "cases", "values"),
    "each": ("number", "part", "step", "line", "case", "value"),
    "every": ("line", "step", "word", "case", "number", "name"),
    "another": ("step", "try", "way", "line", "part", "name"),
    "both": ("numbers", "sides", "parts", "lines", "cases", "values"),
    "two": ("steps", "parts", "lines", "values", "names", "numbers"),
    "some": ("steps", "numbers", "care", "parts", "values", "time"),
    "these": ("numbers", "values", "lines", "names", "steps", "sides"),
    "the": ("sum", "rest", "plan", "number", "steps", "line", "way", "values", "parts"),
    "my": ("sum", "plan", "numbers", "steps", "line", "work"),
    "your": ("plan", "numbers", "way", "line", "sum", "work"),
    # how, and where to go from there
    "numbers": ("twice", "in", "by", "again", "and", "on", _END),
    "parts": ("in", "with", "slowly", "before", _END),
    "steps": ("with", "in", "again", "while", "and", _END),
    "names": ("by", "again", "twice", "and", "in", _END),
    "cases": ("in", "with", "and", "slowly", "by", _END),
    "values": ("by", "in", "twice", "before", "on", _END),
    "sides": ("by", "again", "and", "with", "slowly", _END),
    "lines": ("in", "on", "twice", "while", "slowly", _END),
    "number": ("again", "by", "on", "before", "twice", _END),
    "part": ("with", "by", "slowly", "and", "in", _END),
    "step": ("by", "with", "again", "before", "in", _END),
    "line": ("twice", "on", "in", "and", "slowly", _END),
    "case": ("by", "with", "again", "while", _END),
    "value": ("on", "by", "twice", "and", "in", _END),
    "word": ("twice", "again", "in", "slowly", _END),
    "name": ("on", "twice", "again", "and", _END),
    "try": ("in", "with", "and", _END),
    "way": ("with", "in", "before", "again", _END),
    "sum": ("on", "by", "again", "with", "slowly", _END),
    "rest": ("in", "with", "slowly", "by", "and", _END),
    "plan": ("in", "on", "before", "again", "while", _END),
    "work": ("twice", "in", "on", "and", _END),
    "care": ("before", "and", "while", "in", _END),
    "time": ("before", "and", "again", "while", _END),
    "in": ("order", "mind", "full", "turn"),
    "by": ("hand", "size", "eye"),
    "on": ("paper", "sight", "top"),
    "with": ("care", "ease"),
    "twice": ("before", "and", "so", _END),
    "again": ("and", "while", "so", _END),
    "slowly": ("before", "and", "while", _END),
    "order": ("and", "so", "before", _END),
    "mind": ("while", "and", "so", _END),
    "full": ("before", "and", "so", _END),
    "turn": ("and", "so", "while", _END),
    "hand": ("and", "so", "before", _END),
    "size": ("and", "before", "so", _END),
    "eye": ("while", "and", "so", _END),
    "paper": ("before", "while", "so", _END),
    "sight": ("and", "so", _END),
    "top": ("and", "so", "before", _END),
    "ease": ("and", "so", "while", _END),
    "before": ("we", "I", "you"),
    "and": ("we", "I", "then", "so", "you"),
    "while": ("we", "you", "I"),
}  # fmt: skip
MOST_WORDS = 12


def remark(rng: random.Random) -> str:
    """One remark of at most twelve words, without a capital or a full stop."""
    while True:
        words = [rng.choice(_SUCCESSORS[""])]
        while words[-1] != _END and len(words) <= MOST_WORDS:
            words.append(rng.choice(_SUCCESSORS[words[-1]]))
        if words[-1] == _END:
            return " ".join(words[:-1])
