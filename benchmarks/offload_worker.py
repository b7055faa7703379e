"""One way of training with states elsewhere, in a process of its own: started by `offload_step.py`.

It reads a number of steps from a line of its standard input, trains so many, writes one line of
JSON about them, and waits for the next line. So processes can take turns, and each is built once.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import model
import systems
import torch
import torch.distributed as dist
from cases import SHAPES

if TYPE_CHECKING:  # DeepSpeed runs where zrun's requirements are not installed
    from zrun_core.memory.tier_traffic import Move
    from zrun_core.tiers.swap_file import Span
    from zrun_core.zero.sharded_model import ShardedModel

Interval = tuple[float, float]  # begin and end
STAGE = 3
_TRAINER, _UPDATER = "MainThread", "zrun-update_0"  # threads


def main() -> None:
    """Build what the request says, and take turns."""
    request = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what systems print is no answer
    torch.set_num_threads(1)
    shape = SHAPES[request["size"]]
    training = _make(request)(model.build(shape), systems.Seat(0, 1, shape, bf16=True))
    batches = [model.global_batch(shape, number, 1) for number in range(4)]
    turns = Turns(training, batches)
    answers.write("{}\n")
    for line in sys.stdin:
        answers.write(json.dumps(turns.take(int(line))) + "\n")
    os._exit(0)  # destroying a gloo group sometimes aborts


def _make(request: dict[str, Any]) -> systems.Make:
    if request["system"] == "deepspeed":
        dist.init_process_group("gloo")
        return systems.deepspeed(STAGE, request["states"])
    return systems.zrun(STAGE, offload=request["states"], disk_folder=request["folder"])


class Turns:
    """A training, a few steps at a time."""

    def __init__(self, training: systems.Training, batches: list[Any]) -> None:
        self._training = training
        self._batches = batches
        self._moved: Counter[Move] = Counter()  # bytes of this turn, as zrun counts them

    def take(self, num_steps: int) -> dict[str, Any]:
        """Make one step that is not timed, after which updates are under way, and time others.

        Bytes are of all steps, between states that are settled.
        """
        sharded = self._training.sharded
        _settle(sharded)
        before = _disk_bytes()
        if sharded is not None and sharded.tiers is not None:
            sharded.tiers.take_counts()
            sharded.tiers.take_trace()
        self._moved.clear()
        self._step(0)
        marks, losses = [time.perf_counter()], []
        for number in range(1, num_steps + 1):
            losses.append(self._step(number))
            marks.append(time.perf_counter())
        _settle(sharded)
        moved = [
            (now - then) / (num_steps + 1) for now, then in zip(_disk_bytes(), before, strict=True)
        ]
        turn = {
            "times": [stop - start for start, stop in pairwise(marks)],
            "losses": losses,
            "disk_bytes": sum(moved),
        }
        if sharded is None or sharded.tiers is None:
            return turn
        spans = sharded.tiers.take_trace()
        self._moved.update(sharded.tiers.take_counts().moved)
        counted = {
            "moved_bytes": _on_disk(self._moved) / (num_steps + 1),
            "planned_bytes": _on_disk(_planned(sharded)),
        }
        return turn | counted | overlap(spans, (marks[0], marks[-1]))

    def _step(self, number: int) -> float:
        loss = self._training.step(*self._batches[number % len(self._batches)])
        if self._training.sharded is not None:
            self._moved.update(self._training.sharded.updates.step_counts.moved)
        return loss


def _settle(sharded: ShardedModel | None) -> None:
    if sharded is not None:
        sharded.settle_updates()


def _disk_bytes() -> tuple[int, int]:
    """Return the bytes that this process has had read from disks and written to them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    found = dict(line.split(": ") for line in lines)
    return int(found["read_bytes"]), int(found["write_bytes"])


def _planned(sharded: ShardedModel) -> Mapping[Move, int]:
    """Return the bytes that a step moves by the plan."""
    from zrun_core.memory.placement import place
    from zrun_core.memory.tier_traffic import step_traffic

    return step_traffic(
        sharded.layouts,
        place(sharded.layouts, sharded.settings.placement),
        sharded.settings.states,
        sharded.places,
        micro_batches=1,
        gathers={unit.name: 2 for unit in sharded.layouts},
        host_is_device=True,
    )


def _on_disk(moved: Mapping[Move, int]) -> int:
    return sum(num_bytes for move, num_bytes in moved.items() if move.tier == "disk")


def overlap(spans: list[Span], window: tuple[float, float]) -> dict[str, float]:
    """Return the share of the time with blocks under way that lies beside computation.

    Training computes while it does not wait, and so does an update.

    Args:
        spans: of a trace: blocks of the disk, updates, and waits of either thread.
        window: begin and end of what is looked at, in which training never stopped but to wait.
    """
    outside = [(-math.inf, window[0]), (window[1], math.inf)]
    waits: dict[str, list[Interval]] = {_TRAINER: [], _UPDATER: []}
    blocks, updates = [], []
    for span in spans:
        interval = (span.begin, span.end)
        if span.what == "wait":
            waits[span.thread].append(interval)
        elif span.what.startswith("update "):
            updates.append(interval)
        else:
            blocks.append(interval)
    blocks = without(union(blocks), outside)
    updating = without(union(updates), union([*waits[_UPDATER], *outside]))
    computing = union([*without([window], union(waits[_TRAINER])), *updating])
    io_s = _length(blocks)
    return {
        "io_s": io_s,
        "update_s": _length(updating),
        "beside": 1 - _length(without(blocks, computing)) / io_s if io_s else 1.0,
    }


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals in order that cover the same time."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def without(intervals: list[Interval], holes: list[Interval]) -> list[Interval]:
    """Return what is left of disjoint intervals outside of `holes`, disjoint and in order too."""
    found = []
    for begin, end in intervals:
        for start, stop in holes:
            if start >= end:
                break
            if start > begin:
                found.append((begin, start))
            begin = max(begin, min(stop, end))
        if begin < end:
            found.append((begin, end))
    return found


def _length(intervals: list[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


if __name__ == "__main__":
    main()
