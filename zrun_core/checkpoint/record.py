"""The record of a rank: what is known of its file and its state, at the end of that file.

    rank-00003.safetensors    | header | fragment | fragment | ... | record |

It has the digests of header and fragments, the manifest has its own: so one digest per rank vouches
for all, and a rank that loads reads the records of the files that it needs, and no others. Which
fragments there are it does not say: they follow from the manifest. It lists those that are of the
rank itself, of state RANK.

To other programs it is one more tensor of the file, of bytes. It is JSON of a length that is known
before the digests are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import FailFast, TypeAdapter

from zrun_core.checkpoint.manifest_fields import (
    ITEM_BYTES,
    Count,
    Digest,
    Dtype,
    Text,
    Tree,
    contradict,
    exact_keys,
    first_twice,
    number_class,
    parse_json,
    read,
)
from zrun_core.checkpoint.manifest_parts import TensorInfo

KEY = "record"  # in the header of a file; no fragment has a key without a "/"
DIGEST_BYTES = 32  # of its text
OF_RANK = re.compile(r"(?:rng|buffer)/(0|[1-9]\d{0,9})/(.+)")


@exact_keys
@dataclass(frozen=True)
class OwnTensor:
    """A tensor that belongs to a rank, not to the model."""

    name: Text
    dtype: Dtype
    numel: Count

    @property
    def num_bytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


@exact_keys
@dataclass(frozen=True)
class RankRecord:
    """The record of a rank.

    Attributes:
        rng, learnt: see `SavedRank`.
        own: tensors of the rank: `rng/<rank>/<generator>`, and `buffer/<rank>/<name>` where a
            buffer is not as the first rank has it.
        header: digest of the header of its file.
        fragments: their digests, in the order of the file.
    """

    rng: Tree
    learnt: Tree
    own: Annotated[list[OwnTensor], FailFast()]
    header: Digest
    fragments: Annotated[list[Digest], FailFast()]

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_json(cls, text: bytes, where: str) -> RankRecord:
        """Return the record that `text` is.

        Raises:
            CheckpointError: a part of it is missing, or not of its type.
        """
        raw = parse_json(text, where)
        return read(_record_adapter(), raw, "the record", _KINDS, where)

    def check(
        self,
        rank: int,
        num_fragments: int,
        own_bytes: int,
        tensors: Mapping[str, TensorInfo],
        models: Iterable[str] | None,
        where: str,
    ) -> None:
        """Check that it fits the manifest.

        Args:
            num_fragments: of the model, that lie in the file.
            tensors: of the model, by name.
            models: names of several; None: there is one.

        Raises:
            CheckpointError: it does not; the message says how.
        """
        if len(self.fragments) != num_fragments + len(self.own):
            found = f"{len(self.fragments)} digests"
            contradict(f"{found} for {num_fragments + len(self.own)} fragments", where)
        if sum(each.num_bytes for each in self.own) != own_bytes:
            contradict(f"the tensors of the rank are not {own_bytes} bytes", where)
        twice = first_twice(each.name for each in self.own)
        if twice is not None:
            contradict(f"it names {twice[:200]} twice", where)
        for each in self.own:
            check_own(each, tensors, where, rank=rank)
        check_learnt(self.learnt, models, "learnt", where)


def check_own(
    own: OwnTensor, tensors: Mapping[str, TensorInfo], where: str, *, rank: int | None = None
) -> int:
    """Check a stream of a rank, or a buffer that differs from the first rank's.

    Args:
        tensors: those of the model by name, of which a buffer is one.
        rank: whose it is; None: of any.

    Returns:
        The rank that its name tells.

    Raises:
        CheckpointError: it belongs to nobody, or is not what the model has.
    """
    match = OF_RANK.fullmatch(own.name)
    if match is None:
        contradict(f"{own.name[:200]} belongs to no rank", where)
    if rank is not None and int(match[1]) != rank:
        contradict(f"{own.name[:200]} belongs to another rank", where)
    if own.name.startswith("buffer/"):
        info = tensors.get(match[2])
        if info is None:
            contradict(f"{own.name[:200]} is of a tensor that is not listed", where)
        if number_class(own.dtype) != number_class(info.dtype):
            contradict(f"{own.name[:200]} is {own.dtype}, and the tensor {info.dtype}", where)
        if own.numel != info.numel:
            sizes = f"has {own.numel} elements, and the tensor {info.numel}"
            contradict(f"{own.name[:200]} {sizes}", where)
    return int(match[1])


@exact_keys
@dataclass(frozen=True)
class _LearntOrder:
    """The order of the reductions of one model, as its reducer saves it."""

    order: list[Text] | None
    late: list[Text]


def check_learnt(
    learnt: dict[str, Any], models: Iterable[str] | None, place: str, where: str
) -> None:
    """Check the orders of a rank's reductions.

    Args:
        models: names of several; None: there is one.

    Raises:
        CheckpointError: they are of other models, or no orders.
    """
    orders: Sequence[Any] = [learnt]
    if models is not None:
        if learnt.keys() != set(models):
            contradict(f"{place}: not of the models in layout", where)
        orders = list(learnt.values())
    for order in orders:
        read(_order_adapter(), order, place, {place: _LearntOrder}, where)


@cache
def _record_adapter() -> TypeAdapter[RankRecord]:
    return TypeAdapter(RankRecord)


@cache
def _order_adapter() -> TypeAdapter[_LearntOrder]:
    return TypeAdapter(_LearntOrder)


_KINDS: Mapping[str, type] = {"the record": RankRecord, "own": OwnTensor}
