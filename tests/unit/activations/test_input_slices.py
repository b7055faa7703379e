"""Slices of what all ranks have alike: any shape, order and dtype, and nothing more is held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from test_offloaded_inputs import Block, Model, batch, gradients, storages_of_inputs
from torch import Tensor, nn

from zrun_core.activations.checkpoint import apply_checkpointing
from zrun_core.activations.kept import DeviceKeeper
from zrun_core.activations.offloaded_inputs import OffloadedInputs
from zrun_core.activations.partition import Partition
from zrun_core.errors import UserCodeError
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.activations import ActivationsConfig


class OneOf:
    """A rank of a group, whose others are given what they send."""

    def __init__(self, size: int, index: int, slices: list[Tensor] | None = None) -> None:
        self.size = size
        self.index = index
        self.slices = slices

    def all_gather(self, tensor: Tensor, dim: int, name: str) -> Tensor:
        assert self.slices is not None
        assert self.slices[self.index] is tensor
        return torch.cat(self.slices, dim)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3, 5), (3, 1, 4), (0, 3)], ids=str)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_whole_again(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for dims in (range(len(shape)), reversed(range(len(shape)))):
        tensor = torch.randn(shape).to(dtype).permute(*dims)
        ranks = [Partition(OneOf(size, index)) for index in range(size)]
        slices = [rank.slice_of(tensor) for rank in ranks]
        assert {each.numel() for each in slices} == {-(-tensor.numel() // size)}
        for index in range(size):
            rank = Partition(OneOf(size, index, slices))
            found = rank.gather(slices[index], tensor.shape, tensor.stride(), "x")
            assert torch.equal(found, tensor)
            assert (found.stride(), found.dtype) == (tensor.stride(), dtype)


class Both:
    """Stands for two ranks that compute the same: the other's slice is at hand."""

    size = 2
    index = 0

    def __init__(self) -> None:
        self.gathered: list[str] = []
        self.others: dict[int, Tensor] = {}

    def all_gather(self, tensor: Tensor, dim: int, name: str) -> Tensor:
        self.gathered.append(name)
        return torch.cat([tensor, self.others[tensor.data_ptr()]], dim)


class BothHalves(Partition):
    def __init__(self, comm: Both) -> None:
        super().__init__(comm)
        self.comm = comm

    def slice_of(self, tensor: Tensor) -> Tensor:
        own = super().slice_of(tensor)
        self.comm.index = 1
        self.comm.others[own.data_ptr()] = super().slice_of(tensor)
        self.comm.index = 0
        return own


def divided(depth: int) -> tuple[Model, Both, DeviceKeeper]:
    torch.manual_seed(7)
    model = Model(depth)
    comm = Both()
    keeper = DeviceKeeper()
    inputs = OffloadedInputs(keeper, BothHalves(comm))
    apply_checkpointing(model, ActivationsConfig(checkpoint="full"), inputs)
    return model, comm, keeper


def test_each_input_is_gathered_once_and_no_whole_one_is_held() -> None:
    torch.manual_seed(7)
    plain = Model(5)
    torch.manual_seed(1)
    plain(batch(0)).backward()
    model, comm, keeper = divided(5)
    storages = storages_of_inputs(model)
    torch.manual_seed(1)
    loss = model(batch(0))
    assert all(storage.expired() for storage in storages)
    assert keeper.kept_bytes == {DeviceKeeper.tier: 5 * batch(0).nbytes // 2}
    loss.backward()
    assert comm.gathered == [f"input of blocks.{number}" for number in reversed(range(5))]
    for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
        assert torch.equal(ours, theirs)
    model(batch(0)).backward()
    assert keeper.kept_bytes == {DeviceKeeper.tier: 5 * batch(0).nbytes // 2}


def test_a_block_that_changes_its_input_is_refused() -> None:
    class Hasty(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return super().forward(x.mul_(2), scale)

    model = Model(2)
    model.blocks = nn.ModuleList(Hasty() for _ in range(2))
    inputs = OffloadedInputs(DeviceKeeper(), BothHalves(Both()))
    apply_checkpointing(model, ActivationsConfig(checkpoint="full"), inputs)
    with pytest.raises(UserCodeError, match=r"the input of blocks\.0, .* changed in place"):
        model(batch(0))


def a_job(**keys: Any) -> JobConfig:
    return JobConfig.model_validate(
        {"name": "x", "model": "m:f", "data": "m:f", "steps": 1, "batch": 8, **keys}
    )


def test_jobs_that_have_nothing_to_divide() -> None:
    partition = {"checkpoint": "full", "partition": True}
    a_job(activations=partition, parallel={"tp": 2})
    with pytest.raises(ValidationError, match=r"with parallel\.tp 1 none do; write parallel: {tp"):
        a_job(activations=partition)
    with pytest.raises(ValidationError, match=r"none is recomputed; write checkpoint: full"):
        a_job(activations={"partition": True}, parallel={"tp": 2})
