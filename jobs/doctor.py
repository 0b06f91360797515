"""``dlmgrid doctor``: is this machine fit to run grids? One line a finding, each with its remedy.

Exit code 0 when nothing fails (warnings allowed), 2 otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dlmgrid.cluster.diagnosis import Level, diagnose


def command(
    data: Annotated[str | None, typer.Option(help="Folder with the benchmarks' data to look at.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Output folder to look at.")] = None,
) -> int:
    """Check this machine and its packages, with remedies."""
    findings = diagnose(data=data, out=out)
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        typer.echo(f"{finding.level.value:4}  {finding.subject:{width}}  {finding.state}{remedy}")
    return 2 if any(finding.level is Level.FAIL for finding in findings) else 0
