"""Optimizers in chunks: what one of them keeps while it updates is its own."""

from __future__ import annotations

from typing import Any

import torch

from zrun_core.optim.chunked import Bf16AdamW, Chunk


def made(kind: type[Bf16AdamW], seed: int) -> Bf16AdamW:
    generator = torch.Generator().manual_seed(seed)
    param = torch.nn.Parameter(torch.randn(100, generator=generator))
    param.grad = torch.randn(100, generator=generator)
    return kind([param], lr=1e-2)


def state_of(optimizer: Bf16AdamW) -> list[torch.Tensor]:
    (param,) = optimizer.param_groups[0]["params"]
    return [param.detach(), *optimizer.state[param].values()]


def test_updates_of_two_models_at_a_time_do_not_disturb_each_other():
    """As two threads would make them: one updates all it has while the other is in the middle of
    it.
    """
    other = made(Bf16AdamW, 1)

    class Interrupted(Bf16AdamW):
        def _update(self, chunk: Chunk, group: dict[str, Any]) -> None:
            super()._update(chunk, group)
            other.step()

    disturbed, alone = made(Interrupted, 0), made(Bf16AdamW, 0)
    disturbed.step()
    alone.step()
    assert all(
        torch.equal(*pair) for pair in zip(state_of(disturbed), state_of(alone), strict=True)
    )
