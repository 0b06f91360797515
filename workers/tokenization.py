"""From a benchmark item to token ids and back. No torch here.

Chat items are rendered by the checkpoint's own template, or by a shipped one asked for by name, in the
sandbox that transformers renders templates in; the text is then tokenized without adding special tokens, so a
template's own beginning-of-sequence token is never doubled. Raw prompts are encoded as they are, with the one
beginning-of-sequence token that the tokenizer adds, if it adds one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import Item
from dlmgrid.workers.models.checkpoint import read_config
from dlmgrid.workers.models.families import get_family
from dlmgrid.workers.models.shards import read_json

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer

TEMPLATE_FOLDER = Path(__file__).parent / "models" / "chat_templates"

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""How Qwen2's tokenizer splits text before merging (transformers, models/qwen2/tokenization_qwen2.py)."""

_PROBE = "What is 2 + 3?"
_TEMPLATE_REMEDY = "mend it, or set `chat_template: chatml` for this model in the grid"

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "mask_token", "sep_token", "cls_token")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptEncoder:
    """A checkpoint's tokenizer and the chat template in force. ``template`` is None where there is none;
    ``shipped_template`` names the shipped one that fits the model's family, "" if none does."""

    folder: Path
    tokenizer: Tokenizer
    template: Template | None
    special_tokens: dict[str, str]
    stop_token_ids: tuple[int, ...]
    shipped_template: str = ""

    def render(self, item: Item) -> str:
        """The prompt's text: messages through the template, or the raw prompt; then the assistant prefix.

        Raises InputError for a chat item where there is no template, and for messages the template refuses.
        """
        if item.messages is None:
            return (item.prompt or "") + item.assistant_prefix
        if self.template is None:
            remedy = "add its chat_template.jinja"
            if self.shipped_template:
                remedy = f"set `chat_template: {self.shipped_template}` for this model"
            raise InputError(
                f"{self.folder}: item {item.item_id!r} is a chat, the checkpoint has no chat template; {remedy}"
            )
        try:
            text: str = self.template.render(
                messages=item.messages,
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self.special_tokens,
            )
        except TemplateError as error:
            raise InputError(
                f"{self.folder}: chat template refuses item {item.item_id!r} ({error})"
            ) from error
        except Exception as error:  # a template is a program: whatever it raises is a fault of its own
            raise InputError(
                f"{self.folder}: chat template fails on item {item.item_id!r} ({type(error).__name__}: {error}); "
                f"{_TEMPLATE_REMEDY}"
            ) from error
        return text + item.assistant_prefix

    def check_template(self) -> None:
        """Render a probe message. Raises InputError for a template that fails on it or leaves it out; without a
        template there is nothing to check."""
        if self.template is None:
            return
        text = self.render(Item(item_id="probe", messages=[{"role": "user", "content": _PROBE}]))
        if _PROBE not in text:
            raise InputError(
                f"{self.folder}: chat template leaves out the user's message (it gives {_shortened(text)}); "
                f"{_TEMPLATE_REMEDY}"
            )

    def encode(self, item: Item) -> list[int]:
        """Token ids of the item's prompt. Raises InputError as :meth:`render` does, and for an empty
        prompt.
        """
        text = self.render(item)
        raw = item.messages is None
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        if raw:
            ids = self._begin(text, ids)
        if not ids:
            raise InputError(f"item {item.item_id!r}: the prompt has no tokens")
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of ``ids``, special tokens skipped."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def _begin(self, text: str, ids: list[int]) -> list[int]:
        """A raw prompt with what the tokenizer puts before a text, unless the text begins with it already.

        What it puts after a text (an end token) would end the generation before it starts, and is left out.
        """
        whole: list[int] = self.tokenizer.encode(text, add_special_tokens=True).ids
        num_added = self.tokenizer.num_special_tokens_to_add(is_pair=False)
        for length in range(num_added, 0, -1):
            if whole[length : length + len(ids)] == ids:
                before = whole[:length]
                return ids if ids[:length] == before else before + ids
        return ids


def load_tokenizer(folder: Path | str, chat_template: str = "") -> PromptEncoder:
    """Load the tokenizer of a checkpoint folder.

    ``chat_template`` names a shipped template (workers/models/chat_templates); "" takes the checkpoint's own:
    chat_template.jinja, else ``chat_template`` of tokenizer_config.json. Raises InputError for a folder
    without a tokenizer, a tokenizer that cannot be read, and an unknown or broken template.
    """
    folder = Path(folder)
    settings = _read_settings(folder)
    source, where = _template_source(folder, settings, chat_template)
    template = None
    if source is not None:
        try:
            template = _environment().from_string(source)
        except (TemplateError, RecursionError) as error:
            raise InputError(
                f"{where}: chat template cannot be read ({error}); {_TEMPLATE_REMEDY}"
            ) from error
    special = _special_tokens(folder, settings)
    config = read_config(folder)
    return PromptEncoder(
        folder=folder,
        tokenizer=_load_backend(folder, settings),
        template=template,
        special_tokens=special,
        stop_token_ids=config.stop_token_ids,
        shipped_template=get_family(config.family).chat_template,
    )


def chat_template_source(folder: Path | str, chat_template: str = "") -> str | None:
    """The text of the template that :func:`load_tokenizer` takes; None where there is none.

    Raises InputError as that function does.
    """
    return _template_source(Path(folder), _read_settings(Path(folder)), chat_template)[0]


def check_prompts(folder: Path, chat_template: str, items: Sequence[Item]) -> None:
    """Encode ``items`` as a worker would. Raises InputError as :func:`load_tokenizer`, :meth:`PromptEncoder.encode`
    and, where one of them is a chat, :meth:`PromptEncoder.check_template` do."""
    encoder = load_tokenizer(folder, chat_template)
    if any(item.messages is not None for item in items):
        encoder.check_template()
    for item in items:
        encoder.encode(item)


def shipped_templates() -> list[str]:
    """Names that ``chat_template`` may take."""
    return sorted(path.stem for path in TEMPLATE_FOLDER.glob("*.jinja"))


def _template_source(folder: Path, settings: dict[str, Any], name: str) -> tuple[str | None, Path]:
    if name:
        path = TEMPLATE_FOLDER / f"{name}.jinja"
        if name not in shipped_templates():
            raise InputError(f"chat_template: {name!r} is not one of {', '.join(shipped_templates())}")
        return path.read_text(encoding="utf-8"), path
    path = folder / "chat_template.jinja"
    if path.exists():
        return _read_template(path), path
    own = settings.get("chat_template")
    path = folder / "tokenizer_config.json"
    if isinstance(own, list):  # several named templates: the one called default
        if not all(isinstance(entry, dict) and isinstance(entry.get("template"), str) for entry in own):
            raise InputError(
                f"{path}: chat_template is a list, but not of named templates; {_TEMPLATE_REMEDY}"
            )
        own = next((entry["template"] for entry in own if entry.get("name") == "default"), None)
    if own is not None and not isinstance(own, str):
        raise InputError(
            f"{path}: chat_template is a {type(own).__name__}, expected text; {_TEMPLATE_REMEDY}"
        )
    return own, path


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: chat template cannot be read ({error}); {_TEMPLATE_REMEDY}") from error


def _load_backend(folder: Path, settings: dict[str, Any]) -> Tokenizer:
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if path.exists():
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise InputError(f"{path}: the tokenizer cannot be read ({error})") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
    if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        kind = settings.get("tokenizer_class")
        if kind not in ("Qwen2Tokenizer", "Qwen2TokenizerFast"):
            raise InputError(
                f"{folder}: tokenizer_class is {kind!r} and there is no tokenizer.json; save it once with "
                "transformers (AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        return _qwen2_tokenizer(folder, settings)
    raise InputError(f"{folder}: no tokenizer.json (nor vocab.json with merges.txt); download the tokenizer")


def _qwen2_tokenizer(folder: Path, settings: dict[str, Any]) -> Tokenizer:
    """SDAR as published has no tokenizer.json: byte-level BPE from its vocabulary and merges."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    try:
        model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:  # as above
        raise InputError(f"{folder / 'vocab.json'}: the tokenizer cannot be read ({error})") from error
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = settings.get("added_tokens_decoder", {})
    named = set(_special_tokens(folder, settings).values())
    for token, about in sorted(added.items(), key=lambda pair: int(pair[0])):
        special = about.get("special", False) or about["content"] in named
        content = AddedToken(
            about["content"],
            single_word=about.get("single_word", False),
            lstrip=about.get("lstrip", False),
            rstrip=about.get("rstrip", False),
            normalized=about.get("normalized", False),
            special=special,
        )
        if special:
            tokenizer.add_special_tokens([content])
        else:
            tokenizer.add_tokens([content])
        if tokenizer.token_to_id(about["content"]) != int(token):
            raise InputError(
                f"{folder / 'tokenizer_config.json'}: added token {about['content']!r} has id {token}, "
                f"the vocabulary puts it at {tokenizer.token_to_id(about['content'])}"
            )
    return tokenizer


def _environment() -> ImmutableSandboxedEnvironment:
    """The Jinja environment that transformers documents for chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks training targets in some templates; here it is
    transparent.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.exists() else {}


def _special_tokens(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Special tokens by name, each written plain or as an object with its ``content``."""
    found = {}
    for name in _SPECIAL_NAMES:
        token = settings.get(name)
        if token is None:
            continue
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str):
            raise InputError(
                f"{folder / 'tokenizer_config.json'}: {name} is {_shortened(token)}, expected text or an object "
                "with its content"
            )
        found[name] = text
    return found


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
