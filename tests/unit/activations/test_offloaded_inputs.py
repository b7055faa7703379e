"""Inputs of recomputed blocks that wait elsewhere: the same bits, and their memory is given up.

On a CPU the host is the device. The host tier here is apart: other memory, and copies that come
late, made by a thread.
"""

from __future__ import annotations

import copy
import gc
import os
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from zrun_core.activations.checkpoint import apply_checkpointing
from zrun_core.activations.kept import DiskKeeper, HostKeeper, Keeper, Kept
from zrun_core.activations.offloaded_inputs import OffloadedInputs
from zrun_core.errors import JobError, OffloadError, UserCodeError
from zrun_core.memory.buffers import Tier
from zrun_core.memory.layout import PAGE_BYTES
from zrun_core.spine.sections.activations import ActivationsConfig
from zrun_core.spine.sections.precision import PrecisionConfig
from zrun_core.spine.sections.zero import ZeroConfig
from zrun_core.telemetry.peak_memory import PeakMemory
from zrun_core.tiers.copies import ThreadCopier, Way
from zrun_core.tiers.host_arena import HostArena
from zrun_core.tiers.swap_file import SwapFile
from zrun_core.tiers.transfer import DONE, Transfer
from zrun_core.train.parallelize import transform

CPU = torch.device("cpu")
WIDTH = 64


class Block(nn.Module):
    """Draws, so that recomputation must draw the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = nn.functional.dropout(torch.relu(self.up(self.norm(x))), 0.1)
        return x + self.down(hidden) * (1.0 if scale is None else scale)


class Model(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def late(seed: int = 0) -> Callable[[], float]:
    draw = random.Random(seed)
    return lambda: draw.choice([0.0, 0.001, 0.004])


def on_host(copier: ThreadCopier | None = None) -> HostKeeper:
    return HostKeeper(copier or ThreadCopier(late()), HostArena(1 << 28, CPU))


@pytest.fixture
def swap(tmp_path: Path) -> Iterator[SwapFile]:
    made = SwapFile(tmp_path, 0, block_bytes=2 * PAGE_BYTES)
    yield made
    made.close()


def on_disk(
    swap: SwapFile, copier: ThreadCopier | None = None, *, is_apart: bool = False
) -> DiskKeeper:
    """Apart: as where an accelerator is between the tensors and the host's memory."""
    arena = HostArena(1 << 28, CPU)
    copier = copier or ThreadCopier(late())
    return DiskKeeper(swap, copier, arena, host_is_device=not is_apart)


@pytest.fixture(params=["host", "disk", "disk of an accelerator"])
def keeper(request: pytest.FixtureRequest, swap: SwapFile) -> HostKeeper | DiskKeeper:
    if request.param == "host":
        return on_host()
    return on_disk(swap, is_apart=request.param != "disk")


def make(
    keeper: Keeper | None, *, depth: int = 5, policy: str = "full", dtype: torch.dtype = torch.float
) -> Model:
    torch.manual_seed(7)
    model = Model(depth).to(dtype)
    inputs = None if keeper is None else OffloadedInputs(keeper)
    apply_checkpointing(model, ActivationsConfig.model_validate({"checkpoint": policy}), inputs)
    return model


def batch(seed: int, length: int = 20, dtype: torch.dtype = torch.float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, length, WIDTH, generator=generator).to(dtype)


def gradients(model: nn.Module) -> list[Tensor]:
    found = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    model.zero_grad()
    return found


def assert_equal(some: list[Tensor], others: list[Tensor]) -> None:
    assert len(some) == len(others) > 0
    assert all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def walk(model: Model, order: str, dtype: torch.dtype, *, autocast: bool) -> list[Tensor]:
    """Run forwards and backwards such as "F0 F1 B0 B1"; returns losses and gradients."""
    losses: dict[str, Tensor] = {}
    torch.manual_seed(11)
    for kind, number in order.split():
        if kind == "F":
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                losses[number] = model(batch(int(number), 20 + 7 * int(number), dtype))
        else:
            losses[number].backward()
            losses[number] = losses[number].detach()
    return [*losses.values(), *gradients(model)]


ORDERS = [
    "F0 B0 F1 B1",
    "F0 F1 B0 B1",
    "F0 F1 B1 B0",
    "F2 F0 F1 B0 F3 B2 B1 B3",
    "F2 B2 F0 F1 B0 B1",
]


@pytest.mark.parametrize("policy", ["full", "every_n", "selective"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "autocast"])
@pytest.mark.at_most(2)
def test_the_bits_are_those_without_offload(keeper: Keeper, policy: str, dtype: str) -> None:
    formats = {"bf16": torch.bfloat16, "fp16": torch.float16}
    given = formats.get(dtype, torch.float)
    autocast = dtype == "autocast"
    plain = make(None, policy=policy, dtype=given)
    offloaded = make(keeper, policy=policy, dtype=given)
    for order in ORDERS:
        expected = walk(plain, order, given, autocast=autocast)
        assert_equal(walk(offloaded, order, given, autocast=autocast), expected)
    assert keeper.kept_bytes[keeper.tier] > 0


# Memory


def storages_of_inputs(model: Model) -> list[StorageWeakRef]:
    found: list[StorageWeakRef] = []
    for block in model.blocks:
        block.register_forward_pre_hook(
            lambda _, args: found.append(StorageWeakRef(args[0].untyped_storage()))
        )
    return found


def num_alive(storages: list[StorageWeakRef]) -> int:
    return sum(not each.expired() for each in storages)


def test_inputs_are_gone_until_backward(keeper: Keeper) -> None:
    model = make(keeper)
    storages = storages_of_inputs(model)
    first = model(batch(0))
    assert len(storages) == 5
    assert num_alive(storages) == 1  # that of the last block, which backward needs first
    assert not storages[-1].expired()
    second = model(batch(1))
    assert num_alive(storages) == 1
    first.backward()
    second.backward()
    assert num_alive(storages) == 0


def test_an_input_that_stays_is_gone_after_backward(swap: SwapFile) -> None:
    model = make(on_disk(swap, ThreadCopier(lambda: 0.2)), depth=2)
    storages = storages_of_inputs(model)
    model(batch(0)).backward()
    assert num_alive(storages) == 0  # a copy that is late would hold it


class _NeverSettled(HostKeeper):
    """Forgets to wait before memory is given up."""

    def keep(self, tensor: Tensor) -> Kept:
        kept = super().keep(tensor)
        kept.settle = lambda: None  # type: ignore[method-assign]
        return kept


def test_a_wait_that_is_missing_in_forward_is_found() -> None:
    keeper = _NeverSettled(ThreadCopier(lambda: 0.05), HostArena(1 << 28, CPU))
    model = make(keeper)
    storages = storages_of_inputs(model)
    loss = model(batch(0))
    assert num_alive(storages) > 1  # copies still read them
    loss.backward()


class _Unawaited:
    def __init__(self, transfer: Transfer) -> None:
        self.is_completed = transfer.is_completed
        self.wait_on_host = transfer.wait_on_host

    def wait(self) -> None:
        pass


class _Hasty(ThreadCopier):
    """Its transfers do not wait."""

    def _begin(self, source: Tensor, target: Tensor, way: Way) -> Transfer:
        target.fill_(0)
        return _Unawaited(super()._begin(source, target, way))


def test_a_wait_that_is_missing_in_backward_is_found() -> None:
    order = "F0 F1 B0 B1"
    expected = walk(make(None), order, torch.float, autocast=False)
    found = walk(make(on_host(_Hasty(lambda: 0.02))), order, torch.float, autocast=False)
    losses = len("01")
    assert_equal(found[:losses], expected[:losses])
    assert not all(map(torch.equal, found, expected))


def peak_bytes(keeper: HostKeeper | DiskKeeper | None, depth: int) -> int:
    """The most bytes of tensors in a forward and backward, above what there was before.

    The least of three: on a busy machine the profiler's clock may tell an end after what follows.
    What another thread gives up it does not tell at all.
    """
    model = make(keeper, depth=depth)
    x = batch(0, 200).requires_grad_()
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    x.grad = torch.zeros_like(x)
    model(x).backward()
    found = []
    for _ in range(3):
        gc.collect()
        with PeakMemory(CPU) as peak:
            model(x).backward()
        assert peak.num_bytes is not None
        found.append(peak.num_bytes)
    return min(found)


@pytest.mark.at_most(1)
def test_memory_falls_by_all_inputs_but_two(keeper: HostKeeper | DiskKeeper) -> None:
    input_bytes = batch(0, 200).nbytes
    back_bytes = input_bytes  # of the one that is on its way back
    if isinstance(keeper, DiskKeeper):
        # Read to whole pages, or only to the host: it comes from there when it is needed.
        back_bytes = input_bytes + PAGE_BYTES if keeper.host_is_device else 0
    saved = peak_bytes(None, 8) - peak_bytes(keeper, 8)
    assert saved == 7 * input_bytes - back_bytes
    assert keeper.kept_bytes[keeper.tier] == 8 * input_bytes


@pytest.mark.thorough
def test_memory_does_not_grow_with_depth(keeper: Keeper) -> None:
    shallow, deep = peak_bytes(keeper, 4), peak_bytes(keeper, 16)
    state_bytes = torch.get_rng_state().nbytes  # of the generator, which each block keeps
    assert state_bytes < 0.1 * batch(0, 200).nbytes
    assert deep - shallow <= 12 * (state_bytes + 64)
    if keeper.tier is Tier.DISK:  # what inputs pass through
        assert keeper.kept_bytes[Tier.HOST] <= 4 * batch(0, 200).nbytes


def test_room_is_that_of_the_first_step(keeper: Keeper) -> None:
    model = make(keeper)
    seen = set()
    for _ in range(4):
        walk(model, "F0 F1 B0 F2 B1 B2", torch.float, autocast=False)
        seen.add(keeper.kept_bytes[keeper.tier])
    assert len(seen) == 1


@pytest.mark.at_most(1)
def test_room_follows_shapes_that_vary(keeper: Keeper) -> None:
    model, draw = make(keeper), random.Random(3)
    for _ in range(60):
        model(batch(0, draw.randrange(40, 120))).backward()
    largest = 5 * batch(0, 120).nbytes
    assert keeper.kept_bytes[keeper.tier] <= 5 * largest
    if keeper.tier is Tier.HOST:
        assert keeper.kept_bytes[Tier.HOST] <= 2 * largest


class _Watched(HostKeeper):
    """Notes whether what is asked for was on its way."""

    def __init__(self) -> None:
        super().__init__(ThreadCopier(late()), HostArena(1 << 28, CPU))
        self.were_ahead: list[bool] = []

    def keep(self, tensor: Tensor) -> Kept:
        kept: Any = super().keep(tensor)
        began: list[bool] = []
        fetch, get = kept.fetch, kept.get
        kept.fetch = lambda: (began.append(True), fetch())

        def watched() -> Tensor:
            self.were_ahead.append(len(began) > 1)  # the first one ahead, the second by itself
            found: Tensor = get()
            return found

        kept.get = watched
        return kept


def test_inputs_come_back_ahead_of_their_use() -> None:
    keeper = _Watched()
    model = make(keeper)
    walk(model, "F0 B0 F1 F2 B1 B2", torch.float, autocast=False)
    # 4, but for the last one, which stays; 5 of the micro-batch that others followed; 4.
    assert keeper.were_ahead == [True] * 4 + [False, *[True] * 4] + [True] * 4


def test_inputs_come_back_ahead_where_micro_batches_go_block_by_block() -> None:
    keeper, num_micros = _Watched(), 4
    model = make(keeper)
    outputs: list[list[Tensor]] = []
    current = [batch(number) for number in range(num_micros)]
    for block in model.blocks:
        given = [x.detach().requires_grad_() * 1 for x in current]
        outputs.append([block(x) for x in given])
        current = outputs[-1]
    for row in reversed(outputs):
        while row:
            row.pop(0).sum().backward()
    assert len(keeper.were_ahead) == 5 * num_micros - 1
    # One in each block is not: where backward turns from it to the block before.
    assert keeper.were_ahead.count(False) <= 5 + 1


# What blocks are given


class Odd(nn.Module):
    """Calls one block twice, by keyword, and with what has no memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(2, 9, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        one, two, three = self.blocks
        of_parameter = one(self.latents), one(self.latents.transpose(0, 1).transpose(0, 1))
        of_data = one(x)  # needs no gradient
        x = two(of_data, of_data.mean())
        x = two(x=x.transpose(0, 1), scale=None).transpose(0, 1)
        wide = three(x[:1].expand(2, -1, -1))
        sliced = three(torch.cat((x, wide), 1)[:, 3:])
        total = sliced.square().mean() + wide.mean() + x.mean()
        return total + sum(each.square().mean() for each in of_parameter)


def test_whatever_blocks_are_called_with(keeper: Keeper) -> None:
    found = []
    for each in (None, keeper):
        torch.manual_seed(2)
        model = Odd()
        config = ActivationsConfig(checkpoint="full")
        apply_checkpointing(model, config, None if each is None else OffloadedInputs(each))
        losses = []
        for number in range(2):
            torch.manual_seed(5)
            loss = model(batch(number, 9))
            loss.backward()
            losses.append(loss.detach())
        found.append([*losses, *gradients(model)])
    assert_equal(*found)
    # `two` twice; what is a parameter's, has gaps or needs no gradient stays where it is.
    assert keeper.kept_bytes[keeper.tier] == 2 * 2 * PAGE_BYTES


def test_where_there_are_no_gradients_nothing_moves(keeper: Keeper) -> None:
    model = make(keeper)
    with torch.no_grad():
        model(batch(0))
    assert set(keeper.kept_bytes.values()) == {0}


def test_a_graph_can_be_differentiated_twice(keeper: Keeper) -> None:
    model = make(keeper)
    loss = model(batch(0))
    loss.backward(retain_graph=True)
    first = gradients(model)
    model(batch(1))  # the last input of the graph leaves too
    loss.backward()
    assert_equal(gradients(model), first)


def test_a_copy_of_the_model_shares_the_room(keeper: Keeper) -> None:
    model = make(keeper)
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    model(batch(0)).backward()
    room = keeper.kept_bytes[keeper.tier]
    torch.manual_seed(1)
    twin(batch(0)).backward()
    assert_equal(gradients(twin), gradients(model))
    assert keeper.kept_bytes[keeper.tier] == room


# What goes wrong


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.at_most(1)
def test_an_exception_leaks_nothing(keeper: HostKeeper | DiskKeeper, where: str) -> None:
    model = make(keeper)
    expected = walk(make(None), "F0 B0", torch.float, autocast=False)
    walk(model, "F0 B0", torch.float, autocast=False)
    room = keeper.kept_bytes[keeper.tier]
    storages = storages_of_inputs(model)

    failures = []

    def fail(*_: object) -> None:
        failures.append(where)
        raise KeyError

    for _ in range(5):
        if where == "forward":
            handle = model.blocks[3].up.register_forward_hook(fail)
        else:
            handle = model.blocks[3].up.weight.register_hook(fail)
        with suppress(KeyError):
            model(batch(0)).backward()
        handle.remove()
        gc.collect()  # the error's traceback holds frames, and they hold what was computed
    for move in (keeper.copier.down, keeper.copier.up):
        move(torch.ones(1), torch.ones(1)).wait()  # those before it are over
    assert failures == [where] * 5
    assert num_alive(storages) == 0
    model.zero_grad()
    assert_equal(walk(model, "F0 B0", torch.float, autocast=False), expected)
    # torch's engine holds on to what a failed backward had left to do, until the next one.
    passes = 2 if where == "backward" else 1
    assert keeper.kept_bytes[keeper.tier] < room * passes + 1


def test_an_input_that_is_changed_in_place_is_refused(keeper: Keeper) -> None:
    model = make(keeper)
    kept: list[Tensor] = []
    model.blocks[1].register_forward_pre_hook(lambda _, args: kept.append(args[0]))

    def change(*_: object) -> None:
        kept.pop().add_(1)

    model.blocks[1].register_forward_hook(change)
    with pytest.raises(UserCodeError, match=r"the input of blocks\.1, .* changed in place"):
        model(batch(0))


def test_a_disk_that_fails_is_told_in_forward(
    swap: SwapFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(on_disk(swap), depth=12)
    model(batch(0)).backward()

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(OffloadError, match=r"cannot write input of a recomputed block in .*Input"):
        model(batch(0))


def test_memory_of_the_host_that_ends_is_told() -> None:
    model = make(HostKeeper(ThreadCopier(), HostArena(3 * PAGE_BYTES, CPU)))
    with pytest.raises(OffloadError, match=r"offload\.host_memory"):
        model(batch(0))


# Beside other transformations of a model


def test_copies_stay_outside_of_compiled_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[type] = []

    def compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(type(x))
            return forward(x, *args, **kwargs)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    model = Model(3)
    config = ActivationsConfig(checkpoint="full", offload="host")
    transform(
        model,
        ZeroConfig(),
        PrecisionConfig(),
        config,
        compile=True,
        inputs=OffloadedInputs(on_host()),
    )
    model(batch(0)).backward()
    assert calls == [Tensor] * 6  # in forward, and recomputed


def test_a_selective_policy_cannot_look_into_compiled_blocks() -> None:
    config = ActivationsConfig(checkpoint="selective", offload="disk")
    with pytest.raises(JobError, match="checkpoint: full, or compile: false"):
        transform(Model(3), ZeroConfig(), PrecisionConfig(), config, compile=True)


def test_an_empty_input_stays(keeper: Keeper) -> None:
    model = make(keeper)
    model(batch(0, 0)).nan_to_num().backward()
    assert set(keeper.kept_bytes.values()) == {0}
    assert DONE.is_completed()
