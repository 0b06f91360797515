"""``dlmgrid calibrate TRAJ --method spiffy|spot_gamma --out FILE``: what a drafter learns from recorded runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlmgrid.workers.drafting.spiffy_graph import FORMAT
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.out_file import check_out_file, check_own_json, has_format
from dlmgrid.workers.partial_files import write_whole

if TYPE_CHECKING:
    from dlmgrid.workers.drafting.gamma_calibration import GammaPoint
    from dlmgrid.workers.drafting.order_checkpoint import OrderCheckpoint
    from dlmgrid.workers.trajectories.trajectory import Trajectory

METHODS = ("spiffy", "spot_gamma")


def command(
    trajectories: Annotated[
        Path, typer.Argument(metavar="TRAJ", help="Folder of dlmgrid record, of a calibration set.")
    ],
    method: Annotated[str, typer.Option("--method", help="spiffy or spot_gamma.")],
    out: Annotated[Path, typer.Option("--out", help="JSON file to write; spiffy draws FILE.svg beside it.")],
    budget: Annotated[int, typer.Option(min=1, help="Nodes of the graph; the budget γ is chosen at.")] = 20,
    selection: Annotated[
        str | None,
        typer.Option(help="Spiffy: marginal_gain (the default), connected_count or degree_1."),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="SPOT-γ: the order model, a file or `reference`.")
    ] = None,
    max_rise: Annotated[
        float | None,
        typer.Option(min=0, help="SPOT-γ: forwards a generation that the floor may cost; default 4."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Take only the runs recorded at this temperature.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="SPOT-γ: cpu (the default) or cuda, for the order model.")
    ] = None,
) -> None:
    """Calibrate a drafter on recorded draft-free runs. Runs of test items are refused."""
    if method not in METHODS:
        raise InputError(f"--method {method!r} is not calibrated; known: {', '.join(METHODS)}")
    check_out_file(out, "--out", ".json", beside=[".svg"] if method == "spiffy" else [])
    if method == "spiffy":
        check_own_json(out, "--out", "draft graph", has_format(FORMAT))
    else:
        check_own_json(out, "--out", "calibration of γ", lambda values: values.get("method") == "spot_gamma")
    of_spiffy = {"--selection": selection}
    of_gamma = {"--checkpoint": checkpoint, "--max-rise": max_rise, "--device": device}
    foreign = of_gamma if method == "spiffy" else of_spiffy
    for name, value in foreign.items():
        if value is not None:
            raise InputError(f"{name} is no option of --method {method}; leave it out")
    if method == "spot_gamma" and checkpoint is None:
        raise InputError("--method spot_gamma needs --checkpoint, the order model that drafts")
    from dlmgrid.workers.drafting.order_checkpoint import find_order_checkpoint, read_order_checkpoint
    from dlmgrid.workers.runtime import check_device
    from dlmgrid.workers.trajectories.files import unrecorded_text
    from dlmgrid.workers.trajectories.trajectory import load_trajectories

    device = check_device(device or "cpu")
    if method == "spiffy" and temperature is None:
        _check_one_temperature(trajectories)
    if missing := unrecorded_text(trajectories):
        typer.echo(f"note: {missing}", err=True)
    file = None if checkpoint is None else read_order_checkpoint(find_order_checkpoint(checkpoint))
    runs = [
        run
        for run in load_trajectories(trajectories, records=file.records if file else ())
        if temperature is None or run.temperature == temperature
    ]
    if not runs and temperature is not None:
        raise InputError(f"{trajectories}: nothing is recorded at temperature {temperature:g}")
    if file is None or checkpoint is None:
        _calibrate_spiffy(runs, out, budget, selection or "marginal_gain")
    else:
        points = _sweep(runs, file, budget, device)
        _choose_gamma(runs, points, out, budget, checkpoint, file, 4.0 if max_rise is None else max_rise)


def _check_one_temperature(trajectories: Path) -> None:
    """Raises InputError for runs at several temperatures, from their names, before their steps are read."""
    from dlmgrid.workers.trajectories.files import recorded_generations

    found = sorted({generation.cell.temperature for generation in recorded_generations(trajectories)})
    if len(found) > 1:
        shown = ", ".join(f"{value:g}" for value in found)
        raise InputError(
            f"{trajectories} holds runs at the temperatures {shown}; a draft graph belongs to one: take it by "
            f"--temperature {found[0]:g}"
        )


def _calibrate_spiffy(runs: Sequence[Trajectory], out: Path, budget: int, selection: str) -> None:
    from dlmgrid.workers.drafting.spiffy_calibration import calibrate_graph
    from dlmgrid.workers.drafting.spiffy_graph import save_graph
    from dlmgrid.workers.drafting.spiffy_picture import save_picture

    graph = calibrate_graph(runs, budget=budget, selection=selection)
    save_graph(graph, out)
    save_picture(graph, out.with_suffix(".svg"))
    typer.echo(
        f"wrote {out} and {out.with_suffix('.svg')}: {len(graph.nodes)} nodes by {selection} from {graph.num_roots} "
        f"roots ({graph.fingerprint}); in a grid: {{name: spiffy, graph: {out}}}"
    )


def _sweep(runs: Sequence[Trajectory], file: OrderCheckpoint, budget: int, device: str) -> list[GammaPoint]:
    from dlmgrid.workers.drafting.calibration_data import check_calibration
    from dlmgrid.workers.drafting.gamma_calibration import sweep_gamma
    from dlmgrid.workers.drafting.order_checkpoint import load_order_model

    check_calibration(runs)
    for run in runs:
        if file.target not in ("", run.settings["weight_fingerprint"]):
            raise InputError(
                f"order model {file.path}: it reads tokens of other weights ({file.target}) than the recorded runs are "
                f"of ({run.settings['weight_fingerprint']})"
            )
    return sweep_gamma(runs, load_order_model(file.path), budget=budget, device=device)


def _choose_gamma(
    runs: Sequence[Trajectory],
    points: Sequence[GammaPoint],
    out: Path,
    budget: int,
    checkpoint: str,
    file: OrderCheckpoint,
    max_rise: float,
) -> None:
    from dlmgrid.workers.drafting.calibration_data import describe_calibration
    from dlmgrid.workers.drafting.gamma_calibration import choose_gamma

    for point in points:
        typer.echo(
            f"gamma {point.gamma:<5g} forwards {point.forwards:7.2f}  drafted {point.drafted_nodes:8.1f}"
        )
    chosen = choose_gamma(points, max_rise)
    if chosen is None:
        raise InputError(
            f"every floor costs more than {max_rise:g} forwards a generation at budget {budget}; raise --max-rise"
        )
    record = {
        "method": "spot_gamma",
        "gamma": chosen.gamma,
        "budget": budget,
        "max_rise": max_rise,
        "order_model": file.fingerprint,
        "sweep": [asdict(point) for point in points],
        "calibration": describe_calibration(runs),
    }
    write_whole(out, json.dumps(record, indent=1) + "\n")
    typer.echo(
        f"wrote {out}; in a grid: {{name: spot_gamma, checkpoint: {checkpoint}, gamma: {chosen.gamma:g}}}"
    )
