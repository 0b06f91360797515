"""Prompts become the ids the model was trained on: the template's text, and at most one beginning token."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import Item
from dlmgrid.workers.models.synthetic import (
    SPECIAL_TOKENS,
    tiny_config,
    tiny_family_config,
    write_random_checkpoint,
)
from dlmgrid.workers.tokenization import PromptEncoder, check_prompts, load_tokenizer, shipped_templates

CHAT = Item(item_id="q1", messages=[{"role": "user", "content": "Hi, 2+2?"}], assistant_prefix="It is ")
PAD, START, END = 256, 257, 258


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_random_checkpoint(tmp_path / "model", tiny_config())
    return tmp_path / "model"


def text_of(encoder: PromptEncoder, ids: list[int]) -> str:
    return str(encoder.tokenizer.decode(ids, skip_special_tokens=False))


def set_template(folder: Path, template: str, **settings: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **settings}))


def test_the_shipped_chatml_has_no_system_turn(folder: Path) -> None:
    encoder = load_tokenizer(folder, "chatml")
    expected = "<|im_start|>user\nHi, 2+2?<|im_end|>\n<|im_start|>assistant\nIt is "
    assert encoder.render(CHAT) == expected
    ids = encoder.encode(CHAT)
    assert text_of(encoder, ids) == expected
    assert [token for token in ids if token >= 256] == [START, END, START]
    assert encoder.stop_token_ids == (END,)


def test_several_turns_keep_their_order(folder: Path) -> None:
    turns = [("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c")]
    item = Item(item_id="q", messages=[{"role": role, "content": text} for role, text in turns])
    expected = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert load_tokenizer(folder, "chatml").render(item) == expected + "<|im_start|>assistant\n"


def test_the_checkpoints_own_template_is_taken_from_its_file_first(folder: Path) -> None:
    set_template(folder, "config:{{ messages[0].content }}")
    assert load_tokenizer(folder).render(CHAT) == "config:Hi, 2+2?It is "
    (folder / "chat_template.jinja").write_text("file:{{ messages[0]['content'] }}")
    assert load_tokenizer(folder).render(CHAT) == "file:Hi, 2+2?It is "
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_tokenizer(folder).render(CHAT) == "dIt is "


def test_templates_are_rendered_as_transformers_renders_them(folder: Path) -> None:
    import transformers

    template = (
        "{{ bos_token }}{% for m in messages %}\n    {% if loop.index0 > 5 %}{% break %}{% endif %}\n"
        "  {{- m['role'] }}: {{ m | tojson }}\n{% endfor %}\n"
        "{% if add_generation_prompt %}{% generation %}go{% endgeneration %}{% endif %}"
    )
    set_template(folder, template, bos_token="<|pad|>")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<|pad|>", chat_template=template
    )
    item = Item(item_id="q", messages=[{"role": "user", "content": "é <b>&amp;"}])
    expected = theirs.apply_chat_template(item.messages, tokenize=False, add_generation_prompt=True)
    assert load_tokenizer(folder).render(item) == expected


def test_a_chat_without_a_template_names_the_remedy(folder: Path) -> None:
    with pytest.raises(InputError, match=r"item 'q1' is a chat.*set `chat_template: chatml`"):
        load_tokenizer(folder).encode(CHAT)


def test_a_template_that_refuses_or_does_not_parse_is_the_users_error(folder: Path) -> None:
    set_template(folder, "{{ raise_exception('no system turns') }}")
    with pytest.raises(InputError, match=r"refuses item 'q1' \(no system turns\)"):
        load_tokenizer(folder).encode(CHAT)
    set_template(folder, "{% if %}")
    with pytest.raises(InputError, match="chat template cannot be read"):
        load_tokenizer(folder)
    with pytest.raises(InputError, match="chat_template: 'llama' is not one of chatml"):
        load_tokenizer(folder, "llama")
    assert shipped_templates() == ["chatml", "llada2", "qwen2"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "chat template cannot be read"),
        ("{{ 1/0 }}", r"fails on item 'probe' \(ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails on item 'probe' .RecursionError"),
        ("", "leaves out the user's message .it gives ''"),
        ("Hello!", "leaves out the user's message .it gives 'Hello!'"),
        (5, "chat_template is a int, expected text"),
        (["x"], "chat_template is a list, but not of named templates"),
        ([{"name": "default"}], "chat_template is a list, but not of named templates"),
    ],
)
def test_a_template_that_cannot_be_used_is_found_by_a_probe(
    folder: Path, template: object, message: str
) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(InputError, match=f"{message}.*set `chat_template: chatml`"):
        check_prompts(folder, "", [CHAT])
    check_prompts(folder, "chatml", [CHAT])


def test_a_checkpoint_without_a_template_answers_raw_prompts_only(folder: Path) -> None:
    check_prompts(folder, "", [Item(item_id="r", prompt="abc")])
    with pytest.raises(InputError, match=r"set `chat_template: chatml`"):
        check_prompts(folder, "", [Item(item_id="r", prompt="abc"), CHAT])
    with pytest.raises(InputError, match=r"'nope\.jinja' is not one of chatml"):
        check_prompts(folder, "nope.jinja", [Item(item_id="r", prompt="abc")])


def test_a_special_token_is_text(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"id": 3}}))
    with pytest.raises(InputError, match=r"bos_token is \{'id': 3\}, expected text"):
        load_tokenizer(folder)


def test_a_template_cannot_reach_out_of_its_sandbox(folder: Path) -> None:
    set_template(folder, "{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InputError, match="refuses item"):
        load_tokenizer(folder).encode(CHAT)


def add_beginning(folder: Path, *, and_end: bool = False) -> None:
    """Make the tokenizer put <|pad|> before a text, and <|im_end|> after it."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    single = "<|pad|> $A <|im_end|>" if and_end else "<|pad|> $A"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<|pad|>", PAD), ("<|im_end|>", END)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("and_end", [False, True])
def test_exactly_one_beginning_token_when_the_tokenizer_adds_one(folder: Path, and_end: bool) -> None:
    plain = load_tokenizer(folder, "chatml").encode(Item(item_id="r", prompt="abc"))
    assert len(plain) == 3  # none when it adds none
    add_beginning(folder, and_end=and_end)
    encoder = load_tokenizer(folder, "chatml")
    assert encoder.encode(Item(item_id="r", prompt="abc")) == [PAD, *plain]
    assert encoder.encode(Item(item_id="r", prompt="<|pad|>abc")) == [PAD, *plain]
    assert encoder.encode(CHAT)[0] == START
    set_template(folder, "{{ bos_token }}{{ messages[0].content }}", bos_token={"content": "<|pad|>"})
    assert [token for token in load_tokenizer(folder).encode(CHAT) if token >= 256] == [PAD]


def test_raw_prompts_keep_every_space_and_newline(folder: Path) -> None:
    encoder = load_tokenizer(folder)
    text = "\n  def f(x):\n\treturn x \n"
    assert text_of(encoder, encoder.encode(Item(item_id="r", prompt=text))) == text


def test_decoding_skips_special_tokens(folder: Path) -> None:
    encoder = load_tokenizer(folder)
    ids = encoder.tokenizer.encode("né<|im_end|>x<|mask|>", add_special_tokens=False).ids
    assert encoder.decode(ids) == "néx"


def test_an_empty_prompt_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="the prompt has no tokens"):
        load_tokenizer(folder).encode(Item(item_id="r", prompt=""))


def test_truncation_and_padding_saved_with_the_tokenizer_are_off(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16, pad_id=PAD, pad_token=SPECIAL_TOKENS[0])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert len(load_tokenizer(folder).encode(Item(item_id="r", prompt="abcdefgh"))) == 8


def test_missing_and_broken_tokenizers(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="the tokenizer cannot be read"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        load_tokenizer(folder)
    (folder / "vocab.json").write_text('{"a": 0}')
    (folder / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(InputError, match=r"tokenizer_class is None and there is no tokenizer\.json"):
        load_tokenizer(folder)


def test_sdars_published_tokenizer_equals_transformers(folder: Path) -> None:
    named = os.environ.get("DLMGRID_SHARED")
    shared = Path(named) if named else Path(__file__).resolve().parents[2].parent / "shared"
    source = shared / "data" / "tokenizers" / "qwen"
    if not source.is_dir():
        pytest.skip(
            "SDAR's tokenizer is not here; set DLMGRID_SHARED to the folder that holds data/tokenizers"
        )
    import transformers

    (folder / "tokenizer.json").unlink()
    for file in source.iterdir():
        shutil.copy(file, folder / file.name)
    encoder = load_tokenizer(folder)
    theirs = transformers.Qwen2Tokenizer.from_pretrained(str(source))
    texts = [
        "Hello world",
        "def f(x):\n    return x**2  # é, naïve\r\n\r\n",
        "数学 12345 😀 don't I'LL",
        "   a  b\t\n c",
        "<|im_start|>user\n<|MASK|>hi<|im_end|>",
        "e\u0301 \u212b",
    ]
    for text in texts:
        ids = encoder.encode(Item(item_id="r", prompt=text))
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert encoder.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert encoder.encode(Item(item_id="r", prompt="Hello world")) == [9707, 1879]
    expected = theirs.apply_chat_template(CHAT.messages, tokenize=False, add_generation_prompt=True)
    assert encoder.render(CHAT) == expected + "It is "
    assert "<|im_start|>system" not in expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "qwen2",
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "llada2",
            "<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>How many?<|role_end|>"
            "<role>ASSISTANT</role>",
        ),
    ],
)
def test_shipped_templates_of_other_families(name: str, expected: str, folder: Path) -> None:
    item = Item(item_id="q", messages=[{"role": "user", "content": "How many?"}])
    assert load_tokenizer(folder, name).render(item) == expected
    system = [{"role": "system", "content": "Be brief."}, *(item.messages or [])]
    rendered = load_tokenizer(folder, name).render(Item(item_id="q", messages=system))
    assert rendered.count("Be brief.") == 1
    assert "You are Qwen" not in rendered


@pytest.mark.parametrize(
    ("family", "remedy"),
    [("llada2", "set `chat_template: llada2`"), ("nemotron", "add its chat_template.jinja")],
)
def test_the_remedy_for_a_missing_template_is_the_familys(family: str, remedy: str, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, tiny_family_config(family))
    with pytest.raises(InputError, match=remedy):
        load_tokenizer(tmp_path).encode(CHAT)
