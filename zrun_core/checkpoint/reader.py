"""From the fragments of a checkpoint to memory: each is read once, whatever of it goes where.

A range of a tensor is asked for in the memory order that the tensor has here, and fragments lie in
the order that it had when it was saved. What both have in common is one range if the orders are the
same, and else a few boxes, which are copied as strided views. No tensor is ever read as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from zrun_core.checkpoint.manifest import Fragment, Manifest, TensorInfo
from zrun_core.checkpoint.manifest_fields import RANK
from zrun_core.checkpoint.shard_file import DTYPES, check_header, read_fragment
from zrun_core.distributed.transport import Group
from zrun_core.errors import CheckpointError
from zrun_core.memory.tensors import Extent, Overlap, overlaps

_READERS = 4  # threads; reading and digesting hold no lock
_TORCH = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class Target:
    """Memory for a flat range of one state of a tensor.

    Attributes:
        names: of the tensor; any of them will do.
        shape, stride: of the whole tensor; the range counts in its memory order.
        memory: [stop - start], of any format, on any device.
    """

    names: tuple[str, ...]
    state: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    memory: torch.Tensor

    @property
    def extent(self) -> Extent:
        return Extent(self.shape, self.stride, self.start, self.start + self.memory.numel())

    def place_of(self, extent: Extent, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the memory for all of `extent`, if values of `dtype` can be read to it."""
        start = extent.start - self.start
        stop = extent.stop - self.start
        is_inside = 0 <= start <= stop <= self.memory.numel()
        is_like = self.memory.dtype == dtype and self.memory.device.type == "cpu"
        if is_inside and is_like and extent.order == self.extent.order:
            return self.memory[start:stop]
        return None

    def take(self, values: torch.Tensor, of: Extent) -> None:
        """Copy what flat `values`, which are the extent `of` the tensor, have for this memory."""
        for box in overlaps(of, self.extent):
            _box(self.memory, box, 1).copy_(_box(values, box, 0))


def _box(flat: torch.Tensor, box: Overlap, side: int) -> torch.Tensor:
    """Return what one of two ranges shares with the other, a view of its memory."""
    offset = flat.storage_offset() + box.offsets[side]
    return flat.as_strided(box.sizes, box.strides[side], offset)


class Reader:
    """Fills flat ranges from the fragments of one checkpoint, each verified while it is read."""

    def __init__(self, folder: Path, manifest: Manifest, world: Group) -> None:
        self._folder = folder
        self._manifest = manifest
        self._world = world
        self._known = by_name(manifest.tensors)
        self._fragments: dict[tuple[str, str], list[Fragment]] = defaultdict(list)
        for fragment in manifest.fragments:
            self._fragments[fragment.tensor, fragment.state].append(fragment)

    def check_files(self) -> None:
        """Verify the headers of all files, which no rank needs. Ranks divide the work.

        Raises:
            CheckpointError: one is damaged.
        """
        for file in self._manifest.files[self._world.index :: self._world.size]:
            check_header(self._folder, file)

    def check_of_ranks(self, kind: str, first: int = 0) -> None:
        """Verify what ranks from `first` on had, and none needs. Ranks divide the work.

        Args:
            kind: the beginning of its names.

        Raises:
            CheckpointError: something is damaged.
        """
        found = [
            fragment
            for fragment in self._manifest.fragments
            if fragment.state == RANK and fragment.tensor.startswith(kind)
            if int(fragment.tensor.split("/")[1]) >= first
        ]
        for fragment in found[self._world.index :: self._world.size]:
            self._read(fragment)

    def fill(self, targets: Sequence[Target]) -> None:
        """Fill the memory of all `targets`.

        Raises:
            CheckpointError: a file is missing or damaged, or has no such tensor.
        """
        by_state: dict[tuple[str, str], list[Target]] = defaultdict(list)
        for target in targets:
            info = next((self._known[name] for name in target.names if name in self._known), None)
            if info is None or (info.name, target.state) not in self._fragments:
                raise CheckpointError(f"the checkpoint has no {target.state} of {target.names[0]}")
            by_state[info.name, target.state].append(target)
        tasks: list[Callable[[], None]] = []
        for (name, state), wanted in by_state.items():
            extents = [(target, target.extent) for target in wanted]
            for fragment in self._fragments[name, state]:
                has = self._extent(fragment)
                into = [target for target, extent in extents if any(overlaps(has, extent))]
                if into:
                    tasks.append(partial(self._read_for, fragment, into))
        with ThreadPoolExecutor(_READERS, thread_name_prefix="zrun-load") as pool:
            for done in [pool.submit(task) for task in tasks]:
                done.result()

    def rank_tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a rank's own whose names begin with `prefix`."""
        found = [
            each
            for each in self._manifest.fragments
            if each.state == RANK and each.tensor.startswith(prefix)
        ]
        return {fragment.tensor: self._read(fragment) for fragment in found}

    def _read(self, fragment: Fragment) -> torch.Tensor:
        data = torch.empty(fragment.stop - fragment.start, dtype=_TORCH[fragment.dtype])
        read_fragment(self._folder, fragment, data)
        return data

    def _extent(self, fragment: Fragment) -> Extent:
        info = self._known[fragment.tensor]
        return Extent(info.shape, info.stride, fragment.start, fragment.stop)

    def _read_for(self, fragment: Fragment, targets: Sequence[Target]) -> None:
        """Read a fragment, for all that it has something for."""
        has = self._extent(fragment)
        if len(targets) == 1:
            memory = targets[0].place_of(has, _TORCH[fragment.dtype])
            if memory is not None:
                read_fragment(self._folder, fragment, memory)
                return
        values = self._read(fragment)
        for target in targets:
            target.take(values, has)


def by_name(tensors: Sequence[TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors by every name that they have."""
    return {name: info for info in tensors for name in (info.name, *info.aliases)}
