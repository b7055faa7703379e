"""A loop of the user's own is compared with a plain model, call by call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from own_loop import start
from runs import Speaker, Tokens

import zrun_core


def build() -> Speaker:
    return Speaker(depth=3)


class Ranked(Speaker):
    """Hands on half of what it should, on the second rank."""

    def __init__(self, *, is_odd: bool) -> None:
        super().__init__(depth=3)
        self.factor = 0.5 if is_odd else 1.0

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return super().forward(**batch) * self.factor


class Talkative(Speaker):
    """Returns its loss, and by itself what the loss is made of, twice."""

    def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(batch["input_ids"])
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        flat = logits.flatten(0, 1), batch["labels"].flatten()
        return {"loss": torch.nn.functional.cross_entropy(*flat), "logits": logits, "again": logits}


def scaled() -> tuple[int, str]:
    """Steps of a model that returns more than its loss, in fp16, of which one is dropped."""
    run = start()
    model = zrun_core.shard(Talkative, precision="fp16", zero=2)
    optimizer = zrun_core.optimizer(model, "adamw", lr=1e-2)
    scaler = zrun_core.GradScaler(init_scale=128.0)
    data = Tokens()
    try:
        with zrun_core.verify(model, Talkative) as seen:
            for step in range(3):
                rows = [data[4 * step + 2 * run.rank + i] for i in range(2)]
                batch = torch.utils.data.default_collate(rows)
                scaler.scale(model(**batch)["loss"]).backward()
                optimizer.zero_grad()
                outputs = model(**batch)
                scaler.scale(outputs["loss"] + 0.01 * outputs["logits"].mean()).backward()
                scaler.step(optimizer)
                scaler.update()
    except zrun_core.ZrunError as error:
        return seen.steps, str(error)
    return seen.steps, ""


def test_outputs_that_are_made_of_each_other_and_a_scaler(ranks) -> None:
    assert set(ranks(2).run(scaled)) == {(3, "")}


def loop(fault: str, **options: Any) -> tuple[int, float, str]:
    """Two steps of two calls each; the steps that agreed, the worst difference, and the error."""
    run = start()
    factory: Callable[[], Speaker] = build
    if fault == "rank":
        factory = partial(Ranked, is_odd=run.rank == 1)
    model = zrun_core.shard(factory, accumulate=2, **options)
    optimizer = zrun_core.optimizer(model, "adamw", lr=1e-2, clip=1.0)
    data = Tokens()
    if fault == "hook":
        name = "head.weight" if options["zero"] else "embed.weight"
        model.get_parameter(name).register_hook(lambda grad: grad * 1.5)
    made = (lambda: Ranked(is_odd=False)) if fault == "rank" else build
    with zrun_core.verify(model, made) as seen:
        try:
            for step in range(2):
                for call in range(2):
                    rows = [data[8 * step + 4 * call + 2 * run.rank + i] for i in range(2)]
                    loss = model(**torch.utils.data.default_collate(rows))
                    loss.backward()
                optimizer.step()
        except zrun_core.ZrunError as error:
            return seen.steps, seen.worst, f"{int(error.exit_code)} {error}"
    return seen.steps, seen.worst, ""


def in_job(kind: str, fault: str) -> tuple[int, float, str]:
    options: dict[str, Any] = {
        "stage 0": {"zero": 0},
        "stage 3": {"zero": 3},
        "bf16": {"zero": 2, "precision": "bf16"},
        "recomputed": {"zero": 3, "activations": {"checkpoint": "full"}},
        "host": {"zero": 1, "offload": "host"},
    }[kind]
    return loop(fault, **options)


@pytest.mark.parametrize("kind", ["stage 0", "stage 3", "bf16", "recomputed", "host"])
@pytest.mark.at_most(3)
def test_a_right_loop_agrees(ranks, kind: str) -> None:
    for steps, worst, error in ranks(2).run(in_job, kind, ""):
        assert (steps, error) == (2, "")
        assert worst < (1e-5 if kind != "bf16" else 0.1)


@pytest.mark.parametrize("fault", ["rank", "hook"])
def test_a_difference_is_named_on_all_ranks(ranks, fault: str) -> None:
    told = {each[2] for each in ranks(2).run(in_job, "stage 0", fault)}
    assert len(told) == 1
    assert told.pop().startswith("11 verify(): step 1: the gradient of ")


def another() -> str:
    start()
    model = zrun_core.shard(build)
    zrun_core.optimizer(model, "adamw")
    with (
        pytest.raises(zrun_core.ZrunError) as caught,
        zrun_core.verify(model, lambda: Speaker(depth=2)),
    ):
        pass
    return str(caught.value)


def test_another_model_is_refused(ranks) -> None:
    (told,) = ranks(1).run(another)
    assert "verify(): the plain model is a different model: only one of the two has blocks." in told
