"""The folder of this user's derived and fetched data: DLMGRID_CACHE, else the user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path

from dlmgrid.workers.errors import InputError

CACHE_VARIABLE = "DLMGRID_CACHE"


def cache_folder() -> Path:
    """The folder's path; it need not exist. Everything in it may be deleted."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given).expanduser().resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlmgrid"


def make_cache_folder() -> Path:
    """:func:`cache_folder`, made if need be. Raises InputError when it cannot be made."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{folder} cannot be created ({error}); set {CACHE_VARIABLE} to a writable folder"
        ) from error
    return folder
