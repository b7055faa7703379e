"""Small checkpoints for tests: made through the store, so that they are what a run would leave."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zrun_core.checkpoint.digest import digest
from zrun_core.checkpoint.divisions import part_start, single_unit
from zrun_core.checkpoint.folder import CheckpointFolder, read_step
from zrun_core.checkpoint.manifest import Manifest
from zrun_core.checkpoint.manifest_fields import MANIFEST
from zrun_core.checkpoint.manifest_parts import Division, Fragment, SavedRank, TensorInfo
from zrun_core.checkpoint.shard_file import DTYPES, WriteItem, read_fragment, write_shard
from zrun_core.checkpoint.step_index import open_index

STATES = ("value", "exp_avg", "exp_avg_sq")


def toy_state(step: int, scale: int = 1) -> dict[str, torch.Tensor]:
    """Tensors whose every element tells the step: fp32, bf16, a counter, a mask, an empty one."""
    random = torch.Generator().manual_seed(step)
    return {
        "layer.weight": torch.randn(48 * scale, 33, generator=random) + step,
        "layer.bias": torch.randn(33, generator=random).bfloat16() + step,
        "norm.count": torch.tensor(step),
        "mask": torch.rand(7, generator=random) < 0.5,
        "empty": torch.zeros(0, 4),
    }


def toy_parts(state: dict[str, torch.Tensor], rank: int, ranks: int) -> list[WriteItem]:
    """The share of `rank`: an equal slice of every state of every tensor, and some RNG state."""
    parts = []
    for name, tensor in state.items():
        flat = tensor.reshape(-1)
        start, stop = (part_start(flat.numel(), 1, ranks, index) for index in (rank, rank + 1))
        if start == stop:
            continue
        states: Sequence[str] = STATES if name.startswith("layer.") else ("value",)
        for index, key in enumerate(states):
            parts.append(
                WriteItem(
                    name, key, start, stop, flat[start:stop] + index if index else flat[start:stop]
                )
            )
    rng = torch.arange(100 + rank, dtype=torch.uint8)
    return [*parts, WriteItem(f"rng/{rank}/torch", "rank", 0, len(rng), rng)]


def toy_infos(state: dict[str, torch.Tensor]) -> list[TensorInfo]:
    return [
        TensorInfo(
            name,
            tuple(tensor.shape),
            tensor.stride(),
            DTYPES[tensor.dtype],
            "param" if name.startswith("layer.") else "buffer",
            ("tied.weight",) if name == "layer.weight" else (),
            {"step": 3.0} if name.startswith("layer.") else {},
            toy_states(name, tensor),
        )
        for name, tensor in state.items()
    ]


def toy_states(name: str, tensor: torch.Tensor) -> dict[str, str]:
    states: Sequence[str] = STATES if name.startswith("layer.") else ("value",)
    return dict.fromkeys(states, DTYPES[tensor.dtype]) if tensor.numel() else {}


def toy_divisions(infos: Sequence[TensorInfo], ranks: int) -> list[Division]:
    """Each tensor is a unit, which all ranks divide."""
    units = [single_unit(info.name, [(info.name, info.numel)]) for info in infos]
    return [Division(list(range(ranks)), ranks, [unit for unit in units if unit is not None])]


def rank_state(rank: int) -> SavedRank:
    """Of a rank that has drawn nothing and learnt nothing."""
    return SavedRank(rank, {}, {"order": None, "late": []})


def write_files(
    tmp: Path,
    step: int,
    parts: Sequence[Sequence[WriteItem]],
    infos: Sequence[TensorInfo],
    **fields: Any,
) -> Manifest:
    """Write what each rank has into the folder of a step, and return the manifest of that."""
    ranks = len(parts)
    learnt = fields.pop("learnt", rank_state(0).learnt)
    known: dict[str, Any] = {
        "step": step,
        "run_id": "run-1",
        "versions": {},
        "job": {},
        "world_size": ranks,
        "layout": {},
        "progress": {},
        "files": [
            write_shard(tmp / f"rank-{rank:05d}.safetensors", part, SavedRank(rank, {}, learnt))
            for rank, part in enumerate(parts)
        ],
        "tensors": list(infos),
        "divisions": toy_divisions(infos, ranks),
    }
    return Manifest(**{**known, **fields})


def write_step(
    folder: CheckpointFolder, step: int, ranks: int = 2, run_id: str = "run-1", scale: int = 1
) -> Manifest:
    """Save and commit a toy step the way a run does, up to `latest`."""
    state = toy_state(step, scale)
    tmp = folder.begin(step)
    manifest = write_files(
        tmp,
        step,
        [toy_parts(state, rank, ranks) for rank in range(ranks)],
        toy_infos(state),
        run_id=run_id,
        versions={"zrun": "0.1.0"},
        job={"name": "toy"},
        layout={"stage": 3},
        progress={"samples": 64 * step},
    )
    folder.commit(tmp, manifest)
    folder.point_latest(step)
    return manifest


def fragments_of(path: Path, manifest: Manifest, file: str | None = None) -> list[Fragment]:
    """The fragments of a step, or of one of its files, in their order."""
    index = open_index(path, manifest)
    return list(index.fragments() if file is None else index.content(file).fragments)


def read_step_state(path: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Every value of a checkpoint, read and verified fragment by fragment."""
    found = {
        info.name: torch.empty(math.prod(info.shape), dtype=getattr(torch, info.dtype))
        for info in manifest.tensors
    }
    for fragment in fragments_of(path, manifest):
        if fragment.state == "value":
            read_fragment(path, fragment, found[fragment.tensor][fragment.start : fragment.stop])
    return {info.name: found[info.name].view(info.shape) for info in manifest.tensors}


# Manifests that somebody wrote to do harm: their digest fits.


def forged(text: bytes, change: Callable[[Any], None]) -> bytes:
    raw = json.loads(text)
    del raw["digest"]
    change(raw)
    return signed(json.dumps(raw))


def signed(text: str) -> bytes:
    body = text.encode()[:-1]
    return body + b',\n"digest":"%s"}\n' % digest(body).encode()


def forge_record(path: Path, rank: int, change: Callable[[Any], None] | None) -> None:
    """Change the record of a rank, and all digests of it. Its length may change.

    Args:
        change: of its JSON; None: it becomes something else.
    """
    info = read_step(path).files[rank]
    file = path / info.name
    content = file.read_bytes()
    raw = json.loads(content[-info.record_bytes :])
    record = b"\x00not JSON"
    if change is not None:
        change(raw)
        record = json.dumps(raw).encode()
    file.write_bytes(content[: -info.record_bytes] + record)

    def fit(manifest: Any) -> None:
        told = manifest["files"][rank]
        told["num_bytes"] += len(record) - info.record_bytes
        told["record_bytes"] = len(record)
        told["digest"] = digest(record)

    manifest = path / MANIFEST
    manifest.write_bytes(forged(manifest.read_bytes(), fit))


def set_to(*path: Any) -> Callable[[Any], None]:
    """A change that sets the value at `path[:-1]` to `path[-1]`."""

    def change(raw: Any) -> None:
        for key in path[:-2]:
            raw = raw[key]
        raw[path[-2]] = path[-1]

    return change


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth else {}


class Reads:
    """Counts how often each byte of a file is read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._preadv = os.preadv
        self._lock = threading.Lock()
        self.times: dict[str, np.ndarray] = {}  # by file, reads of each byte
        patch.setattr(os, "preadv", self._read)

    def _read(self, file: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        count = self._preadv(file, buffers, offset, *flags)
        name = os.readlink(f"/proc/self/fd/{file}")
        with self._lock:
            known = self.times.setdefault(name, np.zeros(os.fstat(file).st_size, dtype=int))
            known[offset : offset + count] += 1
        return count

    @property
    def most(self) -> int:
        return max(int(times.max()) for times in self.times.values())

    @property
    def num_bytes(self) -> int:
        return sum(int(times.sum()) for times in self.times.values())
