"""Runs whose last checkpoint is of format 1 go on as if it were of today, and save as today."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loop import start
from runs import job, losses, run
from torch import nn

import zrun_core
from zrun_core.checkpoint.folder import CheckpointFolder, read_step

sys.path += [str(Path(__file__).parents[2] / "unit" / room) for room in ("checkpoint", "")]

import format_one
from test_format_one import WRITTEN


@pytest.mark.parametrize("num_ranks", [2, 1])
@pytest.mark.parametrize("stage", [3, 1])
@pytest.mark.at_most(2)
def test_a_job_goes_on_to_the_bit(ranks, tmp_path, stage, num_ranks):
    """From either format of the same step, on as many ranks as saved it, or others."""
    keys = job(zero=stage, precision="bf16", checkpoint={"every": 1, "keep": 9})
    ranks(2).run(run, keys, str(tmp_path / "new"), None, 5)
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    folders = {each: CheckpointFolder(tmp_path / each / "checkpoints") for each in ("new", "old")}
    for found in folders["old"].scan():
        format_one.rewrite(found.path)
    assert {found.manifest.format for found in folders["old"].scan()} == {1}
    new, old = (ranks(num_ranks).run(run, keys, str(tmp_path / each), {}) for each in folders)
    for ours, theirs in zip(new, old, strict=True):
        assert ours["error"] == theirs["error"] == ""
        assert losses(ours) == losses(theirs)
        assert ours["digest"] == theirs["digest"]
        assert ours["begun"].keys() == theirs["begun"].keys()
        assert ours["begun"]["digest"] == theirs["begun"]["digest"]
    newest = folders["old"].scan()[0]
    assert newest.manifest.format == 2
    assert newest.manifest.progress["steps"] > 5


def load_written(folder: str) -> dict[str, Any]:
    """What the library makes of a checkpoint that an older zrun has left, and saves of it."""
    run_ = start()
    model = zrun_core.shard(
        lambda: nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)),
        zero=3,
    )
    zrun_core.optimizer(model, "adam", lr=1e-2)
    loaded = zrun_core.load(folder, model)
    assert loaded is not None
    with zrun_core.gathered(model):
        state = {name: tensor.clone().numpy() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state().numpy()
    zrun_core.save(f"{folder}/again", model, step=3)
    return {"rank": run_.rank, "step": loaded.step, "state": state, "random": random}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_library_loads_what_an_older_zrun_wrote(ranks, tmp_path, num_ranks):
    from safetensors.torch import load_file

    shutil.copytree(WRITTEN, tmp_path / WRITTEN.name)
    saved = [load_file(WRITTEN / f"rank-0000{rank}.safetensors") for rank in (0, 1)]
    for told in ranks(num_ranks).run(load_written, str(tmp_path)):
        rank = told["rank"]
        assert told["step"] == 2
        for name, values in told["state"].items():
            expected = saved[0][f"value/{name}"]
            if num_ranks == 2 and rank == 1:  # each rank had averages of its own
                expected = saved[1].get(f"rank/buffer/1/{name}", expected)
            assert torch.equal(torch.from_numpy(values).view(-1), expected), name
        if num_ranks == 2:
            assert torch.equal(
                torch.from_numpy(told["random"]), saved[rank][f"rank/rng/{rank}/torch"]
            )
    again = read_step(tmp_path / "again" / "step-00000003")
    assert (again.format, again.world_size) == (2, num_ranks)
    assert again.tensors == read_step(WRITTEN).tensors
