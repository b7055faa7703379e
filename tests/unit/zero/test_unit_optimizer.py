"""An update in chunks has the bits of torch's optimizer on whole parameters."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zrun_core
from zrun_core.library.model import ModelHandle
from zrun_core.memory.layout import Piece, lay_out
from zrun_core.optim import chunked
from zrun_core.spine.sections.optimizer_args import NOT_SHARDED
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.update.chunk_group import cut_into_groups

CHUNK, GROUP = 256, 768  # instead of the real ones; 256 is a multiple of every vector
NUMEL = 3 * GROUP + 77

NAMES = sorted(
    name.lower()
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
    and name.lower() not in NOT_SHARDED
)
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "sgd": [{}, {"momentum": 0.9, "weight_decay": 0.1}, {"foreach": True}, {"foreach": False}],
    "adamw": [{}, {"amsgrad": True}, {"foreach": True}, {"fused": False, "foreach": False}],
    "adagrad": [{"initial_accumulator_value": 0.3}, {"foreach": True}],
    "rmsprop": [{"momentum": 0.9, "centered": True}],
}
CASES = [(name, options) for name in NAMES for options in OPTIONS.get(name, [{}])]


pytestmark = pytest.mark.usefixtures("alone")


class Net(nn.Module):
    """Parameters that end between borders, one that fills several groups, and one used late."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (5, CHUNK - 1, NUMEL, 3, CHUNK, 2 * GROUP + 1)
        self.values = nn.ParameterList(torch.randn(size) for size in sizes)

    def forward(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        total = torch.zeros(())
        for number, param in enumerate(self.values):
            factors = torch.randn(param.shape, generator=generator)
            if number != 3 or seed > 1:
                total = total + (param.float() * factors).sum()
        return total


def trained(
    kind: Any,
    options: dict[str, Any],
    precision: Any = "fp32",
    clip: float | None = None,
    halfway: Callable[[ShardedModel], None] = lambda sharded: None,
) -> ShardedModel:
    """Return the model after 4 updates; `halfway` is called after two."""
    torch.manual_seed(0)
    model = zrun_core.shard(Net, precision=precision)
    optimizer = zrun_core.optimizer(model, kind, lr=1e-2, clip=clip, **options)
    sharded = ModelHandle.of(model, "").sharded
    for seed in range(4):
        if seed == 2:
            halfway(sharded)
        model(seed).backward()
        optimizer.step()
    return sharded


def states(sharded: ShardedModel) -> dict[str, list[torch.Tensor]]:
    """Return the master of each parameter, and what the optimizer keeps of it."""
    found = {}
    for unit, piece, update in sharded.optimizer.updated_pieces():
        master = unit.values().flat[piece.start : piece.stop]
        found[piece.slot.name] = [master, *kept(update.state_of(piece))]
    return found


def kept(state: dict[str, Any]) -> list[torch.Tensor]:
    return [torch.as_tensor(value) for value in state.values() if value is not None]


def assert_equal(own: dict[str, list[torch.Tensor]], other: dict[str, list[torch.Tensor]]) -> None:
    assert own.keys() == other.keys()
    for name, values in own.items():
        assert len(values) == len(other[name])
        assert all(map(torch.equal, values, other[name])), name


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunked.CHUNK, "cpu", CHUNK)
    monkeypatch.setitem(chunked.GROUP, "cpu", GROUP)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(("name", "options"), CASES)
def test_every_optimizer_of_torch_computes_what_it_does_on_whole_parameters(
    name: str, options: dict[str, Any]
) -> None:
    sharded = trained(name, options)
    spec = sharded.settings.optimizer
    assert spec is not None
    torch.manual_seed(0)
    plain = Net()
    alone = spec.build(plain.parameters(), **spec.kwargs)
    for seed in range(4):
        alone.zero_grad()
        plain(seed).backward()
        alone.step()
    params = plain.named_parameters()
    expected = {key: [param.detach(), *kept(alone.state[param])] for key, param in params}
    assert_equal(states(sharded), expected)


FORMATS = ["fp32", "bf16", {"compute": "bf16", "reduce": "compute"}]


@pytest.mark.parametrize("precision", FORMATS, ids=str)
@pytest.mark.parametrize("name", ["adamw", "rmsprop"])
def test_no_bit_depends_on_the_cut(
    name: str, precision: Any, request: pytest.FixtureRequest
) -> None:
    whole = states(trained(name, {}, precision, clip=0.5))
    request.getfixturevalue("_small")
    assert_equal(states(trained(name, {}, precision, clip=0.5)), whole)


@pytest.mark.parametrize("precision", FORMATS, ids=str)
@pytest.mark.parametrize("name", ["adamw", "rmsprop", "lion", "lamb"])
def test_scratch_is_what_is_planned(name: str, precision: Any) -> None:
    sharded = trained(name, {}, precision, clip=0.5)
    spec = sharded.settings.optimizer
    assert spec is not None
    _, _, update = next(sharded.optimizer.updated_pieces())
    assert update.scratch.num_bytes == spec.scratch_bytes("cpu", sharded.settings.precision.reduce)


class Counting(torch.optim.Optimizer):
    """A user's own: counts its calls, and keeps one of its states in two formats."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            for param in (each for each in group["params"] if each.grad is not None):
                narrow = torch.bfloat16 if param.numel() == 5 else torch.float32
                mean = self.state[param].setdefault("mean", torch.zeros_like(param, dtype=narrow))
                mean.lerp_(param.grad.to(narrow), 0.5)
                param.sub_(mean.float(), alpha=group["lr"] / self.calls)


@pytest.mark.usefixtures("_small")
def test_an_own_optimizer_is_called_once_per_update_of_each_chunk() -> None:
    sharded = trained(Counting, {})
    torch.manual_seed(0)
    plain = Net()
    alone = Counting(plain.parameters())
    for seed in range(4):
        alone.zero_grad()
        plain(seed).backward()
        alone.step()
    params = plain.named_parameters()
    assert_equal(
        states(sharded),
        {key: [param.detach(), alone.state[param]["mean"]] for key, param in params},
    )


def give_back(sharded: ShardedModel) -> None:
    """As loading does: counts are given to every chunk, and numbers for each element filled in."""
    for _, piece, update in sharded.optimizer.updated_pieces():
        state = deepcopy(update.state_of(piece))
        update.set_state(piece, None)
        assert not update.state_of(piece)
        if not state:
            continue  # not updated yet
        for key, value in update.set_state(piece, state).items():
            if isinstance(value, torch.Tensor) and value.dim():
                value.copy_(state[key])


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("name", ["adamw", "nadam", "lion"])
def test_training_goes_on_from_states_that_were_given_back(name: str) -> None:
    assert_equal(states(trained(name, {}, halfway=give_back)), states(trained(name, {})))


@given(
    sizes=st.lists(st.integers(1, 50), max_size=8),
    every=st.integers(1, 8),
    times=st.integers(1, 4),
)
def test_groups_cover_every_piece_and_cut_at_multiples(
    sizes: list[int], every: int, times: int
) -> None:
    params = [(f"p{n}", torch.empty(size, device="meta"), 0) for n, size in enumerate(sizes)]
    layout = lay_out("u", params, dtype=torch.float32, trainable=True, num_shards=1)
    pieces = list(layout.pieces(0, layout.padded_numel))
    limit = every * times
    groups = list(cut_into_groups([(p, p.start, p.stop) for p in pieces], limit, every))
    assert all(groups)
    flat: list[tuple[Piece, int, int]] = [chunk for group in groups for chunk in group]
    assert [start for _, start, _ in flat] == [0, *(stop for _, _, stop in flat)][: len(flat)]
    assert sum(stop - start for _, start, stop in flat) == sum(sizes)
    for group in groups:
        assert sum(stop - start for _, start, stop in group) <= limit
    for piece, start, stop in flat:
        assert piece.start <= start < stop <= piece.stop
        assert (start - piece.start) % every == 0
        assert stop == piece.stop or (stop - piece.start) % every == 0
