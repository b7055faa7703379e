"""`zrun check` refuses what ranks with parts of a model would, and the first evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zrun_core.errors import JobError
from zrun_core.plan.trace.parts_check import check_division, check_parts
from zrun_core.plan.trace.sample_batches import SampleBatches, samples_of
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.section import Ref
from zrun_core.user_code import user

HERE = Path(__file__).parent
MODELS = HERE.parents[1] / "dist"  # has models as users write them


def job(model: Any, data: str = "zoo.py:vectors", **keys: Any) -> JobConfig:
    call, args = (model, {}) if isinstance(model, str) else model
    return JobConfig.model_validate(
        {
            "name": "t",
            "model": {"call": call, "args": args},
            "data": data,
            "steps": 1,
            "batch": {"global": 4, "micro": 2},
            "parallel": {"pp": 2},
            **keys,
        }
    )


def of_transformers(name: str, **settings: Any) -> Any:
    return "pretrained.py:build", {"name": name, **settings}


def once(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, float]:
    """Metrics that look at values, as those of the last stage may."""
    return {"mean": model(**batch).logits.mean().item()}


def twice(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"spread": (model(**batch).logits - model(**batch).logits).abs().mean()}


def of_all_layers(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A loss, or metrics, that looks at what a layer returns."""
    found = model(**batch, output_hidden_states=True)
    return found.loss + found.hidden_states[2].square().mean()


def metrics_of_all_layers(
    model: nn.Module, batch: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    return {"size": of_all_layers(model, batch)}


EVAL = {"data": "pretrained.py:Texts", "metrics": f"{__file__}:once"}
TEXTS = "pretrained.py:Texts"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.at_most(1)
def test_a_mixture_is_cut_divided_and_evaluated(
    precision: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = of_transformers("MixtralForCausalLM")
    parts = {"tp": 2, "pp": 2}
    keys = job(model, TEXTS, precision=precision, parallel=parts, eval=EVAL)
    assert check_parts(keys, MODELS) == []
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            job(of_transformers("MixtralForCausalLM", output_router_logits=True), TEXTS),
            "write model.config.output_router_logits = False where the model is made, or pp: 1",
        ),
        (
            job(of_transformers("LlamaForCausalLM"), TEXTS, loss=f"{__file__}:of_all_layers"),
            "what all layers return (output_hidden_states), and a stage has that of its own blocks "
            "alone: leave it out of the call, write model.config.output_hidden_states = False",
        ),
        (
            job(
                of_transformers("LlamaForCausalLM"),
                TEXTS,
                eval={**EVAL, "metrics": f"{__file__}:metrics_of_all_layers"},
            ),
            "the forward asks for what all layers return (output_hidden_states)",
        ),
        (job("pipeline_zoo.py:ByAttribute"), "return it from blocks.0"),
        (job("pipeline_zoo.py:LooksAtValues"), "looks at values of hidden states"),
        (
            job(
                of_transformers("LlamaForCausalLM"),
                TEXTS,
                eval={**EVAL, "metrics": f"{__file__}:twice"},
            ),
            "the evaluation of eval.data calls model.embed_tokens in place of nothing more",
        ),
    ],
)
def test_what_a_stage_would_refuse(keys: JobConfig, words: str) -> None:
    with pytest.raises(JobError) as error:
        check_parts(keys, MODELS)
    assert str(error.value).startswith("parallel.pp: ")
    assert words in str(error.value)


def narrow(**keys: Any) -> JobConfig:
    """A mixture of which each rank has rows of eight bytes."""
    settings = {"name": "MixtralForCausalLM", "intermediate_size": 8, **keys.pop("settings", {})}
    model = "pipeline_zoo.py:transformer", settings
    return job(model, TEXTS, precision="bf16", **keys)


def test_experts_whose_slices_are_too_narrow_for_a_kernel() -> None:
    with pytest.raises(JobError) as error:
        check_parts(narrow(parallel={"tp": 2}), MODELS)
    assert (
        "fails: strides should be multiple of 16 bytes; the kernel that computes all experts at "
        "once takes rows of such a length only: write a width of experts that 16 divides (in fp32 "
        '8), model.config.experts_implementation = "eager" where the model is made, or '
        "model.layers.*.mlp.experts: whole in parallel.plan"
    ) in str(error.value)
    whole = {"tp": 2, "plan": {"model.layers.*.mlp.experts": "whole"}}
    assert check_parts(narrow(parallel=whole), MODELS) == []
    eager = {"experts_implementation": "eager"}
    (note,) = check_parts(narrow(parallel={"tp": 2}, settings=eager), MODELS)
    assert "not checked before training" in note, "it looks at which tokens an expert has"


def test_data_that_is_not_here_is_no_mistake_of_the_job() -> None:
    keys = job("pipeline_zoo.py:Regression", "zoo.py:no_such_data")
    (note,) = check_parts(keys, MODELS)
    assert note.startswith("parallel: not tried on a first batch, as the data was not read: ")


CALLS: list[int] = []


class Block(nn.Module):
    """A column and a row linear, which may be used without being called; counts its calls."""

    def __init__(self, number: int, calls_down: bool) -> None:
        super().__init__()
        self.up = nn.Linear(24, 16)
        self.down = nn.Linear(16, 24)
        self._number = number
        self._calls_down = calls_down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS.append(self._number)
        hidden = self.up(x).relu()
        if self._calls_down:
            return x + self.down(hidden)
        return x + nn.functional.linear(hidden, self.down.weight)


class Tower(nn.Module):
    def __init__(self, unlike: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number, number != unlike) for number in range(12))

    def forward(self, x: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def tower(unlike: int) -> tuple[JobConfig, SampleBatches]:
    roles = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    found = job(
        (f"{__file__}:Tower", {"unlike": unlike}), parallel={"tp": 2, "plan": roles}, batch=4
    )
    return found, samples_of(found, MODELS)


def test_of_many_alike_blocks_few_run() -> None:
    found, samples = tower(unlike=-1)
    calls = user.load(Ref(call=f"{__file__}:CALLS"), MODELS)  # the file is imported anew
    for few, expected in ((False, {*range(12)}), (True, {0, 1, 2, 11})):
        calls.clear()
        assert check_division(found, MODELS, samples, 2, few_blocks=few) == []
        assert set(calls) == expected


def test_what_few_blocks_refuse_is_told_of_the_block_that_it_is() -> None:
    found, samples = tower(unlike=11)
    with pytest.raises(JobError, match=r"blocks\.11\.down"):
        check_division(found, MODELS, samples, 2, few_blocks=True)
