"""The file of a rank for states that live on disk: extents, moved in blocks by threads.

    swap = SwapFile(Path("/scratch"), 96 << 30)
    record = swap.reserve(3 << 30, name="record of blocks.0")
    swap.write(record, memory)             takes effect behind the caller's back
    swap.read(record, memory).wait()       sees what was written

The file has no name: whatever ends the process, the space is free again. It passes the page cache
where the file system can do so, so that a block goes from the memory of a state to the disk and
back without a copy, and takes no memory beside. Reads go straight into the moved pages of a
`PageWindow` too.

[Note: blocks]
An extent is cut into blocks of 8 MiB, and each is one task of a thread. Transfers of one extent
take effect in the order of the calls, by block: each block has a line of tasks, of which only the
first is under way. So an extent can be read, updated and written back in pieces that overlap.

    extent      calls, one after the other               lines
    block 0     write A      read B                      A B        A runs, B waits for it
    block 1     write A      read B     write C          A B C
    block 2                             write C          C          runs beside both

A block has a digest from when it is written, which is compared when it is read: a disk that gives
back other bytes is an error, never a number in a model. What was never written reads as zeros, and
costs the disk nothing.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from zrun_core.errors import OffloadError, PreflightError
from zrun_core.hardware.spans import Spans
from zrun_core.memory.layout import PAGE_BYTES, whole_pages
from zrun_core.sizes import format_size
from zrun_core.spine.direct_io import (
    file_system,
    free_space,
    goes_past_the_cache,
    open_nameless,
    read_pages,
    reserve,
    write_pages,
)
from zrun_core.tiers.probe import IN_MEMORY
from zrun_core.tiers.transfer import DONE, Transfer

_FULL = (errno.ENOSPC, errno.EDQUOT)
_ELSEWHERE = "name another disk with offload.dir"


class Span(NamedTuple):
    """Work of a thread, and its time: seconds of `time.perf_counter`."""

    thread: str
    what: str
    begin: float
    end: float


class _BlockTransfer:
    """A transfer whose blocks are tasks of the threads."""

    def __init__(self, num_tasks: int) -> None:
        self._left = num_tasks
        self._over = threading.Event()
        self._error = ""

    def is_completed(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        self._over.wait()
        if self._error:
            raise OffloadError(self._error)

    def wait_on_host(self) -> None:
        self.wait()

    def _end_task(self, error: str) -> None:
        """Count a task that has ended; the lock of the file is held."""
        self._left -= 1
        self._error = self._error or error
        if not self._left:
            self._over.set()


class _Task(NamedTuple):
    """One block of a transfer. It keeps the file alive, which its threads do not."""

    file: SwapFile
    extent: Extent
    block: _Block
    memory: memoryview
    is_write: bool
    transfer: _BlockTransfer


class _Block:
    """A block of the file: see [Note: blocks].

    Attributes:
        digest: of what was written last; None: nothing yet.
        line: tasks in the order of the calls; the first one is under way.
    """

    __slots__ = ("digest", "line", "num_bytes", "offset")

    def __init__(self, offset: int, num_bytes: int) -> None:
        self.offset = offset
        self.num_bytes = num_bytes
        self.digest: int | None = None
        self.line: deque[_Task] = deque()


class Extent:
    """A range of the file that holds one state of one unit.

    Attributes:
        name: of the state, for messages.
        num_bytes: whole pages.
        block_bytes: of one read or write.
    """

    def __init__(self, name: str, offset: int, num_bytes: int, block_bytes: int) -> None:
        """Cut a range that begins at `offset` of the file into blocks."""
        self.name = name
        self.num_bytes = num_bytes
        self.block_bytes = block_bytes
        self._blocks = [
            _Block(offset + start, min(block_bytes, num_bytes - start))
            for start in range(0, num_bytes, block_bytes)
        ]

    def blocks(self, start: int, num_bytes: int) -> list[_Block]:
        """Return the blocks of a range of the extent.

        Raises:
            ValueError: the range does not begin and end on borders of blocks.
        """
        stop = start + num_bytes
        is_whole = start % self.block_bytes == 0 and (
            stop % self.block_bytes == 0 or stop == self.num_bytes
        )
        if not is_whole or not 0 <= start <= stop <= self.num_bytes:
            raise ValueError(
                f"bytes {start} to {stop} of {self.name}, which has {self.num_bytes}, are not "
                f"whole blocks of {self.block_bytes}"
            )
        return self._blocks[start // self.block_bytes : -(-stop // self.block_bytes)]


class SwapFile:
    """The nameless file of a rank. See the module.

    Any thread may reserve, begin transfers and wait for them. Waiting raises OffloadError if the
    disk failed, in this transfer or in an earlier one of the file.

    Attributes:
        folder: that it lies in.
        num_bytes: of the file.
        direct: it passes the page cache.
        note: a sentence for the user where states here take memory after all; "" if not.
        trace: spans of what threads do, once a list is put here; None: none are taken.
        read_bytes, written_bytes: so far, of what the disk was asked to move.
    """

    def __init__(
        self,
        folder: Path,
        num_bytes: int,
        *,
        num_threads: int = 4,
        block_bytes: int = 8 << 20,
        spans: Spans | None = None,
    ) -> None:
        """Make the file, with all of its space, and start its threads.

        Args:
            folder: an existing one, on the disk that is meant.
            num_threads: blocks that are under way at a time.
            block_bytes: of one read or write, whole pages.
            spans: name each of them for a profile; None: there is none.

        Raises:
            PreflightError: no such file can be made here.
        """
        if block_bytes < PAGE_BYTES or block_bytes % PAGE_BYTES:
            raise ValueError(f"blocks of {block_bytes} bytes are not whole pages")
        self.folder = folder
        self.num_bytes = whole_pages(num_bytes)
        self.trace: list[Span] | None = None
        self._spans = spans
        self.read_bytes = 0
        self.written_bytes = 0
        self._block_bytes = block_bytes
        self._used_bytes = 0
        self._failure = ""  # the first one: each transfer that follows raises it
        self._num_open = 0
        self._changed = threading.Condition()
        self._reads = _Line()
        self._writes = _Line()
        self._file, self.direct = _create(folder, self.num_bytes)
        self.note = _note(folder, self.direct)
        lines = {"read": self._reads, "write": self._writes}
        for way, line in lines.items():
            line.serve(f"zrun-disk-{way}", num_threads)
        # Also of a model that was dropped, and at the exit of the process, when nobody has closed
        # it: Python may abort at its end where threads are left.
        self._end = weakref.finalize(self, _end, self._file, list(lines.values()))

    def reserve(self, num_bytes: int, *, name: str) -> Extent:
        """Return the next pages of the file; it grows where the plan was short.

        Args:
            num_bytes: of the state; the extent has whole pages.

        Raises:
            OffloadError: the disk is full.
        """
        self._check_open()
        with self._changed:
            offset = self._used_bytes
            end = offset + whole_pages(num_bytes)
            if end > self.num_bytes:
                self._grow(end, name)
            self._used_bytes = end
        return Extent(name, offset, end - offset, self._block_bytes)

    def _grow(self, num_bytes: int, name: str) -> None:
        missing = num_bytes - self.num_bytes
        try:
            reserve(self._file, missing, self.num_bytes)
        except OSError as error:
            what = f"cannot make room for {name}"
            raise OffloadError(_in_words(what, self.folder, error, missing)) from error
        self.num_bytes = num_bytes

    def read(self, extent: Extent, target: torch.Tensor, *, start: int = 0) -> Transfer:
        """Begin to fill memory from a range of an extent.

        Args:
            target: [n] uint8, whole pages of the host's memory.
            start: of the range in the extent. It begins and ends on borders of blocks, or at the
                end of the extent.
        """
        return self._begin(extent, target, start, is_write=False)

    def write(self, extent: Extent, source: torch.Tensor, *, start: int = 0) -> Transfer:
        """Begin to write memory to a range of an extent.

        Args:
            source: [n] uint8, whole pages of the host's memory.
            start: of the range in the extent. It begins and ends on borders of blocks, or at the
                end of the extent.
        """
        return self._begin(extent, source, start, is_write=True)

    def check(self) -> None:
        """Raise the error that all transfers raise from now on, if there is one."""
        if self._failure:
            raise OffloadError(self._failure)

    def close(self) -> None:
        """Wait until nothing is under way, end the threads, and give the space back."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_open)
        self._end()

    def _check_open(self) -> None:
        if not self._end.alive:
            raise ValueError(f"the file in {self.folder} is closed")

    def _begin(
        self, extent: Extent, tensor: torch.Tensor, start: int, *, is_write: bool
    ) -> Transfer:
        self._check_open()
        memory = _memory_of(tensor)
        blocks = extent.blocks(start, len(memory))
        if not blocks:
            return DONE
        transfer = _BlockTransfer(len(blocks))
        done = 0
        with self._changed:
            self._num_open += len(blocks)
            for block in blocks:
                piece = memory[done : done + block.num_bytes]
                done += block.num_bytes
                block.line.append(_Task(self, extent, block, piece, is_write, transfer))
                if len(block.line) == 1:
                    self._let(block.line[0])
        return transfer

    def _let(self, task: _Task) -> None:
        """Have a thread do a task that nothing of its block is in front of."""
        line = self._writes if task.is_write else self._reads
        line.ready.put(task)

    def _perform(self, task: _Task) -> None:
        """Do a task, and let the next one of its block follow. Called by the threads."""
        error = self._failure or self._attempt(task)
        line = task.block.line
        with self._changed:
            self._failure = self._failure or error
            line.popleft()
            if line:
                self._let(line[0])
            task.transfer._end_task(error)
            self._num_open -= 1
            if not self._num_open:
                self._changed.notify_all()

    def _attempt(self, task: _Task) -> str:
        """Move a block. Returns the error, or nothing."""
        trace = self.trace
        begin = 0.0 if trace is None else time.perf_counter()
        verb = "write" if task.is_write else "read"
        what = f"{verb} {task.extent.name}"
        named = nullcontext() if self._spans is None else self._spans.named(what)
        try:
            with named:
                if task.is_write:
                    self._write(task)
                else:
                    self._read(task)
        except OSError as error:
            return _in_words(f"cannot {what}", self.folder, error)
        except OffloadError as error:
            return str(error)
        except Exception as error:  # a bug; whoever waits must not wait for ever
            return f"cannot {what} in {self.folder}: {type(error).__name__}: {error}"
        if trace is not None:
            thread = threading.current_thread().name
            trace.append(Span(thread, what, begin, time.perf_counter()))
        return ""

    def _write(self, task: _Task) -> None:
        block = task.block
        block.digest = xxhash.xxh3_64_intdigest(task.memory)
        write_pages(self._file, task.memory, block.offset)
        self._leave_cache(block)
        with self._changed:
            self.written_bytes += block.num_bytes

    def _read(self, task: _Task) -> None:
        block = task.block
        if block.digest is None:
            np.frombuffer(task.memory, np.uint8).fill(0)
            return
        read_pages(self._file, task.memory, block.offset)
        self._leave_cache(block)
        with self._changed:
            self.read_bytes += block.num_bytes
        if xxhash.xxh3_64_intdigest(task.memory) != block.digest:
            raise OffloadError(
                f"the disk returned other bytes than were written: {task.extent.name}, "
                f"{format_size(block.num_bytes)} at byte {block.offset} of the file of this rank "
                f"in {self.folder}; look at the disk (dmesg, smartctl), {_ELSEWHERE}, and resume "
                "from the newest checkpoint"
            )

    def _leave_cache(self, block: _Block) -> None:
        if not self.direct:
            advice = os.POSIX_FADV_DONTNEED
            os.posix_fadvise(self._file, block.offset, block.num_bytes, advice)


def _create(folder: Path, num_bytes: int) -> tuple[int, bool]:
    """Return the descriptor of a nameless file of that size, and whether it passes the cache.

    Raises:
        PreflightError: no such file can be made here.
    """
    try:
        file = open_nameless(folder)
        try:
            reserve(file, num_bytes)
            return file, goes_past_the_cache(file)
        except OSError:
            os.close(file)
            raise
    except OSError as error:
        what = "cannot make room for states"
        raise PreflightError(_in_words(what, folder, error, num_bytes)) from error


class _Line:
    """Tasks that are ready, and the threads that do them.

    Attributes:
        ready: tasks, in the order of the calls.
    """

    def __init__(self) -> None:
        self.ready: SimpleQueue[_Task | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def serve(self, name: str, num_threads: int) -> None:
        """Start threads that perform tasks."""
        for number in range(num_threads):
            thread = threading.Thread(
                target=_serve, args=(self.ready,), name=f"{name}-{number}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def end(self) -> None:
        """End the threads, after what they are at."""
        with suppress(Empty):  # what is still in line at the exit of the process
            while True:
                self.ready.get_nowait()
        for _ in self._threads:
            self.ready.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # it may have dropped the file itself
                thread.join()


def _serve(ready: SimpleQueue[_Task | None]) -> None:
    """Perform tasks until None comes."""
    while (task := ready.get()) is not None:
        task.file._perform(task)
        del task  # it keeps the file alive


def _end(file: int, lines: Sequence[_Line]) -> None:
    """End the threads of a file, and close it."""
    for line in lines:
        line.end()
    os.close(file)


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor.

    Raises:
        ValueError: it is not [n] uint8 in whole pages of the host's memory.
    """
    is_flat = tensor.dtype is torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous()
    if tensor.device.type != "cpu" or not is_flat:
        raise ValueError("only [n] uint8 of the host's memory goes to a disk")
    if tensor.data_ptr() % PAGE_BYTES or tensor.numel() % PAGE_BYTES:
        raise ValueError(
            f"{tensor.numel()} bytes at {tensor.data_ptr():#x} are not whole pages of "
            f"{PAGE_BYTES}: take them from `memory.arena`"
        )
    memory: memoryview = tensor.numpy().data
    return memory


def _note(folder: Path, direct: bool) -> str:
    filesystem = file_system(folder)
    if filesystem in IN_MEMORY:
        return (
            f"{folder} is {filesystem}, which is memory: offloading to it saves none; {_ELSEWHERE}"
        )
    if not direct:
        return (
            f"{folder} ({filesystem or 'unknown file system'}) has no direct reads and writes: "
            "states go through the page cache, which is slower and takes memory"
        )
    return ""


def _in_words(what: str, folder: Path, error: OSError, num_bytes: int | None = None) -> str:
    """Return what a user is told about an error of the system.

    `num_bytes` were asked for, if that is known.
    """
    text = f"{what} in {folder}: {error.strerror or error}"
    if error.errno in _FULL:
        space = f"{free_space(folder)} free"
        if num_bytes is not None:
            space = f"{format_size(num_bytes)} needed, {space}"
        return f"{text} ({space}); free some space, or {_ELSEWHERE}"
    if error.errno == errno.EIO:
        return f"{text}; the disk fails: look at it (dmesg, smartctl), and {_ELSEWHERE}"
    return f"{text}; {_ELSEWHERE}"
