"""A schedule of all stages as text: time to the right, a row for each stage.

    print(Grid.of("1f1b", stages=3, virtual=1, micro_batches=4).text(width=100))

    stage 0  F0 F1 F2 .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
    stage 1  .. F0 F1 .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. ..
    stage 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. ..

All chunks take equally long: a column is the forward of one, a backward takes two; one, where the
gradients of weights are made apart, in another one. Dots are idle time.
"""

from __future__ import annotations

import string
import textwrap
from dataclasses import dataclass
from functools import cached_property

from zrun_core.pipeline.actions import Action, ActionKind, Waiting, most_waiting, needs, play
from zrun_core.pipeline.schedule import num_versions, stage_actions, version_used
from zrun_core.spine.sections.schedules import SCHEDULES

IDLE = "."  # of these an idle column is made
_GOES_ON = "-"
_LEFT_OUT = "~"
_LEAST_WIDTH = 40


@dataclass(frozen=True)
class Cell:
    """An action in time: columns from `start` to before `end`."""

    action: Action
    start: int
    end: int


@dataclass(frozen=True)
class Grid:
    """The schedule of a pipeline as a table: a row per stage.

    Attributes:
        rows: the cells of each stage, in order; updates, which take no time here, are left out.
    """

    schedule: str
    stages: int
    virtual: int
    micro_batches: int
    rows: tuple[tuple[Cell, ...], ...]

    @classmethod
    def of(cls, schedule: str, stages: int, virtual: int, micro_batches: int) -> Grid:
        """Play a schedule with chunks that all take equally long.

        Args:
            schedule: by its name in `zrun_core/pipeline/schedule.py`.
            virtual: chunks of a stage; with layer_major slices of the model.
            micro_batches: of the step; of PipeDream as many as are to be seen.
        """
        orders = [
            stage_actions(schedule, stage, stages, virtual, micro_batches)
            for stage in range(stages)
        ]
        has_weights = any(action.kind is ActionKind.WEIGHT for action in orders[0])
        columns = {kind: 1 for kind in ActionKind} | {ActionKind.UPDATE: 0}
        columns[ActionKind.BACKWARD] = 1 if has_weights else 2
        rows: list[list[Cell]] = [[] for _ in orders]
        ends: dict[Action | None, int] = {None: 0}
        for stage, action in play(orders):
            free = rows[stage][-1].end if rows[stage] else 0
            start = max(free, ends[needs(action, stages * virtual - 1)])
            ends[action] = start + columns[action.kind]
            if action.kind is not ActionKind.UPDATE:
                rows[stage].append(Cell(action, start, ends[action]))
        return cls(schedule, stages, virtual, micro_batches, tuple(map(tuple, rows)))

    @cached_property
    def num_columns(self) -> int:
        return max((row[-1].end for row in self.rows if row), default=0)

    def idle(self, stage: int) -> float:
        """Return the share of the time in which a stage has nothing to do."""
        busy = sum(cell.end - cell.start for cell in self.rows[stage])
        return 1 - busy / self.num_columns if self.num_columns else 0.0

    def waiting(self, stage: int) -> Waiting:
        """Return what waits on a stage at most."""
        order = stage_actions(self.schedule, stage, self.stages, self.virtual, self.micro_batches)
        return most_waiting(order)

    def text(self, width: int) -> str:
        """Return the grid, and below it what each stage waits for and keeps.

        Args:
            width: of a line at most; what does not fit is left out of the middle.
        """
        head = len(f"stage {self.stages - 1}") + 2
        names = [[self._name(cell.action) for cell in row] for row in self.rows]
        cell_width = max((len(name) for row in names for name in row), default=1) + 1
        shown = max(width - head, _LEAST_WIDTH) // cell_width
        lines = []
        for stage, row in enumerate(self.rows):
            columns = [IDLE * (cell_width - 1)] * self.num_columns
            for cell, name in zip(row, names[stage], strict=True):
                goes_on = [_GOES_ON * (cell_width - 1)] * (cell.end - cell.start - 1)
                columns[cell.start : cell.end] = [name, *goes_on]
            words = " ".join(f"{each:{cell_width - 1}}" for each in _without_middle(columns, shown))
            lines.append(f"{f'stage {stage}':{head}}{words}".rstrip())
        legend = textwrap.wrap(self._legend(shown), max(width, _LEAST_WIDTH))
        return "\n".join([*lines, "", *legend, "", *self._table()])

    def _name(self, action: Action) -> str:
        """Return what a cell begins with: F3, F3b in a stage's second chunk, F3v1 by version 1."""
        kind, chunk, micro = action
        name = f"{kind.value}{micro}"
        if self.virtual > 1:
            own = chunk // self.stages
            letters = string.ascii_lowercase
            name += letters[own] if self.virtual <= len(letters) else f".{own}"
        if self._has_versions and kind is ActionKind.FORWARD:
            stage = chunk % self.stages
            name += f"v{version_used(self.schedule, stage, self.stages, micro)}"
        return name

    @property
    def _has_versions(self) -> bool:
        return num_versions(self.schedule, 0, self.stages) > 1

    def _legend(self, shown: int) -> str:
        words = ["F0: forward of micro-batch 0", "B: backward"]
        if SCHEDULES[self.schedule].splits_backward and self.stages > 1:
            words[1:] = ["B: gradients of its inputs", "W: of its weights"]
        if self.virtual > 1:
            whose = "slice of the model" if self.stages == 1 else "chunk of the stage"
            words.append(f"a, b: first, second {whose}")
        if self._has_versions:
            words.append("v1: with the weights after 1 update")
        words.append(f"{IDLE * 2}: idle")
        left_out = self.num_columns - shown
        if left_out > 0:
            words.append(f"{_LEFT_OUT}: {left_out + 1} of {self.num_columns} columns left out")
        return "; ".join(words)

    def _table(self) -> list[str]:
        """Return a line for each stage, and its heading."""
        heading = ["stage", "idle", "forwards that wait"]
        has_weights = any(self.waiting(stage).weights for stage in range(self.stages))
        if has_weights:
            heading.append("weights that wait")
            heading.append("both")
        if self._has_versions:
            heading.append("versions")
        rows = [heading]
        for stage in range(self.stages):
            waiting = self.waiting(stage)
            row = [str(stage), f"{self.idle(stage):.0%}", str(waiting.forwards)]
            if has_weights:
                row += [str(waiting.weights), str(waiting.both)]
            if self._has_versions:
                row.append(str(num_versions(self.schedule, stage, self.stages)))
            rows.append(row)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return [
            "  ".join(f"{word:>{size}}" for word, size in zip(row, widths, strict=True))
            for row in rows
        ]


def _without_middle(columns: list[str], shown: int) -> list[str]:
    """Return columns of which at most `shown` are left: the first ones, a mark, the last ones."""
    if len(columns) <= shown:
        return columns
    first = shown // 2
    last = shown - 1 - first
    return [*columns[:first], _LEFT_OUT, *columns[len(columns) - last :]]


def bubble(schedule: str, stages: int, virtual: int, micro_batches: int) -> float:
    """Return the share of a step in which equal stages wait: (p - 1) / (m + p - 1) for 1F1B.

    With v chunks on a stage it is (p - 1) / (v m + p - 1), with zero_bubble (p - 1) / (3 m + p - 1)
    where forward, gradients of inputs and of weights take equally long. Where there are fewer
    micro-batches than stages these two wait longer.

    Args:
        schedule: by name; one whose steps end with an update.
        micro_batches: m of a step; for interleaved a multiple of the stages, or fewer.
    """
    missing = max(0, stages - micro_batches)
    parts, late = virtual, (virtual - 1) * missing
    if SCHEDULES[schedule].splits_backward:  # forwards, and both halves of backwards
        parts, late = 3, missing
    idle = stages - 1 + late if stages > 1 else 0
    return idle / (parts * micro_batches + idle)
