"""Forwards before training leave no trace in the first batch, nor in the state of a model."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import pytest
import torch
from runs import VOCAB, losses
from small_jobs import on_axes, small
from torch import nn
from verifying import recorded, verdict_of

from zrun_core.user_code.kept_content import Walk


class Block(nn.Module):
    """An MLP that warms up by the calls it has counted, and keeps what it was given last."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.calls = 0
        self.last: deque[float] = deque([0.0], maxlen=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last.append(self.last[-1] + 0.1)
        scale = min(1.0, 0.2 * self.calls) * self.last[-1]
        return x + scale * self.down(torch.relu(self.up(x)))


class Writer(nn.Module):
    """Writes to its batch, and counts its calls."""

    def __init__(self, writes: str, dim: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.writes = writes
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, VOCAB)
        self.calls = 0
        self.seen: dict[str, int] = {}
        self.register_buffer("count", torch.zeros(()))
        self.counts = [self.count]

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        self.count += 0.1  # type: ignore[operator]
        self.seen["calls"] = self.seen.get("calls", 0) + 1
        if self.writes == "inputs":
            batch["input_ids"].add_(1).remainder_(VOCAB)
        if self.writes == "labels":
            batch["labels"][:, :-1] = batch["labels"][:, 1:].clone()
        if self.writes == "mapping":
            batch["labels"] = batch.pop("input_ids").flip(1) + 0 * batch.pop("labels")
            batch["input_ids"] = batch["labels"]
        x = self.embed(batch["input_ids"]) * min(1.0, 0.3 * self.calls) * self.seen["calls"]
        x = x * (1 + self.counts[0])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())


class Weighted:
    """A loss that grows with its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        loss: torch.Tensor = model(batch)
        return loss * self.calls


PLAN = {"*.up": "colwise", "*.down": "rowwise"}


def keys_of(writes: str, **parallel: Any) -> dict[str, Any]:
    return small(
        model={"call": "user_code/test_trials.py:Writer", "args": {"writes": writes}},
        loss={"call": "user_code/test_trials.py:Weighted", "args": {}},
        parallel=parallel,
    )


@pytest.fixture(scope="module")
def one(ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def found(writes: str) -> dict[int, float]:
        return losses(on_axes(keys_of(writes), tmp_path_factory.mktemp("one"), ranks)[0])

    return found


@pytest.mark.parametrize("writes", ["", "inputs", "labels", "mapping"])
@pytest.mark.parametrize(
    "parallel",
    [{"pp": 2}, {"pp": 2, "schedule": "interleaved"}, {"tp": 2, "plan": PLAN}],
    ids=["pp", "interleaved", "tp"],
)
@pytest.mark.at_most(1)
def test_losses_are_those_of_one_rank(
    ranks, tmp_path: Path, one: Any, parallel: dict[str, Any], writes: str
) -> None:
    found = on_axes(keys_of(writes, **parallel), tmp_path, ranks)
    assert not found[0]["error"]
    assert losses(found[0]) == pytest.approx(one(writes), rel=1e-6)


class Leaving(nn.Module):
    """A block that leaves a number, as an attribute or in a list."""

    shown = 0.0  # until a forward has written it
    _held = 0.0

    @property
    def held(self) -> float:
        return self._held

    @held.setter
    def held(self, value: float) -> None:
        self._held = value

    def __init__(self, dim: int, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.how = how
        self.aux = 0.0
        self.found: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = float(x.detach().pow(2).mean())
        self.held = self.shown + 0 * self.held
        self.shown = self.held + 1
        if self.how == "attribute":
            self.aux = number
        else:
            self.found.append(number)
        return x + self.linear(x)


class Auxiliary(nn.Module):
    """Weighs its loss by numbers that its blocks have left, if it `reads` them."""

    def __init__(self, how: str, reads: bool, dim: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.reads = reads
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Leaving(dim, how) for _ in range(depth))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        if self.reads:
            loss = loss * (1 + sum(block.aux + sum(block.found[-1:]) for block in self.blocks))
        return loss


@pytest.mark.parametrize(("how", "name"), [("attribute", "aux"), ("list", "found")])
@pytest.mark.at_most(1)
def test_a_number_that_a_block_leaves_for_others_is_named(
    ranks, tmp_path: Path, how: str, name: str
) -> None:
    for reads in (False, True):
        model = {"call": "user_code/test_trials.py:Auxiliary", "args": {"how": how, "reads": reads}}
        found = on_axes(small(model=model, parallel={"pp": 2}), tmp_path / str(reads), ranks)
        if not reads:
            one = on_axes(small(model=model), tmp_path / "one", ranks)
            assert losses(found[0]) == losses(one[0]) != {}
            continue
        assert found[0]["code"] == 2
        assert f"a block writes a number to blocks.0.{name}, which is read" in found[0]["error"]


class Count:
    """An object of the user's own."""

    __slots__ = ("__dict__", "calls")

    def __init__(self) -> None:
        self.calls = 0
        self.others = {"calls": [0]}

    def next(self) -> float:
        self.calls += 1
        self.others["calls"][0] += self.calls
        return 0.1 * self.others["calls"][0]


def closed() -> Callable[[], float]:
    """Return a function with a variable of its own."""
    calls = 0

    def count() -> float:
        nonlocal calls
        calls += 1
        return 0.1 * calls

    return count


def nested(state: dict[str, Any]) -> float:
    state["n"]["calls"] += 1
    state["n"].setdefault("seen", []).append(state["n"]["calls"])
    return 0.1 * len(state["n"]["seen"])


# What a module may hold, and what its forward does to it, by name.
STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "tensor": (lambda: torch.zeros(1), lambda ema: ema.add_(0.1).clone()),
    "tensor by its data": (lambda: torch.zeros(1), lambda ema: ema.data.add_(0.1).clone()),
    "tensors in containers": (
        lambda: {"all": [(torch.zeros(2), 1)]},
        lambda state: state["all"][0][0].add_(0.1).sum(),
    ),
    "containers in containers": (lambda: {"n": {"calls": 0}}, nested),
    "object": (Count, Count.next),
    "objects in containers": (lambda: (Count(),), lambda state: state[0].next()),
    "method": (lambda: Count().next, lambda method: method()),
    "closure": (closed, lambda count: count()),
    "generator of torch's": (
        lambda: torch.Generator().manual_seed(3),
        lambda generator: torch.rand((), generator=generator),
    ),
    "generator of Python's": (lambda: random.Random(3), lambda generator: generator.random()),
    "generator of numpy's": (
        lambda: np.random.default_rng(3),
        lambda generator: float(generator.random()),
    ),
    "array": (lambda: np.zeros(2), lambda state: float(np.add(state, 0.1, out=state).sum())),
    "iterator": (lambda: itertools.count(1), lambda state: 0.1 * next(state)),
}


class Stateful(nn.Module):
    """A block that scales by what its state has come to."""

    def __init__(self, dim: int, kind: str) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.kind = kind
        self.state = STATES[kind][0]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (1 + STATES[self.kind][1](self.state)) * self.down(torch.relu(self.up(x)))


class Keeping(nn.Module):
    """Its blocks and itself have a state of some kind."""

    calls: ClassVar[int] = 0

    def __init__(self, kind: str, dim: int = 8, depth: int = 4) -> None:
        super().__init__()
        type(self).calls = 0
        self.kind = kind
        self.state = STATES[kind][0]()
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Stateful(dim, kind) for _ in range(depth))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        x = self.embed(input_ids) * (1 + STATES[self.kind][1](self.state) + 0.1 * self.calls)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


AXES: dict[str, dict[str, Any]] = {
    "pp": {"pp": 2},
    "interleaved": {"pp": 2, "schedule": "interleaved"},
    "tp": {"tp": 2, "plan": PLAN},
}


def keeping(kind: str, **keys: Any) -> dict[str, Any]:
    return small(model={"call": "user_code/test_trials.py:Keeping", "args": {"kind": kind}}, **keys)


@pytest.fixture(scope="module")
def one_keeping(ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def found(kind: str) -> dict[int, float]:
        return losses(on_axes(keeping(kind), tmp_path_factory.mktemp("one"), ranks)[0])

    return found


@pytest.mark.parametrize("kind", [kind for kind in STATES if kind != "iterator"])
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.at_most(5)
def test_whatever_a_module_holds_is_put_back(
    ranks, tmp_path: Path, one_keeping: Any, axes: str, kind: str
) -> None:
    found = on_axes(keeping(kind, parallel=AXES[axes]), tmp_path, ranks)
    assert not found[0]["error"]
    (start,) = (event for event in found[0]["events"] if event["type"] == "start")
    assert not any("not compared" in note for note in start.get("notes", []))
    assert losses(found[0]) == pytest.approx(one_keeping(kind), rel=1e-6)


@pytest.mark.parametrize("axes", ["pp", "tp"])
@pytest.mark.at_most(1)
def test_what_cannot_be_put_back_is_named(ranks, tmp_path: Path, axes: str) -> None:
    for each in on_axes(keeping("iterator", parallel=AXES[axes]), tmp_path, ranks):
        assert each["code"] == 2
        assert (
            "goes on with Keeping.state, an iterator (count), which cannot be put back"
            in (each["error"])
        )


class Shared(nn.Module):
    """Draws in front of its blocks and `behind` them, or in one of them, from one generator."""

    def __init__(self, kind: str, draws: str, dim: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.kind, self.draws = kind, draws
        self.state = STATES[kind][0]()
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Stateful(dim, kind) for _ in range(depth))
        if draws == "in a block":
            self.blocks[3].state = self.state
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        draw = STATES[self.kind][1]
        x = self.embed(input_ids) * (1 + draw(self.state))
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return loss * (1 + draw(self.state)) if self.draws == "behind" else loss


@pytest.mark.parametrize("kind", ["generator of torch's", "generator of numpy's", "object"])
@pytest.mark.parametrize("draws", ["behind", "in a block"])
@pytest.mark.at_most(1)
def test_a_state_that_goes_on_behind_a_border_is_refused(
    ranks, tmp_path: Path, draws: str, kind: str
) -> None:
    model = {"call": "user_code/test_trials.py:Shared", "args": {"kind": kind, "draws": draws}}
    found = on_axes(small(model=model, parallel={"pp": 2}), tmp_path, ranks)
    assert found[0]["code"] == 2
    assert "is another than in the whole model in the second forward" in found[0]["error"]


def shallow(*args: Any) -> dict[str, Any]:
    """As `recorded`, on ranks that put back nothing that is inside of attributes."""
    with patch.object(Walk, "content", lambda *_: None):
        return recorded(*args)


@pytest.mark.parametrize("kind", ["tensor", "containers in containers", "generator of numpy's"])
@pytest.mark.parametrize("is_planted", [False, True])
@pytest.mark.at_most(2)
def test_verify_sees_states_that_are_not_put_back(
    ranks, tmp_path: Path, kind: str, is_planted: bool
) -> None:
    keys = keeping(kind, parallel={"pp": 2})
    run_dir = tmp_path / "run"
    ranks(2).run(shallow if is_planted else recorded, keys, str(run_dir), {"dp": 1, "pp": 2})
    verdict = verdict_of(run_dir)
    assert verdict.agrees is not is_planted
    if is_planted:  # also where the plain loop's own copies are shallow: it repeats nothing
        assert verdict.difference is not None
        with patch.object(Walk, "content", lambda *_: None):
            verdict = verdict_of(run_dir)
        assert verdict.difference is not None
        assert "the plain loop's own step differs when it is run again" in verdict.notes[-1]
