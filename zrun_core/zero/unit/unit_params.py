"""The parameters of a unit: sharded between uses, whole in use, wherever they live.

                 begin_fetch             unshard                   wait_for_unshard
    home  ──►  own shard in `full`  ──►  foreign shards gathered  ──►  the module's parameters
          ◄──                       ◄──                           ◄──
       write_back                       reshard

What is kept between uses lives in a `Home`: the own shard, or all parameters where there is nobody
to gather them from, or no reason to let them go. On the device that is the memory in which they are
used, and nothing is fetched. Elsewhere it is the shard alone, which comes before the others do.

An update runs beside training where the record is elsewhere: see `update_side.py`. Until it is over
the parameters count as sharded, and `unshard` waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING

import torch

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.handle import Handle
from zrun_core.memory.arena import (
    PagePool,
    PageWindow,
    ResidentWindow,
    StorageMeter,
    StorageWindow,
    Window,
    can_move_pages,
    flat_buffer,
)
from zrun_core.memory.buffers import Kind, Placement, Tier
from zrun_core.memory.layout import ParamSlot, UnitLayout
from zrun_core.tiers.stored import Stored
from zrun_core.tiers.transfer import DONE, Transfer
from zrun_core.zero.unit.home import Home, InPlace, fetch_now
from zrun_core.zero.unit.home_elsewhere import AwayHome

if TYPE_CHECKING:
    from zrun_core.zero.unit.flat_unit import FlatUnit


class UnitState(Enum):
    """The valid parameters of a unit, and so what occupies memory.

    SHARDED: the own shard is valid. A unit that is resharded after use has memory for this shard
        only; another one has memory for all of it, with the foreign shards of the last step.
    FETCHING: memory of the whole unit; the own shard is coming from its home on another tier.
    UNSHARDING: memory of the whole unit; the own shard is valid, the foreign ones are arriving.
    UNSHARDED: memory of the whole unit, all of it valid.
    """

    SHARDED = "sharded"
    FETCHING = "fetching"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


class UnitParams:
    """The parameters of one unit on this rank, in compute dtype.

    Attributes:
        state: which of them are valid.
        reshard_after_use: only the own shard stays in memory between uses.
        home: of what is kept between uses, elements `kept_range` of the unit.
        windows: memory for all parameters; several where there are older versions of them, which
            micro-batches under way use: see `versions.py`.
        window: the one with the newest parameters.
        full: [padded_numel] of that window. The address is constant where there is one window;
            without memory while the unit is resharded.
        shard: [shard_numel] of `full`, this rank's part.
        views: of `full`, one for each of the module's parameters; none until there is memory.
    """

    def __init__(self, unit: FlatUnit, device: torch.device, pool: PagePool | StorageMeter) -> None:
        """Take memory for all parameters, and for their home."""
        layout, placement = unit.layout, unit.placement
        self._unit = unit
        self._layout = layout
        self._own_range = layout.shard_range(unit.shard.index)
        away = placement.param is not Tier.DEVICE
        # A rank that has all of it, on the device, would have nothing to gather it from.
        leaves = unit.shard.size > 1 or away
        self.reshard_after_use = (
            leaves and layout.numel > 0 and unit.policy.reshard_after_use(layout)
        )
        self.state = UnitState.SHARDED if self.reshard_after_use else UnitState.UNSHARDED
        self._away: AwayHome | None = None
        self._handle: Handle | None = None
        self._comm: Comm | None = None  # that gathered it
        self._fetching: Transfer = DONE
        num_windows = unit.policy.num_versions(unit.mesh_info) if unit.trainable else 1
        self.windows = [self._make_window(device, pool, away=away) for _ in range(num_windows)]
        if away:
            self._away = unit.make_away(Kind.PARAM, layout.shard_numel, layout.dtype)
        self.home: Home
        self.use_window(self.windows[0])
        # Shape of the parameter, no memory, NaN wherever it is read; torch refuses to write to it.
        nowhere = torch.full((), float("nan"), dtype=layout.dtype, device=device)
        self._placeholders = [nowhere.expand(slot.shape) for slot in layout.slots]

    # Memory

    def _make_window(
        self, device: torch.device, pool: PagePool | StorageMeter, *, away: bool
    ) -> Window:
        layout = self._layout
        if not self.reshard_after_use:
            whole = flat_buffer(layout.padded_numel, layout.dtype, device)
            return ResidentWindow(whole, self._own_range)
        kept = (0, 0) if away else self._own_range
        if isinstance(pool, PagePool):
            return PageWindow(layout.padded_numel, kept, layout.dtype, pool)
        return StorageWindow(layout.padded_numel, kept, layout.dtype, device, pool)

    def use_window(self, window: Window) -> None:
        """Have the newest parameters in `window` from now on, whatever it holds."""
        self.window = window
        self.full = window.full
        self.shard = window.shard
        self.views: list[torch.Tensor] = []
        if not isinstance(window, StorageWindow):
            self._make_views()
        # The elements that this rank updates: not a shard where replicas deal it out.
        self._updated = self.shard
        if self._unit.updated_range != self._own_range:
            self._updated = self._unit.local_part(self.full)
        if self._away is None:
            self.home = InPlace(self.shard if self.reshard_after_use else self.full)
        else:
            self.home = self._away

    def _make_views(self) -> None:
        """Make the views of `full`, which takes memory: a storage that is resized has it at times.

        See `StorageWindow`. Once made they are good for life: the storage stays the same.
        """
        self.views = self._unit.views_of(self.full)
        if self._away is not None and self.reshard_after_use:
            self.shard = self._own_slice()

    def _own_slice(self) -> torch.Tensor:
        start, stop = self._own_range
        return self.full[start:stop]

    @property
    def is_elsewhere(self) -> bool:
        """True if their home is not on the device."""
        return self._away is not None

    @property
    def device(self) -> torch.device:
        """The device that computes with them."""
        return self.full.device

    @property
    def kept_range(self) -> tuple[int, int]:
        """First and last + 1 of the elements that the home has."""
        if self.reshard_after_use or self.is_elsewhere:
            return self._own_range
        return 0, self._layout.padded_numel

    @property
    def is_kept_unsharded(self) -> bool:
        """True if all parameters are valid here from use to use."""
        return not self.reshard_after_use and self.state is UnitState.UNSHARDED

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of permanent memory; some share it."""
        yield from (window.full for window in self.windows)
        yield from (window.shard for window in self.windows)
        if isinstance(self.home, InPlace):
            yield self.home.at()

    # Passes

    def data(self) -> list[torch.Tensor]:
        """Return what the module's parameters point at: views of `full` once it had memory."""
        return self.views or self._placeholders

    def show(self) -> None:
        """Point the module's parameters at the unit's memory, or at placeholders while sharded."""
        views = self._placeholders
        if self.state is UnitState.UNSHARDED:
            views = self.views
        for param, view in zip(self._unit.params, views, strict=True):
            param.data = view

    def begin_fetch(self) -> None:
        """Begin to bring the own shard from its home, if that is elsewhere and it is not here."""
        if self._away is None or self.state is not UnitState.SHARDED:
            return
        self._unit.update_side.wait_to_unshard()
        self.window.acquire()
        self.state = UnitState.FETCHING
        assert self._unit.tiers is not None
        with self._unit.tiers.spans.named("fetch", self._unit.name):
            self._fetching = self._away.load(self._own_slice())

    def _end_fetch(self) -> None:
        """Wait for the own shard."""
        if self._fetching is not DONE:
            assert self._unit.tiers is not None
            self._unit.tiers.wait(self._fetching, self._unit.placement.param)
            self._fetching = DONE

    def unshard(self, comm: Comm) -> None:
        """Begin to gather the parameters, unless they are here or on their way.

        The module sees them after `wait_for_unshard`.
        """
        if self.state not in (UnitState.SHARDED, UnitState.FETCHING):
            return
        self._unit.update_side.wait_to_unshard()
        if self._away is None:
            self.window.acquire()
        else:
            self.begin_fetch()
            if self._unit.shard.size > 1:  # the others are sent what has come
                self._end_fetch()
        if not self.views:
            self._make_views()
        self.state = UnitState.UNSHARDING
        self._comm = comm
        self._handle = self._unit.exchange.all_gather(comm, self._unit)

    def wait_for_unshard(self) -> None:
        """Wait for the gather that `unshard` began, and give the module its parameters."""
        if self.state is UnitState.UNSHARDED:
            return
        assert self._handle is not None, "unshard comes first"
        self._end_fetch()
        self._handle.wait()
        self._handle = None
        self.state = UnitState.UNSHARDED
        self.show()

    def reshard(self) -> None:
        """Keep the own shard only, and release the memory of the foreign ones."""
        if not self.reshard_after_use:
            return
        if self.state is UnitState.SHARDED:
            return
        self._end_fetch()
        if self._handle is not None:  # prefetched, and not used after all
            self._handle.wait()
            self._handle = None
        self.state = UnitState.SHARDED
        self.show()
        if self.is_elsewhere and self._comm is not None:
            self._comm.settle()  # other ranks may still read the own shard, which goes
        self.window.release()

    def mark_stale(self) -> None:
        """Have the next `unshard` gather what other ranks update, or wait for an update here."""
        assert self._handle is None
        if self.reshard_after_use:
            self.reshard()
        self.state = UnitState.SHARDED
        self.show()

    def mark_valid(self) -> None:
        """After an update of all elements by this rank: what is kept whole is valid again."""
        if self.state is UnitState.SHARDED and not self.reshard_after_use:
            self.state = UnitState.UNSHARDED
            self.show()

    # Updates, and what looks between two steps

    @property
    def updated(self) -> torch.Tensor:
        """[updated range]: the elements that this rank updates, once they were fetched."""
        return self._updated if self._away is None else self.home.at()

    def fetch(self) -> torch.Tensor:
        """Fetch what is kept, and return the elements that this rank updates."""
        fetch_now(self.home)
        return self.updated

    def kept(self) -> tuple[torch.Tensor, int]:
        """Fetch what is kept, and return it, with the number of its first element."""
        return fetch_now(self.home), self.kept_range[0]

    def stored(self, start: int, stop: int) -> torch.Tensor | Stored:
        """Return elements [start, stop) of the unit as they are stored. Nothing is fetched."""
        first = self.kept_range[0]
        size = self._layout.dtype.itemsize
        dtype = self._layout.dtype
        return self.home.stored(dtype, (start - first) * size, (stop - first) * size)

    def fill(self, sources: list[torch.Tensor]) -> None:
        """Fill what is kept with the parameters' full values; see `FlatUnit.load`."""
        kept = self.home.at()
        if self.is_elsewhere:
            kept.zero_()  # memory that others have had
        copy_elements(self._layout, kept, self.kept_range, sources)
        self.home.put()
        self.home.drop()

    def write_back(self) -> None:
        """Keep what user code wrote to the unsharded parameters."""
        if self._away is not None:
            self._away.store(self._own_slice(), accumulate=False).wait_on_host()
        elif isinstance(self.window, StorageWindow):  # elsewhere the shard is a slice of `full`
            self.shard.copy_(self._own_slice())
        self.home.put()

    def take_window(self) -> torch.Tensor:
        """Return room on the device for parameters that are about to be stored in their home.

        Returns:
            [updated range], until `give_window`.
        """
        self.reshard()
        self.window.acquire()
        return self._own_slice()

    def store_window(self) -> Transfer:
        """Begin to store what was written there. Returns what `give_window` has to wait for."""
        assert self._away is not None
        return self._away.store(self._own_slice(), accumulate=False)

    def give_window(self) -> None:
        """Give back the room that `take_window` took."""
        self.window.release()


def moves_pages(device: str) -> bool:
    """Return whether units are assembled from pages of a pool. See [Note: constant addresses]."""
    return device == "cpu" and can_move_pages()


def is_read_in_place(device: str, placement: Placement) -> bool:
    """Return whether states on the host and on disk are read straight to where they are used.

    A disk is read into whole pages. Where pages do not move, parameters are assembled in storages
    of the allocator, which begin anywhere: a CPU copies there what was read, as for a GPU.
    """
    return device == "cpu" and (placement.param is not Tier.DISK or can_move_pages())


def window_pool(device: torch.device, num_bytes: int) -> PagePool | StorageMeter:
    """Return the memory for unsharded units on this device; `num_bytes` are foreseen."""
    return PagePool(num_bytes) if moves_pages(device.type) else StorageMeter(num_bytes)


def copy_elements(
    layout: UnitLayout,
    target: torch.Tensor,
    elements: tuple[int, int],
    sources: list[torch.Tensor],
) -> None:
    """Copy the parameters that lie in `elements` of a unit to `target` [stop - start].

    Args:
        sources: full value of each parameter, as in `layout.slots`. One on the meta device is
            skipped.
    """
    start, stop = elements
    for piece in layout.pieces(start, stop):
        source = sources[piece.index]
        slot = piece.slot
        if source.is_meta:
            continue
        if source.stride() != slot.stride:
            source = _with_stride(source, slot)
        # The piece in the source's memory order: what precedes it in its slot is not in range.
        first = start + piece.start - slot.offset
        size = (piece.stop - piece.start,)
        part = source.as_strided(size, (1,), source.storage_offset() + first)
        target[piece.start : piece.stop].copy_(part)


def _with_stride(source: torch.Tensor, slot: ParamSlot) -> torch.Tensor:
    """Return a copy of `source` in the memory order of `slot`."""
    target = torch.empty_strided(slot.shape, slot.stride, dtype=source.dtype, device=source.device)
    return target.copy_(source)
