"""Manifests of format 1, which list every fragment of every rank. They are read, never written.

fragments            tile every file, and every state of every tensor

file     | header | fragment | fragment | fragment |
         0   header_bytes                      num_bytes

state    | fragment of rank 0 | of rank 1 | of rank 2 |
         0                                          numel
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from operator import attrgetter
from typing import Annotated, Any

from pydantic import FailFast, TypeAdapter

from zrun_core.checkpoint.best import Best
from zrun_core.checkpoint.digest import combined
from zrun_core.checkpoint.manifest_checks import check_file_names, check_tensors
from zrun_core.checkpoint.manifest_fields import (
    ITEM_BYTES,
    MANIFEST,
    RANK,
    VALUE,
    Count,
    Digest,
    Name,
    NonZero,
    Text,
    Tree,
    contradict,
    exact_keys,
    first_twice,
    number_class,
    read,
)
from zrun_core.checkpoint.manifest_parts import (
    EarlyStop,
    FileInfo,
    Fragment,
    Layout,
    ModelInfo,
    Progress,
    SavedRank,
    Scaler,
    TensorInfo,
)
from zrun_core.checkpoint.record import OwnTensor, check_learnt, check_own

FORMAT = 1


@exact_keys
@dataclass(frozen=True)
class ListedFile:
    """One file: a safetensors header, then the fragments; one without tensors is all header.

    Attributes:
        digest: of the digests of header and fragments, in the order of the file.
    """

    name: Name
    num_bytes: Count
    header_bytes: Count
    header_digest: Digest
    digest: Digest

    @staticmethod
    def digest_of(header_digest: str, fragments: Iterable[Fragment]) -> str:
        return combined([header_digest, *(fragment.digest for fragment in fragments)])


@exact_keys
@dataclass(frozen=True)
class ListedManifest:
    """A manifest of format 1, with what its readers need of it.

    Attributes:
        files: those of the ranks, and those without tensors.
        fragments: of all files.
        rank_states: of every rank.
    """

    step: Count
    run_id: Name
    versions: dict[str, Text]
    job: Tree
    world_size: NonZero
    layout: Layout
    progress: Progress
    files: Annotated[list[ListedFile], FailFast()]
    tensors: Annotated[list[TensorInfo], FailFast()]
    fragments: Annotated[list[Fragment], FailFast()]
    rank_states: Annotated[list[SavedRank], FailFast()]
    model: ModelInfo | None = None
    format: Count = FORMAT

    def by_file(self) -> dict[str, list[Fragment]]:
        """Return the fragments of each file, in its order."""
        found: dict[str, list[Fragment]] = {file.name: [] for file in self.files}
        for fragment in self.fragments:
            found[fragment.file].append(fragment)
        for fragments in found.values():
            fragments.sort(key=attrgetter("offset", "num_bytes"))
        return found

    def by_state(self) -> dict[tuple[str, str], list[Fragment]]:
        """Return the fragments by tensor and state, in the order of the tensor."""
        found: dict[tuple[str, str], list[Fragment]] = defaultdict(list)
        for fragment in self.fragments:
            found[fragment.tensor, fragment.state].append(fragment)
        for fragments in found.values():
            fragments.sort(key=attrgetter("start", "stop"))
        return dict(found)

    def file_infos(self) -> list[FileInfo]:
        """Return the files as manifests have them now; none has a record."""
        own_bytes: dict[str, int] = defaultdict(int)
        for fragment in self.fragments:
            if fragment.state == RANK:
                own_bytes[fragment.file] += fragment.num_bytes
        return [
            FileInfo(
                name=file.name,
                num_bytes=file.num_bytes,
                header_bytes=file.header_bytes,
                own_bytes=own_bytes[file.name],
                record_bytes=0,
                digest=file.digest,
            )
            for file in self.files
        ]

    def tensor_infos(self) -> list[TensorInfo]:
        """Return the tensors with the formats of their states."""
        states: dict[str, dict[str, str]] = defaultdict(dict)
        for fragment in self.fragments:
            if fragment.state != RANK:
                states[fragment.tensor][fragment.state] = fragment.dtype
        return [replace(info, states=states.get(info.name, {})) for info in self.tensors]


def read_listed(raw: dict[str, Any]) -> ListedManifest:
    """Return a manifest of format 1, if every part of it can be believed.

    Raises:
        CheckpointError: a part is missing, or not of its type, or contradicts others.
    """
    listed = read(_adapter(), raw, "the manifest", _KINDS)
    check_file_names([file.name for file in listed.files])
    check_tensors(listed.tensors)
    for fragment in listed.fragments:
        num_bytes = (fragment.stop - fragment.start) * ITEM_BYTES[fragment.dtype]
        if fragment.start > fragment.stop or num_bytes != fragment.num_bytes:
            contradict(f"{fragment.in_words} is said to have {fragment.num_bytes} bytes")
    _check_ranks(listed)
    _check_files(listed)
    _check_states(listed)
    return listed


def _check_ranks(listed: ListedManifest) -> None:
    """Check that every rank has a state, with the orders of the models that there are."""
    found = sorted(each.rank for each in listed.rank_states)
    # The lengths first: a range of what a forger has written may be huge.
    if len(found) != listed.world_size or found != list(range(len(found))):
        contradict(f"it does not have the states of {listed.world_size} ranks")
    models = listed.layout.get("models")
    for each in listed.rank_states:
        check_learnt(each.learnt, models, f"rank_states of rank {each.rank}, learnt", MANIFEST)


def _check_files(listed: ListedManifest) -> None:
    """Check that every byte of every file belongs to the header or to one fragment."""
    known = {file.name for file in listed.files}
    for fragment in listed.fragments:
        if fragment.file not in known:
            contradict(f"fragments lie in {fragment.file}, which it does not list")
    by_file = listed.by_file()
    for file in listed.files:
        fragments = by_file[file.name]
        end = file.header_bytes
        for fragment in fragments:
            if fragment.offset < end:
                where = f"overlaps with the one before it in {file.name}"
                contradict(f"{fragment.in_words} {where}")
            if fragment.offset > end:
                contradict(f"{fragment.in_words} leaves a gap before it in {file.name}")
            end += fragment.num_bytes
        if end != file.num_bytes:
            contradict(f"{file.name} has {file.num_bytes} bytes, its parts {end}")
        twice = first_twice(fragment.key for fragment in fragments)
        if twice is not None:
            contradict(f"{file.name} has the key {twice[:200]} twice")
        if file.digest != file.digest_of(file.header_digest, fragments):
            contradict(f"the digest of {file.name} is not that of its parts")


def _check_states(listed: ListedManifest) -> None:
    """Check that every state of a tensor is there from its first element to its last, once."""
    tensors = {tensor.name: tensor for tensor in listed.tensors}
    for fragment in listed.fragments:
        if fragment.state != RANK and fragment.tensor not in tensors:
            contradict(f"{fragment.in_words} is of a tensor that it does not list")
    by_state = listed.by_state()
    for (name, state), fragments in by_state.items():
        first = fragments[0]
        if state == RANK:
            _check_rank_tensor(listed, fragments, tensors)
            continue
        _check_tiles(fragments, tensors[name].numel)
        if state == VALUE and number_class(first.dtype) != number_class(tensors[name].dtype):
            contradict(f"{first.in_words} is {first.dtype}, and the tensor {tensors[name].dtype}")
    for tensor in listed.tensors:
        if tensor.numel and (tensor.name, VALUE) not in by_state:
            contradict(f"there is no value of {tensor.name[:200]}")


def _check_tiles(fragments: Sequence[Fragment], numel: int) -> None:
    """Check that `fragments`, by start, are of one format and tile the range from 0 to `numel`."""
    first = fragments[0]
    if first.start != 0 or fragments[-1].stop != numel:
        contradict(f"{first.in_words} and what follows are not {numel} elements")
    for before, after in pairwise(fragments):
        if after.start < before.stop:
            where = f"overlaps with the end of the one before, {before.stop}"
            contradict(f"{after.in_words} {where}")
        if after.start > before.stop:
            where = f"does not begin at the end of the one before, {before.stop}"
            contradict(f"{after.in_words} {where}")
        if after.dtype != before.dtype:
            formats = f"is {after.dtype}, the one before it {before.dtype}"
            contradict(f"{after.in_words} {formats}")


def _check_rank_tensor(
    listed: ListedManifest, fragments: Sequence[Fragment], tensors: Mapping[str, TensorInfo]
) -> None:
    """Check what belongs to a rank: it is not divided.

    All `fragments` are of one name and of state RANK.
    """
    first = fragments[0]
    if len(fragments) > 1:
        contradict(f"{first.tensor[:200]} is there in parts")
    own = OwnTensor(first.tensor, first.dtype, first.stop)
    if check_own(own, tensors, MANIFEST) >= listed.world_size:
        contradict(f"{first.tensor[:200]} belongs to no rank")
    _check_tiles(fragments, first.stop)


@cache
def _adapter() -> TypeAdapter[ListedManifest]:
    return TypeAdapter(ListedManifest)


_KINDS: Mapping[str, type] = {  # by the field that holds them
    "the manifest": ListedManifest,
    "files": ListedFile,
    "tensors": TensorInfo,
    "fragments": Fragment,
    "rank_states": SavedRank,
    "model": ModelInfo,
    "scaler": Scaler,
    "early_stop": EarlyStop,
    "best": Best,
}
