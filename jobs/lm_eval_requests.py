"""What lm-eval asks for in a ``generate_until`` request, and how requests are put together to be decoded.

Requests with the same number of new tokens and the same temperature are decoded together. Stop strings do not
separate them: the decoder stops at the model's stop token, and a text is cut at the first stop string after it
was decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from dlmgrid.workers.cell import digest
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import Item
from dlmgrid.workers.units import Key

# Settings of other samplers that tasks carry along, with the values under which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "num_beams": (None, 1),
    "repetition_penalty": (None, 1, 1.0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "num_return_sequences": (None, 1),
}


@dataclass(frozen=True, slots=True)
class Sampling:
    """What decides how a request is decoded: new tokens at most, and the temperature."""

    gen_length: int
    temperature: float


@dataclass(kw_only=True, slots=True)
class Batch:
    """Requests that are decoded together. ``indices[i]`` is the place of ``keys[i]`` among all requests."""

    sampling: Sampling
    items: dict[str, Item] = field(default_factory=dict)
    keys: list[Key] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)


def parse_settings(settings: Mapping[str, Any], max_gen_toks: int) -> tuple[Sampling, tuple[str, ...]]:
    """Sampling and stop strings of lm-eval's generation settings, in lm-eval's own reading of them.

    ``max_gen_toks`` is used where the task gives no length. ``do_sample`` without a temperature means T = 1, as
    in transformers. Raises InputError for a setting that this decoder does not have.
    """
    normal: dict[str, Any] = dict(normalize_gen_kwargs(dict(settings), max_gen_toks))
    until = tuple(stop for stop in normal.pop("until") if stop)
    gen_length = normal.pop("max_gen_toks")
    do_sample = normal.pop("do_sample")
    temperature = normal.pop("temperature", None)
    if do_sample and temperature is None:
        temperature = 1.0
    for name, value in normal.items():
        if name not in _NEUTRAL:
            raise InputError(
                f"generation setting {name!r} is not known to dlmgrid; remove it from gen_kwargs"
            )
        if value not in _NEUTRAL[name]:
            raise InputError(
                f"generation setting {name}={value!r} is not supported by dlmgrid, which samples from the whole "
                f"distribution; pass --gen_kwargs {name}={_NEUTRAL[name][1]}"
            )
    if gen_length < 1:
        raise InputError(f"max_gen_toks is {gen_length}; give at least 1")
    return Sampling(gen_length, float(temperature or 0.0) if do_sample else 0.0), until


def item_id(request: Any) -> str:
    """Identifies a request of lm-eval by task and document, and so names the noise it is decoded with.

    A request without that information is identified by its text.
    """
    if request.task_name is None or request.doc_id is None:
        return f"text/{digest(request.args[0])}"
    name = f"{request.task_name}/{request.doc_id}"
    return f"{name}/{request.idx}" if request.idx else name


def make_batches(requests: Sequence[Any], samplings: Sequence[Sampling]) -> list[Batch]:
    """Requests in batches of one sampling each, in the order in which the samplings first occur.

    A request that occurs again is the next repeat of the same item. Raises InputError where two different
    prompts have one identity.
    """
    batches: dict[Sampling, Batch] = {}
    num_seen: dict[str, int] = {}
    for index, (request, sampling) in enumerate(zip(requests, samplings, strict=True)):
        batch = batches.setdefault(sampling, Batch(sampling=sampling))
        name, prompt = item_id(request), request.args[0]
        known = batch.items.setdefault(name, Item(item_id=name, prompt=prompt))
        if known.prompt != prompt:
            raise InputError(f"request {name}: the task gives two prompts for one document; run it elsewhere")
        repeat = num_seen.get(name, 0)
        num_seen[name] = repeat + 1
        batch.keys.append(Key(name, repeat))
        batch.indices.append(index)
    return list(batches.values())
