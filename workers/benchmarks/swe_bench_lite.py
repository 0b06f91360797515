"""SWE-bench Lite, prompts only: 300 issues of Python projects, each asked for a patch.

The prompt names the repository and its commit and quotes the issue; no source file is shown, so it is a
long-answer code workload, not SWE-bench's retrieval setting. Example document::

    {"instance_id": "astropy__astropy-12907", "repo": "astropy/astropy", "base_commit": "d16bfe05…"}
"""

from __future__ import annotations

from pathlib import Path

from dlmgrid.workers.benchmarks.data import load_rows
from dlmgrid.workers.benchmarks.data_file import DataFile
from dlmgrid.workers.benchmarks.generation_set import generation_set
from dlmgrid.workers.items import Item

SWE_BENCH_LITE_TEST = DataFile(
    path="swebench_lite/swebench_lite.jsonl",
    columns=("instance_id", "repo", "base_commit", "problem_statement"),
    num_rows=300,
    content_digest="5d8a67c4cca0b9809bea0296835cc78a5b62ed4f2ba1255b371b32e32640dc93",
    github=(
        "joyon1104/coding-agent-eval",
        "a7aa1775595c768e432c6ae3e3df6654caa777b9",
        "data/swebench_lite_origin.jsonl",
    ),
)


def _load(data: str | Path | None, limit: int | None, num_fewshot: int) -> list[Item]:
    items = []
    for row in load_rows(SWE_BENCH_LITE_TEST, data)[:limit]:
        content = (
            f"Here is an issue of the repository {row['repo']} at commit {row['base_commit']}.\n\n<issue>\n"
            f"{row['problem_statement']}\n</issue>\n\nWrite a patch in unified diff format that resolves it."
        )
        document = {name: row[name] for name in ("instance_id", "repo", "base_commit")}
        messages = [{"role": "user", "content": content}]
        items.append(Item(item_id=row["instance_id"], messages=messages, document=document))
    return items


SWE_BENCH_LITE = generation_set(
    name="swe_bench_lite",
    title="SWE-bench Lite issues (prompts only)",
    prompt="the repository, the commit and the issue, and a request for a unified diff; no source file is shown",
    prompt_version="swe-bench-lite-issue-1",
    gen_length=1024,
    why_not_scored="the repositories' tests need their checkouts and environments",
    loader=_load,
    files=(SWE_BENCH_LITE_TEST,),
)
