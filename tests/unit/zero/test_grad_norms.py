"""Norms of a gradient on a CPU, in pieces: 16 bits are cast into memory that all pieces share."""

from __future__ import annotations

import pytest
import torch

from zrun_core.zero.unit import unit_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 7, 8, 9, 16, 21])
def test_norms_of_pieces_make_that_of_all(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, numel: int
) -> None:
    monkeypatch.setattr(unit_grad, "_NORM_CHUNK", 8)
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    before = grad.clone()
    norms = unit_grad.norms_of(grad)
    assert [norm.dtype for norm in norms] == [torch.float32] * -(-numel // 8)
    pieces = [each.double().square().sum().sqrt().item() for each in grad.split(8)]
    assert [norm.item() for norm in norms] == pytest.approx(pieces, rel=1e-6)
    assert torch.equal(grad, before)


def test_a_piece_that_is_not_finite_is_known_by_its_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_grad, "_NORM_CHUNK", 4)
    grad = torch.ones(12, dtype=torch.bfloat16)
    grad[5] = float("nan")
    found = [bool(norm.isfinite()) for norm in unit_grad.norms_of(grad)]
    assert found == [True, False, True]
