"""An optimizer is tried where it updates; a share of the states is told in units."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zrun_core.errors import JobError
from zrun_core.memory.buffers import ON_DEVICE, Placement, Tier
from zrun_core.optim.layerwise import Lamb
from zrun_core.optim.resolve import OptimizerSpec
from zrun_core.optim.where import resolve_where_placed
from zrun_core.plan.memory.states import plan_model, settings_of
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.optim import OptimConfig
from zrun_core.train.parallelize import moved_share

CUDA = torch.device("cuda")  # where no test computes
HOST = Placement(grad=Tier.HOST, optimizer=Tier.HOST)
DISK = Placement(grad=Tier.DISK, optimizer=Tier.DISK)


class NeedsGpu(torch.optim.AdamW):
    """As one whose kernel was written for GPUs."""

    def step(self, closure: Any = None) -> None:
        if not all(param.is_cuda for group in self.param_groups for param in group["params"]):
            raise RuntimeError("this kernel takes CUDA tensors")


def chosen(placement: Placement, device: torch.device = CUDA, **keys: Any) -> OptimizerSpec:
    config = OptimConfig.model_validate({"name": "adamw", **keys})
    return resolve_where_placed(
        config, {"my:opt": NeedsGpu, "my:lamb": Lamb}.get, device, placement
    )


def test_states_on_the_host_are_updated_by_its_cpu_which_is_where_the_optimizer_is_tried():
    assert chosen(HOST).kwargs["fused"] is True


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"args": {"capturable": True}}, r"adamw cannot .*If capturable=True"),
        ({"name": "my:opt"}, r"my:opt cannot .*\(this kernel takes CUDA tensors\)"),
    ],
)
@pytest.mark.parametrize("placement", [HOST, DISK])
def test_one_that_only_a_gpu_can_do_is_refused_there(keys, why, placement):
    start = f"^offload.optimizer: {placement.optimizer}: its states are updated on the CPU, and "
    with pytest.raises(JobError, match=start + why + r".*; leave out what only a GPU can do"):
        chosen(placement, **keys)


def test_a_job_that_computes_on_a_cpu_has_the_words_of_any_other():
    with pytest.raises(JobError, match=r"^optim: my:opt cannot update flat slices"):
        chosen(DISK, torch.device("cpu"), name="my:opt")


def test_layer_wise_updates_stay_in_memory_by_whatever_name():
    with pytest.raises(JobError, match="disk: my:lamb proposes the updates of all layers before"):
        chosen(DISK, name="my:lamb")
    assert chosen(HOST, name="my:lamb").layer_wise


def test_a_share_is_told_in_the_units_that_it_comes_to():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(10)))
    job = JobConfig.model_validate(
        {
            "name": "j",
            "model": "m:f",
            "data": "m:f",
            "steps": 1,
            "batch": {"micro": 1},
            "zero": {"units": [r"\d+"]},
        }
    )
    planned = plan_model(model, settings_of(job, lambda name: None, "cpu"))
    layouts = planned.layouts()
    assert len(layouts) == 10
    for fraction, words in [
        (1e-9, "offload.fraction 1e-09: the states of 1 of 10 units leave the device, of 10% of"),
        (0.25, "offload.fraction 0.25: the states of 3 of 10 units leave the device, of 30% of"),
    ]:
        (note,) = moved_share(layouts, Placement(optimizer=Tier.HOST, fraction=fraction))
        assert note == f"{words} the parameters"
    nothing = moved_share(layouts, Placement(optimizer=Tier.HOST, fraction=0.0))
    assert nothing == ["offload.fraction 0: every state stays on the device"]
    assert moved_share(layouts, HOST) == moved_share(layouts, ON_DEVICE) == []
