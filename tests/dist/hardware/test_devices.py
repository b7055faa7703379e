"""GPUs over NCCL train what CPUs do, to the bit: simulated ones, whose kernels are the CPU's.

`make test-simulated-gpu` runs all of it but what is marked `thorough`, which ALL=1 adds, `make
test` those marked `covering`. Kernels come late there, at random, so whoever does not wait for one
computes with other numbers; `make test-devices SEEDS=1-20` has them late otherwise, in these and in
those marked `seeded`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from axes_cells import CLOSE, Cell, all_cells, covering, on_ranks
from axes_cells import train as train_on_axes
from devices_table import (
    FORMATS,
    PAIRS,
    PLACES,
    ROWS,
    STAGES,
    Found,
    Row,
    needs_simulated,
    on_both,
    same,
    stages,
    train,
    with_plain_attention,
)
from distances import assert_equal, distance, whole
from runs import job, losses
from small_jobs import small_gpt
from traces import names_in, read_trace

from zrun_core.spine.sections.schedules import SCHEDULES as FACTS

pytestmark = needs_simulated

# GPUs have no pages that move.
CELLS = covering([cell for cell in all_cells() if not cell.why_not and cell.pages == "moved"])
IN_BOTH = Cell("tp 2, pp 2", 3, "fp32", "adamw", "full", "apart")
IN_ALL_DIMENSIONS = Cell("tp 2, pp 2, dp 2", 3, "fp32", "adamw", "full", "apart")


def train_cell(*args: Any) -> Any:
    return with_plain_attention(train_on_axes, *args)


@pytest.fixture(scope="module")
def trained(ranks) -> Callable[[Cell, str], Found]:
    """What a cell comes to on ranks of a kind."""
    made: dict[tuple[Cell, str], Found] = {}

    def found(cell: Cell, device: str) -> Found:
        if (cell, device) not in made:
            made[cell, device] = on_ranks(ranks(cell.num_ranks, device), cell, train_cell)
        return made[cell, device]

    return found


@pytest.mark.parametrize(
    "cell",
    [
        *CELLS,
        pytest.param(IN_BOTH, marks=pytest.mark.covering),
        pytest.param(IN_ALL_DIMENSIONS, marks=pytest.mark.seeded),
    ],
    ids=lambda cell: " ".join(map(str, cell)),
)
def test_shapes_of_the_mesh(trained: Any, cell: Cell) -> None:
    """Autocast computes other operators in low precision on a CPU: there, GPUs agree to the bit."""
    found = trained(cell, "cuda")
    if cell.precision == "fp32":
        same(found, trained(cell.base, "cpu"))
        return
    same(found, trained(cell.base, "cuda"))
    apart = distance(found, trained(cell.alone, "cpu"))
    assert apart.is_within(CLOSE[cell.precision]), apart


@pytest.fixture(scope="module")
def on_cpus(ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Row], Found]:
    """What the CPU's ranks come to: of all places but one the same."""
    made: dict[Row, Found] = {}

    def found(row: Row) -> Found:
        if row not in made:
            folder = str(tmp_path_factory.mktemp("cpu") / "run")
            made[row] = ranks(row.size).run(train, row.keys, folder)
        return made[row]

    return found


@pytest.mark.parametrize("row", stages())
def test_stages(ranks, tmp_path: Path, on_cpus: Any, row: Row) -> None:
    """In every format: this model leaves autocast."""
    same(ranks(row.size, "cuda").run(train, row.keys, str(tmp_path)), on_cpus(row.base))


def test_rows_of_stages_have_every_pair() -> None:
    for one, other in itertools.combinations(range(len(Row._fields)), 2):
        every = set(itertools.product(*({row[field] for row in ROWS} for field in (one, other))))
        assert {(row[one], row[other]) for row in PAIRS} == every
    assert len(ROWS) == 576
    assert len(PAIRS) <= 32


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        pytest.param(*case, marks=[pytest.mark.covering] if case == (3, "fp16") else [])
        for case in itertools.product(STAGES, ("bf16", "fp16"))
    ],
)
def test_autocast(ranks, tmp_path: Path, stage: int, precision: str) -> None:
    """It computes other operators in low precision on a CPU: GPUs agree to the bit."""
    away = Row(stage, "gradients too, serial", 2, precision, 2)
    model = {"call": "runs.py:Speaker", "args": {"dropout": 0.0, "norm": False}}
    pools = {"away": ranks(2, "cuda"), "there": ranks(2, "cuda"), "cpu": ranks(2)}
    found = {
        name: pool.run(
            train,
            {**(away if name == "away" else away.base).keys, "model": model},
            str(tmp_path / name),
        )
        for name, pool in pools.items()
    }
    same(found["away"], found["there"])
    assert losses(found["away"][0]) == pytest.approx(losses(found["cpu"][0]), rel=0.02)


@pytest.mark.parametrize(
    ("stage", "place"),
    [
        (1, "device"),
        (2, "optimizer on the host"),
        (2, "delayed"),
        (3, "device"),
        pytest.param(3, "all on disk", marks=pytest.mark.covering),
    ],
)
def test_shards_in_groups_and_copies_of_them(ranks, tmp_path: Path, stage: int, place: str) -> None:
    row = Row(stage, place, 4, "fp32", 2)
    zero = {"stage": stage, "shard_group": 2}
    there = ranks(4, "cuda").run(train, {**row.keys, "zero": zero}, str(tmp_path / "cuda"))
    here = ranks(4).run(train, {**row.base.keys, "zero": zero}, str(tmp_path / "cpu"))
    same(there, here)


SLICED: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "a layer": ({}, {"dp": 1}),
    "stage 1": ({"zero": 1}, {"dp": 2}),
    "recomputed, stage 3": ({"zero": 3, "activations": {"checkpoint": "full"}}, {"dp": 2}),
    "states on disk": ({"zero": 3, "offload": {**PLACES["all on disk"], "param": "disk"}}, {}),
    "a pipeline": ({"zero": 3, "parallel": {"pp": 2, "schedule": "zero_bubble"}}, {"pp": 2}),
}

FEW_SLICED = {"recomputed, stage 3": pytest.mark.covering, "a pipeline": pytest.mark.seeded}


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=FEW_SLICED.get(name, [])) for name in SLICED],
)
def test_slices_of_a_sequence(ranks, tmp_path: Path, case: str) -> None:
    keys, dims = SLICED[case]
    parallel = {"tp": 2, "sequence": True, **keys.get("parallel", {})}
    axes = {"dp": 1, "tp": 2, **dims}
    size = axes["dp"] * axes.get("pp", 1) * 2
    same(*on_both(ranks, size, small_gpt(**{**keys, "parallel": parallel}), tmp_path, **axes))


@pytest.mark.parametrize(
    ("stage", "keys"),
    [
        (0, {}),
        (2, {"offload": PLACES["optimizer on the host"]}),
        pytest.param(3, {"activations": {"checkpoint": "full"}}, marks=pytest.mark.covering),
        (3, {"offload": {**PLACES["all on disk"], "param": "disk"}}),
        (3, {"precision": FORMATS["fp16"], "activations": {"checkpoint": "full"}}),
    ],
)
def test_layers_first(ranks, tmp_path: Path, stage: int, keys: dict[str, Any]) -> None:
    """A layer of all micro-batches, then the next one."""
    given = {**Row(stage, "device", 2, "fp32", 4).keys, "parallel": {"schedule": "layer_major"}}
    same(*on_both(ranks, 2, {**given, **keys}, tmp_path))


SCHEDULES = {
    "1f1b": {"pp": 2},
    "gpipe": {"pp": 2},
    "zero_bubble": {"pp": 4},
    "interleaved": {"pp": 2, "virtual": 2},
    "pipedream": {"pp": 2},
    "pipedream_vertical": {"pp": 3},
}


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(
            name, marks=pytest.mark.covering if name == "interleaved" else pytest.mark.seeded
        )
        for name in SCHEDULES
    ],
)
def test_schedules(ranks, tmp_path: Path, schedule: str) -> None:
    parallel = {"schedule": schedule, **SCHEDULES[schedule]}
    optim = {"lr": 1e-2, "weight_decay": 0.1}  # clipping needs the norm of all stages
    keys = small_gpt(zero=0, parallel=parallel, optim=optim)
    if FACTS[schedule].updates_each:
        keys["batch"] = {"global": 4, "micro": 4}  # each micro-batch is a step
    size = SCHEDULES[schedule]["pp"]
    same(*on_both(ranks, size, keys, tmp_path, dp=1, pp=size))


@pytest.mark.covering
def test_a_run_that_was_cut_goes_on(ranks, tmp_path: Path) -> None:
    """From a checkpoint that other devices have saved, too."""
    keys = job(zero=3, model={"call": "runs.py:Speaker", "args": {"dropout": 0.0, "norm": False}})
    whole_run = ranks(2, "cpu").run(train, keys, str(tmp_path / "whole"))
    ranks(2, "cuda").run(train, keys, str(tmp_path / "cut"), None, 5)
    for device in ("cuda", "cpu"):
        folder = {"folder": str(tmp_path / "cut" / "checkpoints")}
        rest = ranks(2, device).run(train, keys, str(tmp_path / device), folder)
        assert min(losses(rest[0])) == 4
        assert_equal(whole(rest), whole(whole_run))


@pytest.mark.covering
def test_a_profile_names_what_threads_of_autograd_do(ranks, tmp_path):
    """And training does not notice. Simulated kernels are none that torch's profiler traces."""
    keys = job(zero=3, steps=4, checkpoint=None, hooks={})
    plain = ranks(2, "cuda").run(train, keys, str(tmp_path / "plain"))
    keys["profile"] = {"steps": [2, 3], "ranks": [0, 1]}
    found = ranks(2, "cuda").run(train, keys, str(tmp_path / "traced"))
    same(found, plain)
    (event,) = [event for event in found[1]["events"] if event["type"] == "profile"]
    events = read_trace(Path(event["path"]))
    assert names_in(events) >= {
        *("step 2", "step 3", "blocks.0 forward", "blocks.0 backward", "update blocks.0"),
        *("all_gather blocks.0 (backward, shard)", "reduce_scatter blocks.0 (backward, shard)"),
    }
    threads = {each["tid"] for each in events if each["name"] in ("forward", "blocks.0 backward")}
    assert len(threads) == 2
    assert {"shard", "world"} <= event["exposed_s"].keys()
    assert sum(part["self_s"] for part in event["parts"]) <= event["seconds"] * 1.001
    (warning,) = [event for event in found[1]["events"] if event["type"] == "warning"]
    assert warning["message"].startswith("the history of memory is left out: ")
