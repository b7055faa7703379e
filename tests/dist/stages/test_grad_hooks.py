"""Hooks on gradients of parameters that come in parts: equal to a plain loop, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import VOCAB
from small_jobs import small
from test_params_elsewhere import Block
from torch import nn
from verifying import recorded, verdict_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b": {"pp": 2},
    "interleaved": {"pp": 2, "schedule": "interleaved"},
    "zero_bubble": {"pp": 2, "schedule": "zero_bubble"},
    "layer_major": {"schedule": "layer_major"},
}
HOOKS = {
    "halves": lambda grad: grad / 2,
    "in place": lambda grad: (grad.mul_(2), None)[1],
    "one row": lambda grad: grad.index_fill(0, torch.tensor([1]), 0.0),
    "normalises": lambda grad: grad / (grad.norm() + 1),
    "clamps": lambda grad: grad.clamp(-0.1, 0.1),
    "asserts": lambda grad: grad * (1 // int(grad.abs().max() < 0.5)),
}
REFUSED = {
    "normalises": "something else of two parts of its gradient than of their sum",
    "clamps": "something else of two parts of its gradient than of their sum",
    "asserts": "fails on a random gradient (integer division or modulo by zero)",
}


class Hooked(nn.Module):
    """The loss of the last block reads a weight of the first, which has a hook."""

    def __init__(self, hook: str, reads: bool = True) -> None:
        super().__init__()
        self.reads = reads
        self.embed = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(4))
        self.head = nn.Linear(8, VOCAB)
        weight = self.blocks[0].get_parameter("up.weight")
        if hook == "late":
            weight.register_post_accumulate_grad_hook(lambda param: None)
        else:
            weight.register_hook(HOOKS[hook])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        if self.reads:
            loss = loss + 0.01 * self.blocks[0].get_parameter("up.weight").square().sum()
        return loss


def trained(ranks: Any, folder: Path, layout: str, hook: str, reads: bool = True) -> str:
    """Train on two ranks; return the error, "" if there is none."""
    parallel = LAYOUTS[layout]
    model = {"call": "stages/test_grad_hooks.py:Hooked", "args": {"hook": hook, "reads": reads}}
    keys = small(model=model, steps=2, parallel=parallel)
    dims = {"dp": 1, "pp": 2} if "pp" in parallel else {"dp": 2}
    return ranks(2).run(recorded, keys, str(folder), dims)[0]["error"]


@pytest.mark.parametrize("hook", ["halves", "in place", "one row"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.at_most(2)
def test_a_hook_that_scales_is_that_of_a_plain_loop(
    ranks, tmp_path: Path, layout: str, hook: str
) -> None:
    assert trained(ranks, tmp_path / "run", layout, hook) == ""
    assert verdict_of(tmp_path / "run").agrees


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.at_most(2)
def test_a_hook_may_do_anything_with_all_of_a_gradient(ranks, tmp_path: Path, layout: str) -> None:
    assert trained(ranks, tmp_path / "run", layout, "normalises", reads=False) == ""
    assert verdict_of(tmp_path / "run").agrees


@pytest.mark.parametrize("hook", REFUSED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_hook_that_must_see_all_of_a_gradient_is_refused(
    ranks, tmp_path: Path, layout: str, hook: str
) -> None:
    error = trained(ranks, tmp_path / "run", layout, hook)
    key = "parallel.schedule: layer_major" if layout == "layer_major" else "parallel.pp"
    instead = "write parallel.schedule: 1f1b" if layout == "layer_major" else "write pp: 1"
    assert error.startswith(f"JobError: {key}: a hook on blocks.0.up.weight"), error
    assert REFUSED[hook] in error, error
    assert instead in error, error
    assert not list((tmp_path / "run").glob("record/*/step-1")), "it is refused before the step"


def test_a_hook_that_waits_for_the_gradient_is_refused(ranks, tmp_path: Path) -> None:
    error = trained(ranks, tmp_path / "run", "1f1b", "late")
    assert "parallel.pp: blocks.0.up.weight has a hook that runs once its gradient is" in error
    assert "stages 0, 1 each have a part of it: use Tensor.register_hook, or write pp: 1" in error
