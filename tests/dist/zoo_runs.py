"""Models of the zoo as jobs, trained by the parts that a worker runs and by a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from runs import PoolWorker, make_spec
from torch import Tensor, nn
from toys import world

from zrun_core.train.trainer import Trainer
from zrun_core.zero.account import allocated_memory, planned_memory

STEPS, GLOBAL = 4, 8
OPTIM = {"lr": 1e-3, "weight_decay": 0.1}
Run = dict[str, Any]


def prepare(keys: dict[str, Any], run_dir: str) -> tuple[Trainer, PoolWorker]:
    """Return a trainer on this rank, and its worker."""
    rank, size = world()
    keys = {
        "name": "zoo",
        "steps": STEPS,
        "batch": GLOBAL,
        "optim": OPTIM,
        "slots": size,
        **keys,
        "zero": {"bucket": 2 << 10, **keys.get("zero", {})},
    }
    worker = PoolWorker(make_spec(keys, run_dir, None), rank)
    return worker.prepare(), worker


def train(keys: dict[str, Any], run_dir: str, want_state: bool = False) -> Run:
    """Train a job on this rank; return what it tells, and the values of the model."""
    trainer, worker = prepare(keys, run_dir)
    trainer.run()
    found: Run = {
        kind: [e["loss"] for e in worker.told.events if e["type"] == kind]
        for kind in ("step", "eval")
    }
    found["units"] = len(trainer.sharded.units)
    found["warnings"] = [e["message"] for e in worker.told.events if e["type"] == "warning"]
    sharded = trainer.sharded
    found["memory"] = [
        {kind.value: size for kind, size in account.by_kind.items()}
        for account in (planned_memory(sharded), allocated_memory(sharded))
    ]
    if want_state:
        with trainer.sharded.gathered() as module:
            found["state"] = {
                name: value.float().numpy().copy() for name, value in module.state_dict().items()
            }
    return found


def plain(
    build: Callable[[], nn.Module],
    data: zoo.Samples,
    loss_of: Callable[[nn.Module, Any], Any] | None = None,
    *,
    parts: int = 1,
    after: Callable[[nn.Module], object] = lambda model: None,
    collate: Callable[[list[Any]], Any] = torch.utils.data.default_collate,
) -> tuple[list[float], nn.Module]:
    """The loop that a user would write, on global batches.

    `parts` cuts each as ranks do, for batch statistics.

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
                loss = (
                    result["loss"] if isinstance(result, dict) else getattr(result, "loss", result)
                )
                sums.append((loss * len(own), len(own)))
            if number:
                for name, buffer in model.named_buffers():
                    buffer.data.copy_(kept[name]) if buffer.is_contiguous() else None
        loss = sum(total for total, _ in sums) / sum(weight for _, weight in sums)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after(model)
        losses.append(loss.item())
    return losses, model


# name -> (keys of the job, what the plain loop needs)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}


def case(
    name: str,
    data: str,
    model: str,
    args: dict[str, Any] | None = None,
    *,
    parts: int = 1,
    leaf: str = "",
    **keys: Any,
) -> None:
    """Add a case; `leaf` names modules that are gathered whole, `parts` is as in `plain`."""
    if leaf:
        keys["zero"] = {"leaf": [leaf]}
    CASES[name] = (
        {
            "model": {"call": f"zoo.py:{model}", "args": args or {}},
            "data": f"zoo.py:{data}",
            **keys,
        },
        {"parts": parts},
    )


case("convnet", "images", "convnet", loss="zoo.py:classify", parts=2)
case(
    "channels last",
    "images",
    "convnet",
    {"channels_last": True, "frozen_norm": True},
    loss="zoo.py:classify",
    parts=2,
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
    """Return what a job names, with the arguments that it gives."""
    call, args = (
        (reference["call"], reference["args"]) if isinstance(reference, dict) else (reference, {})
    )
    return lambda *more: getattr(zoo, call.partition(":")[2])(*more, **args)


def keys_of(name: str, stage: int, **more: Any) -> dict[str, Any]:
    """Return the keys of a case at a ZeRO stage."""
    keys = {**CASES[name][0], **more}
    return {**keys, "zero": {**keys.get("zero", {}), "stage": stage}}


def same(losses: list[float], expected: list[float]) -> None:
    """Compare losses to rounding."""
    assert losses == pytest.approx(expected, abs=2e-6, rel=0)
