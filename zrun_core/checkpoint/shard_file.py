"""The file of one rank: safetensors, written from memory and read straight back into it.

Wide formats come first, so that every tensor is aligned to its format, and those of one width in
the order of their keys. The rank's record is the last, see `record`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from zrun_core.checkpoint.block_writer import Bytes, write_file
from zrun_core.checkpoint.digest import opened, read_into
from zrun_core.checkpoint.manifest_fields import ITEM_BYTES, RANK
from zrun_core.checkpoint.manifest_parts import FileInfo, Fragment, SavedRank, key_of
from zrun_core.checkpoint.record import DIGEST_BYTES, KEY, OwnTensor, RankRecord
from zrun_core.checkpoint.verify import check_size
from zrun_core.errors import CheckpointError, SaveError
from zrun_core.tiers.stored import BlockReader, Stored

DTYPES = {getattr(torch, name): name for name in ITEM_BYTES}
_SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_ALIGNMENT = 4096  # the data begins on a page


@dataclass(frozen=True)
class WriteItem:
    """A flat range of one state of one tensor, to be written."""

    tensor: str
    state: str
    start: int  # elements, in memory order
    stop: int
    data: torch.Tensor | Stored  # [stop - start], contiguous, on the CPU or on another tier

    @property
    def key(self) -> str:
        return key_of(self.tensor, self.state, self.start)


@dataclass(frozen=True)
class Entry:
    """A tensor in a safetensors file."""

    key: str
    dtype: str
    shape: Sequence[int]
    num_bytes: int


def write_shard(
    path: Path,
    parts: Sequence[WriteItem],
    state: SavedRank,
    when_read: Callable[[], None] = lambda: None,
) -> FileInfo:
    """Write the file of a rank, with its record, and wait until it is on the disk.

    Args:
        when_read: called when the data of the parts is no longer needed.

    Raises:
        SaveError: the file exists, or the disk is full, read-only or fails; the file is removed.
    """
    parts = sorted(parts, key=lambda part: (-part.data.dtype.itemsize, part.key))
    entries = [_entry(part) for part in parts]
    if len({entry.key for entry in entries}) != len(entries):
        raise SaveError(f"cannot save {path}: two tensors have the same key in it; rename a module")
    own = [
        OwnTensor(part.tensor, entry.dtype, part.stop)
        for part, entry in zip(parts, entries, strict=True)
        if part.state == RANK
    ]

    def record(digests: Sequence[str]) -> Bytes:
        header_digest, *fragments = digests
        made = RankRecord(state.rng, state.learnt, own, header_digest, fragments)
        return np.frombuffer(made.to_json(), dtype=np.uint8)

    num_record = len(record(["0" * DIGEST_BYTES] * (1 + len(entries))))
    header = encode_header([*entries, Entry(KEY, "uint8", (num_record,), num_record)])
    num_bytes = len(header) + sum(entry.num_bytes for entry in entries) + num_record
    with BlockReader() as reader:
        pieces = _pieces(header, parts, reader, when_read)
        *_, digest = write_file(path, num_bytes, pieces, last=record)
    return FileInfo(
        name=path.name,
        num_bytes=num_bytes,
        header_bytes=len(header),
        own_bytes=sum(each.num_bytes for each in own),
        record_bytes=num_record,
        digest=digest,
    )


def _pieces(
    header: bytes,
    parts: Sequence[WriteItem],
    reader: BlockReader,
    when_read: Callable[[], None],
) -> Iterator[Bytes | Iterator[Bytes]]:
    """Yield the content of a file. What is elsewhere is read in blocks while they are taken."""
    yield np.frombuffer(header, dtype=np.uint8)
    for part in parts:
        if isinstance(part.data, torch.Tensor):
            yield as_bytes(part.data)
        else:
            yield map(as_bytes, part.data.read(reader))
    reader.close()  # before an update needs what was lent
    when_read()


def write_plain(path: Path, content: bytes) -> FileInfo:
    """Write a new file without tensors, and wait until it is on the disk.

    Raises:
        SaveError: as `write_shard`.
    """
    (found,) = write_file(path, len(content), [np.frombuffer(content, dtype=np.uint8)])
    return FileInfo(path.name, len(content), len(content), 0, 0, found)


def _entry(part: WriteItem) -> Entry:
    data = part.data
    if isinstance(data, torch.Tensor):
        is_flat = data.dim() == 1 and data.is_contiguous()
        if not is_flat or data.device.type != "cpu":
            raise ValueError(f"{part.key} is not flat CPU memory")
    if part.stop - part.start != data.numel():
        raise ValueError(
            f"{part.key}: {data.numel()} elements for the range {part.start} to {part.stop}"
        )
    if data.dtype not in DTYPES:
        raise SaveError(
            f"cannot save {part.tensor}: {data.dtype} has no place in a safetensors file"
        )
    return Entry(part.key, DTYPES[data.dtype], (data.numel(),), data.nbytes)


def as_bytes(data: torch.Tensor) -> Bytes:
    """Return the memory of a contiguous CPU tensor, [bytes]."""
    flat: Bytes = data.detach().reshape(-1).view(torch.uint8).numpy()
    return flat


def encode_header(entries: Sequence[Entry], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header of a safetensors file: its length, then JSON, padded to a whole page.

    Args:
        entries: the tensors, in the order of the file.
        metadata: texts by name, for other programs.
    """
    content: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for entry in entries:
        content[entry.key] = {
            "dtype": _SAFETENSORS[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.num_bytes],
        }
        offset += entry.num_bytes
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def read_fragment(folder: Path, fragment: Fragment, into: torch.Tensor) -> None:
    """Read a fragment into memory, and compare its digest.

    Args:
        into: [stop - start], contiguous, on the CPU, of the fragment's format.

    Raises:
        CheckpointError: the file is missing, short or damaged. `into` may hold anything then.
    """
    if (
        not into.is_contiguous()
        or DTYPES.get(into.dtype) != fragment.dtype
        or into.nbytes != fragment.num_bytes
    ):
        raise ValueError(f"{fragment.key} does not fit {into.numel()} elements of {into.dtype}")
    path = folder / fragment.file
    with opened(folder, fragment.file) as file:
        found = read_into(file, path, fragment.offset, as_bytes(into).data)
    if found != fragment.digest:
        raise CheckpointError(f"{path} is damaged: the checksum of {fragment.key} is wrong")


def check_header(folder: Path, file: FileInfo, digest: str) -> bytes:
    """Compare size and header of a file with the manifest.

    Returns:
        The header: all of a file without tensors.

    Raises:
        CheckpointError: the file is missing, of another size, or its header is damaged.
    """
    path = folder / file.name
    check_size(folder, file)
    with opened(folder, file.name) as opened_file:
        header = bytearray(file.header_bytes)
        found = read_into(opened_file, path, 0, memoryview(header))
    if found != digest:
        raise CheckpointError(f"{path} is damaged: the checksum of its header is wrong")
    return bytes(header)
