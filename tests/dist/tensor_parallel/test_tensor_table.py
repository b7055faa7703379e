"""A model in parts: slices, runs, tiles and a padded vocabulary on two ranks of a tensor axis.

Nothing of tensor parallelism is here but what it does to parameters: each rank's model has its own
part of the weights, by a table, and a loss that pulls every element towards a goal of its own. So
what a whole model comes to says what the parts must come to. The oracle cuts arrays with numpy, and
knows nothing of runs and memory orders.
"""

from __future__ import annotations

import math
import sys
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn
from toys import optim_config, world

from zrun_core.checkpoint.checkpointer import Checkpointer
from zrun_core.checkpoint.export import export
from zrun_core.checkpoint.folder import CheckpointFolder, read_step
from zrun_core.checkpoint.initial_weights import load_weights
from zrun_core.checkpoint.model_state import ModelState
from zrun_core.checkpoint.rank_save import RunInfo
from zrun_core.checkpoint.resume import load_newest
from zrun_core.checkpoint.step_index import open_index
from zrun_core.distributed import rng
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.errors import CheckpointError, DivergedError
from zrun_core.guards.replicas import ReplicaGuard
from zrun_core.memory.buffers import Kind
from zrun_core.memory.state_policy import ZeroPolicy
from zrun_core.memory.tensors import TensorPart, contiguous_stride, full_part, sliced_part
from zrun_core.optim.resolve import resolve_optimizer
from zrun_core.plan.memory.states import plan_model, rank_buffers
from zrun_core.spine.parallel_dims import Coordinates, ParallelDims
from zrun_core.spine.sections.checkpoint import CheckpointConfig, InitFromConfig
from zrun_core.spine.sections.precision import PrecisionConfig
from zrun_core.spine.spec import ResumeSpec
from zrun_core.zero.account import allocated_memory, planned_memory
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.unit.precision import Precision
from zrun_core.zero.wrap.sharding_config import MemoryAccount, ShardingConfig

sys.path.append(str(Path(__file__).parents[2] / "unit"))

from checkpoint_toys import Reads

TP = 2
VOCAB, DIM, WIDE = 131, 64, 96
Arrays = dict[str, np.ndarray]
# The tensors of the whole model, each in the module that has it.
TENSORS: dict[str, tuple[int, ...]] = {
    "embed.weight": (VOCAB, DIM),
    "block.qkv.weight": (3 * DIM, DIM),
    "block.qkv.bias": (3 * DIM,),
    "block.out.weight": (DIM, WIDE),
    "block.out.bias": (DIM,),
    "block.up.weight": (WIDE, DIM),
    "norm.weight": (DIM,),
    "norm.frozen": (DIM,),
    "last.weight": (DIM, DIM),
}


# What the stages of a pipeline have, with a tied weight at both ends.
STAGES = [
    [name for name in TENSORS if not name.startswith(("norm", "last"))],
    ["embed.weight", *(name for name in TENSORS if name.startswith(("norm", "last")))],
]


class Cut(NamedTuple):
    """What a parameter has of a tensor: ranges along a dimension, in a parameter of `size`."""

    tensor: str
    dim: int
    ranges: list[tuple[int, int]]
    size: int

    def of(self, array: np.ndarray) -> np.ndarray:
        """The parameter, cut from the tensor by numpy."""
        found = np.concatenate([np.take(array, range(*r), self.dim) for r in self.ranges], self.dim)
        padding = [(0, 0)] * array.ndim
        padding[self.dim] = (0, self.size - found.shape[self.dim])
        return np.pad(found, padding)

    def put(self, local: np.ndarray, array: np.ndarray) -> None:
        """Write the parameter to its places in the tensor."""
        done = 0
        for start, stop in self.ranges:
            place: list[Any] = [slice(None)] * array.ndim
            place[self.dim] = slice(start, stop)
            array[tuple(place)] = np.take(local, range(done, done + stop - start), self.dim)
            done += stop - start


def cuts(rank: int) -> dict[str, Cut]:
    """By parameter name, what a rank of the tensor axis has; of other tensors, everything."""
    rows = math.ceil(VOCAB / TP)
    third, wide, tile = DIM // TP, WIDE // TP, WIDE // TP // 2
    first = rank * third
    thirds = [(k * DIM + first, k * DIM + first + third) for k in range(3)]
    vocabulary = (rank * rows, min(VOCAB, (rank + 1) * rows))
    found = {
        "embed.weight": Cut("embed.weight", 0, [vocabulary], rows),
        "block.qkv.weight": Cut("block.qkv.weight", 0, thirds, 3 * third),
        "block.qkv.bias": Cut("block.qkv.bias", 0, thirds, 3 * third),
        "block.out.weight": Cut("block.out.weight", 1, [(rank * wide, (rank + 1) * wide)], wide),
    }
    for k in range(2):
        start = rank * wide + k * tile
        found[f"block.tiles.{k}.weight"] = Cut("block.up.weight", 0, [(start, start + tile)], tile)
    return found


def names_of(mesh: Mesh) -> dict[str, Cut | None]:
    """The parameters of a rank, and what each is of a tensor, if not all of it."""
    names = TENSORS if mesh.pipe.size == 1 else STAGES[mesh.pipe.index]
    if mesh.tensor.size == 1:
        return dict.fromkeys(names)
    own = {name: cut for name, cut in cuts(mesh.tensor.index).items() if cut.tensor in names}
    divided = {cut.tensor for cut in own.values()}
    return {name: None for name in names if name not in divided} | own


def table(mesh: Mesh) -> dict[str, TensorPart]:
    found = {}
    for name, cut in names_of(mesh).items():
        over = ["tied"] * (mesh.pipe.size > 1 and name == "embed.weight")
        if cut is not None:
            shape, more = TENSORS[cut.tensor], {"size": cut.size, "replicated_over": tuple(over)}
            found[name] = sliced_part(cut.tensor, shape, cut.dim, cut.ranges, **more)
        else:
            over += ["tensor"] * (mesh.tensor.size > 1)
            shape = TENSORS[name]
            found[name] = full_part(name, shape, contiguous_stride(shape), tuple(over))
    return found


def numbers(purpose: str) -> Arrays:
    """Values of all tensors, the same for the same purpose."""
    found = {}
    for name, shape in TENSORS.items():
        random = np.random.default_rng(zlib.crc32(f"{purpose} {name}".encode()))
        found[name] = random.standard_normal(shape).astype(np.float32)
    return found


class Pulled(nn.Module):
    """Parameters, and what pulls them."""

    goals: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]

    def forward(self) -> torch.Tensor:
        found = torch.zeros(())
        for name, param in self.named_parameters(recurse=False):
            found = found + ((param - self.goals[name]).square() * self.weights[name]).sum()
        return found


class Model(nn.Module):
    """The whole model, or what a rank of the tensor axis or a stage of a pipeline has of it.

    Padding has no gradient, and is `junk` at first.
    """

    def __init__(self, names: dict[str, Cut | None], buffer: str, junk: float) -> None:
        super().__init__()
        starts, goals = numbers("start"), numbers("goal")
        for name, cut in names.items():
            if cut is None:
                self.add(name, starts[name], goals[name], np.ones(TENSORS[name]))
            else:
                weight = cut.of(np.ones(TENSORS[cut.tensor]))
                start = np.where(weight, cut.of(starts[cut.tensor]), np.float32(junk))
                self.add(name, start, cut.of(goals[cut.tensor]), weight)
        if "norm.frozen" in names:
            self.get_submodule("norm").frozen.requires_grad_(False)
        self.register_buffer(buffer, torch.zeros(3))

    def add(self, name: str, start: np.ndarray, goal: np.ndarray, weight: np.ndarray) -> None:
        path, _, key = name.rpartition(".")
        module: nn.Module = self
        for part in path.split("."):
            if part not in module._modules:
                module.add_module(part, Pulled())
                module._modules[part].goals, module._modules[part].weights = {}, {}
            module = module._modules[part]
        module.register_parameter(key, nn.Parameter(torch.from_numpy(start.copy())))
        module.goals[key] = torch.from_numpy(goal.copy())
        module.weights[key] = torch.from_numpy(weight.astype(np.float32))

    def forward(self) -> torch.Tensor:
        next(self.buffers()).add_(torch.arange(3))
        pulled = [module for module in self.modules() if isinstance(module, Pulled)]
        return torch.stack([module() for module in pulled]).sum()


def build(mesh: Mesh, junk: float = 0.0) -> Model:
    """What this rank has of the model. Each stage has a buffer of its own."""
    model = Model(names_of(mesh), ["count", "last_count"][mesh.pipe.index], junk)
    if mesh.pipe.size > 1:  # of a tied weight, whose gradient the stages add up, each has a part
        model.get_submodule("embed").weights["weight"].div_(mesh.pipe.size)
    return model


def make(
    stage: int,
    tp: int,
    optim: dict[str, Any],
    *,
    pp: int = 1,
    group: int | None = None,
    junk: float = 0.0,
) -> ShardedModel:
    rank, size = world()
    dims = ParallelDims(size // tp // pp, tp=tp, pp=pp)
    places = [dims.coordinates(number) for number in range(size)]
    policy, config = ZeroPolicy(stage), optim_config(clip=1.0, no_decay=["bias"], **optim)
    shard_size = 1 if stage == 0 else group or dims.dp
    settings = ShardingConfig(
        zero=policy,
        precision=Precision.of(PrecisionConfig.model_validate("fp32")),
        optimizer=resolve_optimizer(config, lambda name: None),
        bucket=1 << 14,
        clip=config.clip,
        no_decay=config.no_decay,
    )
    mesh = Mesh.build(rank, ["host"] * size, shard_size, places=places, tied_stages=(0, pp - 1))
    comm = Comm(torch.device("cpu"))
    comm.use_cma(mesh.host, 60.0)
    read = lambda name, param: param.detach()  # noqa: E731
    return ShardedModel(build(mesh, junk), read, settings, mesh, comm, table=table(mesh))


def train(sharded: ShardedModel, steps: int) -> list[float]:
    """The norms of the gradient."""
    mesh, norms = sharded.mesh, []
    for _ in range(steps):
        sharded.begin_step()
        with sharded.forward() as micro:
            loss = sharded.module()
        sharded.backward(loss / mesh.data.size, micro, boundary=True)
        sums = NamedVector.of(sharded.comm.device, loss=loss.item() / mesh.data.size)
        result = sharded.step(1e-2, sums, lambda sums: torch.ones(()).double())
        assert bool(result.agreed)
        norms.append(float(result.grad_norm))
    return norms


def saver(sharded: ShardedModel, folder: str) -> Checkpointer:
    about = RunInfo("run", {}, {})
    mesh, device = sharded.mesh, sharded.comm.device
    streams = rng.Streams(3, device, dp=mesh.data.index, tp=mesh.tensor.index)
    config = CheckpointConfig(every=1)
    own = (CheckpointFolder(Path(folder)), ModelState(sharded), streams, config)
    return Checkpointer(*own, sharded.comm, mesh.world, about, lambda **fields: None)


def contents(sharded: ShardedModel) -> dict[str, Any]:
    """This rank's parameters, and its pieces of the optimizer's state, as they lie in memory."""
    with sharded.gathered():
        params = {name: p.numpy().copy() for name, p in sharded.module.named_parameters()}
    pieces = []
    for unit, piece, update in sharded.optimizer.updated_pieces():
        first = unit.updated_range[0] + piece.start - piece.slot.offset
        for key, value in (update.state_of(piece) or {}).items():
            pieces.append((piece.slot.name, key, first, value.numpy().copy()))
    strides = {slot.name: slot.stride for unit in sharded.units for slot in unit.layout.slots}
    place = sharded.mesh.tensor.index if sharded.mesh.tensor.size > 1 else None
    buffers = {name: b.numpy().copy() for name, b in sharded.module.named_buffers()}
    return {
        "params": params,
        "pieces": pieces,
        "strides": strides,
        "place": place,
        "buffers": buffers,
    }


def train_and_save(
    folder: str,
    stage: int,
    tp: int,
    optim: dict[str, Any],
    options: dict[str, Any],
) -> dict[str, Any]:
    sharded = make(stage, tp, optim, **options)
    norms = train(sharded, 2)
    found = contents(sharded)
    checkpointer = saver(sharded, folder)
    checkpointer.save(2, dict, "end")
    checkpointer.close()
    allocated = allocated_memory(sharded).by_kind
    assert planned_memory(sharded).by_kind == allocated
    assert on_paper(sharded) == allocated
    return {**found, "norms": norms}


def on_paper(sharded: ShardedModel) -> dict[Kind, int]:
    """What the planner says that this rank allocates."""
    mesh = sharded.mesh
    cut = plan_model(build(mesh), sharded.settings, table=table(mesh))
    dims = ParallelDims(mesh.data.size, tp=mesh.tensor.size, shard=mesh.shard.size)
    rank = Coordinates(dp=mesh.data.index, tp=mesh.tensor.index)
    account = MemoryAccount()
    buffers = rank_buffers(
        cut, sharded.settings, dims, rank=rank, device="cpu", tied_size=mesh.tied.size
    )
    account.add([buffer for buffer in buffers if buffer.kind is not Kind.TEMP])
    return account.by_kind


def load(
    folder: str,
    stage: int,
    tp: int,
    optim: dict[str, Any],
    options: dict[str, Any],
) -> dict[str, Any]:
    """What this rank has after loading, and how often it has read any byte."""
    sharded = make(stage, tp, optim, **options)
    train(sharded, 1)  # what is there is overwritten
    with pytest.MonkeyPatch.context() as patch:
        reads = Reads(patch)
        spec = ResumeSpec(folder=folder)
        try:
            load_newest(spec, ModelState(sharded), sharded.comm, sharded.mesh.world)
        except CheckpointError as error:
            return {"error": str(error)}
    tensors = {n: t for n, t in reads.times.items() if n.endswith(".safetensors")}
    found = contents(sharded)
    found["norms"] = train(sharded, 1)
    return {**found, "times": {Path(name).name: times for name, times in tensors.items()}}


def compare_replicas(
    stage: int,
    tp: int,
    options: dict[str, Any],
    spoilt: tuple[int, str] | None,
) -> str:
    """What the guard says after a rank's parameter was changed, in all that it keeps of it."""
    sharded = make(stage, tp, {}, **options)
    train(sharded, 1)
    guard = ReplicaGuard(sharded)
    guard.check(1, {"steps": 1.0})
    if spoilt is not None and spoilt[0] == world()[0]:
        for unit in sharded.units:
            flat, start = unit.resident_params()
            for each in unit.layout.tensor_ranges(start, start + flat.numel()):
                if each.part.tensor == spoilt[1]:
                    flat[each.start : each.stop] += 1
    try:
        guard.check(2, {"steps": 2.0})
    except DivergedError as error:
        return str(error)
    return ""


def load_from_file(path: str, stage: int, tp: int, options: dict[str, Any]) -> dict[str, Any]:
    sharded = make(stage, tp, {}, **options)
    load_weights(InitFromConfig(path=path), ModelState(sharded), sharded.mesh.world)
    return contents(sharded)


# The oracle


def assembled(ranks: list[dict[str, Any]]) -> dict[str, Arrays]:
    """By state, the whole tensors that ranks have parts of."""
    states: dict[str, Arrays] = {"value": {name: np.full(s, np.nan) for name, s in TENSORS.items()}}
    flats: dict[tuple[int | None, str, str], np.ndarray] = {}
    for rank in ranks:
        for name, key, first, piece in rank["pieces"]:
            if piece.ndim == 0:
                continue
            empty = np.full(rank["params"][name].size, np.nan, dtype=np.float32)
            flat = flats.setdefault((rank["place"], name, key), empty)
            flat[first : first + piece.size] = piece
    for rank in ranks:
        for name, local in rank["params"].items():
            put(states["value"], rank["place"], name, local)
    for (place, name, key), flat in flats.items():
        has_it = (rank for rank in ranks if rank["place"] == place and name in rank["params"])
        rank = next(has_it)
        shape, stride = rank["params"][name].shape, rank["strides"][name]
        local = np.lib.stride_tricks.as_strided(flat, shape, [4 * s for s in stride])
        put(states.setdefault(key, {}), place, name, local)
    return states


def put(state: Arrays, place: int | None, name: str, local: np.ndarray) -> None:
    cut = None if place is None else cuts(place).get(name)
    tensor = name if cut is None else cut.tensor
    array = state.setdefault(tensor, np.full(TENSORS[tensor], np.nan, dtype=np.float32))
    if cut is not None:
        cut.put(local, array)
    else:
        assert np.isnan(array).all() or np.array_equal(array, local), f"ranks differ in {name}"
        array[...] = local


def same(left: dict[str, Arrays], right: dict[str, Arrays]) -> None:
    assert left.keys() == right.keys()
    for state, arrays in left.items():
        assert arrays.keys() == right[state].keys()
        for name, array in arrays.items():
            assert not np.isnan(array).any()
            assert np.array_equal(array, right[state][name]), (state, name)


@pytest.mark.parametrize(
    ("stage", "world_size", "group"),
    [(0, 2, None), (1, 2, None), (3, 2, None), (0, 4, None), (1, 4, None), (3, 4, None), (3, 4, 1)],
)
@pytest.mark.at_most(1)
def test_parts_are_saved_and_loaded_as_the_tensors_they_are_of(
    ranks, tmp_path, stage, world_size, group
):
    options = {"junk": 7.0, "group": group}
    found = ranks(world_size).run(train_and_save, str(tmp_path / "steps"), stage, TP, {}, options)
    expected = assembled(found)
    step = tmp_path / "steps" / "step-00000002"
    manifest = read_step(step)
    assert {info.name: info.shape for info in manifest.tensors} == TENSORS | {"count": (3,)}
    assert len(manifest.layouts) == TP

    export(step, manifest, tmp_path / "model.safetensors")
    exported = load_file(tmp_path / "model.safetensors")
    assert exported.keys() == TENSORS.keys() | {"count"}
    for name, array in expected["value"].items():
        assert np.array_equal(exported[name], array), name
    assert exported["count"].tolist() == [0, 2, 4]

    for size, other_stage in ((1, 0), (3, stage)):
        loaded = ranks(size).run(load, str(tmp_path / "steps"), other_stage, 1, {}, {})
        same(assembled(loaded), expected)
        for rank in loaded:
            assert max(int(times.max()) for times in rank["times"].values()) == 1
            assert all((rank["buffers"]["count"] == [0, 2, 4]).tolist())
    read = {name: sum(rank["times"].get(name, 0) for rank in loaded) for name in rank["times"]}
    assert all((times > 0).all() for times in read.values()), "every byte was verified"

    parts = ranks(2).run(load, str(tmp_path / "steps"), 3, TP, {}, {})
    same(assembled(parts), expected)
    assert all(max(int(t.max()) for t in rank["times"].values()) == 1 for rank in parts)
    assert not parts[1]["params"]["embed.weight"][-1].any(), "padding is zero after loading"
    assert (found[1]["params"]["embed.weight"][-1] > 1).all(), "and was not before"


@pytest.mark.parametrize("optim", [{}, {"name": "lamb", "lr": 1e-2}, {"name": "lars", "lr": 1e-2}])
@pytest.mark.parametrize(
    ("stage", "world_size", "tp", "pp"), [(1, 2, TP, 1), (3, 4, TP, 1), (1, 4, TP, 2)]
)
def test_parts_train_as_the_whole_does(ranks, tmp_path, stage, world_size, tp, pp, optim):
    """Norms count once what several ranks hold; slices and tiles share their tensor's ratio."""
    whole = ranks(1).run(train_and_save, str(tmp_path / "whole"), stage, 1, optim, {})
    options = {"pp": pp}
    parts = ranks(world_size).run(
        train_and_save, str(tmp_path / "parts"), stage, tp, optim, options
    )
    for rank in parts:
        np.testing.assert_allclose(rank["norms"], whole[0]["norms"], rtol=1e-6)
    for state, arrays in assembled(whole).items():
        for name, array in assembled(parts)[state].items():
            np.testing.assert_allclose(array, arrays[name], rtol=2e-5, atol=1e-7, err_msg=name)


def test_a_whole_model_is_loaded_in_parts(ranks, tmp_path):
    """From a checkpoint of three ranks, from safetensors, and from a state_dict of torch."""
    found = ranks(3).run(train_and_save, str(tmp_path / "steps"), 3, 1, {}, {})
    expected, step = assembled(found), tmp_path / "steps" / "step-00000002"
    parts = ranks(2).run(load, str(tmp_path / "steps"), 1, TP, {}, {})
    same(assembled(parts), expected)
    assert all(max(int(t.max()) for t in rank["times"].values()) == 1 for rank in parts)
    assert [rank["norms"] for rank in parts] == [parts[0]["norms"]] * 2
    for name in ("model.safetensors", "model.pt"):
        export(step, read_step(step), tmp_path / name)
        parts = ranks(2).run(load_from_file, str(tmp_path / name), 3, TP, {})
        same(assembled(parts), {"value": expected["value"]})
        assert not parts[1]["params"]["embed.weight"][-1].any()


def test_every_rank_writes_its_share_of_what_all_ranks_of_an_axis_hold(ranks, tmp_path):
    ranks(4).run(train_and_save, str(tmp_path), 1, TP, {}, {})
    step = tmp_path / "step-00000002"
    fragments = open_index(step, read_step(step)).fragments()
    alike = [each for each in fragments if each.tensor == "last.weight"]
    assert len({each.file for each in alike if each.state == "value"}) == 4


@pytest.mark.parametrize(("stage", "group"), [(0, None), (1, None), (3, None), (3, 1)])
@pytest.mark.at_most(1)
def test_the_guard_compares_what_all_ranks_of_an_axis_hold(ranks, stage, group):
    """Ranks 0 and 1, and 2 and 3, are a tensor axis each; 0 and 2, and 1 and 3 data-parallel."""

    def run(spoilt: tuple[int, str] | None) -> list[str]:
        return ranks(4).run(compare_replicas, stage, TP, {"group": group}, spoilt)

    assert run(None) == [""] * 4
    has_copies = stage == 0 or group == 1
    rank = 3 if has_copies else 1  # which keeps the parameter after an update
    for name in ("norm.weight", "norm.frozen"):
        found = run((rank, name))
        assert len(set(found)) == 1
        words = f"step 2: replicas diverged: rank {rank} has another parameter {name} than the"
        assert found[0].startswith(words)
    of_part = run((3, "block.qkv.weight"))
    assert len(set(of_part)) == 1
    assert bool(of_part[0]) == has_copies, "nobody else has it"
    assert not of_part[0] or "rank 3 has another parameter block.qkv.weight" in of_part[0]


def test_the_guard_compares_the_ends_of_a_pipeline(ranks):
    run = ranks(2).run
    assert run(compare_replicas, 1, 1, {"pp": 2}, None) == [""] * 2
    found = run(compare_replicas, 1, 1, {"pp": 2}, (1, "embed.weight"))
    assert found[0] == found[1]
    assert "rank 1 has another parameter embed.weight than the other ranks" in found[0]


def name_spoilt(tp: int, pp: int, rank: int, tensor: str) -> list[str]:
    """How the ranks call what is not finite on one of them: a parameter, then a gradient."""
    sharded = make(1, tp, {}, pp=pp)
    train(sharded, 1)
    found = []
    spoils = world()[0] == rank
    for unit in sharded.units:
        values, start = unit.values()
        for each in unit.layout.tensor_ranges(start, start + values.numel()):
            if spoils and each.part.tensor == tensor:
                values[each.start] = math.inf
                unit.values_changed()
    named = sharded.find_nonfinite_parameter()
    found.append(str(named))
    sharded.begin_step()
    with sharded.forward() as micro:
        loss = sharded.module()
    sharded.backward(loss, micro, boundary=True)
    sums = NamedVector.of(sharded.comm.device)
    assert bool(sharded.step(1e-2, sums, lambda sums: torch.ones(()).double()).skipped)
    found.append(str(sharded.find_nonfinite([])))
    return found


@pytest.mark.parametrize(
    ("tp", "pp", "rank", "tensor"), [(2, 1, 1, "block.up.weight"), (1, 2, 1, "last.weight")]
)
def test_every_rank_names_the_tensor_that_one_alone_has(ranks, tp, pp, rank, tensor):
    found = ranks(2).run(name_spoilt, tp, pp, rank, tensor)
    assert found[0] == found[1]
    assert found[0][0] == str((tensor, "inf"))
    assert found[0][1].startswith(f"the gradient of {tensor} (layer")


@pytest.mark.parametrize(("stage", "world_size"), [(1, 2), (3, 4)])
@pytest.mark.at_most(1)
def test_stages_of_a_pipeline_save_one_model(ranks, tmp_path, stage, world_size):
    folder = str(tmp_path / "steps")
    found = ranks(world_size).run(train_and_save, folder, stage, 1, {}, {"pp": 2})
    expected = assembled(found)
    manifest = read_step(tmp_path / "steps" / "step-00000002")
    assert {info.name for info in manifest.tensors} == {*TENSORS, "count", "last_count"}
    assert [each["ranks"] for each in manifest.layouts] == [
        [rank for rank in range(world_size) if rank // (world_size // 2) == place]
        for place in range(2)
    ]
    fragments = open_index(tmp_path / "steps" / "step-00000002", manifest).fragments()
    tied = [each.file for each in fragments if each.tensor == "embed.weight"]
    assert len(set(tied)) == world_size, "both ends write a part of it"
    whole = ranks(1).run(train_and_save, str(tmp_path / "whole"), stage, 1, {}, {})
    np.testing.assert_allclose(found[-1]["norms"], whole[0]["norms"], rtol=1e-6)

    again = ranks(world_size).run(load, folder, stage, 1, {}, {"pp": 2})
    same(assembled(again), expected)
    export(tmp_path / "steps" / "step-00000002", manifest, tmp_path / "model.safetensors")
    path = str(tmp_path / "model.safetensors")
    imported = ranks(world_size).run(load_from_file, path, stage, 1, {"pp": 2})
    same(assembled(imported), {"value": expected["value"]})
    refused = ranks(world_size).run(load, str(tmp_path / "whole"), stage, 1, {}, {"pp": 2})
    for rank in refused:
        assert "the checkpoint has no tensor last_count [3]" in rank["error"]
    refused = ranks(2).run(load, folder, 0, 1, {}, {})
    for rank in refused:
        words = "the checkpoint has a tensor last_count [3], which the model has not"
        assert words in rank["error"]
