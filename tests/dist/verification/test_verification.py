"""Runs of all kinds are what a plain loop makes of the same job, and planted mistakes are found."""

from __future__ import annotations

import math
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from between_linears import Model
from runs import VOCAB, Plain
from small_jobs import axes_of, gpt, small_gpt
from torch import nn
from verifying import recorded, verdict_of

from zrun_core.verification.verdict import Verdict

ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "no_decay": ["norm", "bias"], "clip": 0.5}


def verified(
    keys: dict[str, Any], folder: Path, ranks: Any, fault: Any = None, **dims: int
) -> Verdict:
    axes = axes_of(keys, **dims)
    found = ranks(math.prod(axes.values())).run(recorded, keys, str(folder), axes, None, fault)
    assert {each["error"] for each in found} == {""}, found[0]["error"]
    return verdict_of(folder)


SPEAKER = {"model": "runs.py:Speaker", "data": {"call": "runs.py:Tokens", "shuffle": True}}
TWO = {"dp": 2}
RIGHT: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "one rank": ({}, {}),
    "stage 0": ({"zero": 0}, TWO),
    "stage 3, in two units": ({"zero": {"stage": 3, "bucket": "1KiB"}}, TWO),
    "dropout, BatchNorm, tied, frozen": ({**SPEAKER, "zero": 2}, TWO),
    "bf16": ({"precision": "bf16", "zero": 1}, TWO),
    "bf16, reduced in bf16": ({"precision": {"compute": "bf16", "reduce": "compute"}}, TWO),
    "fp16": ({"precision": "fp16", "zero": 2}, TWO),
    "pp": ({"parallel": {"pp": 2}}, {}),
    "pp, dropout by block": ({**SPEAKER, "parallel": {"pp": 2, "schedule": "gpipe"}}, {}),
    "interleaved": ({"model": gpt(depth=4), "parallel": {"pp": 2, "schedule": "interleaved"}}, {}),
    "zero_bubble": ({"parallel": {"pp": 2, "schedule": "zero_bubble"}}, {}),
    "tp": ({"parallel": {"tp": 2}}, {}),
    "tp, bf16": ({"parallel": {"tp": 2}, "precision": "bf16"}, {}),
    "tp, sequence": ({"parallel": {"tp": 2, "sequence": True}}, {}),
    "host": ({"zero": 3, "offload": "host"}, TWO),
    "recomputed": ({**SPEAKER, "activations": {"checkpoint": "full"}, "zero": 3}, TWO),
    "layer-major": ({**SPEAKER, "parallel": {"schedule": "layer_major"}, "zero": 3}, TWO),
    "compiled": ({"compile": True}, {}),
    "lamb": ({"optim": {"name": "lamb", **ADAMW}, "zero": 2}, TWO),
    "lars": ({"optim": {"name": "lars", "lr": 1e-2, "weight_decay": 0.1}, "zero": 1}, TWO),
    "lion, bf16 moments": ({"optim": {"name": "lion", "lr": 1e-3, "moments": "bf16"}}, TWO),
    "sgd, cosine": ({"optim": {"name": "sgd", "lr": 0.1, "args": {"momentum": 0.9}}}, TWO),
    "writes to its batch, counts": (
        {
            "model": {"call": "user_code/test_trials.py:Writer", "args": {"writes": "inputs"}},
            "loss": "user_code/test_trials.py:Weighted",
        },
        TWO,
    ),
    "server": ({"sync": "server", "zero": 0}, TWO),
    "adapters of low rank": (
        {"model": "verification/test_verification.py:adapted", "zero": 3},
        TWO,
    ),
    "adapters of low rank, fp16": (
        {"model": "verification/test_verification.py:adapted", "zero": 2, "precision": "fp16"},
        TWO,
    ),
}


class Adapter(nn.Module):
    """A frozen linear, and a product of two small ones that are trained."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.up(self.down(x))
        return self.base(x) + 0.5 * added


def adapted() -> nn.Module:
    """A model of which only the adapters of its linears are trained."""
    model = Model("gelu").requires_grad_(False)
    for parent in [*model.modules()]:
        for name, child in [*parent.named_children()]:
            if isinstance(child, nn.Linear):
                setattr(parent, name, Adapter(child))
    return model


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.at_most(2)
def test_what_is_right_agrees(ranks, tmp_path: Path, name: str) -> None:
    keys, dims = RIGHT[name]
    verdict = verified(small_gpt(**{"optim": ADAMW, **keys}), tmp_path / "run", ranks, **dims)
    assert verdict.agrees, (verdict.difference and verdict.difference.in_words, verdict.why_not)
    assert verdict.steps > 2


DP = {"zero": 1, "batch": {"global": 8, "micro": 1}}
LAMB = {"optim": {"name": "lamb", **ADAMW}, "zero": 2, "model": gpt(dim=64)}
HEAD = "step 1: the gradient of head.weight differs by"
# By mistake: the job, its ranks, and what the verdict begins and ends with.
MISTAKES: dict[str, tuple[dict[str, Any], dict[str, int], str, str]] = {
    "summed in place of a mean": (
        DP,
        TWO,
        HEAD,
        "2 times as large, as a sum over dp (2) where a mean belongs",
    ),
    "one rank counts twice": (DP, TWO, HEAD, "0, 1, 2, 3 of data-parallel rank 1 counts 2 times"),
    "a micro-batch is dropped": (DP, TWO, HEAD, "micro-batch 1 of data-parallel rank 0 is missing"),
    "the last micro-batch alone": (DP, TWO, HEAD, "0, 1, 2 of data-parallel rank 1 is missing"),
    "norm counted twice": (DP, TWO, "step 1: the norm of the gradient", "1.414 times"),
    "never clipped": (DP, TWO, "step 1: the norm", "loss weights, loss scale or clipping"),
    "a gradient is lost": (DP, TWO, HEAD, "this parameter gets no gradient"),
    "a tied head trains untied": ({**SPEAKER, **DP}, TWO, "step 1: the gradient of embed", ""),
    "stale parameters": (DP, TWO, "step 2: the loss differs", ""),
    "all parameters decay": (DP, TWO, "step 1: the update of blocks", "x value: weight decay"),
    "the rate of the next step": (DP, TWO, "step 1: the learning rate", "0.005 in the plain loop"),
    "a shard is not updated": ({"zero": 3}, TWO, "step 1: the update of b", "it was not updated"),
    "norms of shards": (LAMB, TWO, "step 1: the update of ", ""),
    "two ranks read the same": (DP, TWO, "step 1: what was read differs: rank 1", ""),
    "statistics counted twice": ({**SPEAKER, **DP}, TWO, "step 1: the buffer norm.num", ""),
    "a buffer is not a number": ({**SPEAKER, **DP}, TWO, "step 1: the buffer norm.running_var", ""),
    "half the gradient at a border": (
        {"parallel": {"pp": 2}},
        {},
        "step 1: the gradient",
        "0.5 times as large",
    ),
    "copies of slices drift": ({"parallel": {"tp": 2}}, {}, "step 1: the gradient of blocks", ""),
    "scaled twice": ({"precision": "fp16"}, TWO, HEAD, ""),
    "other initial values": (DP, TWO, "step 0: the initial value of tokens.weight", ""),
    "other draws": ({**SPEAKER, "parallel": {"draws": "block"}}, TWO, "step 1: the loss", ""),
    "features in another order": (DP, TWO, HEAD, "the same numbers in another order"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.at_most(5)
def test_a_mistake_is_named(ranks, tmp_path: Path, name: str) -> None:
    keys, dims, begin, end = MISTAKES[name]
    verdict = verified(small_gpt(**{"optim": ADAMW, **keys}), tmp_path / "run", ranks, name, **dims)
    assert verdict.difference is not None
    words = verdict.difference.in_words
    print(f"\n{words}")  # benchmarks/verification.py reads it
    assert words.startswith(begin), words
    assert words.endswith(end), words


def test_a_save_goes_on_in_another_layout(ranks, tmp_path: Path) -> None:
    keys = small_gpt(**{**SPEAKER, "zero": 2, "optim": ADAMW, "checkpoint": {"every": 2}})
    folder, later = tmp_path / "run", tmp_path / "later"
    ranks(2).run(recorded, keys, str(folder), {"dp": 2})
    saved = {"folder": f"{folder}/checkpoints", "step": 2}
    ranks(1).run(recorded, {**keys, "zero": 0}, str(later), {"dp": 1}, saved)
    verdict = verdict_of(folder, later)
    assert verdict.agrees, verdict
    assert verdict.steps == 4 + 2


@pytest.mark.thorough
def test_a_save_that_is_changed_is_named(ranks, tmp_path: Path) -> None:
    keys = small_gpt(**{"zero": 2, "optim": ADAMW, "checkpoint": {"every": 2}})
    folder, later = tmp_path / "run", tmp_path / "later"
    ranks(2).run(recorded, keys, str(folder), {"dp": 2})
    saved = {"folder": f"{folder}/checkpoints", "step": 2}
    ranks(1).run(recorded, keys, str(later), {"dp": 1}, saved, "other initial values")
    difference = verdict_of(folder, later).difference
    assert difference is not None
    assert (difference.step, difference.what, difference.name) == (2, "save", "tokens.weight")


@pytest.mark.thorough
def test_buffers_that_are_lost_are_seen_at_once(ranks, tmp_path: Path) -> None:
    keys = small_gpt(**{**SPEAKER, "zero": 2, "optim": ADAMW, "checkpoint": {"every": 2}})
    folder, later = tmp_path / "run", tmp_path / "later"
    ranks(2).run(recorded, keys, str(folder), {"dp": 2})
    saved = {"folder": f"{folder}/checkpoints", "step": 2}
    ranks(1).run(recorded, keys, str(later), {"dp": 1}, saved, "statistics are lost")
    difference = verdict_of(folder, later).difference
    assert difference is not None
    assert (difference.step, difference.what, difference.name) == (2, "save", "norm.running_mean")


@pytest.mark.thorough
def test_steps_that_are_all_skipped_prove_nothing(ranks, tmp_path: Path) -> None:
    precision = {"compute": "fp16", "loss_scale": {"init": 2.0**100}}
    keys = small_gpt(precision=precision, guards={"max_nonfinite": 100})
    assert verified(keys, tmp_path / "run", ranks).why_not.startswith("every step was skipped")


class Walked(torch.utils.data.IterableDataset[Any]):
    """Tokens in an order that is drawn, before the first one is asked for."""

    def __iter__(self) -> Any:
        tokens = Plain()
        order = torch.randperm(len(tokens)).tolist()
        return iter([tokens[index] for index in order])


class Several(Plain):
    """Reads several samples at once, and draws for all of them."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        shift = int(torch.randint(VOCAB, ()))
        samples = [self[index] for index in indices]
        return [{**s, "input_ids": (s["input_ids"] + shift) % VOCAB} for s in samples]


def masked(samples: list[Any]) -> Any:
    """A batch of which a few tokens are replaced."""
    batch = torch.utils.data.default_collate(samples)
    is_masked = torch.rand(batch["input_ids"].shape) < 0.2
    return {**batch, "input_ids": batch["input_ids"].masked_fill(is_masked, 0)}


@pytest.mark.parametrize("data", ["Walked", "Several", "Plain"])
@pytest.mark.at_most(1)
def test_data_are_read_as_in_training(ranks, tmp_path: Path, data: str) -> None:
    section = {
        "call": f"verification/test_verification.py:{data}",
        "collate": "verification/test_verification.py:masked",
        "shuffle": data != "Walked",
        "workers": int(data == "Plain"),
    }
    verdict = verified(
        small_gpt(data=section, batch={"global": 8, "micro": 2}), tmp_path, ranks, dp=2
    )
    assert verdict.agrees, (verdict.difference and verdict.difference.in_words, verdict.why_not)


@pytest.mark.thorough
def test_moments_that_are_lost_are_seen_in_the_next_update(ranks, tmp_path: Path) -> None:
    keys = small_gpt(**{"zero": 2, "optim": ADAMW, "checkpoint": {"every": 2}})
    folder, later = tmp_path / "run", tmp_path / "later"
    ranks(2).run(recorded, keys, str(folder), {"dp": 2})
    saved = {"folder": f"{folder}/checkpoints", "step": 2}
    ranks(1).run(recorded, keys, str(later), {"dp": 1}, saved, "moments are lost")
    difference = verdict_of(folder, later).difference
    assert difference is not None
    assert (difference.step, difference.what) == (3, "update")


class Unsteady(Plain):
    """Tokens that are others each time they are read, made, or in each process."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self._how = how
        self._own = random.Random(0)
        self._made = {
            "made": torch.initial_seed() + int(torch.randint(2**31, ())),
            "process": os.getpid(),
        }.get(how, 0)

    def _seed(self, index: int) -> int:
        if self._how == "own generator":
            return self._own.getrandbits(60)
        if self._how == "clock":
            return time.time_ns()
        if self._how == "clock in seconds":
            return int(time.time())
        if self._how == "no seed" or (self._how == "later" and index >= 8):
            return random.SystemRandom().getrandbits(60)
        return self._made

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        generator = torch.Generator().manual_seed(self._seed(index))
        shift = torch.randint(VOCAB, sample["input_ids"].shape, generator=generator)
        return {**sample, "input_ids": (sample["input_ids"] + shift) % VOCAB}


def unsteady_batch(samples: list[Any]) -> Any:
    """A batch with a shift that nothing seeds."""
    batch = torch.utils.data.default_collate(samples)
    shift = random.SystemRandom().randrange(VOCAB)
    return {**batch, "input_ids": (batch["input_ids"] + shift) % VOCAB}


EACH_READ = "the data are not the same each time they are read: sample {} of the data set, read"
UNSTEADY = {
    "own generator": EACH_READ.format(0),
    "no seed": EACH_READ.format(0),
    "clock": EACH_READ.format(0),
    "clock in seconds": "the data are not the same each time they are read: ",
    "later": EACH_READ.format(8),
    "made": "the data set is not the same each time it is made: the batch of positions",
    "process": "the data set is not the same in each process: the batch of positions",
    "collate": "the data are not the same each time they are read: the batch of positions 0 to 1",
}


@pytest.mark.parametrize("how", UNSTEADY)
@pytest.mark.at_most(3)
def test_data_that_differ_from_themselves_are_told(ranks, tmp_path: Path, how: str) -> None:
    data: dict[str, Any] = {
        "call": "verification/test_verification.py:Unsteady",
        "args": {"how": how},
    }
    if how == "collate":
        data = {
            "call": "runs.py:Plain",
            "collate": "verification/test_verification.py:unsteady_batch",
        }
    keys = small_gpt(data={**data, "shuffle": False}, batch={"global": 8, "micro": 2})
    found = ranks(2).run(recorded, keys, str(tmp_path / "run"), {"dp": 2})
    assert {each["error"] for each in found} == {""}
    if how == "clock in seconds":
        time.sleep(1)
    verdict = verdict_of(tmp_path / "run")
    assert verdict.difference is None
    assert verdict.why_not.startswith(UNSTEADY[how])


def test_a_model_that_differs_from_itself_is_told(ranks, tmp_path: Path) -> None:
    model = {"call": "between_linears.py:Fickle", "args": {"function": "gelu"}}
    verdict = verified(small_gpt(model=model), tmp_path / "run", ranks)
    assert verdict.why_not.startswith(
        "the model is not deterministic: with the same values, batch and seeds, the loss of the "
    )


def test_a_factory_that_differs_from_itself_is_told(ranks, tmp_path: Path) -> None:
    verdict = verified(
        small_gpt(model="verification/test_verification.py:drawn_anywhere"), tmp_path / "run", ranks
    )
    assert verdict.why_not.startswith("the model's factory makes other values each time")


def drawn_anywhere() -> nn.Module:
    """A model whose values come from a generator that no seed sets."""
    model = Model("gelu")
    with torch.no_grad():
        generator = torch.Generator()
        generator.seed()
        model.head.bias.copy_(torch.rand(VOCAB, generator=generator))
    return model
