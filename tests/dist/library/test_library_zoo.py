"""Users' models in a loop of the user's own: the same bits as through a job."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from own_loop import start
from zoo_runs import CASES, GLOBAL, OPTIM, STEPS, in_zoo, keys_of, train

import zrun_core
from zrun_core.distributed.rng import mix
from zrun_core.user_code.loss import compute_loss

_LOOKS_FIRST = {"penalty first"}  # at parameters, before the model is called


def loop(name: str, stage: int) -> list[float]:
    """What a worker does with the case's job, as a user would write it."""
    run, keys = start(), keys_of(name, stage)
    model = zrun_core.shard(
        in_zoo(keys["model"]),
        zero={"bucket": 2 << 10, **keys["zero"]},
        activations=keys.get("activations"),
    )
    torch.manual_seed(mix(0, 1 + run.rank))
    optimizer = zrun_core.optimizer(model, "adamw", **OPTIM)
    data, loss_of = in_zoo(keys["data"])(), in_zoo(keys["loss"]) if "loss" in keys else None
    share = GLOBAL // run.world_size
    losses = []
    for step in range(STEPS):
        first = step * GLOBAL + run.rank * share
        batch = torch.utils.data.default_collate(
            [data[(first + i) % len(data)] for i in range(share)]
        )
        with zrun_core.forward(model) if name in _LOOKS_FIRST else nullcontext():
            loss = compute_loss(model, batch, loss_of, share).value
        loss.backward()
        optimizer.step()
        losses.append(run.mean(loss))
    return losses


@pytest.mark.parametrize("name", CASES)
@pytest.mark.at_most(3)
def test_losses_are_those_of_the_job_to_the_bit(ranks, tmp_path, name):
    job = ranks(2).run(train, keys_of(name, 3), str(tmp_path))[0]["step"]
    for losses in ranks(2).run(loop, name, 3):
        assert losses == job
