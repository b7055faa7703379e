"""Code that is written for halves, as if it were written for fp32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from zrun_core.train.in_fp32 import InFp32

HALVES = [torch.bfloat16, torch.float16]


def forward(tensors: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Compute in a format that the code names itself."""
    weight, bias, x = tensors
    h = F.linear(x, weight, bias).to(dtype)
    h = h + torch.ones(8, dtype=dtype)
    h = torch.softmax(h, -1, dtype=dtype).type(dtype)
    return F.layer_norm(h.flip(-1), (8,)).cumsum(-1, dtype=dtype)


@pytest.mark.parametrize("half", HALVES)
def test_it_computes_what_fp32_computes(half: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(size, dtype=half) for size in ((8, 4), (8,), (3, 4))]
    with InFp32():
        found = forward(tensors, half)
    assert torch.equal(found, forward([each.float() for each in tensors], torch.float32))
    assert forward(tensors, half).dtype == half


@pytest.mark.parametrize("half", HALVES)
def test_under_autocast_too(half: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(8, 4, dtype=half), torch.randn(3, 4)
    with torch.autocast("cpu", dtype=half, cache_enabled=False), InFp32():
        found = F.linear(x, weight)
    assert torch.equal(found, F.linear(x, weight.float()))


def test_what_is_written_to_a_half_stays_there() -> None:
    buffer = torch.zeros(4, dtype=torch.bfloat16)
    with InFp32():
        buffer.add_(torch.full((4,), 1.25))
        buffer[:2] = torch.tensor([3.0, 4.0])
        buffer[torch.tensor([3])] = torch.tensor([7.0])
        buffer.view(2, 2)[1, 0] = 5.0
        read = buffer * 2
    assert buffer.dtype == torch.bfloat16
    assert buffer.tolist() == [3.0, 4.0, 5.0, 7.0]
    assert read.dtype == torch.float32
    assert read.tolist() == [6.0, 8.0, 10.0, 14.0]


def test_other_formats_are_left_alone() -> None:
    with InFp32():
        assert (torch.ones(2, dtype=torch.int64) + 1).dtype == torch.int64
        assert torch.ones(2, dtype=torch.float64).sum().dtype == torch.float64
        assert torch.ones(2).to(torch.int32).dtype == torch.int32


def test_a_half_that_is_copied_into_fp32_arrives() -> None:
    half = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    whole = torch.zeros(2, 2)
    with InFp32():
        whole[1].copy_(half)
    assert whole.tolist() == [[0.0, 0.0], [1.5, -2.0]]
