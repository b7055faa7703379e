"""Where inputs of recomputed blocks wait: in the host's memory, or on a disk.

    kept = keeper.keep(tensor)     begins to copy it away
    kept.settle()                  the tensor's own memory may be given up
    kept.stay()                    or it is used where it is, and nothing else reads it any more
    kept.fetch()                   begins to bring it back, ahead of its use
    kept.get()                     the same values and strides, in new memory
    kept.abandon()                 nobody will ask any more

Room for what waits is made when it is first needed, and stays: steps that are alike move through
the same memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from zrun_core.memory.buffers import Kind, Tier
from zrun_core.memory.layout import PAGE_BYTES, whole_pages
from zrun_core.memory.tier_traffic import Direction, Move
from zrun_core.tiers.copies import Copier, StreamCopier, ThreadCopier
from zrun_core.tiers.host_arena import HostArena
from zrun_core.tiers.swap_file import Extent, SwapFile
from zrun_core.tiers.transfer import Transfer

_WRITES = 2  # pieces of host memory on their way to the disk at a time
_SPARE = 1.25  # an extent may be this much larger than what is put into it


class Kept(ABC):
    """A tensor that is kept elsewhere. See the module."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until nothing reads the tensor's own memory on the device any more."""

    @abstractmethod
    def stay(self) -> None:
        """Let the tensor be used where it is: wait until nothing else reads its memory.

        Otherwise whoever copies might hold that memory longer than backward does.
        """

    @abstractmethod
    def fetch(self) -> None:
        """Begin to bring it back. It was settled; a second call does nothing."""

    @abstractmethod
    def get(self) -> torch.Tensor:
        """Return it, once it is there. It can be had again: it is fetched anew."""

    @abstractmethod
    def abandon(self) -> None:
        """Give up its room soon. Any thread may call it at any time, so it waits for nothing."""


class Keeper(ABC):
    """Keeps tensors on one tier.

    Attributes:
        tier: where.
        moved: bytes so far, as issued.
        note: what makes it slower than it might be, for the user; empty if nothing does.
    """

    tier: ClassVar[Tier]

    def __init__(self) -> None:
        self.moved: Counter[Move] = Counter()

    @property
    def note(self) -> str:
        return ""

    def count(self, tier: Tier, direction: Direction, num_bytes: int) -> None:
        """Count bytes that move."""
        self.moved[Move(tier, direction, Kind.ACTIVATION)] += num_bytes

    @abstractmethod
    def keep(self, tensor: torch.Tensor) -> Kept:
        """Begin to copy a tensor without gaps; it must not change before `Kept.settle`."""

    @property
    @abstractmethod
    def kept_bytes(self) -> dict[Tier, int]:
        """The room taken so far, by tier; it does not shrink."""

    def __deepcopy__(self, memo: Any) -> Keeper:
        """A copy of a model keeps its tensors in the same room."""
        return self


def has_no_gaps(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill their memory, in whatever order of dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without gaps as [bytes] uint8, in the order of its memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class _Form(NamedTuple):
    """The traits of a tensor beside its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Form:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor that lies in [bytes] uint8."""
        return memory.view(self.dtype).as_strided(self.shape, self.stride)


class DeviceKeeper(Keeper):
    """Keeps tensors where they are: slices, which nobody else holds."""

    tier = Tier.DEVICE

    def __init__(self) -> None:
        super().__init__()
        self._num_bytes = 0
        self._most_bytes = 0
        self._abandoned: deque[int] = deque()

    def keep(self, tensor: torch.Tensor) -> Kept:
        while self._abandoned:
            self._num_bytes -= self._abandoned.popleft()
        self._num_bytes += tensor.nbytes
        self._most_bytes = max(self._most_bytes, self._num_bytes)
        return _OnDevice(self, tensor)

    @property
    def kept_bytes(self) -> dict[Tier, int]:
        return {Tier.DEVICE: self._most_bytes}

    def abandon(self, num_bytes: int) -> None:
        self._abandoned.append(num_bytes)


class _OnDevice(Kept):
    def __init__(self, keeper: DeviceKeeper, tensor: torch.Tensor) -> None:
        self._keeper = keeper
        self._tensor = tensor

    def settle(self) -> None:
        pass

    def stay(self) -> None:
        pass

    def fetch(self) -> None:
        pass

    def get(self) -> torch.Tensor:
        return self._tensor

    def abandon(self) -> None:
        self._keeper.abandon(self._tensor.nbytes)


class HostKeeper(Keeper):
    """Keeps tensors in the host's memory."""

    tier = Tier.HOST

    def __init__(self, copier: Copier, arena: HostArena) -> None:
        """Take who copies, and the memory, which nobody else uses."""
        super().__init__()
        self.copier = copier
        self._arena = arena
        self._abandoned: deque[_OnHost] = deque()

    @property
    def note(self) -> str:
        return self._arena.note

    def keep(self, tensor: torch.Tensor) -> Kept:
        while self._abandoned:
            self._arena.give(self._abandoned.popleft().given_up())
        return _OnHost(self, tensor, self._arena.take(tensor.nbytes, torch.uint8))

    @property
    def kept_bytes(self) -> dict[Tier, int]:
        return {Tier.HOST: self._arena.used_bytes}

    def abandon(self, kept: _OnHost) -> None:
        self._abandoned.append(kept)


class _OnHost(Kept):
    def __init__(self, keeper: HostKeeper, tensor: torch.Tensor, room: torch.Tensor) -> None:
        self._keeper = keeper
        self._form = _Form.of(tensor)
        self._room = room
        self._leaving = keeper.copier.down(_flat(tensor), room)
        keeper.count(Tier.HOST, Direction.WRITTEN, room.numel())
        self._coming: tuple[torch.Tensor, Transfer] | None = None

    def settle(self) -> None:
        self._leaving.wait()

    def stay(self) -> None:
        self._leaving.wait()

    def fetch(self) -> None:
        if self._coming is None:
            target = self._form.empty()
            self._coming = (target, self._keeper.copier.up(self._room, _flat(target)))
            self._keeper.count(Tier.HOST, Direction.READ, self._room.numel())

    def get(self) -> torch.Tensor:
        self.fetch()
        assert self._coming is not None
        target, coming = self._coming
        coming.wait()
        self._coming = None
        return target

    def abandon(self) -> None:
        self._keeper.abandon(self)

    def given_up(self) -> torch.Tensor:
        """Return the room, for what is copied down next: copies of one way follow each other."""
        if self._coming is not None:
            self._coming[1].wait()
        return self._room


class DiskKeeper(Keeper):
    """Keeps tensors on a disk. On their way they pass through a constant piece of host memory.

    A tensor is written when it is settled. So the one that is kept last before backward begins,
    which backward needs first, is never written.
    """

    tier = Tier.DISK

    def __init__(
        self,
        swap: SwapFile,
        copier: Copier,
        arena: HostArena,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        host_is_device: bool,
    ) -> None:
        """Take what the tensors pass through.

        Args:
            swap: the file, from which extents are reserved as they are needed.
            arena: the host memory, which nobody else uses.
            host_is_device: the disk is read straight to where tensors are used.
        """
        super().__init__()
        self.swap = swap
        self.copier = copier
        self._arena = arena
        self.waiting = waiting
        self.host_is_device = host_is_device
        self._free: list[Extent] = []
        self._reserved_bytes = 0
        self._abandoned: deque[_OnDisk] = deque()
        self._passing: deque[tuple[Transfer, torch.Tensor]] = deque()

    def keep(self, tensor: torch.Tensor) -> Kept:
        while self._abandoned:
            self._free.append(self._abandoned.popleft().given_up())
        return _OnDisk(self, tensor, self._extent(tensor.nbytes))

    @property
    def kept_bytes(self) -> dict[Tier, int]:
        return {Tier.DISK: self._reserved_bytes, Tier.HOST: self._arena.used_bytes}

    @property
    def note(self) -> str:
        return " ".join(filter(None, (self.swap.note, self._arena.note)))

    def abandon(self, kept: _OnDisk) -> None:
        self._abandoned.append(kept)

    def _extent(self, num_bytes: int) -> Extent:
        """Return the smallest free extent that is large enough and not much too large."""
        fitting = [each for each in self._free if num_bytes <= each.num_bytes]
        found = min(fitting, key=lambda each: each.num_bytes, default=None)
        if found is not None and found.num_bytes <= _SPARE * whole_pages(num_bytes):
            self._free.remove(found)
            return found
        made = self.swap.reserve(num_bytes, name="input of a recomputed block")
        self._reserved_bytes += made.num_bytes
        return made

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return host memory to pass through; wait for what has passed through the oldest."""
        while self._passing and self._passing[0][0].is_completed():
            self._pass()
        while len(self._passing) >= _WRITES:
            self._pass()
        return self._arena.take(num_bytes, torch.uint8)

    def give(self, memory: torch.Tensor, after: Transfer) -> None:
        """Take back host memory that a transfer still uses."""
        self._passing.append((after, memory))

    def _pass(self) -> None:
        transfer, memory = self._passing.popleft()
        try:
            with self.waiting():
                transfer.wait_on_host()
        finally:
            self._arena.give(memory)


class _OnDisk(Kept):
    def __init__(self, keeper: DiskKeeper, tensor: torch.Tensor, extent: Extent) -> None:
        self._keeper = keeper
        self._form = _Form.of(tensor)
        self._num_bytes = tensor.nbytes
        self._extent = extent
        self._passing: torch.Tensor | None = keeper.take(extent.num_bytes)
        self._leaving = keeper.copier.down(_flat(tensor), self._passing[: self._num_bytes])
        if not keeper.host_is_device:
            keeper.count(Tier.HOST, Direction.WRITTEN, self._num_bytes)
        self._coming: tuple[torch.Tensor, Transfer] | None = None

    def settle(self) -> None:
        if self._passing is None:
            return
        with self._keeper.waiting():
            self._leaving.wait_on_host()
        written = self._keeper.swap.write(self._extent, self._passing)
        self._keeper.count(Tier.DISK, Direction.WRITTEN, self._extent.num_bytes)
        self._keeper.give(self._passing, written)
        self._passing = None

    def stay(self) -> None:
        self._leaving.wait()

    def fetch(self) -> None:
        if self._coming is not None:
            return
        if self._keeper.host_is_device:
            target = _whole_pages_of_memory(self._extent.num_bytes)
        else:
            target = self._keeper.take(self._extent.num_bytes)
        self._coming = (target, self._keeper.swap.read(self._extent, target))
        self._keeper.count(Tier.DISK, Direction.READ, self._extent.num_bytes)

    def get(self) -> torch.Tensor:
        self.fetch()
        assert self._coming is not None
        memory, coming = self._coming
        with self._keeper.waiting():
            coming.wait_on_host()
        self._coming = None
        memory = memory[: self._num_bytes]
        if self._keeper.host_is_device:
            return self._form.over(memory)
        target = self._form.empty()
        copied = self._keeper.copier.up(memory, _flat(target))
        copied.wait()
        self._keeper.give(memory, copied)
        self._keeper.count(Tier.HOST, Direction.READ, self._num_bytes)
        return target

    def abandon(self) -> None:
        self._keeper.abandon(self)

    def given_up(self) -> Extent:
        """Return the extent, which nothing reads or writes any more."""
        if self._passing is not None:
            self._keeper.give(self._passing, self._leaving)
        if self._coming is not None and not self._keeper.host_is_device:
            self._keeper.give(*self._coming)
        return self._extent


def _whole_pages_of_memory(num_bytes: int) -> torch.Tensor:
    """Return [num_bytes] uint8 that begin on the border of a page, of torch's own memory."""
    memory = torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE_BYTES
    return memory[start : start + num_bytes]


def make_keeper(
    tier: Tier,
    device: torch.device,
    folder: Path,
    host_bytes: int,
    waiting: Callable[[], AbstractContextManager[None]],
) -> Keeper:
    """Return who keeps tensors of `device` on the host or on a disk.

    Args:
        device: of the tensors. On a CPU the host is the device, and only a disk is elsewhere.
        host_bytes: that it may take of the host's memory.

    Raises:
        PreflightError: there is no such file or memory to be had.
    """
    is_cpu = device.type == "cpu"
    copier: Copier = ThreadCopier() if is_cpu else StreamCopier(device)
    arena = HostArena(host_bytes, device)
    if tier is Tier.HOST:
        return HostKeeper(copier, arena)
    return DiskKeeper(SwapFile(folder, 0), copier, arena, waiting, host_is_device=is_cpu)
