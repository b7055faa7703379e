"""Ranks on GPUs over NCCL: they train what one rank on the CPU does, within its tolerance.

Left out where there are fewer GPUs than ranks, unless NCCL_MULTI_RANK_GPU_ENABLE=1 lets NCCL, from
2.30 on, put several ranks on one. `tests/dist/hardware/test_devices.py` asks more, and to the bit,
of simulated GPUs, whose kernels are the CPU's. Here other kernels may compute, which is why numbers
are close.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from axes_cells import Cell, on_ranks, train
from distances import assert_equal, distance, whole
from pool import RankPool
from runs import job, losses, run
from small_jobs import small_gpt

DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
ARE_SHARED = DEVICES > 0 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def needs(ranks: int) -> pytest.MarkDecorator:
    """Leave a test out where its ranks have no GPUs."""
    reason = f"needs {ranks} CUDA devices, and there are {DEVICES}"
    return pytest.mark.skipif(ranks > DEVICES and not ARE_SHARED, reason=reason)


pytestmark = [pytest.mark.gpu, needs(2)]

# Of losses, as a share. The last bits of fp32 are those of other kernels, in another order.
CLOSE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
FORMATS: dict[str, Any] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": {"compute": "fp16", "loss_scale": {"init": 2.0**10, "window": 2}},
}
ELSEWHERE: dict[str, dict[str, str]] = {
    "optimizer": {"optimizer": "host"},
    "gradients too": {"optimizer": "host", "grad": "host"},
    "parameters too": {"optimizer": "host", "grad": "host", "param": "host"},
}

CELLS = (
    Cell("dp 4", 3, "fp32", "adamw", "none", "disk"),
    Cell("dp 4", 2, "bf16", "lamb", "full", "apart"),
    Cell("tp 2, dp 2", 3, "fp32", "adamw", "Pa", "apart"),
    Cell("pp 2, dp 2", 1, "fp32", "lamb", "full", "device"),
    Cell("tp 4", 1, "bf16", "adamw", "Pa", "device"),
    Cell("pp 4", 0, "fp32", "adamw", "none", "apart"),
    Cell("tp 2, pp 2", 3, "fp32", "adamw", "full", "apart"),
    Cell("tp 2, pp 2, dp 2", 2, "fp32", "adamw", "none", "device"),
)

Ranks = Callable[..., RankPool]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """`ranks(2)` has two GPUs, `ranks(1, "cpu")` is one rank on the CPU."""
    pools: dict[tuple[int, str], RankPool] = {}

    def get(size: int, device: str = "cuda") -> RankPool:
        key = size, device
        if key not in pools:
            pools[key] = RankPool(*key)
        return pools[key]

    yield get
    for pool in pools.values():
        pool.close()


def speaker(**keys: Any) -> dict[str, Any]:
    """A job whose numbers do not depend on how ranks share its samples."""
    model = {"call": "runs.py:Speaker", "args": {"dropout": 0.0, "norm": False}}
    return job(**{"model": model, "hooks": {}, "checkpoint": None, **keys})


def on_cpu(ranks: Ranks, folder: Path, keys: dict[str, Any]) -> dict[int, float]:
    """Losses of one rank on the CPU, which divides nothing and keeps all states beside it."""
    alone = {key: value for key, value in keys.items() if key not in ("offload", "parallel")}
    found = ranks(1, "cpu").run(run, {**alone, "zero": 0}, str(folder / "cpu"))
    assert not found[0]["error"], found[0]["error"]
    return losses(found[0])


def close(found: list[dict[str, Any]], wanted: dict[int, float], precision: str = "fp32") -> None:
    """Compare the losses of all steps: each moves parameters by far more than what is close."""
    for of_rank in found:
        assert not of_rank["error"], of_rank["error"]
    assert losses(found[0]) == pytest.approx(wanted, rel=CLOSE[precision])


@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("stage", range(4))
def test_stages_train_what_one_rank_does(
    ranks: Ranks, tmp_path: Path, stage: int, precision: str
) -> None:
    """Replicas are compared on the way, bit by bit."""
    keys = speaker(zero=stage, precision=FORMATS[precision], guards={"replica_every": 4})
    found = ranks(2).run(run, keys, str(tmp_path / "there"))
    close(found, on_cpu(ranks, tmp_path, keys), precision)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_agree_among_themselves(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    """The sum of two gradients has the same bits in any order; kernels with atomics have not."""
    base, found = (
        ranks(2).run(run, speaker(zero=each), str(tmp_path / str(each))) for each in (0, stage)
    )
    assert_equal(whole(found), whole(base), close=1e-4)


@pytest.mark.parametrize("place", ELSEWHERE)
def test_states_on_the_host(ranks: Ranks, tmp_path: Path, place: str) -> None:
    keys = speaker(zero=3, offload=ELSEWHERE[place])
    found = ranks(2).run(run, keys, str(tmp_path / "there"))
    close(found, on_cpu(ranks, tmp_path, keys))


@pytest.mark.parametrize("parallel", [{"schedule": "1f1b"}, {"virtual": 2}], ids=str)
def test_two_stages_of_a_pipeline(ranks: Ranks, tmp_path: Path, parallel: dict[str, Any]) -> None:
    schedule = {"schedule": "interleaved", **parallel, "pp": 2}
    keys = small_gpt(zero=0, parallel=schedule)
    dims = {"dp": 1, "pp": 2}
    found = ranks(2).run(run, keys, str(tmp_path / "there"), None, None, None, dims)
    close(found, on_cpu(ranks, tmp_path, keys))


def test_slices_of_layers(ranks: Ranks, tmp_path: Path) -> None:
    keys = small_gpt(zero=0, parallel={"tp": 2})
    dims = {"dp": 1, "tp": 2}
    found = ranks(2).run(run, keys, str(tmp_path / "there"), None, None, None, dims)
    close(found, on_cpu(ranks, tmp_path, keys))


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, marks=needs(cell.num_ranks), id=" ".join(map(str, cell)))
        for cell in CELLS
    ],
)
def test_shapes_of_the_mesh(ranks: Ranks, cell: Cell) -> None:
    found = on_ranks(ranks(cell.num_ranks), cell, train)
    apart = distance(found, on_ranks(ranks(1, "cpu"), cell.alone, train))
    assert apart.is_within(CLOSE[cell.precision]), apart


def test_a_run_that_was_cut_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    """Its checkpoint goes on one rank of the CPU as well."""
    keys = speaker(zero=3, checkpoint={"every": 3}, hooks={"on_step": "runs.py:on_step"})
    wanted = on_cpu(ranks, tmp_path, keys)
    ranks(2).run(run, keys, str(tmp_path / "cut"), None, 5)
    folder = {"folder": str(tmp_path / "cut" / "checkpoints")}
    for size, device in ((2, "cuda"), (1, "cpu")):
        rest = ranks(size, device).run(run, keys, str(tmp_path / f"rest-{device}"), folder)
        assert not rest[0]["error"], rest[0]["error"]
        found = losses(rest[0])
        assert min(found) == 4
        assert found == pytest.approx({step: wanted[step] for step in found}, rel=CLOSE["fp32"])
