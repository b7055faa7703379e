"""The library in a user's own loop: plain calls, and parity with DDP and with a plain loop."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
from own_loop import sharded, start, state_of
from torch import nn
from toys import Net, build, data, same_bits, split, train_ddp, train_plain

import zrun_core
from zrun_core.errors import UserCodeError
from zrun_core.library import run as library
from zrun_core.library.model import ModelHandle
from zrun_core.zero.reduce.reducer import Reducer


def train(stage: int, micros: int = 1, accumulate: int = 1, **options: Any) -> dict[str, Any]:
    """`micros` backward calls of mean losses in each step."""
    run = start()
    model = sharded(stage, accumulate=accumulate)
    optimizer = zrun_core.optimizer(model, "adamw", lr=1e-2, weight_decay=0.1, **options)
    losses = []
    for batch in data(6):
        total = 0.0
        for k in range(micros):
            loss = model(*split(split(batch, run.rank, run.world_size), k, micros))
            loss.backward()
            total += loss.item() / micros
        optimizer.step(weight=micros)
        optimizer.zero_grad()
        losses.append(run.mean(total))
    return {"losses": losses, "state": state_of(model)}


def begin_in(folder: str) -> list[str]:
    """What is left in the folder of temporary files once a model is sharded."""
    start()
    before, tempfile.tempdir = tempfile.tempdir, folder
    current, library._current = library._current, None
    try:
        sharded(3)
        start().mean(0.0)  # both ranks are there
        return os.listdir(folder)
    finally:
        tempfile.tempdir, library._current = before, current


def test_ranks_that_may_be_killed_leave_nothing_behind(ranks, tmp_path):
    assert ranks(2).run(begin_in, str(tmp_path)) == [[], []]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.at_most(2)
def test_the_loop_is_bit_equal_to_ddp(ranks, stage):
    ours, theirs = ranks(2).run(train, stage), ranks(2).run(train_ddp)[0]
    for rank in range(2):
        same_bits(ours[rank], theirs)


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_equals_a_plain_loop(ranks, stage):
    assert ranks(1).run(train, stage)[0]["losses"] == pytest.approx(
        train_plain(build(), data(6)), abs=2e-6
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.at_most(2)
def test_accumulated_gradients_are_the_full_batchs_whatever_was_declared(ranks, world_size, stage):
    plain = train_plain(build(), data(6))
    for accumulate in (
        1,
        2,
        3,
        4,
    ):  # 3 backward calls are made: declared too few, right and too many
        ours = ranks(world_size).run(train, stage, 3, accumulate)[0]["losses"]
        assert ours == pytest.approx(plain, abs=2e-6), accumulate


def hybrid(stage: int, micros: int, accumulate: int) -> list[float]:
    run = start()
    model = zrun_core.shard(
        build,
        zero={"stage": stage, "bucket": 1 << 14, "shard_group": 2 if stage else "all"},
        accumulate=accumulate,
    )
    optimizer = zrun_core.optimizer(model, "adamw", lr=1e-2, weight_decay=0.1)
    losses = []
    for batch in data(4, batch=16):
        total = 0.0
        for k in range(micros):
            loss = model(*split(split(batch, run.rank, run.world_size), k, micros))
            loss.backward()
            total += loss.item() / micros
        optimizer.step(weight=micros)
        losses.append(run.mean(total))
    return losses


def given_up(stage: int) -> tuple[list[float], list[bool]]:
    """Train, and give up the first micro-batch of each step; return also whether reductions were
    under way once each backward, and each step, had begun, and once each backward had ended.
    """
    run = start()
    model = zrun_core.shard(build, zero={"stage": stage, "bucket": 1 << 14}, accumulate=2)
    optimizer = zrun_core.optimizer(model, "adamw", lr=1e-2, weight_decay=0.1)
    losses, under_way = [], []

    def looking(call: Callable[..., None]) -> Callable[..., None]:
        def watched(reducer: Reducer, *args: Any, **kwargs: Any) -> None:
            call(reducer, *args, **kwargs)
            under_way.append(reducer._under_way._is_busy)

        return watched

    with ExitStack() as stack:
        for name in ("begin_backward", "end_backward", "begin_step"):
            call = looking(getattr(Reducer, name))
            stack.enter_context(patch.object(Reducer, name, call))
        for batch in data(4, batch=16):
            mine = split(batch, run.rank, run.world_size)
            (5.0 * model(*split(mine, 0, 2))).backward()
            optimizer.zero_grad()
            total = 0.0
            for k in range(2):
                loss = model(*split(mine, k, 2))
                loss.backward()
                total += loss.item() / 2
            optimizer.step(weight=2)
            losses.append(run.mean(total))
    return losses, under_way


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.at_most(1)
def test_the_last_sums_of_a_backward_go_on_until_the_next_or_the_end_of_the_step(ranks, stage):
    plain = train_plain(build(), data(4, batch=16))
    for ours, under_way in ranks(2).run(given_up, stage):
        assert ours == pytest.approx(plain, abs=2e-6)
        one, last = [False, stage > 1], [False, False]  # stage 1 reduces the last one alone
        assert under_way == [*one, False, *one, *last, False] * 4


def hybrid_in_turn(stage: int, micros: int, accumulate: int) -> list[float]:
    """As `hybrid`; nothing that replicas sum may still be on its way from the shard group."""
    sums = Reducer._all_reduce_parts

    def summed(reducer: Reducer, *args: Any) -> None:
        assert not reducer._under_way._is_busy
        sums(reducer, *args)

    with patch.object(Reducer, "_all_reduce_parts", summed):
        return hybrid(stage, micros, accumulate)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.at_most(1)
def test_copies_count_once_where_more_gradients_come_than_declared(ranks, stage):
    plain = train_plain(build(), data(4, batch=16))
    for accumulate in (1, 2, 3):
        ours = ranks(4).run(hybrid_in_turn, stage, 2, accumulate)[0]
        assert ours == pytest.approx(plain, abs=2e-6), accumulate


def traffic(stage: int, accumulate: int) -> int:
    model = sharded(stage, accumulate=accumulate)
    optimizer = zrun_core.optimizer(model, "sgd", lr=1e-2)
    comm = ModelHandle.of(model, "").sharded.comm
    comm.drain()
    for k in range(4):
        model(*split(data(1)[0], k, 4)).backward()
    optimizer.step()
    return sum(
        sent for key, sent in comm.drain().items() if key.kind in ("all_reduce", "reduce_scatter")
    )


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_is_declared_saves_traffic_where_gradients_stay_whole(ranks, stage):
    declared, undeclared = (ranks(2).run(traffic, stage, accumulate)[0] for accumulate in (4, 1))
    assert undeclared == (declared if stage == 2 else 4 * declared)


# Weights


def ragged() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Eight samples whose numbers of tokens differ."""
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(n, 32, generator=generator), torch.randn(n, 1, generator=generator))
        for n in range(1, 9)
    ]


class Summed(Net):
    """The sum over tokens."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x, y) * len(x)


def build_summed() -> nn.Module:
    torch.manual_seed(1)
    return Summed()


def train_tokens(stage: int) -> dict[str, Any]:
    run = start()
    model = sharded(stage, build_summed, accumulate=4)
    optimizer = zrun_core.optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    for _ in range(3):
        tokens = 0
        for x, y in ragged()[run.rank :: run.world_size]:
            model(x, y).backward()
            tokens += len(x)
        optimizer.step(weight=tokens)
    return state_of(model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.at_most(2)
def test_losses_weigh_by_tokens_on_all_ranks(ranks, stage):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = (torch.cat(parts) for parts in zip(*ragged(), strict=True))
    for _ in range(3):
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    ours = ranks(2).run(train_tokens, stage)[0]
    for name, param in model.named_parameters():
        assert torch.allclose(torch.from_numpy(ours[name]), param.detach(), atol=1e-5), name


# Loops that are not forward, backward, step


class Scores(nn.Module):
    """[batch, dim] -> [batch, 1], with a parameter that is used outside of its module."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.first, self.table = nn.Linear(dim, dim), nn.Embedding(dim, dim)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(dim, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        return self.last(torch.nn.functional.linear(x, self.table.weight))


def build_scores() -> nn.Module:
    torch.manual_seed(2)
    return Scores()


def two_calls_one_backward(model: nn.Module, x: torch.Tensor) -> None:
    (model(x).mean() - model(2 * x).square().mean()).backward()


def one_call_two_backwards(model: nn.Module, x: torch.Tensor) -> None:
    out = model(x)
    out.mean().backward(retain_graph=True)
    out.square().mean().backward()


def two_calls_two_backwards(model: nn.Module, x: torch.Tensor) -> None:
    one, two = model(x).mean(), model(x.flip(0)).square().mean()
    one.backward()
    two.backward()


def evaluation_between(model: nn.Module, x: torch.Tensor) -> None:
    out = model(x)
    with torch.no_grad():
        target = model(x + 1)
    (out - target).square().mean().backward()


def evaluation_between_backwards(model: nn.Module, x: torch.Tensor) -> None:
    out = model(x)
    out.mean().backward(retain_graph=True)
    with torch.no_grad():
        target = model(x + 1)
    (out - target).square().mean().backward()


def gathered_between_backwards(model: nn.Module, x: torch.Tensor) -> None:
    out = model(x)
    out.mean().backward(retain_graph=True)
    with zrun_core.gathered(model) if hasattr(model, "_zrun") else nullcontext(), torch.no_grad():
        target = model(x + 1)
    (out - target).square().mean().backward()


def gradient_penalty(model: nn.Module, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.mean() + (gradient.norm(dim=1) - 1).square().mean()).backward()


def adversarial(model: nn.Module, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x)
    model(x.detach() + 0.1 * gradient.sign()).square().mean().backward()


def penalty_on_parameters(model: nn.Module, x: torch.Tensor) -> None:
    out = model(x).square().mean()
    (out + 1e-2 * sum(param.square().sum() for param in model.parameters())).backward()


def unused_forward(model: nn.Module, x: torch.Tensor) -> None:
    model(x + 3)
    model(x).square().mean().backward()


def unused_forward_last(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    model(x + 3)


def forward_that_raised(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()

    def fail(*_: Any) -> None:
        raise ValueError

    hook = model.blocks[0].register_forward_hook(fail)
    with suppress(ValueError):
        model(x)
    hook.remove()


def recomputed(model: nn.Module, x: torch.Tensor) -> None:
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).square().mean().backward()


def recomputed_reentrantly(model: nn.Module, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True).square().mean().backward()


def by_parts(model: nn.Module, x: torch.Tensor) -> None:
    with zrun_core.forward(model) if hasattr(model, "_zrun") else torch.enable_grad():
        x = torch.tanh(model.first(x))
        for block in model.blocks:
            x = x + block(x)
        out = model.last(torch.nn.functional.linear(x, model.table.weight))
    out.square().mean().backward()


def dropped_first(model: nn.Module, x: torch.Tensor) -> None:
    model(5 * x).mean().backward()
    for optimizer in OPTIMIZERS:
        optimizer.zero_grad()
    model(x).square().mean().backward()


def zero_grad_before_backward(model: nn.Module, x: torch.Tensor) -> None:
    loss = model(x).square().mean()
    for optimizer in OPTIMIZERS:
        optimizer.zero_grad()
    loss.backward()


OPTIMIZERS: list[Any] = []
LOOPS = [
    two_calls_one_backward,
    one_call_two_backwards,
    two_calls_two_backwards,
    evaluation_between,
    evaluation_between_backwards,
    gathered_between_backwards,
    gradient_penalty,
    adversarial,
    penalty_on_parameters,
    unused_forward,
    unused_forward_last,
    forward_that_raised,
    recomputed,
    recomputed_reentrantly,
    by_parts,
    dropped_first,
    zero_grad_before_backward,
]


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(4, 32, generator=generator) for _ in range(3)]


def train_loop(name: str, stage: int, lib: bool) -> dict[str, Any]:
    """Each rank trains on the same data, so that one plain process is the oracle."""
    model = sharded(stage, build_scores) if lib else build_scores()
    make = (
        zrun_core.optimizer
        if lib
        else lambda model, name, lr: torch.optim.SGD(model.parameters(), lr=lr)
    )
    optimizer = make(model, "sgd", lr=0.005)
    OPTIMIZERS[:] = [optimizer]
    for x in inputs():
        globals()[name](model, x)
        optimizer.step()
        optimizer.zero_grad()
    return (
        state_of(model)
        if lib
        else {name: param.detach().numpy() for name, param in model.named_parameters()}
    )


@pytest.mark.parametrize("loop", [loop.__name__ for loop in LOOPS])
@pytest.mark.at_most(5)
def test_loops_of_every_shape(ranks, loop):
    plain = train_loop(loop, 0, lib=False)
    for stage in range(4):
        for ours in ranks(2).run(train_loop, loop, stage, True):
            for name, value in plain.items():
                assert ours[name] == pytest.approx(value, abs=2e-6), (stage, name)


# Precision, options, schedules


def formats(stage: int, precision: str) -> list[str]:
    model = sharded(stage, build_scores, precision=precision)
    out = model(inputs()[0])
    with torch.no_grad():
        quiet = model(inputs()[0])
    with zrun_core.forward(model):
        inner = model.first(inputs()[0])
    out.mean().backward()
    with zrun_core.gathered(model):
        kept = model(inputs()[0])
    assert torch.equal(out, quiet)
    assert torch.equal(out, kept)
    return [
        str(t.dtype).removeprefix("torch.") for t in (out, quiet, kept, inner, model.last.weight)
    ]


@pytest.mark.parametrize("stage", [0, 3])
def test_outputs_are_fp32_whatever_the_precision(ranks, stage):
    assert ranks(2).run(formats, stage, "bf16")[0] == ["float32"] * 3 + ["bfloat16"] * 2


def with_schedule(stage: int, lib: bool) -> list[float]:
    """Two groups, one-cycle learning rate and momentum, clipping."""
    model = sharded(stage, build_scores) if lib else build_scores()
    biases = [param for name, param in model.named_parameters() if "bias" in name]
    rest = [param for name, param in model.named_parameters() if "bias" not in name]
    groups = [{"params": rest}, {"params": biases, "weight_decay": 0.0, "lr": 0.02}]
    kwargs = {"lr": 1e-2, "weight_decay": 0.1}
    optimizer = (
        zrun_core.optimizer(model, torch.optim.AdamW, groups=groups, clip=0.1, **kwargs)
        if lib
        else torch.optim.AdamW(groups, **kwargs)
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.01, 0.02], total_steps=12)
    losses = []
    for x in inputs() * 3:
        loss = model(x).square().mean()
        loss.backward()
        if not lib:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if lib:
            norm = optimizer.grad_norm
        optimizer.zero_grad()
        schedule.step()
        losses += [
            loss.item(),
            float(norm),
            optimizer.param_groups[0]["lr"],
            optimizer.param_groups[1]["betas"][0],
        ]
    return losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.at_most(2)
def test_groups_schedules_and_clipping_are_torchs(ranks, stage):
    plain = with_schedule(0, lib=False)
    assert ranks(2).run(with_schedule, stage, True)[0] == pytest.approx(plain, rel=1e-6, abs=3e-6)


def several_kinds_of_start() -> list[dict[str, Any]]:
    """A factory, and modules that differ between ranks: the first rank's counts."""
    run = start()
    torch.manual_seed(1 if run.is_main else 99)
    mine = Net()
    before = copy.deepcopy(mine)
    model = zrun_core.shard(mine, zero=3)
    assert model is mine
    assert {name for name, _ in model.named_parameters()} == {
        name for name, _ in before.named_parameters()
    }
    return [state_of(model), state_of(sharded(3))]


def test_a_module_is_the_first_ranks(ranks):
    plain = dict(build().named_parameters())
    for built, made in ranks(2).run(several_kinds_of_start):
        for name, param in plain.items():
            assert (built[name] == param.detach().numpy()).all()
        assert made.keys() == built.keys()


# Evaluation, generation


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.last = nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.norm(x)))


def evaluate(stage: int) -> tuple[list[float], bool, bool]:
    run = start()
    torch.manual_seed(3)
    model = sharded(stage, Dropping)
    optimizer = zrun_core.optimizer(model, "sgd", lr=0.1)
    model.norm.eval()
    model.norm.train()
    for x in inputs():
        model(x + run.rank).mean().backward()
        optimizer.step()
    model.drop.eval()
    with zrun_core.evaluation(model):
        found = [model(x).mean().item() for x in inputs()]
    return found, model.training, model.drop.training


@pytest.mark.parametrize("stage", [0, 3])
def test_evaluation_is_the_same_on_every_rank_and_restores_modes(ranks, stage):
    one, two = ranks(2).run(evaluate, stage)
    assert one == two
    assert one[1:] == (True, False)


def generate(stage: int) -> list[int]:
    """Ranks that call the model for different lengths of time, in the middle of training."""
    run = start()
    model = sharded(stage, build_scores)
    optimizer = zrun_core.optimizer(model, "sgd", lr=0.05)
    lengths = []
    for x in inputs():
        model(x).square().mean().backward()
        optimizer.step()
        with zrun_core.gathered(model):
            steps, text = 0, inputs()[0]
            while steps < 3 + 4 * run.rank:
                text = text + model(text)
                steps += 1
        lengths.append(steps)
    return lengths


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_ranks_generate_for_different_lengths_of_time(ranks, stage):
    assert ranks(2).run(generate, stage) == [[3] * 3, [7] * 3]


def test_a_copy_is_a_plain_module(ranks):
    assert ranks(2).run(copied) == [True, True]


def copied() -> bool:
    model = sharded(3, build_scores)
    optimizer = zrun_core.optimizer(model, "sgd", lr=0.05)
    with zrun_core.gathered(model):
        twin = copy.deepcopy(model)
    out = twin(inputs()[0])
    out.square().mean().backward()
    model(inputs()[0]).mean().backward()
    optimizer.step()
    with pytest.raises(UserCodeError, match="not sharded"):
        zrun_core.optimizer(twin)
    return all(param.grad is not None for param in twin.parameters())
