"""Small checkpoints for tests: made through the store, so that they are what a run would leave."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from zrun_core.checkpoint.folder import CheckpointFolder
from zrun_core.checkpoint.manifest import Manifest, SavedRank, TensorInfo
from zrun_core.checkpoint.shard_file import DTYPES, WriteItem, write_shard

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
        start, stop = (flat.numel() * index // ranks for index in (rank, rank + 1))
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
        )
        for name, tensor in state.items()
    ]


def rank_states(ranks: int) -> list[SavedRank]:
    """Of ranks that have drawn nothing and learnt nothing."""
    return [SavedRank(rank, {}, {"order": None, "late": []}) for rank in range(ranks)]


def write_step(
    folder: CheckpointFolder, step: int, ranks: int = 2, run_id: str = "run-1", scale: int = 1
) -> Manifest:
    """Save and commit a toy step the way a run does, up to `latest`."""
    state = toy_state(step, scale)
    tmp = folder.begin(step)
    shards = [
        write_shard(tmp / f"rank-{rank:05d}.safetensors", toy_parts(state, rank, ranks))
        for rank in range(ranks)
    ]
    manifest = Manifest(
        step=step,
        run_id=run_id,
        versions={"zrun": "0.1.0"},
        job={"name": "toy"},
        world_size=ranks,
        layout={"stage": 3},
        progress={"samples": 64 * step},
        files=[info for info, _ in shards],
        tensors=toy_infos(state),
        fragments=[each for _, fragments in shards for each in fragments],
        rank_states=rank_states(ranks),
    )
    folder.commit(tmp, manifest)
    folder.point_latest(step)
    return manifest


def read_step_state(path: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Every value of a checkpoint, read and verified fragment by fragment."""
    from zrun_core.checkpoint.shard_file import read_fragment

    found = {}
    for info in manifest.tensors:
        flat = torch.empty(math.prod(info.shape), dtype=getattr(torch, info.dtype))
        for fragment in manifest.fragments:
            if (fragment.tensor, fragment.state) == (info.name, "value"):
                read_fragment(path, fragment, flat[fragment.start : fragment.stop])
        found[info.name] = flat.view(info.shape)
    return found


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
