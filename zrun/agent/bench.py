"""`python -m zrun.agent.bench`: measurements of this host.

It is a process of its own, since it needs torch, and the agent must not.
It reads `{"folder": path}` from stdin and prints JSON, the `HostRates` of `calibration.py`.
Each measurement takes about a second, and the best of several tries counts: what else the host does
can only make them slower.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from zrun.system import processes
from zrun.transport.frames import Frame
from zrun_core.tiers.probe import probe_disk

_TRY_S = 0.4  # for the tries of one measurement
# Sides of square matrices, large enough to be bound by arithmetic.
_CPU_SIDE = 1536
_GPU_SIDE = 8192
_COPY_BYTES = 256 << 20
_DISK_BYTES = 256 << 20
_STREAM_ELEMENTS = 1 << 22  # of tensors that no cache holds
_CHAIN = 64  # operators on next to nothing, one after the other
_PATIENCE_S = 240.0


def run_apart(folder: str) -> Frame:
    """Run this module in a process of its own, which ends with this one.

    Raises:
        RuntimeError: it failed; the text is its last line.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-m", "zrun.agent.bench"],
        input=json.dumps({"folder": folder}).encode(),
        capture_output=True,
        timeout=_PATIENCE_S,
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"it ended with status {done.returncode}")
    rates: Frame = json.loads(done.stdout.splitlines()[-1])
    return rates


def main() -> None:
    processes.die_with_parent(signal.SIGKILL)
    asked = json.loads(sys.stdin.read())
    print(json.dumps({**_cpu(), "disk": disk_rates(asked["folder"]), "gpus": _gpus()}))


def _cpu() -> dict[str, Any]:
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    source = torch.ones(_COPY_BYTES // 4)
    target = torch.empty_like(source)
    copy_s = _best(lambda: target.copy_(source))
    return {
        "cpu": _matmul_rates(torch, "cpu", _CPU_SIDE),
        "copy_bytes_per_s": _COPY_BYTES / copy_s,
        "streams": {
            "fp32_bytes_per_s": _stream_rate(torch, torch.float32),
            "bf16_bytes_per_s": _stream_rate(torch, torch.bfloat16),
        },
        "operator_s": _operator_seconds(torch),
    }


def _stream_rate(torch: Any, dtype: Any) -> float:
    """Return the bytes per second that operators read and write between matrix products."""
    values = torch.randn(_STREAM_ELEMENTS).to(dtype)
    rows = values.view(-1, 256)
    passes: list[tuple[int, Callable[[], object]]] = [  # over memory, of each operator
        (3, lambda: values + values),
        (2, lambda: values * 1.5),
        (2, lambda: torch.nn.functional.silu(values)),
        (2, lambda: torch.nn.functional.layer_norm(rows, (256,))),
    ]
    rates: list[float] = [count * values.nbytes / _best(operator) for count, operator in passes]
    return statistics.harmonic_mean(rates)


def _operator_seconds(torch: Any) -> float:
    """Return the seconds of an operator on next to nothing, forward and backward taken together."""
    tiny = torch.zeros(8, requires_grad=True)

    def chain() -> None:
        value = tiny
        for _ in range(_CHAIN):
            value = value * 1.0
        value.sum().backward()

    return _best(chain) / (2 * _CHAIN)


def _gpus() -> list[dict[str, Any]]:
    import torch

    from zrun_core.hardware import accelerator

    return [gpu_rates(torch, index) for index in range(accelerator.device_count())]


def gpu_rates(torch: Any, index: int) -> dict[str, Any]:
    """Return the `GpuRates` of one GPU."""
    from zrun_core.hardware import accelerator

    device = accelerator.device_at(index)
    there = torch.empty(_COPY_BYTES // 4, device=device)
    other = torch.empty_like(there)
    here = torch.empty(_COPY_BYTES // 4, pin_memory=True)

    def wait() -> None:
        accelerator.synchronize(device)

    matmul_rates = _matmul_rates(torch, str(device), _GPU_SIDE, wait)
    copy_s = _best(lambda: other.copy_(there), wait)
    to_device_s = _best(lambda: there.copy_(here, non_blocking=True), wait)
    from_device_s = _best(lambda: here.copy_(there, non_blocking=True), wait)
    return {
        "uuid": accelerator.device_uuid(device),
        "name": accelerator.device_name(device),
        **matmul_rates,
        "copy_bytes_per_s": _COPY_BYTES / copy_s,
        "to_device_bytes_per_s": _COPY_BYTES / to_device_s,
        "from_device_bytes_per_s": _COPY_BYTES / from_device_s,
    }


def _matmul_rates(
    torch: Any, device: str, side: int, wait: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Return FLOP/s of square matrix products, two per multiply-add."""
    formats = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if device != "cpu":  # no job trains so there, and without an instruction it takes minutes
        formats["fp16"] = torch.float16
    rates = {}
    for name, dtype in formats.items():
        left = torch.randn(side, side, device=device).to(dtype)
        right = torch.randn(side, side, device=device).to(dtype)
        rates[f"{name}_flops"] = 2 * side**3 / _best(lambda a=left, b=right: a @ b, wait)  # type: ignore[misc]
    return rates


def _best(action: Callable[[], object], wait: Callable[[], object] = lambda: None) -> float:
    """Return the shortest time of `action` in seconds, after a first one that warms up."""
    action()
    wait()
    times: list[float] = []
    while sum(times) < _TRY_S or len(times) < 3:
        start = time.perf_counter()
        action()
        wait()
        times.append(time.perf_counter() - start)
    return min(times)


def disk_rates(folder: str, num_bytes: int = _DISK_BYTES) -> dict[str, Any]:
    """Return bytes per second to and from a file of a folder, or why it cannot be used.

    The transfers pass the page cache where the file system can do so.
    """
    facts = probe_disk(folder, num_bytes)
    if facts.error is not None:
        return {"folder": folder, "error": facts.error}
    rates = {"write_bytes_per_s": facts.write_rate, "read_bytes_per_s": facts.read_rate}
    return {"folder": folder, "direct": facts.direct, **rates}


if __name__ == "__main__":
    main()
