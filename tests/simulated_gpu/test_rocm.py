"""torch for ROCm, which calls its GPUs cuda and RCCL nccl: what is known of it without one."""

from __future__ import annotations

import textwrap

import pytest
import ranks

TRAIN = """
    import torch.nn as nn
    import zrun_core

    if os.environ["HIP"]:
        torch.version.hip, torch.version.cuda = os.environ["HIP"], None
    run = zrun_core.init(seed=3)
    say(str(run.device))

    def build():
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    model = zrun_core.shard(build, zero={"stage": 3}, offload={"optimizer": "host"})
    optimizer = zrun_core.optimizer(model, "adamw", lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        x = torch.randn(16, 8, generator=generator).to(run.device)
        loss = (model(x) - x.sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(loss.item())
    """


@pytest.fixture(scope="module")
def of_cuda() -> list[list[object]]:
    return trained("")


def trained(hip: str) -> list[list[object]]:
    """What each of two ranks said."""
    ended = ranks.run(textwrap.dedent(TRAIN), 2, more={"HIP": hip}, delay_us=100)
    assert [each.code for each in ended] == [0, 0], "\n".join(each.error for each in ended)
    return [each.said for each in ended]


def test_a_script_trains_with_torch_for_rocm_as_with_that_for_cuda(
    of_cuda: list[list[object]],
) -> None:
    said = trained("7.1")
    assert said == of_cuda
    assert [own[0] for own in said] == ["cuda:0", "cuda:1"]
    for _, first, *_, last in said:
        assert last < first
