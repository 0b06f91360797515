"""The function families behind ``functions``: names, docstrings, bodies, and what each must return.

In docstrings and bodies ``$a`` and ``$b`` are the parameters, ``$k`` the constant, ``$x`` a loop variable and
``$r`` a result variable. ``expected`` is written apart from the bodies, so that a wrong body fails its tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NUMBERS = ("numbers", "values", "items", "data")
NUMBER = ("n", "number", "value", "x")
TEXT = ("text", "s", "word", "line")
WORDS = ("words", "names", "strings", "parts")


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One kind of function. ``inputs`` names the kind of each argument: ``ints``, ``int``, ``text`` or
    ``words``.

    ``constants`` is the inclusive range of ``$k``, or None where there is none; ``expected`` takes the
    arguments and then the constant (0 where there is none).
    """

    name: str
    names: tuple[str, ...]
    params: tuple[tuple[str, ...], ...]
    inputs: tuple[str, ...]
    docs: tuple[str, ...]
    bodies: tuple[str, ...]
    expected: Callable[..., Any]
    constants: tuple[int, int] | None = None


def _product(values: list[int]) -> int:
    result = 1
    for value in values:
        result *= value
    return result


FAMILIES: tuple[Family, ...] = (
    Family(
        name="add_constant",
        names=("add_$k", "plus_$k", "increase_by_$k", "shift"),
        params=(NUMBER,),
        inputs=("int",),
        docs=("Return $a plus $k.", "Add $k to $a.", "Return the sum of $a and $k."),
        bodies=("return $a + $k", "$r = $a + $k\nreturn $r"),
        expected=lambda a, k: a + k,
        constants=(2, 99),
    ),
    Family(
        name="multiply_constant",
        names=("times_$k", "multiply_by_$k", "scale"),
        params=(NUMBER,),
        inputs=("int",),
        docs=("Return $a times $k.", "Multiply $a by $k.", "Return the product of $a and $k."),
        bodies=("return $a * $k", "$r = $a * $k\nreturn $r", "return $k * $a"),
        expected=lambda a, k: a * k,
        constants=(2, 99),
    ),
    Family(
        name="is_multiple",
        names=("is_multiple_of_$k", "divisible_by_$k", "is_multiple"),
        params=(NUMBER,),
        inputs=("int",),
        docs=("Check if $a is a multiple of $k.", "Return True if $a is divisible by $k."),
        bodies=("return $a % $k == 0", "if $a % $k == 0:\n    return True\nreturn False"),
        expected=lambda a, k: a % k == 0,
        constants=(2, 12),
    ),
    Family(
        name="is_above",
        names=("is_above_$k", "is_more_than_$k", "is_large"),
        params=(NUMBER,),
        inputs=("int",),
        docs=("Check if $a is greater than $k.", "Return True if $a is above $k."),
        bodies=("return $a > $k", "if $a > $k:\n    return True\nreturn False"),
        expected=lambda a, k: a > k,
        constants=(1, 30),
    ),
    Family(
        name="sum_list",
        names=("sum_list", "add_up", "list_sum", "total_of"),
        params=(NUMBERS,),
        inputs=("ints",),
        docs=("Return the sum of $a.", "Add up all the numbers in $a.", "Return the total of the list $a."),
        bodies=("return sum($a)", "$r = 0\nfor $x in $a:\n    $r += $x\nreturn $r"),
        expected=lambda a, k: sum(a),
    ),
    Family(
        name="product_list",
        names=("product", "multiply_all", "list_product"),
        params=(NUMBERS,),
        inputs=("ints",),
        docs=("Return the product of $a.", "Multiply all the numbers in $a."),
        bodies=(
            "$r = 1\nfor $x in $a:\n    $r *= $x\nreturn $r",
            "$r = 1\nfor $x in $a:\n    $r = $r * $x\nreturn $r",
        ),
        expected=lambda a, k: _product(a),
    ),
    Family(
        name="keep_above",
        names=("keep_above_$k", "filter_above", "larger_than_$k"),
        params=(NUMBERS,),
        inputs=("ints",),
        docs=(
            "Keep the numbers of $a that are greater than $k.",
            "Return the list of all numbers in $a above $k.",
        ),
        bodies=(
            "return [$x for $x in $a if $x > $k]",
            "$r = []\nfor $x in $a:\n    if $x > $k:\n        $r.append($x)\nreturn $r",
        ),
        expected=lambda a, k: [x for x in a if x > k],
        constants=(1, 30),
    ),
    Family(
        name="keep_below",
        names=("keep_below_$k", "filter_below", "smaller_than_$k"),
        params=(NUMBERS,),
        inputs=("ints",),
        docs=(
            "Keep the numbers of $a that are less than $k.",
            "Return the list of all numbers in $a below $k.",
        ),
        bodies=(
            "return [$x for $x in $a if $x < $k]",
            "$r = []\nfor $x in $a:\n    if $x < $k:\n        $r.append($x)\nreturn $r",
        ),
        expected=lambda a, k: [x for x in a if x < k],
        constants=(1, 30),
    ),
    Family(
        name="keep_multiples",
        names=("keep_multiples_of_$k", "multiples", "filter_multiples"),
        params=(NUMBERS,),
        inputs=("ints",),
        docs=("Keep the multiples of $k in $a.", "Return the list of all numbers in $a divisible by $k."),
        bodies=(
            "return [$x for $x in $a if $x % $k == 0]",
            "$r = []\nfor $x in $a:\n    if $x % $k == 0:\n        $r.append($x)\nreturn $r",
        ),
        expected=lambda a, k: [x for x in a if x % k == 0],
        constants=(2, 12),
    ),
    Family(
        name="count_above",
        names=("count_above_$k", "how_many_above", "count_large"),
        params=(NUMBERS,),
        inputs=("ints",),
        docs=(
            "Count the numbers in $a that are greater than $k.",
            "Return how many numbers in $a are above $k.",
        ),
        bodies=(
            "return sum(1 for $x in $a if $x > $k)",
            "$r = 0\nfor $x in $a:\n    if $x > $k:\n        $r += 1\nreturn $r",
            "return len([$x for $x in $a if $x > $k])",
        ),
        expected=lambda a, k: sum(x > k for x in a),
        constants=(1, 30),
    ),
    Family(
        name="sum_multiples",
        names=("sum_multiples_of_$k", "add_multiples", "sum_divisible"),
        params=(NUMBERS,),
        inputs=("ints",),
        docs=(
            "Return the sum of the multiples of $k in $a.",
            "Add up all the numbers in $a divisible by $k.",
        ),
        bodies=(
            "return sum($x for $x in $a if $x % $k == 0)",
            "$r = 0\nfor $x in $a:\n    if $x % $k == 0:\n        $r += $x\nreturn $r",
        ),
        expected=lambda a, k: sum(x for x in a if x % k == 0),
        constants=(2, 12),
    ),
    Family(
        name="map_add",
        names=("add_$k_to_all", "shift_all", "increase_all"),
        params=(NUMBERS,),
        inputs=("ints",),
        docs=("Add $k to every number in $a.", "Return the list $a with each number increased by $k."),
        bodies=("return [$x + $k for $x in $a]", "$r = []\nfor $x in $a:\n    $r.append($x + $k)\nreturn $r"),
        expected=lambda a, k: [x + k for x in a],
        constants=(2, 99),
    ),
    Family(
        name="map_multiply",
        names=("multiply_all_by_$k", "scale_all", "times_$k_each"),
        params=(NUMBERS,),
        inputs=("ints",),
        docs=("Multiply every number in $a by $k.", "Return the list $a with each number times $k."),
        bodies=("return [$x * $k for $x in $a]", "$r = []\nfor $x in $a:\n    $r.append($x * $k)\nreturn $r"),
        expected=lambda a, k: [x * k for x in a],
        constants=(2, 99),
    ),
    Family(
        name="squares",
        names=("squares", "square_all", "squared_list"),
        params=(NUMBERS,),
        inputs=("ints",),
        docs=("Return the squares of $a.", "Square every number in $a."),
        bodies=(
            "return [$x * $x for $x in $a]",
            "return [$x ** 2 for $x in $a]",
            "$r = []\nfor $x in $a:\n    $r.append($x * $x)\nreturn $r",
        ),
        expected=lambda a, k: [x**2 for x in a],
    ),
    Family(
        name="first_k",
        names=("first_$k", "take_$k", "head"),
        params=(NUMBERS,),
        inputs=("ints",),
        docs=("Return the first $k items of $a.", "Keep only the first $k numbers in $a."),
        bodies=("return $a[:$k]", "$r = $a[:$k]\nreturn $r"),
        expected=lambda a, k: [x for i, x in enumerate(a) if i < k],
        constants=(2, 9),
    ),
    Family(
        name="last_k",
        names=("last_$k", "tail", "keep_last_$k"),
        params=(NUMBERS,),
        inputs=("ints",),
        docs=("Return the last $k items of $a.", "Keep only the last $k numbers in $a."),
        bodies=("return $a[-$k:]", "$r = $a[-$k:]\nreturn $r"),
        expected=lambda a, k: [x for i, x in enumerate(a) if i >= len(a) - k],
        constants=(2, 9),
    ),
    Family(
        name="largest",
        names=("largest", "find_max", "list_max"),
        params=(NUMBERS,),
        inputs=("ints",),
        docs=("Return the largest number in $a.", "Find the maximum of the list $a."),
        bodies=("return max($a)", "$r = $a[0]\nfor $x in $a:\n    if $x > $r:\n        $r = $x\nreturn $r"),
        expected=lambda a, k: sorted(a)[-1],
    ),
    Family(
        name="smallest",
        names=("smallest", "find_min", "list_min"),
        params=(NUMBERS,),
        inputs=("ints",),
        docs=("Return the smallest number in $a.", "Find the minimum of the list $a."),
        bodies=("return min($a)", "$r = $a[0]\nfor $x in $a:\n    if $x < $r:\n        $r = $x\nreturn $r"),
        expected=lambda a, k: sorted(a)[0],
    ),
    Family(
        name="spread",
        names=("spread", "value_range", "max_minus_min"),
        params=(NUMBERS,),
        inputs=("ints",),
        docs=(
            "Return the largest number in $a minus the smallest.",
            "Return the difference of the maximum and the minimum of $a.",
        ),
        bodies=("return max($a) - min($a)", "$r = max($a) - min($a)\nreturn $r"),
        expected=lambda a, k: sorted(a)[-1] - sorted(a)[0],
    ),
    Family(
        name="unique_sorted",
        names=("unique", "sorted_unique", "distinct"),
        params=(NUMBERS,),
        inputs=("ints",),
        docs=("Return the sorted list of distinct numbers in $a.", "Sort $a and drop the duplicates."),
        bodies=("return sorted(set($a))", "$r = set($a)\nreturn sorted($r)"),
        expected=lambda a, k: [x for x in range(min(a), max(a) + 1) if x in a],
    ),
    Family(
        name="running_total",
        names=("running_total", "cumulative_sum", "running_sums"),
        params=(NUMBERS,),
        inputs=("ints",),
        docs=("Return the running totals of $a.", "Return the list of cumulative sums of $a."),
        bodies=(
            "$r = []\ntotal = 0\nfor $x in $a:\n    total += $x\n    $r.append(total)\nreturn $r",
            "$r = []\nfor $x in $a:\n    $r.append($x + ($r[-1] if $r else 0))\nreturn $r",
        ),
        expected=lambda a, k: [sum(a[: i + 1]) for i in range(len(a))],
    ),
    Family(
        name="contains",
        names=("contains", "has_value", "is_in"),
        params=(NUMBERS, ("target", "wanted", "key")),
        inputs=("ints", "int"),
        docs=("Check if $b is in $a.", "Return True if the list $a holds $b."),
        bodies=("return $b in $a", "for $x in $a:\n    if $x == $b:\n        return True\nreturn False"),
        expected=lambda a, b, k: a.count(b) > 0,
    ),
    Family(
        name="count_equal",
        names=("count_equal", "occurrences", "count_of"),
        params=(NUMBERS, ("target", "wanted", "key")),
        inputs=("ints", "int"),
        docs=("Count how often $b occurs in $a.", "Return how many items of $a are equal to $b."),
        bodies=("return $a.count($b)", "$r = 0\nfor $x in $a:\n    if $x == $b:\n        $r += 1\nreturn $r"),
        expected=lambda a, b, k: sum(x == b for x in a),
    ),
    Family(
        name="difference",
        names=("difference", "distance", "gap"),
        params=(("a", "first", "left"), ("b", "second", "right")),
        inputs=("int", "int"),
        docs=("Return the absolute difference of $a and $b.", "Return how far apart $a and $b are."),
        bodies=("return abs($a - $b)", "if $a > $b:\n    return $a - $b\nreturn $b - $a"),
        expected=lambda a, b, k: max(a, b) - min(a, b),
    ),
    Family(
        name="weighted_sum",
        names=("weighted_sum", "combine", "mix"),
        params=(("a", "first", "left"), ("b", "second", "right")),
        inputs=("int", "int"),
        docs=("Return $a plus $k times $b.", "Add $k times $b to $a."),
        bodies=("return $a + $k * $b", "$r = $a + $k * $b\nreturn $r"),
        expected=lambda a, b, k: a + b * k,
        constants=(2, 99),
    ),
    Family(
        name="clamp_top",
        names=("cap_at_$k", "limit", "at_most_$k"),
        params=(NUMBER,),
        inputs=("int",),
        docs=("Return $a, but at most $k.", "Limit $a to a maximum of $k."),
        bodies=("return min($a, $k)", "if $a > $k:\n    return $k\nreturn $a"),
        expected=lambda a, k: k if a > k else a,
        constants=(2, 30),
    ),
    Family(
        name="reverse_text",
        names=("reverse", "backwards", "flip"),
        params=(TEXT,),
        inputs=("text",),
        docs=("Return $a reversed.", "Return the string $a backwards."),
        bodies=(
            "return $a[::-1]",
            '$r = ""\nfor $x in $a:\n    $r = $x + $r\nreturn $r',
            'return "".join(reversed($a))',
        ),
        expected=lambda a, k: "".join(a[i] for i in range(len(a) - 1, -1, -1)),
    ),
    Family(
        name="is_palindrome",
        names=("is_palindrome", "same_backwards", "reads_same"),
        params=(TEXT,),
        inputs=("text",),
        docs=("Check if $a is a palindrome.", "Return True if $a reads the same backwards."),
        bodies=("return $a == $a[::-1]", "$r = $a[::-1]\nreturn $a == $r"),
        expected=lambda a, k: list(a) == list(reversed(a)),
    ),
    Family(
        name="count_vowels",
        names=("count_vowels", "vowels", "num_vowels"),
        params=(TEXT,),
        inputs=("text",),
        docs=("Count the vowels in $a.", "Return how many vowels the string $a has."),
        bodies=(
            '$r = 0\nfor $x in $a:\n    if $x in "aeiou":\n        $r += 1\nreturn $r',
            'return sum(1 for $x in $a if $x in "aeiou")',
        ),
        expected=lambda a, k: sum(a.count(vowel) for vowel in "aeiou"),
    ),
    Family(
        name="repeat_text",
        names=("repeat_$k", "repeat", "say_$k_times"),
        params=(TEXT,),
        inputs=("text",),
        docs=("Repeat the string $a $k times.", "Return $a written $k times in a row."),
        bodies=("return $a * $k", '$r = ""\nfor $x in range($k):\n    $r += $a\nreturn $r'),
        expected=lambda a, k: "".join(a for _ in range(k)),
        constants=(2, 12),
    ),
    Family(
        name="long_words",
        names=("long_words", "longer_than_$k", "keep_long"),
        params=(WORDS,),
        inputs=("words",),
        docs=(
            "Keep the strings in $a that are longer than $k.",
            "Return the list of strings in $a with more than $k letters.",
        ),
        bodies=(
            "return [$x for $x in $a if len($x) > $k]",
            "$r = []\nfor $x in $a:\n    if len($x) > $k:\n        $r.append($x)\nreturn $r",
        ),
        expected=lambda a, k: [x for x in a if len(x) > k],
        constants=(2, 7),
    ),
    Family(
        name="total_length",
        names=("total_length", "count_letters", "sum_lengths"),
        params=(WORDS,),
        inputs=("words",),
        docs=("Return the total length of the strings in $a.", "Count the letters of all strings in $a."),
        bodies=(
            "return sum(len($x) for $x in $a)",
            "$r = 0\nfor $x in $a:\n    $r += len($x)\nreturn $r",
            'return len("".join($a))',
        ),
        expected=lambda a, k: len([letter for word in a for letter in word]),
    ),
    Family(
        name="longest_word",
        names=("longest", "longest_word", "find_longest"),
        params=(WORDS,),
        inputs=("words",),
        docs=(
            "Return the longest string in $a, the first one if several are.",
            "Find the first longest string in $a.",
        ),
        bodies=(
            "return max($a, key=len)",
            "$r = $a[0]\nfor $x in $a:\n    if len($x) > len($r):\n        $r = $x\nreturn $r",
        ),
        expected=lambda a, k: sorted(a, key=lambda word: -len(word))[0],
    ),
    Family(
        name="sum_to",
        names=("sum_to", "triangle", "sum_up_to"),
        params=(("n", "number", "limit"),),
        inputs=("small",),
        docs=("Return the sum of the numbers from 1 to $a.", "Add up all numbers from 1 to $a."),
        bodies=(
            "return $a * ($a + 1) // 2",
            "return sum(range(1, $a + 1))",
            "$r = 0\nfor $x in range(1, $a + 1):\n    $r += $x\nreturn $r",
        ),
        expected=lambda a, k: sum(i for i in range(a + 1)),
    ),
    Family(
        name="factorial",
        names=("factorial", "fact", "product_to"),
        params=(("n", "number", "limit"),),
        inputs=("small",),
        docs=("Return the factorial of $a.", "Return the product of the numbers from 1 to $a."),
        bodies=(
            "$r = 1\nfor $x in range(1, $a + 1):\n    $r *= $x\nreturn $r",
            "$r = 1\nfor $x in range(2, $a + 1):\n    $r = $r * $x\nreturn $r",
        ),
        expected=lambda a, k: _product(list(range(1, a + 1))),
    ),
)
