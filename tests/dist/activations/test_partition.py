"""Inputs of recomputed blocks as slices over a tensor group: the same bits, and exact bytes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from distances import Found, assert_equal, whole
from runs import PoolWorker, job, losses, run
from small_jobs import gpt

from zrun_core.distributed.comm import Comm, CommPhase, TrafficKey

STEPS, DEPTH, MICRO, SEQ, DIM = 2, 4, 2, 6, 16
NUMEL = MICRO * SEQ * DIM
GATHERS = TrafficKey("all_gather", "tensor", CommPhase.BACKWARD)


def small(**keys: Any) -> dict[str, Any]:
    return job(
        **{
            "model": gpt(dim=DIM, depth=DEPTH, heads=4, dropout=0.1),
            "data": "runs.py:Plain",
            "steps": STEPS,
            "batch": {"global": 8, "micro": MICRO},
            "hooks": {},
            "checkpoint": None,
            **keys,
        }
    )


def counted(keys: dict[str, Any], folder: str, dims: dict[str, int]) -> dict[str, Any]:
    """Train, and count what went over the tensor group."""
    keys = {**keys, "guards": {"check_values": False}}  # which makes a step of its own
    comms: list[Comm] = []
    connect = PoolWorker._connect

    def watched(self: PoolWorker, *args: Any) -> Any:
        comm, mesh = connect(self, *args)
        comms.append(comm)
        return comm, mesh

    with patch.object(PoolWorker, "_connect", watched):
        found = run(keys, folder, dims=dims)
    [comm] = comms
    return found | {"calls": dict(comm.calls), "received": dict(comm.received_bytes)}


def with_and_without(
    ranks: Any, folder: Path, dims: dict[str, int], activations: dict[str, Any], **keys: Any
) -> tuple[Found, Found]:
    """Train with slices, and with whole inputs on the device; both come to the same bits."""
    checkpoint = {key: value for key, value in activations.items() if key in ("checkpoint", "n")}
    found = []
    for number, section in enumerate((activations, checkpoint)):
        keys = small(**keys) | {"activations": section}
        size = dims["dp"] * dims["tp"] * dims.get("pp", 1)
        found.append(ranks(size).run(counted, keys, str(folder / str(number)), dims))
    sliced, kept = found
    assert [losses(each) for each in sliced] == [losses(each) for each in kept]
    assert any(losses(each) for each in sliced)
    assert_equal(whole(sliced), whole(kept))
    return sliced, kept


def assert_counts(sliced: Found, kept: Found, tp: int, blocks: list[int]) -> None:
    """Of each rank: one gather of b*s*h for each input that it keeps a slice of, and no more."""
    for one, other, num_blocks in zip(sliced, kept, blocks, strict=True):
        micro_batches = 8 // MICRO * STEPS
        calls = Counter(one["calls"])
        calls.subtract(other["calls"])
        assert {key: n for key, n in calls.items() if n} == {GATHERS: num_blocks * micro_batches}
        received = Counter(one["received"])
        received.subtract(other["received"])
        of_one = (tp - 1) * 4 * -(-NUMEL // tp)
        assert {key: n for key, n in received.items() if n} == {
            GATHERS: num_blocks * micro_batches * of_one
        }


def kept_bytes(of_rank: dict[str, Any]) -> dict[str, int]:
    [*_, last] = (event for event in of_rank["events"] if event["type"] == "memory")
    return last["kept_bytes"]


@pytest.mark.parametrize(
    ("tp", "checkpoint", "blocks"),
    [(4, "full", DEPTH), (2, "every_n", DEPTH // 2), (2, "selective", DEPTH), (2, "full", DEPTH)],
)
@pytest.mark.at_most(1)
def test_bits_gathers_and_bytes(
    ranks: Any, tmp_path: Path, tp: int, checkpoint: str, blocks: int
) -> None:
    activations = {"checkpoint": checkpoint, "partition": True}
    dims = {"tp": tp, "dp": 1}
    found = with_and_without(ranks, tmp_path, dims, activations, parallel={"tp": tp})
    assert_counts(*found, tp, [blocks] * tp)
    for each in found[0]:
        assert kept_bytes(each) == {"device": blocks * 4 * -(-NUMEL // tp)}


@pytest.mark.thorough
def test_with_pipelines_and_shards_and_a_disk(ranks: Any, tmp_path: Path) -> None:
    found = with_and_without(
        ranks,
        tmp_path,
        {"tp": 2, "pp": 2, "dp": 1},
        {"checkpoint": "full", "partition": True, "offload": "disk"},
        parallel={"tp": 2, "pp": 2},
        zero=3,
        offload={"optimizer": "disk", "grad": "disk", "param": "disk"},
    )
    assert_counts(*found, 2, [DEPTH // 2] * 4)
    assert all(kept_bytes(each)["disk"] for each in found[0])


@pytest.mark.thorough
def test_slices_of_the_sequence_are_not_divided_again(ranks: Any, tmp_path: Path) -> None:
    sliced, kept = with_and_without(
        ranks,
        tmp_path,
        {"tp": 2, "dp": 1},
        {"checkpoint": "full", "partition": True},
        parallel={"tp": 2, "sequence": True},
    )
    assert [each["calls"] for each in sliced] == [each["calls"] for each in kept]
