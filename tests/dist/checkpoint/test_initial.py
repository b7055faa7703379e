"""Weights to start from: whatever they come in, they are the same; what does not fit is named.

Memory stays small.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from runs import Speaker, job, look, run
from safetensors.torch import save_file
from torch import nn
from toys import make_sharded

from zrun_core.checkpoint.folder import read_step
from zrun_core.checkpoint.initial_weights import load_weights, open_weights
from zrun_core.checkpoint.model_state import ModelState
from zrun_core.spine.sections.checkpoint import InitFromConfig


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(11)
    model = Speaker()
    nn.init.normal_(model.norm.running_mean)
    return model.state_dict()


def untied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in state.items() if name != "head.weight"}


def as_file(folder: Path) -> str:
    save_file(untied(weights()), folder / "model.safetensors")
    return str(folder / "model.safetensors")


def as_folder(folder: Path) -> str:
    """As transformers writes it: two files and an index."""
    state = untied(weights())
    names = list(state)
    parts = {"model-1-of-2.safetensors": names[:5], "model-2-of-2.safetensors": names[5:]}
    for file, held in parts.items():
        save_file({name: state[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(folder)


def as_state_dict(folder: Path) -> str:
    torch.save(weights(), folder / "model.pt")
    return str(folder / "model.pt")


FORMS = [as_file, as_folder, as_state_dict]


def values(found: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    parts: dict[str, dict[int, Any]] = {}
    for result in found:
        for (tensor, state, start), data in result["parts"].items():
            if state == "value":
                parts.setdefault(tensor, {})[start] = torch.from_numpy(data)
    return {
        name: torch.cat([held[start] for start in sorted(held)]) for name, held in parts.items()
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_weights(ranks, tmp_path, form, precision):
    keys = job(zero=3, precision=precision, init_from=form(tmp_path))
    found = values(ranks(2).run(look, keys, str(tmp_path / "run"), None))
    for name, value in untied(weights()).items():
        expected = value.flatten().float()
        if precision == "bf16" and name == "scale":  # frozen: it has no master
            expected = expected.bfloat16().float()
        assert torch.equal(found[name], expected), name


@pytest.mark.parametrize("below", ["", "checkpoints", "checkpoints/step-00000002"])
def test_weights_of_a_checkpoint(ranks, tmp_path, below):
    ranks(2).run(run, job(zero=3, steps=2), str(tmp_path / "before"))
    before = values(ranks(2).run(look, job(steps=2), str(tmp_path / "before"), {}))
    keys = job(zero=1, init_from=str(tmp_path / "before" / below), optim={"name": "sgd"})
    found = ranks(2).run(look, keys, str(tmp_path / "run"), None)
    assert [each["step"] for each in found] == [0, 0]
    for name, value in before.items():
        assert torch.equal(values(found)[name], value), name


def renamed(folder: Path) -> str:
    state = {f"model.{name}": value for name, value in untied(weights()).items()}
    save_file({**state, "extra": torch.zeros(3)}, folder / "renamed.safetensors")
    return str(folder / "renamed.safetensors")


def test_names_are_mapped(ranks, tmp_path):
    names = {r"model\.(.*)": r"\1", "extra": ""}
    keys = job(init_from={"path": renamed(tmp_path), "map": names})
    found = values(ranks(2).run(look, keys, str(tmp_path / "run"), None))
    assert torch.equal(found["embed.weight"], weights()["embed.weight"].flatten())


def test_not_strict_leaves_the_rest_as_it_is(ranks, tmp_path):
    save_file(
        {"embed.weight": torch.ones(13, 16), "other": torch.ones(2)}, tmp_path / "part.safetensors"
    )
    keys = job(init_from={"path": str(tmp_path / "part.safetensors"), "strict": False})
    found = values(ranks(2).run(look, keys, str(tmp_path / "run"), None))
    plain = values(ranks(2).run(look, job(), str(tmp_path / "plain"), None))
    assert found["embed.weight"].eq(1).all()
    for name, value in plain.items():
        assert name == "embed.weight" or torch.equal(found[name], value), name


def cut_off(folder: Path) -> str:
    path = Path(as_file(folder))
    path.write_bytes(path.read_bytes()[:-10])
    return str(path)


def missing_file(folder: Path) -> str:
    as_folder(folder)
    (folder / "model-2-of-2.safetensors").unlink()
    return str(folder)


def of_another_shape(folder: Path) -> str:
    save_file(
        {**untied(weights()), "embed.weight": torch.ones(12, 16)}, folder / "other.safetensors"
    )
    return str(folder / "other.safetensors")


def with_objects(folder: Path) -> str:
    torch.save(
        {"model": weights(), "optimizer": torch.optim.SGD([torch.ones(1)])}, folder / "all.pt"
    )
    return str(folder / "all.pt")


def nested(folder: Path) -> str:
    torch.save({"model": weights(), "epoch": 3}, folder / "nested.pt")
    return str(folder / "nested.pt")


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (renamed, "its names are like model."),
        (of_another_shape, "embed.weight is [12, 16] in"),
        (cut_off, "it is cut off: "),
        (
            missing_file,
            "model-2-of-2.safetensors is missing, which model.safetensors.index.json names",
        ),
        (with_objects, "is no state_dict of torch"),
        (nested, "holds no tensors by name: write found['model'] of it to a file of its own"),
        (lambda folder: str(folder / "no.safetensors"), "there is no file"),
        (lambda folder: str(folder), "holds neither safetensors files nor a checkpoint of zrun"),
    ],
)
def test_what_does_not_fit_is_named(ranks, tmp_path, form, words):
    for result in ranks(2).run(look, job(init_from=form(tmp_path)), str(tmp_path / "run"), None):
        assert result["error"].startswith("CheckpointError: init_from: ")
        assert words in result["error"]


# Pipelines


def look_counting(keys: dict[str, Any], run_dir: str, dims: dict[str, int]) -> dict[str, Any]:
    """As `look`; also the bytes that were read of files by this rank."""
    read: list[int] = []
    preadv = os.preadv

    def counted(*args: Any) -> int:
        read.append(preadv(*args))
        return read[-1]

    with patch.object(os, "preadv", counted):
        found = look(keys, run_dir, None, dims)
    return {**found, "read": sum(read)}


def as_run(folder: Path) -> str:
    return str(folder / "before")


@pytest.mark.parametrize("dims", [{"dp": 1, "pp": 2}, {"dp": 2, "pp": 2}])
@pytest.mark.parametrize("form", [as_file, as_folder, as_state_dict, as_run])
def test_stages_read_what_they_have(ranks, tmp_path, form, dims):
    size = dims["dp"] * dims["pp"]
    if form == as_run:
        ranks(2).run(run, job(steps=2), str(tmp_path / "before"), None, None, None, {"dp": 2})
    guards = {"check_values": False}  # for which rank 0 reads the whole model
    keys = job(zero=3, init_from=form(tmp_path), guards=guards)
    one = ranks(1).run(look_counting, keys, str(tmp_path / "one"), {"dp": 1})
    keys["parallel"] = {"pp": 2}
    many = ranks(size).run(look_counting, keys, str(tmp_path / "many"), dims)
    assert [each["error"] for each in many] == [""] * size
    found = values(many)
    for name, value in values(one).items():
        assert torch.equal(found[name], value), name
    if form != as_state_dict:  # that is mapped
        records = 0  # which every rank reads: they hardly grow with the model
        if form == as_run:
            files = read_step(tmp_path / "before" / "checkpoints" / "step-00000002").files
            records = sum(file.record_bytes for file in files)
        most = max(each["read"] for each in many) - records
        assert 0 < most < 0.6 * (one[0]["read"] - records)


# Memory


class Wide(nn.Module):
    """63 MB in three weights, the largest of which is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3072, 3072, bias=False)
        self.middle = nn.ModuleList(nn.Linear(3072, 1024, bias=False) for _ in range(2))
        self.last = nn.Linear(3072, 3072, bias=False)
        self.last.weight = self.first.weight


def resident_bytes() -> int:
    """Resident memory of this process: its own, and what it maps."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kinds = ("RssAnon:", "RssFile:", "RssShmem:")
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(kinds))


def peak_while_loading(path: str, stage: int) -> int:
    """How much more memory this rank held at most, its own part of the model included."""
    with torch.device("meta"):
        model = Wide()
    sharded = make_sharded(
        model, stage, read=lambda name, param: torch.empty(param.shape, device="meta")
    )
    state, peak, done = ModelState(sharded), 0, threading.Event()
    open_weights(Path(path), sharded.mesh.world)  # what it imports is no part of the weights
    before = resident_bytes()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, resident_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    load_weights(InitFromConfig(path=path), state, sharded.mesh.world)
    done.set()
    watcher.join()
    return peak


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.at_most(1)
def test_all_ranks_together_hold_little_more_than_the_file(ranks, tmp_path, suffix):
    model = Wide()
    path = tmp_path / f"model.{suffix}"
    if suffix == "pt":
        torch.save(model.state_dict(), path)
    else:
        save_file({name: p.detach() for name, p in model.named_parameters()}, path)
    peaks = ranks(2).run(peak_while_loading, str(path), 3)
    assert sum(peaks) < 1.25 * path.stat().st_size, peaks
