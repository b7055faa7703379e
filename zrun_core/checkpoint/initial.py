"""Weights to start from: safetensors, a torch `state_dict`, or a zrun checkpoint. Weights only, no optimizer.

Each rank reads the ranges that it keeps, in pieces, straight into its memory: beside the model itself, all ranks
together hold a few pieces of the file, never a copy of it.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from zrun_core.checkpoint.folder import CheckpointFolder, read_step
from zrun_core.checkpoint.manifest import TensorInfo
from zrun_core.checkpoint.manifest_fields import MANIFEST
from zrun_core.checkpoint.model_state import ModelState
from zrun_core.checkpoint.reader import Reader, Target
from zrun_core.checkpoint.shard_file import as_bytes
from zrun_core.distributed.transport import Group
from zrun_core.errors import CheckpointError
from zrun_core.memory.tensors import Extent, contiguous_stride, overlaps
from zrun_core.spine.config import InitFromConfig
from zrun_core.spine.tracebacks import first_line

_PIECE_BYTES = 1 << 20
_READERS = 4  # threads
_MAX_HEADER_BYTES = 100 << 20  # as the safetensors library
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_TORCH_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt"}


class Weights(Protocol):
    """Named tensors in files."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """By name."""
        ...

    def fill(self, targets: Sequence[Target]) -> None:
        """Fill the memory of `targets`, whose first names are names of these weights.

        Raises:
            CheckpointError: a file cannot be read.
        """
        ...


def load_weights(config: InitFromConfig, state: ModelState, world: Group) -> list[str]:
    """Fill the model's parameters and persistent buffers from `config.path`; returns what the user should know.

    Raises:
        CheckpointError: it cannot be read, or does not fit the model; the message names the first difference.
    """
    path = Path(config.path).expanduser()
    weights = open_weights(path, world)
    chosen, notes = match(weights.shapes, state.all_tensors(), config)

    def fill(targets: Sequence[Target]) -> None:
        weights.fill(
            [replace(t, names=(chosen[t.names[0]],)) for t in targets if t.names[0] in chosen]
        )

    state.fill(fill)
    return [f"weights from {path}", *notes]


def match(
    shapes: Mapping[str, tuple[int, ...]], tensors: Sequence[TensorInfo], config: InitFromConfig
) -> tuple[dict[str, str], list[str]]:
    """(name in the model -> name in the files, notes). Tied tensors go by any of their names.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of another shape.
    """
    path = config.path
    first = {name: info for info in tensors for name in (info.name, *info.aliases)}
    taken: dict[str, str] = {}  # name in the model -> name in the files
    unexpected = []
    for name, shape in shapes.items():
        ours = _renamed(name, config.map)
        if not ours:
            continue  # mapped to nothing: left out
        if ours in taken:
            raise CheckpointError(
                f"init_from.map: {taken[ours]} and {name} of {path} both become {ours}"
            )
        taken[ours] = name
        if ours not in first:
            unexpected.append(f"{name} {list(shape)}" + (f", as {ours}," if ours != name else ""))
        elif shape != first[ours].shape:
            raise CheckpointError(
                f"init_from: {name} is {list(shape)} in {path}, and {ours} is {list(first[ours].shape)} in the model"
            )
    found = {}
    for info in tensors:
        for ours in (info.name, *info.aliases):
            if info.name not in found and ours in taken:
                found[info.name] = taken[ours]
    missing = [f"{info.name} {list(info.shape)}" for info in tensors if info.name not in found]
    if config.strict and missing:
        hint = (
            f"; what it has is like {next(iter(shapes), 'nothing')}: map names with init_from.map"
        )
        raise CheckpointError(
            f"init_from: {path} has no {missing[0]}{_more(missing)}{hint}, or write init_from.strict: false"
        )
    if config.strict and unexpected:
        raise CheckpointError(
            f"init_from: the model has no place for {unexpected[0]} of {path}{_more(unexpected)}: map names with "
            'init_from.map (to "" to leave one out), or write init_from.strict: false'
        )
    notes = [f"left as the model's code made it: {missing[0]}{_more(missing)}"] if missing else []
    return found, [
        *notes,
        *([f"not used: {unexpected[0]}{_more(unexpected)}"] if unexpected else []),
    ]


def _renamed(name: str, names: Mapping[str, str]) -> str:
    for pattern, replacement in names.items():
        if (found := re.fullmatch(pattern, name)) is not None:
            return found.expand(replacement)
    return name


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def open_weights(path: Path, world: Group) -> Weights:
    """What lies at `path`.

    Raises:
        CheckpointError: nothing that can be read.
    """
    if path.is_dir():
        return _open_folder(path, world)
    if not path.is_file():
        raise CheckpointError(f"init_from: there is no file {path.absolute()}")
    if path.suffix == ".safetensors":
        return _Safetensors([path])
    if path.suffix in _TORCH_SUFFIXES:
        return _StateDict(path)
    raise CheckpointError(
        f"init_from: {path} is neither .safetensors nor a state_dict of torch (.pt, .pth, .bin)"
    )


def _open_folder(path: Path, world: Group) -> Weights:
    if (path / MANIFEST).is_file():
        return _ZrunStep(path, world)
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        raise CheckpointError(f"init_from: {path} has {len(indices)} indices: name a file")
    if indices:
        return _Safetensors(_files_of_index(indices[0]))
    files = sorted(path.glob("*.safetensors"))
    if files:
        return _Safetensors(files)
    for folder in (path, path / "checkpoints"):
        if not (found := CheckpointFolder(folder).scan()):
            continue
        newest, *others = found
        older = next(
            (
                f"; name another, such as {each.path}"
                for each in others
                if each.manifest is not None
            ),
            "",
        )
        if newest.manifest is None:  # which weights to begin with instead is not ours to say
            raise CheckpointError(
                f"init_from: the newest step of {folder} is not valid: {newest.problem}{older}"
            )
        return _ZrunStep(newest.path, world, older)
    raise CheckpointError(
        f"init_from: {path} holds neither safetensors files nor a checkpoint of zrun"
    )


def _files_of_index(index: Path) -> list[Path]:
    """The files that a sharded checkpoint of `transformers` consists of."""
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"init_from: {index} is no index of safetensors files") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(
                f"init_from: {index} names a file outside of its folder: {name!r}"
            )
        if not (index.parent / name).is_file():
            raise CheckpointError(
                f"init_from: {index.parent / name} is missing, which {index.name} names"
            )
    return [index.parent / name for name in names]


class _ZrunStep:
    """A checkpoint of zrun, at any layout."""

    def __init__(self, path: Path, world: Group, advice: str = "") -> None:
        """
        Args:
            advice: what else to name where it is damaged.
        """
        manifest = read_step(path)
        self._advice = advice
        self._reader = Reader(path, manifest, world)
        self.shapes = {
            name: info.shape for info in manifest.tensors for name in (info.name, *info.aliases)
        }

    def fill(self, targets: Sequence[Target]) -> None:
        try:
            self._reader.fill(targets)
        except CheckpointError as error:
            raise CheckpointError(f"init_from: {error}{self._advice}") from None


@dataclass(frozen=True)
class _Entry:
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes, from the file's beginning


class _Safetensors:
    """One or more safetensors files, read by range."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._entries: dict[str, _Entry] = {}
        for path in paths:
            for name, entry in _read_header(path).items():
                if name in self._entries:
                    raise CheckpointError(
                        f"init_from: {name} is both in {self._entries[name].path} and in {path}"
                    )
                self._entries[name] = entry

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._entries.items()}

    def fill(self, targets: Sequence[Target]) -> None:
        """Fill the memory of `targets`, in threads."""
        _in_threads([partial(self._fill, *each) for each in _by_tensor(targets).items()])

    def _fill(self, name: str, targets: Sequence[Target]) -> None:
        entry = self._entries[name]
        with entry.path.open("rb", buffering=0) as file:

            def read(start: int, into: torch.Tensor) -> None:
                view, offset = as_bytes(into).data, entry.offset + start * entry.dtype.itemsize
                while view:
                    try:
                        count = os.preadv(file.fileno(), [view], offset)
                    except OSError as error:
                        raise CheckpointError(
                            f"init_from: {entry.path}: {error.strerror}"
                        ) from None
                    if count == 0:
                        raise CheckpointError(f"init_from: {entry.path} ends too early")
                    view, offset = view[count:], offset + count

            _fill_in_pieces(targets, entry.shape, entry.dtype, read)


def _read_header(path: Path) -> dict[str, _Entry]:
    """The tensors of a safetensors file; each lies within the file.

    Raises:
        CheckpointError: it is no such file, or is cut off.
    """
    try:
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, total - 8):
                raise ValueError("its header is not there")
            header = json.loads(file.read(length))
        entries, extents = {}, []
        for name, each in header.items():
            if name == "__metadata__":
                continue
            dtype, shape = _DTYPES[each["dtype"]], tuple(_size(size) for size in each["shape"])
            start, stop = (_size(offset) for offset in each["data_offsets"])
            if stop - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{name} has a wrong size")
            if 8 + length + stop > total:
                raise ValueError(
                    f"it is cut off: {name} should end at byte {8 + length + stop}, and it has {total}"
                )
            entries[name] = _Entry(path, dtype, shape, 8 + length + start)
            extents.append((start, stop, name))
        end = 0
        for start, stop, name in sorted(extents):  # as the safetensors library has it
            if start != end:
                raise ValueError(f"{name} does not begin where the tensor before it ends")
            end = stop
    except OSError as error:
        raise CheckpointError(f"init_from: {path}: {error.strerror}") from None
    except KeyError as error:
        raise CheckpointError(
            f"init_from: {path} is not usable: it has no, or an unknown, {error}"
        ) from None
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(
            f"init_from: {path} is not a whole safetensors file: {error}"
        ) from None
    return entries


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is no size")
    return value


class _StateDict:
    """What torch saved of `model.state_dict()`, mapped. Nothing but tensors is made of its bytes."""

    def __init__(self, path: Path) -> None:
        try:
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # zip, pickle and runtime errors, by what is wrong with the file
            raise CheckpointError(
                f"init_from: {path} is no state_dict of torch: {_why_not_loaded(path, error)}; "
                "write it as torch.save does with model.state_dict()"
            ) from None
        self._tensors = _only_tensors(found, path)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def fill(self, targets: Sequence[Target]) -> None:
        """Fill the memory of `targets`, one tensor after the other."""
        for name, into in _by_tensor(targets).items():
            tensor = self._tensors[name]
            flat = tensor.detach().reshape(-1)  # a copy of this one tensor if it is a view
            read = partial(_copy_mapped if flat.data_ptr() == tensor.data_ptr() else _copy, flat)
            _fill_in_pieces(into, tuple(tensor.shape), tensor.dtype, read)


def _why_not_loaded(path: Path, error: Exception) -> str:
    if path.is_file() and not zipfile.is_zipfile(path):
        return "neither torch.save nor safetensors wrote it, or a torch older than 1.6"
    if type(error).__name__ == "UnpicklingError":
        return "it holds more than tensors, such as a whole module, and nothing is unpickled here"
    return first_line(error)


def _only_tensors(found: Any, path: Path) -> dict[str, torch.Tensor]:
    if not isinstance(found, Mapping):
        raise CheckpointError(f"init_from: {path} holds a {type(found).__name__}, not a state_dict")
    tensors = {str(name): value for name, value in found.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        inner = [str(name) for name, value in found.items() if isinstance(value, Mapping)]
        hint = f": write found[{inner[0]!r}] of it to a file of its own" if inner else ""
        raise CheckpointError(f"init_from: {path} holds no tensors by name{hint}")
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = (
                "quantized"
                if tensor.is_quantized
                else "without values"
                if tensor.is_meta
                else "sparse"
            )
            raise CheckpointError(
                f"init_from: {name} of {path} is {kind}: write it as a dense tensor of numbers"
            )
    return tensors


def _copy(flat: torch.Tensor, start: int, into: torch.Tensor) -> None:
    into.copy_(flat[start : start + into.numel()])


def _copy_mapped(flat: torch.Tensor, start: int, into: torch.Tensor) -> None:
    """As `_copy`, from a mapped file, little by little."""
    size = _PIECE_BYTES // flat.element_size()
    parts = flat[start : start + into.numel()].split(size)
    for room, part in zip(into.split(size), parts, strict=True):
        room.copy_(part)
        _forget(part)


def _forget(part: torch.Tensor) -> None:
    """Give up the pages of a mapped file that were read: they stay in the page cache, and in nobody's memory."""
    start = -(-part.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (part.data_ptr() + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > start:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED
        )


def _by_tensor(targets: Sequence[Target]) -> dict[str, list[Target]]:
    found: dict[str, list[Target]] = {}
    for target in targets:
        found.setdefault(target.names[0], []).append(target)
    return found


def _fill_in_pieces(
    targets: Sequence[Target],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    read: Callable[[int, torch.Tensor], None],
) -> None:
    """Fill all targets of a contiguous tensor from its elements, each of which is read once.

    Args:
        read: `read(start, into)` reads elements from `start` on.
    """
    stride = contiguous_stride(shape)
    everything = Extent(shape, stride, 0, math.prod(shape))
    stretches = [target.extent for target in targets]
    if any(each.order != everything.order for each in stretches):  # what they have is scattered
        stretches = [everything]
    size = max(1, _PIECE_BYTES // dtype.itemsize)
    scratch = torch.empty(min(size, everything.stop), dtype=dtype)
    for stretch in stretches:
        rooms = (target.place_of(stretch, dtype) for target in targets)
        if (room := next((room for room in rooms if room is not None), None)) is not None:
            read(stretch.start, room)
            continue
        for start in range(stretch.start, stretch.stop, size):
            piece = Extent(shape, stride, start, min(start + size, stretch.stop))
            into = [target for target in targets if any(overlaps(piece, target.extent))]
            if into:
                values = scratch[: piece.stop - piece.start]
                read(piece.start, values)
                for target in into:
                    target.take(values, piece)


def _in_threads(tasks: Sequence[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(_READERS, thread_name_prefix="zrun-load") as pool:
        for done in [pool.submit(task) for task in tasks]:
            done.result()
