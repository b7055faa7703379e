"""Homes on other tiers than the device: see `home.py`.

OnHost    in the rank's arena of host memory: fetch only waits for what `store` has begun
OnDisk    in an extent of the rank's file: fetch reads it into a slot of host memory
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from zrun_core.memory.arena import byte_buffer
from zrun_core.memory.buffers import Kind, Tier
from zrun_core.memory.layout import whole_pages
from zrun_core.tiers.slots import Slots
from zrun_core.tiers.stored import Part, Stored, StoredOnDisk, StoredOnHost
from zrun_core.tiers.swap_file import Extent
from zrun_core.tiers.tiers import Tiers
from zrun_core.tiers.transfer import DONE, Transfer
from zrun_core.zero.unit.home import Home

Look = Callable[[torch.Tensor], None]  # at values that are there now
Move = Callable[[Extent, torch.Tensor, Kind], Transfer]  # as `Tiers.read` or `Tiers.write`


class AwayHome(Home, Protocol):
    """The home of a state that does not live on the device."""

    def load(self, target: torch.Tensor, start: int = 0) -> Transfer:
        """Begin to copy values to the device, in the home's format.

        Args:
            target: [n].
            start: the first of them.
        """
        ...

    def store(
        self,
        source: torch.Tensor,
        start: int = 0,
        *,
        accumulate: bool = False,
        look: Look | None = None,
    ) -> Transfer:
        """Begin to store values of the device, or to add them to those that are there.

        Args:
            source: [n].
            start: where the first of them goes.
            look: is given what is there afterwards, [n], as soon as that is known.

        Returns:
            What to wait for before `source` is written again.
        """
        ...

    def settle(self) -> None:
        """Wait until everything that was stored is there, and was looked at."""
        ...


class OnHost:
    """A home in host memory that is not the device's."""

    def __init__(self, tiers: Tiers, kind: Kind, capacity: int, dtype: torch.dtype) -> None:
        """Take memory of the arena.

        Args:
            kind: what the bytes are counted as.
            capacity: elements that it may have; it has all of them until `grow` says otherwise.
        """
        self._tiers = tiers
        self._kind = kind
        self._memory = tiers.host_memory(capacity, dtype)
        self._used = self._memory
        self._coming: Transfer = DONE
        self._loading: Transfer = DONE  # the newest copy to the device

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    def fetch(self) -> Transfer | None:
        return None if self._coming is DONE else self._coming

    def fetch_if_free(self, *, waits: bool = False) -> None:
        pass

    def at(self) -> torch.Tensor:
        # Who asks may write: the device, which may be behind, has to have read what is there.
        self._tiers.wait_on_host(self._loading, Tier.HOST)
        self._loading = DONE
        self._tiers.wait_on_host(self._coming, Tier.HOST)
        self._coming = DONE
        return self._used

    def put(self) -> None:
        return None

    def drop(self) -> None:
        return None

    def grow(self, num_bytes: int) -> None:
        if num_bytes > self._memory.numel():
            larger = byte_buffer(num_bytes, self._memory.device)
            larger[: self._used.numel()].copy_(self._used)
            self._memory = larger
        self._used = self._memory[:num_bytes]

    def stored(self, dtype: torch.dtype, start: int, stop: int) -> Stored:
        self._coming.wait_on_host()
        return StoredOnHost(self._used.view(torch.uint8)[start:stop].view(dtype))

    def load(self, target: torch.Tensor, start: int = 0) -> Transfer:
        self._tiers.wait(self._coming, Tier.HOST)  # what the device stores it may load at once
        part = self._used[start : start + target.numel()]
        self._loading = self._tiers.copy_up(part, target, self._kind)
        return self._loading

    def settle(self) -> None:
        self._coming.wait_on_host()

    def store(
        self,
        source: torch.Tensor,
        start: int = 0,
        *,
        accumulate: bool = False,
        look: Look | None = None,
    ) -> Transfer:
        part = self._used[start : start + source.numel()]
        if not accumulate:
            self._coming.wait()  # the worker may still add to what was there
            if look is not None:
                look(source)
            self._coming = self._tiers.copy_down(source, part, self._kind)
            return self._coming
        before = self._coming
        slots = self._tiers.gradients_down
        slot = slots.take(source.nbytes).view(source.dtype)
        down = self._tiers.copy_down(source, slot, self._kind)

        def add() -> None:
            before.wait_on_host()
            down.wait_on_host()
            part.add_(slot)
            slots.give(slot)
            if look is not None:
                look(part)

        self._coming = self._tiers.submit(add)
        return down


class OnDisk:
    """A home in the rank's file, with a slot of host memory while it is used.

    A gradient of which the rank updates a part, and which holds sums of micro-batches before that,
    is one extent for each rank's part: of the sum, only the own one is written and read.
    """

    def __init__(
        self,
        tiers: Tiers,
        kind: Kind,
        name: str,
        capacity: int,
        dtype: torch.dtype,
        own: tuple[int, int] | None = None,
    ) -> None:
        """Reserve the extents.

        Args:
            kind: of the state, whose slots it passes through.
            capacity: elements that it may have; 0: `grow` says how many.
            own: first and last + 1 of those that `fetch` brings; None: all.
        """
        self._tiers = tiers
        self._kind = kind
        self._name = name
        self._dtype = dtype
        self._parts: list[Part] = []
        self._num_bytes = 0
        self._slot: torch.Tensor | None = None
        self._view: torch.Tensor | None = None
        self._coming: Transfer | None = None
        self._leaving: Transfer = DONE
        self._merging: Transfer = DONE  # what the worker adds, or writes
        self._numel = capacity
        self._own = (0, capacity) if own is None else own
        if capacity:
            each = self._own[1] - self._own[0]
            for _ in range(capacity // each):
                self.grow(self._num_bytes + whole_pages(each * dtype.itemsize))

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def _slots(self) -> Slots:
        return self._tiers.slots[self._kind]

    def _parts_of(self, start: int, stop: int) -> list[Part]:
        """Return the parts of elements [start, stop)."""
        low = start * self._dtype.itemsize
        high = stop * self._dtype.itemsize
        return [part for part in self._parts if part.start < high and part.stop > low]

    def fetch(self) -> Transfer | None:
        if self._slot is None:
            self._merging.wait_on_host()
            slot = self._take()
            self._coming = self._move_used(self._tiers.read, slot)
        return self._coming

    def fetch_if_free(self, *, waits: bool = False) -> None:
        if self._slot is not None or not self._num_bytes or not self._merging.is_completed():
            return
        self._slot = self._slots.take_free(self._num_bytes, waits=waits)
        if self._slot is not None:
            self._show()
            self._coming = self._move_used(self._tiers.read, self._slot)

    def at(self) -> torch.Tensor:
        if self._slot is None:
            self._take()
        if self._coming is not None:
            self._tiers.wait_on_host(self._coming, Tier.DISK)
            self._coming = None
        assert self._view is not None
        return self._view

    def _take(self) -> torch.Tensor:
        self._slot = torch.empty(0, dtype=torch.uint8)
        if self._num_bytes:
            self._slot = self._slots.take(self._num_bytes)
        self._show()
        return self._slot

    def _give(self, slot: torch.Tensor, after: Transfer = DONE) -> None:
        if slot.numel():
            self._slots.give(slot, after)

    def _show(self) -> None:
        assert self._slot is not None
        if self._numel:
            self._view = self._slot[: self._numel * self._dtype.itemsize].view(self._dtype)
        else:
            self._view = self._slot[: self._num_bytes]

    def put(self) -> Transfer | None:
        if self._slot is None:
            return None
        self._leaving = self._move_used(self._tiers.write, self._slot)
        return self._leaving

    def drop(self) -> None:
        if self._slot is None:
            return
        if self._coming is not None:  # fetched, and not used after all
            self._coming.wait_on_host()
            self._coming = None
        self._give(self._slot, after=self._leaving)
        self._slot = self._view = None
        self._leaving = DONE

    def grow(self, num_bytes: int) -> None:
        more = num_bytes - self._num_bytes
        if more <= 0:
            return
        self._parts.append(Part(self._num_bytes, self._tiers.reserve(more, self._name)))
        before = self._num_bytes
        self._num_bytes = num_bytes
        if self._slot is None:
            return
        if self._slot.numel():
            self._slot = self._slots.extend(self._slot, num_bytes)
        else:
            self._slot = self._slots.take(num_bytes)
        self._slot[before:].zero_()
        self._show()

    def stored(self, dtype: torch.dtype, start: int, stop: int) -> Stored:
        self._merging.wait_on_host()
        return StoredOnDisk(self._tiers, tuple(self._parts), dtype, start, stop)

    def load(self, target: torch.Tensor, start: int = 0) -> Transfer:
        self._merging.wait_on_host()
        if self._tiers.host_is_device:
            return self._move(self._tiers.read, target, start)
        slot = self._slots.take(target.nbytes).view(target.dtype)
        read = self._move(self._tiers.read, slot, start)
        return self._tiers.read_to_device(read, slot, target, self._kind)

    def _move_used(self, move: Move, slot: torch.Tensor) -> Transfer:
        """Begin to move what `fetch` brings and `put` stores."""
        parts = self._parts
        if self._numel:
            parts = self._parts_of(*self._own)
        return _All([move(part.extent, part.of(slot), self._kind) for part in parts])

    def _move(self, move: Move, values: torch.Tensor, start: int) -> Transfer:
        """Begin to move `values` [n], of which the first is element `start`."""
        pieces = self._pieces(values, start)
        return _All([move(extent, piece, self._kind) for extent, piece in pieces])

    def _pieces(self, values: torch.Tensor, start: int) -> list[tuple[Extent, torch.Tensor]]:
        """Return what of `values` [n], uint8, lies in which extent."""
        memory = values.view(torch.uint8)
        first = start * values.itemsize
        parts = self._parts_of(start, start + values.numel())
        return [(part.extent, part.of(memory, first)) for part in parts]

    def settle(self) -> None:
        self._merging.wait_on_host()

    def store(
        self,
        source: torch.Tensor,
        start: int = 0,
        *,
        accumulate: bool = False,
        look: Look | None = None,
    ) -> Transfer:
        if look is not None and not accumulate:
            look(source)
        if self._tiers.host_is_device:
            if not accumulate:
                self._merging.wait_on_host()
                return self._move(self._tiers.write, source, start)
            self._merging = self._tiers.submit(partial(self._add, source, start, look))
            return self._merging
        # The worker adds gradients in disk slots: training must not hold these in front of it.
        slots = self._tiers.gradients_down if self._kind is Kind.GRAD else self._slots
        values = slots.take(source.nbytes).view(source.dtype)
        down = self._tiers.copy_down(source, values, self._kind)
        if not accumulate:  # it belongs to this step, whenever the worker comes to it
            self._tiers.count_written(self._kind, self._pieces(values, start))

        def arrive() -> None:
            down.wait_on_host()
            if accumulate:
                self._add(values, start, look)
                slots.give(values)
            else:
                slots.give(values, after=self._move(self._tiers.write_counted, values, start))

        self._merging = self._tiers.submit(arrive)
        return down

    def _add(self, values: torch.Tensor, start: int, look: Look | None) -> None:
        """Add `values`, in the worker."""
        total = self._slots.take(values.nbytes).view(values.dtype)
        self._move(self._tiers.read, total, start).wait_on_host()
        total.add_(values)
        if look is not None:
            look(total)
        self._slots.give(total, after=self._move(self._tiers.write, total, start))


class _All:
    """Several transfers as one."""

    def __init__(self, transfers: list[Transfer]) -> None:
        self._transfers = transfers

    def is_completed(self) -> bool:
        return all(transfer.is_completed() for transfer in self._transfers)

    def wait(self) -> None:
        for transfer in self._transfers:
            transfer.wait()

    def wait_on_host(self) -> None:
        for transfer in self._transfers:
            transfer.wait_on_host()
