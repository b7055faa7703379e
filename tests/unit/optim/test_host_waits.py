"""Updates never ask a device for a number: a GPU would have to finish all it was given first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zrun_core.optim.resolve import resolve_optimizer
from zrun_core.spine.sections.optim import OptimConfig

CPU = torch.device("cpu")
OURS: list[dict[str, Any]] = [
    {"name": "lamb"},
    {"name": "lars"},
    {"name": "lion"},
    {"name": "lamb", "moments": "bf16"},
    {"name": "lion", "moments": "bf16"},
    {"name": "adam", "moments": "bf16"},
    {"name": "adamw", "moments": "bf16"},
]


class NumbersAsked(TorchDispatchMode):
    """Counts how often the value of a tensor becomes a number of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_mode_counts_what_torch_asks_by_itself() -> None:
    with NumbersAsked() as numbers:
        torch._foreach_add_([torch.zeros(())], torch.ones(()))  # it takes the overload of a number
    assert numbers.asked == 1


@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
@pytest.mark.parametrize("optim", OURS, ids=lambda optim: " ".join(optim.values()))
def test_no_update_asks_for_a_number(optim: dict[str, Any], found_inf: float | None) -> None:
    config = OptimConfig.model_validate({"lr": 1e-2, "weight_decay": 0.1, **optim})
    param = torch.nn.Parameter(torch.ones(10))
    optimizer: Any = resolve_optimizer(config, lambda name: None, CPU).make([param])
    steps = []
    for _ in range(2):
        param.grad = torch.full((10,), 0.5)
        if found_inf is not None:
            optimizer.found_inf = torch.tensor(found_inf)
            optimizer.grad_scale = torch.tensor(2.0)
        with NumbersAsked() as numbers:
            if hasattr(optimizer, "propose"):  # as a model's layers are updated together
                optimizer.propose()
            else:
                optimizer.step()
        steps.append(float(optimizer.state[param]["step"]))
        assert numbers.asked == 0
    assert steps == ([0.0, 0.0] if found_inf else [1.0, 2.0])
