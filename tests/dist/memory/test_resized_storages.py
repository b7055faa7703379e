"""Units whose storage is resized, as on every GPU and where pages do not move: to the bit the same.

On a Linux CPU units are assembled from pages that move. Here they are not, on the same CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from axes_cells import pages_still
from elsewhere import DISK, HOST, SETTINGS, assert_equal
from elsewhere import run as run_placed
from runs import job, losses
from runs import run as run_job
from toys import build, make_sharded, train

from zrun_core.memory.arena import StorageWindow
from zrun_core.memory.buffers import ON_DEVICE, Placement

Ranks = Callable[[int], Any]
NO_PAGES = pages_still()


def resized(function: Callable[..., Any], *args: Any) -> Any:
    """Return what `function` does where no pages move."""
    with NO_PAGES:
        return function(*args)


def train_resized(*args: Any) -> Any:
    return resized(train, *args)


def run_placed_resized(*args: Any) -> Any:
    return resized(run_placed, *args)


def run_job_resized(*args: Any) -> Any:
    return resized(run_job, *args)


def count_resized() -> tuple[int, int]:
    """Units whose storage is resized; all units."""
    with NO_PAGES:
        units = make_sharded(build(), 3).units
    return sum(isinstance(unit.param.window, StorageWindow) for unit in units), len(units)


def test_these_units_are_resized(ranks: Ranks) -> None:
    for num_resized, num_units in ranks(2).run(count_resized):
        assert num_resized == num_units > 1


# As much scale as does not overflow: else no update allocates its states.
TRAINED = SETTINGS | {"fp16": {"precision": {"compute": "fp16", "loss_scale": {"init": 2.0**8}}}}


@pytest.mark.parametrize("options", TRAINED.values(), ids=TRAINED)
@pytest.mark.parametrize(("num_ranks", "shard_group"), [(2, None), (4, 2)], ids=["2", "2x2"])
@pytest.mark.at_most(1)
def test_stage_3_trains_the_same(
    ranks: Ranks, num_ranks: int, shard_group: int | None, options: dict[str, Any]
) -> None:
    given = {**options, "shard_group": shard_group}
    moved = ranks(num_ranks).run(train, 3, given, 2)
    for left, right in zip(moved, ranks(num_ranks).run(train_resized, 3, given, 2), strict=True):
        assert left["losses"] == right["losses"]
        for name, value in left["state"].items():
            assert (value == right["state"][name]).all(), name


# With something on the host, which is apart from the device then: a disk is read through it.
PARAMETERS_ELSEWHERE = {
    "host": Placement(param=HOST),
    "disk": Placement(param=DISK, optimizer=HOST),
    "all on the host": Placement(param=HOST, grad=HOST, optimizer=HOST),
    "on both": Placement(param=DISK, grad=HOST, optimizer=DISK),
}


@pytest.mark.parametrize("placement", PARAMETERS_ELSEWHERE.values(), ids=PARAMETERS_ELSEWHERE)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.at_most(1)
def test_parameters_elsewhere_train_the_same(
    ranks: Ranks, num_ranks: int, placement: Placement
) -> None:
    settings = SETTINGS["bf16, clipped"]
    here = ranks(num_ranks).run(run_placed, 3, ON_DEVICE, settings, 3, "overlap")
    away = ranks(num_ranks).run(run_placed_resized, 3, placement, settings, 3, "overlap")
    assert_equal(here, away)


@pytest.mark.thorough
def test_a_job_saves_and_goes_on_the_same(ranks: Ranks, tmp_path: Any) -> None:
    """With what looks between two steps: saves, an evaluation, replicas, a frozen parameter."""
    keys = job(zero={"stage": 3}, eval={"data": "runs.py:Tokens", "every": 4})
    moved = ranks(2).run(run_job, keys, str(tmp_path / "moved"))
    there = ranks(2).run(run_job_resized, keys, str(tmp_path / "resized"))
    ranks(2).run(run_job_resized, keys, str(tmp_path / "cut"), None, 5)
    rest = ranks(2).run(run_job_resized, keys, str(tmp_path / "cut"), {})
    assert min(losses(rest[0])) == 4
    for one, other, resumed in zip(moved, there, rest, strict=True):
        assert one["error"] == other["error"] == resumed["error"] == ""
        assert one["digest"] == other["digest"] == resumed["digest"]
