"""Ghosts: modules of other stages."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from zrun_core.stages.ghosts import Ghosts
from zrun_core.stages.valueless import Valueless


def test_a_fake_is_of_its_parameter_and_of_none_in_its_place() -> None:
    """Parameters are replaced when layers are divided: a new one may lie where an old one was."""
    ghosts = Ghosts(torch.device("cpu"))
    for shape in [(3,), (2, 2)] * 4:
        param = nn.Parameter(torch.empty(shape))
        assert ghosts.fake_like(param, torch.float32).shape == shape
        assert ghosts.fake_like(param, torch.float32) is ghosts.fake_like(param, torch.float32)
        del param


def test_results_without_values_are_remembered_until_they_are_written_to() -> None:
    ghosts = Ghosts(torch.device("cpu"))
    x, y = (ghosts.fake_like(torch.empty(2, 3), torch.float32) for _ in range(2))
    asked = []
    dispatch = FakeTensorMode.dispatch

    def counted(mode: FakeTensorMode, func: object, *others: object, **named: object) -> object:
        asked.append(func)
        return dispatch(mode, func, *others, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeTensorMode, "dispatch", counted)
        for _ in range(3):
            total = x + y
            total *= 0.5
            assert nn.functional.dropout(total, 0.1).shape == (2, 3)
        once = len(asked)
        assert torch.cat([x, y]).shape == (4, 3)
        assert len(asked) == once + 1
        assert (x + y).dtype == torch.float32
        assert (x + y * 2).shape == (2, 3)
        assert len(asked) == once + 2
    assert once <= 8, asked

    (x + y).resize_(5)
    assert (x + y).shape == (2, 3)
    (x + y).requires_grad_()
    assert not (x + y).requires_grad
    assert (x + nn.Parameter(torch.ones(3))).requires_grad
    assert x.to(torch.bfloat16).dtype == torch.bfloat16
    assert isinstance(x.view(6) + 1, Valueless)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            x.add_(torch.cat([y, y]))
        with pytest.raises(DynamicOutputShapeException):
            x.nonzero()
    assert (x + torch.ones(4, 2, 3)).shape == (4, 2, 3)
