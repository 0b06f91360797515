"""The forms of ``words``: what each word problem says, asks and works out, before its wording is final."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

_NAMES = (
    "Ada", "Ben", "Carl", "Dana", "Emma", "Finn", "Gina", "Hugo", "Ivy", "Jack", "Kate", "Leo",
    "Maya", "Nora", "Omar", "Paul", "Rosa", "Sam", "Tina", "Victor", "Wendy", "Yusuf", "Zoe", "Lina",
    "Marco", "Elena",
)  # fmt: skip
_THINGS = (
    "apples", "pens", "books", "stamps", "coins", "cards", "shells", "marbles", "cookies", "stickers",
    "oranges", "eggs", "balls", "flowers", "candles", "buttons", "beads", "photos", "tickets", "plums",
)  # fmt: skip
_CONTAINERS = ("boxes", "bags", "crates", "baskets", "packs", "jars", "trays", "bins")
_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "/": lambda left, right: left // right,
}


@dataclass(frozen=True, slots=True)
class Step:
    """One line of arithmetic: ``left operator right``, the unit of its value, and names for what it works
    out."""

    left: int
    operator: str
    right: int
    unit: str
    about: tuple[str, ...]

    @property
    def value(self) -> int:
        return _OPERATIONS[self.operator](self.left, self.right)


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem before its wording is final. The answer is the value of the last step."""

    form: str
    sentences: tuple[str, ...]
    ask: str
    steps: tuple[Step, ...]
    closing: tuple[str, ...]

    @property
    def answer(self) -> int:
        return self.steps[-1].value

    @property
    def identity(self) -> tuple[object, ...]:
        """The form and every number in it: what is held out is held out under every wording."""
        return (self.form, *(part for step in self.steps for part in (step.left, step.operator, step.right)))


class Draw:
    """The random choices of one problem. Two draws from equal generators are equal."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.who, self.other = rng.sample(_NAMES, 2)
        self.things = rng.choice(_THINGS)
        self.containers = rng.choice(_CONTAINERS)

    def number(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def pick(self, *options: str) -> str:
        return self.rng.choice(options)


def _gain(d: Draw) -> Problem:
    a, b = d.number(4, 99), d.number(4, 99)
    return Problem(
        "gain",
        (
            d.pick(
                f"{d.who} has {a} {d.things}.",
                f"{d.who} owns {a} {d.things}.",
                f"{d.who} starts with {a} {d.things}.",
            ),
            d.pick(
                f"{d.who} finds {b} more.",
                f"{d.other} gives {d.who} {b} more.",
                f"Then {d.who} buys another {b}.",
            ),
        ),
        d.pick(f"How many {d.things} does {d.who} have now?", f"How many {d.things} is that in total?"),
        (
            Step(
                a, "+", b, d.things, ("the total", f"the {d.things} together", f"all of {d.who}'s {d.things}")
            ),
        ),
        (f"{d.who} has {{n}} {d.things} now.", f"There are {{n}} {d.things}.", "The total is {n}."),
    )


def _lose(d: Draw) -> Problem:
    a = d.number(20, 120)
    b = d.number(3, a - 2)
    return Problem(
        "lose",
        (
            d.pick(f"{d.who} has {a} {d.things}.", f"There are {a} {d.things} on {d.who}'s table."),
            d.pick(
                f"{d.who} gives {b} to {d.other}.",
                f"{d.who} loses {b} of them.",
                f"{d.other} takes {b} away.",
            ),
        ),
        d.pick(f"How many {d.things} are left?", f"How many {d.things} remain?"),
        (Step(a, "-", b, d.things, ("what is left", "the rest", f"the remaining {d.things}")),),
        (f"{{n}} {d.things} are left.", f"So {{n}} {d.things} remain.", "The rest is {n}."),
    )


def _groups(d: Draw) -> Problem:
    n, m = d.number(2, 12), d.number(3, 25)
    return Problem(
        "groups",
        (
            d.pick(
                f"{d.who} fills {n} {d.containers} with {m} {d.things} each.",
                f"There are {n} {d.containers}, and each holds {m} {d.things}.",
                f"{d.who} buys {n} {d.containers} of {m} {d.things}.",
            ),
        ),
        d.pick(f"How many {d.things} are there in all?", f"How many {d.things} is that?"),
        (Step(n, "*", m, d.things, (f"the {d.containers} hold", "the number in all", f"{n} times {m}")),),
        (
            f"There are {{n}} {d.things} in all.",
            f"The {d.containers} hold {{n}} {d.things}.",
            "In all that is {n}.",
        ),
    )


def _share(d: Draw) -> Problem:
    n, m = d.number(2, 12), d.number(2, 20)
    return Problem(
        "share",
        (
            d.pick(
                f"{d.who} shares {n * m} {d.things} equally among {n} friends.",
                f"{n} children split {n * m} {d.things} evenly.",
                f"{d.who} puts {n * m} {d.things} into {n} {d.containers}, the same number in each.",
            ),
        ),
        d.pick(f"How many {d.things} go to each?", f"How many {d.things} does each one get?"),
        (Step(n * m, "/", n, d.things, ("each share", "one share", "the number for each")),),
        (f"Each gets {{n}} {d.things}.", "One share is {n}.", f"That is {{n}} {d.things} each."),
    )


def _groups_and_more(d: Draw) -> Problem:
    n, m, k = d.number(2, 12), d.number(3, 20), d.number(2, 60)
    return Problem(
        "groups_and_more",
        (
            d.pick(
                f"{d.who} has {n} {d.containers} with {m} {d.things} in each.",
                f"{d.who} carries {n} {d.containers} of {m} {d.things}.",
            ),
            d.pick(
                f"{d.who} also has {k} loose {d.things}.",
                f"{d.other} brings {k} more {d.things}.",
                f"Another {k} {d.things} lie on the floor.",
            ),
        ),
        d.pick(f"How many {d.things} are there altogether?", f"How many {d.things} are there in total?"),
        (
            Step(n, "*", m, d.things, (f"the {d.containers} hold", f"{d.things} in the {d.containers}")),
            Step(n * m, "+", k, d.things, ("with the others", "the total", f"all the {d.things}")),
        ),
        (f"There are {{n}} {d.things} altogether.", "The total is {n}.", f"That makes {{n}} {d.things}."),
    )


def _groups_and_fewer(d: Draw) -> Problem:
    n, m = d.number(2, 12), d.number(5, 20)
    k = d.number(2, n * m - 2)
    return Problem(
        "groups_and_fewer",
        (
            d.pick(
                f"A shop has {n} {d.containers} of {m} {d.things}.",
                f"{d.who} packs {n} {d.containers} with {m} {d.things} each.",
            ),
            d.pick(
                f"{d.who} sells {k} {d.things}.",
                f"{k} {d.things} are sold.",
                f"{d.other} takes {k} of the {d.things}.",
            ),
        ),
        d.pick(f"How many {d.things} are left?", f"How many {d.things} remain?"),
        (
            Step(n, "*", m, d.things, ("at the start", f"the {d.containers} hold", "the full stock")),
            Step(n * m, "-", k, d.things, ("what is left", "after that", "the rest")),
        ),
        (f"{{n}} {d.things} are left.", "The rest is {n}.", f"So {{n}} {d.things} remain."),
    )


def _change(d: Draw) -> Problem:
    n, price = d.number(2, 9), d.number(2, 19)
    paid = n * price + d.number(1, 60)
    return Problem(
        "change",
        (
            d.pick(
                f"{d.who} buys {n} {d.things} at ${price} each.",
                f"Each of the {d.things} costs ${price}, and {d.who} takes {n}.",
            ),
            d.pick(
                f"{d.who} pays with ${paid}.", f"{d.who} had ${paid} before.", f"{d.who} hands over ${paid}."
            ),
        ),
        d.pick("How many dollars are left?", f"How much money does {d.who} keep?", "How much is the change?"),
        (
            Step(n, "*", price, "dollars", ("the cost", f"the {d.things} cost", "the price of all")),
            Step(paid, "-", n * price, "dollars", ("the change", "the money left", "what is left")),
        ),
        (f"{d.who} keeps {{n}} dollars.", "The change is {n} dollars.", "{n} dollars are left."),
    )


def _more_than(d: Draw) -> Problem:
    a, k = d.number(5, 80), d.number(2, 40)
    return Problem(
        "more_than",
        (
            d.pick(f"{d.who} has {a} {d.things}.", f"{d.who} collects {a} {d.things}."),
            d.pick(f"{d.other} has {k} more than {d.who}.", f"{d.other} has {k} {d.things} more."),
        ),
        d.pick(f"How many {d.things} do they have together?", f"How many {d.things} do both have in total?"),
        (
            Step(a, "+", k, d.things, (f"{d.other} has", f"{d.other}'s {d.things}")),
            Step(a, "+", a + k, d.things, ("together", "both have", "the total")),
        ),
        (f"Together they have {{n}} {d.things}.", "The total is {n}.", f"Both have {{n}} {d.things}."),
    )


def _fewer_than(d: Draw) -> Problem:
    a = d.number(15, 90)
    k = d.number(2, a - 5)
    return Problem(
        "fewer_than",
        (
            d.pick(f"{d.who} has {a} {d.things}.", f"{d.who} counts {a} {d.things}."),
            d.pick(f"{d.other} has {k} fewer than {d.who}.", f"{d.other} has {k} {d.things} less."),
        ),
        d.pick(f"How many {d.things} do they have together?", f"How many {d.things} is that for both?"),
        (
            Step(a, "-", k, d.things, (f"{d.other} has", f"{d.other}'s {d.things}")),
            Step(a, "+", a - k, d.things, ("together", "both have", "the total")),
        ),
        (f"Together they have {{n}} {d.things}.", "The total is {n}.", f"Both have {{n}} {d.things}."),
    )


def _times_as_many(d: Draw) -> Problem:
    a, k = d.number(3, 30), d.number(2, 6)
    return Problem(
        "times_as_many",
        (
            d.pick(f"{d.who} has {a} {d.things}.", f"{d.who} picks {a} {d.things}."),
            d.pick(f"{d.other} has {k} times as many.", f"{d.other} has {k} times as many as {d.who}."),
        ),
        d.pick(f"How many {d.things} do they have together?", f"How many {d.things} are there in total?"),
        (
            Step(k, "*", a, d.things, (f"{d.other} has", f"{d.other}'s {d.things}")),
            Step(a, "+", k * a, d.things, ("together", "both have", "the total")),
        ),
        (f"Together they have {{n}} {d.things}.", "The total is {n}.", f"That makes {{n}} {d.things}."),
    )


def _pages(d: Draw) -> Problem:
    days, pages = d.number(2, 12), d.number(4, 25)
    total = days * pages + d.number(2, 90)
    return Problem(
        "pages",
        (
            d.pick(f"{d.who} reads {pages} pages a day.", f"Every day {d.who} reads {pages} pages."),
            d.pick(f"The book has {total} pages.", f"{d.who}'s book is {total} pages long."),
        ),
        d.pick(f"How many pages are left after {days} days?", f"After {days} days, how many pages remain?"),
        (
            Step(days, "*", pages, "pages", ("pages read", f"in {days} days", f"{d.who} reads")),
            Step(total, "-", days * pages, "pages", ("pages left", "the rest", "what remains")),
        ),
        ("{n} pages are left.", f"{d.who} still has {{n}} pages to read.", "The rest is {n} pages."),
    )


def _pool(d: Draw) -> Problem:
    n, share = d.number(2, 9), d.number(3, 20)
    a = d.number(2, n * share - 2)
    return Problem(
        "pool",
        (
            d.pick(
                f"{d.who} has {a} {d.things} and {d.other} has {n * share - a}.",
                f"{d.who} brings {a} {d.things}, {d.other} brings {n * share - a}.",
            ),
            d.pick(
                f"They share them equally among {n} people.",
                f"They split them evenly into {n} {d.containers}.",
            ),
        ),
        d.pick(f"How many {d.things} are in each share?", f"How many {d.things} is one share?"),
        (
            Step(a, "+", n * share - a, d.things, ("together", f"all the {d.things}", "the total")),
            Step(n * share, "/", n, d.things, ("each share", "one share")),
        ),
        (f"Each share is {{n}} {d.things}.", "One share is {n}.", f"That is {{n}} {d.things} each."),
    )


def _two_kinds(d: Draw) -> Problem:
    n, a, m, b = d.number(2, 9), d.number(2, 12), d.number(2, 9), d.number(2, 12)
    big, small = d.rng.choice((("large", "small"), ("red", "blue"), ("old", "new")))
    return Problem(
        "two_kinds",
        (
            d.pick(
                f"{d.who} has {n} {big} {d.containers} with {a} {d.things} each.",
                f"There are {n} {big} {d.containers} of {a} {d.things}.",
            ),
            d.pick(
                f"{d.who} has {m} {small} {d.containers} with {b} {d.things} each.",
                f"There are also {m} {small} {d.containers} of {b} {d.things}.",
            ),
        ),
        d.pick(f"How many {d.things} are there in total?", f"How many {d.things} is that in all?"),
        (
            Step(n, "*", a, d.things, (f"the {big} {d.containers}", f"{big} ones")),
            Step(m, "*", b, d.things, (f"the {small} {d.containers}", f"{small} ones")),
            Step(n * a, "+", m * b, d.things, ("in total", "both kinds", "together")),
        ),
        (f"There are {{n}} {d.things}.", "The total is {n}.", f"In all that is {{n}} {d.things}."),
    )


def _stock(d: Draw) -> Problem:
    n, m = d.number(2, 10), d.number(4, 15)
    k = d.number(2, n * m - 2)
    j = d.number(2, 60)
    return Problem(
        "stock",
        (
            d.pick(
                f"{d.who} has {n} {d.containers} of {m} {d.things}.",
                f"A shop has {n} {d.containers} with {m} {d.things} each.",
            ),
            d.pick(f"On Monday {k} {d.things} are sold.", f"{d.other} takes {k} {d.things}."),
            d.pick(f"Later {j} new {d.things} arrive.", f"The next day {d.who} gets {j} more."),
        ),
        d.pick(f"How many {d.things} are there now?", f"How many {d.things} are there in the end?"),
        (
            Step(n, "*", m, d.things, ("at the start", f"the {d.containers} hold")),
            Step(n * m, "-", k, d.things, ("after that", "what is left")),
            Step(n * m - k, "+", j, d.things, ("in the end", "with the new ones", "now")),
        ),
        (f"There are {{n}} {d.things} now.", f"In the end there are {{n}} {d.things}.", "That makes {n}."),
    )


def _wages(d: Draw) -> Problem:
    hours, rate = d.number(2, 9), d.number(5, 20)
    days = d.number(2, 5)
    return Problem(
        "wages",
        (
            d.pick(f"{d.who} earns ${rate} an hour.", f"{d.who} is paid ${rate} for each hour."),
            d.pick(
                f"{d.who} works {hours} hours a day for {days} days.",
                f"For {days} days {d.who} works {hours} hours each day.",
            ),
        ),
        d.pick(f"How many dollars does {d.who} earn?", f"How much money does {d.who} make?"),
        (
            Step(days, "*", hours, "hours", ("the hours", f"{d.who} works", "all hours")),
            Step(days * hours, "*", rate, "dollars", ("the pay", f"{d.who} earns")),
        ),
        (f"{d.who} earns {{n}} dollars.", "The pay is {n} dollars.", f"So {d.who} makes ${{n}}."),
    )


FORMS: tuple[Callable[[Draw], Problem], ...] = (
    _gain, _lose, _groups, _share, _groups_and_more, _groups_and_fewer, _change, _more_than, _fewer_than,
    _times_as_many, _pages, _pool, _two_kinds, _stock, _wages,
)  # fmt: skip
