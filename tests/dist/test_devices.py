"""GPUs over NCCL train what CPUs do, to the bit: simulated ones, whose kernels are the CPU's.

`make test-simulated-gpu` runs all of it, `make test` those marked `covering`. Kernels come late
there, at random, so whoever does not wait for one computes with other numbers.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axes_cells import CLOSE, Cell, all_cells, covering, on_ranks, train
from distances import distance
from runs import job, losses, run
from test_pipelines import assert_equal, small, whole
from torch.nn.attention import SDPBackend, sdpa_kernel
from traces import names_in, read_trace

from zrun_core.spine.sections.schedules import SCHEDULES as FACTS

IS_SIMULATED = "simulated_gpu.cuda" in sys.modules
pytestmark = pytest.mark.skipif(not IS_SIMULATED, reason="needs simulated GPUs")

CELLS = covering([cell for cell in all_cells() if not cell.why_not])
IN_ALL_DIMENSIONS = Cell("tp 2, pp 2", 3, "fp32", "adamw", "full", "apart")


def same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Losses, and what all ranks would save, are equal."""
    assert [losses(of_rank) for of_rank in found] == [losses(of_rank) for of_rank in wanted]
    assert_equal(whole(found), whole(wanted))


def with_plain_attention(function: Callable[..., Any], *args: Any) -> Any:
    """Call without the fused attention that CPUs have, and simulated GPUs have not."""
    with sdpa_kernel(SDPBackend.MATH):
        return function(*args)


def train_cell(*args: Any) -> Any:
    return with_plain_attention(train, *args)


def run_job(*args: Any) -> Any:
    return with_plain_attention(run, *args)


@pytest.fixture(scope="module")
def trained(ranks) -> Callable[[Cell, str], list[dict[str, Any]]]:
    """What a cell comes to on ranks of a kind."""
    made: dict[tuple[Cell, str], Any] = {}

    def found(cell: Cell, device: str) -> list[dict[str, Any]]:
        if (cell, device) not in made:
            made[cell, device] = on_ranks(ranks(cell.num_ranks, device), cell, train_cell)
        return made[cell, device]  # type: ignore[no-any-return]

    return found


@pytest.mark.parametrize(
    "cell",
    [*CELLS, pytest.param(IN_ALL_DIMENSIONS, marks=pytest.mark.covering)],
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


FORMATS: dict[str, Any] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": {"compute": "fp16", "loss_scale": {"init": 2.0**10, "window": 2}},
}
ELSEWHERE: dict[str, dict[str, str]] = {
    "device": {},
    "optimizer on the host": {"optimizer": "host"},
    "gradients too, serial": {"optimizer": "host", "grad": "host", "schedule": "serial"},
    "disk and host": {"optimizer": "disk", "grad": "host"},
}
COVERING = (2, 4, 9, 13)  # rows of `stages` that `make test` runs


def stages() -> Iterator[Any]:
    """Yield every stage with every place of states, each on 1, 2 or 4 ranks and in one format."""
    for number, (stage, place) in enumerate(itertools.product(range(4), ELSEWHERE)):
        size = (1, 2, 4)[number % 3]
        precision = list(FORMATS)[number // 3 % 3]
        name = f"{stage}, {place}, {size} ranks, {precision}"
        marks = [pytest.mark.covering] if number in COVERING else []
        yield pytest.param(stage, place, size, precision, 1 + number % 2, id=name, marks=marks)


@pytest.mark.parametrize(("stage", "place", "size", "precision", "accumulation"), list(stages()))
def test_stages(
    ranks, tmp_path: Path, stage: int, place: str, size: int, precision: str, accumulation: int
) -> None:
    offload = ELSEWHERE[place]
    if stage == 3 and offload:
        offload = {**offload, "param": "host"}
    keys = job(
        precision=FORMATS[precision],
        batch={"global": 8, "micro": 8 // size // accumulation},
        model={"call": "runs.py:Speaker", "args": {"dropout": 0.0, "norm": False}},
        eval={"data": "runs.py:Tokens", "every": 4},
        hooks={},
        guards={"replica_every": 4},
    )
    given = {**keys, "zero": stage, "offload": offload}
    there = ranks(size, "cuda").run(run, given, str(tmp_path / "there"))
    here = ranks(size, "cpu").run(run, {**keys, "zero": stage}, str(tmp_path / "cpu"))
    if precision == "fp32":
        same(there, here)
        return
    # Autocast computes other operators in low precision on a CPU: there, stages agree to the bit.
    base = ranks(size, "cuda").run(run, {**keys, "zero": stage}, str(tmp_path / "base"))
    same(there, base)
    assert losses(there[0]) == pytest.approx(losses(here[0]), rel=0.02)


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
        pytest.param(name, marks=[pytest.mark.covering] if name == "interleaved" else [])
        for name in SCHEDULES
    ],
)
def test_schedules(ranks, tmp_path: Path, schedule: str) -> None:
    parallel = {"schedule": schedule, **SCHEDULES[schedule]}
    optim = {"lr": 1e-2, "weight_decay": 0.1}  # clipping needs the norm of all stages
    keys = small(zero=0, parallel=parallel, optim=optim)
    if FACTS[schedule].updates_each:
        keys["batch"] = {"global": 4, "micro": 4}  # each micro-batch is a step
    size = SCHEDULES[schedule]["pp"]
    dims = {"dp": 1, "pp": size}
    here, there = (
        ranks(size, device).run(run_job, keys, str(tmp_path / device), None, None, None, dims)
        for device in ("cpu", "cuda")
    )
    same(there, here)


@pytest.mark.covering
def test_a_run_that_was_cut_goes_on(ranks, tmp_path: Path) -> None:
    """From a checkpoint that other devices have saved, too."""
    keys = job(zero=3, model={"call": "runs.py:Speaker", "args": {"dropout": 0.0, "norm": False}})
    whole_run = ranks(2, "cpu").run(run, keys, str(tmp_path / "whole"))
    ranks(2, "cuda").run(run, keys, str(tmp_path / "cut"), None, 5)
    for device in ("cuda", "cpu"):
        folder = {"folder": str(tmp_path / "cut" / "checkpoints")}
        rest = ranks(2, device).run(run, keys, str(tmp_path / device), folder)
        assert min(losses(rest[0])) == 4
        assert_equal(whole(rest), whole(whole_run))


@pytest.mark.covering
def test_a_profile_names_what_threads_of_autograd_do(ranks, tmp_path):
    """And training does not notice. Simulated kernels are none that torch's profiler traces."""
    keys = job(zero=3, steps=4, checkpoint=None, hooks={})
    plain = ranks(2, "cuda").run(run, keys, str(tmp_path / "plain"))
    keys["profile"] = {"steps": [2, 3], "ranks": [0, 1]}
    found = ranks(2, "cuda").run(run, keys, str(tmp_path / "traced"))
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
