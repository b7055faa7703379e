"""`python -m zrun.agent.bench`: measurements of this host.

It is a process of its own, since it needs torch, and the agent must not.
It reads `{"folder": path}` from stdin and prints JSON, the `HostRates` of `calibration.py`.
Each measurement takes about a second, and the best of several tries counts: what else the host does
can only make them slower.

With `{"quick": true}` it measures two cores at once, as ranks use them, in some seconds of their
time, and by their time: a host that is busy need not be waited for. All cores together are taken to
do as many times as much.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from zrun.job.environment import WORKER_DEFAULTS
from zrun.system import processes
from zrun.transport.frames import Frame
from zrun_core.tiers.probe import probe_disk

# Sides of square matrices, large enough to be bound by arithmetic.
_CPU_SIDE = 1536
_GPU_SIDE = 8192
_COPY_BYTES = 256 << 20
_DISK_BYTES = 256 << 20
_STREAM_ELEMENTS = 1 << 22  # of tensors that no cache holds
_LAYER = (4, 256, 384)  # samples, positions, features: of activations between small layers
_LAYERS = 24  # whose activations are used in turns: more of them than a core's own cache holds
_TINY: dict[str, Any] = {
    "flavour": "llama",
    "vocab_size": 64,
    "dim": 48,
    "depth": 3,
    "heads": 6,
    "seq_len": 8,
}
_RECURRENT = (4, 24, 32, 32)  # samples, positions, features in and out
_SHORT_MESSAGES = 100
_MESSAGE_BYTES = 2 << 20
_ATTENTION = (4, 6, 256, 64)  # samples, heads, positions, width of a head
_PATIENCE_S = 240.0
_QUICK_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Tries:
    """How one measurement is repeated.

    Attributes:
        clock: in seconds.
        seconds: for all tries of it.
        side: of square matrices on a CPU.
        copy_bytes: of the host's memory.
        pick: the time that counts, of those of all tries.
    """

    clock: Callable[[], float] = time.perf_counter
    seconds: float = 0.4
    side: int = _CPU_SIDE
    copy_bytes: int = _COPY_BYTES
    pick: Callable[[list[float]], float] = min

    def measure(
        self, action: Callable[[], object], wait: Callable[[], object] = lambda: None
    ) -> float:
        """Return the time of `action` in seconds, after a first one that warms up."""
        action()
        wait()
        times: list[float] = []
        while sum(times) < self.seconds or len(times) < 3:
            start = self.clock()
            action()
            wait()
            times.append(self.clock() - start)
        return self.pick(times)


_BY_THE_WALL = Tries()
# By its own time a usual try counts: no other process makes it longer, and no step is luckier.
_ON_ONE_CORE = Tries(time.process_time, 0.1, side=512, copy_bytes=64 << 20, pick=statistics.median)
_CORES_OF_MEMORY = 6  # so many take all that a host's memory gives


def run_apart(folder: str) -> Frame:
    """Run this module in a process of its own, which ends with this one.

    Raises:
        RuntimeError: it failed; the text is its last line.
    """
    return _run({"folder": folder}, _PATIENCE_S)


def run_quickly() -> Frame:
    """Measure this host's cores in a process of its own: the rates of `HostRates` without a disk.

    Raises:
        RuntimeError: it failed, or took too long.
    """
    try:
        return _run({"quick": True}, _QUICK_PATIENCE_S)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(str(error)) from None


def _run(asked: Frame, patience_s: float) -> Frame:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "zrun.agent.bench"],
        input=json.dumps(asked).encode(),
        env=WORKER_DEFAULTS | os.environ,  # a heap as ranks have it
        capture_output=True,
        timeout=patience_s,
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"it ended with status {done.returncode}")
    rates: Frame = json.loads(done.stdout.splitlines()[-1])
    return rates


def main() -> None:
    processes.die_with_parent(signal.SIGKILL)
    asked = json.loads(sys.stdin.read())
    cores = len(os.sched_getaffinity(0))
    messages = message_rates()  # first: it forks, and torch has no threads yet
    if asked.get("quick"):
        rates = _of_all(_of_a_core_among(cores), cores)
        print(json.dumps({**rates, "messages": messages, "disk": {"folder": ""}}))
        return
    rates = {**_cpu(_BY_THE_WALL, cores), "messages": messages}
    print(json.dumps({**rates, "disk": disk_rates(asked["folder"]), "gpus": _gpus()}))


def _of_a_core_among(cores: int) -> dict[str, Any]:
    """Return the rates of one core while another, if there is one, does the same."""
    work = functools.partial(_cpu, _ON_ONE_CORE, 1)
    children = [_fork(work) for _ in range(min(cores, 2))]
    rates: dict[str, Any] = _mean([json.loads(_wait(*each)) for each in children])
    return rates


def _mean(found: list[Any]) -> Any:
    """Return the means of nested dictionaries that have the same keys."""
    if isinstance(found[0], dict):
        return {key: _mean([each[key] for each in found]) for key in found[0]}
    return statistics.mean(found)


def _of_all(rates: dict[str, Any], cores: int) -> dict[str, Any]:
    """Return the rates of all cores, from those of one."""

    def times(of_one: dict[str, float], factor: int) -> dict[str, float]:
        return {name: rate * factor for name, rate in of_one.items()}

    of_memory = min(cores, _CORES_OF_MEMORY)
    return {
        **rates,
        "cpu": times(rates["cpu"], cores),
        "attention": times(rates["attention"], cores),
        "streams": times(rates["streams"], of_memory),
        "layers": times(rates["layers"], of_memory),
        "copy_bytes_per_s": rates["copy_bytes_per_s"] * of_memory,
    }


def _cpu(tries: Tries, threads: int) -> dict[str, Any]:
    """Return the rates of so many threads together; of operators on next to nothing, of one."""
    import torch

    torch.set_num_threads(threads)
    source = torch.ones(tries.copy_bytes // 4)
    target = torch.empty_like(source)
    copy_s = tries.measure(lambda: target.copy_(source))
    formats = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return {
        "cpu": _matmul_rates(torch, "cpu", tries.side, tries),
        "cpu_side": tries.side,
        "copy_bytes_per_s": tries.copy_bytes / copy_s,
        "streams": {
            f"{name}_bytes_per_s": _stream_rate(torch, dtype, tries)
            for name, dtype in formats.items()
        },
        "layers": {
            f"{name}_bytes_per_s": _layer_rate(torch, dtype, tries)
            for name, dtype in formats.items()
        },
        "attention": {
            f"{name}_flops": _attention_rate(torch, dtype, tries) for name, dtype in formats.items()
        },
        **_operator_seconds(torch, tries),
    }


def _attention_rate(torch: Any, dtype: Any, tries: Tries) -> float:
    """Return FLOP/s of fused attention with its backward, as if no key were masked."""
    batch, heads, length, width = _ATTENTION
    shape = (batch, heads, length, width)
    qkv = [torch.randn(shape).to(dtype).requires_grad_() for _ in range(3)]
    flops = 3.5 * 4 * batch * heads * length**2 * width

    def attend() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        torch.autograd.grad(out, qkv, torch.ones_like(out))

    return flops / tries.measure(attend)


def _stream_rate(torch: Any, dtype: Any, tries: Tries) -> float:
    """Return the bytes per second that operators read and write between matrix products."""
    values = torch.randn(_STREAM_ELEMENTS).to(dtype)
    rows = values.view(-1, 256)
    passes: list[tuple[int, Callable[[], object]]] = [  # over memory, of each operator
        (3, lambda: values + values),
        (2, lambda: values * 1.5),
        (2, lambda: torch.nn.functional.silu(values)),
        (2, lambda: torch.nn.functional.layer_norm(rows, (256,))),
    ]
    rates: list[float] = [count * values.nbytes / tries.measure(each) for count, each in passes]
    return statistics.harmonic_mean(rates)


def _layer_rate(torch: Any, dtype: Any, tries: Tries) -> float:
    """Return the bytes per second that operators read and write of activations of small layers.

    Each is as long unused as it is in a model, until backward comes to it: what the core's own
    cache holds of one is little.
    """
    half = _LAYER[-1] // 2
    values = [torch.randn(_LAYER).to(dtype) for _ in range(_LAYERS)]
    made: list[Any] = [None] * _LAYERS  # and freed as late
    passes: list[tuple[float, Callable[[Any, Any], object]]] = [
        (3, lambda x, y: x * y),
        (3, lambda x, y: x + y),
        (2, lambda x, y: torch.nn.functional.silu(x)),
        (1.5, lambda x, y: x[..., :half] * y[..., half:]),  # as rotary embeddings do it
        (2, lambda x, y: torch.cat((x[..., half:], y[..., :half]), dim=-1)),
    ]

    def run(operator: Callable[[Any, Any], object]) -> None:
        for index in range(_LAYERS):
            made[index] = operator(values[index], values[index - 1])

    rates: list[float] = []
    for count, operator in passes:
        seconds = tries.measure(functools.partial(run, operator)) / _LAYERS
        rates.append(count * values[0].nbytes / seconds)
    return statistics.harmonic_mean(rates)


def _operator_seconds(torch: Any, tries: Tries) -> dict[str, float]:
    """Return the seconds of an operator on next to nothing, of those that an estimate has a price
    for: in a tiny model, its modules, autograd and autocast included; and in a recurrent layer,
    which calls one after the other from one kernel.
    """
    from zrun_core.models.gpt import gpt

    torch.set_num_threads(1)  # others would only wait, and take time of their cores
    model = gpt(**_TINY)
    tokens = torch.zeros(1, _TINY["seq_len"], dtype=torch.int64)
    layer = torch.nn.GRU(*_RECURRENT[2:], batch_first=True)
    sequences = torch.zeros(_RECURRENT[:3])

    def train(autocast: bool) -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            logits = model(tokens)
        logits.float().sum().backward()

    def recur() -> None:
        layer.zero_grad(set_to_none=True)
        layer(sequences)[0].sum().backward()

    plain, halved, inner = (
        tries.measure(each) / _priced_operators(each)
        for each in (functools.partial(train, False), functools.partial(train, True), recur)
    )
    return {"operator_s": statistics.mean([plain, halved]), "inner_s": inner}


def _priced_operators(work: Callable[[], object]) -> int:
    """Return how many operators that an estimate has a price for something runs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from zrun_core.plan.timing.traced_cost import takes_time

    count = 0

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal count
            if takes_time(func.overloadpacket.__name__):
                count += 1
            return func(*args, **(kwargs or {}))

    work()
    with Counter():  # type: ignore[no-untyped-call]
        work()
    return count


def message_rates() -> dict[str, float] | None:
    """Return the `MessageRates` of two ranks on this host; None where they use sockets.

    They are two processes of one parent, as an agent's ranks are. The time of both counts: an
    exchange is over when each has posted, and has looked for what the other posted.
    """
    import zrun_core.distributed.comm  # noqa: F401 - with torch, once for both

    with tempfile.TemporaryDirectory() as folder:
        ranks = [_fork(functools.partial(_exchange, index, folder)) for index in range(2)]
        told = [json.loads(_wait(*each) or "null") for each in ranks]
    if None in told:
        return None
    short, long = (sum(each[key] for each in told) for key in ("short_s", "long_s"))
    # One of the two ranks copies while the other does: half of what both take.
    per_byte = max((long - short) / 2, 1e-9) / _MESSAGE_BYTES
    return {"seconds": short, "bytes_per_s": 1 / per_byte}


def _exchange(index: int, folder: str) -> dict[str, float] | None:
    """Return this rank's seconds of its core for short and long exchanges with the other."""
    import torch
    import torch.distributed as dist

    from zrun_core.distributed.comm import Comm
    from zrun_core.distributed.transport import ACTIVATION_TAG, Group

    torch.set_num_threads(1)
    patience = timedelta(seconds=_QUICK_PATIENCE_S / 2)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, rank=index, world_size=2, timeout=patience)
    group = Group("host", (0, 1), index, dist.group.WORLD)
    comm = Comm(torch.device("cpu"))
    if comm.use_cma(group, patience.total_seconds()) is not None:
        return None

    def seconds(num_bytes: int, tries: int) -> float:
        shard = torch.zeros(num_bytes, dtype=torch.uint8)
        full = torch.zeros(2 * num_bytes, dtype=torch.uint8)
        times = []
        for _ in range(tries):
            start = time.process_time()
            comm.all_gather(full, shard, group, tag=ACTIVATION_TAG, name="bench").wait()
            comm.settle()
            times.append(time.process_time() - start)
        return statistics.median(times)

    seconds(8, _SHORT_MESSAGES)
    found = {"short_s": seconds(8, _SHORT_MESSAGES), "long_s": seconds(_MESSAGE_BYTES, 12)}
    comm.barrier(group)
    return found


def _fork(work: Callable[[], object]) -> tuple[int, int]:
    """Run something in a child; return its id, and a descriptor that its result comes from."""
    source, target = os.pipe()
    child = os.fork()
    if child:
        os.close(target)
        return child, source
    try:
        processes.die_with_parent(signal.SIGKILL)
        os.write(target, json.dumps(work()).encode())
    finally:
        os._exit(0)


def _wait(child: int, source: int) -> str:
    """Return what a child has written; "" if it failed."""
    with os.fdopen(source) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text


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

    measure = _BY_THE_WALL.measure
    matmul_rates = _matmul_rates(torch, str(device), _GPU_SIDE, _BY_THE_WALL, wait)
    copy_s = measure(lambda: other.copy_(there), wait)
    to_device_s = measure(lambda: there.copy_(here, non_blocking=True), wait)
    from_device_s = measure(lambda: here.copy_(there, non_blocking=True), wait)
    return {
        "uuid": accelerator.device_uuid(device),
        "name": accelerator.device_name(device),
        **matmul_rates,
        "copy_bytes_per_s": _COPY_BYTES / copy_s,
        "to_device_bytes_per_s": _COPY_BYTES / to_device_s,
        "from_device_bytes_per_s": _COPY_BYTES / from_device_s,
    }


def _matmul_rates(
    torch: Any,
    device: str,
    side: int,
    tries: Tries,
    wait: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Return FLOP/s of square matrix products, two per multiply-add; of the three of a linear's
    forward and backward, whose operands lie in memory in three ways.
    """
    formats = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if device != "cpu":  # no job trains so there, and without an instruction it takes minutes
        formats["fp16"] = torch.float16
    rates = {}
    for name, dtype in formats.items():
        x, weight, grad = (torch.randn(side, side, device=device).to(dtype) for _ in range(3))

        def linear(x: Any = x, weight: Any = weight, grad: Any = grad) -> None:
            _ = x @ weight.t(), grad @ weight, grad.t() @ x

        rates[f"{name}_flops"] = 6 * side**3 / tries.measure(linear, wait)
    return rates


def disk_rates(folder: str, num_bytes: int = _DISK_BYTES) -> dict[str, Any]:
    """Return bytes per second to and from a file of a folder, or why it cannot be used.

    The transfers pass the page cache where the file system can do so.
    """
    facts = probe_disk(folder, num_bytes)
    if facts.error is not None:
        return {"folder": folder, "error": facts.error}
    rates = {
        "write_bytes_per_s": facts.write_rate or None,
        "read_bytes_per_s": facts.read_rate or None,
    }
    return {"folder": folder, "direct": facts.direct, **rates}


if __name__ == "__main__":
    main()
