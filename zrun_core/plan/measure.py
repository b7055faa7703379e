"""How fast are these cores? A few seconds of the operations that training is made of: `measure(ranks=2, threads=1)`.

Each rank is a process of its own, and all of them measure at the same time, as they train at the same time: they share
the memory, the caches and the clock of the host. `python -m zrun_core.plan.measure THREADS` is one of them; it prints
one JSON object. The result is a `Rates`, from which `hardware.from_rates` makes the devices of a plan.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from zrun_core.plan.hardware import Rates

_TRY_S = 0.12  # for the tries of one measurement
_PATIENCE_S = 120.0
_SIDE = 1024  # of a product that is large
_THIN = 64  # length of the sum, and half the side of the result, of products that are not
_LARGE = 1 << 24  # elements that are copied
_FAR, _NEAR = 1 << 22, 1 << 19  # elements of tensors that do not fit a cache, and that do
_CHAIN = 64  # tiny operations, one after the other


def measure(*, ranks: int, threads: int) -> Rates:
    """The rates of this host while `ranks` processes of `threads` threads each compute.

    Raises:
        RuntimeError: one of them failed; the text is its last line.
    """
    command = [sys.executable, "-P", "-m", "zrun_core.plan.measure", str(threads)]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(ranks)
    ]
    try:
        for process in started:  # they begin together, once torch is there
            assert process.stdout is not None
            process.stdout.readline()
        found = []
        for process in started:
            assert process.stdin is not None
            if process.poll() is None:
                process.stdin.write("go\n")
                process.stdin.flush()
        for process in started:
            out, errors = process.communicate(timeout=_PATIENCE_S)
            if process.returncode:
                lines = errors.strip().splitlines()
                raise RuntimeError(lines[-1] if lines else f"it ended with status {process.returncode}")
            found.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
    mean = {name: statistics.fmean(each[name] for each in found) for name in found[0]}
    flops = {name.removeprefix("peak_"): mean.pop(name) * ranks for name in list(mean) if name.startswith("peak_")}
    copy = mean.pop("copy") * ranks
    return Rates(flops, copy, exchange=mean.pop("exchange"), extra=mean)


def _main() -> None:
    import torch

    torch.set_num_threads(int(sys.argv[1]))
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(_rates()))


def _rates() -> dict[str, float]:
    """Rates of this process, by the names of `Device`'s fields where they are one's."""
    import torch
    import torch.nn.functional as F

    rates: dict[str, float] = {}
    for name, of_dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
        rates[f"peak_{name}"] = _product(torch, _SIDE, _SIDE, _SIDE, of_dtype)
    # Most of training's products are in the faster format: their sizes matter as they do there.
    best = max(("fp32", "bf16"), key=lambda name: rates[f"peak_{name}"])
    dtype, big = (torch.bfloat16 if best == "bf16" else torch.float32), rates[f"peak_{best}"]
    rates["gemm_depth"] = max(1.0, _THIN * (big / _product(torch, _SIDE, _SIDE, _THIN, dtype) - 1))
    side = 2 * _THIN
    rates["gemm_area"] = max(1.0, side**2 * (big / _product(torch, side, side, _SIDE, dtype) - 1))

    def bytes_per_s(numel: int, dtype: torch.dtype) -> float:
        x = torch.randn(numel).to(dtype)
        actions: list[tuple[int, Callable[[], object]]] = [
            (3, lambda: x + x),
            (2, lambda: x * 1.5),
            (2, lambda: F.silu(x)),
            (2, lambda: F.layer_norm(x.view(-1, 256), (256,))),
        ]
        return statistics.harmonic_mean(times * x.nbytes / _seconds(action) for times, action in actions)

    target = torch.empty(_LARGE)
    source = torch.ones(_LARGE)
    rates["copy"] = 4 * _LARGE / _seconds(lambda: target.copy_(source))
    rates["exchange"] = rates["copy"] / 2
    far, near = bytes_per_s(_FAR, torch.float32), bytes_per_s(_NEAR, torch.float32)
    rates["streaming"] = far / (2 * rates["copy"])
    rates["cache_speedup"] = max(1.0, near / far)
    rates["narrow"] = bytes_per_s(_NEAR, torch.bfloat16) / near
    rates["launch_s"] = _launch_seconds(torch)
    q = torch.randn(4, 6, 256, 64).to(dtype).requires_grad_()
    seconds = _seconds(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True).backward(q.detach()))
    rates["attention"] = min(1.0, 3.5 * 4 * 4 * 6 * 256**2 * 64 / seconds / big)
    param = torch.nn.Parameter(torch.randn(1 << 21))
    param.grad = torch.randn(1 << 21)
    rates["optimizer"] = (1 << 21) / _seconds(torch.optim.AdamW([param], fused=True).step)
    return rates


def _product(torch: object, m: int, n: int, k: int, dtype: object) -> float:
    """FLOP/s of a product of these sizes."""
    left, right = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)  # type: ignore[attr-defined]
    return 2 * m * n * k / _seconds(lambda: left @ right)


def _launch_seconds(torch: object) -> float:
    """Seconds of an operation on next to nothing, forward and backward taken together."""
    tiny = torch.zeros(8, requires_grad=True)  # type: ignore[attr-defined]

    def chain() -> None:
        value = tiny
        for _ in range(_CHAIN):
            value = value * 1.0
        value.sum().backward()

    return _seconds(chain) / (2 * _CHAIN)


def _seconds(action: Callable[[], object]) -> float:
    """Median time of `action` in seconds, after a first one that warms up."""
    action()
    times: list[float] = []
    while sum(times) < _TRY_S or len(times) < 3:
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    _main()
