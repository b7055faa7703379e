"""A step whose manifest and records fit their digests, and whose content cannot be.

Every rank goes on from the one before.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forging import Change, forge, forge_record
from own_loop import start
from torch import nn

import zrun_core
from zrun_core.errors import CheckpointError


def streams_of_another_version(raw: dict[str, Any]) -> None:
    raw["rng"]["python"]["version"] = 9


def no_streams(raw: dict[str, Any]) -> None:
    raw["rng"] = {}


def a_stream_under_another_name(raw: dict[str, Any]) -> None:
    for own in raw["own"]:
        if own["name"] == "rng/1/torch":
            own["name"] = "rng/1/other"


def a_position_beyond_the_stream(raw: dict[str, Any]) -> None:
    raw["rng"]["numpy"]["position"] = 10**6


def a_data_stream_without_its_key(raw: dict[str, Any]) -> None:
    raw["rng"]["data"] = {}


def a_key_beyond_all_keys(raw: dict[str, Any]) -> None:
    raw["rng"]["inside"]["key"] = 2**32


def an_order_of_other_units(raw: dict[str, Any]) -> None:
    raw["learnt"]["order"] = ["nope"]


def an_order_without_a_unit(raw: dict[str, Any]) -> None:
    raw["learnt"]["order"].pop()


# By changes of the record of rank 1, and by those of the manifest.
SKIPPED: dict[Change, str] = {
    streams_of_another_version: "no random stream can go on from it: ValueError",
    no_streams: "no random stream can go on from it: KeyError",
    a_stream_under_another_name: "no random stream can go on from it: KeyError",
    a_position_beyond_the_stream: (
        "no random stream can go on from it: ValueError: position 1000000"
    ),
    a_data_stream_without_its_key: "no random stream can go on from it: KeyError",
    a_key_beyond_all_keys: "no random stream can go on from it: ValueError: key '4294967296'",
    an_order_of_other_units: "the order of reductions that it holds is of other units",
    an_order_without_a_unit: "the order of reductions that it holds is of other units",
}


def a_rate_in_words(raw: dict[str, Any]) -> None:
    raw["progress"]["groups"][""][0]["lr"] = "fast"


def a_truth_in_numbers(raw: dict[str, Any]) -> None:
    raw["progress"]["groups"][""][0]["maximize"] = 1.5


def moments_that_are_integers(raw: dict[str, Any]) -> None:
    for tensor in raw["tensors"]:
        tensor["states"]["exp_avg"] = "int32"


def a_count_that_is_a_moment(raw: dict[str, Any]) -> None:
    for tensor in raw["tensors"]:
        tensor["scalars"]["exp_avg"] = tensor["scalars"].pop("step")
        tensor["states"]["step"] = tensor["states"].pop("exp_avg")


def weights_that_are_integers(raw: dict[str, Any]) -> None:
    raw["tensors"][0]["dtype"] = "int32"
    raw["tensors"][0]["states"]["value"] = "int32"


REFUSED: dict[Change, str] = {
    a_rate_in_words: "the optimizer's lr is 'fast' in the checkpoint, 0.01 here",
    a_truth_in_numbers: "the optimizer's maximize is '1.5' in the checkpoint, False here",
    moments_that_are_integers: "the optimizer kept exp_avg (integer), exp_avg_sq, step of",
    a_count_that_is_a_moment: "the optimizer kept exp_avg (a number), exp_avg_sq, step (float) of",
    weights_that_are_integers: "0.weight is int32 in the checkpoint and float32 in the model",
}


def load_forged(folder: str) -> dict[str, str]:
    """What `load` says to each change of step 2."""
    run = start()
    model = zrun_core.shard(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), zero=2
    )
    optimizer = zrun_core.optimizer(model, "adam", lr=1e-2)
    for step in (1, 2):
        model(torch.randn(2, 8)).mean().backward()
        optimizer.step()
        zrun_core.save(folder, model, step=step)
    step_2 = Path(folder, "step-00000002")
    good = {path: path.read_bytes() for path in step_2.iterdir()}
    said = {}
    for change in (*SKIPPED, *REFUSED):
        dist.barrier()
        if run.is_main:
            for path, content in good.items():
                path.write_bytes(content)
            if change in SKIPPED:
                forge_record(step_2, 1, change)
            else:
                forge(step_2, change)
        dist.barrier()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                loaded = zrun_core.load(folder, model)
            except CheckpointError as error:
                said[change.__name__] = f"refused: {error}"
            else:
                skipped = " ".join(str(each.message) for each in told)
                said[change.__name__] = (
                    f"step {loaded.step if loaded is not None else None}: {skipped}"
                )
    return said


def test_every_rank_goes_on_from_the_step_before(ranks, tmp_path):
    first, second = ranks(2).run(load_forged, str(tmp_path))
    for change, words in SKIPPED.items():
        assert first[change.__name__].startswith(f"step 1: step 2 is skipped: {words}")
        assert "(rank 1)" in first[change.__name__]
        assert second[change.__name__] == "step 1: "
    for change, words in REFUSED.items():
        for said in (first, second):
            assert said[change.__name__].startswith(f"refused: {words}")
