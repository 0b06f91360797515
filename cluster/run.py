"""One call of ``dlmgrid run``, from the grid file to its exit code.

Everything that can be wrong with the input is found before Ray starts or a model loads. Running again
resumes: only missing keys are planned, and with none missing no actor starts.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import ray

from dlmgrid.cluster.cells import (
    CellWork,
    Model,
    Questions,
    check_methods,
    check_prompts,
    check_size,
    find_models,
    load_questions,
    make_cells,
    naming,
)
from dlmgrid.cluster.connect import Connection, connect, num_slots
from dlmgrid.cluster.diagnosis import shadowing_folder
from dlmgrid.cluster.driver import UNIT_RUNNER, Driver, WorkersUnavailableError, fingerprint_weights
from dlmgrid.cluster.fingerprints import FingerprintCache, resolve_fingerprints
from dlmgrid.cluster.grid import Grid, GridFile
from dlmgrid.cluster.grid_remarks import grid_remarks
from dlmgrid.cluster.lock import RunLock
from dlmgrid.cluster.out_folder import ExitCode, check_out
from dlmgrid.cluster.plan import UnitSettings, plan_chains
from dlmgrid.cluster.progress import Counts, Progress, Style
from dlmgrid.cluster.records import RunRecord, new_run_id
from dlmgrid.cluster.sources import Sources
from dlmgrid.cluster.store import Store
from dlmgrid.workers.cell import MAY_OPEN_NOTHING
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.partial_files import write_whole
from dlmgrid.workers.staging_lock import alone_in_staging
from dlmgrid.workers.trajectories.files import open_trajectories, wanted_columns


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """What the user asked for. ``data`` is a local data source, ``limit`` caps the items of every
    benchmark; ``records`` runs the draft-free cells only and records their steps in ``OUT/trajectories``."""

    grid: GridFile
    out: Path
    sources: Sources
    data: str | None = None
    limit: int | None = None
    address: str | None = None
    style: Style = "auto"
    retry_failed: bool = False
    records: bool = False
    runner: str = UNIT_RUNNER

    def say(self, message: str) -> None:
        """A message outside the progress display."""
        if self.style != "quiet":
            print(message, file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A grid with its names looked up and its input checked, before weights are read. ``remarks`` say, one line
    each, what of it will not happen as written."""

    grid: Grid
    models: list[Model]
    questions: list[Questions]
    remarks: list[str]


def look_up(
    grid: Grid,
    sources: Sources,
    *,
    data: str | None,
    limit: int | None,
    origin: str = "grid",
    records: bool = False,
) -> Asked:
    """Check every name, checkpoint header, data source and chat template; ``records``: of a grid to be recorded.

    Raises InputError for the first that is wrong, its text preceded by ``origin``, the grid file.
    """
    with naming(origin):
        check_methods(grid, sources)
        check_size(grid)
        models = find_models(grid, sources)
        questions = load_questions(grid, sources, data, limit)
        check_size(grid, [len(asked.items) for asked in questions])
        check_prompts(models, questions, sources)
        make_cells(grid, models, questions, {str(model.folder): "" for model in models}, Path())
        check_kernels(grid)
    remarks = grid_remarks(grid, models, questions, limit, records=records)
    return Asked(grid=grid, models=models, questions=questions, remarks=remarks)


def check_kernels(grid: Grid) -> None:
    """Raises InputError for kernels that the planned device does not have."""
    if grid.kernels == "triton" and grid.resources.device == "cpu":
        raise InputError(
            "kernels: triton runs on a CUDA device and resources.device is cpu; add resources: {device: cuda}, or use "
            "kernels: torch"
        )


def run_grid(request: RunRequest) -> ExitCode:
    """Run a grid into a folder. Raises InputError for bad input; every other end is a code and a run
    record."""
    out = check_out(request.out)
    if (folder := shadowing_folder(Path.cwd())) is not None:
        raise InputError(
            f"{folder} hides the package dlmgrid from actors started here; call dlmgrid from another folder, best "
            "from within the clone"
        )
    asked = look_up(
        request.grid.grid,
        request.sources,
        data=request.data,
        limit=request.limit,
        origin=str(request.grid.path),
        records=request.records,
    )
    for remark in asked.remarks:
        request.say(f"note: {remark}")
    store = Store(out)
    store.create()
    run_id = new_run_id()
    lock = RunLock(out / "run.lock", run_id)
    lock.acquire(say=request.say)
    try:
        with alone_in_staging(out):
            return _Run(request, asked, store, run_id).execute()
    finally:
        lock.release()


class _Run:
    """One run on a locked folder."""

    def __init__(self, request: RunRequest, asked: Asked, store: Store, run_id: str) -> None:
        self._request = request
        self._asked = asked
        self._store = store
        self._run_id = run_id
        self._record = RunRecord(store.out, run_id, asked.grid.digest, request.grid.text)
        self._connection: Connection | None = None

    def execute(self) -> ExitCode:
        store, record = self._store, self._record
        store.load(repair=True, say=self._request.say)
        records = tuple(self._asked.grid.record) if self._request.records else None
        store.recover(records=records, say=self._request.say)
        record.begin()
        try:
            with _signals(_interrupt):
                works = self._works()
                is_complete = self._run_missing(works)
            code = outcome(store, works) if is_complete else ExitCode.INCOMPLETE
            statuses = {ExitCode.DONE: "done", ExitCode.INCOMPLETE: "stopped"}
            record.end(statuses.get(code, "failed"), int(code))
        except KeyboardInterrupt:
            code = ExitCode.INCOMPLETE
            record.end("stopped", int(code))
        except WorkersUnavailableError as error:
            code = ExitCode.INCOMPLETE
            record.end("incomplete", int(code), str(error))
            self._request.say(f"error: {error}")
        except BaseException as error:
            code = ExitCode.BAD_INPUT if isinstance(error, InputError) else ExitCode.INCOMPLETE
            record.end("error", int(code), f"{type(error).__name__}: {error}")
            raise
        finally:
            if self._connection is not None:
                self._connection.close()
        return code

    def _connect(self) -> Connection:
        if self._connection is None:
            self._connection = connect(self._request.address)
            _on_signals(_interrupt)  # ray.init sets its own, which would leave no record
            self._record.set(job_id=self._connection.job_id, ray_version=ray.__version__)
        return self._connection

    def _works(self) -> list[CellWork]:
        asked, store, request = self._asked, self._store, self._request

        def compute(folders: list[Path]) -> list[str]:
            return fingerprint_weights(
                request.sources.weight_fingerprint,
                folders,
                self._connect(),
                asked.grid.resources.wait_seconds,
                request.say,
            )

        cache = FingerprintCache(store.out / "fingerprints.json")
        fingerprints = resolve_fingerprints([model.folder for model in asked.models], cache, compute)
        works = make_cells(asked.grid, asked.models, asked.questions, fingerprints, store.inputs)
        refuse_another_grid(store, works)
        if request.records:
            works = recorded_works(works, store, asked.grid.record)
            store.mark_recording(
                {work.cell: work.keys for work in works},
                {work.cell.cell_key: work.default_block_length for work in works},
            )
        else:
            refuse_unrecorded_work(store, works, retry_failed=request.retry_failed)
        for questions in asked.questions:
            store.write_inputs(questions.file_name, questions.items)
        copy_drafters(store, works)
        write_whole(store.out / "grids" / f"{self._run_id}.yaml", request.grid.text)
        return works

    def _run_missing(self, works: Sequence[CellWork]) -> bool:
        """Run what is not stored yet. True: now everything is; False: stopped before that."""
        store, resources = self._store, self._asked.grid.resources
        if self._request.retry_failed:
            num_dropped = store.drop_failed({work.cell.cell_key for work in works})
            self._request.say(f"{num_dropped} rows with an error run again")
        num_wanted = sum(len(work.keys) for work in works)
        num_missing = sum(len(store.missing(work.cell.cell_key, work.keys)) for work in works)
        counts = Counts(num_wanted=num_wanted, num_stored=num_wanted - num_missing)
        self._record.set(num_keys=num_wanted, num_units=0)
        progress = Progress(store.out / "progress.json", counts, style=self._request.style)
        if not num_missing:
            with progress:
                return True
        connection = self._connect()
        settings = UnitSettings(
            run_id=self._run_id,
            device=resources.device,
            drafts=self._asked.grid.draft_place,
            num_actors=resources.num_actors or max(1, num_slots(resources)),
            items_per_unit=resources.items_per_unit,
            trajectories=str(store.trajectories) if self._request.records else "",
            records=tuple(self._asked.grid.record) if self._request.records else (),
        )
        chains = plan_chains(works, store, settings)
        self._record.set(num_units=sum(len(chain.units) for chain in chains))
        with progress:
            driver = Driver(
                store=store,
                record=self._record,
                progress=progress,
                counts=counts,
                connection=connection,
                resources=resources,
                runner=self._request.runner,
            )
            with _signals(driver.stop):
                is_complete = driver.run(chains)
        self._record.set(num_failed=counts.num_failed, num_actors=counts.num_actors)
        store.clear_staging()
        return is_complete


def copy_drafters(store: Store, works: Sequence[CellWork]) -> None:
    """Keep the learned and calibrated drafters of these cells in the output folder, where actors and checks read
    them."""
    for work in works:
        if work.drafter_source:
            store.write_drafter(Path(work.drafter_source), Path(work.drafter_path))


def refuse_another_grid(store: Store, works: Sequence[CellWork]) -> None:
    """Raises InputError when the folder holds cells and none of them is of this grid."""
    stored = store.cell_keys
    if stored and not stored & {work.cell.cell_key for work in works}:
        raise InputError(
            f"{store.out} holds another grid: none of its {len(stored)} cells is in this one (a model's "
            "weights count "
            "too); choose another --out"
        )


def recorded_works(
    works: Sequence[CellWork], store: Store | None, records: Sequence[str] = ()
) -> list[CellWork]:
    """The cells that are recorded: the draft-free ones. ``store`` is the folder to record in, where there is one.

    Raises InputError for runs that cannot be replayed, and for rows there whose steps were not recorded.
    """
    references = [work for work in works if work.cell.is_reference]
    if store is not None:
        refuse_unrecorded(store, references, records)
    refuse_idle_steps(references)
    return references


def refuse_unrecorded_work(store: Store, works: Sequence[CellWork], *, retry_failed: bool = False) -> None:
    """Raises InputError where draft-free rows would be decoded without their steps into a folder of recorded runs,
    which no replay could read any more."""
    references = [work for work in works if work.cell.is_reference]
    missing = sum(len(store.missing(work.cell.cell_key, work.keys)) for work in references)
    if retry_failed:
        shards = [shard for work in references for shard in store.shards_of(work.cell.cell_key, work.keys)]
        missing += sum(len(shard.failed) for shard in shards)
    if store.is_recording and missing:
        raise InputError(
            f"{store.out} is a folder of recorded runs, and {missing} draft-free rows of this grid would be decoded "
            "without a recording; use dlmgrid record (dlmgrid plan --record), or choose another --out"
        )


def refuse_idle_steps(works: Sequence[CellWork]) -> None:
    """Raises InputError for a decoder whose steps may open nothing: a state then stands for more than one step, and
    a replay could not tell them apart."""
    for work in works:
        if work.cell.decoder in MAY_OPEN_NOTHING:
            raise InputError(
                f"decoder {work.cell.decoder}: its steps may open nothing, so its runs cannot be replayed; record "
                "static, threshold or factor"
            )


def refuse_unrecorded(store: Store, works: Sequence[CellWork], records: Sequence[str] = ()) -> None:
    """Raises InputError when the folder holds draft-free rows of these cells whose steps were not recorded, or not
    with all that ``records`` names."""
    for work in works:
        for shard in store.shards_of(work.cell.cell_key, work.keys):
            has_rows = len(shard.failed) < len(shard.keys)
            path = store.trajectories / f"{shard.unit_key}.parquet"
            if has_rows and not path.exists():
                raise InputError(
                    f"{store.out} holds draft-free rows of this grid whose steps are not there (they were not "
                    "recorded, or their file is gone); choose another --out"
                )
            if has_rows:
                wanted_columns(path, open_trajectories(path), records)


def outcome(store: Store, works: Sequence[CellWork]) -> ExitCode:
    """The exit code of a complete store: exactness first, then failed rows; only rows of this grid count."""
    num_failed = num_inexact = 0
    for work in works:
        wanted = set(work.keys)
        for shard in store.shards_of(work.cell.cell_key, work.keys):
            num_failed += len(wanted.intersection(shard.failed))
            if work.cell.keeps_to_reference:
                num_inexact += len(wanted.intersection(shard.inexact))
    if num_inexact:
        return ExitCode.NOT_EXACT
    return ExitCode.ROWS_FAILED if num_failed else ExitCode.DONE


def _interrupt() -> None:
    raise KeyboardInterrupt


_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def _signals(action: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT do ``action`` meanwhile; only the main thread may set that, elsewhere nothing changes."""
    previous = {number: signal.getsignal(number) for number in _SIGNALS}
    _on_signals(action)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in previous.items():
                signal.signal(number, handler)


def _on_signals(action: Callable[[], None]) -> None:
    def handle(number: int, frame: FrameType | None) -> None:
        action()

    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            signal.signal(number, handle)
