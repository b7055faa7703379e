"""Memory of a rank beside its device: the host's, a file on a disk, and who moves bytes between.

    device  <-- copier -->  host memory (arena, slots)  <-- threads of the file -->  disk

On a machine without accelerator the device is the host: nothing is copied between them, and states
on disk come straight to where they are used. With `apart` host memory is other memory than the
device's on a CPU too, and a thread copies in between: where parameters on disk cannot be read in
place, and in tests and benchmarks, in which whatever waits for a copy on a GPU has to wait so.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from zrun_core.hardware.accelerator import Stream, current_stream, is_accelerator
from zrun_core.hardware.clock import Waits
from zrun_core.hardware.spans import Spans
from zrun_core.memory.buffers import Buffer, Kind, Tier
from zrun_core.memory.layout import whole_pages
from zrun_core.memory.state_policy import DISK_SLOTS, STAGING_SLOTS, SlotSizes
from zrun_core.memory.tier_traffic import Direction, Move
from zrun_core.spine.flight_recorder import FlightRecorder
from zrun_core.tiers.copies import Copier, StreamCopier
from zrun_core.tiers.host_arena import HostArena
from zrun_core.tiers.slots import Slots
from zrun_core.tiers.swap_file import Extent, Span, SwapFile
from zrun_core.tiers.transfer import Transfer
from zrun_core.tiers.worker import Worker

_WAIT = "wait"
_LOOK_S = 0.002  # between two looks of a save for a slot


class _Ascent:
    """A read from a disk, and the copy to the device that whoever waits first begins."""

    def __init__(
        self, read: Transfer, copy: Callable[[], Transfer], under_way: list[_Ascent]
    ) -> None:
        self._read = read
        self._copy = copy
        self._copied: Transfer | None = None
        self._under_way = under_way  # those that still hold their slot
        under_way.append(self)

    def begin_copy(self) -> Transfer:
        """Begin the copy when the read is over, after which the slot is given back."""
        if self._copied is None:
            self._read.wait_on_host()
            self._copied = self._copy()
            self._under_way.remove(self)
        return self._copied

    def is_completed(self) -> bool:
        return self._copied is not None and self._copied.is_completed()

    def wait(self) -> None:
        self.begin_copy().wait()

    def wait_on_host(self) -> None:
        self.begin_copy().wait_on_host()


class _Watched:
    """A transfer for which training waits in sight: on its page, and timed."""

    def __init__(self, transfer: Transfer, tier: Tier, tiers: Tiers) -> None:
        self._transfer = transfer
        self._tier = tier
        self._tiers = tiers

    def is_completed(self) -> bool:
        return self._transfer.is_completed()

    def wait(self) -> None:
        self._tiers.wait(self._transfer, self._tier)

    def wait_on_host(self) -> None:
        self._tiers.wait_on_host(self._transfer, self._tier)


@dataclass
class TierCounts:
    """Counts of what has moved between tiers for training, and of waits for it.

    Attributes:
        device: that trains.
        moved: bytes by kind of transfer.
        waits: of the device, by tier.
        updating_s: seconds of updates beside training.
        lag: waits of the device for these.
    """

    device: torch.device
    moved: Counter[Move] = field(default_factory=Counter)
    waits: dict[Tier, Waits] = field(init=False)
    updating_s: float = 0.0
    lag: Waits = field(init=False)

    def __post_init__(self) -> None:
        self.waits = {tier: Waits(self.device) for tier in (Tier.HOST, Tier.DISK)}
        self.lag = Waits(self.device)

    @property
    def waited_s(self) -> dict[Tier, float]:
        """Return the seconds that the device has waited, by tier, once it has passed them."""
        return {tier: waits.seconds() for tier, waits in self.waits.items()}

    @property
    def lag_s(self) -> float:
        """Return the seconds that the device has waited for updates, once it has passed them."""
        return self.lag.seconds()


class Tiers:
    """The memory of one rank beside its device.

    Attributes:
        host_is_device: the device computes in the host's memory.
        slots: host memory through which states on disk pass, by kind.
        gradients_down: host memory for gradients on their way from the device.
        parameters_up: host memory for updated parameters on their way to it.
        worker: does what the host computes.
        spans: name what happens here, while a profile is taken.
        counts: of steps, since `take_counts`.
    """

    def __init__(
        self,
        device: torch.device,
        buffers: Sequence[Buffer],
        sizes: SlotSizes,
        folder: Path | None,
        *,
        apart: Copier | None = None,
        board: FlightRecorder | None = None,
        spans: Spans | None = None,
    ) -> None:
        """Reserve all of it.

        Args:
            buffers: of the rank, as `StatePolicy.rank_buffers` returns them.
            folder: for the file, if there are buffers on disk.
            apart: copies between a CPU and a host tier that is apart from it.
            spans: name it for a profile; None: there is none.

        Raises:
            PreflightError: there is no room.
        """
        self.device = device
        self.host_is_device = device.type == "cpu" and apart is None
        self.worker = Worker(device, self._free_slots)
        self.counts = TierCounts(device)
        self._lock = threading.Lock()  # of the counts
        self._board = board
        self.spans = spans or Spans(device)
        self._is_waiting = False
        self._trace: list[Span] | None = None
        self._lent: dict[int, Slots] = {}  # of the memory at an address: in the thread of a save
        self._ascents: list[_Ascent] = []  # of the thread that trains
        self._folder = folder
        self._file: SwapFile | None = None
        self._file = self._open_file(buffers)
        on_host = [each.num_bytes for each in buffers if each.tier is Tier.HOST]
        self._copier = apart
        self._stream: Stream | None = None  # that trains
        if is_accelerator(device) and on_host:
            self._copier = StreamCopier(device)
            self._stream = current_stream(device)
        self._arena = HostArena(sum(map(whole_pages, on_host)), device)
        self.slots = {kind: self._slots(DISK_SLOTS, size) for kind, size in sizes.disk.items()}
        self.gradients_down = self._slots(STAGING_SLOTS, sizes.down)
        self.parameters_up = self._slots(STAGING_SLOTS, sizes.up)

    def _open_file(self, buffers: Sequence[Buffer]) -> SwapFile | None:
        num_bytes = sum(whole_pages(each.num_bytes) for each in buffers if each.tier is Tier.DISK)
        if not num_bytes:
            return None
        assert self._folder is not None, "states on disk need a folder"
        return SwapFile(self._folder, num_bytes, spans=self.spans)

    def _slots(self, number: int, num_bytes: int) -> Slots:
        if not num_bytes:
            return Slots([], self.check)
        pieces = [self._arena.take(num_bytes, torch.uint8) for _ in range(number)]
        return Slots(pieces, self.check, self._until_computed)

    def end(self) -> None:
        """Have the stream that trains wait for copies, as their memory is to go.

        It may be called by the collector of garbage, wherever that runs: so it waits for no thread.
        A task that is still under way holds its memory itself.
        """
        if self._copier is not None and self._stream is not None:
            self._copier.end(self._stream)

    @property
    def notes(self) -> list[str]:
        """Notes for the user: of what is slower than it might be, or saves no memory."""
        of_file = "" if self._file is None else self._file.note
        return [note for note in (of_file, self._arena.note) if note]

    def check(self) -> None:
        """Raise the first error of the disk or of the worker, if there is one."""
        if self._file is not None:
            self._file.check()
        self.worker.check()

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots."""
        slots = [*self.slots.values(), self.gradients_down, self.parameters_up]
        return sum(each.num_bytes for each in slots)

    @property
    def slots_taken(self) -> dict[str, int]:
        """Pieces of host memory that are in use, by purpose: none between two steps."""
        slots = {kind.value: each for kind, each in self.slots.items()}
        slots |= {"gradients": self.gradients_down, "parameters": self.parameters_up}
        return {name: each.num_taken for name, each in slots.items() if each.num_taken}

    # Memory

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return [numel] of zeros in host memory, for life."""
        return self._arena.take(numel, dtype)

    def reserve(self, num_bytes: int, name: str) -> Extent:
        """Return the next part of the file, of whole pages."""
        assert self._file is not None, "no state was planned on disk"
        return self._file.reserve(num_bytes, name=name)

    # Transfers

    def copy_up(self, source: torch.Tensor, target: torch.Tensor, kind: Kind) -> Transfer:
        """Begin to copy host memory to the device."""
        self._count(Move(Tier.HOST, Direction.READ, kind), source.nbytes)
        with self.spans.named("copy up", kind.value):
            return _Watched(self._copies.up(source, target), Tier.HOST, self)

    def copy_down(self, source: torch.Tensor, target: torch.Tensor, kind: Kind) -> Transfer:
        """Begin to copy memory of the device to the host."""
        self._count(Move(Tier.HOST, Direction.WRITTEN, kind), source.nbytes)
        with self.spans.named("copy down", kind.value):
            return _Watched(self._copies.down(source, target), Tier.HOST, self)

    @property
    def _copies(self) -> Copier:
        assert self._copier is not None, "the device computes in the host's memory"
        return self._copier

    def read(self, extent: Extent, target: torch.Tensor, kind: Kind) -> Transfer:
        """Begin to read the beginning of an extent into `target`, uint8 in whole pages."""
        assert self._file is not None
        self._count(Move(Tier.DISK, Direction.READ, kind), target.nbytes)
        with self.spans.named("begin to read", extent.name):
            return _Watched(self._file.read(extent, target), Tier.DISK, self)

    def read_to_device(
        self, read: Transfer, slot: torch.Tensor, target: torch.Tensor, kind: Kind
    ) -> Transfer:
        """Copy a slot to the device when `read` has filled it, and give it back.

        Args:
            slot: of `slots[kind]`.
            target: on the device, of the same size and format.
        """

        def copy() -> Transfer:
            copied = self.copy_up(slot, target, kind)
            self.slots[kind].give(slot, after=copied)
            return copied

        return _Ascent(read, copy, self._ascents)

    def write(self, extent: Extent, source: torch.Tensor, kind: Kind) -> Transfer:
        """Begin to write `source`, uint8 in whole pages, to the beginning of an extent."""
        self.count_written(kind, [(extent, source)])
        return self.write_counted(extent, source, kind)

    def count_written(self, kind: Kind, pieces: Sequence[tuple[Extent, torch.Tensor]]) -> None:
        """Count what `write_counted` will write."""
        num_bytes = sum(source.nbytes for _, source in pieces)
        self._count(Move(Tier.DISK, Direction.WRITTEN, kind), num_bytes)

    def write_counted(self, extent: Extent, source: torch.Tensor, kind: Kind) -> Transfer:
        """Begin to write like `write`, what was counted before."""
        assert self._file is not None
        with self.spans.named("begin to write", extent.name):
            return _Watched(self._file.write(extent, source), Tier.DISK, self)

    def submit(self, task: Callable[[], None]) -> Transfer:
        """Have the worker run `task` after those before it."""
        return _Watched(self.worker.submit(task), self._slowest, self)

    def read_stored(self, extent: Extent, target: torch.Tensor, start: int) -> Transfer:
        """Begin to read blocks for a save: it is no traffic of the step.

        Args:
            target: uint8 in whole blocks, or to the end of the extent.
        """
        assert self._file is not None
        return self._file.read(extent, target, start=start)

    def count_update(self, seconds: float) -> None:
        """Count the seconds of an update beside training."""
        with self._lock:
            self.counts.updating_s += seconds

    def lend(self) -> torch.Tensor | None:
        """Return a slot to a save, whose thread asks; None: there is none to spare.

        One stays for whoever looks at a state meanwhile. Updates wait until a save has read all.
        """
        slots = self.slots.get(Kind.OPTIM) or self.slots.get(Kind.PARAM)
        while slots is not None and slots.num_taken < DISK_SLOTS - 1:
            if (memory := slots.take_free(slots.num_bytes // DISK_SLOTS)) is not None:
                self._lent[memory.data_ptr()] = slots
                return memory
            self.check()
            time.sleep(_LOOK_S)  # the last update's record is on its way to the disk
        return None

    def take_back(self, memory: torch.Tensor) -> None:
        """Take a slot back from a save."""
        self._lent.pop(memory.data_ptr()).give(memory)

    def _count(self, move: Move, num_bytes: int) -> None:
        if not self.worker.is_for_step:
            return
        with self._lock:
            self.counts.moved[move] += num_bytes

    # Waiting

    def wait(self, transfer: Transfer, tier: Tier) -> None:
        """Wait in the thread that trains until the device may use what has come."""
        self._wait(transfer.wait, transfer, tier)

    def wait_on_host(self, transfer: Transfer, tier: Tier) -> None:
        """Wait until this thread may use what has come."""
        self._wait(transfer.wait_on_host, transfer, tier)

    def _wait(self, wait: Callable[[], None], transfer: Transfer, tier: Tier) -> None:
        if transfer.is_completed():
            wait()
            return
        with self._timed(tier):
            wait()

    def _until_computed(self) -> AbstractContextManager[None]:
        """Return what shows and times a wait for a slot, which others may hold."""
        self._free_slots()
        return self._timed(self._slowest)

    def _free_slots(self) -> None:
        """Give back the slots of the thread that trains, which begins to wait for the worker.

        The worker may need them: only the threads of the disk and the copier need nobody.
        """
        if not self.worker.is_current:
            for ascent in list(self._ascents):
                ascent.begin_copy()

    @contextmanager
    def _timed(self, tier: Tier) -> Iterator[None]:
        """Show and time a wait of the thread that trains, once where one is part of another."""
        if self.worker.is_current or self._is_waiting:
            with self.traced(_WAIT), self.spans.named("wait for the", tier.value):
                yield
            return
        with self._counted(self.counts.waits[tier]), self.traced(_WAIT), self._shown(tier):
            yield

    def _counted(self, waits: Waits) -> AbstractContextManager[None]:
        """Return what counts a wait of the thread that trains, in a step."""
        return waits.counting() if self.worker.is_in_step else nullcontext()

    def wait_for_update(self, updated: Transfer) -> None:
        """Wait in the thread that trains for an update that runs beside it."""
        if updated.is_completed():
            updated.wait()
            return
        shown = self._shown(self._slowest)
        with self._counted(self.counts.lag), self.traced(_WAIT), shown:
            updated.wait()

    @property
    def _slowest(self) -> Tier:
        """The tier for which the worker waits, if it does."""
        return Tier.HOST if self._file is None else Tier.DISK

    @contextmanager
    def _shown(self, tier: Tier) -> Iterator[None]:
        what = "its host memory" if tier is Tier.HOST else f"its disk ({self._folder})"
        self._is_waiting = True
        shown = nullcontext() if self._board is None else self._board.wait_for_tier(what)
        try:
            with shown, self.spans.named("wait for the", tier.value):
                yield
        finally:
            self._is_waiting = False

    def take_trace(self) -> list[Span]:
        """Return spans of what threads have done since the last call; the first one begins.

        These are blocks of the file, updates beside training, and each `wait` for either.
        """
        spans = self._trace or []
        self._trace = []
        if self._file is not None:
            self._file.trace = self._trace
        return spans

    @contextmanager
    def traced(self, what: str) -> Iterator[None]:
        """Add what happens inside to the trace, if one is taken."""
        trace = self._trace
        start = time.perf_counter()
        try:
            yield
        finally:
            if trace is not None:
                thread = threading.current_thread().name
                trace.append(Span(thread, what, start, time.perf_counter()))

    def take_counts(self) -> TierCounts:
        """Return what was counted since the last call."""
        with self._lock:
            counts = self.counts
            self.counts = TierCounts(self.device)
        return counts
