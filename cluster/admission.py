"""What an actor must share with the driver before it gets work: code, output folder, runtime."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import dlmgrid
from dlmgrid.cluster.plan import Chain
from dlmgrid.cluster.store import Store
from dlmgrid.workers.actor import ActorDescription
from dlmgrid.workers.errors import InputError


def admit(description: ActorDescription, out: Path, source: str, fingerprint: str | None) -> None:
    """Hold an actor against the driver's ``source`` digest and the ``fingerprint`` of the actors before it.

    Raises InputError when it runs other code, does not see the output folder, or computes with another
    runtime.
    """
    if (description.version, description.source_digest) != (dlmgrid.__version__, source):
        raise InputError(
            f"the driver runs dlmgrid {dlmgrid.__version__} ({source}) from {Path(dlmgrid.__file__).parent}, "
            f"{description.name} on {description.host} runs {description.version} "
            f"({description.source_digest}) "
            f"from {description.package}; give both the same code (submit with --working-dir)"
        )
    if not description.sees_output:
        raise InputError(
            f"{description.host} does not see {out}; --out must be on a file system that all nodes share"
        )
    if fingerprint is not None and description.runtime_fingerprint != fingerprint:
        raise InputError(
            f"{description.host} computes with another runtime than the first actor "
            f"({description.runtime_fingerprint} and {fingerprint}), so their bits cannot be compared; "
            "run on one kind of node"
        )


def check_references(chains: Iterable[Chain], store: Store, description: ActorDescription) -> None:
    """Raises InputError when stored serialized runs that are needed now were computed by another runtime."""
    for chain in chains:
        for unit in chain.dependents:
            for shard in store.shards_of(unit.cell.reference().cell_key, unit.keys):
                if shard.runtime_fingerprint != description.runtime_fingerprint:
                    raise InputError(
                        f"{store.out} holds serialized runs of another runtime "
                        f"({shard.runtime_fingerprint}; here "
                        f"{description.runtime_fingerprint}), so bits cannot be compared; use a new --out"
                    )
