"""lm-eval's ``LM`` over the decoder of this project, registered there as ``dlmgrid``.

    from dlmgrid.jobs.lm_eval_model import DlmgridLM  # registers it
    from lm_eval import simple_evaluate

    model = DlmgridLM(path="reference", method="ssd", budget=8, verify=True)
    results = simple_evaluate(model=model, tasks=["gsm8k"], apply_chat_template=True)

or by name, ``simple_evaluate(model="dlmgrid", model_args={"path": …})``, or ``dlmgrid lm-eval`` on the command
line. Any generation task runs; tasks that need log-likelihoods are refused, since a diffusion model has none of
the kind that lm-eval compares.

Every answer is a row of the ``generations`` table (``rows``), with its exactness verdict under ``verify``: the
request is then decoded a second time by the serialized run, draft-free and alone.
"""

from __future__ import annotations

import difflib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import lm_eval.models  # noqa: F401 - lm-eval registers its own models only while its registry is empty
import torch
import yaml
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from dlmgrid import __version__
from dlmgrid.cluster.cells import Model, Questions, check_methods, find_models, make_cells
from dlmgrid.cluster.grid import BenchmarkEntry, Grid, parse_grid
from dlmgrid.cluster.sources import installed_sources
from dlmgrid.jobs.lm_eval_requests import Batch, make_batches, parse_settings
from dlmgrid.workers.benchmarks.benchmark import package_version
from dlmgrid.workers.benchmarks.lm_eval_task import cut_at_stop_strings
from dlmgrid.workers.cell import CANVAS_CACHES, Cell
from dlmgrid.workers.decoding.canvas_decoder import whole_canvas_length
from dlmgrid.workers.decoding.decoder import canvas_length
from dlmgrid.workers.decoding.paths import compare
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.generation_rows import set_verdict
from dlmgrid.workers.items import Item, write_items
from dlmgrid.workers.models.fingerprint import weight_fingerprint
from dlmgrid.workers.partial_files import partial_path
from dlmgrid.workers.tables import GENERATIONS, to_table, write_table
from dlmgrid.workers.tokenization import chat_template_source, load_tokenizer
from dlmgrid.workers.unit_runner import UnitRunner
from dlmgrid.workers.units import WorkUnit

ORIGIN = "lm-eval"
DEFAULT_IN_FLIGHT = 8
_LEVELS = ("exact_tokens", "exact_path", "exact_bits")


@register_model("dlmgrid")
class DlmgridLM(LM):
    """A checkpoint behind lm-eval's interface.

    Args:
        path: folder, hub id or shipped name of the checkpoint; ``pretrained`` and ``model`` are other names of it.
        method, budget: drafting method, and drafted nodes a round (0: draft-free).
        decoder, commits_per_step, threshold: the commit rule, as in a grid file; by default the model's published one.
        seed: of the noise at T > 0; lm-eval's own ``--seed`` chooses few-shot examples, not noise.
        block_length, chat_template: None and "" take the checkpoint's own.
        max_gen_toks: new tokens for tasks that give no number.
        max_in_flight: samples decoded together. Left out, it is lm-eval's ``--batch_size`` where that is above 1
            (1 is what lm-eval passes on its own), else 8.
        verify: also decode the serialized run, and report where an answer differs from it.
        rows: Parquet file that receives the rows of all answers.

    Raises:
        InputError: an argument is unknown or impossible, or the checkpoint is missing or unfit.
    """

    # Answers of this process that claim to be exact and are not; lm-eval keeps no hold of the model it makes.
    num_broken_claims: ClassVar[int] = 0

    def __init__(
        self,
        path: str | None = None,
        *,
        pretrained: str | None = None,
        model: str | None = None,
        revision: str = "",
        method: str = "none",
        budget: int = 0,
        decoder: str = "published",
        commits_per_step: int = 1,
        threshold: float | None = None,
        verification: str = "coupled",
        noise: str = "commit_count",
        seed: int = 0,
        numerics: str = "exact",
        kernels: str = "torch",
        dtype: str = "float32",
        block_length: int | None = None,
        chat_template: str = "",
        max_gen_toks: int = 256,
        max_in_flight: int | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        verify: bool = False,
        rows: str | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        _refuse(unknown)
        named = {name for name in (path, pretrained, model) if name is not None}
        if len(named) != 1:
            raise InputError("model_args: name one checkpoint, as path=FOLDER_OR_HUB_ID")
        if (method == "none") != (budget == 0):
            raise InputError(
                f"model_args: method={method} with budget={budget}; a drafting method needs a budget, such as "
                "budget=8, and method=none has none"
            )
        if max_in_flight is None:
            max_in_flight = (
                batch_size if isinstance(batch_size, int) and batch_size > 1 else DEFAULT_IN_FLIGHT
            )
        self._device_name = device or "cpu"
        if self._device_name.startswith("cuda") and not torch.cuda.is_available():
            raise InputError(f"device {self._device_name}: torch finds no GPU here; pass --device cpu")
        self._values: dict[str, Any] = {
            "name": ORIGIN,
            "models": [
                {
                    "path": named.pop(),
                    "revision": str(revision),
                    "dtype": dtype,
                    "block_length": _whole(block_length),
                    "chat_template": chat_template,
                }
            ],
            "benchmarks": [ORIGIN],
            "temperatures": [0],
            "methods": [{"name": method, "budgets": [_whole(budget)]}],
            "decoder": {
                "name": decoder,
                "commits_per_step": _whole(commits_per_step),
                "threshold": threshold,
            },
            "verification": verification,
            "noise": noise,
            "seed": _whole(seed),
            "numerics": numerics,
            "kernels": kernels,
            "max_in_flight": _whole(max_in_flight),
            "resources": {"device": self._device_name.partition(":")[0]},
        }
        sources = installed_sources()
        self._grid = parse_grid(yaml.safe_dump(self._values), "model_args")
        check_methods(self._grid, sources)
        (self._model,) = find_models(self._grid, sources)
        self._encoder = load_tokenizer(self._model.folder, chat_template)
        self._runner = UnitRunner(self._device_name, actor=ORIGIN)
        self._max_gen_toks = max_gen_toks
        self._verify = verify
        self._rows_file = Path(rows) if rows is not None else None
        if self._rows_file is not None and not self._rows_file.absolute().parent.is_dir():
            raise InputError(f"model_args: rows={rows}: its folder does not exist; make it first")
        self.rows: list[dict[str, Any]] = []

    @cached_property
    def weight_fingerprint(self) -> str:
        """Of the checkpoint's weights, which are read for it at the first request and not before."""
        return weight_fingerprint(self._model.folder)

    # --- lm-eval's interface

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The answer of each request, cut at its first stop string.

        Raises InputError, before anything is decoded, for a generation setting that is not supported and for a
        prompt that is empty or too long; and at the end, when requests could not be decoded.
        """
        parsed = [parse_settings(request.args[1], self._max_gen_toks) for request in requests]
        batches = make_batches(requests, [sampling for sampling, _ in parsed])
        for batch in batches:
            self._check_fit(batch)
            self._cells(batch)  # refuses a temperature that no grid may have
        answers: dict[int, dict[str, Any]] = {}
        for batch in batches:
            for index, row in zip(batch.indices, self._decode(batch), strict=True):
                answers[index] = row
                self.rows.append(row)
        self._write_rows()
        failed = [row for row in answers.values() if row["error"] is not None]
        if failed:
            raise InputError(
                f"{len(failed)} of {len(requests)} requests could not be decoded, first {failed[0]['item_id']}: "
                f"{failed[0]['error']}"
            )
        texts = []
        for index, request in enumerate(requests):
            text = cut_at_stop_strings(answers[index]["text"], list(parsed[index][1]))
            self.cache_hook.add_partial("generate_until", request.args, text)
            texts.append(text)
        if self._verify:
            self._report_verdicts(list(answers.values()))
        return texts

    def loglikelihood(self, requests: Sequence[Any]) -> NoReturn:
        """Refused: raises InputError."""
        _refuse_likelihood()

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> NoReturn:
        """Refused: raises InputError."""
        _refuse_likelihood()

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt of a chat. Without ``add_generation_prompt`` the last message opens the answer."""
        if add_generation_prompt:
            return self._encoder.render(Item(item_id=ORIGIN, messages=chat_history))
        *messages, last = chat_history
        if last["role"] != "assistant" or not messages:
            raise InputError(
                f"chat: the last message is of the role {last['role']!r}, it cannot be continued"
            )
        return self._encoder.render(Item(item_id=ORIGIN, messages=messages, assistant_prefix=last["content"]))

    @property
    def tokenizer_name(self) -> str:
        """Checkpoint and chat template: what lm-eval's cache of requests depends on."""
        entry = self._model.entry
        return "__".join(filter(None, (entry.path.replace("/", "__"), entry.revision, entry.chat_template)))

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template in force, for lm-eval's records. Raises InputError when another is asked for by name."""
        if isinstance(chat_template, str) and chat_template:
            raise InputError(
                f"--apply_chat_template {chat_template}: name a shipped template in model_args instead, as "
                "chat_template=NAME"
            )
        if not chat_template:
            return ""
        return chat_template_source(self._model.folder, self._model.entry.chat_template) or ""

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside its results: settings, and the verdicts over all answers so far."""
        entry = self._model.entry
        return {
            "dlmgrid_version": __version__,
            "dlmgrid_settings": self._grid.model_dump(
                exclude={"name", "benchmarks", "temperatures", "models", "resources", "limit", "repeats"}
            ),
            "model_path": entry.path,
            "model_revision": entry.revision,
            "model_dtype": entry.dtype,
            "weight_fingerprint": self.weight_fingerprint,
            "device_used": self._device_name,
            "exactness": self.exactness(),
        }

    # --- verdicts

    def exactness(self) -> dict[str, int]:
        """Over all answers so far: their number, those compared with the serialized run, and those equal."""
        checked = [row for row in self.rows if row["exact_tokens"] is not None]
        return {
            "num_answers": len(self.rows),
            "num_checked": len(checked),
            **{f"num_{level}": sum(row[level] for row in checked) for level in _LEVELS},
        }

    def _report_verdicts(self, rows: Sequence[dict[str, Any]]) -> None:
        """Say on stderr how many answers differ from their serialized run, and where each of them does."""
        differing = [row for row in rows if not all(row[level] for level in _LEVELS)]
        for row in differing:
            levels = ", ".join(level.removeprefix("exact_") for level in _LEVELS if not row[level])
            _say(
                f"{row['item_id']} repeat {row['repeat']} differs from its serialized run in {levels}; first at "
                f"step {row['first_divergence_step']}, position {row['first_divergence_position']} (lead of the "
                f"first choice there: {row['top2_margin']})"
            )
        _say(f"{len(rows)} answers compared with their serialized run: {len(differing)} differ")
        DlmgridLM.num_broken_claims += sum(row["claim"] == "exact" for row in differing)

    # --- decoding

    def _check_fit(self, batch: Batch) -> None:
        shape, gen_length = self._model.shape, batch.sampling.gen_length
        limit = shape.max_position_embeddings
        block_length = self._model.entry.block_length or shape.block_length or gen_length
        is_canvas = bool(set(CANVAS_CACHES) & set(shape.caches))
        for item in batch.items.values():
            num_tokens = len(self._encoder.encode(item))
            needed = (whole_canvas_length if is_canvas else canvas_length)(
                num_tokens, gen_length, block_length
            )
            if needed > limit:
                raise InputError(
                    f"request {item.item_id}: a prompt of {num_tokens} tokens and {gen_length} new ones need "
                    f"{needed} positions, the model has {limit}; give fewer examples or a smaller max_gen_toks"
                )

    def _cells(self, batch: Batch) -> list[Cell]:
        """The draft-free cell of a batch and, unless it is the same, the cell asked for."""
        at_temperature = self._values | {"temperatures": [batch.sampling.temperature]}
        grid = parse_grid(yaml.safe_dump(at_temperature), "gen_kwargs")
        return request_cells(grid, self._model, self.weight_fingerprint, batch)

    def _decode(self, batch: Batch) -> list[dict[str, Any]]:
        """The rows of a batch in the order of its keys, with verdicts where they are wanted."""
        cells = self._cells(batch)
        with tempfile.TemporaryDirectory(prefix="dlmgrid-lm-eval-") as folder:
            inputs = Path(folder) / "requests.jsonl"
            write_items(inputs, batch.items.values())
            unit = WorkUnit(
                cell=cells[-1],
                keys=tuple(batch.keys),
                checkpoint=str(self._model.folder),
                inputs=str(inputs),
                output="",
                max_in_flight=self._grid.max_in_flight,
                device=self._device_name,
            )
            rows = self._runner.decode_rows(unit, max_in_flight=unit.max_in_flight)
            if self._verify:
                serialized = self._runner.decode_rows(replace(unit, cell=cells[0]), max_in_flight=1)
                for row, reference in zip(rows, serialized, strict=True):
                    row["error"] = row["error"] or reference["error"]
                    if row["error"] is None:
                        set_verdict(row, compare(row, reference))
        return rows

    def _write_rows(self) -> None:
        if self._rows_file is not None:
            partial = partial_path(self._rows_file)
            write_table(str(partial), to_table(GENERATIONS, self.rows))
            partial.replace(self._rows_file)


def request_cells(grid: Grid, model: Model, fingerprint: str, batch: Batch) -> list[Cell]:
    """The cells of a batch: draft-free first, then the accelerated one where they differ."""
    asked = Questions(
        entry=BenchmarkEntry(name=ORIGIN),
        prompt_version=f"lm_eval {package_version('lm_eval')}",
        gen_length=batch.sampling.gen_length,
        items=tuple(batch.items.values()),
    )
    works = make_cells(grid, [model], [asked], {str(model.folder): fingerprint}, Path())
    return [work.cell for work in works]


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _whole(value: Any) -> Any:
    """lm-eval's command line reads -8 as -8.0: a whole number as an int, anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _refuse(unknown: dict[str, Any]) -> None:
    """Raises InputError for the first argument that is not one of the constructor's."""
    for name in unknown:
        known = [key for key in signature(DlmgridLM).parameters if key not in ("self", "unknown")]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise InputError(f"model_args: unknown argument {name!r}; {hint}")


def _refuse_likelihood() -> NoReturn:
    raise InputError(
        "this task asks for log-likelihoods, which a block-diffusion model does not give; choose a task of "
        "output_type generate_until (for multiple choice: its generative variant)"
    )
