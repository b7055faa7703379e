"""What is looked after in pipelines: evaluations, the best step, replicas, bad numbers."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import PoolWorker, make_spec
from small_jobs import GPT, gpt, on_axes, small_gpt
from torch import nn
from toys import world

from zrun_core.models.gpt import gpt as make_gpt
from zrun_core.train.user_hooks import HookContext

DIMS = [{"dp": 1, "pp": 2}, {"dp": 2, "pp": 2}]
TIED = {"model": gpt(tied=True)}


# Evaluations


def measures(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Count labels, which every stage has, and call the model, which none has whole."""
    loss = model(**batch)
    return {"even": ((batch["labels"] % 2 == 0).sum(), batch["labels"].numel()), "again": loss}


def of_labels(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Does not call the model."""
    return {"even": ((batch["labels"] % 2 == 0).sum(), batch["labels"].numel())}


def twice(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"difference": model(**batch) - model(**batch)}


def of_weights(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Needs parameters of the first stage."""
    return {"again": model(**batch), "norm": model.tokens.weight.norm().item()}


def evaluated(metrics: str, folder: Path, ranks: Any, **dims: int) -> list[dict[str, Any]]:
    held_out = {"call": "runs.py:Plain", "args": {"length": 13}}
    metrics = f"guards/test_pipeline_guards.py:{metrics}"
    keys = small_gpt(eval={"data": held_out, "metrics": metrics, "every": 2})
    return on_axes(keys, folder, ranks, **dims)


def values(found: list[dict[str, Any]]) -> list[dict[str, float]]:
    assert not found[0]["error"], found[0]["error"]
    return [event["metrics"] for event in found[0]["events"] if event["type"] == "eval"]


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("metrics", ["measures", "of_labels"])
@pytest.mark.thorough
def test_metrics(ranks, tmp_path: Path, metrics: str, dims: dict[str, int]) -> None:
    one = values(evaluated(metrics, tmp_path / "one", ranks, dp=dims["dp"], pp=1))
    many = values(evaluated(metrics, tmp_path / "many", ranks, **dims))
    assert many == one
    assert len(many) == 2


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ("twice", "same order, and eval.metrics the model once at most; write pp: 1"),
        ("of_weights", "eval.metrics failed: it looks at the value of a tensor that another stage"),
    ],
)
@pytest.mark.at_most(1)
def test_metrics_that_no_stage_can_compute(ranks, tmp_path: Path, metrics: str, words: str) -> None:
    with pytest.raises(AssertionError) as error:  # of the pool, which says what each rank raised
        evaluated(metrics, tmp_path, ranks, dp=1, pp=2)
    assert words in str(error.value)


# Names of collectives


class Names:
    """Stands for a flight recorder; has what was issued by kind and ranks of a group."""

    def __init__(self) -> None:
        self.issued: dict[tuple[str, tuple[int, ...]], list[str]] = {}

    def issue(self, kind: str, group: Any, name: str, num_bytes: int, *, in_order: bool) -> None:
        if kind not in ("send", "receive"):
            self.issued.setdefault((kind, group.ranks), []).append(name)

    def waiting(self, is_waiting: bool) -> None:
        pass


def names(keys: dict[str, Any], run_dir: str, dims: dict[str, int]) -> Any:
    """Return what this rank has issued in a run."""
    rank, _ = world()
    worker = PoolWorker(make_spec(keys, run_dir, None, dims), rank)
    trainer = worker.prepare()
    recorder = Names()
    trainer.comm._flight_recorder = recorder
    trainer.stop.ignore = lambda: None  # the process lives on
    trainer.run()
    trainer.loader._steps.close()
    worker.close()
    return recorder.issued


@pytest.mark.thorough
def test_all_ranks_of_a_group_call_a_collective_the_same(ranks, tmp_path: Path) -> None:
    """Else ranks that wait are told to disagree on it."""
    dims = {"pp": 2, "dp": 2, "tp": 2}
    parallel = {"pp": 2, "tp": 2, "sequence": True}
    keys = small_gpt(steps=2, zero=3, parallel=parallel, **TIED)
    issued: dict[Any, list[str]] = {}
    for found in ranks(8).run(names, keys, str(tmp_path), dims):
        for key, own in found.items():
            assert issued.setdefault(key, own) == own, key
    assert {"all_reduce", "small"} <= {kind for kind, _ in issued}


# Replicas


def flip(context: HookContext, ranks: list[int], name: str) -> None:
    """After step 2, change the last bit of an element of a parameter, on these ranks."""
    with context.gathered() as model:
        if context.step == 2 and context.rank in ranks:
            flat = model.get_parameter(name).view(-1)
            flat.view(torch.int16 if flat.dtype == torch.bfloat16 else torch.int32)[7] ^= 1


@pytest.mark.parametrize(
    ("keys", "dp", "pp", "flipped", "words"),
    [
        ({"zero": 0}, 2, 2, [3], "3 (host, cpu, pp 1 dp 1) has another parameter blocks.3.mlp.up"),
        # Both ranks of an end have the same, and the ends differ; the stage between has none of it.
        ({"zero": 0, **TIED}, 1, 3, [2], "2 (host, cpu, pp 2) has another parameter tokens.weight"),
        ({"zero": 1, **TIED}, 2, 2, [2, 3], "2 (host, cpu, pp 1 dp 0) has another parameter tok"),
        (
            *({"zero": 3, "precision": "bf16", **TIED}, 2, 2, [0, 1]),
            "2 (host, cpu, pp 1 dp 0) has another parameter tokens.weight",
        ),
    ],
)
@pytest.mark.at_most(1)
def test_one_bit_is_found(
    ranks, tmp_path: Path, keys: dict[str, Any], dp: int, pp: int, flipped: list[int], words: str
) -> None:
    name = "blocks.3.mlp.up.weight" if len(keys) == 1 else "tokens.weight"
    args = {"ranks": flipped, "name": name}
    hooks = {"on_step": {"call": "guards/test_pipeline_guards.py:flip", "args": args}}
    keys = small_gpt(**keys, hooks=hooks, guards={"replica_every": 1}, parallel={"pp": pp})
    for each in on_axes(keys, tmp_path, ranks, dp=dp, pp=pp):
        assert f"DivergedError: step 3: replicas diverged: rank {words}" in each["error"]


# Numbers that are not finite


class _NanGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * float("nan")


def poisoned(rank: int, what: str) -> nn.Module:
    """A GPT; from its tenth pass on, something of its third block is nan on a rank."""
    model = make_gpt(**{**GPT, "tied": False})
    passes = itertools.count(1)

    def spoil(module: nn.Linear, args: tuple[torch.Tensor]) -> Any:
        if next(passes) < 10 or torch.distributed.get_rank() != rank:
            return args
        if what == "gradient":
            return _NanGrad.apply(args[0])  # and of all that lies in front of it
        return args[0] * float("nan")

    model.blocks[2].mlp.up.register_forward_pre_hook(spoil)
    return model


@pytest.mark.parametrize("what", ["gradient", "activation"])
@pytest.mark.parametrize(
    ("zero", "dims"),
    [
        (0, DIMS[0]),
        (0, DIMS[1]),
        pytest.param(3, {"dp": 2, "pp": 2, "tp": 2}, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.at_most(1)
def test_what_is_not_finite_is_named(
    ranks, tmp_path: Path, what: str, zero: int, dims: dict[str, int]
) -> None:
    """By the name that it has in the whole model, with its stage and its rank.

    Of a first bad step the ranks are told whose sum it is; later ones inspect what is summed.
    """
    last = math.prod(dims.values()) - 1
    keys = small_gpt(
        model={
            "call": "guards/test_pipeline_guards.py:poisoned",
            "args": {"rank": last, "what": what},
        },
        steps=6,
        zero=zero,
        parallel={"pp": 2, "tp": dims.get("tp", 1)},
    )
    found = on_axes(keys, tmp_path, ranks, **dims)
    bias = "the gradient of blocks.2.mlp_norm.bias (layer blocks.2.mlp_norm, stage 1) is nan on"
    # Within its region rank 7 spoils the gradient of what both ranks of its group have.
    first, later = {1: ("1", "1"), 3: ("2 or 3", "3"), 7: ("4 or 5 or 6 or 7", "6 or 7")}[last]
    told = [f"{bias} rank {first}", f"{bias} rank {later}"]
    if what == "activation":  # then everything is, behind it and before it
        first_of_group = last - ("tp" in dims)
        told = [f"the loss is nan on rank {first_of_group}, and the gradient of norm.bias"] * 2
    warnings = [e["message"] for each in found for e in each["events"] if e["type"] == "warning"]
    skips = [text.partition(" on all ranks: ")[2] for text in warnings if "was skipped" in text]
    assert len(skips) == 2
    for text, expected in zip(skips, told, strict=True):
        assert text.startswith(expected), text
    for each in found:
        assert f"3 steps in a row were skipped: {told[1]}" in each["error"]
