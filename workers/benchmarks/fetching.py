"""The pinned public sources of benchmark data: the hub, EvalPlus' releases, files at a commit on GitHub.

Every function gives the file's content as the documented layout holds it, uncompressed.
"""

from __future__ import annotations

import json
import logging
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from dlmgrid.workers.benchmarks.data_file import DataFile, unpacked
from dlmgrid.workers.errors import InputError

OFFLINE_VARIABLE = "HF_HUB_OFFLINE"
_TIMEOUT_SECONDS = 60.0
_PROBE_SECONDS = 10.0


def fetch(source: DataFile) -> bytes:
    """The content of ``source`` from where it is published.

    Raises InputError naming the source and the remedy when it cannot be fetched, or when HF_HUB_OFFLINE is
    set and it is in no cache.
    """
    if source.hub is not None:
        return _from_hub(source)
    if source.github is not None:
        return _from_github(source)
    return _from_evalplus_release(source)


def _remedy(source: DataFile) -> str:
    return (
        f"run `dlmgrid prefetch` once where there is a network ({OFFLINE_VARIABLE} unset), or give a local copy by "
        f"--data DIR ({source.remedy})"
    )


def _is_offline() -> bool:
    return os.environ.get(OFFLINE_VARIABLE, "0").upper() in {"1", "ON", "YES", "TRUE"}


@contextmanager
def _offline_where_unreachable() -> Iterator[None]:
    """Where the hub does not answer, its client looks at its cache at once, instead of asking six times over."""
    from datasets import config
    from huggingface_hub import constants

    before = config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if not (any(before) or _answers(constants.ENDPOINT)):
        config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _answers(endpoint: str) -> bool:
    """Whether anything answers there, be it with a refusal. A certificate that only we do not know is an answer."""
    try:
        with urlopen(Request(endpoint, method="HEAD"), timeout=_PROBE_SECONDS):
            return True
    except HTTPError:
        return True
    except URLError as error:
        return isinstance(error.reason, ssl.SSLError)
    except OSError:
        return False


def _from_hub(source: DataFile) -> bytes:
    assert source.hub is not None
    repository, configuration, split, revision = source.hub
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise InputError(
            "loading from the hub needs the package datasets: pip install datasets, or give --data DIR"
        ) from error
    try:
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; the failure is told below
        with _offline_where_unreachable():
            dataset = load_dataset(repository, configuration, split=split, revision=revision)
    except Exception as error:  # every failure of the hub client has the same remedy
        cause = str(error).split("\n", 1)[0]
        raise InputError(
            f"{source.origin} cannot be loaded ({type(error).__name__}: {cause}); {_remedy(source)}"
        ) from error
    missing = [name for name in source.columns if name not in dataset.column_names]
    if missing:
        raise InputError(f"{source.origin}: no column {', '.join(missing)}; use --data DIR")
    lines = [json.dumps({name: row[name] for name in source.columns}) for row in dataset]
    return "".join(f"{line}\n" for line in lines).encode()


def _from_github(source: DataFile) -> bytes:
    assert source.github is not None
    repository, commit, path = source.github
    url = f"https://raw.githubusercontent.com/{repository}/{commit}/{path}"
    if _is_offline():
        raise InputError(
            f"{source.path} was not fetched before and {OFFLINE_VARIABLE} is set; {_remedy(source)}"
        )
    try:
        with urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
            content: bytes = response.read()
    except (URLError, TimeoutError, OSError) as error:
        raise InputError(f"{url} cannot be fetched ({error}); {_remedy(source)}") from error
    return unpacked(content, url)


def _from_evalplus_release(source: DataFile) -> bytes:
    name, version = Path(source.path).stem.split("-", 1)
    try:
        from evalplus.data.humaneval import HUMANEVAL_PLUS_VERSION
        from evalplus.data.mbpp import MBPP_PLUS_VERSION
        from evalplus.data.utils import get_dataset_metadata, make_cache
    except ImportError as error:
        raise InputError(
            f"fetching {source.path} needs the package evalplus: pip install evalplus, or give --data DIR"
        ) from error
    installed = {"HumanEvalPlus": HUMANEVAL_PLUS_VERSION, "MbppPlus": MBPP_PLUS_VERSION}[name]
    if installed != version:
        raise InputError(f"the installed EvalPlus uses {name} {installed}, not {version}; give --data DIR")
    url, cached = get_dataset_metadata(name, version, False, False)
    if not Path(cached).is_file() and _is_offline():
        raise InputError(f"{url} is not in EvalPlus' cache and {OFFLINE_VARIABLE} is set; {_remedy(source)}")
    try:
        make_cache(url, cached)
    except OSError as error:
        raise InputError(f"{url} cannot be fetched ({error}); {_remedy(source)}") from error
    return Path(cached).read_bytes()
