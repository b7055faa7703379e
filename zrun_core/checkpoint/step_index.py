"""Where the states of a step lie: in which files, and as which fragments of each.

    manifest, format 2     who has written what follows from it; the offsets and digests of a file,
                           from its record, which is read when they are asked for
    manifest, format 1     lists all

So of a step of thousands of ranks, as much is in memory as has been asked for last.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import attrgetter
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from zrun_core.checkpoint.digest import opened, read_into
from zrun_core.checkpoint.divisions import Divisions
from zrun_core.checkpoint.format_one import ListedManifest
from zrun_core.checkpoint.manifest import Manifest, PartOf
from zrun_core.checkpoint.manifest_fields import ITEM_BYTES, RANK, contradict, first_twice
from zrun_core.checkpoint.manifest_parts import FileInfo, Fragment, SavedRank, key_of
from zrun_core.checkpoint.model_names import join, own_name
from zrun_core.checkpoint.record import OF_RANK, RankRecord
from zrun_core.errors import CheckpointError

_KEPT = 32  # files whose fragments stay in memory, 100 KB each


class FileSpan(NamedTuple):
    """A flat range of a tensor that lies in one file."""

    file: str
    start: int
    stop: int


@dataclass(frozen=True)
class FileContent:
    """What a file consists of.

    Attributes:
        header_digest: of the header; of a file without tensors, of all of it.
        fragments: in the order of the file; what comes after the last is the record.
        state: of the rank whose file it is, where the file has it.
    """

    header_digest: str
    fragments: Sequence[Fragment] = ()
    state: SavedRank | None = None


class StepIndex(ABC):
    """The files of one step, and what they consist of."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest

    @abstractmethod
    def content(self, name: str) -> FileContent:
        """Return what a file consists of.

        Raises:
            CheckpointError: its record is missing, damaged or does not fit the manifest.
        """

    @abstractmethod
    def spans(self, tensor: str, state: str, start: int, stop: int) -> Iterator[FileSpan]:
        """Yield the files that have some of elements [start, stop) of a state, in their order."""

    @abstractmethod
    def rank_state(self, rank: int) -> SavedRank | None:
        """Return what belongs to a rank, if there was such a rank.

        Raises:
            CheckpointError: as of `content`.
        """

    @abstractmethod
    def own_fragments(self, rank: int) -> list[Fragment]:
        """Return the fragments of state RANK that belong to a rank.

        Raises:
            CheckpointError: as of `content`.
        """

    def fragments(self) -> Iterator[Fragment]:
        """Yield all, file after file.

        Raises:
            CheckpointError: as of `content`.
        """
        for file in self.manifest.files:
            yield from self.content(file.name).fragments


def open_index(folder: Path, manifest: Manifest) -> StepIndex:
    """Return the index of a step.

    Args:
        manifest: of the step, or the part of it that is about one of several models.
    """
    source = manifest.source
    if isinstance(source, PartOf):
        return OneModel(open_index(folder, source.whole), manifest, source.model)
    if isinstance(source, ListedManifest):
        return _Listed(folder, manifest, source)
    return _Derived(folder, manifest)


class _Derived(StepIndex):
    """Of format 2: arithmetic, and the records of ranks."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder, manifest)
        self._tensors = {info.name: info for info in manifest.tensors}
        self._ranks = {
            file.name: rank for rank, file in enumerate(manifest.files[: manifest.world_size])
        }
        self._lock = Lock()
        self._keep = lru_cache(_KEPT)(self._read)

    @cached_property
    def _divisions(self) -> Divisions:
        return Divisions(self.manifest.divisions)

    def content(self, name: str) -> FileContent:
        with self._lock:  # threads that want the same record read it once
            return self._keep(name)

    def _read(self, name: str) -> FileContent:
        rank = self._ranks.get(name)
        if rank is None:
            (info,) = (file for file in self.manifest.files if file.name == name)
            return FileContent(info.digest)
        info = self.manifest.files[rank]
        where = f"the record of {self.folder / name}"
        record = RankRecord.from_json(_record_bytes(self.folder, info), where)
        ranges = [
            _Range(key_of(span.tensor, state, span.start), *span, state, dtype)
            for span in self._divisions.of_rank(rank)
            for state, dtype in self._tensors[span.tensor].states.items()
        ]
        models = self.manifest.layout.get("models")
        record.check(rank, len(ranges), info.own_bytes, self._tensors, models, where)
        for own in record.own:
            key = key_of(own.name, RANK, 0)
            ranges.append(_Range(key, own.name, 0, own.numel, RANK, own.dtype))
        twice = first_twice(each.key for each in ranges)
        if twice is not None:
            contradict(f"two fragments have the key {twice[:200]}", where)
        fragments = _in_file(ranges, info, record.fragments)
        return FileContent(record.header, fragments, SavedRank(rank, record.rng, record.learnt))

    def spans(self, tensor: str, state: str, start: int, stop: int) -> Iterator[FileSpan]:
        for span in self._divisions.of_tensor(tensor, start, stop):
            yield FileSpan(self.manifest.files[span.rank].name, span.start, span.stop)

    def rank_state(self, rank: int) -> SavedRank | None:
        if rank >= self.manifest.world_size:
            return None
        return self.content(self.manifest.files[rank].name).state

    def own_fragments(self, rank: int) -> list[Fragment]:
        found = self.content(self.manifest.files[rank].name).fragments
        return [each for each in found if each.state == RANK]


class _Range(NamedTuple):
    """A flat range of a state, before it is known where in a file it lies."""

    key: str
    tensor: str
    start: int
    stop: int
    state: str
    dtype: str


def _in_file(
    ranges: Sequence[_Range], info: FileInfo, digests: Sequence[str]
) -> tuple[Fragment, ...]:
    """Return the fragments of a file, in its order: as `shard_file.write_shard` has it.

    The ranges come in any order, the digests in that of the file.
    """
    found = []
    offset = info.header_bytes
    in_order = sorted(ranges, key=lambda each: (-ITEM_BYTES[each.dtype], each.key))
    for each, digest in zip(in_order, digests, strict=True):
        num_bytes = (each.stop - each.start) * ITEM_BYTES[each.dtype]
        found.append(
            Fragment(
                tensor=each.tensor,
                state=each.state,
                start=each.start,
                stop=each.stop,
                dtype=each.dtype,
                file=info.name,
                key=each.key,
                offset=offset,
                num_bytes=num_bytes,
                digest=digest,
            )
        )
        offset += num_bytes
    return tuple(found)


def _record_bytes(folder: Path, info: FileInfo) -> bytes:
    """Return the record at the end of a file.

    Raises:
        CheckpointError: the file is missing or of another size, or the record is damaged.
    """
    path = folder / info.name
    with opened(folder, info.name) as file:
        try:
            num_bytes = os.fstat(file).st_size
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        if num_bytes != info.num_bytes:  # before memory is taken for what the manifest says
            raise CheckpointError(f"{path} has {num_bytes} bytes, not {info.num_bytes}")
        text = bytearray(info.record_bytes)
        found = read_into(file, path, num_bytes - info.record_bytes, memoryview(text))
    if found != info.digest:
        raise CheckpointError(f"{path} is damaged: the checksum of its record is wrong")
    return bytes(text)


class _Listed(StepIndex):
    """Of format 1: nothing is read."""

    def __init__(self, folder: Path, manifest: Manifest, listed: ListedManifest) -> None:
        super().__init__(folder, manifest)
        self._contents = {
            file.name: FileContent(file.header_digest, fragments)
            for file, fragments in zip(listed.files, listed.by_file().values(), strict=True)
        }
        self._by_state = listed.by_state()
        self._states = {each.rank: each for each in listed.rank_states}
        self._own: dict[int, list[Fragment]] = defaultdict(list)
        for fragment in listed.fragments:
            match = OF_RANK.fullmatch(fragment.tensor) if fragment.state == RANK else None
            if match is not None:
                self._own[int(match[1])].append(fragment)

    def content(self, name: str) -> FileContent:
        return self._contents[name]

    def spans(self, tensor: str, state: str, start: int, stop: int) -> Iterator[FileSpan]:
        fragments = self._by_state.get((tensor, state), [])
        at = max(0, bisect_right(fragments, start, key=attrgetter("start")) - 1)
        for fragment in fragments[at:]:
            if fragment.start >= stop:
                return
            low = max(start, fragment.start)
            high = min(stop, fragment.stop)
            if low < high:
                yield FileSpan(fragment.file, low, high)

    def rank_state(self, rank: int) -> SavedRank | None:
        return self._states.get(rank)

    def own_fragments(self, rank: int) -> list[Fragment]:
        return self._own.get(rank, [])


class OneModel(StepIndex):
    """Of one of several models, by its own names."""

    def __init__(self, whole: StepIndex, manifest: Manifest, model: str) -> None:
        super().__init__(whole.folder, manifest)
        self._whole = whole
        self._model = model

    def content(self, name: str) -> FileContent:
        whole = self._whole.content(name)
        return replace(whole, fragments=self._own_of(whole.fragments))

    def spans(self, tensor: str, state: str, start: int, stop: int) -> Iterator[FileSpan]:
        return self._whole.spans(join(self._model, tensor), state, start, stop)

    def rank_state(self, rank: int) -> SavedRank | None:
        whole = self._whole.rank_state(rank)
        return None if whole is None else replace(whole, learnt=whole.learnt[self._model])

    def own_fragments(self, rank: int) -> list[Fragment]:
        return self._own_of(self._whole.own_fragments(rank))

    def _own_of(self, fragments: Sequence[Fragment]) -> list[Fragment]:
        found = []
        for each in fragments:
            own = own_name(self._model, each.tensor, is_rank_state=each.state == RANK)
            if own is not None:
                found.append(replace(each, tensor=own))
        return found
