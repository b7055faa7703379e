"""What is exported loads elsewhere.

The safetensors library, torch.load, a strict load into the plain model.
"""

from __future__ import annotations

import errno
import gc
import json
import os
from pathlib import Path

import pytest
import torch
from checkpoint_toys import write_files
from safetensors.torch import load_file

from zrun_core.checkpoint.divisions import part_start
from zrun_core.checkpoint.export import export
from zrun_core.checkpoint.folder import CheckpointFolder
from zrun_core.checkpoint.manifest import Manifest
from zrun_core.checkpoint.manifest_parts import TensorInfo
from zrun_core.checkpoint.shard_file import DTYPES, WriteItem
from zrun_core.errors import CheckpointError, JobError, SaveError


class Plain(torch.nn.Module):
    """Tied weights, buffers of several formats, a frozen and a channels_last parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(100, 8)
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm1d(8)
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)
        self.head = torch.nn.Linear(8, 100, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))


def save_model(
    folder: CheckpointFolder, model: torch.nn.Module, ranks: int = 3
) -> tuple[Path, Manifest]:
    """A step with the state of `model`, cut into flat ranges in memory order over `ranks` files."""
    names: dict[int, list[str]] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    infos, parts = [], [[] for _ in range(ranks)]
    for name, *aliases in names.values():
        tensor = tensors[name].detach()
        memory = tensor.as_strided((tensor.numel(),), (1,))
        kind = "buffer" if name in dict(model.named_buffers()) else "param"
        infos.append(
            TensorInfo(
                name,
                tuple(tensor.shape),
                tensor.stride(),
                DTYPES[tensor.dtype],
                kind,
                tuple(aliases),
                {},
                {"value": DTYPES[tensor.dtype]} if tensor.numel() else {},
            )
        )
        for rank in range(ranks):
            start, stop = (part_start(tensor.numel(), 1, ranks, each) for each in (rank, rank + 1))
            if start < stop:
                parts[rank].append(WriteItem(name, "value", start, stop, memory[start:stop]))
    tmp = folder.begin(7)
    manifest = write_files(tmp, 7, parts, infos)
    folder.commit(tmp, manifest)
    return folder.step_path(7), manifest


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints")


def load(files: list[Path]) -> dict[str, torch.Tensor]:
    if files[0].suffix == ".pt":
        return torch.load(files[0], weights_only=True)
    return {
        name: tensor
        for file in files
        if file.suffix == ".safetensors"
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("out", ["model.safetensors", "model.pt", "model", "many"])
@pytest.mark.parametrize("dtype", ["keep", "fp32", "bf16"])
def test_strict_load_into_the_plain_model(
    folder: CheckpointFolder, tmp_path: Path, out: str, dtype: str
) -> None:
    torch.manual_seed(1)
    model = Plain()
    step, manifest = save_model(folder, model)
    files = export(step, manifest, tmp_path / out, dtype, 3000 if out == "many" else 10**9)
    exported = load(files)
    assert all(
        tensor.dtype == torch.bfloat16
        for tensor in exported.values()
        if dtype == "bf16" and tensor.is_floating_point()
    )
    torch.manual_seed(2)
    plain = Plain()
    plain.load_state_dict(exported, strict=True)
    for name, tensor in model.state_dict().items():
        expected = (
            tensor.bfloat16().float() if dtype == "bf16" and tensor.is_floating_point() else tensor
        )
        assert torch.equal(plain.state_dict()[name], expected), name
    assert not [path for path in tmp_path.iterdir() if "tmp" in path.name]


def test_tied_names_share_memory_in_a_state_dict(folder: CheckpointFolder, tmp_path: Path) -> None:
    (file,) = export(*save_model(folder, Plain()), tmp_path / "model.pt")
    state = torch.load(file, weights_only=True)
    assert state.keys() == Plain().state_dict().keys()
    assert state["embedding.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert (
        state["conv.weight"].untyped_storage().nbytes() == 4 * 108
    )  # no tensor holds on to the others


def test_shards_have_an_index_as_transformers_writes_it(
    folder: CheckpointFolder, tmp_path: Path
) -> None:
    files = export(*save_model(folder, Plain()), tmp_path / "model", max_shard_bytes=3400)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    names = [file.name for file in files if file.suffix == ".safetensors"]
    assert names == [
        f"model-{number:05d}-of-{len(names):05d}.safetensors" for number in range(1, len(names) + 1)
    ]
    assert len(names) > 2
    state = Plain().state_dict()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    assert index["weight_map"].keys() == state.keys()
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "model" / file)
    assert all(file.stat().st_size < 3400 + 4096 for file in files)


def test_masters_are_kept_unless_told(folder: CheckpointFolder, tmp_path: Path) -> None:
    """A model that runs in bf16 with fp32 masters is exported in fp32, bit for bit."""
    model = torch.nn.Linear(4, 4)
    step, manifest = save_model(folder, model, ranks=1)
    infos = [TensorInfo(**{**info.__dict__, "dtype": "bfloat16"}) for info in manifest.tensors]
    (file,) = export(
        step, Manifest(**{**manifest.__dict__, "tensors": infos}), tmp_path / "a.safetensors"
    )
    assert torch.equal(load_file(file)["weight"], model.weight)


def test_damage_is_not_exported(folder: CheckpointFolder, tmp_path: Path) -> None:
    step, manifest = save_model(folder, Plain())
    with (step / "rank-00001.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    for out in ("model", "model.pt", "model.safetensors"):
        with pytest.raises(CheckpointError, match="checksum"):
            export(step, manifest, tmp_path / out)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_nothing_is_overwritten(folder: CheckpointFolder, tmp_path: Path) -> None:
    step, manifest = save_model(folder, Plain())
    (tmp_path / "mine.pt").write_text("mine")
    with pytest.raises(JobError, match=r"mine\.pt exists"):
        export(step, manifest, tmp_path / "mine.pt")
    assert (tmp_path / "mine.pt").read_text() == "mine"


@pytest.mark.parametrize("out", ["model", "model.pt", "model.safetensors"])
def test_full_disk(
    folder: CheckpointFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    step, manifest = save_model(folder, Plain())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SaveError, match="No space left on device"):
        export(step, manifest, tmp_path / out)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_full_disk_while_torch_writes(
    folder: CheckpointFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, manifest = save_model(folder, Plain())

    def full(*_: object) -> None:
        raise RuntimeError(
            "[enforce fail at inline_container.cc:672] . unexpected pos 1 vs 0\nmore"
        )

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(SaveError, match="unexpected pos"):
        export(step, manifest, tmp_path / "model.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


@pytest.mark.skipif(
    not os.path.exists("/proc/self/clear_refs"), reason="needs the kernel's high-water mark"
)
@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_memory_is_twice_the_largest_tensor(
    folder: CheckpointFolder, tmp_path: Path, dtype: str
) -> None:
    """Three tensors of 64 MB, one of them in another memory order: never more than two at once."""
    model = torch.nn.ParameterDict(
        {f"w{index}": torch.nn.Parameter(torch.ones(4096, 4096)) for index in range(2)}
    )
    model["w2"] = torch.nn.Parameter(torch.ones(4096, 4096).t())
    step, manifest = save_model(folder, model, ranks=2)
    del model
    gc.collect()
    buffers = 20 * 2**20  # the blocks of the writer
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    export(step, manifest, tmp_path / "model.safetensors", dtype)
    assert _resident("VmHWM") - before <= 2 * 64 * 2**20 + buffers + 8 * 2**20


def _resident(key: str) -> int:
    """Bytes, from the kernel's account of this process."""
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"{key}:")
    )
    return int(line.split()[1]) * 1024
