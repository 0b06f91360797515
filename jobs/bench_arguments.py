"""What the benches share of their command lines: values within bounds, files that are what they should be, a place for
the results, all before any work."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

from dlmgrid.jobs.bench_passes import SPARE_POSITIONS
from dlmgrid.kernels.triton_support import KernelsUnavailableError, check_triton
from dlmgrid.workers.drafting.order_checkpoint import read_order_checkpoint
from dlmgrid.workers.engine.family_engine import is_bidirectional
from dlmgrid.workers.engine.model_head import DTYPES
from dlmgrid.workers.engine.pass_graphs import MOST_SEGMENTS
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.catalog import resolve_checkpoint
from dlmgrid.workers.models.checkpoint import check_checkpoint
from dlmgrid.workers.models.config import ModelConfig
from dlmgrid.workers.models.fingerprint import weight_fingerprint
from dlmgrid.workers.out_file import check_out_file
from dlmgrid.workers.runtime import check_device

MOST_DRAFTS = MOST_SEGMENTS - 1
"""Most drafts beside the root in a pass that is timed: a larger pass has no graph to replay."""


class OneLineParser(argparse.ArgumentParser):
    """A parser that refuses in one line, as every other command does, and shows no usage for it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {' '.join(message.split())}\n")


def whole_number(at_least: int, at_most: int | None = None) -> Callable[[str], int]:
    """An argparse type: whole numbers within bounds."""
    bounds = f"{at_least} or more" if at_most is None else f"{at_least} to {at_most}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = at_least - 1
        if value < at_least or (at_most is not None and value > at_most):
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of {bounds}")
        return value

    return read


def real_number(at_most: float = math.inf) -> Callable[[str], float]:
    """An argparse type: finite numbers from 0 to ``at_most``."""
    bounds = "0 or more" if at_most == math.inf else f"0 to {at_most:g}"

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and 0 <= value <= at_most):
            raise argparse.ArgumentTypeError(f"{text!r} is no number of {bounds}")
        return value

    return read


def add_device(parser: argparse.ArgumentParser) -> None:
    """``--device``, one that torch can compute on."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device", type=check_device, default=default, help="cpu, cuda or cuda:N; cuda where there is one"
    )


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """``--checkpoint`` and ``--chat-template``."""
    parser.add_argument("--checkpoint", default="reference", help="checkpoint folder or model name")
    parser.add_argument(
        "--chat-template", default="", help="a shipped template, for a checkpoint without one"
    )


def add_out(parser: argparse.ArgumentParser, default: str) -> None:
    """``--out``, the JSON file of the results."""
    parser.add_argument(
        "--out", type=Path, default=Path(default), help=f"JSON file of the results ({default})"
    )


def default_kernels(device: str) -> str:
    """The kernels that a device is measured with where none are named."""
    return "triton" if device.startswith("cuda") else "torch"


def default_dtype(device: str) -> str:
    """The dtype that a device is measured with where none is named."""
    return "bfloat16" if device.startswith("cuda") else "float32"


def check_kernels(kernels: str, device: str, dtype: str) -> None:
    """Raises InputError where these kernels cannot work on the device in that dtype."""
    if kernels != "triton":
        return
    try:
        check_triton(device, DTYPES[dtype])
    except KernelsUnavailableError as error:
        raise InputError(str(error)) from error


def check_block_causal(name: str) -> tuple[Path, ModelConfig]:
    """Folder and settings of a whole checkpoint that :class:`Engine` runs. Raises InputError for another."""
    folder = resolve_checkpoint(name)
    config = check_checkpoint(folder)
    if is_bidirectional(config):
        raise InputError(
            f"--checkpoint {name}: a model of the family {config.family} sees its whole canvas, and passes over cached "
            "blocks are what is timed; give a block-causal one"
        )
    return folder, config


def check_target(order: Path, folder: Path) -> None:
    """Raises InputError for a file without an order model, and for one that was made for other weights."""
    target = read_order_checkpoint(order).target
    if target and target != weight_fingerprint(folder):
        raise InputError(
            f"order model {order} was made for other weights than those in {folder}; train it on recorded runs of these"
        )


def check_prefix(prefix: int, config: ModelConfig, of: str, option: str) -> None:
    """Raises InputError for a prefix that is not whole blocks of the model called ``of``, or longer than it takes."""
    length = config.block_length
    if prefix % length:
        raise InputError(
            f"{option} {prefix}: {of} has blocks of {length} tokens; give a whole multiple, such as "
            f"{-(-prefix // length) * length}"
        )
    check_positions(prefix + SPARE_POSITIONS, config, of, f"{option} {prefix}")


def check_positions(needed: int, config: ModelConfig, of: str, given: str) -> None:
    """Raises InputError, naming what was ``given``, where the model called ``of`` has fewer positions than needed."""
    if needed > config.max_position_embeddings:
        raise InputError(
            f"{given}: {needed} positions are needed, {of} has {config.max_position_embeddings}; give less"
        )


def check_results(out: Path, option: str = "--out") -> None:
    """Make the folder of the results' file and try it; a file that is there stays as it is. Raises InputError where it
    cannot be written."""
    check_out_file(out, option, makes_folder=True)
    if out.exists() and not out.is_file():
        raise InputError(f"{option} {out} is no regular file; name one, or one that is not there yet")
