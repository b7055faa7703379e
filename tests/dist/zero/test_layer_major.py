"""Layer-major order: the bits of 1F1B with few gathers, what is refused, and what goes wrong."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import contents, job, losses, run
from test_passes import lose_two  # noqa: F401 - a job names it
from torch import Tensor, nn
from toys import world
from zoo_runs import CASES, prepare

from zrun_core.errors import ZrunError
from zrun_core.zero.account import grown_rings
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.unit.unit_params import UnitParams, UnitState

STEPS, MICRO_BATCHES, DIM = 5, 4, 24
LAYER_MAJOR = {"parallel": {"schedule": "layer_major"}}
Found = dict[str, Any]


class Bordered(nn.Module):
    """Blocks that are given, and give, more than one tensor: in lists, by name, for others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)
        self.encoder = nn.ModuleList(Layer() for _ in range(2))
        self.decoder = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        x = memory = self.first(x)
        seen: list[Tensor] = []
        bias = None
        for layer in self.encoder:
            memory, bias = layer(memory, seen, bias=bias)
        for layer in self.decoder:
            x, bias = layer(x, seen, memory=memory, bias=bias)
        return nn.functional.mse_loss(self.last(x + sum(seen)), y)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.bias = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(
        self, x: Tensor, seen: list[Tensor], memory: Tensor | None = None, bias: Any = None
    ) -> tuple[Tensor, Tensor]:
        if bias is None:
            bias = self.bias(x)
        y = self.up(x if memory is None else x + memory)
        seen.append(y * 0.1)
        return x + torch.tanh(y + bias), bias


class InPlace(Bordered):
    """Its first block writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder[0].register_forward_pre_hook(lambda _, args: (args[0].mul_(2.0), args[1]))


class Faulty(Bordered):
    """Its third block raises in the second micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder[0].register_forward_pre_hook(self.count)
        self.calls = 0

    def count(self, *_: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            raise ValueError("no such domain")


class Leaving(Bordered):
    """Every second micro-batch leaves out the decoder, and its loss goes on with a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.mean = 0, 1.0

    def forward(self, x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 2:
            loss = super().forward(x, y, domain)
        else:
            memory, _ = self.encoder[0](self.first(x), [], bias=None)
            loss = nn.functional.mse_loss(self.last(memory), y)
        self.mean = 0.9 * self.mean + 0.1 * float(loss)
        return loss / self.mean


class Carrying(Bordered):
    """The end of a forward leaves a mean of losses: the beginning of the next one reads it."""

    is_read_first = True

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.mean = 0, 1.0

    def forward(self, x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        self.calls += 1
        if self.is_read_first:
            x = x * self.mean
        loss = super().forward(x, y, domain) / self.mean
        self.mean = 0.9 * self.mean + 0.1 * float(loss.detach())
        return loss


class CarryingBuffer(Carrying):
    """The mean is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        del self.mean
        self.register_buffer("mean", torch.ones(()))


class CarryingAtEnd(Carrying):
    """The end of the next one reads it."""

    is_read_first = False


class Twice(Bordered):
    def forward(self, x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        return super().forward(x, y, domain) + super().forward(x * 2, y, domain)


@contextmanager
def watching(gathers: Counter[str], grads: list[Any]) -> Iterator[None]:
    """Count the gathers of each unit, and keep the gradients of each step."""
    step, unshard = ShardedModel.step, UnitParams.unshard

    def watched_step(self: ShardedModel, *args: Any) -> Any:
        trained = [unit for unit in self.units if unit.trainable]
        grads.append({unit.name: unit.grad.local.numpy().copy() for unit in trained})
        return step(self, *args)

    def watched_unshard(self: UnitParams, *args: Any) -> None:
        gathers[self._unit.name] += self.reshard_after_use and self.state is UnitState.SHARDED
        unshard(self, *args)

    ShardedModel.step, UnitParams.unshard = watched_step, watched_unshard  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShardedModel.step, UnitParams.unshard = step, unshard  # type: ignore[method-assign]


def train(keys: dict[str, Any], run_dir: Path) -> Found:
    run_dir.mkdir(parents=True, exist_ok=True)
    gathers: Counter[str] = Counter()
    grads: list[Any] = []
    error = ""
    found: Found = {}
    with watching(gathers, grads):
        try:
            trainer, worker = prepare({"steps": STEPS, **keys}, str(run_dir))
            trainer.run()
            told = worker.told.events
            found = {
                "losses": [event["loss"] for event in told if event["type"] == "step"],
                "digest": contents(trainer)["digest"],
                "traffic": told[-1].get("traffic") or {},
                "grown": grown_rings(trainer.sharded),
                "units": [unit.layout for unit in trainer.sharded.units],
            }
        except ZrunError as caught:
            error = str(caught)
    left = sum(each.name.startswith("micro-batch") for each in threading.enumerate())
    return {**found, "error": error, "grads": grads, "gathers": gathers, "threads left": left}


def in_both_orders(jobs: dict[str, dict[str, Any]], run_dir: str) -> dict[str, list[Found]]:
    """Train each job with 4 micro-batches per step, by 1F1B and in layer-major order."""
    samples = 8 // MICRO_BATCHES // world()[1]
    found = {}
    for name, keys in jobs.items():
        own = {"batch": {"global": 8, "micro": samples}, **keys}
        folder = Path(run_dir, name)
        found[name] = [train(own, folder / "1f1b"), train(own | LAYER_MAJOR, folder / "layers")]
    return found


def case(name: str, **keys: Any) -> dict[str, Any]:
    """A model of the zoo, or one of here, at stage 3."""
    zero = {"stage": 3}
    if name in CASES:
        own = CASES[name][0]
        return {**own, **keys, "zero": {**own.get("zero", {}), **zero}}
    model = {"model": f"zero/test_layer_major.py:{name}", "data": "zoo.py:vectors"}
    return {**model, "zero": zero, **keys}


def pretrained(name: str, **args: Any) -> dict[str, Any]:
    model = {"call": "pretrained.py:build", "args": {"name": name, **args}}
    return {"model": model, "data": "pretrained.py:Texts", "zero": {"stage": 3}}


SAME = {
    "half": case("untied", precision="fp16", activations={"checkpoint": "full"}),
    "offloaded": case("untied", activations={"checkpoint": "full", "offload": "disk"}),
    **{name: case(name) for name in ("channels last", "untied", "experts", "lora")},
    "LlamaForCausalLM": pretrained("LlamaForCausalLM"),
}
NEAR = {  # a weight, or a tensor, that several slices use
    "Bordered": case("Bordered"),
    "checkpointed": case("Bordered", activations={"checkpoint": "full"}),
    "tied": case("tied"),
    "GPT2LMHeadModel": pretrained(
        "GPT2LMHeadModel", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    ),
}


@pytest.mark.parametrize(("size", "stage"), [(1, 0), (2, 3), (2, 2)])
@pytest.mark.at_most(1)
def test_layers_first_is_the_same_with_two_gathers_per_step(ranks, tmp_path, size, stage):
    guards = {"check_values": False}  # which gathers, before the first step
    jobs = {
        name: {**keys, "zero": {**keys["zero"], "stage": stage}, "guards": guards}
        for name, keys in (SAME | NEAR).items()
    }
    if stage == 2:  # ranks may run different modules
        jobs = {name: jobs[name] for name in ("experts", "tied")}
        del jobs["experts"]["zero"]["leaf"]
    for of_rank in ranks(size).run(in_both_orders, jobs, str(tmp_path)):
        for name, (plain, sliced) in of_rank.items():
            where = f"{name}: {sliced['error']}"
            assert not plain["error"] + sliced["error"], where
            assert sliced["threads left"] == 0, where
            if name in SAME:
                assert sliced["losses"] == plain["losses"], where
                assert sliced["digest"] == plain["digest"], where
            for one, other in zip(plain["grads"], sliced["grads"], strict=True):
                for unit, grad in one.items():
                    if name in SAME:
                        assert (grad == other[unit]).all(), f"{where} {unit}"
                    else:
                        assert abs(grad - other[unit]).max() < 1e-4, f"{where} {unit}"
            for numbers in sliced["traffic"].values():
                assert numbers["measured_bytes"] == numbers["expected_bytes"], where
            if stage == 3:
                check_gathers(plain["gathers"], sliced)


def check_gathers(plain: Counter[str], sliced: Found) -> None:
    last = [unit.block for unit in sliced["units"] if unit.block][-1]
    for unit in sliced["units"]:
        if not unit.block or plain[unit.name] != 2 * MICRO_BATCHES * STEPS:
            continue  # backward does not need it
        times = 1 if unit.block == last or unit.keep_until_pass_ends else 2
        assert sliced["gathers"][unit.name] == times * STEPS, unit.name


REFUSED = {
    "re-entered": "the model has no repeated blocks",
    "Twice": "encoder.0 is called a second time",
    "InPlace": "encoder.0 writes to its input in place",
    "odd": "the backward of parts.1 was run twice",
    "reentrant checkpoint": "blocks.0 is called under torch.no_grad() with an input that requires",
    "Leaving": "micro-batch 3 leaves blocks out, and so ends before that of micro-batch 0 changes",
    "Faulty": "ValueError: no such domain",
}


@pytest.mark.thorough
def test_what_it_cannot_do_is_named_and_what_raises_is_the_users(ranks, tmp_path):
    jobs = {name: case(name) for name in REFUSED}
    for of_rank in ranks(2).run(in_both_orders, jobs, str(tmp_path)):
        for name, (_, sliced) in of_rank.items():
            assert REFUSED[name] in sliced["error"], sliced["error"]
            if name != "Faulty":
                assert "layer_major" in sliced["error"]
                assert "write parallel.schedule: 1f1b" in sliced["error"]
            assert sliced["threads left"] == 0, name
        assert "test_layer_major.py" in of_rank["Faulty"][1]["error"]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("Carrying", "`Carrying.calls`, `Carrying.mean`"),
        ("CarryingBuffer", "`CarryingBuffer.calls`, `mean`"),
    ],
)
@pytest.mark.at_most(1)
def test_what_a_forward_leaves_for_the_beginning_of_the_next_is_named(
    ranks, tmp_path, model, names
):
    for of_rank in ranks(2).run(in_both_orders, {model: case(model)}, str(tmp_path)):
        plain, sliced = of_rank[model]
        assert not plain["error"]
        assert "layer_major: the loss of micro-batch 1 is " in sliced["error"], sliced["error"]
        assert f"a forward leaves {names} behind" in sliced["error"], sliced["error"]
        assert "change it where it is read, or write parallel.schedule: 1f1b" in sliced["error"]
        assert not sliced["grads"]  # nothing was updated


def test_what_a_forward_leaves_for_the_end_of_the_next_trains(ranks, tmp_path):
    """To look at it leaves no trace in the losses, nor in what is counted."""
    (of_rank,) = ranks(1).run(in_both_orders, {"right": case("CarryingAtEnd")}, str(tmp_path))
    plain, sliced = of_rank["right"]
    assert not plain["error"] + sliced["error"], sliced["error"]
    assert sliced["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    for numbers in sliced["traffic"].values():
        assert numbers["measured_bytes"] == numbers["expected_bytes"]


@pytest.mark.thorough
def test_a_resumed_run_draws_the_same(ranks, tmp_path):
    """Dropout, evaluations, and a last step with fewer micro-batches."""
    keys = job(
        **LAYER_MAJOR,
        zero=3,
        steps=None,
        epochs=2,
        data={"call": "runs.py:Tokens", "args": {"length": 36}, "shuffle": True},
        eval={"data": "runs.py:Tokens", "every": 3},
        activations={"checkpoint": "full"},
    )
    keys = {key: value for key, value in keys.items() if value is not None}
    whole = ranks(2).run(run, keys, str(tmp_path / "whole"))
    ranks(2).run(run, keys, str(tmp_path / "part"), None, 5)
    again = ranks(2).run(run, keys, str(tmp_path / "part"), {"step": 3})
    other = ranks(2).run(run, {**keys, "parallel": {}}, str(tmp_path / "other"))
    for one, two in zip(whole, again, strict=True):
        assert one["error"] == two["error"] == ""
        assert one["digest"] == two["digest"]
    assert losses(other[0])[1] != losses(whole[0])[1], "micro-batches draw from other streams"


@pytest.mark.thorough
def test_a_batch_without_memory_is_dropped(ranks, tmp_path):
    keys = job(
        **LAYER_MAJOR,
        zero=2,
        checkpoint=None,
        guards={"on_oom": "skip"},
        hooks={"on_step": "zero/test_layer_major.py:lose_two"},
    )
    for found in ranks(2).run(run, keys, str(tmp_path)):
        assert found["error"] == ""
        steps = [event for event in found["events"] if event["type"] == "step"]
        if steps:
            assert [event["step"] for event in steps if event["skipped"]] == [3, 5]
