"""Names that a grid may give a model, and the published checkpoints known to run. No torch here."""

from __future__ import annotations

from pathlib import Path

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.families import known_models

__all__ = ["REFERENCE", "REFERENCE_FOLDER", "known_models", "resolve_checkpoint"]

REFERENCE = "reference"
REFERENCE_FOLDER = Path(__file__).parent / "reference"

_WANTED_FILES = ("*.json", "*.safetensors", "*.jinja", "merges.txt")


def resolve_checkpoint(name: str, revision: str | None = None, *, offline: bool = False) -> Path:
    """The folder of a model: the packaged reference model, a local folder, or a snapshot from the hub.

    ``revision`` is a branch, tag or commit of a hub repository. The hub's own environment (HF_HOME,
    HF_HUB_OFFLINE) is respected; with ``offline`` only its cache is looked at. Raises InputError, with the remedy,
    where the name leads nowhere, and for a revision of what has none.
    """
    if name == REFERENCE:
        if not (REFERENCE_FOLDER / "config.json").exists():
            raise InputError(
                f"model: the reference model is not in this installation ({REFERENCE_FOLDER}); "
                "train it with `python -m dlmgrid.jobs.train_reference`"
            )
        _refuse_revision(revision, "the shipped model")
        return REFERENCE_FOLDER
    folder = _local_folder(name)
    if folder is not None:
        _refuse_revision(revision, f"the local folder {name!r}")
        return folder
    if name and Path(name).expanduser().is_file():
        raise InputError(
            f"model: {name!r} is a file; a checkpoint is the folder of its config.json and weights, give that"
        )
    if not _is_repository(name):
        raise InputError(
            f"model: {name!r} is no folder here and no hub repository (want owner/name or a path)"
        )
    return _snapshot(name, revision, offline)


def _local_folder(name: str) -> Path | None:
    """The folder of that name, if there is one. Raises InputError for a name that no path can have."""
    try:
        folder = Path(name).expanduser()
        return folder.resolve() if name and folder.is_dir() else None
    except (OSError, RuntimeError, ValueError) as error:
        shown = name if len(name) <= 80 else f"{name[:77]}..."
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"model: {shown!r} is no usable path ({reason}); give another") from error


def _refuse_revision(revision: str | None, what: str) -> None:
    if revision:
        raise InputError(
            f"model: {what} has no revision {revision!r}; remove `revision` (it is for repositories of the hub)"
        )


def _is_repository(name: str) -> bool:
    owner, slash, rest = name.partition("/")
    return bool(slash and owner and rest) and "/" not in rest and owner[0] not in ".~"


def _snapshot(name: str, revision: str | None, offline: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise InputError(
            f"model: {name!r} needs the package huggingface_hub; pip install huggingface_hub"
        ) from error
    remedy = f"run `dlmgrid prefetch` where there is a network, or point HF_HOME at a cache that holds {name}"
    try:
        found = snapshot_download(
            name, revision=revision or None, allow_patterns=list(_WANTED_FILES), local_files_only=offline
        )
        return Path(found)
    except HFValidationError as error:
        raise InputError(f"model: {name!r} is no name of a hub repository (want owner/name)") from error
    except LocalEntryNotFoundError as error:
        raise InputError(
            f"model: {name!r} is not in the local cache and the hub cannot be reached; {remedy}"
        ) from error
    except HfHubHTTPError as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"model: the hub refuses {name!r} at {revision or 'its default revision'} ({reason})"
        ) from error
    except OSError as error:
        raise InputError(f"model: {name!r} cannot be fetched ({error}); {remedy}") from error
