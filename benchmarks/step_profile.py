"""Show where a step's time goes: each part of zrun's steps beside DDP's, in milliseconds of a rank.

    python benchmarks/step_profile.py --size 50m                          about 10 minutes
    python benchmarks/step_profile.py --systems ddp,zrun1-bf16 --heap own

Systems take turns as in `step.py`, at an equal heap unless `--heap` says otherwise. A part's time
is that of its own code: what it calls of another part is the other's. Each number is the median
over steps, ranks and rounds; on a machine with other work, time on a core is truer than the clock.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import launch
from cases import SHAPES, Case, Request
from render import render

if TYPE_CHECKING:
    from systems import Make

# What is timed: part -> `module:attributes` of its functions.
PARTS = {
    "forward": ["model:GPT.forward"],
    "backward": ["torch:Tensor.backward"],
    "gradients into flat memory": ["zrun_core.zero.unit.unit_grad:UnitGrad.accumulate"],
    "copies between ranks": ["zrun_core.distributed.cma_transport:_Peer.copy"],
    "sums": ["zrun_core.distributed.collectives:store_sum"],
    "page moves": [
        "zrun_core.memory.arena:PageWindow.acquire",
        "zrun_core.memory.arena:PageWindow.release",
    ],
    "norm": ["zrun_core.zero.reduce.model_grad:ModelGrad.square_norm"],
    "update": [
        "torch.optim:AdamW.step",
        "zrun_core.zero.update.sharded_optimizer:ShardedOptimizer.step",
    ],
    "waiting for other ranks": ["zrun_core.distributed.comm:Comm.wait_for"],
}
REST, THREADS, WHOLE = "everything else", "other threads", "whole step"
ROWS = (*PARTS, REST, THREADS, WHOLE)
Times = dict[str, tuple[float, float]]  # part -> seconds on a core, and by the clock


def targets() -> Iterator[tuple[str, Any, str]]:
    """Yield every function that is timed: its part, its owner, its name there."""
    for part, places in PARTS.items():
        for place in places:
            module, _, path = place.partition(":")
            *owners, name = path.split(".")
            owner = functools.reduce(getattr, owners, importlib.import_module(module))
            assert hasattr(owner, name), f"{place} is gone"
            yield part, owner, name


class Stopwatch:
    """Times parts of a step that are nested in each other: each second counts for the innermost."""

    def __init__(self) -> None:
        self._open = [REST]
        self._spent: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        self._last = time.thread_time(), time.perf_counter()

    def _turn(self) -> None:
        now = time.thread_time(), time.perf_counter()
        for spent, before, after in zip(self._spent, self._last, now, strict=True):
            spent[self._open[-1]] += after - before
        self._last = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs inside is `name`, except for parts in it."""
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`, timed."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return call(*args, **kwargs)

        return timed

    def lap(self) -> Times:
        """Return what every part took since the last lap."""
        self._turn()
        cpu, clock = self._spent
        found = {name: (cpu[name], clock[name]) for name in (*PARTS, REST)}
        cpu.clear()
        clock.clear()
        return found


def profile(make: Make, request: Request, rank: int) -> list[Times]:
    """Train on this rank, and return what the parts of each step took that is not warm-up."""
    import model
    import systems
    from worker import barrier

    watch = Stopwatch()
    for part, owner, name in targets():
        setattr(owner, name, watch.wrap(part, getattr(owner, name)))
    shape, world = SHAPES[request.size], request.ranks
    share = slice(rank * shape.batch, (rank + 1) * shape.batch)
    training = make(model.build(shape), systems.Seat(rank, world, shape, request.bf16))
    found = []
    for number in range(request.steps):
        tokens, targets_ = (part[share] for part in model.global_batch(shape, number, world))
        barrier()
        watch.lap()
        before = time.process_time(), time.thread_time(), time.perf_counter()
        training.step(tokens, targets_)
        after = time.process_time(), time.thread_time(), time.perf_counter()
        process, thread, clock = (b - a for a, b in zip(before, after, strict=True))
        found.append(watch.lap() | {THREADS: (process - thread, 0.0), WHOLE: (process, clock)})
    return found[request.warmup :]


def table(runs: dict[Case, list[Times]], ranks: int) -> str:
    """Every part of every system: milliseconds on a core, and by the clock."""

    def text(steps: Sequence[Times], part: str) -> str:
        cpu, clock = (1e3 * statistics.median(step[part][way] for step in steps) for way in (0, 1))
        return f"{cpu:.0f} / {clock:.0f}" if max(cpu, clock) >= 0.5 else ""

    found = {case.label(ranks): steps for case, steps in runs.items() if steps}
    rows = [[part, *(text(steps, part) for steps in found.values())] for part in ROWS]
    return render(("ms on a core / by the clock", *found), rows)


def main() -> None:
    """Profile systems in turns, print the table, and write the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SHAPES, default="50m")
    parser.add_argument("--systems", default="nocomm,ddp,zrun1,zrun2,zrun3")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of each run, warm-up included")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--heap", choices=launch.HEAPS, default="kept")
    parser.add_argument("--json", type=Path, default=Path("bench-profile.json"))
    options = parser.parse_args()
    cases = [Case.parse(name, options.ranks) for name in options.systems.split(",")]
    settings = launch.Settings(
        options.size, 1, options.warmup, 600.0, sys.executable, heap=options.heap
    )
    runs: dict[Case, list[Times]] = {case: [] for case in cases}
    for number in range(options.rounds):
        for case in cases if number % 2 == 0 else reversed(cases):
            with tempfile.TemporaryDirectory(prefix="zrun-bench-") as folder:
                script, steps = Path(__file__).resolve(), options.steps
                ranks, error = launch.run_ranks(script, case, settings, steps, Path(folder))
            print(f"round {number + 1}  {case.label(options.ranks)}  {error}", file=sys.stderr)
            runs[case] += [step for rank in ranks for step in rank]
    saved = {case.label(options.ranks): steps for case, steps in runs.items()}
    options.json.write_text(json.dumps(saved, indent=1))
    print(table(runs, options.ranks))


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].endswith("request.json"):
        import worker

        worker.main(profile)
    else:
        main()
