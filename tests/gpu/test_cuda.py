"""One CUDA device: every part of the runtime that is not the same code as on a CPU."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zrun_core.activations.checkpoint import apply_checkpointing
from zrun_core.activations.kept import make_keeper
from zrun_core.activations.offloaded_inputs import OffloadedInputs
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.distributed.rng import Streams, fork_torch_rng
from zrun_core.memory.arena import Ring, StorageMeter, StorageWindow
from zrun_core.memory.buffers import Kind, Tier
from zrun_core.memory.state_policy import ZeroPolicy
from zrun_core.optim.resolve import resolve_optimizer
from zrun_core.spine.sections.activations import ActivationsConfig
from zrun_core.spine.sections.optim import OptimConfig
from zrun_core.spine.sections.precision import PrecisionConfig
from zrun_core.zero.account import allocated_memory, planned_memory
from zrun_core.zero.sharded_model import ShardedModel, StepResult
from zrun_core.zero.unit.precision import LossScaler, Precision
from zrun_core.zero.wrap.auto_wrap import repeated_blocks
from zrun_core.zero.wrap.sharding_config import ShardingConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
DIM, BATCH, STEPS = 64, 32, 6
STAGES = [0, 1, 2, 3]


class Block(nn.Module):
    """A residual block. Backward needs what GELU got and what it made; of a ReLU only the latter.

    So a selective checkpoint, which keeps the former, saves the latter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.last = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.last(x).float(), y)


def build() -> Net:
    torch.manual_seed(1)
    return Net()


def batches(steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(BATCH, DIM, generator=generator).to(CUDA),
            torch.randn(BATCH, 1, generator=generator).to(CUDA),
        )
        for _ in range(steps)
    ]


def make_sharded(
    model: nn.Module,
    stage: int,
    precision: Any = "fp32",
    optim: dict[str, Any] | None = None,
    **options: Any,
) -> ShardedModel:
    config = OptimConfig.model_validate({"lr": 1e-3, "weight_decay": 0.1, **(optim or {})})
    settings = ShardingConfig(
        zero=ZeroPolicy(stage),
        precision=Precision.of(PrecisionConfig.model_validate(precision)),
        optimizer=resolve_optimizer(config, lambda name: None, CUDA),
        bucket=1 << 16,
        clip=config.clip,
        **options,
    )
    mesh = Mesh.build(0, ["host"], 1)
    sharded = ShardedModel(model, lambda name, param: param.detach(), settings, mesh, Comm(CUDA))
    sharded.module.to(CUDA)  # buffers, as the worker does
    return sharded


def one_step(
    sharded: ShardedModel, batch: tuple[torch.Tensor, torch.Tensor], factor: float = 1.0
) -> StepResult:
    sharded.begin_step()
    with sharded.forward() as micro:
        loss = sharded.module(*batch)
    sharded.backward(loss * factor, micro, boundary=True)
    sums = NamedVector.of(CUDA, weight=1.0, loss=0.0)
    sums.add(loss=loss.detach())
    return sharded.step(1e-3, sums, lambda summed: summed["weight"])


def train(sharded: ShardedModel, steps: int = STEPS) -> list[float]:
    return [float(one_step(sharded, batch).sums["loss"]) for batch in batches(steps)]


def train_plain(steps: int = STEPS) -> list[float]:
    model = build().to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    losses = []
    for x, y in batches(steps):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def memory_in_use() -> int:
    gc.collect()  # models and their hooks refer to each other
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


# The same results as a plain loop, at every stage and in every format


@pytest.mark.parametrize("stage", STAGES)
def test_fp32_losses_are_the_plain_loops(stage):
    assert train(make_sharded(build(), stage)) == pytest.approx(train_plain(), abs=1e-5)


@pytest.mark.parametrize(
    "precision", ["fp32", "bf16", {"compute": "bf16", "reduce": "compute"}, "fp16"]
)
def test_stages_agree_to_the_bit(precision):
    runs = [train(make_sharded(build(), stage, precision)) for stage in STAGES]
    assert all(run == runs[0] for run in runs[1:])


@pytest.mark.parametrize("precision", ["bf16", {"compute": "fp16", "loss_scale": {"init": 256.0}}])
def test_low_precision_follows_fp32(precision):
    losses = {}
    for name, chosen in (("low", precision), ("full", "fp32")):
        sharded, batch = make_sharded(build(), 2, chosen, {"clip": 1.0}), batches(1)[0]
        losses[name] = [float(one_step(sharded, batch).sums["loss"]) for _ in range(20)]
    assert losses["low"] == pytest.approx(losses["full"], rel=0.1, abs=0.05)
    assert losses["low"][-1] < 0.8 * losses["low"][0]


@pytest.mark.parametrize(
    "name", ["adamw", "adam", "sgd", "adagrad", "rmsprop", "lamb", "lars", "lion"]
)
def test_optimizers_by_name(name):
    losses = train(make_sharded(build(), 2, "bf16", {"name": name}), 4)
    assert all(0 < loss < 100 for loss in losses)


OURS = [
    {"name": "lamb"},
    {"name": "lars"},
    {"name": "lion"},
    {"name": "lamb", "moments": "bf16"},
    {"name": "adamw", "moments": "bf16"},
]


@pytest.mark.parametrize("optim", OURS, ids=lambda optim: " ".join(optim.values()))
def test_our_own_are_those_of_a_cpu(optim):
    given = torch.Generator().manual_seed(0)
    start, grads = torch.randn(1000, generator=given), torch.randn(3, 1000, generator=given)
    found = []
    for device in (torch.device("cpu"), CUDA):
        param = torch.nn.Parameter(start.to(device, copy=True))
        config = OptimConfig.model_validate({"lr": 1e-2, "weight_decay": 0.1, **optim})
        optimizer = resolve_optimizer(config, lambda name: None, device).make([param])
        for grad in grads:
            param.grad = grad.to(device, copy=True)  # an update may overwrite it
            optimizer.step()
        found.append(param.detach().cpu())
    # A moment between two numbers of bf16 may be rounded the other way: 1/256 of an update.
    atol = 1e-4 if "moments" in optim else 1e-5
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=atol)


@pytest.mark.parametrize("optim", OURS, ids=lambda optim: " ".join(optim.values()))
def test_our_own_skip_on_the_device_and_never_make_the_host_wait(optim):
    sharded = make_sharded(
        build(), 2, {"compute": "fp16", "loss_scale": {"init": 1024.0}}, {**optim, "clip": 1.0}
    )
    prepared = batches(4)
    one_step(sharded, prepared[0])  # the optimizer's state is made
    before = [unit.master.clone() for unit in sharded.units]
    with no_synchronisation():
        skipped = one_step(sharded, prepared[1], factor=float("inf"))
        after = [unit.master.clone() for unit in sharded.units]
        for batch in prepared[2:]:
            one_step(sharded, batch)
    assert bool(skipped.skipped)
    assert all(torch.equal(new, old) for new, old in zip(after, before, strict=True))
    assert not all(
        torch.equal(unit.master, old) for unit, old in zip(sharded.units, before, strict=True)
    )


def test_momentum_starts_well_after_a_first_step_that_overflowed():
    """torch's fused SGD leaves its momentum uninitialised then."""
    precision = {"compute": "fp16", "loss_scale": {"init": 2.0**10}}
    sharded = make_sharded(build(), 2, precision, {"name": "sgd", "args": {"momentum": 0.9}})
    assert bool(one_step(sharded, batches(1)[0], factor=float("inf")).skipped)
    losses = train(sharded)
    straight = train(
        make_sharded(build(), 2, precision, {"name": "sgd", "args": {"momentum": 0.9}})
    )
    assert losses == pytest.approx(straight, rel=1e-2)


# Overflow is handled on the device


def test_an_overflow_skips_the_update_and_halves_the_scale():
    precision = {"compute": "fp16", "loss_scale": {"init": 1024.0, "window": 2}}
    sharded = make_sharded(build(), 3, precision)
    scales, skips, changed = [], [], []
    for number, batch in enumerate(batches(5)):
        before = [unit.master.clone() for unit in sharded.units]
        result = one_step(sharded, batch, factor=float("inf") if number == 2 else 1.0)
        changed.append(
            not all(
                torch.equal(unit.master, old)
                for unit, old in zip(sharded.units, before, strict=True)
            )
        )
        skips.append(bool(result.skipped))
        scales.append(float(sharded.scaler.scale))
    assert skips == [False, False, True, False, False]
    assert changed == [True, True, False, True, True]
    assert scales == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
    assert all(torch.isfinite(unit.master).all() for unit in sharded.units)
    steps = {
        float(update.state_of(piece)["step"])
        for _, piece, update in sharded.optimizer.updated_pieces()
    }
    assert steps == {4.0}, "a skipped step is not counted by Adam's bias correction"


@pytest.mark.parametrize(
    "precision", ["fp32", "bf16", "fp16", {"compute": "bf16", "reduce": "compute"}]
)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_never_makes_the_host_wait(stage, precision):
    sharded = make_sharded(build(), stage, precision, {"clip": 1.0})
    prepared = batches(4)
    one_step(sharded, prepared[0])  # the optimizer's state is made
    with no_synchronisation():
        results = [one_step(sharded, batch) for batch in prepared[1:]]
    assert all(torch.isfinite(result.grad_norm) for result in results)


LIBRARY = """
    import sys
    import torch
    from torch import nn
    import zrun_core

    def build():
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    run = zrun_core.init(device="cuda")
    model = zrun_core.shard(build, zero=3, precision="bf16", accumulate=2)
    optimizer = zrun_core.optimizer(model, "adamw", lr=1e-3, clip=1.0)
    x = torch.ones(8, 64, device=run.device)
    for step in range(5):
        if step == 2:
            torch.cuda.set_sync_debug_mode("error")
        for _ in range(2):
            loss = model(x).float().square().mean()
            loss.backward()
        if step == 3:
            optimizer.step(weight=3.0)
        else:
            optimizer.step()
    torch.cuda.set_sync_debug_mode("default")
    print(run.mean(loss), run.mean(1.0, weight=2.0))
"""


def test_a_step_of_the_library_never_makes_the_host_wait() -> None:
    """Apart from the totals of the step before, for whose arrival it waits on purpose."""
    script = textwrap.dedent(LIBRARY)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_streams_that_take_the_models_place_leave_the_devices_where_it_was():
    def draws(*, aside: bool) -> list[list[float]]:
        streams = Streams(3, CUDA, dp=0, tp=1)
        streams.begin()
        found = [torch.rand(3, device=CUDA).tolist()]
        if aside:
            with streams.data.at(5):
                read = torch.rand(3, device=CUDA).tolist()
            with streams.data.at(5):
                assert torch.rand(3, device=CUDA).tolist() == read
            with fork_torch_rng(CUDA):
                torch.manual_seed(0)
        return [*found, torch.rand(3, device=CUDA).tolist()]

    assert draws(aside=True) == draws(aside=False)


def test_a_region_draws_on_the_device_by_its_place_and_again_when_recomputed():
    def masks(tp: int, *, recompute: bool) -> tuple[list[list[float]], list[float]]:
        streams = Streams(3, CUDA, dp=0, tp=tp)
        streams.begin()
        seen = []

        def region(x: torch.Tensor) -> torch.Tensor:
            with streams.inside():
                mask = torch.nn.functional.dropout(torch.ones(64, device=CUDA))
            seen.append(mask.tolist())
            return (x * mask).sin()

        x = torch.ones(64, device=CUDA, requires_grad=True)
        y = checkpoint(region, x, use_reentrant=False) if recompute else region(x)
        y.sum().backward()
        assert x.grad is not None
        return seen, [*x.grad.tolist(), *torch.rand(3, device=CUDA).tolist()]

    (seen, expected), (twice, found) = masks(0, recompute=False), masks(0, recompute=True)
    assert found == expected
    assert twice == [*seen, *seen]
    assert masks(1, recompute=False)[0] != seen


def test_the_loss_scale_lives_on_the_device():
    precision = Precision.of(
        PrecisionConfig.model_validate({"compute": "fp16", "loss_scale": {"window": 1}})
    )
    scaler, overflow = LossScaler(precision, CUDA), torch.tensor(True, device=CUDA)
    with no_synchronisation():
        scaler.update(overflow)
        scaler.update(~overflow)
    assert scaler.scale.device.type == "cuda"
    assert float(scaler.scale) == 65536.0


# Memory


def test_a_storage_window_gives_its_memory_back_and_keeps_views_good():
    numel, own = 1 << 20, (1 << 18, 1 << 19)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    window = StorageWindow(numel, own, torch.float32, CUDA, StorageMeter(0))
    shard_bytes = 4 * (own[1] - own[0])
    assert torch.cuda.memory_allocated() - before == shard_bytes
    values = torch.arange(numel, dtype=torch.float32, device=CUDA)
    before = torch.cuda.memory_allocated()
    window.shard.copy_(values[own[0] : own[1]])
    window.acquire()
    assert torch.cuda.memory_allocated() - before == 4 * numel
    window.full.copy_(values)  # as a gather does
    saved = window.full.view(1024, -1).t()
    assert torch.equal(saved, values.view(1024, -1).t())
    window.release()
    assert torch.cuda.memory_allocated() == before
    torch.empty(numel, device=CUDA).fill_(-1)  # somebody else has the memory in between
    window.acquire()
    window.full.copy_(values)  # as a gather does
    assert torch.equal(saved, values.view(1024, -1).t())
    window.release()
    assert torch.equal(window.shard, values[own[0] : own[1]])


def test_the_ring_is_one_allocation():
    before = torch.cuda.memory_allocated()
    ring = Ring(1 << 20, CUDA)
    taken = [ring.take(1 << 16, torch.float32) for _ in range(4)]
    assert all(tensor is not None for tensor in taken)
    assert ring.take(1, torch.float32) is None
    assert torch.cuda.memory_allocated() - before == 1 << 20


@pytest.mark.parametrize("precision", ["fp32", "bf16", {"compute": "bf16", "reduce": "compute"}])
@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_planned_is_what_the_device_holds(stage, precision):
    train(make_sharded(build(), stage, precision), 2)  # cuBLAS takes its workspace once
    before = memory_in_use()
    sharded = make_sharded(build(), stage, precision)
    train(sharded, 2)
    planned = planned_memory(sharded).by_kind
    assert allocated_memory(sharded).by_kind == planned
    # The allocator rounds to 512 bytes, and step counts and placeholders are small.
    num_params = sum(len(unit.params) for unit in sharded.units)
    settings = sharded.settings
    scratch = settings.optimizer.scratch_bytes("cuda", settings.precision.reduce)
    assert memory_in_use() - before == pytest.approx(
        sum(planned.values()) + scratch, abs=512 * (8 * num_params + 64)
    )
    assert planned[Kind.OPTIM] > planned[Kind.PARAM]


def test_nothing_is_kept_from_step_to_step():
    sharded = make_sharded(build(), 3, "bf16")
    train(sharded, 3)
    held = memory_in_use()
    train(sharded, 10)
    assert memory_in_use() == held


# Blocks that recompute, and blocks that are compiled


def peak_of(checkpoint: str, inputs: OffloadedInputs | None = None) -> tuple[list[float], int]:
    torch.manual_seed(1)
    model = Net(depth=8)
    config = ActivationsConfig.model_validate({"checkpoint": checkpoint})
    apply_checkpointing(model, config, inputs)
    sharded = make_sharded(model, 3)
    generator = torch.Generator().manual_seed(3)
    large = (
        torch.randn(1 << 14, DIM, generator=generator).to(CUDA),
        torch.zeros(1 << 14, 1, device=CUDA),
    )
    one_step(sharded, large)
    before = memory_in_use()
    torch.cuda.reset_peak_memory_stats()
    losses = [float(one_step(sharded, large).sums["loss"]) for _ in range(2)]
    return losses, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("checkpoint", ["full", "every_n", "selective"])
def test_checkpointing_saves_memory_and_changes_nothing(checkpoint):
    losses, peak = peak_of(checkpoint)
    expected, most = peak_of("none")
    assert losses == pytest.approx(expected, abs=1e-6)
    assert peak < most


def elsewhere(tier: Tier, folder: Path) -> OffloadedInputs:
    return OffloadedInputs(make_keeper(tier, CUDA, folder, 1 << 28, nullcontext))


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_inputs_of_blocks_wait_elsewhere(tier, tmp_path):
    inputs = elsewhere(tier, tmp_path)
    losses, peak = peak_of("full", inputs)
    expected, most = peak_of("full")
    assert losses == expected
    input_bytes = (1 << 14) * DIM * 4
    assert most - peak >= 5 * input_bytes  # of eight, all but the two around the block that runs
    assert inputs.kept_bytes[tier] == 8 * input_bytes


class Dropped(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = nn.Sequential(block.norm, nn.Dropout(0.5))


@pytest.mark.parametrize("checkpoint", ["full", "selective"])
def test_recomputed_dropout_draws_the_same_mask(checkpoint):
    losses = []
    for kind in ("none", checkpoint):
        torch.manual_seed(1)
        model = Dropped()
        apply_checkpointing(model, ActivationsConfig.model_validate({"checkpoint": kind}))
        sharded = make_sharded(model, 3)
        torch.manual_seed(7)
        losses.append(train(sharded))
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_dropout_recomputed_from_elsewhere_draws_the_same_mask(tier, tmp_path):
    losses = []
    for inputs in (None, elsewhere(tier, tmp_path)):
        torch.manual_seed(1)
        model = Dropped()
        apply_checkpointing(model, ActivationsConfig(checkpoint="full"), inputs)
        sharded = make_sharded(model, 3)
        torch.manual_seed(7)
        losses.append(train(sharded))
    assert losses[0] == losses[1]


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_name() == "Simulated GPU",
    reason="nothing compiles for simulated GPUs",
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_blocks_train_as_eager_ones(precision):
    eager = train(make_sharded(build(), 3, precision))
    model = build()
    for _, block in repeated_blocks(model):
        block.forward = torch.compile(block.forward)
    compiled = train(make_sharded(model, 3, precision, whole_blocks=True))
    assert compiled == pytest.approx(eager, rel=2e-2 if precision == "bf16" else 1e-4, abs=1e-4)


# Reading, writing, evaluating


def test_parameters_are_read_and_written_inside_gathered():
    sharded = make_sharded(build(), 3, "bf16")
    with sharded.gathered() as module:
        module.last.bias.fill_(2.0)
    masters = {
        slot.name: unit.master[slot.offset : slot.stop]
        for unit in sharded.units
        for slot in unit.layout.slots
    }
    assert masters["last.bias"].tolist() == [2.0]
    train(sharded, 1)
    with sharded.gathered() as module:
        assert abs(float(module.last.bias) - 2.0) < 0.01
    with sharded.evaluation():
        assert not sharded.module(*batches(1)[0]).requires_grad


# The whole job

TRAIN = """
    import torch
    from torch import nn

    def build():
        model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
        return model

    def data():
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(64, 16, generator=generator)
        return torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())

    def loss(model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    def on_step(context):
        with context.gathered() as model:
            norm = float(model[0].weight.norm())
        context.log(f"hook {context.step} {context.loss!r} {norm > 0}")
"""


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_job_runs_on_the_device(tmp_path: Path, precision: str):
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    job = {
        "name": "gpu",
        "model": "train.py:build",
        "data": {"call": "train.py:data", "shuffle": True, "workers": 1},
        "loss": "train.py:loss",
        "epochs": 3,
        "batch": {"global": 24, "micro": 12},
        "precision": precision,
        "zero": 3,
        "optim": {"lr": 1e-2, "clip": 1.0},
        "lr": {"schedule": "cosine", "decay_steps": 8},
        "device": "cuda",
        "slots": 1,
        "eval": {"data": "train.py:data", "every": 4},
        "hooks": {"on_step": "train.py:on_step"},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))  # JSON is YAML
    run_dir = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "zrun",
        "train",
        str(tmp_path / "job.yaml"),
        "--run-dir",
        str(run_dir),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["type"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 9))
    assert sum(event["samples"] for event in steps) == 3 * 64
    assert steps[-1]["loss"] < steps[0]["loss"]
    hooks = [
        event["message"].split()
        for event in events
        if event["type"] == "log" and "hook" in event["message"]
    ]
    assert [int(step) for _, step, *_ in hooks] == list(range(1, 9)), (
        "after each step, before the next one"
    )
    assert [float(loss) for _, _, loss, _ in hooks] == [event["loss"] for event in steps]
    memory = [event for event in events if event["type"] == "memory"]
    assert memory[-1]["device_allocated"] > 0
