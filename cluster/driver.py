"""The Ray loop: actors, a bounded window of calls for each, retries, commits. The only file with ray.wait
and ray.get.

No torch here and no GPU. Results come in as they finish; a batch of them is committed with two syncs.
Whatever kills this process, the store is whole: see :mod:`dlmgrid.cluster.store`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from dlmgrid.cluster.admission import admit, check_references
from dlmgrid.cluster.connect import (
    Connection,
    actor_options,
    cluster_amounts,
    describe_resources,
    describe_wait,
    num_slots,
)
from dlmgrid.cluster.failures import Failure, classify, first_line, raised_in_worker
from dlmgrid.cluster.grid import Resources
from dlmgrid.cluster.plan import Chain
from dlmgrid.cluster.progress import Counts, Progress
from dlmgrid.cluster.records import RunRecord
from dlmgrid.cluster.schedule import Scheduler
from dlmgrid.cluster.store import Store
from dlmgrid.workers.actor import ActorDescription, DecodeActor, source_digest
from dlmgrid.workers.errors import DlmgridError, InputError, OutOfMemoryError
from dlmgrid.workers.rows import Provenance, error_row
from dlmgrid.workers.tables import GENERATIONS, to_table, write_table
from dlmgrid.workers.units import WorkUnit

UNIT_RUNNER = "dlmgrid.workers.unit_runner:UnitRunner"
WINDOW = 2
MAX_FAILED_STARTS = 3
POLL_SECONDS = 0.5
SAY_SECONDS = 10.0


class WorkersUnavailableError(DlmgridError):
    """The cluster gives no workers any more; what is stored stays, the rest is left for another run."""


@dataclass(slots=True)
class _Call:
    unit: WorkUnit
    reference: Any
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    clock: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class _Slot:
    """A place for one actor. ``starting`` is its pending description; ``calls`` run in order."""

    index: int
    actor: Any = None
    starting: Any = None
    description: ActorDescription | None = None
    calls: deque[_Call] = field(default_factory=deque)

    @property
    def is_ready(self) -> bool:
        return self.description is not None

    @property
    def name(self) -> str:
        where = f" on {self.description.host}" if self.description else ""
        return f"actor-{self.index}{where}"


def fingerprint_weights(
    function: Callable[[Path], str],
    folders: Sequence[Path],
    connection: Connection,
    wait_seconds: float,
    say: Callable[[str], None],
) -> list[str]:
    """Have workers read the weights of these checkpoints. Raises InputError when no worker can within the
    wait."""
    task = ray.remote(num_cpus=1, max_retries=1)(function)
    pending = {task.remote(folder): folder for folder in folders}
    found: dict[Path, str] = {}
    deadline, next_word = time.monotonic() + wait_seconds, time.monotonic() + SAY_SECONDS
    while pending:
        done, _ = ray.wait(list(pending), timeout=POLL_SECONDS)
        for reference in done:
            folder = pending.pop(reference)
            try:
                found[folder] = ray.get(reference)
            except RayTaskError as error:
                raise raised_in_worker(error) from error
        now = time.monotonic()
        if now > next_word:
            say(
                f"waiting for the weight fingerprints of {len(pending)} checkpoints; the cluster has "
                f"{cluster_amounts()}"
            )
            next_word = now + SAY_SECONDS
        if pending and now > deadline:
            raise InputError(
                f"no worker read the weights of {next(iter(pending.values()))} within {wait_seconds:g} s; "
                "check that the cluster has a free CPU"
            )
    return [found[folder] for folder in folders]


class Driver:
    """Runs chains of work units to their end on a Ray that is already joined.

    ``runner`` names the class that decodes inside actors, as ``module:Class``. :meth:`stop` may be called
    from a signal handler.
    """

    def __init__(
        self,
        *,
        store: Store,
        record: RunRecord,
        progress: Progress,
        counts: Counts,
        connection: Connection,
        resources: Resources,
        runner: str = UNIT_RUNNER,
    ) -> None:
        self._store = store
        self._record = record
        self._progress = progress
        self._counts = counts
        self._connection = connection
        self._resources = resources
        self._runner = runner
        self._slots: list[_Slot] = []
        self._fingerprint: str | None = None
        self._failed_starts = 0
        self._unready_since = time.monotonic()
        self._next_word = self._unready_since + SAY_SECONDS
        self._next_growth = 0.0
        self._is_stopped = False
        self._num_sent = 0
        self._chains: Sequence[Chain] = ()
        self._source = source_digest()
        self._actor_class = ray.remote(DecodeActor)

    def stop(self) -> None:
        """Ask :meth:`run` to return soon; what is in flight is left for another run."""
        self._is_stopped = True

    def run(self, chains: Sequence[Chain]) -> bool:
        """Run every unit. True: all keys are stored; False: stopped.

        Raises InputError when no actor can exist or driver and actors differ, WorkersUnavailableError when
        workers are lost for good.
        """
        scheduler = Scheduler(chains)
        self._chains = chains
        try:
            while not self._is_stopped and (scheduler.has_work or any(slot.calls for slot in self._slots)):
                self._grow(scheduler)
                self._dispatch(scheduler)
                self._collect(scheduler)
                self._watch(scheduler)
                self._counts.num_retried = scheduler.num_retried
                self._counts.num_actors = sum(slot.is_ready for slot in self._slots)
                self._counts.cells = [
                    _label(call.unit) for slot in self._slots for call in list(slot.calls)[:1]
                ]
                self._progress.update()
        finally:
            for slot in self._slots:
                if slot.actor is not None:
                    ray.kill(slot.actor)
        return not self._is_stopped

    # --- actors

    def _grow(self, scheduler: Scheduler) -> None:
        """Start an actor in every empty slot, and open slots as the cluster and the work allow."""
        now = time.monotonic()
        if now >= self._next_growth:
            self._next_growth = now + SAY_SECONDS
            possible = num_slots(self._resources)
            if possible == 0 and self._connection.is_own:
                raise InputError(
                    f"no actor can start: each {describe_resources(self._resources)}; lower resources in "
                    "the grid"
                )
            target = max(1, min(self._resources.num_actors or possible, scheduler.num_chains))
            for index in range(len(self._slots), target):
                self._slots.append(_Slot(index=index))
        for slot in self._slots:
            if slot.actor is None and (scheduler.has_work or any(other.calls for other in self._slots)):
                self._start(slot)

    def _start(self, slot: _Slot) -> None:
        resources = self._resources
        options = actor_options(resources, slot.index)
        slot.actor = self._actor_class.options(**options).remote(
            name=f"actor-{slot.index}",
            runner=self._runner,
            device=resources.device,
            num_threads=resources.cpus_per_actor,
        )
        slot.starting = slot.actor.describe.remote(str(self._store.out / "run.lock"))

    def _welcome(self, slot: _Slot) -> None:
        """An actor came up (or failed to): hold it against the driver before it gets work."""
        try:
            description: ActorDescription = ray.get(slot.starting)
        except RayTaskError as error:
            cause = raised_in_worker(error)
            if isinstance(cause, InputError):
                raise cause from error
            self._lost_at_start(slot, cause)
            return
        except RayError as error:
            self._lost_at_start(slot, error)
            return
        admit(description, self._store.out, self._source, self._fingerprint)
        if self._fingerprint is None:
            check_references(self._chains, self._store, description)
            self._fingerprint = description.runtime_fingerprint
        slot.starting, slot.description, self._failed_starts = None, description, 0
        self._record.add_actor(description)
        self._progress.say(
            f"{slot.name} (process {description.pid}) runs dlmgrid {description.version} from "
            f"{description.package}"
        )

    def _lost_at_start(self, slot: _Slot, error: BaseException) -> None:
        self._clear(slot)
        self._failed_starts += 1
        self._progress.say(f"{slot.name} did not start: {first_line(error)}")
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise WorkersUnavailableError(
                f"{self._failed_starts} workers in a row did not start ({first_line(error)}); run `dlmgrid "
                "doctor` there"
            )

    def _clear(self, slot: _Slot) -> None:
        if slot.actor is not None:
            ray.kill(slot.actor)
        slot.actor = slot.starting = slot.description = None

    # --- calls

    def _dispatch(self, scheduler: Scheduler) -> None:
        for depth in range(WINDOW):
            for slot in self._slots:
                if slot.is_ready and len(slot.calls) == depth:
                    unit = scheduler.next_unit(slot.index)
                    if unit is not None:
                        self._send(slot, unit)

    def _send(self, slot: _Slot, unit: WorkUnit) -> None:
        self._num_sent += 1  # no two calls ever write to one file
        name = f"{unit.unit_key}.{unit.run_id}.{self._num_sent}.parquet"
        reference = unit.cell.reference().cell_key
        shards: list[str] = []
        if unit.cell.cell_key != reference:
            shards = [
                str(self._store.path_of(shard.unit_key))
                for shard in self._store.shards_of(reference, unit.keys)
            ]
        unit = replace(unit, output=str(self._store.staging / name), reference_shards=tuple(shards))
        slot.calls.append(_Call(unit=unit, reference=slot.actor.run.remote(unit)))

    def _collect(self, scheduler: Scheduler) -> None:
        waiting = [call.reference for slot in self._slots for call in slot.calls]
        waiting += [slot.starting for slot in self._slots if slot.starting is not None]
        if not waiting:
            return
        done, rest = ray.wait(waiting, timeout=POLL_SECONDS, fetch_local=False)
        if rest and done:
            done += ray.wait(rest, num_returns=len(rest), timeout=0, fetch_local=False)[0]
        ready = set(done)
        finished: list[tuple[_Slot, _Call, Any]] = []
        for slot in self._slots:
            if slot.starting in ready:
                self._welcome(slot)
            while slot.calls and slot.calls[0].reference in ready:
                call = slot.calls.popleft()
                if slot.calls:
                    slot.calls[0].clock = time.monotonic()
                try:
                    finished.append((slot, call, ray.get(call.reference)))
                except RayTaskError as error:
                    self._failed(scheduler, slot, call, raised_in_worker(error))
                except RayError as error:
                    self._failed(scheduler, slot, call, error)
        self._commit(scheduler, finished)

    def _commit(self, scheduler: Scheduler, finished: list[tuple[_Slot, _Call, Any]]) -> None:
        rejected = self._store.commit([(call.unit, result) for _, call, result in finished])
        for slot, call, _ in finished:
            error = rejected.get(call.unit.unit_key)
            if error is not None:
                self._failed(scheduler, slot, call, error)
                continue
            self._attempt(slot, call, "done", "")
            self._stored(scheduler, slot, call.unit)

    def _stored(self, scheduler: Scheduler, slot: _Slot, unit: WorkUnit) -> None:
        shard = self._store.shard(unit.unit_key)
        self._counts.num_done += len(shard.keys)
        self._counts.num_failed += len(shard.failed)
        self._counts.num_inexact += len(shard.inexact) if unit.cell.keeps_to_reference else 0
        scheduler.finish(unit, slot.index)

    # --- failures

    def _failed(self, scheduler: Scheduler, slot: _Slot, call: _Call, error: BaseException) -> None:
        failure = classify(error)
        unit = call.unit
        is_actor_suspect = not isinstance(error, InputError | OutOfMemoryError)
        if is_actor_suspect:
            self._replace(scheduler, slot)
            if self._store.adopt(unit):
                self._attempt(slot, call, failure, f"{first_line(error)} (after its rows were written)")
                self._stored(scheduler, slot, unit)
                return
        self._progress.say(
            f"{_label(unit)}, attempt {unit.attempt} on {slot.name}: {failure}: {first_line(error)}"
        )
        if not scheduler.fail(unit, slot.index, failure):
            self._attempt(slot, call, failure, first_line(error))
            return
        outcome = "quarantined" if is_actor_suspect else str(failure)
        self._attempt(slot, call, outcome, first_line(error))
        prefix = "" if failure is Failure.INPUT else f"{outcome} after {unit.attempt} attempts: "
        self._store_errors(unit, prefix + first_line(error))
        self._stored(scheduler, slot, unit)

    def _replace(self, scheduler: Scheduler, slot: _Slot) -> None:
        """Give the slot a fresh actor; calls queued behind the failed one never ran and go back."""
        for queued in reversed(slot.calls):
            scheduler.requeue(queued.unit, slot.index)
        slot.calls.clear()
        scheduler.forget_actor(slot.index)
        self._clear(slot)

    def _store_errors(self, unit: WorkUnit, error: str) -> None:
        assert self._fingerprint is not None
        provenance = Provenance(
            run_id=unit.run_id,
            actor="driver",
            attempt=unit.attempt,
            device=unit.device,
            runtime_fingerprint=self._fingerprint,
        )
        rows = [error_row(unit.cell, key, provenance, error) for key in unit.keys]
        write_table(unit.output, to_table(GENERATIONS, rows))
        is_stored = self._store.adopt(unit)
        assert is_stored, unit

    def _attempt(self, slot: _Slot, call: _Call, outcome: str, cause: str) -> None:
        self._record.add_attempt(
            call.unit,
            actor=slot.name,
            outcome=outcome,
            cause=cause,
            started_at=call.started_at,
            seconds=time.monotonic() - call.clock,
        )

    def _watch(self, scheduler: Scheduler) -> None:
        """Replace an actor whose running call takes too long; complain, then give up, while no actor is
        up."""
        now = time.monotonic()
        for slot in self._slots:
            if slot.calls and now - slot.calls[0].clock > self._resources.unit_seconds:
                seconds = self._resources.unit_seconds
                self._failed(
                    scheduler, slot, slot.calls.popleft(), TimeoutError(f"no answer for {seconds:g} s")
                )
        if any(slot.is_ready for slot in self._slots):
            self._unready_since = now
            return
        waited = now - self._unready_since
        if waited > self._resources.wait_seconds:
            message = f"no actor came up within {waited:.0f} s: {self._describe_wait()}"
            if self._fingerprint is None:
                raise InputError(f"{message}; add nodes, lower resources, or raise resources.wait_seconds")
            raise WorkersUnavailableError(f"{message}; run the same command again when the cluster is back")
        if now > self._next_word:
            self._next_word = now + SAY_SECONDS
            self._progress.say(f"waiting {waited:.0f} s for actors: {self._describe_wait()}")

    def _describe_wait(self) -> str:
        num_starting = sum(slot.starting is not None for slot in self._slots)
        why = describe_wait(self._resources, num_starting, is_own=self._connection.is_own)
        return f"each {describe_resources(self._resources)}; {why}"


def _label(unit: WorkUnit) -> str:
    cell = unit.cell
    method = "none" if cell.is_reference else f"{cell.method} D={cell.budget}"
    return f"{Path(cell.model).name} {cell.benchmark} {method} T={cell.temperature:g}"
