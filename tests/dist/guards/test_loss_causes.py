"""Ranks that share layers and compute different losses are told why, as far as that is known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from between_linears import PLAN
from small_jobs import on_axes, small
from toys import world

from zrun_core.guards.loss_causes import Known, RankTold, in_words


class Odd:
    """A loss that some ranks compute otherwise."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.count = 0
        self.generator = torch.Generator().manual_seed(world()[0])

    def __call__(self, model: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(**batch)
        is_odd = world()[0] == 1
        self.count += 1
        if self.how == "own generator":
            loss = loss * (1 + 0.01 * torch.rand((), generator=self.generator))
        if self.how == "draws on one":
            loss = loss * (1 + 0.01 * torch.rand(()))
            if is_odd:
                torch.rand(())
        if self.how == "in training" and model.training and is_odd:
            loss = loss * 1.5
        if self.how == "late" and self.count > 3 and is_odd:
            loss = loss + 0.1
        return loss


TOLD: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "own generator": (
        {"guards": {"check_values": False}},
        "step 1",
        ["that of rank 1 (", "loss.generator, a random generator of your own, stands elsewhere on"],
    ),
    "draws on one": (
        {},
        "step 1",
        ["the generator of torch stands elsewhere on each of them: som"],
    ),
    "in training": (
        {},
        "step 1",
        ["their random streams are alike; before training the first mic"],
    ),
    "late": (
        {"batch": {"global": 2, "micro": 2}},
        "step 4",
        ["and losses were equal until now: ", "; parameters that they hold whole are equal still"],
    ),
    "in training, not compared": (
        {"guards": {"check_values": False}},
        "step 1",
        ["before training, as guards.check_values is false: with guards.check_values: true, or by"],
    ),
}


@pytest.mark.parametrize("how", TOLD)
@pytest.mark.at_most(2)
def test_why_losses_differ_is_told(ranks, tmp_path: Path, how: str) -> None:
    keys, when, words = TOLD[how]
    loss = {"call": "guards/test_loss_causes.py:Odd", "args": {"how": how.partition(",")[0]}}
    model = {"call": "between_linears.py:Model", "args": {"function": "gelu"}}
    parallel = {"tp": 2, "plan": PLAN}
    job = small(**{"model": model, "parallel": parallel, "loss": loss, "steps": 5, **keys})
    found = on_axes(job, tmp_path, ranks)
    assert [each["code"] for each in found] == [10, 10]
    for each in found:
        begin = f"in {when} ranks that share layers (parallel.tp) computed different losses for the"
        assert begin in each["error"]
        for fragment in words:
            assert fragment in each["error"], each["error"]


def told(*losses: float, streams: str = "aaaa", own: str = "") -> list[dict[int, RankTold]]:
    pairs = zip(losses, streams, strict=False)
    return [
        {
            rank: RankTold([loss], {"torch": stream}, {"blocks.0.noise": own[rank]} if own else {})
            for rank, (loss, stream) in enumerate(pairs)
        }
    ]


CASES = [
    (told(1.0, 1.0, 1.5, 1.0), Known(True, "", ""), "that of rank 2 is 0.5 (relative) off"),
    (told(1.0, 1.0, 1.5, 1.0), Known(True, "", ""), "one rank alone differs, though each has an"),
    (told(1.0, 1.1, 1.2, 1.3), Known(True, "", ""), "that of rank 1 and 2 more is 0.1 (relative)"),
    (told(1.0, 1.1, own="xy"), Known(True, "", ""), "blocks.0.noise, a random generator of your"),
    (told(1.0, 1.1, streams="ab"), Known(True, "", ""), "the generator of torch stands elsewhere"),
    (told(1.0, 1.1), Known(True, "its forward fails", ""), "as its forward fails: with guards.ch"),
    (told(1.0, 1.1), Known(True, "", "x"), "look at what is computed in training alone"),
    (told(1.0, 1.1), Known(True, "", ""), "it is a term made of slices alone, as a penalty"),
    (
        told(1.0, 1.1),
        Known(
            False, "", "step 3: replicas diverged: rank 1 has another parameter norm.weight t; x"
        ),
        "hook has written; rank 1 has another parameter norm.weight t, by this step or before it",
    ),
    (told(math.nan, 1.0), Known(True, "", ""), "their random streams are alike; "),
]


@pytest.mark.parametrize(("groups", "known", "words"), CASES)
def test_what_is_known_decides_what_is_advised(
    groups: list[dict[int, RankTold]], known: Known, words: str
) -> None:
    assert words in in_words(groups, known)
