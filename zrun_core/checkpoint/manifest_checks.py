"""The checks that the parts of a manifest do not contradict each other, once each is of its type.

Fragments tile every file, and every state of every tensor:

    file     | header | fragment | fragment | fragment |
             0   header_bytes                      num_bytes

    state    | fragment of rank 0 | of rank 1 | of rank 2 |
             0                                          numel

So whatever is read later lies in a file that is listed, and no element is missing or there twice.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, NoReturn

from pydantic import TypeAdapter

from zrun_core.checkpoint.manifest_fields import (
    ITEM_BYTES,
    LARGEST,
    MANIFEST,
    RANK,
    VALUE,
    Text,
    exact_keys,
    number_class,
    read,
    refuse,
)

if TYPE_CHECKING:
    from zrun_core.checkpoint.manifest import Fragment, Manifest, TensorInfo

_MAX_DIMS = 64
_OF_RANK = re.compile(r"(?:rng|buffer)/(0|[1-9]\d{0,9})/(.+)")


@exact_keys
@dataclass(frozen=True)
class _LearntOrder:
    """The order of the reductions of one model, as its reducer saves it."""

    order: list[Text] | None
    late: list[Text]


@cache
def _order_adapter() -> TypeAdapter[_LearntOrder]:
    return TypeAdapter(_LearntOrder)


def check_consistency(manifest: Manifest) -> None:
    """Refuse a manifest whose parts contradict each other.

    Raises:
        CheckpointError: the message names the first contradiction.
    """
    _check_names(manifest)
    for tensor in manifest.tensors:
        _check_dense(tensor)
    for fragment in manifest.fragments:
        num_bytes = (fragment.stop - fragment.start) * ITEM_BYTES[fragment.dtype]
        if fragment.start > fragment.stop or num_bytes != fragment.num_bytes:
            _contradict(f"{_in_words(fragment)} is said to have {fragment.num_bytes} bytes")
    _check_ranks(manifest)
    _check_files(manifest)
    _check_states(manifest)


def _contradict(problem: str) -> NoReturn:
    refuse(f"is not consistent: {problem}")


def _check_names(manifest: Manifest) -> None:
    """Check that no file and no tensor is there twice."""
    names = [file.name for file in manifest.files]
    if MANIFEST in names:
        _contradict(f"it lists {MANIFEST} as a file of tensors")
    twice = _first_twice(names)
    if twice is not None:
        _contradict(f"it lists the file {twice} twice")
    twice = _first_twice(name for info in manifest.tensors for name in (info.name, *info.aliases))
    if twice is not None:
        _contradict(f"it names the tensor {twice[:200]} twice")


def _first_twice(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _check_dense(tensor: TensorInfo) -> None:
    """Check that the elements fill the memory without gaps, in whatever order of the dimensions.

    [2, 3] may have the strides (3, 1) or (1, 2); a dimension of one element may have any.
    """
    num_dims = len(tensor.shape)
    if num_dims != len(tensor.stride) or num_dims > _MAX_DIMS or tensor.numel > LARGEST:
        _contradict(f"the tensor {tensor.name[:200]} has no possible shape")
    if tensor.numel == 0:
        return
    expected = 1
    for stride, size in sorted(zip(tensor.stride, tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            _contradict(f"the strides of {tensor.name[:200]} leave gaps or overlap")
        expected *= size


def _check_ranks(manifest: Manifest) -> None:
    """Check that every rank has a state, with the orders of the models that there are."""
    found = sorted(each.rank for each in manifest.rank_states)
    # The lengths first: a range of what a forger has written may be huge.
    if len(found) != manifest.world_size or found != list(range(len(found))):
        _contradict(f"it does not have the states of {manifest.world_size} ranks")
    models = manifest.layout.get("models")
    for each in manifest.rank_states:
        where = f"rank_states of rank {each.rank}, learnt"
        orders = [each.learnt]
        if models is not None:
            if each.learnt.keys() != models.keys():
                _contradict(f"{where}: not of the models in layout")
            orders = list(each.learnt.values())
        for order in orders:
            read(_order_adapter(), order, where, {where: _LearntOrder})


def _check_files(manifest: Manifest) -> None:
    """Check that every byte of every file belongs to the header or to one fragment."""
    by_file: dict[str, list[Fragment]] = defaultdict(list)
    for fragment in manifest.fragments:
        by_file[fragment.file].append(fragment)
    for file in manifest.files:
        fragments = sorted(by_file.pop(file.name, ()), key=attrgetter("offset", "num_bytes"))
        end = file.header_bytes
        for fragment in fragments:
            if fragment.offset < end:
                where = f"overlaps with the one before it in {file.name}"
                _contradict(f"{_in_words(fragment)} {where}")
            if fragment.offset > end:
                _contradict(f"{_in_words(fragment)} leaves a gap before it in {file.name}")
            end += fragment.num_bytes
        if end != file.num_bytes:
            _contradict(f"{file.name} has {file.num_bytes} bytes, its parts {end}")
        twice = _first_twice(fragment.key for fragment in fragments)
        if twice is not None:
            _contradict(f"{file.name} has the key {twice[:200]} twice")
        if file.digest != file.digest_of(file.header_digest, fragments):
            _contradict(f"the digest of {file.name} is not that of its parts")
    for name in by_file:
        _contradict(f"fragments lie in {name}, which it does not list")


def _check_states(manifest: Manifest) -> None:
    """Check that every state of a tensor is there from its first element to its last, once."""
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    by_state: dict[tuple[str, str], list[Fragment]] = defaultdict(list)
    for fragment in manifest.fragments:
        if fragment.state != RANK and fragment.tensor not in tensors:
            _contradict(f"{_in_words(fragment)} is of a tensor that it does not list")
        by_state[fragment.tensor, fragment.state].append(fragment)
    for (name, state), fragments in by_state.items():
        fragments.sort(key=attrgetter("start", "stop"))
        if state == RANK:
            _check_rank_tensor(manifest, fragments, tensors)
            continue
        _check_tiles(fragments, tensors[name].numel)
        if state == VALUE:
            _check_class(fragments[0], tensors[name])
    for tensor in manifest.tensors:
        if tensor.numel and (tensor.name, VALUE) not in by_state:
            _contradict(f"there is no value of {tensor.name[:200]}")


def _check_tiles(fragments: Sequence[Fragment], numel: int) -> None:
    """Check that `fragments`, by start, are of one format and tile the range from 0 to `numel`."""
    first = fragments[0]
    if first.start != 0 or fragments[-1].stop != numel:
        _contradict(f"{_in_words(first)} and what follows are not {numel} elements")
    for before, after in pairwise(fragments):
        if after.start < before.stop:
            where = f"overlaps with the end of the one before, {before.stop}"
            _contradict(f"{_in_words(after)} {where}")
        if after.start > before.stop:
            where = f"does not begin at the end of the one before, {before.stop}"
            _contradict(f"{_in_words(after)} {where}")
        if after.dtype != before.dtype:
            formats = f"is {after.dtype}, the one before it {before.dtype}"
            _contradict(f"{_in_words(after)} {formats}")


def _check_rank_tensor(
    manifest: Manifest, fragments: Sequence[Fragment], tensors: Mapping[str, TensorInfo]
) -> None:
    """Check a stream of a rank, or a buffer that differs from the first rank's: it is not divided.

    Args:
        manifest: what both are of.
        fragments: all of one name and of state RANK.
        tensors: those of the model by name, of which a buffer is one.
    """
    first = fragments[0]
    match = _OF_RANK.fullmatch(first.tensor)
    if match is None or int(match[1]) >= manifest.world_size:
        _contradict(f"{first.tensor[:200]} belongs to no rank")
    if len(fragments) > 1:
        _contradict(f"{first.tensor[:200]} is there in parts")
    numel = first.stop
    if first.tensor.startswith("buffer/"):
        info = tensors.get(match[2])
        if info is None:
            _contradict(f"{first.tensor[:200]} is of a tensor that it does not list")
        _check_class(first, info)
        numel = info.numel
    _check_tiles(fragments, numel)


def _check_class(fragment: Fragment, info: TensorInfo) -> None:
    """Check that the numbers of a fragment are of the same class as those of its tensor."""
    if number_class(fragment.dtype) != number_class(info.dtype):
        _contradict(f"{_in_words(fragment)} is {fragment.dtype}, and the tensor {info.dtype}")


def _in_words(fragment: Fragment) -> str:
    state = fragment.state[:200]
    tensor = fragment.tensor[:200]
    return f"{state} of {tensor}, elements {fragment.start} to {fragment.stop}"
