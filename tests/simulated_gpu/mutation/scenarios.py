"""Small trainings that together come by every wait of the runtime, and what each comes to."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import simulated_gpu
import torch
from runs import job, look, losses, run
from simulated_gpu import python_kernels
from test_pipelines import gpt
from tiers_cases import a_model_goes_before_its_update
from torch.nn.attention import SDPBackend, sdpa_kernel
from toys import build, data, own_device, split, world

import zrun_core
from mutation.disturbed import disturbed
from mutation.sites import Site
from zrun_core.activations.kept import HostKeeper
from zrun_core.hardware.clock import Waits
from zrun_core.memory.buffers import Buffer, Kind, Tier
from zrun_core.memory.state_policy import SlotSizes
from zrun_core.tiers.copies import StreamCopier
from zrun_core.tiers.host_arena import HostArena
from zrun_core.tiers.tiers import Tiers
from zrun_core.zero.home_elsewhere import OnHost

STEPS = 3


class Scenario(NamedTuple):
    """A training.

    Attributes:
        size: of ranks.
        train: trains in a folder, and returns what it comes to.
    """

    size: int
    train: Callable[[str], Any]


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
            saved = None
            if given["checkpoint"] is not None:
                saved = look(given, folder, {}, dims)
        if found["error"]:
            raise RuntimeError(found["error"])
        return losses(found), found["digest"], saved and (saved["error"], saved.get("digest"))

    return Scenario(size, train)


def _loop(size: int, stage: int, *, drops: bool = False, **options: Any) -> Scenario:
    """Return a user's own loop, that saves, loads, reads and writes parameters.

    With `drops` it drops gradients, and computes them again. `options` are those of
    `zrun_core.shard`.
    """

    def train(folder: str) -> Any:
        ours = zrun_core.init(threads=1, patience_s=30.0)
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


def _abandoned(folder: str) -> list[float]:
    """Keep a tensor where one was that nobody has waited for."""
    keeper = HostKeeper(StreamCopier(own_device()), HostArena(1 << 16, own_device()))
    first = torch.ones(1 << 12, device=own_device())
    kept = keeper.keep(first)
    kept.settle()
    kept.fetch()
    kept.abandon()
    second = torch.zeros(1 << 12, device=own_device())
    other = keeper.keep(second)
    other.settle()
    return [float(other.get().sum())]


def _home(folder: str) -> list[float]:
    """Store and load what lives on the host, where nobody else waits."""
    numel = 1 << 14
    sizes = SlotSizes(down=4 * numel)
    buffers = [Buffer("gradient", Kind.GRAD, 4 * numel, Tier.HOST), *sizes.buffers()]
    home = OnHost(Tiers(own_device(), buffers, sizes, None), Kind.GRAD, numel, torch.float32)
    ones, twos = (torch.full((numel,), value, device=own_device()) for value in (1.0, 2.0))
    found = []
    home.store(ones)
    found.append(float(home.at().sum()))
    home.store(ones, accumulate=True)
    home.store(twos)
    home.settle()
    found.append(float(home.at().sum()))
    home.load(ones)
    home.at().fill_(3.0)
    return [*found, float(ones.sum())]


def _times(folder: str) -> bool:
    """Ask for the time that a device waits before it has done so."""
    waits = Waits(own_device())
    with waits.counting():
        late = torch.ones(1, device=own_device())
        for _ in range(20):
            python_kernels.launch(lambda _: time.sleep(0.001), writes=[late], name="late")
    return waits.seconds() > 0.01


def _goes_first(folder: str) -> None:
    """Drop a model before its last update: nobody is left who waits for its copies."""
    a_model_goes_before_its_update()


def _values(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    with zrun_core.gathered(model):
        for param in model.parameters():
            digest.update(param.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


PLAIN = {"call": "runs.py:Plain", "shuffle": True}
HOST = {"optimizer": "host", "grad": "host"}
ALL_ON_HOST = {**HOST, "param": "host"}
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
    "an abandoned input": Scenario(1, _abandoned),
    "a home on the host": Scenario(1, _home),
    "a model that goes first": Scenario(1, _goes_first),
    "times": Scenario(1, _times),
    "gradients too, one pass": _job(1, zero=2, offload=HOST, batch={"global": 1, "micro": 1}),
    "inputs on the disk": _job(
        1, model=DEEP, activations={"checkpoint": "full", "offload": "disk"}
    ),
    "saves": _job(1, zero=1, checkpoint={"every": 1}),
    "saves of the host": _job(1, zero=3, offload=ALL_ON_HOST, checkpoint={"every": 1}),
    "saves of parameters on the host": _job(
        1, zero=3, offload={"param": "host"}, checkpoint={"every": 1}
    ),
    "saves of the disk": _job(1, zero=3, offload=ALL_ON_DISK, checkpoint={"every": 1}),
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
    "hybrid": _job(4, zero={"stage": 2, "shard_group": 2}),
}


def play(name: str, site: tuple[Any, ...] | None, seed: int, folder: str) -> dict[str, Any]:
    """Train a scenario without the wait at a site, or with all of them.

    Args:
        site: fields of a `Site`; None: no wait is taken out.
        folder: shared by all ranks.

    Returns:
        "result", a digest of what it comes to; "reached", lines of the runtime below which
        something was waited for; "races" that the device has named; "error", why there is no
        result.
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
        "reached": reached,
        "races": simulated_gpu.races(),
        "error": error,
    }
