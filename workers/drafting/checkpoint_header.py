"""What a drafter's safetensors file says of itself, and whether its tensors can be a network's. No torch here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dlmgrid.workers.errors import InputError

HEADER = "dlmgrid"
"""The metadata key of format, card and what else the kind of file needs, as JSON."""

_KINDS = {"card": dict, "shape": dict, "target": str}


def read_header(
    path: Path, what: str, formats: Sequence[str], *, needs: Sequence[str], make_it: str
) -> dict[str, Any]:
    """The header of ``what`` (``order model``, …) in one of ``formats``, with the keys that it ``needs``.

    ``make_it`` is the command that makes such a file. Raises InputError for a file that is missing, unreadable,
    damaged, of another format, or holds a tensor that is no finite floating-point numbers.
    """
    from safetensors import SafetensorError, safe_open

    if path.is_dir():
        raise InputError(f"{what} {path} is a folder; name the .safetensors file in it")
    if not path.is_file():
        raise InputError(f"{what} {path} does not exist; make one with {make_it} --out {path}")
    try:
        path.open("rb").close()
    except OSError as error:
        raise InputError(f"{what} {path} cannot be read ({error.strerror})") from error
    try:
        with safe_open(str(path), framework="numpy") as file:
            header = json.loads((file.metadata() or {}).get(HEADER, "{}"))
            if not isinstance(header, dict):
                raise ValueError("its header is no JSON object")
            found = header.get("format", "no format")
            if found not in formats:
                raise InputError(
                    f"{what} {path}: it holds {found}, this version reads the features of {' and '.join(formats)}; "
                    "train it again"
                )
            for key, kind in _KINDS.items():
                if key in (*needs, *header) and not isinstance(header.get(key), kind):
                    raise ValueError(f"its header has no whole {key}")
            names: list[str] = file.keys()
            for name in names:
                _check_tensor(path, name, file.get_tensor(name))
    except (SafetensorError, OSError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{what} {path}: not a whole safetensors file ({error}); train it again") from error
    return header


def _check_tensor(path: Path, name: str, tensor: np.ndarray[Any, Any]) -> None:
    """A network with NaN would draft nothing, and say nothing; one of integers was cut."""
    if not np.issubdtype(tensor.dtype, np.floating):
        raise InputError(
            f"{path}: tensor {name} holds {tensor.dtype} numbers; the file is damaged, train it again"
        )
    if not bool(np.isfinite(tensor).all()):
        raise InputError(f"{path}: tensor {name} holds NaN or infinity; the file is damaged, train it again")
