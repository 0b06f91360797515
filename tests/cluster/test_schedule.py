"""Scheduling without Ray: affinity, references first, and what each kind of failure leads to."""

from __future__ import annotations

import pytest

from dlmgrid.cluster.failures import Failure
from dlmgrid.cluster.plan import Chain
from dlmgrid.cluster.schedule import MAX_ATTEMPTS, Scheduler
from dlmgrid.workers.cell import Cell
from dlmgrid.workers.units import Key, WorkUnit


def unit(model: str, method: str, items: tuple[str, ...], *, max_in_flight: int = 8) -> WorkUnit:
    cell = Cell(
        model=model, benchmark="b", prompt_version="1", method=method, budget=0 if method == "none" else 6,
        temperature=0.0, block_length=32, gen_length=64,
    )  # fmt: skip
    return WorkUnit(
        cell=cell, keys=tuple(Key(item, 0) for item in items), checkpoint=model, inputs="", output="",
        max_in_flight=max_in_flight,
    )  # fmt: skip


def chain(model: str, *items: str, has_reference: bool = True) -> Chain:
    reference = unit(model, "none", items) if has_reference else None
    return Chain(checkpoint=model, reference=reference, dependents=(unit(model, "ssd", items),))


def test_dependents_wait_for_their_reference_and_go_to_the_actor_that_ran_it() -> None:
    scheduler = Scheduler([chain("m", "a", "b")])
    reference = scheduler.next_unit(0)
    assert reference is not None
    assert reference.cell.is_reference
    assert scheduler.next_unit(1) is None
    assert scheduler.next_unit(0) is None
    scheduler.finish(reference, 0)
    assert scheduler.next_unit(1) is None
    dependent = scheduler.next_unit(0)
    assert dependent is not None
    assert dependent.cell.method == "ssd"
    scheduler.finish(dependent, 0)
    assert not scheduler.has_work


def test_an_idle_actor_takes_over_what_waits_for_a_busy_one() -> None:
    methods = ("ssd", "confidence_tree", "other")
    dependents = tuple(unit("m", method, ("a",)) for method in methods)
    scheduler = Scheduler([Chain(checkpoint="m", reference=unit("m", "none", ("a",)), dependents=dependents)])
    reference = scheduler.next_unit(0)
    assert reference is not None
    scheduler.finish(reference, 0)
    assert scheduler.next_unit(1) is None, "the actor that ran the reference comes first"
    first = scheduler.next_unit(0)
    taken = scheduler.next_unit(1)
    second = scheduler.next_unit(0)
    assert [found.cell.method for found in (first, taken, second) if found] == [
        "ssd",
        "other",
        "confidence_tree",
    ]
    assert scheduler.next_unit(1) is None
    assert not scheduler.has_work


def test_an_actor_keeps_its_model_until_that_queue_is_empty() -> None:
    chains = [chain(model, str(number), has_reference=False) for number in range(4) for model in ("m", "n")]
    scheduler = Scheduler(chains)
    order: dict[int, list[str]] = {0: [], 1: []}
    for _ in range(4):
        for actor in (0, 1):
            taken = scheduler.next_unit(actor)
            assert taken is not None
            order[actor].append(taken.checkpoint)
            scheduler.finish(taken, actor)
    assert sorted(order.values()) == [["m"] * 4, ["n"] * 4]


def test_an_actor_does_not_change_models_while_calls_are_out() -> None:
    scheduler = Scheduler([chain("m", "a"), chain("n", "b")])
    first = scheduler.next_unit(0)
    assert first is not None
    assert scheduler.next_unit(0) is None
    scheduler.finish(first, 0)
    dependent = scheduler.next_unit(0)
    assert dependent is not None
    assert dependent.checkpoint == first.checkpoint
    scheduler.finish(dependent, 0)
    other = scheduler.next_unit(0)
    assert other is not None
    assert other.checkpoint != first.checkpoint


def test_a_death_splits_a_unit_and_a_second_one_gives_the_item_up() -> None:
    scheduler = Scheduler([chain("m", "a", "b")])
    whole = scheduler.next_unit(0)
    assert whole is not None
    assert scheduler.fail(whole, 0, Failure.DIED) is False
    parts = [scheduler.next_unit(0), scheduler.next_unit(0)]
    assert [part.keys for part in parts if part] == [(Key("a", 0),), (Key("b", 0),)]
    assert parts[0] is not None
    assert parts[1] is not None
    assert scheduler.fail(parts[0], 0, Failure.TRANSIENT) is True
    scheduler.finish(parts[0], 0)
    assert scheduler.next_unit(0) is None
    scheduler.finish(parts[1], 0)
    dependent = scheduler.next_unit(0)
    assert dependent is not None
    assert len(dependent.keys) == 2
    assert scheduler.num_retried == 1


def test_out_of_memory_halves_then_splits_then_gives_up() -> None:
    scheduler = Scheduler(
        [Chain(checkpoint="m", reference=None, dependents=(unit("m", "ssd", ("a", "b"), max_in_flight=4),))]
    )
    sizes = []
    for _ in range(3):
        taken = scheduler.next_unit(0)
        assert taken is not None
        sizes.append((len(taken.keys), taken.max_in_flight))
        assert scheduler.fail(taken, 0, Failure.OUT_OF_MEMORY) is False
    assert sizes == [(2, 4), (2, 2), (2, 1)]
    single = scheduler.next_unit(0)
    assert single is not None
    assert len(single.keys) == 1
    assert scheduler.fail(single, 0, Failure.OUT_OF_MEMORY) is True


def test_input_errors_are_given_up_and_lost_nodes_are_nobodys_fault() -> None:
    scheduler = Scheduler([chain("m", "a", "b", has_reference=False)])
    taken = scheduler.next_unit(0)
    assert taken is not None
    assert scheduler.fail(taken, 0, Failure.INPUT) is True
    for attempt in range(2, MAX_ATTEMPTS + 1):
        assert scheduler.fail(taken, 0, Failure.PREEMPTED) is False
        taken = scheduler.next_unit(0)
        assert taken is not None
        assert (len(taken.keys), taken.attempt) == (2, attempt)
    assert scheduler.fail(taken, 0, Failure.PREEMPTED) is True


def test_what_waited_for_a_lost_actor_runs_elsewhere() -> None:
    scheduler = Scheduler([chain("m", "a", has_reference=False), chain("m", "b")])
    first, second = scheduler.next_unit(0), scheduler.next_unit(0)
    assert first is not None
    assert second is not None
    scheduler.finish(second, 0)
    scheduler.requeue(first, 0)
    scheduler.forget_actor(0)
    seen = []
    while (taken := scheduler.next_unit(1)) is not None:
        seen.append(taken.keys[0].item_id)
        scheduler.finish(taken, 1)
    assert seen == ["a", "b"]
    assert not scheduler.has_work


@pytest.mark.parametrize("num_actors", [1, 3])
def test_every_unit_comes_out_exactly_once(num_actors: int) -> None:
    chains = [chain(model, str(number)) for number in range(7) for model in ("m", "n", "o")]
    scheduler = Scheduler(chains)
    seen, out = [], []
    for _ in range(1000):
        for actor in range(num_actors):
            taken = scheduler.next_unit(actor)
            if taken is not None:
                out.append((taken, actor))
        if not out:
            break
        taken, actor = out.pop(0)
        seen.append(taken.unit_key)
        scheduler.finish(taken, actor)
    assert sorted(seen) == sorted(unit.unit_key for one in chains for unit in one.units)
