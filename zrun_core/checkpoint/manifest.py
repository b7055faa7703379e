"""The manifest of a checkpoint: everything about it but the bytes of its tensors, as JSON.

`manifest.json` under the final name of a step's folder is what makes the step complete. It is
believed only after `Manifest.from_json` has found it whole:

    its digest           is that of all the bytes before it
    every value          is of its type and in its range (`manifest_fields`)
    fragments            tile every file, and every state of every tensor (`manifest_checks`)

Nothing is allocated or opened for that, however large the numbers in it are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any, NoReturn

from pydantic import FailFast, TypeAdapter

from zrun_core.checkpoint.best import Best
from zrun_core.checkpoint.digest import combined, digest
from zrun_core.checkpoint.manifest_checks import check_consistency
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
    read,
    refuse,
)

FORMAT = 1
OTHERS = "others"  # in a layout: how the parts of other ranks were cut
MAX_BYTES = 2**28  # of a manifest: a million fragments

_TAIL = b',\n"digest":"%s"}\n'
_TAIL_BYTES = len(_TAIL % (b"0" * 32))


@exact_keys
@dataclass(frozen=True)
class TensorInfo:
    """One parameter or buffer of the model.

    Attributes:
        name: as in the state_dict; the first of its tied names.
        stride: its memory order, in which the ranges of fragments count.
        dtype: of the model as it runs.
        aliases: the other tied names.
        scalars: optimizer state that is one number per parameter.
    """

    name: Text
    shape: tuple[Count, ...]
    stride: tuple[Count, ...]
    dtype: Dtype
    kind: Kind
    aliases: tuple[Text, ...]
    scalars: dict[str, Number]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


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


@exact_keys
@dataclass(frozen=True)
class FileInfo:
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
class _Scaler:
    scale: PositiveNumber
    good: Count
    bad: Count


@exact_keys
@dataclass(frozen=True)
class _EarlyStop:
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
    scaler: _Scaler | None = None
    groups: dict[str, list[Options]] = field(default_factory=dict)  # of every optimizer
    extra: dict[str, Any] = field(default_factory=dict)
    marks: dict[SampleNumber, Digest] = field(default_factory=dict)
    ended: Text | None = None
    early_stop: _EarlyStop | None = None
    best: Best | None = None


@any_keys
@dataclass(frozen=True)
class _Layout:
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    others: list[dict[str, Any]] = field(default_factory=list)


@exact_keys
@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but the bytes of its tensors.

    Attributes:
        job: the resolved job.
        layout: stage, shard group, precision, optimizer, units: how the first rank's part of the
            model was cut, and under "others", how the parts of others were. Loading does not
            depend on it.
        progress: of a job: counters, data cursor, scaler; of a script: options of the optimizers,
            extras.
        rank_states: of every rank.
        model: None: several models, or an older zrun has saved it.
    """

    step: Count
    run_id: Name
    versions: dict[str, Text]
    job: Tree
    world_size: NonZero
    layout: Annotated[Tree, matching(_Layout)]
    progress: Annotated[Tree, matching(_Progress)]
    files: Annotated[list[FileInfo], FailFast()]
    tensors: Annotated[list[TensorInfo], FailFast()]
    fragments: Annotated[list[Fragment], FailFast()]
    rank_states: Annotated[list[SavedRank], FailFast()]
    model: ModelInfo | None = None
    format: Count = FORMAT

    @property
    def num_bytes(self) -> int:
        """Return the size of all files together."""
        return sum(file.num_bytes for file in self.files)

    @property
    def models(self) -> dict[str, dict[str, Any]]:
        """Return how each model was cut, by the names that a script gave them; "": the only one."""
        found: dict[str, dict[str, Any]] = self.layout.get("models", {"": self.layout})
        return found

    @property
    def layouts(self) -> list[dict[str, Any]]:
        """Return how each part of the model was cut, the first rank's first."""
        first = {key: value for key, value in self.layout.items() if key != OTHERS}
        return [first, *self.layout.get(OTHERS, ())]

    @property
    def files_beside(self) -> list[FileInfo]:
        """Return the files without tensors: what transformers needs beside them."""
        return [file for file in self.files if not file.name.endswith(".safetensors")]

    def rank_state(self, rank: int) -> SavedRank | None:
        """Return what belongs to a rank, if there was such a rank."""
        return next((each for each in self.rank_states if each.rank == rank), None)

    def fragments_of(self, name: str) -> list[Fragment]:
        """Return the fragments of a file, in its order."""
        return sorted(
            (each for each in self.fragments if each.file == name),
            key=attrgetter("offset", "num_bytes"),
        )

    def to_json(self) -> bytes:
        """Return a line per key of the manifest, and per element of its lists.

        The last line holds the digest of all before.
        """
        lines = []
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, list):
                items = ",\n".join(_dump(_plain(item)) for item in value)
                lines.append(f'"{each.name}":[\n{items}\n]' if items else f'"{each.name}":[]')
            else:
                lines.append(f'"{each.name}":{_dump(_plain(value))}')
        body = ("{" + ",\n".join(lines)).encode()
        return body + _TAIL % digest(body).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Return the manifest that `text` is, if every part of it can be believed.

        Raises:
            CheckpointError: damaged, of another format, or not consistent; the message says where.
        """
        body = text[:-_TAIL_BYTES]
        tail = text[-_TAIL_BYTES:]
        if len(text) > MAX_BYTES:
            refuse(f"is larger than {MAX_BYTES >> 20} MiB")
        if len(text) <= _TAIL_BYTES or tail[:12] != _TAIL[:12]:
            refuse("is not complete: it does not end with its digest")
        if tail != _TAIL % digest(body).encode():
            refuse("is damaged: its checksum is wrong")
        raw = _parse(body + b"}")
        if raw.get("format") != FORMAT:
            found = str(raw.get("format"))[:20]
            refuse(f"has format {found}; this version of zrun reads format {FORMAT}")
        manifest = read(_manifest_adapter(), raw, "the manifest", _KINDS)
        check_consistency(manifest)
        return manifest


def tensors_from_json(raw: Any) -> list[TensorInfo]:
    """Return the tensors that a rank has sent as JSON.

    Raises:
        CheckpointError: they are something else.
    """
    return read(_tensors_adapter(), raw, "tensors", _KINDS)


def merge_tensors(
    by_rank: Iterable[Sequence[TensorInfo]], order: Sequence[str] = ()
) -> list[TensorInfo]:
    """Return the tensors of several ranks, each once.

    Args:
        by_rank: of each.
        order: names in their order; others come last, as ranks have them.

    Raises:
        ValueError: two ranks describe one differently.
    """
    found: dict[str, TensorInfo] = {}
    for info in chain.from_iterable(by_rank):
        if found.setdefault(info.name, info) != info:
            raise ValueError(f"ranks have {info.name} in different shapes, orders or formats")
    first = {name: found.pop(name) for name in order if name in found}
    return [*first.values(), *found.values()]


@cache  # built when a manifest is read: 30 ms that a run which saves nothing need not wait for
def _manifest_adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


@cache
def _tensors_adapter() -> TypeAdapter[list[TensorInfo]]:
    return TypeAdapter(list[TensorInfo])


_KINDS: Mapping[str, type] = {  # by the field that holds them
    "the manifest": Manifest,
    "files": FileInfo,
    "tensors": TensorInfo,
    "fragments": Fragment,
    "rank_states": SavedRank,
    "model": ModelInfo,
    "scaler": _Scaler,
    "early_stop": _EarlyStop,
    "best": Best,
}


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _plain(item: Any) -> Any:
    if is_dataclass(item) and not isinstance(item, type):
        return asdict(item)
    return item


def _parse(text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key twice")
        return found

    def refuse_constant(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number")

    try:
        raw = json.loads(
            text.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse_constant
        )
    except (ValueError, RecursionError) as error:
        refuse(f"is not JSON: {str(error)[:100]}")
    if not isinstance(raw, dict):
        refuse("is not a JSON object")
    return raw
