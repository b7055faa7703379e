"""A pipeline against torch's own, on a model that torch can trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_zoo import Regression
from runs import job, losses, run
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
from toys import world
from zoo import vectors

STEPS, GLOBAL, MICRO, LR, SEED = 5, 8, 2, 0.05, 3


class Hidden(nn.Module):
    """The model without its loss, which torch's schedule wants apart."""

    def __init__(self, model: Regression) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model.head(self.model.hidden(x))


def train_with_torch() -> list[float]:
    """Train on torch's 1F1B; return the losses of the steps, on the last rank."""
    rank, _ = world()
    torch.manual_seed(SEED)
    data = vectors()
    batches = [
        torch.utils.data.default_collate(
            [data[(step * GLOBAL + index) % len(data)] for index in range(GLOBAL)]
        )
        for step in range(STEPS)
    ]
    parts = pipeline(
        Hidden(Regression()),
        mb_args=(batches[0]["x"][:MICRO],),
        split_spec={"model.blocks.2": SplitPoint.BEGINNING},
    )
    stage = parts.build_stage(rank, torch.device("cpu"))
    schedule = Schedule1F1B(stage, GLOBAL // MICRO, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(stage.submod.parameters(), LR)
    found = []
    for batch in batches:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(batch["x"])
        else:
            of_micros: list[Tensor] = []
            schedule.step(target=batch["y"], losses=of_micros)
            found.append(torch.stack(of_micros).mean().item())
        optimizer.step()
    return found


def test_losses_are_those_of_torchs_pipeline(ranks: Any, tmp_path: Path) -> None:
    keys = job(
        model="pipeline_zoo.py:Regression",
        data={"call": "zoo.py:vectors", "shuffle": False},
        steps=STEPS,
        batch={"global": GLOBAL, "micro": MICRO},
        optim={"name": "sgd", "lr": LR},
        lr={"schedule": "constant"},
        seed=SEED,
        hooks={},
        checkpoint=None,
        parallel={"pp": 2, "split": ["blocks.2"]},
    )
    ours = ranks(2).run(run, keys, str(tmp_path), None, None, None, {"dp": 1, "pp": 2})
    theirs = ranks(2).run(train_with_torch)[-1]
    assert not ours[0]["error"]
    assert list(losses(ours[0]).values()) == pytest.approx(theirs, rel=1e-6)
