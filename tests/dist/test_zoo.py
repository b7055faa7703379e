"""Users' models at every ZeRO stage, through the parts that a worker runs, against a plain loop on global batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pool
import pytest
import torch
import zoo
from torch import Tensor, nn
from toys import world

from zrun_core.comm import Comm
from zrun_core.config import JobConfig
from zrun_core.mesh import Mesh
from zrun_core.parallelize import shard_size
from zrun_core.spec import LaunchPlan, RankPlace, RunSpec, resolve_batch
from zrun_core.worker import Worker

pool.TIMEOUT_S = 25.0
HERE = Path(__file__).parent
STEPS, GLOBAL = 4, 8
Run = dict[str, Any]


class PoolWorker(Worker):
    """A worker on a rank of the pool: the ranks have met already, and events are kept."""

    def __init__(self, spec: RunSpec, rank: int) -> None:
        super().__init__(spec, rank)
        self.events: list[dict[str, Any]] = []
        self.emitter.emit = self._keep  # type: ignore[method-assign]

    def _keep(self, kind: str, **fields: Any) -> None:
        self.events.append({"type": kind, **fields})

    def _join(self, device: torch.device) -> None:
        pass

    def _connect(self, device: torch.device) -> Any:
        size = self.spec.plan.world_size
        mesh = Mesh.build(self.rank, ["host"] * size, shard_size(self.spec.job, size, size))
        return Comm(device), None, mesh


def prepare(keys: dict[str, Any], run_dir: str) -> Any:
    """A trainer on this rank, and its worker."""
    rank, size = world()
    small = {"bucket": 2 << 10, **keys.pop("zero", {})}
    job = JobConfig.model_validate(
        {"name": "zoo", "steps": STEPS, "batch": GLOBAL, "optim": OPTIM, "zero": small, "slots": size, **keys}
    )
    places = [RankPlace(rank=r, host="host", local_rank=r, device="cpu") for r in range(size)]
    plan = LaunchPlan(ranks=places, threads=1)
    spec = RunSpec(job=job, plan=plan, batch=resolve_batch(job, size), job_dir=str(HERE), run_dir=run_dir, run_id="x")
    worker = PoolWorker(spec, rank)
    trainer, _ = worker._prepare()
    return trainer, worker


OPTIM = {"lr": 1e-3, "weight_decay": 0.1}


def train(keys: dict[str, Any], run_dir: str, want_state: bool = False) -> Run:
    trainer, worker = prepare(keys, run_dir)
    trainer.run()
    found: Run = {kind: [e["loss"] for e in worker.events if e["type"] == kind] for kind in ("step", "eval")}
    found["units"] = len(trainer.sharded.units)
    found["warnings"] = [e["message"] for e in worker.events if e["type"] == "warning"]
    sharded = trainer.sharded
    found["memory"] = [
        {kind.value: size for kind, size in account.by_kind.items()}
        for account in (sharded.planned_memory(), sharded.allocated_memory())
    ]
    if want_state:
        with trainer.sharded.gathered() as module:
            found["state"] = {name: value.detach().numpy().copy() for name, value in module.state_dict().items()}
    return found


def plain(
    build: Callable[[], nn.Module],
    data: zoo.Samples,
    loss_of: Callable[[nn.Module, Any], Any] | None = None,
    *,
    parts: int = 1,
    collate: Callable[[list[Any]], Any] = torch.utils.data.default_collate,
) -> tuple[list[float], nn.Module]:
    """The loop that a user would write, on global batches; `parts` cuts each as ranks do, for batch statistics.

    Buffers are those that the first part leaves.
    """
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **OPTIM)
    losses = []
    for step in range(STEPS):
        samples = [data[(step * GLOBAL + i) % len(data)] for i in range(GLOBAL)]
        sums: list[tuple[Tensor, Any]] = []
        for number in range(parts):
            kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
            own = samples[number * GLOBAL // parts : (number + 1) * GLOBAL // parts]
            batch = collate(own)
            if loss_of is not None:
                result = loss_of(model, batch)
            else:
                result = model(**batch) if isinstance(batch, dict) else model(*batch)
            if isinstance(result, tuple):
                sums.append(result)
            else:
                loss = result["loss"] if isinstance(result, dict) else getattr(result, "loss", result)
                sums.append((loss * len(own), len(own)))
            if number:
                for name, buffer in model.named_buffers():
                    buffer.data.copy_(kept[name]) if buffer.is_contiguous() else None
        loss = sum(total for total, _ in sums) / sum(weight for _, weight in sums)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


# name -> (keys of the job, what the plain loop needs)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}


def case(
    name: str, data: str, model: str, args: dict[str, Any] | None = None, *, parts: int = 1, leaf: str = "", **keys: Any
) -> None:
    if leaf:
        keys["zero"] = {"leaf": [leaf]}
    CASES[name] = (
        {"model": {"call": f"zoo.py:{model}", "args": args or {}}, "data": f"zoo.py:{data}", **keys},
        {"parts": parts},
    )


case("convnet", "images", "convnet", loss="zoo.py:classify", parts=2)
case(
    "channels last", "images", "convnet", {"channels_last": True, "frozen_norm": True}, loss="zoo.py:classify", parts=2
)
case("untied", "tokens", "LanguageModel")
case("tied", "tokens", "LanguageModel", {"tie": "weight"})
case("functional tie", "tokens", "LanguageModel", {"tie": "functional"})
case("experts", "vectors", "Mixture", leaf=r"blocks\.\d+")
case("experts without calls", "vectors", "UncalledMixture", leaf="mixture")
case("lora without checkpoints", "tokens", "lora")
case("lora", "tokens", "lora", activations={"checkpoint": "full"})
case("encoder-decoder", "pairs", "EncoderDecoder")
case("branch", "vectors", "Branching", leaf="router", parts=2)
case("re-entered", "vectors", "Recurrent", leaf="sometimes")
case("two forwards", "vectors", "Recurrent", leaf="sometimes", loss="zoo.py:twice")
case("penalty", "vectors", "Recurrent", leaf="sometimes", loss="zoo.py:with_penalty")
case("penalty first", "vectors", "Recurrent", leaf="sometimes", loss="zoo.py:penalty_first")
case("lstm", "tokens", "Lstm")
case("torch encoder", "tokens", "TorchEncoder")
case("normalised", "vectors", "normalised", leaf="sometimes")
case("normalised, old", "vectors", "normalised", {"old": True}, leaf="sometimes")
case("odd", "vectors", "Odd")
case("detached", "vectors", "Detached")
case("detached inside", "vectors", "detached_inside", leaf="sometimes")
case("hooked parameter", "vectors", "Hooked")
case("checkpoint of the user's", "vectors", "Checkpointed", {"reentrant": False})
case("reentrant checkpoint", "vectors", "Checkpointed", {"reentrant": True})
case("distilled", "vectors", "Distilled")
case("gradient penalty", "vectors", "Detached", loss="zoo.py:smooth")


def in_zoo(reference: Any) -> Callable[..., Any]:
    call, args = (reference["call"], reference["args"]) if isinstance(reference, dict) else (reference, {})
    return lambda *more: getattr(zoo, call.partition(":")[2])(*more, **args)


def plain_losses(name: str) -> list[float]:
    keys, options = CASES[name]
    loss_of = in_zoo(keys["loss"]) if "loss" in keys else None
    return plain(in_zoo(keys["model"]), in_zoo(keys["data"])(), loss_of, **options)[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_a_plain_loop(ranks, tmp_path, name, stage):
    keys = {**CASES[name][0]}
    keys["zero"] = {**keys.get("zero", {}), "stage": stage}
    runs = ranks(2).run(train, keys, str(tmp_path))
    assert runs[0]["units"] > 1
    assert runs[0]["step"] == pytest.approx(plain_losses(name), abs=2e-6, rel=0)
