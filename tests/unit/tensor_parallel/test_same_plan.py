"""Plans of slices that ranks have found, each by itself."""

from __future__ import annotations

import contextlib
from typing import Any, cast

import pytest
from torch import nn

from zrun_core.errors import JobError
from zrun_core.tensor_parallel.plan import TensorPlan, plan_model
from zrun_core.tensor_parallel.reads import Read, Reads
from zrun_core.tensor_parallel.same_plan import check_same
from zrun_core.tensor_parallel.tensor_comm import TensorComm


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)


def plan_of(reads: Reads = Reads(), **changes: Any) -> TensorPlan:  # noqa: B008 - frozen
    model = nn.ModuleDict({"mlp": Mlp()})
    plan = plan_model(model, {"*.up": "colwise", "*.down": "rowwise"}, 2)
    return TensorPlan(**{**vars(plan), "reads": reads, **changes})


class _Group:
    """Ranks 4 and 5, one after the other: what the first tells is what the second hears."""

    ranks = (4, 5)

    def __init__(self) -> None:
        self.told: list[list[bytes]] = []
        self.calls = 0

    def all_gather_bytes(self, payload: bytes, name: str) -> list[bytes]:
        if self.calls == len(self.told):
            self.told.append([])
        told = self.told[self.calls]
        self.calls += 1
        told.append(payload)
        return told if len(told) == 2 else [payload, payload + b"other"]


def checked(first: TensorPlan | None, second: TensorPlan | None) -> int:
    """Check these plans on two ranks; return how often the second has asked the other."""
    group = _Group()
    comm = cast(TensorComm, group)
    with contextlib.suppress(ValueError):  # the first hears nothing that it could read
        check_same(first, comm)
    group.calls = 0
    check_same(second, comm)
    return group.calls


UP = Read("", "mlp.up.weight")


def test_the_same_plan_takes_a_digest_alone() -> None:
    reads = Reads(frozenset({UP}), lines={UP: "model.py:7"})
    assert checked(plan_of(reads), plan_of(reads)) == 1
    assert checked(None, None) == 0


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            plan_of(Reads(frozenset({UP}), lines={UP: "model.py:7"})),
            plan_of(),
            "mlp.up.weight is read outside of its module on rank 4, by the model or the loss "
            "function (model.py:7), and not on rank 5:",
        ),
        (
            plan_of(),
            plan_of(Reads(shapes=frozenset({UP}), lines={UP: "loss.py:2"})),
            "the shape of mlp.up.weight is read outside of its module on rank 5, by the model or "
            "the loss function (loss.py:2), and not on rank 4:",
        ),
        (
            plan_of(summed=frozenset({"mlp.scale"})),
            plan_of(),
            "a slice of mlp.scale is used on rank 4, and not on rank 5:",
        ),
        (
            plan_of(),
            plan_of(regions=()),
            "a region that ends at mlp.down is used on rank 4, and not on rank 5:",
        ),
    ],
    ids=["read", "shape", "summed", "region"],
)
def test_another_plan_is_refused_by_name_and_line(
    first: TensorPlan, second: TensorPlan, said: str
) -> None:
    with pytest.raises(JobError) as found:
        checked(first, second)
    assert f"parallel.tp: {said}" in str(found.value)
