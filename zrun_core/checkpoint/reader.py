"""From the fragments of a checkpoint to memory: each is read once, whatever of it goes where.

A range of a tensor is asked for in the memory order that the tensor has here, and fragments lie in
the order that it had when it was saved. What both have in common is one range if the orders are the
same, and else a few boxes, which are copied as strided views. No tensor is ever read as a whole.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from zrun_core.checkpoint.manifest_parts import Fragment, SavedRank, TensorInfo
from zrun_core.checkpoint.shard_file import DTYPES, check_header, read_fragment
from zrun_core.checkpoint.step_index import StepIndex
from zrun_core.distributed.transport import Group
from zrun_core.errors import CheckpointError
from zrun_core.memory.tensors import Extent, Overlap, overlaps

_READERS = 4  # threads; reading and digesting hold no lock
_AHEAD = 256  # fragments that wait for a thread
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

    def __init__(self, step: StepIndex, world: Group) -> None:
        """
        Args:
            world: the ranks that divide the work of verifying what none needs.
        """
        self._folder = step.folder
        self._manifest = step.manifest
        self._world = world
        self._known = by_name(step.manifest.tensors)
        self._index = step

    def check_files(self) -> None:
        """Verify sizes, headers and records of all files. Ranks divide the work.

        Raises:
            CheckpointError: one is damaged.
        """
        for file in self._manifest.files[self._world.index :: self._world.size]:
            check_header(self._folder, file, self._index.content(file.name).header_digest)

    def check_of_ranks(self, kind: str, first: int = 0) -> None:
        """Verify what ranks from `first` on had, and none needs. Ranks divide the work.

        Args:
            kind: the beginning of its names.

        Raises:
            CheckpointError: something is damaged.
        """
        ranks = range(first, self._manifest.world_size)
        for rank in ranks[self._world.index :: self._world.size]:
            self.rank_tensors(rank, kind)

    def fill(self, targets: Sequence[Target]) -> None:
        """Fill the memory of all `targets`.

        Raises:
            CheckpointError: a file is missing or damaged, or has no such tensor.
        """
        by_state: dict[tuple[str, str], list[Target]] = defaultdict(list)
        for target in targets:
            info = next((self._known[name] for name in target.names if name in self._known), None)
            if info is None or target.state not in info.states:
                raise CheckpointError(f"the checkpoint has no {target.state} of {target.names[0]}")
            by_state[info.name, target.state].append(target)
        pending: deque[Future[None]] = deque()
        with ThreadPoolExecutor(_READERS, thread_name_prefix="zrun-load") as pool:
            for task in self._tasks(by_state):
                pending.append(pool.submit(task))
                if len(pending) > _AHEAD:
                    pending.popleft().result()
            for done in pending:
                done.result()

    def _tasks(self, by_state: dict[tuple[str, str], list[Target]]) -> Iterator[Callable[[], None]]:
        """Yield what reads one fragment, for each that has something for a target.

        The targets come by tensor and state.
        """
        by_file: dict[str, dict[tuple[str, str], list[Target]]] = {}
        for (name, state), targets in by_state.items():
            for target in targets:
                for file in self._files_for(name, target):
                    wanted = by_file.setdefault(file, {}).setdefault((name, state), [])
                    if not wanted or wanted[-1] is not target:
                        wanted.append(target)
        for file, wanted_of in sorted(by_file.items()):
            for fragment in self._index.content(file).fragments:
                has = None
                into = []
                for target in wanted_of.get((fragment.tensor, fragment.state), ()):
                    has = has or self._extent(fragment)
                    if any(overlaps(has, target.extent)):
                        into.append(target)
                if into:
                    yield partial(self._read_for, fragment, into)

    def _files_for(self, name: str, target: Target) -> Iterator[str]:
        """Yield the files that have something of tensor `name` for a target."""
        info = self._known[name]
        extent = target.extent
        whole = Extent(info.shape, info.stride, 0, info.numel)
        if whole.order == extent.order:
            for span in self._index.spans(name, target.state, extent.start, extent.stop):
                yield span.file
            return
        for span in self._index.spans(name, target.state, 0, info.numel):
            has = Extent(info.shape, info.stride, span.start, span.stop)
            if any(overlaps(has, extent)):
                yield span.file

    def rank_state(self, rank: int) -> SavedRank | None:
        """Return what belongs to a rank, if there was such a rank.

        Raises:
            CheckpointError: it cannot be read.
        """
        return self._index.rank_state(rank)

    def rank_tensors(self, rank: int, prefix: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a rank's own whose names begin with `prefix`.

        Raises:
            CheckpointError: one is damaged.
        """
        found = self._index.own_fragments(rank)
        return {each.tensor: self._read(each) for each in found if each.tensor.startswith(prefix)}

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
