"""How fast are these cores? The operations that training is made of, for some seconds: `measure(ranks=2, threads=1)`.

Each rank is a process of its own, and all of them measure at the same time, as they train at the same time: they share
the memory, the caches and the clock of the host. They time single operators (`microbench.py`), then a few steps of zrun
on models without work (`rehearsal.py`): what those take beyond their operators is the price of a step, and of each
parameter in it. `python -m zrun_core.plan.measure.measure THREADS FOLDER` is one rank; it prints
one JSON object. The result is a `Rates`, from which `hardware.from_rates` makes the devices of a
plan.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from zrun_core.hardware.hardware import Rates, from_rates
from zrun_core.hardware.operators import Operators

_TRY_S = 0.06  # for the tries of one measurement
_ROUNDS = 5  # of single operators
_PATIENCE_S = 120.0
_SIDE = 1024  # of a product that is large
_THIN = 64  # length of the sum, and half the side of the result, of products that are not
_LARGE = 1 << 24  # elements that are copied
_FAR, _NEAR = 1 << 22, 1 << 19  # elements of tensors that do not fit a cache, and that do
_CHAIN = 64  # tiny operations, one after the other
_EMPTY, _WIDE = 8, 1024  # widths of models without work, and of one that is all update
_SHALLOW, _DEEP = 4, 44  # layers
_SHORT, _LONG = 1 << 14, 4 << 20  # bytes of messages


def measure(*, ranks: int, threads: int) -> Rates:
    """The rates of this host while `ranks` processes of `threads` threads each compute.

    Raises:
        RuntimeError: one of them failed; the text is its last line.
    """
    with tempfile.TemporaryDirectory(prefix="zrun-measure-") as folder:
        found = _run(ranks, threads, folder)
    steps = found[0]["steps"]
    mean = _mean([{name: each[name] for name in each if name != "steps"} for each in found])
    table = Operators(**mean.pop("operators"))
    flops = {
        name.removeprefix("peak_"): mean.pop(name) * ranks
        for name in list(mean)
        if name.startswith("peak_")
    }
    rates = Rates(
        flops, mean.pop("copy") * ranks, extra=mean, operators=table, update=_updates(steps)
    )
    if ranks > 1:
        short, long = steps["short"], steps["long"]
        speed = (_LONG - _SHORT) / max(long - short, 1e-9)
        rates = replace(rates, exchange=speed, exchange_s=max(0.0, short - _SHORT / speed))
    return _with_prices(rates, steps, ranks)


def _run(ranks: int, threads: int, folder: str) -> list[dict[str, Any]]:
    """What each rank has found."""
    command = [sys.executable, "-P", "-m", "zrun_core.plan.measure.measure", str(threads), folder]
    shared = {
        "WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": "lo",
        "ZRUN_STORE": os.path.join(folder, "store"),
        "OMP_NUM_THREADS": str(threads),
    }
    started = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
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
                raise RuntimeError(
                    lines[-1] if lines else f"it ended with status {process.returncode}"
                )
            found.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
    return found


def _mean(values: Sequence[Any]) -> Any:
    """The mean of what all ranks have measured, number by number."""
    first = values[0]
    if isinstance(first, dict):
        return {key: _mean([each[key] for each in values]) for key in first}
    if isinstance(first, list):
        return [_mean(each) for each in zip(*values, strict=True)]
    return statistics.fmean(values)


def _updates(steps: Mapping[str, float]) -> dict[str, float]:
    """Elements that a rank's update covers in a second, by compute format."""
    more = _numel(_WIDE, _SHALLOW) - _numel(_EMPTY, _SHALLOW)
    return {
        name: more / max(steps[f"update_{name}"] - steps["update_empty"], 1e-9)
        for name in ("fp32", "bf16")
    }


def _numel(width: int, depth: int) -> int:
    """Parameters of a rehearsal's model."""
    from zrun_core.plan.measure.rehearsal import INPUTS, OUTPUTS

    return (INPUTS + 1) * width + (depth - 2) * (width + 1) * width + (width + 1) * OUTPUTS


def _with_prices(rates: Rates, steps: Mapping[str, float], ranks: int) -> Rates:
    """What the steps of models without work took beyond their operators, per step and per parameter."""
    shallow, deep = (
        steps[name] - _predicted(rates, depth, ranks)
        for name, depth in (("shallow", _SHALLOW), ("deep", _DEEP))
    )
    per_param = max(0.0, (deep - shallow) / (2 * (_DEEP - _SHALLOW)))
    return replace(
        rates,
        extra={
            **rates.extra,
            "param_s": per_param,
            "step_s": max(0.0, shallow - 2 * _SHALLOW * per_param),
        },
    )


def _predicted(rates: Rates, depth: int, ranks: int) -> float:
    """Seconds of a step of a model without work, as a plan has it so far."""
    from zrun_core.plan.answer.planner import Candidate, Planner
    from zrun_core.plan.measure.rehearsal import job_of
    from zrun_core.plan.trace.trace_process import trace_in_subprocess
    from zrun_core.spine.parallel_dims import ParallelDims

    job = job_of(_EMPTY, depth, ranks, "fp32")
    profile = trace_in_subprocess(job, Path("/"), micros=(1,), checkpoints=("none",))
    hardware = from_rates(rates, ranks=ranks, host_bytes=1 << 34, cores=ranks)
    return (
        Planner(profile, hardware, job)
        .estimate(Candidate(0, ParallelDims(ranks), 1, 1, "none", "fp32"))
        .time.seconds
    )


def _main() -> None:
    import torch

    threads, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(threads)
    print("ready", flush=True)
    if not sys.stdin.readline():  # who asked is no more
        return
    found = {**_rates(), "operators": _operators(), "steps": _steps(threads, folder)}
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # destroying a gloo group sometimes aborts


def _operators() -> dict[str, Any]:
    from zrun_core.plan.measure.microbench import operators

    return asdict(operators(_ROUNDS))


def _steps(threads: int, folder: Path) -> dict[str, float]:
    """Seconds of steps, of updates and of messages."""
    from zrun_core.plan.measure.rehearsal import Rehearsal

    ranks = int(os.environ["WORLD_SIZE"])
    rehearsal = Rehearsal(int(os.environ["RANK"]), ranks, threads, folder)
    shallow, split = rehearsal.step(_EMPTY, _SHALLOW)
    found = {"shallow": shallow, "update_empty": split.get("optim", 0.0)}
    found["deep"], _ = rehearsal.step(_EMPTY, _DEEP)
    for name in ("fp32", "bf16"):
        _, split = rehearsal.step(_WIDE, _SHALLOW, name)
        found[f"update_{name}"] = split.get("optim", 0.0)
    if ranks > 1:
        found |= {"short": rehearsal.exchange(_SHORT), "long": rehearsal.exchange(_LONG)}
    return found


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
        return statistics.harmonic_mean(
            times * x.nbytes / _seconds(action) for times, action in actions
        )

    target = torch.empty(_LARGE)
    source = torch.ones(_LARGE)
    rates["copy"] = 4 * _LARGE / _seconds(lambda: target.copy_(source))
    far, near = bytes_per_s(_FAR, torch.float32), bytes_per_s(_NEAR, torch.float32)
    rates["streaming"] = far / (2 * rates["copy"])
    rates["cache_speedup"] = max(1.0, near / far)
    rates["narrow"] = bytes_per_s(_NEAR, torch.bfloat16) / near
    rates["launch_s"] = _launch_seconds(torch)
    rates["selective_s"] = _selective_seconds(torch)
    q = torch.randn(4, 6, 256, 64).to(dtype).requires_grad_()
    seconds = _seconds(
        lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True).backward(q.detach())
    )
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


def _selective_seconds(torch: Any) -> float:
    """What selective checkpointing takes for each operation, recomputation included: Python looks at all of them."""
    from zrun_core.activations.checkpoint import selectively
    from zrun_core.plan.measure.microbench import in_turns

    tiny = torch.zeros(8, requires_grad=True)

    def block(value: Any) -> Any:
        for _ in range(_CHAIN):  # about every second operation of a model is a view
            value = (value * 1.0).view(8)
        return value.sum()

    def plainly() -> None:
        torch.utils.checkpoint.checkpoint(block, tiny, use_reentrant=False).backward()

    def choosing() -> None:
        torch.utils.checkpoint.checkpoint(
            block, tiny, use_reentrant=False, context_fn=selectively
        ).backward()

    plain, chosen = in_turns([plainly, choosing], _ROUNDS)
    return max(0.0, chosen - plain) / _CHAIN


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
