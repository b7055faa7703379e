"""Weights in files that other programs have written: safetensors, or a `state_dict` of torch."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zrun_core.checkpoint.reader import Target
from zrun_core.checkpoint.shard_file import as_bytes
from zrun_core.errors import CheckpointError
from zrun_core.memory.tensors import Extent, contiguous_stride, overlaps
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


@dataclass(frozen=True)
class _Entry:
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes, from the file's beginning


class SafetensorsFiles:
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
                offset = entry.offset + start * entry.dtype.itemsize
                _read_into(file.fileno(), entry.path, offset, as_bytes(into).data)

            _fill_in_pieces(targets, entry.shape, entry.dtype, read)


def _read_into(file: int, path: Path, offset: int, view: memoryview) -> None:
    """Fill `view` with the bytes of `file` from `offset` on."""
    while view:
        try:
            count = os.preadv(file, [view], offset)
        except OSError as error:
            raise CheckpointError(f"init_from: {path}: {error.strerror}") from None
        if count == 0:
            raise CheckpointError(f"init_from: {path} ends too early")
        view = view[count:]
        offset += count


def _read_header(path: Path) -> dict[str, _Entry]:
    """Return the tensors of a safetensors file; each lies within the file.

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
        entries = _entries(path, header, 8 + length, total)
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


def _entries(path: Path, header: Any, begin: int, total: int) -> dict[str, _Entry]:
    """Return the tensors that a header lists.

    Nothing is known of `header`, the JSON in it. The tensors begin at byte `begin` of the `total`
    bytes of the file.

    Raises:
        ValueError, TypeError, AttributeError, OverflowError, KeyError: it is not consistent.
    """
    entries = {}
    extents = []
    for name, each in header.items():
        if name == "__metadata__":
            continue
        dtype = _DTYPES[each["dtype"]]
        shape = tuple(_size(size) for size in each["shape"])
        start, stop = (_size(offset) for offset in each["data_offsets"])
        if stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} has a wrong size")
        if begin + stop > total:
            end = f"{name} should end at byte {begin + stop}"
            raise ValueError(f"it is cut off: {end}, and it has {total}")
        entries[name] = _Entry(path, dtype, shape, begin + start)
        extents.append((start, stop, name))
    end_before = 0
    for start, stop, name in sorted(extents):  # as the safetensors library has it
        if start != end_before:
            raise ValueError(f"{name} does not begin where the tensor before it ends")
        end_before = stop
    return entries


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is no size")
    return value


class StateDictFile:
    """A `state_dict` that torch has saved, mapped. Nothing but tensors is made of its bytes."""

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
            is_mapped = flat.data_ptr() == tensor.data_ptr()
            copy = _copy_mapped if is_mapped else _copy
            _fill_in_pieces(into, tuple(tensor.shape), tensor.dtype, partial(copy, flat))


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
        problem = _not_plain(tensor)
        if problem is not None:
            raise CheckpointError(
                f"init_from: {name} of {path} is {problem}: write it as a dense tensor of numbers"
            )
    return tensors


def _not_plain(tensor: torch.Tensor) -> str | None:
    """Return why a tensor is no dense array of numbers; None: it is."""
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_meta:
        return "without values"
    if tensor.layout is not torch.strided:
        return "sparse"
    return None


def _copy(flat: torch.Tensor, start: int, into: torch.Tensor) -> None:
    into.copy_(flat[start : start + into.numel()])


def _copy_mapped(flat: torch.Tensor, start: int, into: torch.Tensor) -> None:
    """As `_copy`, from a mapped file, little by little."""
    size = _PIECE_BYTES // flat.element_size()
    parts = flat[start : start + into.numel()].split(size)
    for target, part in zip(into.split(size), parts, strict=True):
        target.copy_(part)
        _drop_pages(part)


def _drop_pages(part: torch.Tensor) -> None:
    """Unmap the pages of a file that were read: they stay in the page cache, in no process."""
    start = -(-part.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (part.data_ptr() + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > start:
        length = ctypes.c_size_t(stop - start)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), length, mmap.MADV_DONTNEED)


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

    `read(start, into)` reads elements from `start` on, in the `dtype` of the file.
    """
    stride = contiguous_stride(shape)
    everything = Extent(shape, stride, 0, math.prod(shape))
    stretches = [target.extent for target in targets]
    if any(each.order != everything.order for each in stretches):  # what they have is scattered
        stretches = [everything]
    size = max(1, _PIECE_BYTES // dtype.itemsize)
    scratch = torch.empty(min(size, everything.stop), dtype=dtype)
    for stretch in stretches:
        memory = _direct_memory(targets, stretch, dtype)
        if memory is not None:
            read(stretch.start, memory)
            continue
        for start in range(stretch.start, stretch.stop, size):
            piece = Extent(shape, stride, start, min(start + size, stretch.stop))
            into = [target for target in targets if any(overlaps(piece, target.extent))]
            if into:
                values = scratch[: piece.stop - piece.start]
                read(piece.start, values)
                for target in into:
                    target.take(values, piece)


def _direct_memory(
    targets: Sequence[Target], extent: Extent, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return memory of a target that all of `extent` can be read straight to, if there is any."""
    for target in targets:
        memory = target.place_of(extent, dtype)
        if memory is not None:
            return memory
    return None


def _in_threads(tasks: Sequence[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(_READERS, thread_name_prefix="zrun-load") as pool:
        for done in [pool.submit(task) for task in tasks]:
            done.result()
