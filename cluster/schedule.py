"""Which actor runs what next, and what becomes of a unit that failed. No Ray here: plain state, easy to test.

An actor keeps its model until that model's queue is empty. A chain's dependents go to the actor that
finished its reference; one that would idle takes over the last dependent waiting for a busy actor, since
reference rows are read from committed files and all actors of a run share one runtime fingerprint. A failed
unit is retried, split into single items, or given up, so that one poison item costs two deaths and the grid
goes on.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dlmgrid.cluster.failures import Failure
from dlmgrid.cluster.plan import Chain, split_unit
from dlmgrid.workers.units import Key, WorkUnit

MAX_DEATHS = 2
MAX_ATTEMPTS = 20


@dataclass(slots=True)
class _Started:
    """A chain under way: its dependents wait until every key of its reference is settled."""

    pending: set[Key]
    dependents: tuple[WorkUnit, ...]


class Scheduler:
    """Hands out units to numbered actors. Every unit it hands out comes back through :meth:`finish`
    (stored, or given up and recorded) or :meth:`fail` or :meth:`requeue`."""

    def __init__(self, chains: Iterable[Chain]) -> None:
        self._queues: dict[str, deque[Chain]] = {}
        for chain in chains:
            self._queues.setdefault(chain.checkpoint, deque()).append(chain)
        self._model: dict[int, str] = {}
        self._ready: dict[int, deque[WorkUnit]] = {}
        self._loose: dict[str, deque[WorkUnit]] = {}
        self._started: dict[str, _Started] = {}
        self._out: dict[int, int] = {}
        self._deaths: Counter[tuple[str, Key]] = Counter()
        self.num_retried = 0

    @property
    def has_work(self) -> bool:
        """Whether a unit waits to be handed out (units handed out and dependents behind them aside)."""
        return any(self._queues.values()) or any(self._ready.values()) or any(self._loose.values())

    @property
    def num_chains(self) -> int:
        return sum(map(len, self._queues.values()))

    def next_unit(self, actor: int) -> WorkUnit | None:
        """The next unit for this actor, or None: nothing to do, or not before its present calls are back."""
        unit = self._pick(actor)
        if unit is not None:
            self._model[actor] = unit.checkpoint
            self._out[actor] = self._out.get(actor, 0) + 1
        return unit

    def finish(self, unit: WorkUnit, actor: int) -> None:
        """Every key of ``unit`` is stored, with rows or with errors."""
        self._out[actor] -= 1
        reference = unit.cell.reference().cell_key
        if unit.cell.cell_key != reference:
            return
        for key in unit.keys:
            started = self._started.pop(_slot(reference, key), None)
            if started is None:
                continue
            started.pending.discard(key)
            if not started.pending:
                self._ready.setdefault(actor, deque()).extend(started.dependents)

    def fail(self, unit: WorkUnit, actor: int, failure: Failure) -> bool:
        """Decide about a unit that failed. True: it is given up; store error rows, then :meth:`finish` it."""
        if failure is Failure.INPUT or unit.attempt >= MAX_ATTEMPTS:
            return True
        if failure is Failure.OUT_OF_MEMORY:
            if unit.max_in_flight > 1:
                retries = [replace(unit, max_in_flight=unit.max_in_flight // 2, attempt=unit.attempt + 1)]
            elif len(unit.keys) > 1:
                retries = split_unit(unit)
            else:
                return True
        elif failure is Failure.PREEMPTED:
            retries = [replace(unit, attempt=unit.attempt + 1)]
        else:
            places = [(unit.cell.cell_key, key) for key in unit.keys]
            self._deaths.update(places)
            if len(places) == 1 and self._deaths[places[0]] >= MAX_DEATHS:
                return True
            retries = split_unit(unit)
        self._out[actor] -= 1
        self.num_retried += 1
        self._loose.setdefault(unit.checkpoint, deque()).extend(retries)
        return False

    def requeue(self, unit: WorkUnit, actor: int) -> None:
        """A unit that was handed out but never ran."""
        self._out[actor] -= 1
        self._loose.setdefault(unit.checkpoint, deque()).appendleft(unit)

    def forget_actor(self, actor: int) -> None:
        """The actor is gone (its calls already came back): what waited for it may run anywhere."""
        for unit in self._ready.pop(actor, ()):
            self._loose.setdefault(unit.checkpoint, deque()).append(unit)
        self._model.pop(actor, None)

    def _pick(self, actor: int) -> WorkUnit | None:
        own = self._ready.get(actor)
        if own:
            return own.popleft()
        model = self._model.get(actor)
        if model is not None:
            unit = self._of_model(model, actor)
            if unit is not None:
                return unit
            if self._out.get(actor, 0):
                return None
            unit = self._take_over(actor, model)
            if unit is not None:
                return unit
        waiting = [name for name in {**self._loose, **self._queues} if self._size(name)]
        if not waiting:
            return self._take_over(actor, None)
        users = Counter(self._model.values())
        return self._of_model(max(waiting, key=lambda name: self._size(name) / (1 + users[name])), actor)

    def _take_over(self, actor: int, model: str | None) -> WorkUnit | None:
        """The last unit that waits for the busy actor with the most of them; of ``model`` alone where one is given."""
        waiting = [
            queue
            for other, queue in self._ready.items()
            if other != actor
            and self._out.get(other, 0)
            and queue
            and (model is None or queue[-1].checkpoint == model)
        ]
        return max(waiting, key=len).pop() if waiting else None

    def _size(self, model: str) -> int:
        return len(self._loose.get(model, ())) + len(self._queues.get(model, ()))

    def _of_model(self, model: str, actor: int) -> WorkUnit | None:
        loose = self._loose.get(model)
        if loose:
            return loose.popleft()
        queue = self._queues.get(model)
        if not queue:
            return None
        chain = queue.popleft()
        if chain.reference is None:
            self._ready.setdefault(actor, deque()).extend(chain.dependents)
            return self._ready[actor].popleft()
        reference = chain.reference.cell.cell_key
        started = _Started(pending=set(chain.reference.keys), dependents=chain.dependents)
        for key in chain.reference.keys:
            self._started[_slot(reference, key)] = started
        return chain.reference


def _slot(reference: str, key: Key) -> str:
    return f"{reference}/{key.repeat}/{key.item_id}"
