"""Ghosts: modules of other stages."""

from __future__ import annotations

import logging
from itertools import product

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from zrun_core.stages.ghosts import Ghosts
from zrun_core.stages.valueless import Valueless
from zrun_core.zero.wrap.fakes import FakeMode


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


def _as_made(first: torch.Tensor, second: torch.Tensor, offs: torch.Tensor | None) -> object:
    """What torch makes of groups, or how it refuses to."""
    try:
        made = torch._grouped_mm(first, second, offs=offs)
    except RuntimeError as error:
        return str(error)[:30]
    return made.shape, made.stride(), made.dtype


def test_products_of_groups_are_as_kernels_make_them() -> None:
    """torch's rule for fake tensors refuses fp32 and fp16, which kernels take."""
    shapes = [
        ((10, 8), (3, 8, 16)),  # tokens by the weights of their experts
        ((10, 8), (3, 8, 5)),
        ((8, 16), (16, 24)),  # gradients of weights
        ((3, 8, 8), (8, 16)),
        ((3, 8, 8), (3, 8, 16)),
        ((3, 4, 8), (3, 8, 5)),
    ]
    halves = (torch.float32, torch.float16, torch.bfloat16)
    for dtype, sizes, turned in product(halves, shapes, product((False, True), repeat=2)):
        given = [torch.ones(shape, dtype=dtype) for shape in sizes]
        given = [
            each.mT.contiguous().mT if turn else each
            for each, turn in zip(given, turned, strict=True)
        ]
        has_ends = 2 in map(torch.Tensor.dim, given)
        offs = torch.tensor([3, 6, 8], dtype=torch.int32) if has_ends else None
        expected = _as_made(*given, offs)
        with FakeMode() as mode:
            fakes = [mode.from_tensor(each) for each in given]
            found = _as_made(*fakes, None if offs is None else mode.from_tensor(offs))
        assert found == expected, (dtype, sizes, turned)


def test_what_fails_without_values_is_raised_and_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger(FakeTensorMode.__module__)
    with caplog.at_level(logging.ERROR, logger=log.name), FakeMode():
        with pytest.raises(RuntimeError, match="broadcast"):
            torch.empty(3) + torch.empty(4)
        log.error("of somebody else")
    assert [record.message for record in caplog.records] == ["of somebody else"]
