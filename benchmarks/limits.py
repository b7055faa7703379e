"""Ceilings of this machine: what no training system on it can exceed. Printed, and written as JSON.

    python benchmarks/limits.py                    everything: about 2 minutes
    python benchmarks/limits.py gemm,adam --json limits.json

`gemm` and `memory` are measured in one process and in two at once, because two ranks share caches
and memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

from cases import SHAPES, VOCAB

Rates = dict[str, float]
_MIB = 1 << 20


def main() -> None:
    """Measure the parts that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="?", default="gemm,memory,gloo,adam", help="some of gemm, memory, gloo, adam"
    )
    parser.add_argument(
        "--quick", action="store_true", help="short and small: a test of the harness"
    )
    parser.add_argument(
        "--json", type=Path, default=Path("bench-limits.json"), help="where the results go"
    )
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - {"gemm", "memory", "gloo", "adam"}:
        parser.error(f"no part {', '.join(sorted(unknown))}")
    found: dict[str, object] = {}
    for part in parts:
        if part in ("gemm", "memory"):
            for processes in (1, 2):
                found[f"{part}, {processes} at once"] = together(part, processes, options.quick)
        else:
            found[part] = gloo(options.quick) if part == "gloo" else adam(options.quick)
        options.json.write_text(json.dumps(found, indent=1))
    for name, rates in found.items():
        print(f"{name}:\n{json.dumps(rates, indent=2)}")


def median_s(call: Callable[[], object], seconds: float = 0.5) -> float:
    """Median duration of `call` over at least 3 calls and `seconds`, the first one not counted."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def together(part: str, processes: int, quick: bool) -> dict[str, list[float]]:
    """The rates of several processes of one thread that measure at once."""
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(processes), context.Queue()
    children = [
        context.Process(target=_child, args=(part, quick, barrier, queue)) for _ in range(processes)
    ]
    for child in children:
        child.start()
    found = [queue.get() for _ in children]
    for child in children:
        child.join()
    return {key: [rates[key] for rates in found] for key in found[0]}


def _child(part: str, quick: bool, barrier: Barrier, queue: Queue[Rates]) -> None:
    import torch

    torch.set_num_threads(1)
    barrier.wait()
    queue.put((gemm if part == "gemm" else memory)(quick))


def gemm(quick: bool) -> Rates:
    """Return GFLOP/s of all matrix products of a model, forward and both gradients, weighted."""
    import torch

    rates = {}
    for size in ("tiny",) if quick else ("10m", "50m"):
        shape = SHAPES[size]
        tokens, dim = shape.batch * shape.seq, shape.dim
        block = [(3 * dim, dim), (dim, dim), (4 * dim, dim), (dim, 4 * dim)]
        for dtype in (torch.float32, torch.bfloat16):
            flops = seconds = 0.0
            for (rows, columns), times in [
                *((each, shape.depth) for each in block),
                ((VOCAB, dim), 1),
            ]:
                x, weight, grad = (
                    torch.randn(each).to(dtype)
                    for each in ((tokens, columns), (rows, columns), (tokens, rows))
                )
                products = (
                    lambda x=x, w=weight: x @ w.t(),
                    lambda g=grad, w=weight: g @ w,
                    lambda g=grad, x=x: g.t() @ x,
                )
                seconds += times * sum(
                    median_s(product, 0.02 if quick else 0.15) for product in products
                )
                flops += times * 6 * tokens * rows * columns
            rates[f"{size} {str(dtype).removeprefix('torch.')} GFLOP/s"] = round(
                flops / seconds / 1e9, 1
            )
    return rates


def memory(quick: bool) -> Rates:
    """Traffic on vectors that no cache holds: GB/s, reads and writes together."""
    import torch

    numel = (1 if quick else 64) * _MIB
    a, b, c = (torch.ones(numel) for _ in range(3))
    half, gigabytes = a.bfloat16(), numel * 4 / 1e9
    return {
        "copy GB/s": round(2 * gigabytes / median_s(lambda: b.copy_(a)), 1),
        "triad GB/s": round(3 * gigabytes / median_s(lambda: torch.add(b, c, alpha=0.5, out=a)), 1),
        "bf16 to fp32 GB/s": round(1.5 * gigabytes / median_s(lambda: b.copy_(half)), 1),
    }


def gloo(quick: bool) -> Rates:
    """Milliseconds of collectives between 2 ranks, by direct exchange and by gloo's own."""
    import comm

    rows = comm.measure(2, (64,) if quick else (1024, 16384, 65536), 3 if quick else 10)
    return {
        f"{row['operation']} {row['KiB']} KiB {way}, ms": round(float(row[way]), 2)
        for row in rows
        for way in ("direct", "native")
    }


def adam(quick: bool, pieces: int = 64) -> dict[str, Rates]:
    """Time one AdamW step on 100 million fp32 parameters in one thread, three ways of torch."""
    import torch

    numel = (1 if quick else 100) * 1_000_000
    torch.set_num_threads(1)
    rates = {}
    for name in ("for-loop", "foreach", "fused"):
        for dtype, traffic in ((torch.float32, 28), (torch.bfloat16, 26)):
            params = [torch.randn(numel // pieces).requires_grad_() for _ in range(pieces)]
            grads = [torch.randn(numel // pieces).to(dtype) * 1e-3 for _ in range(pieces)]
            optimizer = torch.optim.AdamW(
                params, lr=1e-4, foreach=name == "foreach", fused=name == "fused"
            )

            def step(params=params, grads=grads, optimizer=optimizer) -> None:
                for param, grad in zip(params, grads, strict=True):
                    param.grad = grad.float()  # no copy in fp32
                optimizer.step()

            seconds = median_s(step)
            rates[f"{name}, {str(dtype).removeprefix('torch.')} gradients"] = {
                "ms": round(1e3 * seconds, 1),
                "Gparam/s": round(numel / seconds / 1e9, 3),
                "GB/s": round(traffic * numel / seconds / 1e9, 1),
            }
    return rates


if __name__ == "__main__":
    main()
