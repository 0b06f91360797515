"""AlpacaEval's instructions: 805 requests from five sources, as chat. Example document::

{"dataset": "helpful_base"}
"""

from __future__ import annotations

from pathlib import Path

from dlmgrid.workers.benchmarks.data import load_rows
from dlmgrid.workers.benchmarks.data_file import DataFile
from dlmgrid.workers.benchmarks.generation_set import generation_set
from dlmgrid.workers.items import Item

ALPACA_EVAL = DataFile(
    path="alpaca/alpaca_eval_text_davinci_003.json",
    columns=("dataset", "instruction"),
    num_rows=805,
    content_digest="35868c8db308bec562a51e16566bf46118679b8e7fe1e51b590ab2c4fc781bbd",
    github=(
        "tatsu-lab/alpaca_eval",
        "cd543a149df89434d8a54582c0151c0b945c3d20",
        "results/text_davinci_003/model_outputs.json",
    ),
)


def _load(data: str | Path | None, limit: int | None, num_fewshot: int) -> list[Item]:
    return [
        Item(
            item_id=f"alpaca/{index}",
            messages=[{"role": "user", "content": row["instruction"]}],
            document={"dataset": row["dataset"]},
        )
        for index, row in enumerate(load_rows(ALPACA_EVAL, data)[:limit])
    ]


ALPACA = generation_set(
    name="alpaca",
    title="AlpacaEval instructions",
    prompt="the instruction alone as the user turn",
    prompt_version="alpaca-eval-instruction-1",
    gen_length=512,
    why_not_scored="AlpacaEval's score is a judge model's preference",
    loader=_load,
    files=(ALPACA_EVAL,),
)
