"""The drafting methods by name, as plain data: what the driver checks a grid against. No torch here."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from dlmgrid.workers.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodInfo:
    """One method. ``implementation`` is ``module:function`` of its builder, imported by the worker only.

    ``parameters`` are keys of the method in a grid, given to the builder by name. ``file_key`` is the one of them
    that names its learned or calibrated part, a file ("" where there is none); ``reads`` says what that file holds:
    ``order_model``, ``draft_graph`` or ``set_model``. ``drafts_by_pass``: its drafts are passes of the target, by a
    decoder of its own (workers/decoding), which counts them as forwards; it is live only and takes no fold.
    """

    name: str
    title: str
    summary: str
    source: str
    lossless: bool
    implementation: str
    needs: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    decoders: tuple[str, ...] = (
        "static", "sequential", "threshold", "factor", "entropy_bounded", "causal", "llada", "dream",
    )  # fmt: skip
    file_key: str = ""
    reads: str = ""
    drafts_by_pass: bool = False


METHODS: dict[str, MethodInfo] = {
    method.name: method
    for method in (
        MethodInfo(
            name="none",
            title="Draft-free decoding",
            summary="The serialized run: one state a pass. Every other method is compared with it.",
            source="SDAR, generate.py of JetAstra/SDAR (block-wise decoding with a commit pass)",
            lossless=True,
            implementation="dlmgrid.workers.drafting.none:build",
        ),
        MethodInfo(
            name="ssd",
            title="Self-speculative decoding, confidence-ordered chain",
            summary=(
                "A chain of D states: the commit rule is applied again and again to the stale distributions of "
                "the last pass."
            ),
            source="Self Speculative Decoding for Diffusion LLMs, arXiv 2510.04147",
            lossless=True,
            implementation="dlmgrid.workers.drafting.ssd:build",
        ),
        MethodInfo(
            name="confidence_tree",
            title="Confidence tree",
            summary=(
                "The D states of largest mass, grown level by level; the next position is drawn from the stale "
                "confidences normalised over the positions still masked, equal states are merged, and a second "
                "token is tried where the first has a probability below 0.6."
            ),
            source="BlockSpec-style tree as compared in SPOT, arXiv 2610.22543",
            lossless=True,
            implementation="dlmgrid.workers.drafting.confidence_tree:build",
        ),
        MethodInfo(
            name="spiffy",
            title="Spiffy, calibrated draft graph",
            summary=(
                "The first D nodes of a graph of (position rank, token rank) sets that was selected on recorded "
                "runs of this model, decoder and temperature; positions and tokens are filled in at every root."
            ),
            source="Spiffy, arXiv 2509.18085",
            lossless=True,
            implementation="dlmgrid.workers.drafting.spiffy:build",
            needs=("a draft graph: dlmgrid calibrate TRAJ --method spiffy --out GRAPH.json",),
            parameters=("graph",),
            file_key="graph",
            reads="draft_graph",
        ),
        MethodInfo(
            name="spiffy_pruned",
            title="Spiffy with online pruning",
            summary=(
                "Of all nodes of a draft graph the D with the best stale probabilities in themselves and their best "
                "child; calibrate the graph for more nodes than D."
            ),
            source="Spiffy, arXiv 2509.18085 version 4; how children combine is this package's choice",
            lossless=True,
            implementation="dlmgrid.workers.drafting.spiffy:build_pruned",
            needs=("a draft graph: dlmgrid calibrate TRAJ --method spiffy --out GRAPH.json",),
            parameters=("graph",),
            file_key="graph",
            reads="draft_graph",
        ),
        MethodInfo(
            name="spot",
            title="SPOT, learned commit order",
            summary=(
                "The D states of largest mass, grown level by level; the next position comes from an order model "
                "that reads stale distributions only, equal states are merged, and a second token is tried where "
                "the first has a probability below 0.6."
            ),
            source="SPOT, arXiv 2610.22543",
            lossless=True,
            implementation="dlmgrid.workers.drafting.spot:build",
            needs=("an order model: dlmgrid train-order TRAJ --out FILE.safetensors",),
            parameters=("checkpoint",),
            file_key="checkpoint",
            reads="order_model",
        ),
        MethodInfo(
            name="spot_gamma",
            title="SPOT with a floor on mass",
            summary="SPOT's tree without the states whose mass is below gamma; the realised budget follows confidence.",
            source="SPOT, arXiv 2610.22543",
            lossless=True,
            implementation="dlmgrid.workers.drafting.spot_gamma:build",
            needs=(
                "an order model: dlmgrid train-order TRAJ --out FILE.safetensors",
                "gamma: dlmgrid calibrate TRAJ --method spot_gamma --checkpoint FILE.safetensors --out FILE.json",
            ),
            parameters=("checkpoint", "gamma"),
            file_key="checkpoint",
            reads="order_model",
        ),
        MethodInfo(
            name="spot_sets",
            title="SPOT-Sets, whole steps of a threshold decoder",
            summary=(
                "The D states of largest mass whose edges are target steps: a network that reads the drafted tokens, "
                "stale distributions and, where trained with them, hidden states predicts the target's distributions "
                "there, and so positions and tokens. Its decoder may cross blocks and draft first rounds (window)."
            ),
            source="SPOT, arXiv 2610.22543",
            lossless=True,
            implementation="dlmgrid.workers.drafting.spot_sets:build",
            needs=("a set model of this target: dlmgrid train-sets TRAJ --out FILE.safetensors",),
            parameters=("checkpoint",),
            decoders=("threshold", "factor"),
            file_key="checkpoint",
            reads="set_model",
        ),
        MethodInfo(
            name="spot_sets_gamma",
            title="SPOT-Sets with a floor on mass",
            summary="spot_sets without the states whose mass is below gamma; the realised budget follows confidence.",
            source="SPOT, arXiv 2610.22543",
            lossless=True,
            implementation="dlmgrid.workers.drafting.spot_sets:build_gamma",
            needs=("a set model of this target: dlmgrid train-sets TRAJ --out FILE.safetensors", "gamma"),
            parameters=("checkpoint", "gamma"),
            decoders=("threshold", "factor"),
            file_key="checkpoint",
            reads="set_model",
        ),
        MethodInfo(
            name="spot_sets_product",
            title="SPOT-Sets with product max-commit",
            summary=(
                "spot_sets, and a drafted state larger than the target's own step is taken where every new token is "
                "the target's choice and the product of their probabilities is at least product_tau. Approximate."
            ),
            source="SPOT, arXiv 2610.22543; the rule is this package's reading",
            lossless=False,
            implementation="dlmgrid.workers.drafting.spot_sets:build",
            needs=(
                "a set model of this target: dlmgrid train-sets TRAJ --out FILE.safetensors",
                "product_tau, below the decoder's threshold",
            ),
            parameters=("checkpoint", "product_tau"),
            decoders=("threshold",),
            file_key="checkpoint",
            reads="set_model",
        ),
        MethodInfo(
            name="linear_spec",
            title="Linear self-speculation",
            summary=(
                "For the decoder causal of nemotron: one pass in diffusion mode drafts the D tokens behind the newest "
                "one, one causal pass verifies and stores them. The published D is block length - 1."
            ),
            source="linear_spec_generate of Nemotron-Labs-Diffusion, without its optional draft adapter",
            lossless=True,
            implementation="dlmgrid.workers.drafting.none:build",
            decoders=("causal",),
            drafts_by_pass=True,
        ),
    )
}


DIAGNOSTIC_METHODS: dict[str, MethodInfo] = {
    method.name: method
    for method in (
        MethodInfo(
            name="oracle_position",
            title="Oracle positions, stale tokens (replay only)",
            summary="A chain through the positions that the target will commit: what a perfect order would give.",
            source="diagnosis of SPOT, arXiv 2610.22543",
            lossless=True,
            implementation="dlmgrid.workers.trajectories.diagnostic_drafters:oracle_position",
            needs=("recorded trajectories",),
        ),
        MethodInfo(
            name="oracle_token",
            title="Oracle tokens, confidence tree (replay only)",
            summary="The confidence tree with the tokens that the target will commit: what perfect tokens would give.",
            source="diagnosis of SPOT, arXiv 2610.22543",
            lossless=True,
            implementation="dlmgrid.workers.trajectories.diagnostic_drafters:oracle_token",
            needs=("recorded trajectories",),
        ),
        MethodInfo(
            name="stale_order",
            title="Oracle tokens, chain of stale order (replay only)",
            summary="The chain of ssd with the tokens that the target will commit: how far one stale order reaches.",
            source="diagnosis of SPOT, arXiv 2610.22543",
            lossless=True,
            implementation="dlmgrid.workers.trajectories.diagnostic_drafters:stale_order",
            needs=("recorded trajectories",),
        ),
    )
}
"""Methods that look into a recorded future: `dlmgrid replay` knows them, a live run cannot."""


ALL_METHODS: dict[str, MethodInfo] = {**METHODS, **DIAGNOSTIC_METHODS}


def get_method(name: str) -> MethodInfo:
    """The method called ``name``. Raises InputError naming the nearest known one."""
    if name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(name, METHODS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(METHODS)
    raise InputError(f"unknown method {name!r}; {hint}")
