"""Hybrid sharding: how much of the sum over copies goes on beside backward?

    python benchmarks/hybrid.py                           2 x 2 ranks, 5 rounds: about 3 minutes
    python benchmarks/hybrid.py --code before=../before   and another checkout, in turns
    python benchmarks/hybrid.py --stage 3 --sockets       not through the ranks' memory

Two copies of the states, on two ranks each, train a model of equal blocks in a user's own loop.
When the last gradient has come, each rank counts the all-reduces over the copies that were issued
by then, and those that were over. What it still has to wait for is `after`, of the slowest rank. At
stage 0 there are four copies: what data-parallel training overlaps.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from render import render

HERE = Path(__file__).resolve().parents[1]
RANKS = 4
_UNTIMED = 2  # steps: the first one learns the order of reductions


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2, 3))
    parser.add_argument("--code", action="append", default=[], metavar="NAME=CHECKOUT")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--sockets", action="store_true", help="as between hosts")
    parser.add_argument("--json", type=Path, default=Path("bench-hybrid.json"), help="results")
    options = parser.parse_args()
    codes = {"this": str(HERE)} | dict(each.split("=", 1) for each in options.code)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in codes}
    order = list(codes)
    for _ in range(options.rounds):
        for name in order:
            found[name] += measure(str(Path(codes[name]).resolve()), options)
        order.reverse()
    options.json.write_text(json.dumps(found, indent=1))
    print(table(found))


def measure(checkout: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """Train once with the code of `checkout`: what each timed step came to."""
    os.environ["ZRUN_HOST_MEMORY"] = "off" if options.sockets else "on"
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, checkout, options, folder) for rank in range(RANKS)]
        processes = [context.Process(target=_rank, args=each) for each in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit(f"a rank failed with {checkout}")
        by_rank = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(RANKS)]
    return [of_step(ranks) for ranks in zip(*by_rank, strict=True)]


def of_step(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """One step of all ranks: the mean of counts, the slowest rank's times."""
    found = {}
    for key in ranks[0]:
        values = [rank[key] for rank in ranks]
        found[key] = max(values) if key.endswith("_s") else statistics.fmean(values)
    return found


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Medians, and between which values half of the steps are."""
    rows = []
    for name, steps in found.items():
        issued, over, after = (
            statistics.median(step[part] / step[whole] for step in steps)
            for part, whole in (
                ("issued", "reductions"),
                ("over", "reductions"),
                ("after_s", "step_s"),
            )
        )
        times = [_spread([1e3 * step[key] for step in steps]) for key in ("after_s", "step_s")]
        rows.append([name, f"{issued:.0%}", f"{over:.0%}", *times, f"{after:.0%}"])
    head = ["code", "issued", "over", "after (ms)", "step (ms)", "after/step"]
    return render(head, rows)


def _spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.1f} [{low:.1f}, {high:.1f}]"


class _Watch:
    """Counts reductions over copies, and looks when the last gradient of a backward has come."""

    def __init__(self) -> None:
        from zrun_core.distributed.comm import Comm
        from zrun_core.zero.reduce.reducer import Reducer

        self.issued = 0
        self.at_end: dict[str, float] = {}
        self._all_reduce, self._finish = Comm.all_reduce, Reducer.end_backward
        watch = self

        def all_reduce(comm: Any, full: Any, recv_buffer: Any, group: Any, **names: Any) -> Any:
            watch.issued += group.axis == "replicate"
            return watch._all_reduce(comm, full, recv_buffer, group, **names)

        def finish(reducer: Any, *args: Any) -> None:
            under_way = [each for each in reducer._under_way._in_flight if not each.handle.poll()]
            issued, start = watch.issued, time.perf_counter()
            watch._finish(reducer, *args)
            watch.at_end = {
                "after_s": time.perf_counter() - start,
                "issued": issued,
                "over": max(0, issued - len(under_way)),
                "reductions": watch.issued,
            }

        Comm.all_reduce, Reducer.end_backward = all_reduce, finish  # type: ignore[method-assign]


def _rank(rank: int, checkout: str, options: argparse.Namespace, folder: str) -> None:
    sys.path.insert(0, checkout)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist
    from torch import nn

    import zrun_core

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(options.width, 4 * options.width)
            self.down = nn.Linear(4 * options.width, options.width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x)))

    assert zrun_core.__file__ is not None
    assert Path(zrun_core.__file__).is_relative_to(checkout)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    zrun_core.init(threads=1)
    watch = _Watch()
    zero = {"stage": options.stage, "bucket": 4 * 8 * options.width**2}  # a block is a unit
    if options.stage:
        zero["shard_group"] = 2
    blocks = range(options.blocks)
    model = zrun_core.shard(lambda: nn.Sequential(*(Block() for _ in blocks)), zero=zero)
    optimizer = zrun_core.optimizer(model, "adamw", lr=1e-4)
    batch = torch.randn(2 * options.width, options.width)
    found = []
    for _ in range(_UNTIMED + options.steps):
        watch.issued, start = 0, time.perf_counter()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append({"step_s": time.perf_counter() - start, **watch.at_end})
    Path(folder, str(rank)).write_text(json.dumps(found[_UNTIMED:]))
    dist.barrier()
    os._exit(0)  # destroying a gloo group sometimes aborts


if __name__ == "__main__":
    main()
