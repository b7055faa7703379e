"""Every feature on every shape of a mesh: cells, what each is held to, and few that cover all.

A cell trains a small GPT for a few steps. Whatever the axes are, it must come to what one process
comes to; and with the same axes, neither recomputing nor keeping states elsewhere may change a bit.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar
from unittest.mock import patch

import numpy as np
import pydantic
from distances import Found
from elsewhere import late_copies
from runs import job, run
from small_jobs import gpt
from toys import own_device

from zrun_core.memory.buffers import Placement, placement_of
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.activations import ActivationsConfig
from zrun_core.spine.sections.offload import OffloadConfig
from zrun_core.train import parallelize
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.unit import unit_params

STEPS = 4
AXES: Mapping[str, Mapping[str, int]] = {
    "dp 4": {"dp": 4},
    "tp 2, dp 2": {"tp": 2, "dp": 2},
    "pp 2, dp 2": {"pp": 2, "dp": 2},
    "tp 4": {"tp": 4, "dp": 1},
    "pp 4": {"pp": 4, "dp": 1},
    "tp 2, pp 2": {"tp": 2, "pp": 2, "dp": 1},
    "tp 2, pp 2, dp 2": {"tp": 2, "pp": 2, "dp": 2},
}
STAGES = (0, 1, 2, 3)
PRECISIONS: Mapping[str, Any] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": {"compute": "fp16", "loss_scale": {"init": 2.0**21}},  # its first steps overflow
}
OPTIMIZERS = ("adamw", "lamb")
RECOMPUTED: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "full": {"checkpoint": "full"},
    "Pa": {"checkpoint": "full", "partition": True},
}
STATES = ("device", "apart", "disk")
PAGES = ("moved", "still")

# How far losses may be from one process's, as a share; values: ten times that, of the largest of
# their tensor.
CLOSE: Mapping[str, float] = {"fp32": 2e-6, "bf16": 1e-2, "fp16": 2e-3}


class Cell(NamedTuple):
    """A job, and the shape of its mesh.

    Attributes:
        axes: one of `AXES`.
        stage: of ZeRO.
        precision: one of `PRECISIONS`.
        optimizer: one of `OPTIMIZERS`.
        recomputed: one of `RECOMPUTED`.
        states: where they are between uses; apart: in a host's memory that is apart from the CPU
            which trains, with copies that come late.
        pages: how a CPU assembles a unit's parameters: of pages that are moved into place, or,
            where they stay still, in a storage that is resized, as on every GPU. Only stage 3 has
            parameters to assemble.
    """

    axes: str
    stage: int
    precision: str
    optimizer: str
    recomputed: str
    states: str
    pages: str = "moved"

    @property
    def alone(self) -> Cell:
        """Return what one process trains, to compare with."""
        return Cell("dp 1", 0, self.precision, self.optimizer, "none", "device")

    @property
    def base(self) -> Cell:
        """Return what must have the same bits."""
        return self._replace(recomputed="none", states="device", pages="moved")

    @property
    def why_not(self) -> str:
        """Return words of the refusal that holds; empty: the cell trains."""
        if self.optimizer == "lamb" and self.states == "disk":
            return "proposes the updates of all layers before"
        if self.recomputed == "Pa" and "tp" not in self.dims:
            return "with parallel.tp 1 none do"
        return ""

    @property
    def is_new(self) -> bool:
        """Return whether no cell with pages that move is the same job."""
        return self.pages == "moved" or self.stage == 3

    @property
    def refusal(self) -> str:
        """Return what zrun says of its job; empty: it is a good one."""
        try:
            JobConfig.model_validate(self.keys)
        except pydantic.ValidationError as error:
            return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        return ""

    @property
    def dims(self) -> dict[str, int]:
        """Return the sizes of the axes."""
        return dict(AXES.get(self.axes, {"dp": 1}))

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks that the axes have."""
        return int(np.prod(list(self.dims.values())))

    @property
    def keys(self) -> dict[str, Any]:
        """Return the keys of its job."""
        keys = job(
            model=gpt(heads=4),
            data={"call": "runs.py:Plain", "shuffle": True},
            steps=STEPS,
            batch={"global": 8, "micro": 1},
            optim={"name": self.optimizer, "lr": 1e-2, "eps": 1e-3, "clip": 1.0},
            precision=PRECISIONS[self.precision],
            zero=self.stage,
            parallel={axis: size for axis, size in self.dims.items() if axis != "dp"},
            activations=dict(RECOMPUTED[self.recomputed]),
            hooks={},
            checkpoint=None,
        )
        tier = "host" if self.states == "apart" else self.states
        if tier != "device":
            keys["offload"] = {"optimizer": tier, "grad": tier}
            if self.stage == 3:
                keys["offload"]["param"] = tier
        return keys


class NamedValues(Protocol):
    """A named tuple."""

    def _asdict(self) -> dict[str, Any]: ...

    def __hash__(self) -> int: ...


AnyCell = TypeVar("AnyCell", bound=NamedValues)


def all_cells() -> Iterator[Cell]:
    """Yield every cell."""
    factors = (AXES, STAGES, PRECISIONS, OPTIMIZERS, RECOMPUTED, STATES, PAGES)
    for values in itertools.product(*factors):
        cell = Cell(*values)
        if cell.is_new:
            yield cell


def covering(cells: Sequence[AnyCell], together: int = 2) -> list[AnyCell]:
    """Return few cells in which every pair of values occurs that occurs in the given ones.

    Args:
        cells: to choose from, greedily: each next one has the most pairs that are still missing.
        together: 1 is for every value in place of every pair, 3 for every three of them.
    """
    held = {cell: set(itertools.combinations(cell._asdict().items(), together)) for cell in cells}
    missing = set().union(*held.values())
    chosen = []
    while missing:
        best = max(held, key=lambda cell: len(missing & held[cell]))
        missing -= held[best]
        chosen.append(best)
    return chosen


def train(cell: Cell, folder: str) -> dict[str, Any]:
    """Train a cell, on one of its ranks."""
    with ExitStack() as stack:
        if cell.states == "apart":
            stack.enter_context(states_apart())
        if cell.pages == "still":
            stack.enter_context(pages_still())
        return run(cell.keys, folder, dims=cell.dims)


def pages_still() -> Any:
    """Return what lets a CPU assemble parameters as a GPU does, in storages that are resized."""
    return patch.object(unit_params, "can_move_pages", lambda: False)


@contextmanager
def states_apart() -> Iterator[None]:
    """Let a host's memory be apart from the CPU that trains, as it is from a GPU; copies are late.

    On a GPU it changes nothing.
    """
    init = ShardedModel.__init__

    def init_apart(self: ShardedModel, *args: Any, **options: Any) -> None:
        init(self, *args, **{**options, "apart": late_copies()})
        assert self.tiers is not None, "its states are on the device"

    def as_of_a_gpu(offload: OffloadConfig, activations: ActivationsConfig, _: str) -> Placement:
        return placement_of(offload, activations, "cuda")

    if own_device().type != "cpu":
        yield
        return
    with (
        patch.object(ShardedModel, "__init__", init_apart),
        patch.object(parallelize, "placement_of", as_of_a_gpu),
    ):
        yield


def on_ranks(pool: Any, cell: Cell, function: Callable[..., Any] = train) -> Found:
    """Train a cell on the ranks of a pool, with files in a folder that goes."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        found: Found = pool.run(function, cell, f"{folder}/run")
    return found
