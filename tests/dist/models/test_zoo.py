"""Users' models at every ZeRO stage, through the parts that a worker runs, against a plain loop on
global batches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from zoo_runs import CASES, GLOBAL, Run, in_zoo, keys_of, plain, same, train


@functools.cache
def plain_losses(name: str) -> list[float]:
    keys, options = CASES[name]
    loss_of = in_zoo(keys["loss"]) if "loss" in keys else None
    return plain(in_zoo(keys["model"]), in_zoo(keys["data"])(), loss_of, **options)[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.at_most(10)
def test_losses_are_those_of_a_plain_loop(ranks, tmp_path, name, stage):
    run = ranks(2).run(train, keys_of(name, stage), str(tmp_path))[0]
    assert run["units"] > 1
    same(run["step"], plain_losses(name))


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("name", ["experts", "experts without calls", "branch", "re-entered"])
def test_ranks_may_run_different_modules_where_parameters_are_not_sharded(
    ranks, tmp_path, name, stage
):
    keys = keys_of(name, stage)
    del keys["zero"]["leaf"]
    same(ranks(2).run(train, keys, str(tmp_path))[0]["step"], plain_losses(name))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "name",
    [
        "convnet",
        "channels last",
        "tied",
        "functional tie",
        "lora",
        "encoder-decoder",
        "lstm",
        "torch encoder",
    ],
)
@pytest.mark.at_most(4)
def test_bf16_is_near(ranks, tmp_path, name, stage):
    run = ranks(2).run(train, keys_of(name, stage, precision="bf16"), str(tmp_path))[0]
    assert run["step"] == pytest.approx(plain_losses(name), abs=2e-2)


def test_rings_are_as_planned_for_frozen_parameters_and_batch_norms(ranks, tmp_path):
    for name in ("lora without checkpoints", "convnet", "tied", "lstm"):
        planned, allocated = ranks(2).run(train, keys_of(name, 3, precision="bf16"), str(tmp_path))[
            0
        ]["memory"]
        assert allocated == planned, name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_without_gradient_are_left_alone(ranks, tmp_path, stage):
    run = ranks(2).run(train, keys_of("re-entered", stage), str(tmp_path), True)[0]
    torch.manual_seed(0)
    start = zoo.Recurrent().state_dict()
    for name, value in run["state"].items():
        assert (torch.from_numpy(value) == start[name]).all() == name.startswith("never."), name
    idle, *others = run["warnings"]
    assert idle == "no gradient yet, so not updated: never.bias, never.weight"
    # The part for domain 0 is used without a call, which only stage 3 has to hold on to.
    assert [each.split(" holds ")[0] for each in others] == ["the ring of gathering"] * (stage == 3)


# Batches


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("micro", [1, 4])
def test_ragged_batches_weigh_by_tokens_however_they_are_cut(ranks, tmp_path, stage, micro):
    keys = {
        "model": "zoo.py:Tagger",
        "data": {"call": "zoo.py:ragged", "collate": "zoo.py:pad"},
        "loss": "zoo.py:masked_sum",
        "batch": {"global": GLOBAL, "micro": micro},
        "zero": {"stage": stage},
    }
    expected, _ = plain(zoo.Tagger, zoo.ragged(), zoo.masked_sum, collate=zoo.pad)
    same(ranks(2).run(train, keys, str(tmp_path))[0]["step"], expected)


def test_one_rank_cuts_as_it_likes(tmp_path):
    """Accumulation 4 x micro 2 is accumulation 1 x micro 8."""
    keys = {
        "model": "zoo.py:Tagger",
        "data": {"call": "zoo.py:ragged", "collate": "zoo.py:pad"},
        "loss": "zoo.py:masked_sum",
    }
    runs = [
        train({**keys, "batch": {"global": GLOBAL, "micro": micro}}, str(tmp_path))["step"]
        for micro in (2, 8)
    ]
    same(runs[0], runs[1])


# Evaluation, and what hooks may do


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["channels last", "torch encoder"])
@pytest.mark.at_most(2)
def test_evaluation_uses_the_first_ranks_buffers_and_changes_nothing(ranks, tmp_path, name, stage):
    keys, options = CASES[name]
    loss_of = in_zoo(keys["loss"]) if "loss" in keys else None
    data = in_zoo(keys["data"])()
    losses, model = plain(in_zoo(keys["model"]), data, loss_of, **options)
    model.eval()
    batch = torch.utils.data.default_collate([data[i] for i in range(GLOBAL)])
    with torch.no_grad():
        result = model(**batch) if isinstance(batch, dict) else loss_of(model, batch)
    evaluation = {"data": keys["data"], "every": 3, "first": True, "samples": GLOBAL}
    run = ranks(2).run(train, keys_of(name, stage, eval=evaluation), str(tmp_path))[0]
    same(run["step"], losses)
    assert len(run["eval"]) == 3
    same(run["eval"][-1:], [float(getattr(result, "loss", result))])


def train_with_hook(keys: dict[str, Any], run_dir: str, want_state: bool = False) -> Run:
    zoo.GENERATED.clear()
    return {**train(keys, run_dir, want_state), "generated": list(zoo.GENERATED)}


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")]
)
@pytest.mark.at_most(1)
def test_ranks_generate_texts_of_different_lengths(ranks, tmp_path, stage, precision):
    keys = keys_of("tied", stage, precision=precision)
    silent = ranks(2).run(train, keys, str(tmp_path))[0]["step"]
    runs = ranks(2).run(
        train_with_hook, {**keys, "hooks": {"on_step": "zoo.py:generate"}}, str(tmp_path)
    )
    assert runs[0]["step"] == silent
    for long, short in zip(runs[0]["generated"], runs[1]["generated"], strict=True):
        assert (len(long), len(short)) == (8, 3)
        assert long[:3] == short


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_a_hook_writes_is_trained_on(ranks, tmp_path, stage):
    keys = keys_of("detached", stage, hooks={"on_step": "zoo.py:halve"})

    def halve(model: nn.Module) -> None:
        with torch.no_grad():
            model.last.weight.mul_(0.5)

    same(
        ranks(2).run(train, keys, str(tmp_path))[0]["step"],
        plain(zoo.Detached, zoo.vectors(), after=halve)[0],
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_copy_of_the_model_is_a_plain_module(ranks, tmp_path, stage):
    keys = keys_of("detached", stage, hooks={"on_step": "zoo.py:keep_copy"})
    expected: list[float] = []
    batch = torch.utils.data.default_collate([zoo.vectors()[i] for i in range(4)])

    def measure(model: nn.Module) -> None:
        grads = torch.autograd.grad(model(**batch), list(model.parameters()))
        expected.append(
            sum(
                (p.square().sum() + g.sum()).item()
                for p, g in zip(model.parameters(), grads, strict=True)
            )
        )

    losses, _ = plain(zoo.Detached, zoo.vectors(), after=measure)
    runs = ranks(2).run(train_with_hook, keys, str(tmp_path))
    same(runs[0]["step"], losses)
    for run in runs:
        assert run["generated"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_a_hook_writes_stays_in_bf16(ranks, tmp_path, stage):
    keys = keys_of("detached", stage, precision="bf16", hooks={"on_step": "zoo.py:overwrite"})
    for run in ranks(2).run(train, keys, str(tmp_path), True):
        assert (run["state"]["last.weight"] == 0.25).all()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stale_parameter_cannot_be_mistaken_for_a_true_one(ranks, tmp_path, stage):
    keys = keys_of("detached", stage, hooks={"on_step": "zoo.py:peek"})
    for run in ranks(2).run(train_with_hook, keys, str(tmp_path)):
        assert all(math.isnan(value) for value in run["generated"])


# Recomputation and compilation


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("checkpoint", ["every_n", "selective"])
@pytest.mark.parametrize("name", ["tied", "torch encoder"])
def test_recomputing_changes_nothing(ranks, tmp_path, name, checkpoint, stage):
    keys = keys_of(name, stage, activations={"checkpoint": checkpoint})
    same(ranks(2).run(train, keys, str(tmp_path))[0]["step"], plain_losses(name))


def train_compiled(keys: dict[str, Any], run_dir: str) -> Run:
    """With all of torch's compiler but the last part, which writes C++ and has it compiled for half
    a minute.
    """
    backends, compiler = [], torch.compile

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        backends.append(CompileCounterWithBackend("aot_eager_decomp_partition"))
        return compiler(function, backend=backends[-1])

    torch.compile = compiled
    try:
        found = train(keys, run_dir)
    finally:
        torch.compile = compiler
    return {**found, "graphs": [backend.frame_count for backend in backends]}


@pytest.mark.thorough
def test_compiled_blocks_compute_the_same(ranks, tmp_path):
    run = ranks(2).run(train_compiled, keys_of("functional tie", 3, compile=True), str(tmp_path))[0]
    same(run["step"], plain_losses("functional tie"))
    assert len(run["graphs"]) > 1
    assert all(run["graphs"])
