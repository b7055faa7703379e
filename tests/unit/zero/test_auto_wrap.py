"""How a module tree becomes flat units, and which units a call of a module needs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zrun_core.errors import JobError
from zrun_core.memory.tensors import TensorPart, contiguous_stride, full_part, sliced_part
from zrun_core.zero.wrap.auto_wrap import WrapPlan, auto_wrap, repeated_blocks

KIB = 1 << 10


class Block(nn.Module):
    """6 KiB: a norm of 128 bytes, 2 KiB up, 2 KiB down, each with a bias."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)


class Net(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 8, bias=False)


def cut_of(model: nn.Module, bucket: int = 8 * KIB, **options: Any) -> WrapPlan:
    return auto_wrap(
        model, dtype=options.pop("dtype", torch.float32), num_shards=2, bucket=bucket, **options
    )


def names(found: WrapPlan) -> list[str]:
    return [unit.layout.name for unit in found.units]


def needs(found: WrapPlan, model: nn.Module) -> dict[str, list[str]]:
    """Which units each hooked module brings with it."""
    name_of = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
    return {
        name_of[id(module)]: [names(found)[i] for i in indices]
        for module, indices, _ in found.hooked
    }


def check(found: WrapPlan, model: nn.Module) -> None:
    """Every parameter is in one unit, and every module with parameters runs inside of a hook that
    brings them.
    """
    params = [param for unit in found.units for param in unit.params]
    assert sorted(map(id, params)) == sorted(map(id, model.parameters()))
    for unit in found.units:
        assert [slot.shape for slot in unit.layout.slots] == [
            tuple(param.shape) for param in unit.params
        ]
    brought: dict[int, set[int]] = {}  # module -> parameters that are whole while it runs
    for module, indices, _ in found.hooked:
        here = {id(param) for index in indices for param in found.units[index].params}
        for inner in module.modules():
            brought.setdefault(id(inner), set()).update(here)
    for inner in model.modules():
        assert all(id(param) in brought[id(inner)] for param in inner.parameters(recurse=False))


def test_blocks_are_units_and_neighbours_of_one_parent_are_merged():
    model = Net()
    found = cut_of(model)
    assert names(found) == ["embed", "blocks.0", "blocks.1", "blocks.2", "{norm,head}"]
    check(found, model)
    assert list(needs(found, model)) == [
        "embed",
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "norm",
        "head",
    ]


def test_a_block_larger_than_the_bucket_is_cut_inside_unless_it_is_compiled():
    model = Net(depth=2)
    found = cut_of(model, 3 * KIB)
    assert names(found) == [
        "embed",
        "blocks.0.{norm,up}",
        "blocks.0.down",
        "blocks.1.{norm,up}",
        "blocks.1.down",
        "{norm,head}",
    ]
    check(found, model)
    whole = cut_of(model, 3 * KIB, whole_blocks=True)
    assert names(whole) == ["embed", "blocks.0", "blocks.1", "{norm,head}"]


def test_the_bucket_is_in_bytes_of_the_compute_dtype():
    assert names(cut_of(Net(depth=2), 3 * KIB, dtype=torch.bfloat16)) == [
        "embed",
        "blocks.0",
        "blocks.1",
        "{norm,head}",
    ]


def test_small_models_are_one_unit_and_long_runs_are_named_by_their_ends():
    assert names(cut_of(nn.Linear(4, 4))) == ["model"]
    assert names(cut_of(nn.Sequential(*[nn.Linear(4, 4) for _ in range(9)]), 400)) == [
        "{0..4}",
        "{5,6,7,8}",
    ]


def test_repeated_blocks_are_the_outermost_composites():
    assert [name for name, _ in repeated_blocks(Net())] == ["blocks.0", "blocks.1", "blocks.2"]
    nested = nn.ModuleDict(
        {"encoder": Net(2), "decoder": nn.Sequential(Block(), nn.ReLU(), Block(), Net(2))}
    )
    assert [name for name, _ in repeated_blocks(nested)] == [
        "encoder.blocks.0",
        "encoder.blocks.1",
        "decoder.0",
        "decoder.2",
        "decoder.3.blocks.0",
        "decoder.3.blocks.1",
    ]
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == [], (
        "they have no modules inside"
    )
    assert repeated_blocks(nn.ModuleList([Block()])) == [], "one is no repetition"


def test_unit_and_leaf_patterns_match_whole_names():
    model = Net()
    found = cut_of(
        model, 64 * KIB, unit_names=[r"blocks\.1\.up"], leaf_names=[r"blocks\.2", "head"]
    )
    assert names(found) == [
        "embed",
        "blocks.0",
        "blocks.1.norm",
        "blocks.1.up",
        "blocks.1.down",
        "blocks.2",
        "norm",
        "head",
    ]
    assert [unit.layout.name for unit in found.units if unit.leaf] == ["blocks.2", "head"]
    assert [leaf for _, _, leaf in found.hooked] == [False] * 5 + [True, False, True]
    check(found, model)


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("up", r"part of 'blocks.0.up' does: write .\*up.\*"),
        ("experts", "names are like embed, blocks"),
    ],
)
def test_a_pattern_without_a_module_is_refused(pattern, hint):
    with pytest.raises(
        JobError, match=f"zero.leaf: '{pattern}' matches no module's whole name; {hint}"
    ):
        cut_of(Net(), leaf_names=[pattern])
    with pytest.raises(JobError, match=r"zero\.units"):
        cut_of(Net(), unit_names=[pattern])


def test_a_tied_parameter_has_one_place_and_every_user_brings_it():
    model = Net()
    model.head.weight = model.embed.weight
    found = cut_of(model)
    check(found, model)
    assert needs(found, model)["head"] == ["embed"]
    assert needs(found, model)["norm"] == ["norm"] or needs(found, model)["norm"] == ["{norm,head}"]
    kept = [unit.layout.name for unit in found.units if unit.layout.keep_until_pass_ends]
    assert kept == ["embed"], "in use at both ends"


def test_a_module_registered_twice_is_cut_once():
    model = nn.Module()
    shared = nn.Linear(16, 16)
    model.first = nn.ModuleList([Block(), Block()])
    model.first[0].extra = shared
    model.second, model.third = shared, shared
    found = cut_of(model, 16 * KIB)
    check(found, model)
    assert sum(unit.layout.numel for unit in found.units) == sum(
        param.numel() for param in model.parameters()
    )
    assert needs(found, model)["third"] == ["first.0"], "one hook for both names"


def test_frozen_parameters_are_units_apart():
    model = Net()
    model.blocks[1].requires_grad_(requires_grad=False)
    model.blocks[0].up.requires_grad_(requires_grad=False)
    found = cut_of(model)
    check(found, model)
    assert names(found) == [
        "embed",
        "blocks.0",
        "blocks.0(frozen)",
        "blocks.1(frozen)",
        "blocks.2",
        "{norm,head}",
    ]
    assert [unit.layout.trainable for unit in found.units] == [True, True, False, False, True, True]
    assert needs(found, model)["blocks.0"] == ["blocks.0", "blocks.0(frozen)"]
    together = [unit.layout.modules for unit in found.units]
    assert together[1] == together[2]


def test_batch_norms_stay_fp32_and_are_units_apart():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    found = cut_of(model, dtype=torch.bfloat16)
    check(found, model)
    assert [(unit.layout.name, unit.layout.dtype) for unit in found.units] == [
        ("model", torch.bfloat16),
        ("model(fp32)", torch.float32),
    ]
    assert names(cut_of(model)) == ["model"], "nothing is apart if everything is fp32"


def test_a_containers_own_parameters_are_a_lasting_unit_of_their_own():
    model = Net()
    model.position = nn.Parameter(torch.zeros(4, 16))
    model.blocks[0].gain = nn.Parameter(torch.ones(16))
    found = cut_of(model)
    check(found, model)
    assert names(found)[0] == "model"
    assert [slot.name for slot in found.units[0].layout.slots] == ["position"]
    assert [unit.layout.name for unit in found.units if unit.layout.keep_until_pass_ends] == [
        "model"
    ]
    assert needs(found, model)[""] == ["model"]
    assert "blocks.0.gain" in [slot.name for slot in found.units[2].layout.slots], (
        "a block that is not cut keeps its own"
    )


def test_small_parameters_stay_whole_wherever_they_are():
    model = Net(depth=2)
    found = cut_of(model, persist_below=200)
    check(found, model)
    assert names(found)[-1] == "small parameters"
    small = found.units[-1].layout
    assert small.keep_unsharded
    assert all(slot.numel * 4 < 200 for slot in small.slots)
    assert not any(slot.numel * 4 < 200 for unit in found.units[:-1] for slot in unit.layout.slots)
    assert needs(found, model)["blocks.0"] == ["blocks.0", "small parameters"]


def test_groups_are_contiguous_inside_a_unit():
    found = cut_of(Net(depth=2), group_of=lambda name: int(name.endswith("bias")))
    for unit in found.units:
        groups = [slot.group for slot in unit.layout.slots]
        assert groups == sorted(groups)


def test_the_cut_does_not_depend_on_the_number_of_shards():
    model = Net()
    two, four = (
        auto_wrap(model, dtype=torch.float32, num_shards=n, bucket=3 * KIB) for n in (2, 4)
    )
    assert names(two) == names(four)


class Tree(nn.Module):
    """A random tree: own parameters, children, ties to parameters that exist already."""

    def __init__(self, shape: Any, pool: list[nn.Parameter]) -> None:
        super().__init__()
        own, children = shape
        for number, (size, trainable, tied) in enumerate(own):
            param = nn.Parameter(torch.zeros(size), requires_grad=trainable)
            if tied and pool:
                param = pool[size % len(pool)]
            pool.append(param)
            self.register_parameter(f"p{number}", param)
        self.inner = nn.ModuleList(Tree(child, pool) for child in children)


OWN = st.lists(st.tuples(st.integers(1, 400), st.booleans(), st.booleans()), max_size=3)
TREES = st.recursive(
    st.tuples(OWN, st.just([])),
    lambda inner: st.tuples(OWN, st.lists(inner, max_size=4)),
    max_leaves=12,
)


@given(
    shape=TREES,
    bucket=st.integers(1, 4096),
    persist_below=st.sampled_from([0, 100]),
    whole_blocks=st.booleans(),
    patterns=st.lists(st.sampled_from([r"inner\.0", r".*\.1", "inner"]), max_size=2),
)
def test_any_tree_is_cut_so_that_every_module_finds_its_parameters(
    shape, bucket, persist_below, whole_blocks, patterns
):
    model = Tree(shape, [])
    known = [name for name, _ in model.named_modules()]
    usable = [p for p in patterns if any(re.fullmatch(p, name) for name in known)]
    found = cut_of(
        model, bucket, persist_below=persist_below, whole_blocks=whole_blocks, leaf_names=usable
    )
    check(found, model)
    for unit in found.units:
        assert len({param.requires_grad for param in unit.params}) == 1


# The tensor table


def row_and_column() -> tuple[nn.Module, dict[str, TensorPart]]:
    """A net on the second of two tensor-parallel ranks, whose blocks it has half of."""
    model, table = Net(), {}
    with torch.device("meta"):
        for name, block in model.blocks.named_children():
            block.up, block.down = nn.Linear(16, 16), nn.Linear(16, 16)
            table[f"blocks.{name}.up.weight"] = sliced_part("up.weight", (32, 16), 0, [(16, 32)])
            table[f"blocks.{name}.up.bias"] = sliced_part("up.bias", (32,), 0, [(16, 32)])
            table[f"blocks.{name}.down.weight"] = sliced_part(
                "down.weight", (16, 32), 1, [(16, 32)]
            )
    table = {name: replace(part, tensor=f"{name[:9]}{part.tensor}") for name, part in table.items()}
    for name, param in model.named_parameters():
        shape = tuple(param.shape)
        table.setdefault(
            name, full_part(name, shape, contiguous_stride(shape), replicated_over=("tensor",))
        )
    return model, table


def test_a_unit_is_all_sliced_or_all_alike_over_the_same_axes():
    model, table = row_and_column()
    found = cut_of(model, table=table)
    assert names(found) == [
        "embed(alike over tensor)",
        *(f"blocks.{k}{trait}" for k in range(3) for trait in ("", "(alike over tensor)")),
        "{norm,head}(alike over tensor)",
    ]
    check(found, model)
    for unit in found.units:
        assert {slot.part.replicated_over for slot in unit.layout.slots} == {
            unit.layout.replicated_over
        }
        assert all(slot.part == table[slot.name] for slot in unit.layout.slots)
    parts = [(slot.name, slot.stride) for slot in found.units[1].layout.slots]
    assert parts == [
        ("blocks.0.up.weight", (16, 1)),
        ("blocks.0.up.bias", (1,)),
        ("blocks.0.down.weight", (1, 16)),
    ]


def test_a_table_of_whole_tensors_changes_nothing():
    model = Net()
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    table = {
        name: full_part(name, shape, contiguous_stride(shape)) for name, shape in shapes.items()
    }
    without, with_table = cut_of(model), cut_of(model, table=table)
    assert [unit.layout for unit in without.units] == [unit.layout for unit in with_table.units]


def test_groups_go_by_the_name_of_the_tensor():
    """A weight in tiles is decayed as the weight is."""
    model = nn.ModuleList(nn.Linear(4, 2, bias=False) for _ in range(2))
    table = {
        f"{k}.weight": sliced_part("w.norm", (4, 4), 0, [(2 * k, 2 * k + 2)]) for k in range(2)
    }
    found = cut_of(model, table=table, group_of=lambda name: int("norm" in name))
    assert [slot.group for unit in found.units for slot in unit.layout.slots] == [1, 1]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"head.w": full_part("head.w", (8, 16), (16, 1))}, "has head.w, which the model has not"),
        ({"head.weight": sliced_part("w", (8, 32), 0, [(0, 8)])}, r"part of w \[8, 32\]"),
        (
            {
                "head.weight": sliced_part("w", (16, 16), 0, [(0, 8)]),
                "embed.weight": sliced_part("w", (16, 16), 1, [(0, 8)]),
            },
            "has w in two shapes or memory orders",
        ),
    ],
)
def test_a_table_that_cannot_be_is_refused(table, message):
    with pytest.raises(ValueError, match=message):
        cut_of(Net(), table=table)
