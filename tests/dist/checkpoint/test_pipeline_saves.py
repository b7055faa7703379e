"""Checkpoints of pipelines: those of one stage, whatever the cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import VOCAB, losses, run
from small_jobs import small_gpt
from test_resume import same_tensors
from torch import nn

from zrun_core.checkpoint.export import export
from zrun_core.checkpoint.folder import read_step
from zrun_core.distributed.comm import Comm


class Counting(nn.Module):
    """Counts in buffers: of a block, of the module after the blocks, and of the model itself."""

    def __init__(
        self, dim: int = 16, depth: int = 4, tied: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.norm = Counter(dim, dropout)  # registered first, called last
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Counter(dim, dropout) for _ in range(depth))
        self.head = nn.Linear(dim, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.embed(input_ids) * (1 + 0.1 * self.calls)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x) * (1 + 0.1 * self.calls)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Counter(nn.Module):
    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.drop = nn.Dropout(dropout)
        self.register_buffer("mean", torch.zeros(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.detach().float().flatten(0, 1).mean(0), 0.1)
        return x + torch.tanh(self.drop(self.linear(x))) + 0.1 * self.mean


def counting(**keys: Any) -> dict[str, Any]:
    fixed = {"schedule": "constant"}
    model = "checkpoint/test_pipeline_saves.py:Counting"
    return small_gpt(**{"model": model, "checkpoint": {"every": 2}, "lr": fixed, **keys})


def trained(ranks: Any, keys: dict[str, Any], folder: Path, **options: Any) -> list[dict[str, Any]]:
    """Run a job on the ranks of `dp` x `pp` stages."""
    dims = {"dp": options.pop("dp", 1), "pp": options.pop("pp", 1)}
    resume = options.pop("resume", None)
    stop_after = options.pop("stop_after", None)
    keys = {**keys, "parallel": {"pp": dims["pp"], **options}}
    found: list[dict[str, Any]] = ranks(dims["dp"] * dims["pp"]).run(
        run, keys, str(folder), resume, stop_after, None, dims
    )
    for each in found:
        assert not each["error"], each["error"]
    return found


def of_manifest(folder: Path, step: int) -> dict[str, Any]:
    path = folder / "checkpoints" / f"step-{step:08d}" / "manifest.json"
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.at_most(1)
def test_a_step_is_that_of_one_stage(ranks, tmp_path: Path, tied: bool) -> None:
    model = {"call": "checkpoint/test_pipeline_saves.py:Counting", "args": {"tied": tied}}
    for pp in (1, 2):
        trained(ranks, counting(steps=2, model=model), tmp_path / f"pp{pp}", pp=pp)
    one, two = (of_manifest(tmp_path / f"pp{pp}", 2) for pp in (1, 2))
    assert two["tensors"] == one["tensors"]
    assert [t["aliases"] for t in one["tensors"]].count(["head.weight"]) == tied
    if tied:  # its gradients are added up in another order
        return
    files = []
    for pp in (1, 2):
        folder = tmp_path / f"pp{pp}" / "checkpoints"
        out = tmp_path / f"model{pp}.safetensors"
        export(folder / "step-00000002", read_step(folder / "step-00000002"), out)
        files.append(out.read_bytes())
    assert files[0] == files[1]


def run_noting(*args: Any) -> dict[str, Any]:
    """As `run`; also by which ways ranks have told each other of tensors, with bytes received."""
    ways: dict[str, list[int]] = {}
    kept = {way: getattr(Comm, way) for way in ("all_gather_bytes", "gather_bytes", "share_bytes")}

    def noting(way: str) -> Any:
        def call(self: Comm, payload: bytes, group: Any, *, name: str) -> Any:
            found = kept[way](self, payload, group, name=name)
            if name == "tensors":
                ways.setdefault(way, []).append(len(found))
            return found

        return call

    for way in kept:
        setattr(Comm, way, noting(way))
    try:
        return run(*args) | {"ways": ways}
    finally:
        for way, method in kept.items():
            setattr(Comm, way, method)


def test_ranks_that_go_on_describe_their_parts_through_rank_0(ranks, tmp_path: Path) -> None:
    """No device has a row for each rank, and what several ranks say is told once."""
    keys = counting(steps=3, parallel={"pp": 2})
    trained(ranks, counting(steps=2), tmp_path, dp=2, pp=2)
    dims = {"dp": 2, "pp": 2}
    found = ranks(4).run(run_noting, keys, str(tmp_path), {}, None, None, dims)
    assert not any(each["error"] for each in found)
    parts = found[0]["ways"]["gather_bytes"]
    assert set(parts) == {4}
    assert [each["ways"]["gather_bytes"] for each in found[1:]] == [[0] * len(parts)] * 3
    (told,) = {tuple(each["ways"]["share_bytes"]) for each in found}
    described = len(json.dumps(of_manifest(tmp_path, 2)["tensors"]))
    assert all(described / 2 < size < 2 * described for size in told)
    assert not any("all_gather_bytes" in each["ways"] for each in found)


@pytest.mark.parametrize("schedule", ["interleaved", "1f1b"])
@pytest.mark.at_most(1)
def test_the_same_shape_goes_on_bit_for_bit(ranks, tmp_path: Path, schedule: str) -> None:
    keys = counting(
        model={"call": "checkpoint/test_pipeline_saves.py:Counting", "args": {"dropout": 0.1}},
        precision="bf16",
        zero=2,
        hooks={"on_step": "runs.py:on_step"},
    )
    shape: dict[str, Any] = {"dp": 2, "pp": 2, "schedule": schedule}
    whole = trained(ranks, keys, tmp_path / "whole", **shape)
    trained(ranks, keys, tmp_path / "cut", stop_after=3, **shape)
    rest = trained(ranks, keys, tmp_path / "cut", resume={}, **shape)
    assert losses(rest[0]) == {step: losses(whole[0])[step] for step in (3, 4)}
    assert [each["digest"] for each in rest] == [each["digest"] for each in whole]


@pytest.mark.thorough
def test_buffers_go_to_the_stages_that_read_them(ranks, tmp_path: Path) -> None:
    whole = trained(ranks, counting(), tmp_path / "whole")
    shapes = ({}, {"pp": 2}, {"pp": 4})
    folder = tmp_path / "first"
    trained(ranks, counting(steps=1), folder)
    for step, shape in enumerate(shapes, start=2):
        source = {"folder": f"{folder}/checkpoints"}
        folder = tmp_path / f"{step}"
        rest = trained(ranks, counting(steps=step), folder, resume=source, **shape)
        assert losses(rest[0]) == {step: losses(whole[0])[step]}
    same_tensors(rest, whole)


SHAPES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"pp": 2}, {"zero": 3, "offload": {"optimizer": "host"}}),
    ({"pp": 4}, {"zero": 1}),
    ({"dp": 2}, {"zero": 2}),
    ({"dp": 2, "pp": 2}, {"zero": 3, "offload": {"optimizer": "disk", "param": "host"}}),
    ({"pp": 2, "schedule": "interleaved"}, {"zero": 0}),
]


@pytest.mark.parametrize("number", range(len(SHAPES)))
@pytest.mark.thorough
def test_another_shape_goes_on_with_the_same_tensors(ranks, tmp_path: Path, number: int) -> None:
    """From each shape to the next one, where the steps are those of one stage."""
    (shape, keys), (other, other_keys) = (SHAPES[(number + n) % len(SHAPES)] for n in (0, 1))
    both = {"lr": {"schedule": "constant"}, "checkpoint": {"every": 2}}
    one = trained(ranks, small_gpt(**both), tmp_path / "one")
    before = trained(ranks, small_gpt(steps=2, **both, **keys), tmp_path / "was", **shape)
    source = {"folder": f"{tmp_path}/was/checkpoints"}
    rest = trained(ranks, small_gpt(**both, **other_keys), tmp_path / "is", resume=source, **other)
    same_tensors([each["begun"] for each in rest], before)
    expected = {step: losses(one[0])[step] for step in (3, 4)}
    assert losses(rest[0]) == pytest.approx(expected, rel=1e-5)
