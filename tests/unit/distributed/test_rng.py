"""The three streams of a rank: who draws the same, and that none is moved by another."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zrun_core.activations.checkpoint import selectively
from zrun_core.distributed import rng
from zrun_core.distributed.rng import CPU, Streams
from zrun_core.errors import CheckpointError


def draw() -> list[float]:
    """From each of the usual generators; numpy's keeps every second normal number for later."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.normal()),
        float(torch.rand(())),
        float(torch.randn(())),
    ]


def begun(seed: int = 3, **place: int) -> Streams:
    streams = Streams(seed, CPU, **{"dp": 0, **place})
    streams.begin()
    return streams


def test_the_models_stream_of_the_first_stage_is_seeded_as_ever() -> None:
    for dp in (0, 1, 5):
        begun(dp=dp)
        drawn = draw()
        value = (3 * 1_000_003 + 1 + dp) % 2**32
        random.seed(value)
        np.random.seed(value)
        torch.manual_seed(value)
        assert drawn == draw()


def test_places_draw_alike_along_the_axes_that_they_share() -> None:
    numbers = product(range(2), repeat=3)
    places = [{"dp": dp, "pp": pp, "tp": tp} for dp, pp, tp in numbers]
    drawn: dict[str, dict[tuple[int, ...], Any]] = {"model": {}, "data": {}, "inside": {}}
    for place in places:
        streams, where = begun(**place), tuple(place.values())
        drawn["model"][where] = draw()
        with streams.data.at(7):
            drawn["data"][where] = draw()
        with streams.inside():
            drawn["inside"][where] = torch.rand(4).tolist()
    for name, num_axes in {"data": 1, "model": 2, "inside": 3}.items():
        for where, own in drawn[name].items():
            for other, theirs in drawn[name].items():
                assert (own == theirs) == (where[:num_axes] == other[:num_axes]), name


def test_data_draws_by_its_position_and_leaves_the_models_stream_where_it_was() -> None:
    streams = begun()
    draw()  # numpy holds a number back
    expected = [draw() for _ in range(3)]
    begun()
    draw()
    found, by_position = [], {}
    for position in (0, 8, 0):
        with streams.data.at(position):
            numbers = draw()
        assert by_position.setdefault(position, numbers) == numbers
        found.append(draw())
    assert found == expected
    assert by_position[0] != by_position[8]


def test_an_error_while_reading_leaves_the_models_stream_where_it_was() -> None:
    def fail() -> None:
        with streams.data.at(0):
            draw()
            raise KeyError

    begun()
    expected = draw()
    streams = begun()
    with pytest.raises(KeyError):
        fail()
    assert draw() == expected


def test_a_region_moves_the_models_stream_alike_at_all_places_along_tensor() -> None:
    after = []
    for tp in range(2):
        streams = begun(tp=tp)
        for _ in range(2):
            with streams.inside():
                torch.rand(3 + tp)
        after.append(draw())
    assert after[0] == after[1]


def test_a_region_in_which_nothing_is_drawn_leaves_the_models_stream_alone() -> None:
    begun()
    expected = draw()
    streams = begun()
    with streams.inside():
        nn.functional.dropout(torch.ones(8), 0.0)
    assert draw() == expected


class Layer(nn.Module):
    """Dropout outside, then in two regions; between two layers without anything that draws."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.streams = streams
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.seen: list[list[float]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outside = nn.functional.dropout(torch.ones(8), 0.5)
        x = self.up(x * outside)
        with self.streams.inside():
            first = nn.functional.dropout(torch.ones(8), 0.5)
            x = torch.relu(x * first)
        with self.streams.inside():
            second = nn.functional.dropout(torch.ones(8), 0.5)
            x = self.down(x * second)
        self.seen.append(torch.cat([outside, first, second]).tolist())
        return x


def plain(layer: nn.Module, x: torch.Tensor) -> Any:
    return layer(x)


def recomputed(**options: Any) -> Callable[[nn.Module, torch.Tensor], Any]:
    return lambda layer, x: checkpoint(layer, x, **options)


def two_micro_batches(run: Callable[[nn.Module, torch.Tensor], Any], tp: int) -> dict[str, Any]:
    """Two forwards, then two backwards, as in a pipeline; and what comes after."""
    torch.manual_seed(0)
    streams = begun(tp=tp)
    torch.manual_seed(1)
    layers = [Layer(streams) for _ in range(3)]
    streams.begin()
    losses = []
    for number in range(2):
        x = torch.full((2, 8), 1.0 + number, requires_grad=True)
        for layer in layers:
            x = run(layer, x)
        losses.append(x.square().mean())
    forward = [list(layer.seen) for layer in layers]
    for loss in losses:
        loss.backward()
    params = [param for layer in layers for param in layer.parameters()]
    grads = [param.grad.tolist() for param in params if param.grad is not None]
    again = [layer.seen[2:] for layer in layers]
    with streams.inside():
        inside = torch.rand(3).tolist()
    return {
        "losses": [loss.item() for loss in losses],
        "grads": grads,
        "forward": forward,
        "again": again,
        "after": [*draw(), *inside],
    }


WAYS = {
    "early stop": recomputed(use_reentrant=False),
    "selective": recomputed(use_reentrant=False, context_fn=selectively),
    "whole": recomputed(use_reentrant=False, early_stop=False),
    "reentrant": recomputed(use_reentrant=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_region_that_is_recomputed_draws_the_same_again(way: str) -> None:
    expected, found = (two_micro_batches(run, tp=1) for run in (plain, WAYS[way]))
    again = found.pop("again")
    assert expected.pop("again") == [[], [], []]
    assert found == expected
    if way in ("whole", "reentrant"):  # else a recomputation stops before the end of forward
        assert again == found["forward"]


def test_a_region_draws_differently_along_tensor_and_the_rest_does_not() -> None:
    ranks = [two_micro_batches(plain, tp)["forward"] for tp in range(2)]
    for one, other in zip(*ranks, strict=True):
        for ours, theirs in zip(one, other, strict=True):
            assert ours[:8] == theirs[:8]
            assert ours[8:16] != theirs[8:16]
            assert ours[16:] != theirs[16:]
    regions = [seen[at : at + 8] for layer in ranks[0] for seen in layer for at in (8, 16)]
    assert all(left != right for left, right in pairwise(regions))


def numbers_of(streams: Streams) -> list[Any]:
    with streams.data.at(4):
        read = draw()
    with streams.inside():
        inside = torch.rand(2).tolist()
    return [draw(), read, inside]


def test_all_streams_go_on_from_what_was_captured_also_with_another_seed() -> None:
    streams = begun(tp=1)
    draw()
    saved = streams.capture()
    expected = numbers_of(streams)
    other = begun(seed=8, dp=3, pp=1)
    rng.check(*saved, CPU)
    other.restore(*saved)
    assert numbers_of(other) == expected


def test_a_checkpoint_of_before_there_were_three_holds_the_models_and_the_others_begin() -> None:
    streams = begun(dp=1)
    draw()
    tensors, numbers = streams.capture()
    expected = numbers_of(streams)
    assert set(tensors) == {"python", "numpy", "torch"}
    old = {name: numbers[name] for name in ("python", "numpy")}
    later = begun(dp=1)
    rng.check(tensors, old, CPU)
    later.restore(tensors, old)
    assert numbers_of(later) == expected


@pytest.mark.parametrize("name", ["data", "inside"])
@pytest.mark.parametrize(
    "own", [None, {}, [], 5, {"key": -1}, {"key": 2**32}, {"key": 1.5}, {"key": "7"}, {"key": True}]
)
def test_a_key_that_is_none_is_refused(name: str, own: Any) -> None:
    tensors, numbers = begun().capture()
    with pytest.raises(CheckpointError, match="no random stream can go on from it"):
        rng.check(tensors, {**numbers, name: own}, CPU)


def test_a_rank_that_is_new_draws_what_no_other_has_drawn() -> None:
    begun(dp=2)
    from_start = draw()
    later = []
    for step in (4, 5):
        Streams(3, CPU, dp=2).begin_late(step)
        later.append(draw())
    assert from_start not in later
    assert later[0] != later[1]
