"""What a checkpoint holds, as JSON: `manifest.json`, whose presence under the final name makes a step complete.

A manifest is believed only after `from_json` has found it whole and consistent: its own digest fits, names stay in the
folder, the fragments tile every file from the end of its header to its end, and every state of a tensor from its first
element to its last, and whatever is looked up in it later is of its type and in its range. Nothing is allocated or
opened for that, however large the numbers in it are.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any, NoReturn, Self, cast

from zrun_core.checkpoint.digest import DIGEST, combined, digest
from zrun_core.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
VALUE = (
    "value"  # the state that is the parameter or buffer itself, in the format of its master copy
)
RANK = "rank"  # the state of what belongs to a rank, not to a tensor of the model: `<kind>/<rank>/<name>`
KINDS = ("param", "frozen", "buffer")
OTHERS = "others"  # in a layout: how the parts of other ranks were cut
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "complex64": 8,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}
_CLASSES = {
    "float": "float",
    "bfloat": "float",
    "complex": "complex",
    "int": "integer",
    "uint": "integer",
    "bool": "bool",
}
MAX_BYTES = 2**28  # of a manifest: a million fragments

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_LARGEST = 2**62  # of any count: what the file system and torch still take as a signed number
_MAX_DIMS = 64
_MAX_DEPTH = 100  # of what a job, a script or an optimizer adds
_OF_RANK = re.compile(r"(?:rng|buffer)/(0|[1-9]\d{0,9})/(.+)")
_TAIL = b',\n"digest":"%s"}\n'
_TAIL_BYTES = len(_TAIL % (b"0" * 32))


def is_name(text: str) -> bool:
    """Whether `text` can be a single component of a path and nothing else."""
    return _NAME.fullmatch(text) is not None and ".." not in text and text != "."


def number_class(dtype: str) -> str:
    """Between formats of one class values keep their meaning, whatever precision they lose."""
    return _CLASSES[re.match("[a-z]*", dtype)[0]]  # type: ignore[index]


@dataclass(frozen=True)
class TensorInfo:
    """One parameter or buffer of the model."""

    name: str  # as in the state_dict; the first of its tied names
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # its memory order, in which the ranges of fragments count
    dtype: str  # of the model as it runs
    kind: str  # one of KINDS
    aliases: tuple[str, ...]  # the other tied names
    scalars: dict[str, float]  # optimizer state that is one number per parameter

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Fragment:
    """A flat range of one state of one tensor, contiguous in one file."""

    tensor: str
    state: str  # VALUE, a key of the optimizer's state, or RANK
    start: int  # elements, in memory order
    stop: int
    dtype: str
    file: str
    key: str  # in the safetensors header
    offset: int  # bytes, from the beginning of the file
    num_bytes: int
    digest: str


@dataclass(frozen=True)
class FileInfo:
    """One file: a safetensors header, then the fragments with no gap; one without tensors is all header."""

    name: str
    num_bytes: int
    header_bytes: int
    header_digest: str
    digest: str  # of the digests of header and fragments, in the order of the file

    @staticmethod
    def digest_of(header_digest: str, fragments: Iterable[Fragment]) -> str:
        return combined([header_digest, *(fragment.digest for fragment in fragments)])


@dataclass(frozen=True)
class SavedRank:
    """What belongs to a rank, beside the fragments of state RANK."""

    rank: int
    rng: dict[str, Any]  # as `rng.Streams.capture` says it
    learnt: dict[
        str, Any
    ]  # the order of its reductions, as `Reducer.state_dict` says it; of several models by name


@dataclass(frozen=True)
class ModelInfo:
    """What the model is to transformers, which builds models from a config."""

    class_name: str  # with its module; of the part that is a model of transformers, if any is
    prefix: str | None  # of the names of all tensors, where that model is inside of the user's own
    obstacle: str | None  # why transformers cannot load it; None: the step holds its config


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but the bytes of its tensors."""

    step: int
    run_id: str
    versions: dict[str, str]
    job: dict[str, Any]  # the resolved job
    world_size: int
    # Stage, shard group, precision, optimizer, units: how the first rank's part of the model was
    # cut, and under "others", how the parts of others were. Loading does not depend on it.
    layout: dict[str, Any]
    progress: dict[
        str, Any
    ]  # of a job: counters, data cursor, scaler; of a script: options of the optimizers, extras
    files: list[FileInfo]
    tensors: list[TensorInfo]
    fragments: list[Fragment]
    rank_states: list[SavedRank]  # of every rank
    model: ModelInfo | None = None  # None: several models, or nothing was said
    format: int = FORMAT

    @property
    def num_bytes(self) -> int:
        """Of all files together."""
        return sum(file.num_bytes for file in self.files)

    @property
    def layouts(self) -> list[dict[str, Any]]:
        """How each part of the model was cut, the first rank's first."""
        first = {key: value for key, value in self.layout.items() if key != OTHERS}
        return [first, *self.layout.get(OTHERS, ())]

    @property
    def files_beside(self) -> list[FileInfo]:
        """Those without tensors: what transformers needs beside them."""
        return [file for file in self.files if not file.name.endswith(".safetensors")]

    def rank_state(self, rank: int) -> SavedRank | None:
        """What belongs to a rank, if there was such a rank."""
        return next((each for each in self.rank_states if each.rank == rank), None)

    def fragments_of(self, name: str) -> list[Fragment]:
        """The fragments of a file, in its order."""
        return sorted(
            (each for each in self.fragments if each.file == name),
            key=attrgetter("offset", "num_bytes"),
        )

    def to_json(self) -> bytes:
        """One line per key of the manifest, and per element of its lists; the last holds the digest of all before."""
        lines = []
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                items = ",\n".join(_dump(_plain(item)) for item in value)
                lines.append(f'"{field.name}":[\n{items}\n]' if items else f'"{field.name}":[]')
            else:
                lines.append(f'"{field.name}":{_dump(_plain(value))}')
        body = ("{" + ",\n".join(lines)).encode()
        return body + _TAIL % digest(body).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """The manifest that `text` is, if every part of it can be believed.

        Raises:
            CheckpointError: damaged, of another format, or not consistent; the message says where.
        """
        body, tail = text[:-_TAIL_BYTES], text[-_TAIL_BYTES:]
        if len(text) > MAX_BYTES:
            _refuse(f"is larger than {MAX_BYTES >> 20} MiB")
        if len(text) <= _TAIL_BYTES or tail[:12] != _TAIL[:12]:
            _refuse("is not complete: it does not end with its digest")
        if tail != _TAIL % digest(body).encode():
            _refuse("is damaged: its digest does not fit")
        raw = _parse(body + b"}")
        if raw.get("format") != FORMAT:
            _refuse(
                f"has format {str(raw.get('format'))[:20]}; this version of zrun reads format {FORMAT}"
            )
        manifest = cls(**_typed(cls, raw, "the manifest"))
        _check(manifest)
        return manifest


def tensors_from_json(raw: Any) -> list[TensorInfo]:
    """Return the tensors that a rank has told of as JSON."""
    return [TensorInfo(**_typed(TensorInfo, each, "tensors")) for each in _list(raw, "tensors")]


def merge_tensors(told: Iterable[Sequence[TensorInfo]]) -> list[TensorInfo]:
    """Return all tensors of the ranks that have told of theirs, each once.

    Raises:
        ValueError: two ranks say something else of one.
    """
    found: dict[str, TensorInfo] = {}
    for info in chain.from_iterable(told):
        if found.setdefault(info.name, info) != info:
            raise ValueError(f"ranks have {info.name} in different shapes, orders or formats")
    return list(found.values())


def _refuse(problem: str) -> NoReturn:
    raise CheckpointError(f"{MANIFEST} {problem}")


# JSON to dataclasses


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _plain(item: Any) -> Any:
    return asdict(item) if is_dataclass(item) and not isinstance(item, type) else item


def _parse(text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key twice")
        return found

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number")

    try:
        raw = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        _refuse(f"is not JSON: {str(error)[:100]}")
    if not isinstance(raw, dict):
        _refuse("is not a JSON object")
    return raw


def _typed(kind: type, raw: Any, where: str) -> dict[str, Any]:
    """The fields of dataclass `kind` from a JSON object, each of its type.

    No key is missing, but for those with a default, and none is more.
    """
    names = [field.name for field in fields(kind)]
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    if not isinstance(raw, dict) or not needed <= raw.keys() <= set(names):
        _refuse(f"is not consistent: {where} does not have the keys {', '.join(names)}")
    readers = _READERS[kind]
    return {name: readers[name](raw[name], f"{where}, {name}") for name in names if name in raw}


def _integer(value: Any, where: str) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        _refuse(
            f"is not consistent: {where}: {str(value)[:40]!r} is not a whole number from 0 to 2^62"
        )
    return value


def _text(value: Any, where: str) -> str:
    if type(value) is not str or not 0 < len(value) <= 4096 or not value.isprintable():
        _refuse(f"is not consistent: {where}: not a text of 1 to 4096 printable characters")
    return value


def _name(value: Any, where: str) -> str:
    if not is_name(_text(value, where)):
        _refuse(f"is not consistent: {where}: {value[:140]!r} is not a plain name in the folder")
    return cast(str, value)


def _digest(value: Any, where: str) -> str:
    if DIGEST.fullmatch(_text(value, where)) is None:
        _refuse(f"is not consistent: {where}: not a digest of 32 hexadecimal digits")
    return cast(str, value)


def _choice(choices: Iterable[str]) -> Callable[[Any, str], str]:
    known = frozenset(choices)

    def read(value: Any, where: str) -> str:
        if _text(value, where) not in known:
            _refuse(f"is not consistent: {where}: {value[:40]!r} is unknown")
        return cast(str, value)

    return read


def _positive(value: Any, where: str) -> int:
    return _integer(value, where) or _refuse(f"is not consistent: {where}: 0 is too few")


def _number(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        _refuse(f"is not consistent: {where}: {str(value)[:40]!r} is not a number")
    return float(value)


def _positive_number(value: Any, where: str) -> float:
    if (number := _number(value, where)) <= 0:
        _refuse(f"is not consistent: {where}: {number} is not more than 0")
    return number


def _dict(value: Any, where: str) -> dict[str, Any]:
    if type(value) is not dict:
        _refuse(f"is not consistent: {where}: not an object")
    return value


def _tree(value: Any, where: str) -> dict[str, Any]:
    """An object of which nothing is known but that it can be walked through."""
    level: list[Any] = [_dict(value, where)]
    for _ in range(_MAX_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for items in inner for each in items if isinstance(each, dict | list)]
        if not level:
            return value  # type: ignore[no-any-return]
    _refuse(f"is not consistent: {where}: objects inside of more than {_MAX_DEPTH} others")


def _layout(value: Any, where: str) -> dict[str, Any]:
    if "models" in _tree(value, where):
        for each in _dict(value["models"], where).values():
            _dict(each, where)
    for each in _list(value.get(OTHERS, []), where):
        _dict(each, where)
    return value  # type: ignore[no-any-return]


def _progress(value: Any, where: str) -> dict[str, Any]:
    """What a job or a script has written; which of the keys are there is for its reader to say."""
    for key, item in _tree(value, where).items():
        if key in _PROGRESS:
            _PROGRESS[key](item, f"{where}, {key}")
    return value  # type: ignore[no-any-return]


def _scaler(value: Any, where: str) -> None:
    if _dict(value, where).keys() != _SCALER.keys():
        _refuse(f"is not consistent: {where} does not have the keys {', '.join(_SCALER)}")
    for key, read in _SCALER.items():
        read(value[key], f"{where}, {key}")


def _marks(value: Any, where: str) -> None:
    """The digests of samples, by their number."""
    for number, mark in _texts_by_name(value, where).items():
        _digest(mark, where)
        if not number.isdecimal() or len(number) > 18:
            _refuse(f"is not consistent: {where}: {number[:40]!r} is not the number of a sample")


def _early_stop(value: Any, where: str) -> None:
    if _dict(value, where).keys() != {"best", "num_worse"}:
        _refuse(f"is not consistent: {where} does not have the keys best, num_worse")
    _integer(value["num_worse"], where)
    _or_null(_best)(value["best"], where)


def _best(value: Any, where: str) -> None:
    if _dict(value, where).keys() != _BEST.keys():
        _refuse(f"is not consistent: {where} does not have the keys {', '.join(_BEST)}")
    for key, read in _BEST.items():
        read(value[key], f"{where}, {key}")


def _groups(value: Any, where: str) -> None:
    """The options of every group of every optimizer."""
    for groups in _dict(value, where).values():
        for options in _list(groups, where):
            if "params" in _dict(options, where):
                _refuse(f"is not consistent: {where}: params are no option")


def _or_null(read: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    return lambda value, where: None if value is None else read(value, where)


def _texts_by_name(value: Any, where: str) -> dict[str, str]:
    return {key: _text(item, where) for key, item in _dict(value, where).items()}


def _numbers_by_name(value: Any, where: str) -> dict[str, float]:
    return {key: _number(item, where) for key, item in _dict(value, where).items()}


def _tuple_of(read: Callable[[Any, str], Any]) -> Callable[[Any, str], tuple[Any, ...]]:
    def read_all(value: Any, where: str) -> tuple[Any, ...]:
        return tuple(read(item, where) for item in _list(value, where))

    return read_all


def _list(value: Any, where: str) -> list[Any]:
    if type(value) is not list:
        _refuse(f"is not consistent: {where}: not a list")
    return value


_texts = _tuple_of(_text)


def _model(value: Any, where: str) -> ModelInfo:
    return ModelInfo(**_typed(ModelInfo, value, where))


def _list_of(kind: type) -> Callable[[Any, str], list[Any]]:
    def read(value: Any, where: str) -> list[Any]:
        return [
            kind(**_typed(kind, item, f"{where}[{index}]"))
            for index, item in enumerate(_list(value, where))
        ]

    return read


_SCALER: dict[str, Callable[[Any, str], Any]] = {
    "scale": _positive_number,
    "good": _integer,
    "bad": _integer,
}
_BEST: dict[str, Callable[[Any, str], Any]] = {
    "step": _integer,
    "metric": _text,
    "mode": _choice(("min", "max")),
    "value": _number,
}
_PROGRESS: dict[str, Callable[[Any, str], Any]] = {
    "steps": _integer,
    "updates": _integer,
    "micro_batches": _integer,
    "skips": _integer,
    "skips_in_a_row": _integer,
    "helpless_skips": _integer,
    "samples": _integer,
    "tokens": _integer,
    "cursor": _integer,
    "loss": _or_null(_number),
    "first_loss": _or_null(_number),
    "seconds": _or_null(_number),
    "dataset_samples": _or_null(_positive),
    "scaler": _or_null(_scaler),
    "groups": _groups,
    "extra": _dict,
    "marks": _marks,
    "ended": _or_null(_text),
    "early_stop": _or_null(_early_stop),
    "best": _or_null(_best),
}
_READERS: dict[type, dict[str, Callable[[Any, str], Any]]] = {
    TensorInfo: {
        "name": _text,
        "shape": _tuple_of(_integer),
        "stride": _tuple_of(_integer),
        "dtype": _choice(ITEM_BYTES),
        "kind": _choice(KINDS),
        "aliases": _tuple_of(_text),
        "scalars": _numbers_by_name,
    },
    Fragment: {
        "tensor": _text,
        "state": _text,
        "start": _integer,
        "stop": _integer,
        "dtype": _choice(ITEM_BYTES),
        "file": _name,
        "key": _text,
        "offset": _integer,
        "num_bytes": _integer,
        "digest": _digest,
    },
    FileInfo: {
        "name": _name,
        "num_bytes": _integer,
        "header_bytes": _integer,
        "header_digest": _digest,
        "digest": _digest,
    },
    SavedRank: {"rank": _integer, "rng": _tree, "learnt": _tree},
    ModelInfo: {"class_name": _text, "prefix": _or_null(_text), "obstacle": _or_null(_text)},
    Manifest: {
        "step": _integer,
        "run_id": _name,
        "versions": _texts_by_name,
        "job": _tree,
        "world_size": _positive,
        "layout": _layout,
        "progress": _progress,
        "files": _list_of(FileInfo),
        "tensors": _list_of(TensorInfo),
        "fragments": _list_of(Fragment),
        "rank_states": _list_of(SavedRank),
        "model": _or_null(_model),
        "format": _integer,
    },
}


# Consistency


def _check(manifest: Manifest) -> None:
    """Refuse a manifest whose parts contradict each other."""
    for file in manifest.files:
        if file.name == MANIFEST:
            _refuse(f"is not consistent: it lists {MANIFEST} as a file of tensors")
    if twice := _first_twice(file.name for file in manifest.files):
        _refuse(f"is not consistent: it lists the file {twice} twice")
    names = [name for tensor in manifest.tensors for name in (tensor.name, *tensor.aliases)]
    if twice := _first_twice(names):
        _refuse(f"is not consistent: it names the tensor {twice[:200]} twice")
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    for tensor in manifest.tensors:
        _check_dense(tensor)
    for fragment in manifest.fragments:
        num_bytes = (fragment.stop - fragment.start) * ITEM_BYTES[fragment.dtype]
        if fragment.start > fragment.stop or num_bytes != fragment.num_bytes:
            _refuse(
                f"is not consistent: {_in_words(fragment)} is said to have {fragment.num_bytes} bytes"
            )
    _check_ranks(manifest)
    _check_files(manifest)
    _check_states(manifest, tensors)


def _first_twice(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _check_dense(tensor: TensorInfo) -> None:
    """The elements fill the memory from the first to the last, in whatever order of the dimensions."""
    if (
        len(tensor.shape) != len(tensor.stride)
        or len(tensor.shape) > _MAX_DIMS
        or tensor.numel > _LARGEST
    ):
        _refuse(f"is not consistent: the tensor {tensor.name[:200]} has no possible shape")
    if tensor.numel == 0:
        return
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride, tensor.shape, strict=True)
    ):
        if size > 1:
            if stride != expected:
                _refuse(
                    f"is not consistent: the strides of {tensor.name[:200]} leave gaps or overlap"
                )
            expected *= size


def _check_ranks(manifest: Manifest) -> None:
    """Every rank has a state, with the orders of the models that there are."""
    found = sorted(each.rank for each in manifest.rank_states)
    if len(found) != manifest.world_size or found != list(range(len(found))):
        _refuse(f"is not consistent: it does not have the states of {manifest.world_size} ranks")
    models = manifest.layout.get("models")
    for each in manifest.rank_states:
        where = f"rank_states of rank {each.rank}, learnt"
        if models is not None and each.learnt.keys() != models.keys():
            _refuse(f"is not consistent: {where}: not of the models in layout")
        for learnt in [each.learnt] if models is None else each.learnt.values():
            if _dict(learnt, where).keys() != {"order", "late"}:
                _refuse(f"is not consistent: {where} does not have the keys order, late")
            _texts(learnt["late"], where)
            if learnt["order"] is not None:
                _texts(learnt["order"], where)


def _check_files(manifest: Manifest) -> None:
    """Every byte of every file belongs to the header or to one fragment."""
    by_file: dict[str, list[Fragment]] = defaultdict(list)
    for fragment in manifest.fragments:
        by_file[fragment.file].append(fragment)
    for file in manifest.files:
        fragments = sorted(by_file.pop(file.name, ()), key=attrgetter("offset", "num_bytes"))
        end = file.header_bytes
        for fragment in fragments:
            if fragment.offset != end:
                gap = (
                    "overlaps with the one before it"
                    if fragment.offset < end
                    else "leaves a gap before it"
                )
                _refuse(f"is not consistent: {_in_words(fragment)} {gap} in {file.name}")
            end += fragment.num_bytes
        if end != file.num_bytes:
            _refuse(f"is not consistent: {file.name} has {file.num_bytes} bytes, its parts {end}")
        if twice := _first_twice(fragment.key for fragment in fragments):
            _refuse(f"is not consistent: {file.name} has the key {twice[:200]} twice")
        if file.digest != FileInfo.digest_of(file.header_digest, fragments):
            _refuse(f"is not consistent: the digest of {file.name} is not that of its parts")
    for name in by_file:
        _refuse(f"is not consistent: fragments lie in {name}, which it does not list")


def _check_states(manifest: Manifest, tensors: dict[str, TensorInfo]) -> None:
    """Every state that a tensor has is there from its first element to its last, once."""
    by_state: dict[tuple[str, str], list[Fragment]] = defaultdict(list)
    for fragment in manifest.fragments:
        if fragment.state != RANK and fragment.tensor not in tensors:
            _refuse(
                f"is not consistent: {_in_words(fragment)} is of a tensor that it does not list"
            )
        by_state[fragment.tensor, fragment.state].append(fragment)
    for (name, state), fragments in by_state.items():
        fragments.sort(key=attrgetter("start", "stop"))
        if state == RANK:
            _check_of_rank(manifest, fragments, tensors)
            continue
        _check_whole(fragments, tensors[name].numel)
        if state == VALUE:
            _check_class(fragments[0], tensors[name])
    for tensor in manifest.tensors:
        if tensor.numel and (tensor.name, VALUE) not in by_state:
            _refuse(f"is not consistent: there is no value of {tensor.name[:200]}")


def _check_whole(fragments: Sequence[Fragment], numel: int) -> None:
    """`fragments`, by start, are of one format and together the range from 0 to `numel`."""
    if fragments[0].start != 0 or fragments[-1].stop != numel:
        _refuse(
            f"is not consistent: {_in_words(fragments[0])} and what follows are not {numel} elements"
        )
    for before, after in pairwise(fragments):
        if after.start != before.stop:
            overlap = "overlaps with" if after.start < before.stop else "does not begin at"
            _refuse(
                f"is not consistent: {_in_words(after)} {overlap} the end of the one before, {before.stop}"
            )
        if after.dtype != before.dtype:
            _refuse(
                f"is not consistent: {_in_words(after)} is {after.dtype}, the one before it {before.dtype}"
            )


def _check_of_rank(
    manifest: Manifest, fragments: Sequence[Fragment], tensors: dict[str, TensorInfo]
) -> None:
    """A stream of a rank, or a buffer that differs from the first rank's; it is not divided."""
    first = fragments[0]
    match = _OF_RANK.fullmatch(first.tensor)
    if match is None or int(match[1]) >= manifest.world_size:
        _refuse(f"is not consistent: {first.tensor[:200]} belongs to no rank")
    if len(fragments) > 1:
        _refuse(f"is not consistent: {first.tensor[:200]} is there in parts")
    numel = first.stop
    if first.tensor.startswith("buffer/"):
        if (info := tensors.get(match[2])) is None:
            _refuse(f"is not consistent: {first.tensor[:200]} is of a tensor that it does not list")
        _check_class(first, info)
        numel = info.numel
    _check_whole(fragments, numel)


def _check_class(fragment: Fragment, info: TensorInfo) -> None:
    if number_class(fragment.dtype) != number_class(info.dtype):
        _refuse(
            f"is not consistent: {_in_words(fragment)} is {fragment.dtype}, and the tensor {info.dtype}"
        )


def _in_words(fragment: Fragment) -> str:
    return f"{fragment.state[:200]} of {fragment.tensor[:200]}, elements {fragment.start} to {fragment.stop}"
