"""What manifests consist of: tensors, files, the division of units among ranks. Plain data.

Each class says which keys its JSON has; `manifest_fields` says what the types of values allow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

from zrun_core.checkpoint.best import Best
from zrun_core.checkpoint.manifest_fields import (
    Count,
    Digest,
    Dtype,
    Kind,
    Name,
    NonZero,
    Number,
    Options,
    PositiveNumber,
    SampleNumber,
    Text,
    Tree,
    any_keys,
    exact_keys,
    matching,
)

OTHERS = "others"  # in a layout: how the parts of other ranks were cut


@exact_keys
@dataclass(frozen=True)
class TensorInfo:
    """One parameter or buffer of the model.

    Attributes:
        name: as in the state_dict; the first of its tied names.
        stride: its memory order, in which ranges of it count.
        dtype: of the model as it runs.
        aliases: the other tied names.
        scalars: optimizer state that is one number per parameter.
        states: what is saved of each element, and in which format: VALUE, and states of the
            optimizer.
    """

    name: Text
    shape: tuple[Count, ...]
    stride: tuple[Count, ...]
    dtype: Dtype
    kind: Kind
    aliases: tuple[Text, ...]
    scalars: dict[str, Number]
    states: dict[Text, Dtype] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@exact_keys
@dataclass(frozen=True)
class FileInfo:
    """One file: a safetensors header, fragments, and the rank's record; see `record`.

    Attributes:
        header_bytes: of one without tensors, all bytes.
        own_bytes: of fragments of state RANK.
        record_bytes: at its end; 0: without tensors.
        digest: of the record, which has those of the rest; of a file without tensors, its own.
    """

    name: Name
    num_bytes: Count
    header_bytes: Count
    own_bytes: Count
    record_bytes: Count
    digest: Digest


@exact_keys
@dataclass(frozen=True)
class UnitRun:
    """Elements that lie together in a unit, and in a tensor too.

    Attributes:
        first: place of the first one in the tensor, in its memory order.
        place: of the same one in the unit.
        numel: how many there are.
    """

    tensor: Text
    first: Count
    place: Count
    numel: NonZero


@exact_keys
@dataclass(frozen=True)
class UnitInfo:
    """A flat unit, whole.

    Attributes:
        numel: padding included, which is what no run covers.
        runs: by place.
    """

    name: Text
    numel: NonZero
    runs: list[UnitRun]


@exact_keys
@dataclass(frozen=True)
class Division:
    """Units that the same ranks have written, each an equal part of each unit: see `divisions`.

    Attributes:
        ranks: by the part that each has written.
        copies: ranks that held the same shard; shards are `len(ranks) / copies`.
    """

    ranks: list[Count]
    copies: NonZero
    units: list[UnitInfo]


@exact_keys
@dataclass(frozen=True)
class Fragment:
    """A flat range of one state of one tensor, contiguous in one file.

    Attributes:
        state: VALUE, a key of the optimizer's state, or RANK.
        start, stop: elements, in the memory order of the tensor.
        key: in the safetensors header.
        offset: bytes, from the beginning of the file.
    """

    tensor: Text
    state: Text
    start: Count
    stop: Count
    dtype: Dtype
    file: Name
    key: Text
    offset: Count
    num_bytes: Count
    digest: Digest

    @property
    def in_words(self) -> str:
        return f"{self.state[:200]} of {self.tensor[:200]}, elements {self.start} to {self.stop}"


def key_of(tensor: str, state: str, start: int) -> str:
    """Return the key of a fragment in the header of its file."""
    key = f"{state}/{tensor}"
    return f"{key}@{start}" if start else key


@exact_keys
@dataclass(frozen=True)
class SavedRank:
    """The state of a rank, beside the fragments of state RANK.

    Attributes:
        rng: as `rng.Streams.capture` returns it.
        learnt: the order of its reductions, as `ReduceOrder.state_dict` returns it; of several
            models by name.
    """

    rank: Count
    rng: Tree
    learnt: Tree


@exact_keys
@dataclass(frozen=True)
class ModelInfo:
    """The model as transformers knows it, which builds models from a config.

    Attributes:
        class_name: with its module; of the part that is a model of transformers, if any is.
        prefix: of the names of all tensors, where that model is inside of the user's own.
        obstacle: why transformers cannot load it; None: the step holds its config.
    """

    class_name: Text
    prefix: Text | None
    obstacle: Text | None


@exact_keys
@dataclass(frozen=True)
class Scaler:
    """The loss scale, and the steps since it changed."""

    scale: PositiveNumber
    good: Count
    bad: Count


@exact_keys
@dataclass(frozen=True)
class EarlyStop:
    """What an early stop remembers."""

    best: Best | None
    num_worse: Count


@any_keys
@dataclass(frozen=True)
class _Progress:
    """The progress of a job or a script.

    Any key may be missing, its reader asks for those it needs.
    """

    steps: Count = 0
    updates: Count = 0
    micro_batches: Count = 0
    skips: Count = 0
    skips_in_a_row: Count = 0
    helpless_skips: Count = 0
    samples: Count = 0
    tokens: Count = 0
    cursor: Count = 0
    loss: Number | None = None
    first_loss: Number | None = None
    seconds: Number | None = None
    dataset_samples: NonZero | None = None
    scaler: Scaler | None = None
    groups: dict[str, list[Options]] = field(default_factory=dict)  # of every optimizer
    extra: dict[str, Any] = field(default_factory=dict)
    marks: dict[SampleNumber, Digest] = field(default_factory=dict)
    ended: Text | None = None
    early_stop: EarlyStop | None = None
    best: Best | None = None


@any_keys
@dataclass(frozen=True)
class _Layout:
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    others: list[dict[str, Any]] = field(default_factory=list)


Progress = Annotated[Tree, matching(_Progress)]
Layout = Annotated[Tree, matching(_Layout)]
