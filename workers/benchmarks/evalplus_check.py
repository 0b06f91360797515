"""Scoring with EvalPlus as a library, one answer at a time, in a scoring process.

For an answer: the program is extracted (``code_extraction``); the expected outputs come from EvalPlus' own
execution of the reference solution, computed once per task and kept in a cache folder; ``untrusted_check``
runs the program on the base inputs, then on the plus inputs. Its verdict is reported unchanged as
``evalplus``.

EvalPlus' limits are wall time; here they do not run while the program waits for a processor, so that a busy
machine makes no verdict. Three things EvalPlus 0.3.1 cannot tell are told apart by watching it:

- a test that ran out of time is a ``fail`` there: its alarm is observed, and the answer is tried again alone;
- a process that ended itself is a ``timeout`` there: it was gone before its limit, so it is wrong, not slow;
- HumanEval/32 fails for every solution, because the branch for its oracle skips the bookkeeping. The scorer
  ``evalplus-repaired`` checks that task by the same oracle, with the bookkeeping.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import multiprocessing
import pickle
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

from dlmgrid.workers.benchmarks.code_extraction import extract_program
from dlmgrid.workers.benchmarks.evalplus_set import REPAIRED_TASKS
from dlmgrid.workers.benchmarks.time_limit import Patience, time_limit
from dlmgrid.workers.benchmarks.verdict import ALONE, SCORED, TIMED_OUT, verdict
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.partial_files import write_whole

# EvalPlus' own default is 1 s a test; the second try, alone on the machine, allows ten times as much.
MIN_TIME_LIMIT_SECONDS = {"first": 1.0, ALONE: 10.0}
EXTRACTION_SECONDS = 30
GROUND_TRUTH_SECONDS = 240
# EvalPlus caps one call of untrusted_check at 60 s, adds 3 s, and joins the process.
CHECK_SECONDS = 66

_set_timer = signal.setitimer  # kept: a program under test may replace it
_PASS, _FAIL, _TIMEOUT = "pass", "fail", "timeout"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What EvalPlus said of one set of tests: its status, how many tests it ran, whether time ran out."""

    status: str
    num_run: int
    is_timed_out: bool
    detail: str


def wall_seconds(attempt: str) -> float:
    """Wall limit of one :func:`score` call: extraction and two checks, of HumanEval/32 twice."""
    return EXTRACTION_SECONDS + 2 * CHECK_SECONDS + 20.0


def prepare(document: dict[str, Any], options: dict[str, Any]) -> None:
    """Import EvalPlus and see that the document's expected outputs are in the cache.

    Raises InputError when EvalPlus is not installed.
    """
    try:
        import evalplus.eval
        import evalplus.sanitize  # noqa: F401  imported for its time, see above
    except ImportError as error:
        raise InputError(f"scoring with EvalPlus: {error.name} is missing: pip install evalplus") from error
    expected_outputs(document, Path(options["cache"]))


def score(text: str, document: dict[str, Any], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Verdicts of both scorers on ``text``.

    ``options`` holds ``attempt`` and ``cache`` (folder of expected outputs).
    """
    try:
        with time_limit(EXTRACTION_SECONDS):
            extraction = extract_program(text, document["prompt"], document["entry_point"])
    except TimeoutError as error:
        return _extraction_timed_out(document, f"extracting the program: {error}")
    expected = expected_outputs(document, Path(options["cache"]))
    minimum = MIN_TIME_LIMIT_SECONDS[options["attempt"]]
    program = extraction.program
    checks = run_checks(program, document, expected, minimum)
    verdicts = _verdicts("evalplus", checks, document, extraction.found, program)
    if _dataset(document) == "mbpp":
        return verdicts
    if document["task_id"] in REPAIRED_TASKS:
        checks = run_checks(
            repaired(program, document), _repaired_task(document), _repaired(expected), minimum
        )
    return verdicts + _verdicts("evalplus-repaired", checks, document, extraction.found, program)


def _extraction_timed_out(document: dict[str, Any], detail: str) -> list[dict[str, Any]]:
    names = ("base",) if document["plus_input"] is None else ("base", "plus")
    return [
        verdict(scorer, f"pass@1,{tests}", 0.0, status=TIMED_OUT, detail=detail)
        for scorer in (("evalplus",) if _dataset(document) == "mbpp" else ("evalplus", "evalplus-repaired"))
        for tests in names
    ]


def run_checks(
    program: str, document: dict[str, Any], expected: dict[str, Any], minimum: float
) -> dict[str, Check]:
    """EvalPlus' verdict per set of tests, ``base`` and (when the document has them) ``plus``.

    The plus tests are not run when the base tests failed: EvalPlus counts such an answer as failing both.
    """
    checks = {"base": _check(program, document, "base", expected, minimum)}
    if document["plus_input"] is not None:
        base = checks["base"]
        checks["plus"] = (
            base if base.status != _PASS else _check(program, document, "plus", expected, minimum)
        )
    return checks


def _check(
    program: str, document: dict[str, Any], tests: str, expected: dict[str, Any], minimum: float
) -> Check:
    from evalplus import eval as evalplus_eval

    reference_times = expected[f"{tests}_time"]
    inputs = _inputs(document, tests)
    with _observed(evalplus_eval) as observed:
        status, details = evalplus_eval.untrusted_check(
            _dataset(document),
            program,
            inputs,
            document["entry_point"],
            expected[tests],
            document["atol"],
            reference_times,
            fast_check=True,
            min_time_limit=minimum,
        )
    if status == _TIMEOUT:
        is_timed_out = observed.is_expired
        detail = "whole check ran out of time" if is_timed_out else "the process ended before the tests did"
    else:
        is_timed_out = status == _FAIL and observed.alarms.value > 0
        detail = "a test ran out of time" if is_timed_out else f"{sum(details)} of {len(inputs)} tests passed"
    return Check(
        status=status, num_run=len(details), is_timed_out=is_timed_out, detail=f"{tests}: {status}, {detail}"
    )


def _dataset(document: dict[str, Any]) -> str:
    """EvalPlus' name of the set that the task belongs to."""
    return {"HumanEval": "humaneval", "Mbpp": "mbpp"}[document["task_id"].partition("/")[0]]


def _inputs(document: dict[str, Any], tests: str) -> list[Any]:
    """The arguments of every test, as EvalPlus makes them from what JSON can hold."""
    from evalplus.data.mbpp import mbpp_deserialize_inputs

    inputs: list[Any] = json.loads(document[f"{tests}_input"])
    if _dataset(document) == "mbpp":
        inputs = mbpp_deserialize_inputs(document["task_id"], inputs)
    return inputs


def _verdicts(
    scorer: str, checks: dict[str, Check], document: dict[str, Any], found: str, program: str
) -> list[dict[str, Any]]:
    return [
        verdict(
            scorer,
            f"pass@1,{tests}",
            float(all(checks[name].status == _PASS for name in ("base", tests))),
            status=TIMED_OUT if check.is_timed_out else SCORED,
            detail=f"{check.detail}; {found}",
            extracted=program,
        )
        for tests, check in checks.items()
    ]


class _Observed:
    """What was seen of a check: ``alarms`` of single tests that went off, and whether the whole ran out of time."""

    def __init__(self) -> None:
        self.alarms: Any = multiprocessing.Value("i", 0)
        self.is_expired = False


@contextlib.contextmanager
def _observed(evalplus_eval: Any) -> Iterator[_Observed]:
    """Watch the process that EvalPlus forks, and put its limits off while it waits for a processor.

    Also adds our own guard to EvalPlus', in that process only.
    """
    from dlmgrid.workers.benchmarks.program_runner import deny_outside

    observed = _Observed()
    original_limit, original_guard = evalplus_eval.time_limit, evalplus_eval.reliability_guard
    original_multiprocessing = evalplus_eval.multiprocessing

    class PatientProcess(multiprocessing.Process):
        def join(self, timeout: float | None = None) -> None:
            super().join(timeout)
            assert timeout is not None
            patience = Patience(timeout, str(self.pid), before=0.0)
            while self.is_alive() and (owed := patience.owed()):
                super().join(owed)
            observed.is_expired = self.is_alive()

    @contextlib.contextmanager
    def watched_limit(seconds: float) -> Iterator[None]:
        patience = Patience(seconds)
        with original_limit(seconds):
            raise_timeout = signal.getsignal(signal.SIGALRM)

            def ring(number: int, frame: FrameType | None) -> None:
                if owed := patience.owed():
                    _set_timer(signal.ITIMER_REAL, owed)
                    return
                observed.alarms.value += 1
                raise_timeout(number, frame)  # type: ignore[operator, misc]

            signal.signal(signal.SIGALRM, ring)
            yield

    def guard(**limits: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        original_guard(**limits)
        deny_outside(tempfile.gettempdir())

    evalplus_eval.time_limit, evalplus_eval.reliability_guard = watched_limit, guard
    evalplus_eval.multiprocessing = SimpleNamespace(Process=PatientProcess)
    try:
        yield observed
    finally:
        evalplus_eval.time_limit, evalplus_eval.reliability_guard = original_limit, original_guard
        evalplus_eval.multiprocessing = original_multiprocessing


def expected_outputs(document: dict[str, Any], cache: Path) -> dict[str, Any]:
    """EvalPlus' expected outputs and reference times for the document's tests: ``base``, ``base_time``, ….

    Kept in ``cache`` under a hash of the task, its inputs, the EvalPlus and the Python version; written whole
    or not at all, so any number of processes may share the folder.
    """
    from evalplus.eval._special_oracle import MBPP_OUTPUT_NOT_NONE_TASKS
    from evalplus.gen.util import trusted_exec

    result: dict[str, Any] = {}
    is_match = _dataset(document) == "mbpp" and document["entry_point"] in MBPP_OUTPUT_NOT_NONE_TASKS
    reference = document["prompt"] + document["canonical_solution"]
    for tests in ("base", "plus"):
        if document[f"{tests}_input"] is None:
            continue
        name = document["task_id"].replace("/", "_")
        version = importlib.metadata.version("evalplus")
        key = [version, sys.version, document["task_id"], reference, document[f"{tests}_input"]]
        path = cache / f"{name}-{tests}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]}.pickle"
        if not path.is_file():
            with time_limit(GROUND_TRUTH_SECONDS):
                computed = trusted_exec(
                    reference,
                    _inputs(document, tests),
                    document["entry_point"],
                    record_time=True,
                    output_not_none=is_match,  # what a match object says is not compared, nor can it be stored
                )
            _write_whole(path, pickle.dumps(computed))
        result[tests], result[f"{tests}_time"] = pickle.loads(path.read_bytes())
    return result


def _write_whole(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)


_CHECKED = "checked_find_zero"


def repaired(program: str, document: dict[str, Any]) -> str:
    """``program`` with HumanEval/32's oracle as a function: is the polynomial within ``atol`` of 0 there?"""
    return (
        f"{program}\n\ndef {_CHECKED}(xs):\n"
        f"    import math\n"
        f"    x = {document['entry_point']}(xs)\n"
        f"    return bool(abs(sum(c * math.pow(x, i) for i, c in enumerate(xs))) <= {document['atol']!r})\n"
    )


def _repaired_task(document: dict[str, Any]) -> dict[str, Any]:
    return {**document, "entry_point": _CHECKED, "atol": 0}


def _repaired(expected: dict[str, Any]) -> dict[str, Any]:
    return {
        name: values if name.endswith("_time") else [True] * len(values) for name, values in expected.items()
    }
