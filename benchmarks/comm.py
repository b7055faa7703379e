"""Compare direct exchange, by memory and by sockets, with gloo's own collectives.

    python benchmarks/comm.py                      2 and 4 ranks, 4 KiB to 64 MiB: about 2 minutes
    python benchmarks/comm.py --ranks 2,3,8 --quick

All are `zrun_core.distributed.comm.Comm`: with and without `use_cma`, with and without
`is_direct`. They take turns, and a time is that of the slowest rank. `DIRECT_MAX_RANKS` in that
module follows from this table.
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
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from render import render

if TYPE_CHECKING:
    import torch

    from zrun_core.distributed.comm import Comm
    from zrun_core.distributed.transport import Group

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # zrun without installing it

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")
SIZES_KIB = (4, 64, 1024, 4096, 16384, 65536)  # of the whole buffer
WAYS = ("memory", "sockets", "native")
_UNTIMED = 2


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, few repetitions: a test of the harness"
    )
    parser.add_argument(
        "--json", type=Path, default=Path("bench-comm.json"), help="where the results go"
    )
    options = parser.parse_args()
    sizes = SIZES_KIB[:2] if options.quick else SIZES_KIB
    rows = [
        row
        for ranks in options.ranks.split(",")
        for row in measure(int(ranks), sizes, 3 if options.quick else 15)
    ]
    options.json.write_text(json.dumps(rows, indent=1))
    print(table(rows))


def measure(
    ranks: int, sizes_kib: tuple[int, ...], repetitions: int
) -> list[dict[str, float | str]]:
    """One row per operation and size, from `ranks` processes of one thread."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(rank, ranks, sizes_kib, repetitions, folder))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit(f"a rank failed with {ranks} ranks")
        rows: list[dict[str, float | str]] = json.loads(Path(folder, "rows.json").read_text())
        return rows


def _rank(rank: int, ranks: int, sizes_kib: tuple[int, ...], repetitions: int, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    from zrun_core.distributed.comm import Comm
    from zrun_core.distributed.mesh import Mesh

    class Native(Comm):
        def is_direct(self, group: Group) -> bool:
            return False

    class Direct(Comm):
        def is_direct(self, group: Group) -> bool:
            return True

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks
    )
    group = Mesh.build(rank, ["localhost"] * ranks, ranks).shard
    device = torch.device("cpu")
    ways: dict[str, Comm] = dict(
        zip(WAYS, (Direct(device), Direct(device), Native(device)), strict=True)
    )
    ways["memory"].use_cma(group, 60.0)
    rows = []
    for operation in OPERATIONS:
        for size_kib in sizes_kib:
            calls = {
                way: _call(comm, operation, group, size_kib * 256) for way, comm in ways.items()
            }
            times = _interleaved(calls, repetitions)
            milliseconds = {
                way: 1e3 * statistics.median(seconds[_UNTIMED:]) for way, seconds in times.items()
            }
            rows.append({"ranks": ranks, "operation": operation, "KiB": size_kib, **milliseconds})
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    os._exit(0)  # destroying a gloo group sometimes aborts


def _call(comm: Comm, operation: str, group: Group, numel: int) -> Callable[[], None]:
    """Return a function that runs `operation` on `numel` floats, or a few more that divide."""
    import torch

    shard_numel = -(-numel // group.size)
    full = torch.ones(shard_numel * group.size)
    own = full.view(group.size, -1)[group.index]
    recv_buffer = torch.empty(comm.num_recv_shards(group) * shard_numel)

    def call() -> None:
        if operation == "all_gather":
            comm.all_gather(full, own, group, tag=2, name="bench").wait()
            comm.settle()
        elif operation == "reduce_scatter":
            comm.reduce_scatter(
                full, recv_buffer, own, group, accumulate=False, tag=3, name="bench"
            ).wait()
        else:
            comm.all_reduce(full, recv_buffer, group, tag=3, name="bench").wait()

    return call


def _interleaved(calls: dict[str, Callable[[], None]], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each call, of the slowest rank, in turns."""
    import torch
    import torch.distributed as dist

    found: dict[str, list[float]] = {way: [] for way in calls}
    for _ in range(repetitions + _UNTIMED):
        for way, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            seconds: torch.Tensor = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            found[way].append(float(seconds))
    return found


def table(rows: list[dict[str, float | str]]) -> str:
    """Milliseconds each way, and which one is the fastest."""
    lines = []
    for row in rows:
        times = {way: float(row[way]) for way in WAYS}
        lines.append(
            [
                str(row["operation"]),
                str(row["ranks"]),
                str(row["KiB"]),
                *(f"{time:.3f}" for time in times.values()),
                f"{times['native'] / times['sockets']:.2f}",
                f"{times['sockets'] / times['memory']:.2f}",
                min(times, key=times.__getitem__),
            ]
        )
    ratios = ("native / sockets", "sockets / memory")
    return render(
        ("operation", "ranks", "KiB", *(f"{way} ms" for way in WAYS), *ratios, "fastest"), lines
    )


if __name__ == "__main__":
    main()
