"""`ProcessGroupNCCL` of the simulated GPU: what torch's does, on communicators that are none.

A collective is a kernel on the communicator's stream: it follows what the current stream was given,
and the current stream follows it once somebody waits for the work. Messages have no tags. Each pair
of ranks has a communicator, which is made at its first message: the host waits until both are
there. With `device_id` messages take the group's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from simulated_gpu import cuda
from simulated_gpu.nccl.collectives import Kernels, can_reduce
from simulated_gpu.nccl.communicator import VERSION, Communicator
from simulated_gpu.nccl.settings import settings
from simulated_gpu.nccl.watchdog import DUMP_KEY, flag, log, watchdog
from simulated_gpu.nccl.wire import Aborted, Wire

_DEFAULT_TIMEOUT = timedelta(minutes=10)
_MIB = 1 << 20
_made = 0  # groups of this process
_bound_device: torch.device | None = None  # `device_id` of the group that is being made

Tensors = Sequence[torch.Tensor]


class Work(dist.Work):
    """A kernel that was queued. See `WorkNCCL` of torch.

    Attributes:
        group: that issued it.
        number: among the collectives, or the messages, of the group.
        error: why it will never be over; None: it may be.
    """

    def __init__(
        self,
        group: ProcessGroupNCCL,
        communicator: Communicator,
        event: Any,
        kind: str,
        inputs: Tensors,
        outputs: Tensors,
        number: int,
        *,
        is_barrier: bool = False,
    ) -> None:
        super().__init__()
        self.group = group
        self.number = number
        self.error: str | None = None
        self._communicator = communicator
        self._event = event
        self._kind = kind
        self._sizes = sum(each.numel() for each in inputs), sum(each.numel() for each in outputs)
        self._outputs = list(outputs)
        self._kept = [*inputs, *outputs]  # until somebody waits, so that nobody reuses them
        self._begun = time.monotonic()
        self._timeout = group.timeout
        if settings.timeout_s:
            self._timeout = timedelta(seconds=settings.timeout_s)
        self._is_barrier = is_barrier

    def __str__(self) -> str:
        milliseconds = round(self._timeout.total_seconds() * 1000)
        return (
            f"WorkNCCL(SeqNum={self.number}, OpType={self._kind}, NumelIn={self._sizes[0]}, "
            f"NumelOut={self._sizes[1]}, Timeout(ms)={milliseconds})"
        )

    def finished(self) -> bool:
        """Whether its kernel has run."""
        return bool(self._event.query())

    def check_error(self) -> None:
        """Take over what NCCL tells of the communicator."""
        if self.error is not None or self._communicator.error is None or self.finished():
            return
        self.error = (
            "NCCL error in: simulated_gpu/nccl/communicator.py, remote process exited or there was "
            f"a network error, NCCL version {VERSION}\nncclRemoteError: A call failed possibly due "
            "to a network error or a remote process exiting prematurely.\nLast error:\n"
            f"{self._communicator.error}"
        )
        log(
            "E",
            690,
            f"[Rank {self.group.own_rank}] Collective {self} raised the following async "
            f"exception: {self.error}",
        )

    def check_timeout(self, limit: timedelta | None = None) -> bool:
        """Return whether it takes too long."""
        ran = time.monotonic() - self._begun
        if ran < (limit or self._timeout).total_seconds():
            return False
        if self.error is None:
            self.error = (
                f"[Rank {self.group.own_rank}] Watchdog caught collective operation timeout: "
                f"{self} ran for {round(1000 * ran)} milliseconds before timing out."
            )
            log("E", 757, self.error)
        return True

    def is_completed(self) -> bool:
        if not self._communicator.is_aborted:
            self.check_error()
        return self.error is not None or self.finished()

    def is_success(self) -> bool:
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")  # as torch's

    def exception(self) -> BaseException | None:
        return None if self.error is None else dist.DistBackendError(self.error)

    def synchronize(self) -> None:
        """Let the current stream wait for it."""
        cuda.current_stream(self.group.device).wait_event(self._event)
        self._kept = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream wait; the host waits where it was asked to.

        Raises:
            dist.DistBackendError: an error was found, and the communicators are aborted.
        """
        self.synchronize()
        limit = timeout if timeout else None
        if self.group.blocks or limit is not None:
            while not self.is_completed():
                if self.check_timeout(limit):
                    log(
                        "E",
                        800,
                        f"[Rank {self.group.own_rank}] Work {self} timed out in blocking wait.",
                    )
                    break
                time.sleep(0.01)
        elif self._is_barrier and not self.is_completed():
            cuda.current_stream(self.group.device).synchronize()
        if self.error is not None:
            self._communicator.abort()
            raise dist.DistBackendError(self.error)
        return True

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return what has the outputs, for whoever waits by it: DDP's hooks."""
        made: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(
            devices=[self.group.device]
        )
        stream = cuda.Stream(self.group.device)
        stream.wait_event(self._event)
        with cuda.stream(stream):
            made.set_result(self._outputs)
        return made


class Options:
    """Of a group. torch's has more, which simulated NCCL has no use for."""

    class _Config:
        blocking = 1
        cga_cluster_size = min_ctas = max_ctas = -1

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = self._Config()
        self.split_from: Any = None
        self.split_color = 0
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self._timeout = _DEFAULT_TIMEOUT

    @property
    def backend(self) -> str:
        return "nccl"


class ProcessGroupNCCL(dist.ProcessGroup):
    """A group of ranks, each with one simulated GPU.

    Attributes:
        own_rank: of this process in the group.
        device: of this process: the current one when the first communicator is made.
        timeout: of its works.
        blocks: waiting for a work blocks the host: TORCH_NCCL_BLOCKING_WAIT.
        is_terminated: it was aborted or shut down.
        last_enqueued, last_completed: numbers of works, for messages.
    """

    Options = Options
    supports_splitting = False
    supports_coalescing = True

    def __init__(self, store: Any, rank: int, size: int, options: Options | None = None) -> None:
        global _made
        super().__init__(rank, size)
        self.options = options or Options()
        self.own_rank = rank
        self.timeout = self.options._timeout
        self.blocks = flag("TORCH_NCCL_BLOCKING_WAIT", False)
        self.is_terminated = False
        self.last_enqueued = self.last_completed = -1
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.uid = _made
        _made += 1
        self._bound = _bound_device
        self._name = self.options.group_name
        self._description = "undefined"
        self._store = store
        self._size = size
        self._communicators: dict[str, Communicator] = {}
        self._num_collectives = 0
        self._num_messages = 0
        self._batch: _Batch | None = None
        if self._bound is not None:
            self.device = self._bound
            self._communicator(None)

    # What torch asks of any group

    def getBackendName(self) -> str:  # noqa: N802
        return "nccl"

    def _get_backend(self, device: Any) -> ProcessGroupNCCL:
        return self

    def _get_backend_name(self) -> str:
        return "nccl"

    def name(self) -> str:
        return "nccl"

    # A group that Python makes has no name otherwise.

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    getGroupName = group_name.fget  # noqa: N815
    getGroupDesc = group_desc.fget  # noqa: N815

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._num_collectives

    def _set_default_backend(self, *_: Any) -> None:
        pass

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    set_timeout = _set_default_timeout

    def _group_start(self) -> None:
        pass

    def _group_end(self) -> None:
        pass

    def _is_initialized(self) -> bool:
        return bool(self._communicators)

    @property
    def prefix(self) -> str:
        """How its lines in a log begin."""
        about = self.group_desc
        told = f"({about})" if about and about != "undefined" else ""
        return f"[PG ID {self.uid} PG GUID {self.group_name}{told} Rank {self.own_rank}] "

    # Its end

    def abort_communicators(self) -> None:
        """End all kernels."""
        for communicator in self._communicators.values():
            communicator.abort()

    def abort(self) -> None:
        """End all kernels, and watch no work any more."""
        self.is_terminated = True
        watchdog.forget(self)
        self.abort_communicators()

    _abort = abort

    def shutdown(self) -> None:
        """End after what was queued, as far as it ends in time."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        for communicator in self._communicators.values():
            while not communicator.is_idle and time.monotonic() < deadline:
                time.sleep(0.002)
        self.abort()

    def tell_of_dump(self) -> None:
        """Tell the other ranks that one has found an error, by a key of the store."""
        try:
            self._store.set(DUMP_KEY, self.own_rank.to_bytes(4, "little"))
        except RuntimeError:
            return  # the store has gone

    # Communicators

    def _communicator(self, peer: int | None) -> Communicator:
        """Return that of the group, or that of this rank and `peer`; the first time both meet."""
        key = "all"
        ranks = range(self._size)
        if peer is not None and self._bound is None:
            low, high = sorted((self.own_rank, peer))
            key = f"{low}:{high}"
            ranks = range(low, high + 1, max(1, high - low))
        found = self._communicators.get(key)
        if found is None:
            found = self._communicators[key] = self._connect(key, ranks)
        return found

    def _connect(self, key: str, ranks: range) -> Communicator:
        index, size = ranks.index(self.own_rank), len(ranks)
        self.device = self._bound or torch.device("cuda", torch.cuda.current_device())
        try:
            wire = Wire.connect(
                self._store, f"nccl/{key}", index, size, lambda: not self.is_terminated
            )
        except Aborted:
            raise dist.DistBackendError(
                f"NCCL communicator was aborted on rank {self.own_rank}."
            ) from None
        mib = settings.group_mib if key == "all" else settings.pair_mib
        if mib:
            cuda.take_outside(self.device, int(mib * _MIB))
        return Communicator(
            wire,
            f"{self.prefix}{key}",
            self.device,
            is_high_priority=self.options.is_high_priority_stream,
        )

    # Collectives

    def _run(
        self,
        kind: str,
        kernel: Callable[..., object],
        reads: Tensors,
        writes: Tensors,
        opts: Any = None,
        *,
        is_barrier: bool = False,
    ) -> Work | None:
        """Queue a collective; `kernel` gets `Kernels`, then the memory of `reads` and `writes`."""
        _check(reads, writes)
        if self._batch is not None:
            self._batch.collectives.append((kernel, list(reads), list(writes)))
            return None
        is_async = opts is None or bool(getattr(opts, "asyncOp", True))
        communicator = self._communicator(None)
        event = communicator.launch(
            kind, kernel, reads, writes, is_collective=True, on_current=not is_async
        )
        self._num_collectives += 1
        work = Work(
            self,
            communicator,
            event,
            kind,
            [*reads] or [*writes],
            writes,
            self._num_collectives,
            is_barrier=is_barrier,
        )
        self._enqueue(work)
        return work if is_async else None

    def _enqueue(self, work: Work) -> None:
        self.last_enqueued = max(self.last_enqueued, work.number)
        if not self.blocks:
            watchdog.watch(work)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work | None:
        op = _op(opts)
        return self._run("ALLREDUCE", lambda k, t: k.all_reduce(t, op), [], _one(tensors), opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work | None:
        op = _op(opts)

        def kernel(kernels: Kernels, *sides: torch.Tensor) -> None:
            for side in sides:
                kernels.all_reduce(side, op)

        return self._run("COALESCED", kernel, [], list(tensors), opts)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work | None:
        root = 0 if opts is None else opts.rootRank
        given = _one(tensors)
        reads, writes = (given, []) if root == self.own_rank else ([], given)
        return self._run("BROADCAST", lambda k, t: k.broadcast(t, root), reads, writes, opts)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work | None:
        op, root = _op(opts), 0 if opts is None else opts.rootRank
        return self._run("REDUCE", lambda k, t: k.reduce(t, root, op), [], _one(tensors), opts)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        def kernel(kernels: Kernels, own: torch.Tensor, full: torch.Tensor) -> None:
            kernels.all_gather(full.view(self._size, -1).unbind(), own)

        return self._run("_ALLGATHER_BASE", kernel, [input], [output], opts)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        def kernel(kernels: Kernels, own: torch.Tensor, *parts: torch.Tensor) -> None:
            kernels.all_gather(parts, own)

        return self._run("ALLGATHER", kernel, _one(inputs), list(outputs[0]), opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work | None:
        def kernel(kernels: Kernels, *sides: torch.Tensor) -> None:
            for own, full in zip(sides[: len(inputs)], sides[len(inputs) :], strict=True):
                kernels.all_gather(full.view(self._size, -1).unbind(), own)

        return self._run("COALESCED", kernel, list(inputs), list(outputs), opts)

    def _reduce_scatter_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        opts: Any = None,
    ) -> Work | None:
        op = _op(opts)

        def kernel(kernels: Kernels, full: torch.Tensor, out: torch.Tensor) -> None:
            kernels.reduce_scatter(out, full.view(self._size, -1).unbind(), op)

        return self._run("_REDUCE_SCATTER_BASE", kernel, [input], [output], opts)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Any:
        op = _op(opts)

        def kernel(kernels: Kernels, *sides: torch.Tensor) -> None:
            kernels.reduce_scatter(sides[-1], sides[:-1], op)

        return self._run("REDUCE_SCATTER", kernel, list(inputs[0]), _one(outputs), opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work | None:
        op = _op(opts)

        def kernel(kernels: Kernels, *sides: torch.Tensor) -> None:
            for full, out in zip(sides[: len(inputs)], sides[len(inputs) :], strict=True):
                kernels.reduce_scatter(out, full.view(self._size, -1).unbind(), op)

        return self._run("COALESCED", kernel, list(inputs), list(outputs), opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work | None:
        def kernel(kernels: Kernels, *sides: torch.Tensor) -> None:
            kernels.all_to_all(sides[len(inputs) :], sides[: len(inputs)])

        return self._run("ALLTOALL", kernel, list(inputs), list(outputs), opts)

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work | None:
        def parts(tensor: torch.Tensor, sizes: Sequence[int]) -> Tensors:
            return tensor.split(list(sizes)) if sizes else tensor.chunk(self._size)

        def kernel(kernels: Kernels, own: torch.Tensor, full: torch.Tensor) -> None:
            kernels.all_to_all(parts(full, output_sizes), parts(own, input_sizes))

        return self._run("ALLTOALL_BASE", kernel, [input], [output], opts)

    # Names since torch 2.13
    all_gather_single = _allgather_base
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> Work | None:
        tensor = torch.zeros(1, device=self.device)
        sums = dist.ReduceOp.SUM
        return self._run(
            "ALLREDUCE", lambda k, t: k.all_reduce(t, sums), [], [tensor], is_barrier=True
        )

    # Messages

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> Work | None:
        return self._message("SEND", tensors, peer)

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> Work | None:
        return self._message("RECV", tensors, peer)

    def _message(self, kind: str, tensors: Tensors, peer: int) -> Work | None:
        given = _one(tensors)
        _check(given, [])
        if self._batch is not None:
            self._batch.add(given[0], peer, is_send=kind == "SEND")
            return None
        communicator = self._communicator(peer)
        other = peer if self._bound is not None else int(peer > self.own_rank)
        reads, writes = (given, []) if kind == "SEND" else ([], given)

        def kernel(kernels: Kernels, side: torch.Tensor) -> None:
            move = kernels.send if kind == "SEND" else kernels.receive
            move(side, other)

        event = communicator.launch(kind, kernel, reads, writes, is_collective=False)
        given[0].record_stream(communicator.stream)
        self._num_messages += 1
        work = Work(self, communicator, event, kind, given, writes, self._num_messages)
        work._kept = []  # as torch's: `record_stream` keeps them
        self._enqueue(work)
        return work

    # Several as one

    def _start_coalescing(self, device: Any = None) -> None:
        self._batch = _Batch()

    def _end_coalescing(self, device: Any = None) -> Work | None:
        batch, self._batch = self._batch, None
        if batch is None or not (batch.collectives or batch.sends or batch.receipts):
            return None
        communicator = self._communicator(None)
        reads = [tensor for tensor, _ in batch.sends]
        writes = [tensor for tensor, _ in batch.receipts]
        for _, read, written in batch.collectives:
            reads += read
            writes += written

        def kernel(kernels: Kernels, *sides: torch.Tensor) -> None:
            read, written = iter(sides[: len(reads)]), iter(sides[len(reads) :])
            kernels.messages(
                [(next(read), peer) for _, peer in batch.sends],
                [(next(written), peer) for _, peer in batch.receipts],
            )
            for each, of_read, of_written in batch.collectives:
                own = [next(read) for _ in of_read]
                each(kernels, *own, *(next(written) for _ in of_written))

        event = communicator.launch("COALESCED", kernel, reads, writes, is_collective=True)
        self._num_collectives += 1
        work = Work(self, communicator, event, "COALESCED", reads, writes, self._num_collectives)
        self._enqueue(work)
        return work


class _Batch:
    """What is issued between the start and the end of coalescing."""

    def __init__(self) -> None:
        self.sends: list[tuple[torch.Tensor, int]] = []
        self.receipts: list[tuple[torch.Tensor, int]] = []
        self.collectives: list[tuple[Callable[..., object], Tensors, Tensors]] = []

    def add(self, tensor: torch.Tensor, peer: int, *, is_send: bool) -> None:
        (self.sends if is_send else self.receipts).append((tensor, peer))


def _one(tensors: Tensors) -> list[torch.Tensor]:
    if len(tensors) != 1:
        raise ValueError("Expecting one tensor only but got multiple.")
    return list(tensors)


def _op(opts: Any) -> Any:
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    if not can_reduce(op):
        raise ValueError(f"Cannot use ReduceOp.{op} with NCCL")
    return op


def _check(*groups: Tensors) -> None:
    for tensor in (each for group in groups for each in group):
        if tensor.device.type != "cuda" or tensor.is_sparse:
            raise ValueError("Tensors must be CUDA and dense")
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")


def _batch_isend_irecv(original: Callable[..., Any]) -> Callable[..., Any]:
    """Coalesce messages of a simulated group, as torch does those of its own."""

    def batched(ops: Sequence[Any]) -> Any:
        group = ops[0].group or c10d._get_default_group()
        if not isinstance(group, ProcessGroupNCCL):
            return original(ops)
        with c10d._coalescing_manager(group, ops[0].tensor.device, async_ops=True) as manager:
            for op in ops:
                move = group.send if op.op is dist.isend else group.recv
                move([op.tensor], op.group_peer, op.tag)
        return manager.works

    return batched


def _with_device_id(original: Callable[..., Any]) -> Callable[..., Any]:
    """Tell a group of the `device_id` that it is made with."""

    def helper(*args: Any, device_id: torch.device | None = None, **more: Any) -> Any:
        global _bound_device
        _bound_device = device_id
        try:
            return original(*args, device_id=device_id, **more)
        finally:
            _bound_device = None

    return helper


def install() -> None:
    """Put this backend where torch looks for NCCL."""
    major, minor, patch = (int(part) for part in VERSION.split("."))
    torch._C._nccl_version = lambda: major << 32 | minor << 16 | patch  # type: ignore[attr-defined]
    torch._C._nccl_version_suffix = lambda: b""  # type: ignore[attr-defined]
    c10d._NCCL_AVAILABLE = True
    c10d.default_pg_nccl_timeout = _DEFAULT_TIMEOUT
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined]
    batched = _batch_isend_irecv(c10d.batch_isend_irecv)
    c10d.batch_isend_irecv = dist.batch_isend_irecv = batched
    c10d._new_process_group_helper = _with_device_id(c10d._new_process_group_helper)
