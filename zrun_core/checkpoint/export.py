"""Exporting a checkpoint: safetensors, in one file or many, or a plain `state_dict`.

Tensors pass through memory one at a time, each read with its digest compared. The values are those
that training goes
on with: the fp32 masters where there are any.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from zrun_core.checkpoint.block_writer import Bytes, save_error, write_file
from zrun_core.checkpoint.manifest import Manifest
from zrun_core.checkpoint.manifest_fields import ITEM_BYTES, VALUE
from zrun_core.checkpoint.manifest_parts import TensorInfo
from zrun_core.checkpoint.model_files import CONFIG
from zrun_core.checkpoint.reader import Reader, Target
from zrun_core.checkpoint.shard_file import Entry, as_bytes, check_header, encode_header
from zrun_core.checkpoint.step_index import StepIndex, open_index
from zrun_core.distributed.transport import Group
from zrun_core.errors import JobError, SaveError

DTYPES = {"keep": None, "fp32": "float32", "bf16": "bfloat16"}
_FLOATING = ("float64", "float32", "float16", "bfloat16")
_METADATA = {"format": "pt"}  # transformers refuses a file without
_MODE = 0o666  # less the umask: made to be handed on


_ALONE = Group("world", (0,), 0, None)


@dataclass(frozen=True)
class _Item:
    """A tensor to export, under its own name or one that is tied to it."""

    name: str
    info: TensorInfo
    dtype: str

    @property
    def num_bytes(self) -> int:
        return self.info.numel * ITEM_BYTES[self.dtype]

    def load(self, step: Reader) -> torch.Tensor:
        """Return the tensor, contiguous.

        Held meanwhile: its elements as stored, and as exported if that differs.
        """
        info = self.info
        stored = _stored_dtype(info)
        flat = torch.empty(info.numel, dtype=getattr(torch, stored))
        if info.numel:
            step.fill([Target((info.name,), VALUE, info.shape, info.stride, 0, flat)])
        tensor = flat.as_strided(info.shape, info.stride)
        if tensor.is_contiguous() and stored == self.dtype:
            return tensor
        return torch.empty(info.shape, dtype=getattr(torch, self.dtype)).copy_(tensor)


def export(
    step: Path, manifest: Manifest, out: Path, dtype: str = "keep", max_shard_bytes: int = 5 * 10**9
) -> list[Path]:
    """Write the values of a checkpoint to `out`, whole or not at all.

    Args:
        out: what does not exist yet: `*.safetensors` one file, `*.pt` or `*.pth` a plain
            `state_dict`, else a folder of `model.safetensors`, or of several with an index as
            `transformers` writes them. It has a config too where the model is one of transformers,
            and then names are those of that model.
        dtype: a key of DTYPES; "keep" is the format of the masters. Integers and masks stay what
            they are.
        max_shard_bytes: of a file in a folder, unless a single tensor is larger.

    Returns:
        The files.

    Raises:
        JobError: `out` exists.
        CheckpointError: the checkpoint is damaged.
        SaveError: the disk is full, or `out` cannot be written.
    """
    if os.path.lexists(out):
        raise JobError(f"{out} exists: choose another name, or remove it")
    items = _items(manifest, DTYPES[dtype])
    index = open_index(step, manifest)
    reader = Reader(index, _ALONE)
    tmp = out.with_name(f".{out.name}.tmp-{secrets.token_hex(8)}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix in (".pt", ".pth"):
            _write_state_dict(tmp, reader, items)
        elif out.suffix == ".safetensors":
            _write_safetensors(tmp, reader, items)
        else:
            tmp.mkdir()
            _write_folder(tmp, reader, _as_in_library(manifest, items), max_shard_bytes)
            _write_model_files(tmp, index, items)
        os.rename(tmp, out)
    except OSError as error:
        raise save_error(out, error) from error
    finally:
        _remove(tmp)
    return sorted(out.iterdir()) if out.is_dir() else [out]


def _items(manifest: Manifest, dtype: str | None) -> list[_Item]:
    items = []
    for info in manifest.tensors:
        target = _stored_dtype(info)
        if dtype is not None and target in _FLOATING:
            target = dtype
        items += [_Item(name, info, target) for name in (info.name, *info.aliases)]
    return items


def _stored_dtype(info: TensorInfo) -> str:
    return info.states.get(VALUE, info.dtype)  # without elements, without a value


def _write_safetensors(path: Path, step: Reader, items: Sequence[_Item]) -> dict[str, int]:
    """Write one file; return the offset of each tensor in it."""
    items = sorted(items, key=lambda item: -ITEM_BYTES[item.dtype])
    entries = [Entry(each.name, each.dtype, each.info.shape, each.num_bytes) for each in items]
    header = encode_header(entries, _METADATA)
    offsets = {}
    end = len(header)
    for item in items:
        offsets[item.name] = end
        end += item.num_bytes

    def pieces() -> Iterator[Bytes]:
        yield np.frombuffer(header, dtype=np.uint8)
        for item in items:
            yield as_bytes(item.load(step))

    write_file(path, end, pieces(), _MODE)
    return offsets


def _write_folder(folder: Path, step: Reader, items: Sequence[_Item], max_shard_bytes: int) -> None:
    shards: list[list[_Item]] = [[]]
    filled = 0
    for item in items:
        if shards[-1] and filled + item.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += item.num_bytes
    if len(shards) == 1:
        _write_safetensors(folder / "model.safetensors", step, items)
        return
    where = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_safetensors(folder / name, step, shard)
        where.update({item.name: name for item in shard})
    total = sum(item.num_bytes for item in items)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    text = json.dumps(index, indent=2)
    content = np.frombuffer(f"{text}\n".encode(), dtype=np.uint8)
    write_file(folder / "model.safetensors.index.json", len(content), [content], _MODE)


def _as_in_library(manifest: Manifest, items: Sequence[_Item]) -> Sequence[_Item]:
    """Return the items by the names of the model of transformers, if it is inside another one."""
    model = manifest.model
    if model is None or model.obstacle is not None or model.prefix is None:
        return items
    return [replace(item, name=item.name.removeprefix(model.prefix)) for item in items]


def _write_model_files(folder: Path, step: StepIndex, items: Sequence[_Item]) -> None:
    """Copy config and tokenizer from the step; the config gets the format of the tensors."""
    # All are floating; frozen parameters may be narrower than the masters of the others.
    formats = [item.dtype for item in items if item.info.kind != "buffer"]
    widest = max(formats, key=lambda dtype: ITEM_BYTES[dtype], default=None)
    for file in step.manifest.files_beside:
        content = check_header(step.folder, file, step.content(file.name).header_digest)
        if file.name == CONFIG:
            config = {**json.loads(content), "dtype": widest}
            content = f"{json.dumps(config, indent=2, sort_keys=True)}\n".encode()
        pieces = [np.frombuffer(content, dtype=np.uint8)]
        write_file(folder / file.name, len(content), pieces, _MODE)


def _write_state_dict(path: Path, step: Reader, items: Sequence[_Item]) -> None:
    """Write what `torch.load` returns as a dict of tensors; tied names share their memory.

    The tensors lie in a file meanwhile, from which torch reads them through the page cache: none is
        held in memory.
    """
    values = path.with_name(f"{path.name}.values")
    try:
        first = {item.info.name: item for item in reversed(items)}  # of each group of tied names
        offsets = _write_safetensors(values, step, list(first.values()))
        mapped = {name: _map(values, offsets[item.name], item) for name, item in first.items()}
        with path.open("xb") as file:
            try:
                torch.save({item.name: mapped[item.info.name] for item in items}, file)
            except RuntimeError as error:  # its writer, on a full disk
                raise SaveError(f"cannot save {path}: {str(error).splitlines()[0]}") from error
            file.flush()
            os.fsync(file.fileno())
    finally:
        values.unlink(missing_ok=True)


def _map(path: Path, offset: int, item: _Item) -> torch.Tensor:
    """Map a tensor of the file `path`, in a storage of its own that is read when it is touched."""
    dtype = getattr(torch, item.dtype)
    if item.num_bytes == 0:
        return torch.empty(item.info.shape, dtype=dtype)
    content = np.memmap(path, dtype=np.uint8, mode="c", offset=offset, shape=(item.num_bytes,))
    return torch.from_numpy(content).view(dtype).view(item.info.shape)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
