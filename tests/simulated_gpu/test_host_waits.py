"""The host runs ahead of the device: a step waits for nothing but the totals of the last one.

[Note: how waits are told apart]
Three things are watched from the third step on. Torch's debug mode sees what waits without a word
of it (`item`, a copy from memory that is not pinned): that is always a fault. What is meant to wait
says so, by `Event.wait_on_host` or by waiting for the thread that updates on the host: who may is
listed here, for each place where states live. And where nobody needs to, the device stands still
at the beginning of a step until the host has queued all of it: a wait of any kind never ends then.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ranks

HERE = str(Path(__file__).resolve().parent)
STEPS, FREE = 5, 2
TOTALS = "distributed/named_vector.py HostCopy.read"

# Who waits on purpose, by what is elsewhere.
UPDATED_ON_HOST = {
    "zero/unit/update_side.py UpdateSide.wait",  # forward needs what the host updates
    "zero/update/updates.py Updates.make",  # for the worker, to have begun reading ahead
}
GRAD_ON_HOST = {  # the host adds gradients up, and knows their norm when the last one is there
    "zero/unit/home_elsewhere.py OnHost.at",
    "zero/unit/home_elsewhere.py OnHost.settle",
    "zero/unit/home_elsewhere.py OnHost.store",
    "tiers/slots.py Slots._left",
}
GRAD_ON_DISK = {
    "zero/unit/home_elsewhere.py OnDisk.load",
    "zero/unit/home_elsewhere.py OnDisk.settle",
    "tiers/slots.py Slots._left",
}
PARAM_ON_DISK = {"tiers/slots.py Slots._left"}  # the next read needs a slot that a copy leaves
INPUTS_ON_DISK = {  # what the device makes is written when it is there
    "activations/kept.py DiskKeeper._pass",
    "activations/kept.py _OnDisk.settle",
}
LAYER_WISE_ON_HOST = {"zero/update/sharded_optimizer.py ShardedOptimizer._step_layer_wise"}
# Optimizers of torch's that cannot skip a step on the device: the host has to know.
SKIPPED_BY_HOST = {"zero/update/updates.py _decision_of.<locals>.decide"}
REPLICAS = {
    "guards/replicas.py ReplicaGuard._exchange",
    "guards/replicas.py _read",
    "train/saved_state.py SavedState.shared_numbers",
}
CULPRIT = {  # a warning of a step that was skipped names the parameter
    "train/trainer.py Trainer._count.<locals>.losses_of",
    "zero/reduce/nonfinite.py Inspector._all_gather",
    "zero/reduce/nonfinite.py Inspector.find_unit",
}


class Job(NamedTuple):
    """A job that is trained.

    Attributes:
        name: of the case.
        keys: of the job.
        waits: who may wait beside the read of the totals; None: nobody, and the device stands
            still meanwhile.
        dims: sizes of the axes.
    """

    name: str
    keys: dict[str, Any]
    waits: set[str] | None = None
    dims: dict[str, int] | None = None


def of_speaker(**keys: Any) -> dict[str, Any]:
    return {
        "model": {"call": "runs.py:Speaker", "args": {"dropout": 0.1, "norm": False}},
        "steps": STEPS,
        "batch": {"global": 8, "micro": 2},
        "hooks": {},
        "checkpoint": None,
        "log": {"every": 1},
        **keys,
    }


def of_gpt(**keys: Any) -> dict[str, Any]:
    shape = {"vocab_size": 13, "dim": 16, "depth": 4, "heads": 2, "seq_len": 6, "tied": False}
    model = {"call": "zrun_core.models.gpt:gpt", "args": shape}
    return of_speaker(**{"model": model, "data": {"call": "runs.py:Plain"}, **keys})


PRECISIONS: dict[str, Any] = {
    "fp32": "fp32",
    "bf16": "bf16",
    # Grows in every second step until one overflows, and goes on from there.
    "fp16": {"compute": "fp16", "loss_scale": {"init": 2.0**21, "window": 2}},
}
PLACES: dict[str, tuple[dict[str, str], set[str] | None]] = {
    "device": ({}, None),
    "parameters on host": ({"param": "host"}, None),
    "optimizer on host": ({"optimizer": "host", "grad": "device"}, UPDATED_ON_HOST),
    "gradients on host": ({"optimizer": "host"}, UPDATED_ON_HOST | GRAD_ON_HOST),
    "all on host": ({"optimizer": "host", "param": "host"}, UPDATED_ON_HOST | GRAD_ON_HOST),
    "gradients on disk": ({"optimizer": "disk"}, UPDATED_ON_HOST | GRAD_ON_DISK),
    "all on disk": (
        {"optimizer": "disk", "param": "disk"},
        UPDATED_ON_HOST | GRAD_ON_DISK | PARAM_ON_DISK,
    ),
}
INPUTS: dict[str, tuple[dict[str, str], set[str]]] = {
    "kept": ({}, set()),
    "recomputed": ({"checkpoint": "full"}, set()),
    "inputs on host": ({"checkpoint": "full", "offload": "host"}, set()),
    "inputs on disk": ({"checkpoint": "full", "offload": "disk"}, INPUTS_ON_DISK),
}


def jobs_of(stage: int) -> Iterator[Job]:
    """Yield every precision with every place of states, and each pair of these with inputs."""
    places = [place for place in PLACES if stage == 3 or "param" not in PLACES[place][0]]
    for row, column in itertools.product(range(len(PRECISIONS)), range(len(places))):
        precision, place = list(PRECISIONS)[row], places[column]
        kept = list(INPUTS)[(stage + row + column) % len(INPUTS)]
        offload, by_place = PLACES[place]
        activations, by_inputs = INPUTS[kept]
        keys = of_speaker(
            zero=stage,
            precision=PRECISIONS[precision],
            offload=offload,
            activations=activations,
        )
        waits = (by_place or set()) | by_inputs
        yield Job(f"{stage}, {precision}, {place}, {kept}", keys, waits or None)


def optim(name: str, **keys: Any) -> dict[str, Any]:
    return {"name": name, "lr": 1e-3, "weight_decay": 0.1, "clip": 1.0, **keys}


OPTIMIZERS = [
    Job("lamb", of_speaker(zero=3, optim=optim("lamb"))),
    Job("lars", of_speaker(zero=1, optim=optim("lars"))),
    Job("lion", of_speaker(zero=2, optim=optim("lion"))),
    Job("adagrad", of_speaker(zero=1, optim=optim("Adagrad"))),
    *(
        Job(
            f"{name}, bf16", of_speaker(zero=3, precision="bf16", optim=optim(name, moments="bf16"))
        )
        for name in ("adamw", "lamb", "lion")
    ),
    Job("sgd", of_speaker(zero=3, optim=optim("sgd", args={"momentum": 0.9})), SKIPPED_BY_HOST),
    Job(
        "lamb on host",
        of_speaker(zero=2, optim=optim("lamb"), offload={"optimizer": "host"}),
        GRAD_ON_HOST | LAYER_WISE_ON_HOST | SKIPPED_BY_HOST,
    ),
    Job("accumulation", of_speaker(zero=2, batch={"global": 16, "micro": 1}, lr="cosine")),
    Job("reduced in bf16", of_speaker(zero=2, precision={"compute": "bf16", "reduce": "compute"})),
    Job("buckets", of_speaker(zero={"stage": 3, "bucket": 1 << 12})),
    Job("statistics", of_speaker(zero=2, model="runs.py:Speaker")),
    Job(
        "delayed",
        of_speaker(zero=2, offload={"optimizer": "host", "schedule": "delayed", "delay_after": 1}),
        UPDATED_ON_HOST | GRAD_ON_HOST,
    ),
    Job("out of memory", of_speaker(zero=1, guards={"on_oom": "skip"})),
    Job("replicas", of_speaker(zero=1, guards={"replica_every": 2}), REPLICAS),
    Job(
        "not a number",
        of_speaker(precision="bf16", model={"call": "runs.py:Spoiled", "args": {"passes": [5]}}),
        CULPRIT,
    ),
]

PP, TP = {"dp": 1, "pp": 2}, {"dp": 1, "tp": 2}
FP16 = PRECISIONS["fp16"]
AXES = [
    Job("1f1b", of_gpt(zero=1, parallel={"pp": 2}), None, PP),
    Job("gpipe, bf16", of_gpt(precision="bf16", parallel={"pp": 2, "schedule": "gpipe"}), None, PP),
    Job(
        "interleaved, clipped",
        of_gpt(
            zero=2,
            parallel={"pp": 2, "virtual": 2, "schedule": "interleaved"},
            optim=optim("adamw"),
            activations={"checkpoint": "full"},
        ),
        None,
        PP,
    ),
    Job(
        "zero_bubble, fp16",
        of_gpt(zero=3, precision=FP16, parallel={"pp": 2, "schedule": "zero_bubble"}),
        None,
        PP,
    ),
    Job("layer_major", of_gpt(zero=3, parallel={"schedule": "layer_major"})),
    Job(
        "1f1b, gradients on host",
        of_gpt(parallel={"pp": 2}, offload={"optimizer": "host"}),
        UPDATED_ON_HOST | GRAD_ON_HOST,
        PP,
    ),
    Job("tensor", of_gpt(zero=1, parallel={"tp": 2}, optim=optim("lamb")), None, TP),
    Job("tensor, fp16", of_gpt(zero=3, parallel={"tp": 2}, precision=FP16), None, TP),
    Job(
        "sequence, bf16",
        of_gpt(zero=2, parallel={"tp": 2, "sequence": True}, precision="bf16"),
        None,
        TP,
    ),
    Job(
        "sequence, divided inputs",
        of_gpt(
            zero=2,
            parallel={"tp": 2, "sequence": True},
            activations={"checkpoint": "full", "partition": True},
        ),
        None,
        TP,
    ),
]


def waits_in(jobs: list[Job], **settings: Any) -> list[tuple[str, list[dict[str, Any]]]]:
    """Train jobs on two ranks; return of each job what makes the host of each rank wait."""
    told = [(job.keys, job.dims, job.waits is None) for job in jobs]
    script = f"""
        from pathlib import Path
        sys.path.insert(0, {HERE!r})
        import host_waits_cases
        folder = Path(os.environ["STORE"]).parent
        for number, (keys, dims, holds) in enumerate({told!r}):
            say(host_waits_cases.train(keys, str(folder / f"run-{{number}}"), dims, holds=holds))
        """
    ended = ranks.run(script, 2, timeout_s=60 + 20 * len(jobs), **settings)
    assert [each.code for each in ended] == [0, 0], "\n".join(each.error for each in ended)
    found = zip(*(each.said for each in ended), strict=True)
    return list(zip((job.name for job in jobs), map(list, found), strict=True))


def faults(jobs: list[Job]) -> list[str]:
    """Train jobs; return what of their waits ought not to be."""
    of_name = {job.name: job for job in jobs}
    told = []
    for name, of_ranks in waits_in(jobs, delay_us=30):
        allowed = {TOTALS} | (of_name[name].waits or set())
        for rank, found in enumerate(of_ranks):
            who = f"{name}, rank {rank}:"
            told += [f"{who} {each}" for each in found["hidden"]]
            told += [f"{who} waits on purpose: {each}" for each in set(found["asked"]) - allowed]
            told += [f"{who} not queued ahead: step {each}" for each in found["held_up"]]
            if found["num_waits"] != sum(found["hidden"].values()):
                told.append(f"{who} {found['num_waits']} waits, some of them elsewhere")
            if found["asked"].get(TOTALS) != STEPS - FREE:
                told.append(f"{who} reads the totals {found['asked'].get(TOTALS)} times")
    return told


@pytest.mark.parametrize("stage", range(4))
def test_every_stage_precision_and_place_of_states(stage: int) -> None:
    assert faults(list(jobs_of(stage))) == []


def test_optimizers_and_guards() -> None:
    assert faults(OPTIMIZERS) == []


def test_pipelines_and_tensor_parallelism() -> None:
    assert faults(AXES) == []


def test_a_model_that_looks_at_its_loss_is_seen() -> None:
    keys = of_speaker(zero=2, model={"call": "host_waits_cases:Peeking", "args": {"norm": False}})
    ((_, of_ranks),) = waits_in([Job("peeks", {**keys, "steps": 3})])
    for found in of_ranks:
        assert found["held_up"] == [3]
        assert found["num_waits"] == 2  # micro-batches
        assert sum(found["hidden"].values()) == 2
        assert all("(item)" in each for each in found["hidden"])
