"""NCCL for the simulated GPU: gloo, on streams of its own, under NCCL's rules.

A collective is a kernel on the communicator's stream: it follows what the current stream was given,
and the current stream follows it once somebody waits for the work. Messages have no tags. Each pair
of ranks has a communicator and a stream, which is made at its first message and blocks the host
until both are there; with `device_id` (eager) they take the group's.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from simulated_gpu import cuda, python_kernels

TIMEOUT_S = 60.0


class _Work(dist.Work):
    def __init__(self, event: Any, kept: list[Any]) -> None:
        super().__init__()
        self._event = event
        self._kept = kept  # as TORCH_NCCL_AVOID_RECORD_STREAMS: until somebody waits

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def wait(self, timeout: Any = None) -> bool:
        cuda.current_stream().wait_event(self._event)
        self._kept = []
        return True

    def synchronize(self) -> None:
        self.wait()


class _Communicator:
    """A stream, and a group of gloo for its kernels."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.stream = cuda.Stream()
        # ProcessGroupNCCL takes it from the pool too; here none shares a thread with another.
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=TIMEOUT_S))

    def launch(self, name: str, call: Any, reads: list[Any], writes: list[Any]) -> _Work:
        self.stream.wait_stream(cuda.current_stream())
        with cuda.stream(self.stream):
            python_kernels.launch(call, reads=reads, writes=writes, name=f"nccl:{name}")
        event = cuda.Event()
        event.record(self.stream)
        return _Work(event, [*reads, *writes])


class ProcessGroupNCCL(dist.ProcessGroup):
    class Options:
        is_high_priority_stream = False

    def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
        super().__init__(rank, size)
        self._store = store
        self._rank = rank
        self._size = size
        self._all: _Communicator | None = None
        self._pairs: dict[tuple[int, int], _Communicator] = {}
        self.log: list[str] = []

    def getBackendName(self) -> str:  # noqa: N802
        return "nccl"

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _set_default_backend(self, *_: Any) -> None:
        pass

    def _everyone(self) -> _Communicator:
        if self._all is None:
            self._all = _Communicator(dist.PrefixStore("all", self._store), self._rank, self._size)
        return self._all

    def _pair(self, peer: int) -> _Communicator:
        key = (min(self._rank, peer), max(self._rank, peer))
        if key not in self._pairs:
            store = dist.PrefixStore(f"pair {key}", self._store)
            self._pairs[key] = _Communicator(store, key.index(self._rank), 2)
        return self._pairs[key]

    def _run(self, name: str, make: Any, writes: list[Any], reads: tuple[Any, ...] = ()) -> _Work:
        for tensor in (*reads, *writes):
            if tensor.device.type != "cuda" or not tensor.is_contiguous():
                raise RuntimeError(f"{name}: NCCL takes dense tensors of cuda: {tensor.device}")
        own = self._everyone()
        call = lambda *sides: make(own.gloo, *sides).wait()  # noqa: E731
        return own.launch(name, call, list(reads), writes)

    def allreduce(self, tensors: Any, opts: Any = None) -> _Work:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self._run("all_reduce", lambda g, t: g.allreduce([t], options), list(tensors))

    def broadcast(self, tensors: Any, opts: Any = None) -> _Work:
        options = dist.BroadcastOptions()
        options.rootRank = 0 if opts is None else opts.rootRank
        return self._run("broadcast", lambda g, t: g.broadcast([t], options), list(tensors))

    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> _Work:
        def gather(gloo: Any, own: torch.Tensor, out: torch.Tensor) -> Any:
            return gloo.allgather([list(out.view(self._size, -1).unbind())], [own.clone().view(-1)])

        return self._run("all_gather", gather, [output], (input,))

    def _reduce_scatter_base(self, output: Any, input: Any, opts: Any = None) -> _Work:
        def scatter(gloo: Any, full: torch.Tensor, out: torch.Tensor) -> Any:
            total = full.clone()
            gloo.allreduce([total]).wait()
            out.copy_(total.view(self._size, -1)[self._rank].view_as(out))
            return _Over()

        return self._run("reduce_scatter", scatter, [output], (input,))

    # Names since torch 2.13
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    def barrier(self, opts: Any = None) -> _Work:
        return self.allreduce([torch.zeros(1, device="cuda")])

    def send(self, tensors: Any, peer: int, tag: int = 0) -> _Work:
        pair = self._pair(peer)
        other = 1 - pair.gloo.rank()

        def run(side: torch.Tensor) -> None:  # a kernel of NCCL ends when the other one runs
            pair.gloo.send([side], other, 0).wait()
            pair.gloo.recv([torch.empty(1)], other, 1).wait()

        return pair.launch("send", run, list(tensors), [])

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> _Work:
        pair = self._pair(peer)
        other = 1 - pair.gloo.rank()

        def run(side: torch.Tensor) -> None:
            pair.gloo.recv([side], other, 0).wait()
            pair.gloo.send([torch.zeros(1)], other, 1).wait()

        return pair.launch("recv", run, [], list(tensors))


class _Over:
    def wait(self) -> None:
        pass


def install() -> None:
    c10d._NCCL_AVAILABLE = True
    c10d.ProcessGroupNCCL = ProcessGroupNCCL
    dist.ProcessGroupNCCL = ProcessGroupNCCL
