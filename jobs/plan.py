"""``dlmgrid plan GRID``: what a run would do, without doing it: cells, keys, units, cost.

With ``--out`` it says what is still missing there; with ``--units FILE`` it writes the work units as JSON, for
``dlmgrid decode`` on a machine without Ray. Weights are read only for these two, since cell keys need them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dlmgrid.cluster.cells import CellWork, make_cells
from dlmgrid.cluster.cost import forwards_per_row
from dlmgrid.cluster.decoder_text import decoder_text, other_settings, unnamed_settings
from dlmgrid.cluster.grid import read_grid
from dlmgrid.cluster.lock import RunLock
from dlmgrid.cluster.out_folder import check_out
from dlmgrid.cluster.plan import Chain, UnitSettings, plan_chains
from dlmgrid.cluster.run import (
    copy_drafters,
    look_up,
    recorded_works,
    refuse_another_grid,
    refuse_unrecorded_work,
)
from dlmgrid.cluster.sources import Sources, installed_sources
from dlmgrid.cluster.store import Store
from dlmgrid.jobs.console import WIDTH_OF_A_LOG
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.out_file import check_out_file
from dlmgrid.workers.partial_files import write_whole
from dlmgrid.workers.unit_file import read_units
from dlmgrid.workers.units import WorkUnit

MAX_CELLS_SHOWN = 1000


def command(
    grid: Annotated[Path, typer.Argument(help="Grid file (YAML).")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Output folder: plan only what is missing.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most this many items of each benchmark.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Folder with the benchmarks' data, instead of the hub.")
    ] = None,
    units: Annotated[
        Path | None, typer.Option("--units", help="Write the work units as JSON; needs --out.")
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Plan what dlmgrid record would do: draft-free runs, recorded.")
    ] = False,
) -> None:
    """Show a grid's cells, keys, work units and cost; decodes nothing."""
    if units is not None:
        check_out_file(units, "--units")
    show_plan(grid, installed_sources(), out=out, limit=limit, data=data, units=units, records=record)


def show_plan(
    grid_path: Path,
    sources: Sources,
    *,
    out: Path | None,
    limit: int | None,
    data: str | None,
    units: Path | None,
    records: bool = False,
) -> None:
    """Print the plan of a grid, and write its units when asked; with ``records`` those of ``dlmgrid record``.

    Raises InputError for bad input.
    """
    if units is not None and out is None:
        raise InputError("--units needs --out: the units name files of the output folder")
    if units is not None:
        _check_units(units)
    if out is not None:
        out = check_out(out)
    grid = read_grid(grid_path).grid
    asked = look_up(grid, sources, data=data, limit=limit, origin=str(grid_path), records=records)
    for remark in asked.remarks:
        typer.echo(f"note: {remark}")
    store: Store | None = None
    fingerprints = {str(model.folder): "" for model in asked.models}
    if out is not None:
        store = Store(out)
        store.load(repair=False, say=typer.echo)
        store.load_staged(grid.record if records else None)
        fingerprints = {str(model.folder): sources.weight_fingerprint(model.folder) for model in asked.models}
    inputs = (out or Path()) / "inputs"
    works = make_cells(grid, asked.models, asked.questions, fingerprints, inputs)
    if store is not None:
        refuse_another_grid(store, works)
    if records:
        works = recorded_works(works, store, grid.record)
    elif store is not None:
        refuse_unrecorded_work(store, works)
    settings = UnitSettings(
        run_id="planned",
        device=grid.resources.device,
        num_actors=grid.resources.num_actors or 1,
        items_per_unit=grid.resources.items_per_unit,
        trajectories=str(store.trajectories) if records and store is not None else "",
        records=tuple(grid.record) if records else (),
        drafts=grid.draft_place,
    )
    chains = plan_chains(works, store, settings)
    _print_cells(works, store, shows_keys=store is not None)
    _print_totals(works, chains, store)
    if units is not None and store is not None:
        store.create()
        lock = RunLock(store.out / "run.lock", "plan")
        lock.acquire()
        try:
            if records:
                store.mark_recording(
                    {work.cell: work.keys for work in works},
                    {work.cell.cell_key: work.default_block_length for work in works},
                )
            for questions in asked.questions:
                store.write_inputs(questions.file_name, questions.items)
            copy_drafters(store, works)
        finally:
            lock.release()
        planned = name_files(chains, store)
        write_whole(units, json.dumps([asdict(unit) for unit in planned], indent=1) + "\n")
        typer.echo(
            f"wrote {len(planned)} units to {units}; next: dlmgrid decode {shlex.quote(str(units))} "
            f"(with --part I/N in each of N processes), then dlmgrid {'record' if records else 'run'}"
        )


def _check_units(units: Path) -> None:
    """Raises InputError for a place that no file of units can be written to, or that holds another file."""
    if units.is_dir() or not units.absolute().parent.is_dir():
        raise InputError(f"--units {units}: give a file in a folder that exists")
    if units.exists():
        try:
            read_units(units)
        except InputError as error:
            raise InputError(
                f"--units {units} exists and is no file of work units, so it is not overwritten; give another name"
            ) from error


def name_files(chains: Sequence[Chain], store: Store) -> list[WorkUnit]:
    """The units in the order to run them, each with its output in ``staging/``, where a later run adopts it.

    A unit whose reference is planned too reads that one's output.
    """
    named: list[WorkUnit] = []
    for chain in chains:
        for unit in chain.units:
            shards: tuple[str, ...] = ()
            if chain.reference is not unit:
                stored = store.shards_of(unit.cell.reference().cell_key, unit.keys)
                shards = tuple(str(store.path_of(shard.unit_key)) for shard in stored)
                if chain.reference is not None:
                    shards += (str(store.staging / f"{chain.reference.unit_key}.parquet"),)
            output = str(store.staging / f"{unit.unit_key}.parquet")
            named.append(replace(unit, output=output, reference_shards=shards))
    return named


def _print_cells(works: Sequence[CellWork], store: Store | None, *, shows_keys: bool) -> None:
    table = Table(box=None, pad_edge=False)
    names = ["model", "benchmark", "T", "decoder", "method", "D", "rows", "missing", "forwards/row ≤"]
    shown = works[:MAX_CELLS_SHOWN]
    settings = [work.cell.to_dict() for work in shown]
    varied = unnamed_settings(settings)
    if varied:
        names.append("and")
    for name in ["cell", *names] if shows_keys else names:
        table.add_column(
            name, justify="left" if name in ("cell", "model", "benchmark", "method", "and") else "right"
        )
    for work, own in zip(shown, settings, strict=True):
        cell = work.cell
        missing = len(work.keys if store is None else store.missing(cell.cell_key, work.keys))
        values = [
            f"{cell.model}@{cell.revision}" if cell.revision else cell.model,
            cell.benchmark,
            f"{cell.temperature:g}",
            decoder_text(own),
            cell.method,
            str(cell.budget),
            str(len(work.keys)),
            str(missing),
            str(forwards_per_row(cell)),
        ]
        if varied:
            values.append(other_settings(own, varied))
        table.add_row(*([cell.cell_key, *values] if shows_keys else values))
    Console(width=WIDTH_OF_A_LOG).print(table)
    if len(works) > MAX_CELLS_SHOWN:
        typer.echo(f"… and {len(works) - MAX_CELLS_SHOWN} more cells")


def _print_totals(works: Sequence[CellWork], chains: Sequence[Chain], store: Store | None) -> None:
    num_rows = sum(len(work.keys) for work in works)
    units = [unit for chain in chains for unit in chain.units]
    num_missing = sum(len(unit.keys) for unit in units)
    forwards = sum(forwards_per_row(unit.cell) * len(unit.keys) for unit in units)
    where = "" if store is None else f" in {store.out}"
    typer.echo(
        f"{len(works)} cells, {num_rows} rows, {num_missing} missing{where}: {len(units)} units in {len(chains)} "
        f"chains; at most {forwards} sample forwards (drafting saves some of them, packing shares them)"
    )
