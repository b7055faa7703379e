"""Tiled linears by themselves: what they compute, how they are called, and what cannot be one."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from transformers.pytorch_utils import Conv1D

from zrun_core.errors import JobError
from zrun_core.memory.layout import UnitLayout
from zrun_core.memory.state_policy import MeshInfo, RankPlaces, ZeroPolicy
from zrun_core.models.layers import Linear
from zrun_core.plan.memory.states import plan_model
from zrun_core.plan.trace.module_tree import describe_modules, describe_params, skeleton_of
from zrun_core.plan.trace.profile import Profile
from zrun_core.plan.trace.rows import Affine
from zrun_core.spine.sections.precision import PrecisionConfig
from zrun_core.spine.sections.zero import TileConfig, ZeroConfig
from zrun_core.zero.unit.precision import Precision
from zrun_core.zero.wrap.auto_wrap import repeated_blocks
from zrun_core.zero.wrap.sharding_config import ShardingConfig, wrap_plan
from zrun_core.zero.wrap.tiled_linear import TiledLinear
from zrun_core.zero.wrap.tiling import read_tiles, tensors_of_tiles, tile_linears

IN, OUT = 8, 200
ROW = IN * 4  # bytes of fp32


class Model(nn.Module):
    """One large linear, by the name of `head`."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.small = nn.Linear(IN, IN)
        self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.small(x))


def tiled(
    model: nn.Module,
    num_bytes: int,
    modules: list[str] | None = None,
    leaf: list[str] | None = None,
) -> list[str]:
    """Tile, and return the notes."""
    config = TileConfig(bytes=num_bytes, modules=modules or [])
    return tile_linears(model, config, torch.float32, leaf or []).notes


def linear(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(IN, OUT) if kind is nn.Linear else Conv1D(OUT, IN)


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
@pytest.mark.parametrize("shape", [(3, IN), (2, 3, IN)])
def test_a_tiled_linear_computes_what_it_did(kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    plain, model = Model(linear(kind)).double(), Model(linear(kind)).double()
    model.small.load_state_dict(plain.small.state_dict())
    tiled(model, 70 * ROW)
    head = model.head
    assert isinstance(head, TiledLinear)
    assert [tile.weight.shape[head.dim] for tile in head.children()] == [70, 70, 60]
    assert {type(tile) for tile in head.children()} == {kind}
    x = torch.randn(shape, dtype=torch.float64)
    results = []
    for each in (plain, model):
        inputs = x.clone().requires_grad_()
        outputs = each(inputs)
        (grad,) = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
        (again,) = torch.autograd.grad(grad.square().sum(), inputs, retain_graph=True)
        outputs.square().sum().backward()
        results.append((outputs, grad, again))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    weights = [tile.weight.grad for tile in head.children()]
    torch.testing.assert_close(torch.cat(weights, head.dim), plain.head.weight.grad)
    biases = [tile.bias.grad for tile in head.children()]
    torch.testing.assert_close(torch.cat(biases), plain.head.bias.grad)


def test_tiles_are_about_equal_and_whole_multiples_of_64_where_there_is_room() -> None:
    for rows, expected in (
        (199, [128, 72]),
        (110, [110, 90]),
        (64, [64, 64, 64, 8]),
        (1, [1] * 200),
    ):
        model = Model(nn.Linear(IN, OUT))
        tiled(model, rows * ROW)
        assert model.head.sizes == expected
    model = Model(nn.Linear(IN, OUT))
    tiled(model, 200 * ROW)
    assert type(model.head) is nn.Linear


def test_autocast_casts_the_input_once_for_all_tiles() -> None:
    model = Model(nn.Linear(IN, OUT)).bfloat16()
    tiled(model, 64 * ROW)
    model.small = nn.Identity()
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.randn(5, IN, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.autocast("cpu", torch.bfloat16), hooks:
        outputs = model(x)
    assert outputs.dtype == torch.bfloat16
    inputs = [tensor for tensor in saved.values() if tensor.shape == (5, IN)]
    assert len(inputs) == 1
    outputs.float().sum().backward()
    assert x.grad is not None


def test_it_keeps_what_the_user_put_on_the_linear() -> None:
    head = linear(nn.Linear)
    head.weight.mark = "mine"
    head.weight.requires_grad_(requires_grad=False)
    head.remark = "ours"
    seen = []
    head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    head.eval()
    model = Model(head)
    tiled(model, 100 * ROW)
    model(torch.randn(2, IN))
    assert seen == [(2, OUT)]
    assert (model.head.remark, model.head.in_features, model.head.out_features) == ("ours", IN, OUT)
    assert not model.head.training
    for tile in model.head.children():
        assert (tile.weight.mark, tile.weight.requires_grad, tile.training) == (
            "mine",
            False,
            False,
        )
        assert tile.bias.requires_grad
    copied = copy.deepcopy(model)
    assert torch.equal(copied(torch.ones(1, IN)), model(torch.ones(1, IN)))
    assert torch.equal(model.head.weight, torch.cat([t.weight for t in model.head.children()]))
    model.head.read_whole_while(lambda: False)
    with pytest.raises(AttributeError, match=r"zero\.tile: its weight is in parts"):
        model.head.weight  # noqa: B018


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_its_state_has_one_weight(kind: type[nn.Module]) -> None:
    plain, model = Model(linear(kind)), Model(linear(kind))
    tiled(model, 100 * ROW)
    assert model.state_dict().keys() == plain.state_dict().keys()
    with torch.no_grad():
        plain.head.weight.normal_()
    model.load_state_dict(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    with pytest.raises(RuntimeError, match=r"head\.0\.weight"):
        model.load_state_dict({"small.weight": plain.small.weight, "small.bias": plain.small.bias})
    for tile in model.head.children():  # as while it is resharded
        tile.weight.data = torch.empty(1).expand(tile.weight.shape)
    found = model.state_dict()["head.weight"]
    assert found.shape == plain.head.weight.shape
    assert found.untyped_storage().nbytes() == 4


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_values_are_those_of_the_rows(kind: type[nn.Module]) -> None:
    """Read by name from elsewhere, or from the parameters themselves."""
    model = Model(linear(kind))
    values = {name: value.clone() for name, value in model.state_dict().items()}
    tiled(model, 100 * ROW)
    by_name = read_tiles(model, lambda name, param: values[name])
    own = read_tiles(model, lambda name, param: param.detach())
    for name, param in model.named_parameters():
        assert torch.equal(by_name(name, param), param)
        assert torch.equal(own(name, param), param)
    table = tensors_of_tiles(model)
    assert {part.tensor for part in table.values()} == {"head.weight", "head.bias"}
    assert [run.start for run in table["head.1.weight"].runs] == [100 * IN]


def tied() -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(OUT, IN), "head": nn.Linear(IN, OUT, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


def hooked() -> nn.Module:
    model = Model(nn.Linear(IN, OUT))
    model.head.weight.register_hook(lambda grad: grad)
    return model


def encoder() -> nn.Module:
    return nn.ModuleDict({"layer": nn.TransformerEncoderLayer(40, 1, 40)})


class Doubled(nn.Linear):
    """No linear map of its input by its weight alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_subclass_is_a_linear_if_it_computes_as_one() -> None:
    model = Model(Linear(IN, OUT, bias=True, std=0.5))
    tiled(model, 100 * ROW)
    assert isinstance(model.head, TiledLinear)
    assert [(type(tile), tile.std) for tile in model.head.children()] == [(Linear, 0.5)] * 2
    for head in (Doubled(IN, OUT), weight_norm(nn.Linear(IN, OUT))):
        model = Model(head)
        assert "none of 1 linears is tiled" in tiled(model, 100 * ROW)[0]


@pytest.mark.parametrize(
    ("model", "name", "why"),
    [
        (tied(), "head", "it is tied to embed.weight"),
        (hooked(), "head", "its parameters have hooks"),
        (encoder(), "layer.linear1", "TransformerEncoderLayer reads its weight"),
        (encoder(), "layer.self_attn.out_proj", "MultiheadAttention reads its weight"),
        (
            nn.ModuleDict({"moe": Model(nn.Linear(IN, OUT))}),
            "moe.head",
            "zero.leaf has moe gathered",
        ),
    ],
)
def test_what_cannot_be_tiled_stays_whole_unless_it_is_named(
    model: nn.Module, name: str, why: str
) -> None:
    leaf = ["moe"] if "moe" in name else []
    notes = tiled(model, 10 * ROW, leaf=leaf)
    assert any(f"{name} (6.2 KiB) stays whole: {why}" in note for note in notes), notes
    assert not tensors_of_tiles(model).get(f"{name}.0.weight")
    with pytest.raises(JobError, match=f"{re.escape(repr(name))} names {name}, and {why}"):
        tiled(model, 10 * ROW, [name], leaf)


@pytest.mark.parametrize(
    ("num_bytes", "modules", "message"),
    [
        (ROW - 1, [], r"31 B is less than one row of small, which takes 32 bytes: write 32 B or"),
        (
            99,
            ["haed"],
            "zero.tile.modules: 'haed' matches no module's whole name; linears are named"
            " head, small",
        ),
        (99, ["norm"], "'norm' matches norm, a LayerNorm, and no linear; linears are named head"),
    ],
)
def test_a_mistake_says_what_to_write(num_bytes: int, modules: list[str], message: str) -> None:
    model = Model(nn.Linear(IN, OUT))
    model.norm = nn.LayerNorm(4)
    with pytest.raises(JobError, match=message):
        tiled(model, num_bytes, modules)


def test_notes_say_how_many_linears_are_tiled() -> None:
    model = Model(nn.Linear(IN, OUT))
    assert tiled(model, 1 << 20) == [
        "zero.tile: none of 2 linears is tiled: no weight that could be is over 1.0 MiB"
    ]
    assert tiled(model, 1024, ["head"]) == [
        "zero.tile: 1 of 2 linears run in tiles of at most 1.0 KiB"
    ]


def test_it_can_be_undone() -> None:
    model = Model(nn.Linear(IN, OUT))
    before = dict(model.named_modules())
    tiling = tile_linears(model, TileConfig(bytes=1024), torch.float32, [])
    assert isinstance(model.head, TiledLinear)
    tiling.undo()
    assert dict(model.named_modules()) == before


def test_tiles_below_persist_below_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tiles of 1\.0 KiB would stay whole on every rank"):
        ZeroConfig.model_validate({"stage": 3, "tile": 1024, "persist_below": 2048})


# Units


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(64), nn.Linear(64, 64)
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def stack() -> nn.Module:
    model = nn.Module()
    model.blocks = nn.ModuleList([Block(), Block()])
    model.head = Conv1D(512, 64)
    return model


def settings(**more: Any) -> ShardingConfig:
    precision = Precision.of(PrecisionConfig())
    common = {"zero": ZeroPolicy(3), "precision": precision, "optimizer": None, "bucket": 1 << 20}
    return ShardingConfig(**{**common, **more})


def layouts(model: nn.Module, **more: Any) -> list[UnitLayout]:
    planned = wrap_plan(model, settings(**more), RankPlaces(MeshInfo(shard_size=2)))
    return [unit.layout for unit in planned.units]


def test_each_tile_is_a_unit_and_the_rest_of_its_block_another() -> None:
    model = stack()
    blocks = repeated_blocks(model)
    tiled(model, 64 * 256)
    assert repeated_blocks(model) == blocks  # not the tiled linears of a Sequential
    tiles = [*(f"mlp.0.{tile}" for tile in range(4)), *(f"mlp.2.{tile}" for tile in range(4))]
    whole, compiled = layouts(model), layouts(model, whole_blocks=True, bucket=1)
    for units in (whole, compiled):
        assert [unit.name for unit in units[:9]] == ["blocks.0", *(f"blocks.0.{t}" for t in tiles)]
        assert [unit.tile for unit in units[:9]] == [False] + [True] * 8
        assert {unit.around for unit in units[1:9]} == {"blocks.0"}
        assert units[0].numel == 2 * 64 + 64 * 65
        assert {unit.block for unit in units} == {"blocks.0", "blocks.1", ""}
        assert not any(unit.keep_until_pass_ends for unit in units)
    divided = layouts(model, bucket=1)
    assert [unit.name for unit in divided[:3]] == ["blocks.0.norm", "blocks.0.mix", divided[2].name]
    assert {unit.around for unit in divided} == {""}


def test_a_ring_has_room_for_tiles_beside_what_is_in_use_around_them() -> None:
    model = stack()
    tiled(model, 64 * 256)
    for bucket, recomputes, rest, tiles in (
        (1 << 20, False, 2 * 64 + 64 * 65, 1 + 1),  # one in use, and one that is prefetched
        (1 << 20, True, 2 * 64 + 64 * 65, 2 + 1),
        (1, False, 0, 1 + 1),
    ):
        chosen = settings(bucket=bucket, recomputes_blocks=recomputes)
        units = [
            unit.layout
            for unit in wrap_plan(model, chosen, RankPlaces(MeshInfo(shard_size=2))).units
        ]
        tile = max(unit.padded_numel for unit in units if unit.tile)
        padded = next((u.padded_numel for u in units if u.numel == rest), 0)
        found = chosen.states.gather_ring_bytes(units, 1, moves_pages=False)
        assert found == 4 * (padded + tiles * tile), (bucket, recomputes)


def test_a_plan_knows_the_tiles_of_a_profile() -> None:
    """From names and shapes alone, as a profile keeps them."""
    model = stack()
    tiled(model, 64 * 256)
    profile = Profile(
        source="states alone",
        why="",
        params=describe_params(model, torch.float32),
        buffer_bytes=0,
        num_blocks=2,
        batch_bytes=Affine(0.0, 0.0),
        tokens_per_sample=None,
        traces={},
        modules=describe_modules(model),
    )
    again = Profile.from_json(profile.to_json())
    for more in ({}, {"whole_blocks": True}):
        planned = plan_model(skeleton_of(again), settings(**more))
        expected = plan_model(model, settings(**more))
        assert planned.units() == expected.units()
        assert sum(unit.tile for unit in planned.units()) == 24
