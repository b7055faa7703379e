"""Two models in one world: ranks 0 and 1 train one, ranks 2 and 3 another, as pipelines do.

They share the step's message, the checks of replicas and the checkpoint, and nothing else: each
model's bits are those that it has where two ranks train it alone.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from toys import Net, full_state, make_sharded, world

from zrun_core.checkpoint.checkpointer import Checkpointer
from zrun_core.checkpoint.export import export
from zrun_core.checkpoint.folder import CheckpointFolder, read_step
from zrun_core.checkpoint.model_state import ModelState
from zrun_core.checkpoint.rank_save import RunInfo
from zrun_core.checkpoint.resume import load_newest
from zrun_core.distributed import rng
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.errors import DivergedError, HangError
from zrun_core.guards.replicas import ReplicaGuard
from zrun_core.guards.watchdog import Watchdog
from zrun_core.spine.flight_recorder import FlightRecorder
from zrun_core.spine.parallel_dims import Coordinates
from zrun_core.spine.sections.checkpoint import CheckpointConfig
from zrun_core.spine.spec import ResumeSpec
from zrun_core.zero.sharded_model import ShardedModel

DP = 2
NAMES = ("front", "back")
PATIENCE_S = 0.3  # of a watchdog: it looks for a stalemate after four times as long
PAUSE_S = 1.0
# By step and rank, in the middle of a forward: one rank of a group, both, and one of the other. At
# first boards still hold all that was issued: to compare it over all ranks would be to accuse.
PAUSES = {(2, 0), (25, 0), (25, 1), (40, 3)}
FLIPPED = "back.blocks.1.norm.bias"  # a parameter that stays whole in every stage
State = dict[str, torch.Tensor]


class Stage(nn.Module):
    """One of the two models. They differ in the number of parameters, units and blocks."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        torch.manual_seed(NAMES.index(name))
        self.add_module(name, Net(24, 2) if name == "front" else Net(32, 3))
        self.register_buffer(f"{name}_passes", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor, pause_s: float) -> torch.Tensor:
        net = self.get_submodule(self.name)
        self.get_buffer(f"{self.name}_passes").add_(1)
        x = net.first(x)
        time.sleep(pause_s)
        for block in net.blocks:
            x = block(x)
        return nn.functional.mse_loss(net.last(x), y)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The global batch of a step."""
        generator = torch.Generator().manual_seed(100 * step + NAMES.index(self.name))
        dim = self.get_submodule(self.name).first.in_features
        x = torch.randn(4, dim, generator=generator)
        return x, torch.randn(4, 1, generator=generator)


class Rank:
    """One rank of two, which train a model alone, or of four."""

    def __init__(
        self,
        stage: int,
        folder: str,
        alone: str | None = None,
        board: str = "board",
    ) -> None:
        """
        Args:
            alone: name of the model that the whole world trains; None: each half has its own.
        """
        rank, size = world()
        places = [Coordinates(pp=number // DP, dp=number % DP) for number in range(size)]
        shard_size = DP if stage else 1
        mesh = Mesh.build(rank, ["host"] * size, shard_size, places=places)
        self.found: list[str] = []
        self.board = FlightRecorder(Path(folder) / board, rank, range(size), size)
        self.watchdog = Watchdog(self.board, self._accuse, PATIENCE_S)
        comm = Comm(torch.device("cpu"), self.board)
        comm.use_cma(mesh.host, 60.0)
        self.model = Stage(alone or NAMES[mesh.pipe.index])
        self.sharded = make_sharded(self.model, stage, meet=(mesh, comm), persist_below=256)
        self.told: list[tuple[float, float]] = []  # by step, the loss and the gradient's norm

    def _accuse(self, error: HangError) -> None:
        self.found.append(str(error))

    def train(self, steps: range, pauses: set[tuple[int, int]] | None = None) -> None:
        rank, _ = world()
        sharded = self.sharded
        for step in steps:
            self.board.step(step)
            x, y = self.model.batch(step)
            pause_s = PAUSE_S if (step, rank) in (pauses or ()) else 0.0
            total = self.compute(x, y, pause_s)
            sums = NamedVector.of(sharded.comm.device, loss=total)
            result = sharded.step(1e-2, sums, lambda sums: torch.ones(()).double())
            assert bool(result.agreed)
            assert not bool(result.skipped)
            self.told.append((float(result.sums["loss"]), float(result.grad_norm)))

    def compute(self, x: torch.Tensor, y: torch.Tensor, pause_s: float = 0.0) -> float:
        """Forward and backward of two micro-batches; return this rank's loss."""
        sharded, total = self.sharded, 0.0
        sharded.begin_step()
        for number in range(2):
            part = [t.chunk(DP)[sharded.mesh.data.index].chunk(2)[number] for t in (x, y)]
            with sharded.forward() as micro:
                loss = self.model(*part, pause_s if number else 0.0)
            total += loss.item()
            sharded.backward(loss / (2 * DP), micro, boundary=number == 1)
        return total

    def state(self) -> State:
        """Parameters and buffers, and the own pieces of the optimizer's state."""
        pieces = {part.key: part.data.clone() for part in ModelState(self.sharded).write_items()}
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        return (
            {str(key): piece for key, piece in pieces.items()} | full_state(self.sharded) | buffers
        )

    def traffic(self) -> Counter[str]:
        """Bytes sent, by kind; not what the world tells each other in short messages."""
        found: Counter[str] = Counter()
        for key, sent in self.sharded.comm.sent_bytes.items():
            if key.kind != "small":
                found[key.kind] += sent
        return found


def train_alone(stage: int, folder: str, name: str, steps: int) -> dict[str, Any]:
    rank = Rank(stage, folder, name)
    rank.train(range(1, steps + 1))
    rank.watchdog.close()
    return {"told": rank.told, "traffic": rank.traffic(), "state": rank.state()}


def train_together(
    stage: int,
    folder: str,
    steps: int,
    pauses: set[tuple[int, int]],
) -> dict[str, Any]:
    """Train, save, and load into models that had other values; train on both; then flip a bit."""
    rank = Rank(stage, folder)
    rank.train(range(1, steps + 1), pauses)
    found = {"told": list(rank.told), "traffic": rank.traffic(), "state": rank.state()}
    save(rank.sharded, folder, steps)
    rank.watchdog.close()
    found["accused"] = rank.found

    other = Rank(stage, folder, board="board of the other")
    other.train(range(1))
    sharded, source = other.sharded, ResumeSpec(folder=f"{folder}/steps")
    load_newest(source, ModelState(sharded), sharded.comm, sharded.mesh.world)
    found["loaded"] = other.state()
    more = range(steps + 1, steps + 3)
    rank.train(more)
    other.train(more)
    other.watchdog.close()
    assert not other.found
    found["went on"] = rank.state(), other.state()
    found["diverged"] = diverge(other, steps)
    return found


def save(sharded: ShardedModel, folder: str, step: int) -> None:
    mesh, comm = sharded.mesh, sharded.comm
    streams = rng.Streams(3, comm.device, dp=mesh.data.index, pp=mesh.pipe.index)
    steps, state = CheckpointFolder(Path(folder) / "steps"), ModelState(sharded)
    config = CheckpointConfig(every=1)
    about = RunInfo("run", {}, {})
    saver = Checkpointer(
        steps, state, streams, config, comm, mesh.world, about, lambda **fields: None
    )
    saver.save(step, dict, "end")
    saver.close()


def diverge(rank: Rank, step: int) -> list[str]:
    """What the guard says of another counter on rank 1, and of another bit of a bias on rank 3."""
    guard, number = ReplicaGuard(rank.sharded), rank.sharded.mesh.world.index
    rank.compute(*rank.model.batch(step))  # before the update all parameters are whole
    guard.check(step, {"step": step})
    with pytest.raises(DivergedError) as counter:
        guard.check(step, {"step": 99 if number == 1 else step})
    if number == 3:
        rank.model.get_parameter(FLIPPED).data.view(torch.int32)[7] ^= 1
    with pytest.raises(DivergedError) as parameter:
        guard.check(step, {"step": step})
    return [str(counter.value), str(parameter.value)]


def same(left: State, right: State) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


@pytest.mark.parametrize(("stage", "steps"), [(0, 6), (1, 50), (2, 6), (3, 6)])
@pytest.mark.thorough
def test_each_group_trains_as_if_it_were_alone(
    ranks: Any, tmp_path: Path, stage: int, steps: int
) -> None:
    pauses = PAUSES if steps == 50 else set()
    found = ranks(4).run(train_together, stage, str(tmp_path), steps, pauses)
    assert [rank["accused"] for rank in found] == [[]] * 4
    expected: State = {}
    told = []
    for number, name in enumerate(NAMES):
        folder = tmp_path / name
        folder.mkdir()
        alone = ranks(2).run(train_alone, stage, str(folder), name, steps)
        for rank, one in zip(found[2 * number : 2 * number + 2], alone, strict=True):
            assert rank["traffic"] == one["traffic"]
            same(rank["state"], one["state"])
            same(rank["loaded"], one["state"])
            same(*rank["went on"])
        expected |= alone[0]["state"]
        told.append(alone[0]["told"])

    for rank in found:
        for front, back, both in zip(*told, rank["told"], strict=True):
            assert both[0] == pytest.approx(front[0] + back[0], rel=1e-12)
            assert both[1] == pytest.approx(math.hypot(front[1], back[1]), rel=1e-12)

    step = tmp_path / "steps" / f"step-{steps:08d}"
    export(step, read_step(step), tmp_path / "both.safetensors")
    exported = load_file(tmp_path / "both.safetensors")
    assert {name.partition(".")[0].partition("_")[0] for name in exported} == set(NAMES)
    for name, value in exported.items():
        assert torch.equal(value, expected[name]), name
    for rank in found:
        counter, parameter = rank["diverged"]
        begin = f"step {steps}: replicas diverged: "
        assert counter.startswith(f"{begin}rank 1 has step 99, rank 0 has {steps}; ")
        assert parameter.startswith(f"{begin}rank 3 has another parameter {FLIPPED} than the ")
