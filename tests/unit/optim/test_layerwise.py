"""LAMB and LARS on whole tensors in one process, and what makes their ratios the same wherever
elements lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from zrun_core.optim import chunked
from zrun_core.optim.layerwise import Lamb, Lars, LayerWise, TrustRatios

CPU = torch.device("cpu")


def made(kind: Callable[..., LayerWise], values: list[torch.Tensor], **keys: Any) -> LayerWise:
    return kind([torch.nn.Parameter(value.clone()) for value in values], **keys)


def params_of(optimizer: LayerWise) -> list[torch.Tensor]:
    return optimizer.param_groups[0]["params"]  # type: ignore[no-any-return]


def test_the_first_step_of_lamb_has_the_length_of_the_parameter():
    """With corrected moments the first r is the sign of the gradient."""
    optimizer = made(Lamb, [torch.tensor([3.0, 4.0]), torch.zeros(2)], lr=0.1, eps=1e-12)
    for param in params_of(optimizer):
        param.grad = torch.tensor([0.5, -2.0])
    optimizer.step()
    moved, from_zero = params_of(optimizer)
    assert moved.tolist() == pytest.approx([3 - 0.1 * 5 / 2**0.5, 4 + 0.1 * 5 / 2**0.5])
    assert from_zero.tolist() == pytest.approx([-0.1, 0.1]), (
        "a ratio of 1 where the parameter is zero"
    )
    assert int(optimizer.state[moved]["step"]) == 1


def test_the_first_step_of_lars_is_the_papers():
    optimizer = made(
        Lars, [torch.tensor([3.0, 4.0])], lr=2.0, trust_coefficient=0.01, weight_decay=0.1
    )
    (param,) = params_of(optimizer)
    param.grad = torch.tensor([0.0, 2.0])
    optimizer.step()
    local = 0.01 * 5 / (2 + 0.1 * 5)
    assert param.tolist() == pytest.approx([3 - 2 * local * 0.3, 4 - 2 * local * 2.4])


@pytest.mark.parametrize("chunk", [3, 8, 1000])
@pytest.mark.parametrize("kind", [Lamb, Lars])
def test_a_parameter_in_several_ranges_has_the_ratio_of_the_whole(monkeypatch, kind, chunk):
    monkeypatch.setitem(chunked.CHUNK, "cpu", chunk)
    generator = torch.Generator().manual_seed(0)
    value, grad = (torch.randn(50, generator=generator) for _ in range(2))
    whole, halves = made(kind, [value]), [made(kind, [part]) for part in value.split(25)]
    params_of(whole)[0].grad = grad.clone()
    for half, part, start in zip(halves, grad.split(25), (0, 25), strict=True):
        params_of(half)[0].grad = part.clone()
        half.place(params_of(half)[0], 0, start, 5)
    trust = TrustRatios(whole, [0.0], [True], CPU)
    sums = torch.zeros(2, dtype=torch.float64)
    found = [half.propose() for half in halves]
    for shard in range(10):
        sums += trust.squares(found, [shard])
    assert (sums == trust.squares(found, range(10))).all(), (
        "one rank that has all shards counts as ten do"
    )
    for half in halves:
        half.apply(trust.ratios(sums))
    whole.step()
    torch.testing.assert_close(
        torch.cat([params_of(half)[0] for half in halves]), params_of(whole)[0]
    )


def test_a_skipped_step_on_the_device_changes_nothing():
    """What a GPU does, by tensors: the host does not know that the step is skipped."""
    for kind in (Lamb, Lars):
        optimizer = made(kind, [torch.ones(4)], lr=0.1)
        (param,) = params_of(optimizer)
        for skips in (False, True, False):
            before = {"param": param.detach().clone()} | {
                k: v.clone() for k, v in optimizer.state[param].items()
            }
            param.grad = torch.full((4,), float("inf") if skips else 8.0)
            optimizer.grad_scale, optimizer.found_inf = (
                torch.tensor(4.0),
                torch.tensor(float(skips)),
            )
            optimizer.step()
            after = {"param": param.detach()} | optimizer.state[param]
            changed = {
                key: bool((value != before[key]).any())
                for key, value in after.items()
                if key in before
            }
            assert set(changed.values()) == {not skips}, (kind, changed)
