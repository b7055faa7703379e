"""Small trainings that together come by every wait of the runtime, and what each comes to."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import simulated_gpu
import torch
from runs import job, look, losses, run
from small_jobs import gpt
from torch.nn.attention import SDPBackend, sdpa_kernel
from toys import Block, Net, build, data, own_device, split, world

import zrun_core
from mutation import alone
from mutation.disturbed import disturbed
from mutation.sites import Site
from zrun_core.checkpoint import checkpointer
from zrun_core.checkpoint.rank_save import write_rank
from zrun_core.distributed import cma_transport
from zrun_core.memory.buffers import Kind

STEPS = 3
SLOW_S = 0.1
LATE_SAVE_S = 0.5  # more than a step takes
USER_CODE = Path(__file__).with_name("user_code.py")


class Scenario(NamedTuple):
    """A training.

    Attributes:
        size: of ranks.
        train: trains in a folder, and returns what it comes to.
        on_cpus: that no rank has a GPU.
    """

    size: int
    train: Callable[[str], Any]
    on_cpus: bool = False


SPEAKER = {"call": "runs.py:Speaker", "args": {"dropout": 0.0, "norm": False}}

DEEP = {"call": "runs.py:Speaker", "args": {"dropout": 0.0, "norm": False, "depth": 6}}


def _job(size: int, dims: dict[str, int] | None = None, **keys: Any) -> Scenario:
    """Return a job's training, whose saves are looked at where it makes any."""
    given = job(
        **{
            "model": SPEAKER,
            "steps": STEPS,
            "batch": {"global": 2 * size, "micro": 1},
            "hooks": {},
            "checkpoint": None,
            **keys,
        }
    )

    def train(folder: str) -> Any:
        # The fused attention of CPUs is not the simulated GPU's.
        with sdpa_kernel(SDPBackend.MATH):
            found = run(given, folder, None, None, None, dims)
            saved = []
            if given["checkpoint"] is not None:  # each of its steps
                saved = [look(given, folder, {"step": step + 1}, dims) for step in range(STEPS)]
        if found["error"]:
            raise RuntimeError(found["error"])
        told = _told(found["events"])
        return (
            losses(found),
            found["digest"],
            told,
            [(each["error"], each.get("digest")) for each in saved],
        )

    return Scenario(size, train)


def _saved_late(scenario: Scenario) -> Scenario:
    """Return a scenario whose saves begin to read what they write while training goes on."""

    def write_late(*args: Any) -> Any:
        time.sleep(LATE_SAVE_S)
        return write_rank(*args)

    def train(folder: str) -> Any:
        with patch.object(checkpointer, "write_rank", write_late):
            return scenario.train(folder)

    return scenario._replace(train=train)


def _through_sockets(scenario: Scenario) -> Scenario:
    """Return a scenario on CPUs whose ranks do not read each other's memory."""

    def train(folder: str) -> Any:
        with patch.dict(os.environ, {cma_transport.SWITCH: "off"}):
            return scenario.train(folder)

    return Scenario(scenario.size, train, on_cpus=True)


def _told(events: list[dict[str, Any]]) -> list[Any]:
    """Return what a run tells of its steps: what moved between tiers, and what is no time."""
    told: list[Any] = []
    for event in events:
        if event["type"] == "step":
            told += [(tier, of["moved"]) for tier, of in event.get("tiers", {}).items()]
        elif event["type"] in ("warning", "metrics"):
            told.append(event)
        elif event["type"] == "eval":
            told.append(event["loss"])
    return told


def _init() -> Any:
    """Begin a loop of a user's own, on the device of this rank."""
    kind = "cpu" if own_device().type == "cpu" else "cuda"
    return zrun_core.init(device=kind, threads=1, patience_s=30.0)


def _loop(size: int, stage: int, *, drops: bool = False, **options: Any) -> Scenario:
    """Return a user's own loop, that saves, loads, reads and writes parameters.

    With `drops` it drops gradients, and computes them again. `options` are those of
    `zrun_core.shard`.
    """

    def train(folder: str) -> Any:
        ours = _init()
        model = zrun_core.shard(build, zero={"stage": stage, "bucket": 1 << 14}, **options)
        optimizer = zrun_core.optimizer(model, "adamw", lr=1e-2, clip=0.1)
        found = []
        for number, batch in enumerate(data(STEPS)):
            for k in range(2):
                loss = model(*split(split(batch, ours.rank, ours.world_size), k, 2))
                loss.backward()
                found.append(ours.mean(loss.item()))
            if drops:
                optimizer.zero_grad()
                model(*split(batch, ours.rank, ours.world_size)).backward()
            optimizer.step()
            if number == 0:
                zrun_core.save(f"{folder}/saved", model, step=number)
            if number == 1:
                with zrun_core.gathered(model), torch.no_grad():
                    found.append(_digest(model))
                    for param in model.parameters():
                        param.mul_(0.5)
        found.append(_values(model))
        one = split(data(1)[0], ours.rank, ours.world_size)
        for _ in range(2):
            with zrun_core.evaluation(model):
                answer = model(*one)
            zrun_core.load(f"{folder}/saved", model)  # the device may not have read the old ones
            found.append(ours.mean(answer.item()))
        found.append(_values(model))
        return found

    return Scenario(size, train)


def _of_toy(
    size: int,
    stage: int,
    train: Callable[[Any, torch.nn.Module], Any],
    factory: Any,
    **options: Any,
) -> Scenario:
    """Return what `train` makes of a sharded model in a loop of its own: given the run, and it."""

    def in_folder(folder: str) -> Any:
        ours = _init()
        model = zrun_core.shard(factory, zero={"stage": stage, "bucket": 1 << 12}, **options)
        return train(ours, model)

    return Scenario(size, in_folder)


def _part(ours: Any, number: int = 0) -> Any:
    """Return this rank's part of a batch."""
    return split(data(number + 1)[number], ours.rank, ours.world_size)


class Idle(Net):
    """Its last block is never called, but read."""

    def __init__(self) -> None:
        super().__init__()
        self.zidle = Block(64)


def idle() -> Idle:
    torch.manual_seed(1)
    return Idle()


def _reads_idle(ours: Any, model: torch.nn.Module) -> Any:
    """Read parameters that nobody has waited for: forward began to gather them."""
    optimizer = zrun_core.optimizer(model, "adamw", lr=1e-2)
    found = []
    for number in range(2):
        loss = model(*_part(ours, number))
        loss.backward()
        optimizer.step()
        with zrun_core.evaluation(model):
            answer = model(*_part(ours, number))
        found += [_values(model), ours.mean(answer.item())]
    return found


class Short(Net):
    """It leaves after some of its blocks."""

    num_used = 3

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks[: self.num_used]:
            x = block(x)
        return torch.nn.functional.mse_loss(x.float(), y.float().expand_as(x))


def short() -> Short:
    torch.manual_seed(1)
    return Short(depth=4)


def _leaves_early(ours: Any, model: Any) -> Any:
    """Evaluate in passes of which one is shorter: what it began to gather, nobody uses."""
    found = []
    for number in range(6):
        model.num_used = 4 - 2 * (number % 2)
        with zrun_core.evaluation(model):
            found.append(model(*_part(ours, number)).item())
        room = torch.full((1 << 14,), 3.0, device=own_device())  # memory that was given up
        found.append(float(room.sum()))
    return [*found, _values(model)]


class Peeking(Net):
    """Its loss looks at a parameter, which stays whole from there to the end of the step."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x, y)
        return loss + 1e-3 * self.blocks[0].up.weight.square().sum()


def peeking() -> Peeking:
    torch.manual_seed(1)
    return Peeking()


def _reads_between(ours: Any, model: torch.nn.Module) -> Any:
    """Look at parameters between two backwards of one forward."""
    optimizer = zrun_core.optimizer(model, "adamw", lr=1e-2)
    found = []
    for number in range(2):
        loss = model(*_part(ours, number))
        loss.backward(retain_graph=True)
        found.append(_values(model))
        loss.backward()
        found.append(ours.mean(loss.item()))
        optimizer.step()
    return [*found, _values(model)]


def _changes_rate(ours: Any, model: torch.nn.Module) -> Any:
    """Change the learning rate where updates may run that have another one."""
    optimizer = zrun_core.optimizer(model, "adamw", lr=1e-2)
    found = []
    for number in range(5):
        loss = model(*_part(ours, number))
        loss.backward()
        found.append(ours.mean(loss.item()))
        optimizer.param_groups[0]["lr"] *= 0.3
        optimizer.step()
    return [*found, _values(model)]


def _leaves_blocks_out(ours: Any, model: Any) -> Any:
    """Change the learning rate where a step does not use blocks that the last one updates still."""
    optimizer = zrun_core.optimizer(model, "adamw", lr=1e-2)
    found = []
    for number in range(5):
        model.num_used = 4 - 2 * (number % 2)
        loss = model(*_part(ours, number))
        loss.backward()
        found.append(ours.mean(loss.item()))
        optimizer.param_groups[0]["lr"] *= 0.3
        optimizer.step()
    return [*found, _values(model)]


def _looks_before_step(ours: Any, model: Any) -> Any:
    """Evaluate between a backward and its update, for which the disk is being read."""
    optimizer = zrun_core.optimizer(model, "adamw", lr=1e-2)
    found = []
    for number in range(4):
        found += _backward_and_looks(ours, model, number)
        optimizer.step()
        sharded = model._zrun.sharded
        sharded.updates.read_ahead()  # as when a backward begins
        sharded.updates.settle()
        time.sleep(alone.OVER_S)
        found.append(sharded.tiers.slots[Kind.OPTIM].num_taken)
    return [*found, _values(model)]


def _evaluates_before_step(ours: Any, model: Any) -> Any:
    """Evaluate, and read parameters, between a backward and its update."""
    optimizer = zrun_core.optimizer(model, "adamw", lr=1e-2, clip=0.1)
    found = []
    for number in range(4):
        found += _backward_and_looks(ours, model, number)
        optimizer.step()
    return [*found, _values(model)]


def _backward_and_looks(ours: Any, model: Any, number: int) -> list[Any]:
    loss = model(*_part(ours, number))
    loss.backward()
    with zrun_core.evaluation(model):
        found: list[Any] = [ours.mean(model(*_part(ours)).item())]
    if number % 2:
        found.append(_values(model))
    return found


def _writes_at_once(ours: Any, model: Any) -> Any:
    """Write whole parameters, the last first, as soon as they are there; other ranks read first."""
    found = []
    for number in range(24):
        with zrun_core.gathered(model), torch.no_grad():
            if ours.rank != number % ours.world_size:
                found.append(_digest(model))
            for param in reversed(list(model.parameters())):
                param.add_(0.25)
    return found


def _counts_reads(ours: Any, model: Any) -> Any:
    """Count what steps move to the disk and back, with a thread that updates slowly."""
    optimizer = zrun_core.optimizer(model, "adamw", lr=1e-2, clip=0.1)
    sharded = model._zrun.sharded
    found: list[Any] = []
    for number in range(3):
        for _ in range(3):
            loss = model(*_part(ours, number))
            sharded.tiers.submit(lambda: time.sleep(SLOW_S))
            loss.backward()
        optimizer.step()
        moved = sharded.updates.step_counts.moved
        found.append(sorted((repr(move), num_bytes) for move, num_bytes in moved.items()))
    return [*found, _values(model)]


def frozen() -> Net:
    made = build()
    made.first.requires_grad_(False)
    made.blocks[0].requires_grad_(False)
    return made


def _saves_frozen(folder: str) -> Any:
    """Write parameters that nobody trains, and save them at once."""
    ours = _init()
    zero = {"stage": 3, "bucket": 1 << 14}
    model = zrun_core.shard(frozen, zero=zero, offload=ALL_ON_DISK)
    zrun_core.optimizer(model, "adamw", lr=1e-2)
    found = []
    for number in range(3):
        with zrun_core.gathered(model), torch.no_grad():
            for param in model.parameters():
                param.add_(0.25)
        zrun_core.save(f"{folder}/saved", model, step=number)
        zrun_core.load(f"{folder}/saved", model, step=number)
        found.append(_values(model))
        with zrun_core.evaluation(model):
            found.append(model(*_part(ours)).item())
    return found


def _writes_while_it_saves(folder: str) -> Any:
    """Write parameters that live on the disk, while a save reads them there."""
    ours = _init()
    zero = {"stage": 3, "bucket": 1 << 12}
    model = zrun_core.shard(short, zero=zero, offload=ALL_ON_DISK)
    zrun_core.optimizer(model, "adamw", lr=1e-2)
    found = []
    for number in range(2):
        zrun_core.save(f"{folder}/saved", model, step=number, wait=False)
        with zrun_core.gathered(model), torch.no_grad():
            for param in model.parameters():
                param.add_(0.25)
        zrun_core.finish()
        zrun_core.load(f"{folder}/saved", model, step=number)
        found.append(_values(model))
    return [*found, ours.rank]


def _values(model: torch.nn.Module) -> str:
    with zrun_core.gathered(model):
        return _digest(model)


def _digest(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


EACH_STEP = {"every": 1, "keep": STEPS, "async": True}
PLAIN = {"call": "runs.py:Plain", "shuffle": True}
LAMB = {"name": "lamb", "lr": 1e-2, "clip": 1.0}
HOST = {"optimizer": "host", "grad": "host"}
ALL_ON_HOST = {**HOST, "param": "host"}
UPDATED_ON_DISK = {"optimizer": "disk", "grad": "disk"}
ALL_ON_DISK = {"optimizer": "disk", "grad": "disk", "param": "disk"}

SCENARIOS: dict[str, Scenario] = {
    "stage 3": _job(2, zero=3, eval={"data": "runs.py:Tokens", "every": 2}),
    "stage 2, bf16": _job(2, zero=2, precision="bf16"),
    "stage 1, lamb": _job(2, zero=1, optim={"name": "lamb", "lr": 1e-2, "clip": 1.0}),
    "optimizer on the host": _job(1, zero=1, offload={"optimizer": "host", "grad": "device"}),
    "gradients too": _job(2, zero=2, offload=HOST),
    "gradients too, bf16": _job(1, zero=2, offload=HOST, precision="bf16"),
    "all on the host": _job(2, zero=3, offload=ALL_ON_HOST),
    "all on the host, bf16": _job(1, zero=3, offload=ALL_ON_HOST, precision="bf16"),
    "parameters on the host": _job(2, zero=3, offload={"param": "host"}),
    "parameters on the disk": _job(1, zero=3, offload={"param": "disk"}),
    "all on the disk": _job(2, zero=3, offload=ALL_ON_DISK),
    "all on the disk, bf16": _job(1, zero=3, offload=ALL_ON_DISK, precision="bf16"),
    "delayed": _job(
        2,
        zero=2,
        steps=5,
        offload={**HOST, "schedule": "delayed", "delay_after": 1},
        precision="bf16",
    ),
    "delayed, gradients on the device": _job(
        2,
        zero=2,
        steps=5,
        offload={"optimizer": "host", "grad": "device", "schedule": "delayed", "delay_after": 1},
        precision="bf16",
    ),
    "partial sums on the host": _job(2, zero=1, offload=HOST, batch={"global": 6, "micro": 1}),
    "partial sums on the disk": _job(
        2, zero=1, offload={"optimizer": "disk", "grad": "disk"}, batch={"global": 6, "micro": 1}
    ),
    "serial": _job(1, zero=1, offload={**HOST, "schedule": "serial"}),
    "inputs on the host": _job(1, activations={"checkpoint": "full", "offload": "host"}),
    "an abandoned input": Scenario(1, alone.abandoned),
    "a home on the host": Scenario(1, alone.on_host),
    "a home on the disk": Scenario(1, alone.on_disk),
    "a sum that fails": Scenario(1, alone.failed_sum),
    "tasks that fail": Scenario(1, alone.failed_tasks),
    "a save that is cut": Scenario(1, alone.cut_save),
    "a file that is closed": Scenario(1, alone.closed_file),
    "meetings": Scenario(2, alone.meetings),
    "a model that goes first": Scenario(1, alone.goes_first),
    "times": Scenario(1, alone.times),
    "gradients too, one pass": _job(1, zero=2, offload=HOST, batch={"global": 1, "micro": 1}),
    "inputs on the disk": _job(
        1, model=DEEP, activations={"checkpoint": "full", "offload": "disk"}
    ),
    "saves": _job(1, zero=1, checkpoint=EACH_STEP),
    "saves of the host": _job(1, zero=3, offload=ALL_ON_HOST, checkpoint=EACH_STEP),
    "saves of parameters on the host": _job(
        1, zero=3, offload={"param": "host"}, checkpoint=EACH_STEP
    ),
    "saves of the disk": _saved_late(_job(1, zero=3, offload=ALL_ON_DISK, checkpoint=EACH_STEP)),
    "pipeline": _job(2, {"dp": 1, "pp": 2}, model=gpt(), data=PLAIN, parallel={"pp": 2}, zero=1),
    "tied pipeline": _job(
        2, {"dp": 1, "pp": 2}, model=gpt(tied=True), data=PLAIN, parallel={"pp": 2}, zero=1
    ),
    "tensor": _job(2, {"dp": 1, "tp": 2}, model=gpt(), data=PLAIN, parallel={"tp": 2}, zero=1),
    "sequence": _job(
        2,
        {"dp": 1, "tp": 2},
        model=gpt(),
        data=PLAIN,
        parallel={"tp": 2, "sequence": True},
        zero=1,
    ),
    "loop": _loop(2, 3),
    "loop, parameters on the host": _loop(1, 3, offload=ALL_ON_HOST),
    "loop, all on the host": _loop(1, 3, offload=ALL_ON_HOST, precision="bf16"),
    "loop that drops gradients": _loop(1, 3, drops=True, offload=ALL_ON_HOST),
    "loop, all on the disk": _loop(1, 3, offload=ALL_ON_DISK),
    "an idle module": _of_toy(2, 2, _reads_idle, idle),
    "a short pass": _of_toy(2, 3, _leaves_early, short),
    "read between backwards": _of_toy(2, 3, _reads_between, peeking),
    "rates of delayed updates": _of_toy(
        1,
        2,
        _changes_rate,
        short,
        offload={**HOST, "schedule": "delayed", "delay_after": 1},
    ),
    "blocks that are left out": _of_toy(1, 2, _leaves_blocks_out, short, offload=HOST),
    "blocks that are left out, delayed": _of_toy(
        1,
        2,
        _leaves_blocks_out,
        short,
        offload={**HOST, "schedule": "delayed", "delay_after": 1},
    ),
    "read ahead in vain": _of_toy(
        1, 3, _looks_before_step, short, offload=ALL_ON_DISK, precision="bf16"
    ),
    "norms in passing": _of_toy(1, 2, _counts_reads, short, offload=UPDATED_ON_DISK),
    "reads ahead are counted": _of_toy(
        1, 1, _counts_reads, short, offload={"optimizer": "disk", "grad": "device"}
    ),
    "frozen on the disk": Scenario(1, _saves_frozen),
    "written while it is saved": _saved_late(Scenario(1, _writes_while_it_saves)),
    "lamb on the host": _job(2, zero=2, optim=LAMB, offload={"optimizer": "host"}),
    "lamb on the host, bf16": _job(
        2, zero=1, optim=LAMB, offload={"optimizer": "host"}, precision="bf16"
    ),
    "replicas": _job(2, zero=1, guards={"replica_every": 1}),
    "a spoiled gradient": _job(
        2, zero=2, precision="bf16", model={"call": "runs.py:Spoiled", "args": {"passes": [3]}}
    ),
    "a spoiled loss": _job(2, zero=1, model={"call": "runs.py:Faulty", "args": {"fault": 4}}),
    "hooks": _job(
        2,
        zero=1,
        eval={"data": "runs.py:Tokens", "every": 1},
        hooks={"on_step": f"{USER_CODE}:tells_mean", "on_eval": f"{USER_CODE}:ends"},
    ),
    "pipedream": _job(
        4,
        {"dp": 2, "pp": 2},
        model=gpt(),
        data=PLAIN,
        parallel={"pp": 2, "schedule": "pipedream", "split": ["blocks.2"]},
        optim={"name": "sgd", "lr": 0.02, "weight_decay": 0.0},
        lr={"schedule": "constant"},
        batch={"global": 4, "micro": 2},
        zero=1,
    ),
    "translator": _job(
        2,
        {"dp": 1, "tp": 2},
        model=f"{USER_CODE}:Translator",
        steps=2,
        guards={"check_values": False},
        data=PLAIN,
        parallel={"tp": 2},
        zero=1,
    ),
    "hybrid": _job(4, zero={"stage": 2, "shard_group": 2}),
}


# Some waits are there for ranks on CPUs, which read each other's memory.
for _name in (
    "stage 3",
    "gradients too",
    "all on the disk",
    "inputs on the disk",
    "a home on the disk",
    "saves of the disk",
    "written while it is saved",
    "partial sums on the disk",
    "pipeline",
    "pipedream",
    "sequence",
    "translator",
    "hybrid",
    "loop",
    "loop, all on the disk",
    "a short pass",
):
    SCENARIOS[f"{_name}, on CPUs"] = SCENARIOS[_name]._replace(on_cpus=True)
SCENARIOS["written at once, on CPUs"] = _of_toy(2, 3, _writes_at_once, short)._replace(on_cpus=True)
SCENARIOS["evaluations before updates, on CPUs"] = _of_toy(
    2, 3, _evaluates_before_step, short
)._replace(on_cpus=True)
SCENARIOS["evaluations before updates at stage 1, on CPUs"] = _of_toy(
    2, 1, _evaluates_before_step, short
)._replace(on_cpus=True)
SCENARIOS["pipeline, through sockets"] = _through_sockets(SCENARIOS["pipeline"])
SCENARIOS["two hosts, on CPUs"] = Scenario(4, alone.two_hosts, on_cpus=True)
SCENARIOS["rows that are written to, on CPUs"] = Scenario(2, alone.writes_rows, on_cpus=True)
SCENARIOS["late updates, on CPUs"] = _saved_late(
    _job(
        3,
        zero=0,
        sync="async_server",
        staleness=0,
        batch={"global": 12, "micro": 2},
        optim={"name": "sgd", "lr": 0.02, "weight_decay": 0.0, "args": {"momentum": 0.9}},
        checkpoint=EACH_STEP,
    )
)._replace(on_cpus=True)


def play(name: str, site: tuple[Any, ...] | None, seed: int, folder: str) -> dict[str, Any]:
    """Train a scenario without the wait at a site, or with all of them.

    Args:
        site: fields of a `Site`; None: no wait is taken out.
        folder: shared by all ranks.

    Returns:
        "result", a digest of what it comes to; "reached", where something was waited for, as of
        `Reached`; "races" that the device has named; "error", why there is no result.
    """
    torch.manual_seed(0)
    simulated_gpu.configure(seed=seed + world()[0])
    simulated_gpu.clear_races()
    error, result = "", ""
    with disturbed(None if site is None else Site(*site), seed) as reached:
        try:
            result = repr(SCENARIOS[name].train(folder))
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}".splitlines()[0]
    digest = hashlib.sha256(result.encode()).hexdigest()
    return {
        "result": digest,
        "reached": tuple(reached),
        "races": simulated_gpu.races(),
        "error": error,
    }
