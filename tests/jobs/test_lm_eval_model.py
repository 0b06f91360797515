"""lm-eval's model class over the decoder: settings of each request, verdicts, refusals; on the shipped model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dlmgrid.workers.benchmarks.words import held_out_items
from dlmgrid.workers.decoding.paths import Verdict
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import Item
from dlmgrid.workers.models.catalog import resolve_checkpoint
from dlmgrid.workers.tables import GENERATIONS
from dlmgrid.workers.tokenization import load_tokenizer

pytest.importorskip("lm_eval")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what the imports of lm-eval warn of is not ours
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    from dlmgrid.jobs import lm_eval_model
    from dlmgrid.jobs.lm_eval_model import DlmgridLM

ITEMS = held_out_items(2)
SETTINGS = {"path": "reference", "method": "ssd", "budget": 6}


@pytest.fixture(scope="module")
def model() -> DlmgridLM:
    return DlmgridLM(**SETTINGS)


@pytest.fixture(autouse=True)
def _no_rows_of_other_tests(model: DlmgridLM) -> None:
    model.rows.clear()


def request(model: DlmgridLM, index: int = 0, **settings: Any) -> Instance:
    prompt = model.apply_chat_template(ITEMS[index].messages or [])
    return Instance("generate_until", {}, (prompt, settings), 0, metadata=("words", index, 1))


def test_is_registered_beside_the_models_of_lm_eval() -> None:
    assert get_model("dlmgrid") is DlmgridLM
    assert get_model("dummy").__name__ == "DummyLM"


def test_runs_a_generation_task_by_name_with_verdicts(tmp_path: Path) -> None:
    (tmp_path / "sums.yaml").write_text(
        "task: sums\ncustom_dataset: !function documents.load\noutput_type: generate_until\ntest_split: test\n"
        'doc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
        'generation_kwargs: {until: ["Question:"], max_gen_toks: 96, do_sample: false}\n'
        "filter_list:\n  - name: last\n    filter:\n"
        "      - {function: regex, regex_pattern: '#### (-?[0-9]+)'}\n      - {function: take_first}\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
        "metadata: {version: 1}\n"
    )
    (tmp_path / "documents.py").write_text(
        "import datasets\nfrom dlmgrid.workers.benchmarks.words import held_out_items\n"
        "def load(**_):\n"
        "    rows = [{'question': i.document['question'], 'answer': str(i.document['answer'])}\n"
        "            for i in held_out_items(1)]\n"
        "    return {'test': datasets.Dataset.from_list(rows)}\n"
    )
    results = simple_evaluate(
        model="dlmgrid",
        model_args={**SETTINGS, "verify": True, "rows": str(tmp_path / "rows.parquet")},
        tasks=["sums"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    assert results is not None
    assert results["results"]["sums"]["exact_match,last"] == 1.0
    assert results["config"]["exactness"] == {
        "num_answers": 1, "num_checked": 1, "num_exact_tokens": 1, "num_exact_path": 1, "num_exact_bits": 1,
    }  # fmt: skip
    table = pq.read_table(tmp_path / "rows.parquet")
    assert table.schema.equals(GENERATIONS)
    assert table.column("exact_bits").to_pylist() == [True]
    assert table.column("item_id").to_pylist() == ["sums/0"]
    texts = [sample["resps"][0][0] for sample in results["samples"]["sums"]]
    assert table.column("text").to_pylist() == texts


def test_each_request_has_its_own_length_and_stop_strings(model: DlmgridLM) -> None:
    whole, short, cut, aliased = model.generate_until(
        [
            request(model, max_gen_toks=20, until=[]),
            request(model, max_gen_toks=5),
            request(model, max_gen_toks=20, until=["=", "\n"]),
            request(model, max_new_tokens=5, until=""),
        ]
    )
    lengths = [row["generated_tokens"] for row in model.rows]
    assert sorted(lengths) == [5, 5, 20, 20]
    assert whole.startswith(short)
    assert short == aliased
    assert "=" in whole
    assert cut == whole.split("=", 1)[0].split("\n", 1)[0]


def test_answers_come_back_in_the_order_of_the_requests(model: DlmgridLM) -> None:
    alone = [model.generate_until([request(model, index, max_gen_toks=length)])[0] for index, length in
             ((0, 4), (1, 9), (1, 4))]  # fmt: skip
    together = model.generate_until(
        [
            request(model, 0, max_gen_toks=4),
            request(model, 1, max_gen_toks=9),
            request(model, 1, max_gen_toks=4),
        ]
    )
    assert together == alone


def test_sampling_follows_the_temperature_and_repeats_differ(model: DlmgridLM) -> None:
    hot = request(model, max_gen_toks=8, do_sample=True, temperature=1.5)
    first, second = model.generate_until([hot, hot])
    assert first != second
    assert [row["repeat"] for row in model.rows] == [0, 1]
    assert {row["temperature"] for row in model.rows} == {1.5}
    assert model.generate_until([hot, hot]) == [first, second]
    greedy = request(model, max_gen_toks=8, do_sample=False, temperature=1.5)
    assert model.generate_until([greedy]) == model.generate_until([request(model, max_gen_toks=8)])


def test_do_sample_without_a_temperature_is_temperature_1(model: DlmgridLM) -> None:
    model.generate_until([request(model, max_gen_toks=4, do_sample=True)])
    assert model.rows[0]["temperature"] == 1.0


def test_a_chat_is_rendered_as_the_product_renders_it(model: DlmgridLM) -> None:
    encoder = load_tokenizer(resolve_checkpoint("reference"))
    messages = [{"role": "user", "content": "How many?"}]
    opened = [*messages, {"role": "assistant", "content": "So"}]
    prefixed = Item(item_id="a", messages=messages, assistant_prefix="So")
    assert model.apply_chat_template(messages) == encoder.render(Item(item_id="a", messages=messages))
    assert model.apply_chat_template(opened, add_generation_prompt=False) == encoder.render(prefixed)
    with pytest.raises(InputError, match="cannot be continued"):
        model.apply_chat_template(messages, add_generation_prompt=False)
    assert "message" in model.chat_template(True)
    assert model.chat_template(False) == ""
    with pytest.raises(InputError, match="chat_template=NAME"):
        model.chat_template("other")


def test_a_difference_is_reported_and_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = DlmgridLM(**SETTINGS, verify=True)
    found = Verdict(
        exact_tokens=True, exact_path=False, exact_bits=False, first_divergence_step=3,
        first_divergence_position=9, top2_margin=0.5,
    )  # fmt: skip
    monkeypatch.setattr(lm_eval_model, "compare", lambda row, reference: found)
    monkeypatch.setattr(DlmgridLM, "num_broken_claims", 0)
    model.generate_until([request(model, max_gen_toks=4)])
    assert DlmgridLM.num_broken_claims == 1
    assert model.exactness()["num_exact_tokens"] == 1
    assert model.exactness()["num_exact_bits"] == 0
    said = capsys.readouterr().err
    assert (
        "words/0 repeat 0 differs from its serialized run in path, bits; first at step 3, position 9" in said
    )
    assert "1 answers compared with their serialized run: 1 differ" in said


def test_without_verify_there_is_no_verdict(model: DlmgridLM) -> None:
    model.generate_until([request(model, max_gen_toks=4)])
    assert model.exactness() == {
        "num_answers": 1, "num_checked": 0, "num_exact_tokens": 0, "num_exact_path": 0, "num_exact_bits": 0,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling"])
def test_likelihoods_are_refused(model: DlmgridLM, kind: str) -> None:
    with pytest.raises(InputError, match="output_type generate_until"):
        getattr(model, kind)([])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_p": 0.9}, "--gen_kwargs top_p=1"),
        ({"top_k": 5}, "--gen_kwargs top_k=0"),
        ({"guidance": 2}, "generation setting 'guidance' is not known"),
        ({"max_gen_toks": 0}, "max_gen_toks is 0"),
        ({"do_sample": True, "temperature": -1.0}, r"gen_kwargs: temperatures\[0\]: .* -1.0"),
        ({"max_gen_toks": 10**6}, "the model has"),
    ],
)
def test_what_cannot_be_honoured_is_refused_before_decoding(
    model: DlmgridLM, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        model.generate_until([request(model, max_gen_toks=4), request(model, 1, **settings)])
    assert model.rows == []


def test_settings_that_change_nothing_are_accepted(model: DlmgridLM) -> None:
    plain, neutral = model.generate_until(
        [request(model, max_gen_toks=4), request(model, max_gen_toks=4, top_p=1.0, top_k=0, num_beams=1)]
    )
    assert plain == neutral


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "name one checkpoint"),
        ({"path": "reference", "pretrained": "other"}, "name one checkpoint"),
        ({"path": "reference", "metod": "ssd"}, "unknown argument 'metod'; did you mean 'method'"),
        ({"path": "reference", "method": "sdd", "budget": 4}, "did you mean 'ssd'"),
        ({"path": "reference", "method": "ssd"}, "needs a budget"),
        ({"path": "reference", "budget": 4}, "needs a budget"),
        ({"path": "reference", "decoder": "dynamic"}, "'dynamic' is not one of 'published', 'static'"),
        ({"path": "reference", "seed": "x"}, "seed"),
        ({"path": "nowhere"}, "no folder here"),
        ({"path": "reference", "rows": "nowhere/rows.parquet"}, "its folder does not exist"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        DlmgridLM(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [({"batch_size": 1}, 8), ({"batch_size": 3}, 3), ({"batch_size": "auto"}, 8),
     ({"batch_size": 3, "max_in_flight": 2}, 2)],
)  # fmt: skip
def test_samples_in_flight(arguments: dict[str, Any], expected: int) -> None:
    model = DlmgridLM(path="reference", **arguments)
    assert model.get_model_info()["dlmgrid_settings"]["max_in_flight"] == expected
