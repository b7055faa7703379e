"""Tiled linears in training: the numbers of the untiled model, in the memory of a few tiles."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import torch
from elsewhere import late_copies
from runs import job, look
from torch import nn
from toys import build, data, make_sharded, split, train_sharded

import zrun_core
from zrun_core.checkpoint.folder import read_step
from zrun_core.memory.buffers import Placement, Tier
from zrun_core.spine.sections.activations import ActivationsConfig
from zrun_core.spine.sections.precision import PrecisionConfig
from zrun_core.spine.sections.zero import ZeroConfig
from zrun_core.train.parallelize import transform
from zrun_core.zero.account import allocated_memory, expected_traffic, grown_rings, planned_memory
from zrun_core.zero.wrap.tiling import read_tiles

DIM = 64
TILE = 64 * DIM * 4  # bytes of fp32: 64 output features of a linear with DIM inputs


class Block(nn.Module):
    """Registered in another order than it runs: its norm is last."""

    def __init__(self, wide: int, drop: float) -> None:
        super().__init__()
        self.mix = nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, wide * DIM), nn.Linear(wide * DIM, DIM)
        self.drop = nn.Dropout(drop) if drop else nn.Identity()
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x)
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, wide: int, drop: float) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(wide, drop) for _ in range(2))
        self.head = nn.Linear(DIM, 4 * DIM, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.head(x).mean(-1, keepdim=True).float(), y.float())


class Penalised(Net):
    """Adds what weights are as a whole: norms are not sums over tiles."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        norms = torch.stack([param.norm() for param in self.parameters()]).sum()
        names = [name for name, _ in self.named_parameters() if name.startswith("head")]
        assert names == ["head.weight"]
        assert self.head.bias is None
        gram = self.head.weight @ self.head.weight.T
        return super().forward(x, y) + 1e-2 * (norms + gram.square().mean())


def train(
    tile: int | None,
    stage: int,
    checkpoint: str = "none",
    wide: int = 8,
    drop: float = 0.1,
    frozen: str = "never",
    compile: bool = False,
    tier: Tier = Tier.DEVICE,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    torch.manual_seed(1)
    options = {"precision": "fp32", **(options or {})}
    model = Net(wide, drop)
    for name, param in model.named_parameters():
        param.requires_grad_(frozen not in name)
    if tile is not None and options["precision"] == "bf16":
        tile //= 2
    zero = ZeroConfig.model_validate({"stage": stage, "tile": tile})
    precision = PrecisionConfig.model_validate(options["precision"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
        activations = ActivationsConfig(checkpoint=checkpoint)
        transform(model, zero, precision, activations, compile=compile)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # not in memory
        if tier is not Tier.DEVICE:
            options["placement"] = Placement(param=tier, grad=tier, optimizer=tier)
            options["disk_folder"] = folder
            options["apart"] = late_copies() if tier is Tier.HOST else None
        sharded = make_sharded(
            model,
            stage,
            recomputes_blocks=checkpoint != "none",
            whole_blocks=compile,
            read=read_tiles(model, lambda name, param: param.detach()),
            **options,
        )
    torch.manual_seed(2)  # of dropout
    losses = train_sharded(sharded, data(2, 8, DIM), lr=1e-3)
    expected = expected_traffic(sharded, 2, 2)
    sent = dict.fromkeys(expected, 0)
    for key, num_bytes in sharded.comm.sent_bytes.items():
        if key.kind in sent:
            sent[key.kind] += num_bytes
    assert sent == expected
    if tile is not None:  # a norm that is registered last grows the ring of an untiled block
        assert not grown_rings(sharded), grown_rings(sharded)
        assert planned_memory(sharded).by_kind == allocated_memory(sharded).by_kind
    gathers = {unit.name: sharded.gatherer.counts.num_gathers(unit) for unit in sharded.units}
    rings = sharded.ring_bytes
    sharded.settle_updates()
    with sharded.gathered():
        state = {name: value.float().clone().numpy() for name, value in model.state_dict().items()}
    return {"losses": losses, "rings": rings, "gathers": gathers, "state": state}


def train_all(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [train(**case) for case in cases]


def train_penalised(cases: list[dict[str, Any]]) -> list[tuple[list[float], dict[str, Any]]]:
    return [_train_penalised(**case) for case in cases]


def _train_penalised(
    tile: int | None, stage: int, checkpoint: str
) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(1)
    model = Penalised(8, 0.0)
    zero = ZeroConfig.model_validate({"stage": stage, "tile": tile})
    precision = PrecisionConfig.model_validate("fp32")
    transform(model, zero, precision, ActivationsConfig(checkpoint=checkpoint), compile=False)
    sharded = make_sharded(
        model,
        stage,
        recomputes_blocks=checkpoint != "none",
        read=read_tiles(model, lambda name, param: param.detach()),
        optim={"name": "sgd", "args": {"momentum": 0.9}},
        precision="fp32",
    )
    losses = train_sharded(sharded, data(2, 8, DIM), lr=1e-1)
    sharded.settle_updates()
    if tile is not None:
        with pytest.raises(AttributeError, match="cannot be read outside of a forward"):
            _ = model.head.weight
    with sharded.gathered():
        state = {name: value.float().clone().numpy() for name, value in model.state_dict().items()}
    return losses, state


MODES: list[dict[str, Any]] = [
    {},
    {"checkpoint": "full"},
    {"checkpoint": "full", "drop": 0.0},
    {"checkpoint": "selective", "options": {"prefetch": 0}},
    {"frozen": "weight"},
    {"frozen": "weight", "checkpoint": "full"},
    {"compile": True},
    {"options": {"optim": {"name": "lamb"}}},
    {"options": {"precision": "bf16"}},
    {"options": {"precision": "bf16"}, "checkpoint": "full"},
]


@pytest.mark.parametrize(("world_size", "modes"), [(2, MODES), (1, MODES[:2])])
@pytest.mark.at_most(1)
def test_numbers_are_those_of_the_untiled_model(ranks, world_size, modes):
    """Up to the order in which products, and the gradient of the input, are added."""
    variants = [(TILE, 3), (TILE, 0), (None, 3)]
    cases = [{**mode, "tile": tile, "stage": stage} for mode in modes for tile, stage in variants]
    found = ranks(world_size).run(train_all, cases)[0]
    for mode, first in zip(modes, range(0, len(cases), 3), strict=True):
        at_3, at_0, untiled = found[first : first + 3]
        assert at_3["losses"] == at_0["losses"], mode
        assert at_3["state"].keys() == untiled["state"].keys() == at_0["state"].keys()
        is_exact = mode.get("options", {}).get("precision") != "bf16"
        tolerance = 1e-4 if is_exact else 1e-2
        assert at_3["losses"] == pytest.approx(untiled["losses"], rel=tolerance), mode
        for name, value in untiled["state"].items():
            assert (at_3["state"][name] == at_0["state"][name]).all(), (mode, name)
            # What two updates of Adam can differ by, where a gradient is nearly 0.
            np.testing.assert_allclose(at_3["state"][name], value, atol=4e-3, err_msg=name)


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_that_a_penalty_reads_are_whole(ranks, world_size):
    cases = [
        {"tile": tile, "stage": stage, "checkpoint": checkpoint}
        for tile in (None, TILE)
        for stage, checkpoint in ((0, "none"), (3, "none"), (3, "full"))
    ]
    (losses, state), *others = ranks(world_size).run(train_penalised, cases)[0]
    for case, (found, ours) in zip(cases[1:], others, strict=True):
        assert found == pytest.approx(losses, rel=1e-5), case
        for name, value in state.items():
            np.testing.assert_allclose(ours[name], value, atol=1e-5, err_msg=name)


@pytest.mark.thorough
def test_rings_are_as_large_for_linears_8_times_as_wide(ranks):
    for checkpoint in ("none", "full"):
        cases = [
            {"tile": tile, "stage": 3, "checkpoint": checkpoint, "wide": wide}
            for tile in (TILE, None)
            for wide in (4, 32)
        ]
        narrow, wide, untiled, wide_untiled = ranks(2).run(train_all, cases)[0]
        assert wide["rings"] == narrow["rings"], checkpoint
        assert wide_untiled["rings"][0] > 6 * untiled["rings"][0] > 9 * wide["rings"][0]


@pytest.mark.thorough
def test_a_tile_is_gathered_for_each_use(ranks):
    """Some of a block's tiles are still there when it has been recomputed.

    That is the last one to run, or the last two, where the backward of the last one came first.
    """
    common = {"tile": TILE, "stage": 3}
    modes = [{}, {"checkpoint": "full"}, {"checkpoint": "full", "drop": 0.0}]
    kept, *recomputed = ranks(2).run(train_all, [{**common, **mode} for mode in modes])[0]
    assert set(kept["gathers"].values()) == {2}
    assert len([name for name in kept["gathers"] if name.startswith("blocks.0.up.")]) == 8
    for run, spared in zip(recomputed, [("down.7",), ("down.6", "down.7")], strict=True):
        for name, count in run["gathers"].items():
            is_tile = ".up." in name or ".down." in name
            assert count == (3 if is_tile and not name.endswith(spared) else 2), name


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.thorough
def test_tiles_come_from_the_host_or_the_disk_one_by_one(ranks, world_size):
    common = {"tile": TILE, "stage": 3, "checkpoint": "full", "wide": 4}
    cases = [{**common, "tier": tier} for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK)]
    cases.append({**common, "tier": Tier.HOST, "wide": 8})
    for here, on_host, on_disk, wide in ranks(world_size).run(train_all, cases):
        for run in (on_host, on_disk):
            assert run["losses"] == here["losses"]
            for name, value in here["state"].items():
                assert (run["state"][name] == value).all(), name
        assert wide["rings"] == on_host["rings"]


# Checkpoints


def tiled_job(tile: int | None, **keys: Any) -> dict[str, Any]:
    zero = {"stage": 3} if tile is None else {"stage": 3, "tile": tile}
    return job(**{"zero": zero, "steps": 4, "checkpoint": {"every": 2}, **keys})


def tensors(found: list[dict[str, Any]]) -> dict[tuple[str, str], np.ndarray]:
    """Everything that the ranks hold, by tensor and state."""
    parts = {key: value for rank in found for key, value in rank["parts"].items()}
    whole: dict[tuple[str, str], list[np.ndarray]] = {}
    for (tensor, state, _), value in sorted(parts.items(), key=lambda item: item[0]):
        whole.setdefault((tensor, state), []).append(value)
    return {key: np.concatenate(values) for key, values in whole.items()}


def same(left: dict[tuple[str, str], np.ndarray], right: dict[tuple[str, str], np.ndarray]) -> bool:
    return left.keys() == right.keys() and all((left[key] == right[key]).all() for key in left)


SOME = 16 * 8 * 4  # bytes: 8 of the 32 rows of a block's `up`, 4 of the 16 of its `down`


@pytest.mark.parametrize("init", ["factory", "meta"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_tiled_model_begins_with_the_values_of_the_untiled_one(ranks, tmp_path, world_size, init):
    model = {"call": "zero/test_tiles.py:Plain"}
    options = {"model": model, "init": init, "checkpoint": None}
    found = [
        ranks(world_size).run(look, tiled_job(tile, **options), str(tmp_path / str(tile)), None)
        for tile in (SOME, None)
    ]
    assert [run[0]["error"] for run in found] == ["", ""]
    assert same(*map(tensors, found))


class Plain(nn.Module):
    """Every module can reset itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(runs.VOCAB, 16)
        self.up = nn.Linear(16, 32)
        self.head = nn.Linear(32, runs.VOCAB)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        x = self.head(torch.relu(self.up(self.embed(input_ids))))
        return nn.functional.cross_entropy(x.float().flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.thorough
def test_checkpoints_know_one_weight(ranks, tmp_path, precision):
    """Saved tiled by two ranks, loaded untiled by one, and the other way round."""
    for tile, other in ((SOME, None), (None, SOME)):
        run_dir = str(tmp_path / f"{tile}")
        saved = ranks(2).run(runs.run, tiled_job(tile, precision=precision), run_dir)
        assert saved[0]["error"] == ""
        resumed = tiled_job(other, precision=precision, steps=5)
        begun = ranks(1).run(look, resumed, run_dir, {})
        assert begun[0]["error"] == ""
        assert same(tensors(begun), tensors(saved))
        assert ("blocks.0.up.weight", "exp_avg") in tensors(begun)
        manifest = read_step(Path(run_dir) / "checkpoints" / "step-00000004")
        names = {info.name: info.shape for info in manifest.tensors}
        assert names["blocks.0.up.weight"] == (32, 16)
        assert not any(".up.0" in name for name in names)


# The library


def loop(tile: int | None, folder: str, adopts: bool) -> dict[str, Any]:
    """One step in a user's own loop; saved by the untiled model, and loaded by the tiled one."""
    run = zrun_core.init(threads=1, patience_s=5.0)
    own = build()
    if adopts:  # of the first rank's values
        with torch.no_grad():
            for param in own.parameters():
                param.add_(run.rank)
    zero = {"stage": 3, "tile": tile} if tile else 3
    model = zrun_core.shard(own if adopts else build, zero=zero)
    optimizer = zrun_core.optimizer(model, "adamw", lr=1e-3, clip=1.0)
    with zrun_core.gathered(model):
        begun = {name: value.clone() for name, value in model.state_dict().items()}
    if tile:
        assert zrun_core.load(folder, model) is not None
    else:
        model(*split(data(1)[0], run.rank, run.world_size)).backward()
        optimizer.step()
        zrun_core.save(folder, model, step=1)
    with zrun_core.gathered(model):
        state = {name: value.clone() for name, value in model.state_dict().items()}
    return {"begun": begun, "state": state, "parameters": len(list(model.parameters()))}


@pytest.mark.parametrize("adopts", [False, True])
def test_a_loop_of_the_users_knows_one_weight(ranks, tmp_path, adopts):
    folder = str(tmp_path / "saved")
    untiled = ranks(2).run(loop, None, folder, adopts)
    tiled = ranks(2).run(loop, 32 * 32 * 4, folder, adopts)
    for one, other in zip(untiled, tiled, strict=True):
        assert other["parameters"] > one["parameters"]
        for kind in ("begun", "state"):
            assert one[kind].keys() == other[kind].keys()
            assert all(torch.equal(value, other[kind][key]) for key, value in one[kind].items())
