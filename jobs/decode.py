"""``dlmgrid decode UNITS``: decode planned work units in this process, without Ray.

Where the command line's packages are missing, ``python -m dlmgrid.workers.offline`` does the same. Exit codes: 0 done;
1 rows hold an error; 2 bad input; 4 a row that must equal its serialized run does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dlmgrid.workers.errors import InputError


def command(
    units: Annotated[Path, typer.Argument(help="File of work units, from dlmgrid plan --units.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Where the planned output folder is on this machine.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="Where the model's folder is on this machine.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or a CUDA device, instead of the planned one.")
    ] = None,
    compare: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Compare only the first N rows of each draft-free unit with their serialized run; the others are "
            "stored unchecked.",
        ),
    ] = None,
    part: Annotated[
        str, typer.Option("--part", metavar="I/N", help="Decode the I-th of N disjoint parts only.")
    ] = "1/1",
) -> int:
    """Decode planned work units here; the next run of the grid adopts the files.

    Several processes share a file of units, and a device, by one part each. Two of them must not have the same one.
    """
    number, _, count = part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise InputError(f"--part {part}: give I/N with 1 <= I <= N, as 2/4")
    from dlmgrid.workers.offline import decode_units

    decoded = decode_units(
        units,
        out=out,
        checkpoint=checkpoint,
        device=device,
        num_compared=compare,
        part=(int(number), int(count)),
        say=typer.echo,
    )
    return decoded.exit_code
