"""Hostile answers, all in one run: bounded time, nothing left running, every other answer scored as ever.

Slow (minutes): ``make gold ARGS="-k hostile"``.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from dlmgrid.workers.benchmarks.catalog import get_benchmark
from dlmgrid.workers.benchmarks.scoring import score_run
from dlmgrid.workers.items import Item
from dlmgrid.workers.tables import SCORES, read_table

pytest.importorskip("lm_eval")
pytest.importorskip("evalplus")

GOLDEN_DATA = Path(__file__).resolve().parents[2] / "golden" / "data"
MARK = "987.25"

# Bodies of ``def repeat(text, times)``. What ends in a loop is ``timed_out``, the others are wrong or right.
PROGRAMS = {
    "infinite loop": "while True: pass",
    "loop that ignores every signal": (
        "import signal\n    for n in range(1, 32):\n        try: signal.signal(n, signal.SIG_IGN)\n"
        "        except (OSError, ValueError): pass\n    while True: pass"
    ),
    "loop that swallows every exception": (
        "while True:\n        try:\n            while True: pass\n        except BaseException: pass"
    ),
    "loop in the comparison of what it returns": (
        "class Value:\n        def __eq__(self, other):\n            while True: pass\n    return Value()"
    ),
    "stops itself": "import signal; signal.raise_signal(signal.SIGSTOP)",
    "tower of powers": "return 9 ** 9 ** 9 ** 9",
    "backtracking": "import re; return re.match('(a+)+$', 'a' * 60 + 'b')",
    "100k digits as text": "return str(10 ** 100000)",
    "fork": "import os\n    while True: os.fork()",
    "fork through libc": "import ctypes\n    while True: ctypes.CDLL(None).fork()",
    "detached processes": (
        "from multiprocessing.util import spawnv_passfds\n"
        f"    spawnv_passfds(b'/bin/sh', [b'sh', b'-c', b'setsid sleep {MARK} & setsid sleep {MARK}'], [])"
    ),
    "detached processes without end": (
        "from multiprocessing.util import spawnv_passfds\n"
        f"    while True: spawnv_passfds(b'/bin/sh', [b'sh', b'-c', b'setsid sleep {MARK} & setsid sleep {MARK}'], [])"
    ),
    "threads without end": (
        "import threading, time\n    while True: threading.Thread(target=time.sleep, args=(600,)).start()"
    ),
    "exit from a thread": (
        "import os, threading\n    threading.Thread(target=os._exit, args=(0,)).start()\n    while True: pass"
    ),
    "hangs when it exits": (
        "import atexit, time; atexit.register(time.sleep, 600)\n    raise SystemExit"
    ),
    "huge output": "while True: print('x' * 10 ** 6)",
    "writes to every descriptor": (
        "import os\n    for n in range(3, 64):\n        try: os.write(n, b'x' * 4096)\n        except OSError: pass"
    ),
    "closed descriptors": "import os; os.closerange(0, 64); print(1)",
    "memory": "return [bytearray(1 << 30) for _ in range(64)]",
    "recursion": "return repeat(text, times)",
    "deleted temporary folder": (
        "import shutil, tempfile; shutil.rmtree(tempfile.gettempdir(), ignore_errors=True); return 1"
    ),
    "kills the parent": "import os; os.kill(os.getppid(), 9)",
    "crash": "import faulthandler; faulthandler._sigsegv()",
    "error whose text is an error": (
        "class Bad(Exception):\n        def __str__(self): raise ValueError\n    raise Bad"
    ),
    "replaced builtins": (
        "import builtins, signal, time\n    builtins.len = builtins.open = builtins.isinstance = None\n"
        "    signal.setitimer = signal.signal = time.time = None\n    while True: pass"
    ),
}  # fmt: skip
WHOLE_PROGRAMS = {
    "hang at import": "def repeat(text, times, hang=any(iter(int, 1))):\n    return text * times\n",
    "null byte": "def repeat(text, times):\n    return '\x00'\n",
    "unicode digits": "def repeat(text, times):\n    return text * int('٣')\n",
    "deep brackets": "def repeat(text, times):\n    return " + "(" * 3000 + ")" * 3000 + "\n",
    "two thousand lines": "x = [\n" * 2000,
    "long expression": "def repeat(text, times):\n    return " + "+".join(["1"] * 20000) + "\n",
}
TEXTS = {
    "tower": "\\boxed{9^{9^{9^{9}}}}",
    "factorial": "\\boxed{(10^9)!}",
    "binomial": "\\boxed{\\binom{10^9}{5 \\cdot 10^8}}",
    "sum": "\\boxed{\\sum_{i=1}^{10^{12}} \\frac{1}{i}}",
    "deep fractions": "\\boxed{" + "\\frac{1}{" * 2000 + "2" + "}" * 2000 + "}",
    "deep roots": "\\boxed{" + "\\sqrt{" * 2000 + "2" + "}" * 2000 + "}",
    "boxes without end": "\\boxed{" * 20000,
    "braces": "{" * 50000,
    "dollars": "$" * 50000,
    "many expressions": " ".join(f"$x^{{{n}}} + {n}$" for n in range(3000)),
    "100k digits": "#### " + "9" * 100_000 + " \\boxed{" + "9" * 100_000 + "}",
    "commas": "#### " + "1," * 50_000,
    "unicode digits": "#### ٣٤ \\boxed{٣٤}",
    "null bytes": "#### 1\x00 \\boxed{1\x00}\x00",
    "deep JSON": "[" * 100_000,
    "one long word": "a" * 300_000,
    "many lines": "so.\n" * 50_000,
    "spaces": " " * 300_000 + "x",
}

MakeRun = Callable[..., Path]
Generation = Callable[..., dict[str, Any]]


@pytest.mark.slow
def test_hostile_answers_end_and_touch_no_other(
    make_run: MakeRun,
    generation: Generation,
    data_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    items = {name: get_benchmark(name).load(GOLDEN_DATA, None) for name in ("gsm8k", "math500", "ifeval")}
    items["humaneval_plus"] = get_benchmark("humaneval_plus").load(data_folder)
    repeat = items["humaneval_plus"][1]
    right = repeat.document["canonical_solution"]
    rows = []
    hostile = [f"    {body}\n    return text * times\n" for body in PROGRAMS.values()]
    for number, text in enumerate([*hostile, *WHOLE_PROGRAMS.values()]):
        rows.append(generation("humaneval_plus", repeat.item_id, text, repeat=number))
        # a text of its own, so that it is scored again between the hostile ones
        text = f"{right}# {number}\n"
        rows.append(generation("humaneval_plus", repeat.item_id, text, repeat=number, cell_key="right"))
    for name in ("gsm8k", "math500", "ifeval"):
        for item in items[name]:
            for number, text in enumerate(TEXTS.values()):
                rows.append(generation(name, item.item_id, text, repeat=number))
                rows.append(
                    generation(name, item.item_id, _right(item, number), repeat=number, cell_key="right")
                )
    out = make_run(items, rows)
    started = time.monotonic()
    score_run(out, confirm_run_unsafe_code=True)
    seconds = time.monotonic() - started

    paths = [str(path) for path in (out / "scores").iterdir()]
    scored = read_table(paths, SCORES).to_pylist()
    slowest = sorted(
        {(round(row["seconds"], 1), row["benchmark"], row["item_id"], row["repeat"]) for row in scored},
        reverse=True,
    )[:12]
    print(f"{len(rows)} answers in {seconds:.0f} s; slowest {slowest}")
    headline = {"exact_match,flexible-extract", "math_verify,none", "pass@1,base", "pass@1,plus"}
    failed = [
        row
        for row in scored
        if row["cell_key"] == "right" and row["metric"] in headline and row["value"] != 1
    ]
    assert failed == []
    assert [row for row in scored if row["status"] not in ("scored", "timed_out")] == []
    # every limit within held: none had to be stopped from without
    assert [row for row in scored if "not scored within" in row["detail"]] == []
    wrong = [row for row in scored if row["cell_key"] == "cell" and row["benchmark"] == "humaneval_plus"]
    passed = {list(PROGRAMS | WHOLE_PROGRAMS)[row["repeat"]] for row in wrong if row["value"] == 1}
    assert passed <= {"detached processes", "writes to every descriptor", "closed descriptors"}
    assert [process for process in psutil.process_iter() if MARK in _command_line(process)] == []
    assert list(scratch.iterdir()) == []
    assert psutil.Process(os.getpid()).children(recursive=True) == []


def _right(item: Item, number: int) -> str:
    document = item.document
    if "solution" in document:
        return f"{document['solution']}\n{' ' * number}"
    return f"{document.get('answer', 'Well.')}\n{' ' * number}"


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []
