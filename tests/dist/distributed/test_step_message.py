"""The step's message: one where all ranks train the same parameters, else two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_comm import CPU, join
from toys import world

import zrun_core.distributed.comm
from zrun_core.distributed.comm import Comm, CommPhase, TrafficKey, equality_terms, terms_agree
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.distributed.step_message import StepContribution, all_reduce_step
from zrun_core.distributed.transport import Group


def say(said: dict[str, Any]) -> StepContribution:
    square = torch.tensor(said["square"], dtype=torch.float64)
    elsewhere = None
    if "elsewhere" in said:
        elsewhere = torch.tensor(said["elsewhere"], dtype=torch.float64)
    return StepContribution(
        NamedVector.of(CPU, **said["sums"]), square, said["schedule"], bytes(said["got"]), elsewhere
    )


def heard(said: list[dict[str, Any]], data: list[tuple[int, ...]]) -> dict[str, Any]:
    """Return what this rank hears where each rank says its part of `said`, and what it sent."""
    rank, _ = world()
    comm, everyone = join()
    mine = next(ranks for ranks in data if rank in ranks)
    handles = [torch.distributed.new_group(list(ranks)) for ranks in data]
    group = Group("data", mine, mine.index(rank), handles[data.index(mine)])
    comm.phase = CommPhase.STEP
    found = all_reduce_step(say(said[rank]), group if len(data) > 1 else everyone, everyone, comm)
    return {
        "sums": dict(zip(found.sums.names, found.sums.values.tolist(), strict=True)),
        "square": float(found.square),
        "agreed": bool(found.agreed),
        "num_got": found.num_with_grad.tolist(),
        "sent": dict(comm.drain()),
    }


def speaker(rank: int, got: list[int], schedule: int = 77) -> dict[str, Any]:
    sums = {"weight": 1.0 + rank, "loss": 0.5 * rank}
    return {"sums": sums, "square": 10.0 * rank, "schedule": schedule, "got": got}


def test_one_message_says_everything_where_all_train_the_same(ranks):
    said = [speaker(0, [1, 0, 1]), speaker(1, [1, 0, 0])]
    for found in ranks(2).run(heard, said, [(0, 1)]):
        assert found["sums"] == {"weight": 3.0, "loss": 0.5}
        assert found["square"] == 10.0
        assert found["agreed"]
        assert found["num_got"] == [2, 0, 1]
        numbers = 2 + 1 + 2 + 3  # sums, square, agreement, parameters
        assert found["sent"] == {TrafficKey("small", "world", CommPhase.STEP): 8 * numbers}


@pytest.mark.parametrize("direct", [True, False])
def test_stages_of_other_parameters_tell_each_other_sums_only(ranks, direct):
    """The pairs have different numbers of parameters, and gather differently: that is no
    disagreement.
    """
    said = [
        speaker(0, [1, 0, 1], 5),
        speaker(1, [0, 0, 1], 5),
        speaker(2, [1], 6),
        speaker(3, [1], 6),
    ]
    for rank, found in enumerate(ranks(4).run(heard_by, direct, said, [(0, 1), (2, 3)])):
        assert found["sums"] == {"weight": 10.0, "loss": 3.0}
        assert found["square"] == 60.0
        assert found["agreed"]
        assert found["num_got"] == ([1, 0, 2] if rank < 2 else [2])
        sent = {key.axis: num_bytes for key, num_bytes in found["sent"].items()}
        assert sent == {"data": 8 * (2 + (3 if rank < 2 else 1)), "world": 3 * 8 * (2 + 1 + 1)}


def test_what_other_stages_got_is_said_too(ranks):
    """The first stage has [a, b], the second one [b, c]: the ranks of both got one of b alone."""
    said = [
        {**speaker(0, [0, 0], 5), "elsewhere": [0, 1]},
        {**speaker(1, [0, 1], 5), "elsewhere": [0, 0]},
        {**speaker(2, [1, 0], 6), "elsewhere": [0, 0]},
        {**speaker(3, [0, 0], 6), "elsewhere": [1, 0]},
    ]
    found = ranks(4).run(heard, said, [(0, 1), (2, 3)])
    assert [each["num_got"] for each in found] == [[0, 2], [0, 2], [2, 0], [2, 0]]
    assert all(each["agreed"] for each in found)


def heard_by(
    direct: bool, said: list[dict[str, Any]], data: list[tuple[int, ...]]
) -> dict[str, Any]:
    zrun_core.distributed.comm.DIRECT_MAX_RANKS = 8 if direct else 1
    try:
        return heard(said, data)
    finally:
        zrun_core.distributed.comm.DIRECT_MAX_RANKS = 8


def test_all_ranks_hear_that_two_of_one_pair_gathered_differently(ranks):
    said = [speaker(0, [1]), speaker(1, [1]), speaker(2, [1], 5), speaker(3, [1], 6)]
    assert [found["agreed"] for found in ranks(4).run(heard, said, [(0, 1), (2, 3)])] == [False] * 4
    assert [found["agreed"] for found in ranks(4).run(heard, said, [(0, 1, 2, 3)])] == [False] * 4


def name(numbers: list[int]) -> bool:
    comm, group = join()
    return comm.all_equal(numbers[group.index], group, name="numbers")


@pytest.mark.parametrize(
    ("numbers", "equal"),
    [([7, 7, 7], True), ([7, 7, 8], False), ([0, 0, 0], True), ([1 << 19, 0, 0], False)],
)
def test_whether_all_ranks_name_one_number(ranks, numbers, equal):
    assert ranks(3).run(name, numbers) == [equal] * 3


@pytest.mark.parametrize("number", [0, 1, 0xFFFFF, 123_456_789_012])
def test_agreement_of_thousands_of_ranks_is_exact(number):
    own = torch.tensor(equality_terms(number), dtype=torch.float64)
    assert bool(terms_agree(own * 8192, 8192))
    other = torch.tensor(equality_terms(number + 1), dtype=torch.float64)
    assert not bool(terms_agree(own * 8191 + other, 8192))


def test_one_rank_agrees_with_itself_without_a_message():
    comm = Comm(CPU)
    assert comm.all_equal(3, Group("world", (0,), 0, None), name="alone")
    assert not comm.drain()
