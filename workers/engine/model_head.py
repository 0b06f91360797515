"""What every engine has, whatever its rows attend to: weights on a device, the head, the start-up self-test.

Shapes: R rows, H hidden size, V vocabulary padded to whole 64s.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dlmgrid.kernels.gemm import PANEL_ROWS
from dlmgrid.kernels.logits import LogitsPass
from dlmgrid.kernels.operators import Operators, load_operators
from dlmgrid.kernels.selftest import RowInvarianceError, check_row_invariance
from dlmgrid.kernels.triton_support import KernelsUnavailableError
from dlmgrid.workers.engine.memory import available_memory, check_memory, plan_memory
from dlmgrid.workers.engine.row_graphs import RowGraphs
from dlmgrid.workers.errors import InputError, OutOfMemoryError
from dlmgrid.workers.models.checkpoint import check_checkpoint
from dlmgrid.workers.models.config import ModelConfig
from dlmgrid.workers.models.weights import ModelWeights, load_weights

logger = logging.getLogger(__name__)

NUMERICS = ("exact", "fast")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ModelHead(ABC):
    """One model on one device, with room for some samples."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        num_slots: int,
        max_length: int,
        *,
        device: str,
        dtype: torch.dtype,
        numerics: str,
        kernels: str,
    ) -> None:
        """Raises InputError for an impossible setting. ``max_length`` counts prompt and canvas."""
        if numerics not in NUMERICS:
            raise InputError(f"numerics: {numerics!r} is not one of {', '.join(NUMERICS)}")
        if num_slots < 1:
            raise InputError(f"max_in_flight: {num_slots} samples in flight; at least 1 is needed")
        if not 1 <= max_length <= config.max_position_embeddings:
            raise InputError(
                f"gen_length: prompt and generation need {max_length} positions, the model has "
                f"{config.max_position_embeddings}; lower gen_length or shorten the prompts"
            )
        self.config = config
        self.weights = weights
        self.num_slots = num_slots
        self.device = torch.device(device)
        self.dtype = dtype
        self.numerics = numerics
        self.kernels = kernels
        self.operators = open_operators(config, kernels, numerics, self.device, dtype)
        self._linear = self.operators.linear
        self._row_graphs: RowGraphs | None = None

    def release(self) -> None:
        """Give up the buffers, so that an engine with more room can take their place; it can do nothing after."""
        self._row_graphs = None

    def check_room(self, max_length: int, num_cached: int, budget_bytes: int | None) -> None:
        """Raise InputError where buffers of ``num_cached`` slots do not fit ``budget_bytes`` (by default what the
        device has free beside the weights)."""
        plan = plan_memory(
            self.config, num_slots=num_cached, max_length=max_length, dtype=type_name(self.dtype)
        )
        if budget_bytes is None:
            free = free_memory(self.device)
            budget_bytes = None if free is None else free + plan.weight_bytes  # the weights are already there
        if budget_bytes is not None:
            check_memory(plan, budget_bytes, num_slots=self.num_slots, max_length=max_length)

    @property
    def control_device(self) -> torch.device:
        """Where the decoder keeps its states: the CPU for kernels that answer a pass in one copy, else the device."""
        return torch.device("cpu") if self.predicts_rows else self.device

    @property
    def predicts_rows(self) -> bool:
        """Whether :meth:`predict` is to be used: the kernels have a logits pass."""
        return self.kernels == "triton"

    @property
    def hidden_size(self) -> int:
        """Width of the rows that a pass returns."""
        return self.config.hidden_size

    @property
    def vocab_padded(self) -> int:
        """Width of the logits: the vocabulary rounded up to whole 64s."""
        return self.weights.head.shape[0]

    @torch.no_grad()
    def logits(self, rows: Tensor) -> Tensor:
        """Logits of ``rows`` [R, H] (any R): [R, V padded] fp32; -inf for the mask token and the padding.

        A row's logits do not depend on R in ``exact``.
        """
        with memory_errors():
            logits = self._linear(rows, self.weights.head, out_dtype=torch.float32)
        logits[:, self.config.vocab_size :] = -torch.inf
        logits[:, self.config.mask_token_id] = -torch.inf
        return logits

    @property
    def logits_pass(self) -> Callable[..., LogitsPass] | None:
        """The one pass over the logits that the kernels have; None where the twins work apart."""
        return None if self.kernels == "torch" else self.operators.logits_pass

    @torch.inference_mode()
    def predict(
        self,
        hidden: Tensor,
        rows: Tensor,
        temperature: float,
        noise: tuple[Tensor, int, Tensor, Tensor] | None,
    ) -> LogitsPass:
        """What the logits pass says of ``rows`` int64 [R] of ``hidden`` [N, L, H]: on the CPU, as rows and noise are.

        A row's answer does not depend on R in ``exact``.
        """
        if self._row_graphs is None:
            self._row_graphs = RowGraphs(
                self.logits,
                self.operators.logits_pass,
                hidden_size=self.hidden_size,
                dtype=self.dtype,
                device=self.device,
            )
        with memory_errors():
            return self._row_graphs.predict(hidden, rows, temperature, noise)

    def queue_rows_again(self) -> None:
        """Queue head and logits pass of the last :meth:`predict` once more, to time it; RuntimeError where none was."""
        if self._row_graphs is None:
            raise RuntimeError("no rows were predicted")
        self._row_graphs.queue_again()

    @torch.no_grad()
    def self_test(self) -> None:
        """Hold the exactness of this device to the test: rows alone against rows packed, with this model's
        own matrices and its first layers. Touches no slot.

        Raises InputError where bits differ, naming the operation.
        """
        if self.numerics != "exact":
            return
        generator = torch.Generator().manual_seed(0)
        layer = self.weights.layers[0]
        first_layers = replace(self.weights, layers=self.weights.layers[:2])
        length = self._tested_length
        try:
            for name in ("qkv", "output", "gate_up", "down"):
                self._test_linear(name, getattr(layer, name), generator)
            self._test_linear("head", self.weights.head, generator)
            if (experts := self.weights.layers[-1].experts) is not None:
                self._test_linear("router", experts.router, generator)
                self._test_linear("expert gate_up", experts.gate_up[0], generator)
                self._test_linear("expert down", experts.down[0], generator)
            blocks = torch.randint(0, self.config.vocab_size, (3, length, 1), generator=generator)
            check_row_invariance(
                "first layers",
                lambda rows: self._forward_rows(rows.view(-1, length), first_layers),
                blocks.int().to(self.device),
            )
        except RowInvarianceError as error:
            raise InputError(f"numerics: exact does not hold here ({error}); use numerics: fast") from error

    def _test_linear(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        rows = torch.randn(2, PANEL_ROWS, weight.shape[1], generator=generator).to(self.device, weight.dtype)
        check_row_invariance(f"linear {name}", lambda x: self._linear(x, weight), rows, (2, 3))

    @property
    @abstractmethod
    def _tested_length(self) -> int:
        """Tokens of a sequence that the self-test passes through :meth:`_forward_rows`."""

    @abstractmethod
    def _forward_rows(self, tokens: Tensor, weights: ModelWeights) -> Tensor:
        """Hidden rows [N * L, H] of sequences int32 [N, L] from position 0 on, each alone, through ``weights``."""


def load_model(
    folder: Path | str,
    *,
    num_cached: int,
    max_length: int,
    device: str,
    dtype: str,
    numerics: str,
    kernels: str,
    block_length: int | None = None,
    memory_budget_bytes: int | None = None,
) -> tuple[ModelConfig, ModelWeights]:
    """Check a checkpoint folder and load it on ``device``, once memory for ``num_cached`` slots is known to be there.

    Raises InputError for a faulty checkpoint or setting, or where weights and buffers do not fit.
    """
    config = check_checkpoint(folder, block_length)
    if dtype not in DTYPES:
        raise InputError(f"dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
    open_operators(config, kernels, numerics, device, DTYPES[dtype])  # refused before the weights are read
    plan = plan_memory(config, num_slots=max(num_cached, 0), max_length=max_length, dtype=dtype)
    budget = memory_budget_bytes if memory_budget_bytes is not None else free_memory(torch.device(device))
    if budget is not None:
        check_memory(plan, budget, num_slots=max(num_cached, 1), max_length=max_length)
    with memory_errors():
        return config, load_weights(folder, config, device, DTYPES[dtype])


def open_operators(
    config: ModelConfig, kernels: str, numerics: str, device: torch.device | str, dtype: torch.dtype
) -> Operators:
    """The kernels of a model. Raises InputError where they cannot work on the device or take the model."""
    try:
        operators = load_operators(
            kernels, numerics, device, dtype, head_dim=config.head_dim, vocab_size=config.vocab_size
        )
    except KernelsUnavailableError as error:
        raise InputError(str(error)) from error
    logger.info("kernels: %s (%s) on %s", kernels, numerics, device)
    return operators


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be taken on ``device`` now; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn the device's out-of-memory errors into ours: the driver then lowers the samples in flight."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"out of device memory ({str(error).splitlines()[0]}); lower max_in_flight"
        ) from error
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise OutOfMemoryError(
            f"out of host memory ({str(error).splitlines()[0]}); lower max_in_flight"
        ) from error


def type_name(dtype: torch.dtype) -> str:
    """``float32``, ``bfloat16``, …"""
    return str(dtype).removeprefix("torch.")
