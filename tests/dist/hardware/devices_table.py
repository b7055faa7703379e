"""What GPUs are held to: they come to the CPU's bits, and nothing races. The table of their stages.

Formats below fp32 are compared without autocast, by models that leave it: its list of operators
for a CPU is another one than for a GPU, so numbers differ whose products would not.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from axes_cells import covering, states_apart
from distances import Found, assert_equal, whole
from pool import RankPool
from runs import Speaker, job, losses, run
from torch.nn.attention import SDPBackend, sdpa_kernel
from toys import Net

IS_SIMULATED = "simulated_gpu.cuda" in sys.modules
needs_simulated = pytest.mark.skipif(not IS_SIMULATED, reason="needs simulated GPUs")

STAGES = (0, 1, 2, 3)
SIZES = (1, 2, 4, 8)
FORMATS: dict[str, Any] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": {"compute": "fp16", "loss_scale": {"init": 2.0**10, "window": 2}},
}
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "optimizer on the host": {"optimizer": "host"},
    "gradients too, serial": {"optimizer": "host", "grad": "host", "schedule": "serial"},
    "delayed": {"optimizer": "host", "grad": "host", "schedule": "delayed", "delay_after": 2},
    "disk and host": {"optimizer": "disk", "grad": "host"},
    "all on disk": {"optimizer": "disk", "grad": "disk"},
}


class Autocastless(Speaker):
    """Computes in the format of its parameters, by the same kernels on each kind of device."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0, norm=False)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        with torch.autocast(input_ids.device.type, enabled=False):
            return super().forward(input_ids, labels, index)


class AutocastlessNet(Net):
    """The same of the net of loops."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.to(self.first.weight.dtype), y)


class Row(NamedTuple):
    """A job of `test_stages`.

    Attributes:
        stage: of ZeRO.
        place: one of `PLACES`, of the states.
        size: ranks, each with a device.
        precision: one of `FORMATS`.
        accumulation: micro-batches of a step.
    """

    stage: int
    place: str
    size: int
    precision: str
    accumulation: int

    @property
    def offload(self) -> dict[str, Any]:
        """Return where states are; parameters too, where each rank has a part of them."""
        keys = PLACES[self.place]
        if self.stage < 3 or not keys or self.place == "delayed":
            return keys
        return {**keys, "param": "disk" if self.place == "all on disk" else "host"}

    @property
    def base(self) -> Row:
        """Return what has the same bits, without copies; a delayed update is another number."""
        return self if self.place == "delayed" else self._replace(place="device")

    @property
    def keys(self) -> dict[str, Any]:
        """Return the keys of its job."""
        return job(
            precision=FORMATS[self.precision],
            batch={"global": 16, "micro": 16 // self.size // self.accumulation},
            model="hardware/devices_table.py:Autocastless",
            eval={"data": "runs.py:Tokens", "every": 4},
            hooks={},
            guards={"replica_every": 4},
            zero=self.stage,
            offload=self.offload,
        )


ROWS = [Row(*values) for values in itertools.product(STAGES, PLACES, SIZES, FORMATS, (1, 2))]
PAIRS = covering(ROWS)
FEW = covering([row for row in reversed(PAIRS) if row.size <= 4], together=1)  # hard ones first


def stages() -> list[Any]:
    """Return all rows: those of `PAIRS`, of which `make test` runs a few, and thorough ones."""
    marks: dict[Row, list[pytest.MarkDecorator]] = {row: [] for row in PAIRS}
    marks |= {row: [pytest.mark.covering] for row in FEW}
    marks[next(row for row in PAIRS if row.size == max(SIZES))] = [pytest.mark.seeded]
    return [
        pytest.param(row, id=" ".join(map(str, row)), marks=marks.get(row, [pytest.mark.thorough]))
        for row in ROWS
    ]


def same(found: Found, wanted: Found) -> None:
    """Losses, and what all ranks would save, are equal."""
    for of_rank in (*found, *wanted):
        assert not of_rank["error"], of_rank["error"]
    assert losses(found[0])
    assert [losses(of_rank) for of_rank in found] == [losses(of_rank) for of_rank in wanted]
    assert_equal(whole(found), whole(wanted))


def without_races(function: Callable[..., Any], *args: Any) -> Any:
    """Call, and fail where something has raced, though nobody saw the error that this is."""
    found = function(*args)
    if "simulated_gpu.cuda" in sys.modules:
        import simulated_gpu

        races = simulated_gpu.races()
        simulated_gpu.clear_races()
        assert not races, "\n".join(races)
    return found


def with_plain_attention(function: Callable[..., Any], *args: Any) -> Any:
    """Call without the fused attention that CPUs have, and simulated GPUs have not."""
    with sdpa_kernel(SDPBackend.MATH):
        return without_races(function, *args)


def train(keys: dict[str, Any], *args: Any) -> Any:
    """Do what `runs.run` does, on one rank."""
    is_delayed = keys.get("offload", {}).get("schedule") == "delayed"
    with states_apart() if is_delayed else nullcontext():  # a CPU delays nothing otherwise
        return with_plain_attention(run, keys, *args)


def on_both(
    ranks: Callable[..., RankPool], size: int, keys: dict[str, Any], folder: Path, **dims: int
) -> tuple[Found, Found]:
    """Train a job on GPUs, and on CPUs."""
    there, here = (
        ranks(size, device).run(
            train, keys, str(folder / device), None, None, None, dims or {"dp": size}
        )
        for device in ("cuda", "cpu")
    )
    return there, here
