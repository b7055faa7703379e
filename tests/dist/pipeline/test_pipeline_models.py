"""Models as users write them, in a pipeline: the bits of no pipeline, or a refusal before a step.

Each runs on two stages, the cases in turn with other schedules and ZeRO stages; all of them for
some models: `make test-pipelines`.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from pipeline_table import MODELS, SGD, compared
from pipeline_zoo import Regression
from runs import job, losses, run
from safetensors.torch import save_file
from small_jobs import NO_DROPOUT, on_axes, small_gpt, transformer
from torch import nn

from zrun_core.user_code import meta_init
from zrun_core.user_code.meta_init import _reset

OPTIM = {"lr": 1e-2, "weight_decay": 0.1, "clip": 1.0}
WAYS = cycle(
    (schedule, stage)
    for stage in (3, 0, 2, 1)
    for schedule in ("1f1b", "interleaved", "zero_bubble", "gpipe")
)


class Case(NamedTuple):
    """A job.

    Attributes:
        keys: of it.
        close: why it has not the same bits; empty: it has.
        refused: the beginning of what is said of it in place of training.
    """

    keys: dict[str, Any]
    close: str = ""
    refused: str = ""


def case(model: str, *, close: str = "", refused: str = "", **more: Any) -> Case:
    """Return a case with a model of `pipeline_zoo.py`."""
    args = more.pop("args", {})
    keys = {"model": {"call": f"pipeline_zoo.py:{model}", "args": args}, "data": "zoo.py:vectors"}
    return Case({**keys, **more}, close, refused)


def in_zoo(model: str, data: str, close: str = "", refused: str = "", **more: Any) -> Case:
    """Return a case with a model of `zoo.py`."""
    args = more.pop("args", {})
    keys = {"model": {"call": f"zoo.py:{model}", "args": args}, "data": f"zoo.py:{data}"}
    return Case({**keys, **more}, close, refused)


TIED = "two stages add up the gradient of a parameter apart"
AROUND = "gradients of what goes around a border are added up in another order"
UNITS = "the gradient's norm is made of the norms of units, which stages cut elsewhere"
VALUES = "the model's forward looks at values of hidden states"
WRITTEN = "what {} returns is written to in place before it comes to what follows the blocks"
HIDDEN = "blocks.{} hands a tensor to what follows the blocks other than as its result"
CASES: dict[str, Case] = {
    "plain": case("Regression"),
    "blocks in a Sequential": case("Sequential"),
    # what blocks are given and hand out
    "tuples": case("Containers", args={"kind": "tuple"}),
    "dicts": case("Containers", args={"kind": "dict"}),
    "named tuples": case("Containers", args={"kind": "named tuple"}),
    "dataclasses": case("Containers", args={"kind": "dataclass"}),
    "keywords and a buffer": case("Keywords"),
    # ways around blocks
    "u-net": case("UNet"),
    "residuals outside": case("ResidualOutside", close=AROUND),
    "stem and scalars in each block": case("Deep", close=TIED, optim=SGD, parallel={"pp": 2}),
    "scalars in several chunks": case(
        "Deep",
        parallel={"pp": 2, "schedule": "interleaved"},
        refused="parallel.virtual: chunks 0 and 2 of stage 0 both use",
    ),
    "class token": case("ClassToken"),
    "auxiliary losses returned": case("AuxiliaryReturned"),
    "by attribute": case("ByAttribute", refused=HIDDEN.format(0)),
    "by list": case("ByList", refused=HIDDEN.format(0)),
    # writes in place
    "in place": case("InPlace"),
    "residuals in place": case(
        "ResidualOutside", args={"in_place": True}, refused=WRITTEN.format("blocks.0")
    ),
    "written skip": case("WrittenSkip", refused=WRITTEN.format("stem")),
    "written skip, by data": case(
        "WrittenSkip", args={"inside": True}, refused=WRITTEN.format("stem")
    ),
    # looking at values
    "values": case("LooksAtValues", refused=VALUES),
    "values of the batch": case("LooksAtBatch"),
    "values inside of blocks": case("LooksInside"),
    "experts of transformers": Case(
        {
            **transformer("MixtralForCausalLM", num_hidden_layers=4),
            "eval": {"data": "pretrained.py:Texts", "every": 1, "samples": 8},
        }
    ),
    "experts that are called": Case(
        transformer("MixtralForCausalLM", num_hidden_layers=4, experts_implementation="eager")
    ),
    "losses of routers": Case(
        transformer("MixtralForCausalLM", num_hidden_layers=4, output_router_logits=True),
        refused="model.layers.0 hands a tensor to what follows the blocks other than as its result "
        "(collected by model.config.output_router_logits), so no stage can end between them: write "
        "model.config.output_router_logits = False where the model is made, or pp: 1",
    ),
    "experts": in_zoo("Mixture", "vectors", close=UNITS, parallel={"pp": 2}),
    # no blocks to cut between, or not in one order
    "no blocks": case("WithoutBlocks", refused="the model has no repeated blocks"),
    "called twice": case("Twice", refused="blocks.0 is called twice in a forward"),
    "not called": case("DependsOnBatch", refused="blocks.1 is not called in a forward"),
    # what does not train, or trains otherwise
    "frozen stem": case("frozen"),
    "frozen first stage": case("frozen", args={"first": 2}, parallel={"pp": 2}),
    "frozen block": case("frozen", args={"first": 1, "stem": False}),
    "lora": in_zoo("lora", "tokens", parallel={"pp": 2}),
    "batch norms": case("Normed", batch={"global": 8, "micro": 2}),
    "convolutions": in_zoo(
        "convnet",
        "images",
        loss="zoo.py:classify",
        batch={"global": 8, "micro": 4},
        parallel={"pp": 2},
    ),
    "parametrizations": case("weight_normed"),
    "torch's encoder": in_zoo("TorchEncoder", "tokens", parallel={"pp": 2}),
    "tied by use": in_zoo(
        "LanguageModel", "tokens", args={"depth": 4, "tie": "functional"}, close=TIED, optim=SGD
    ),
    "encoder and decoder": in_zoo(
        "EncoderDecoder", "pairs", close=TIED, optim=SGD, parallel={"pp": 2}
    ),
    # losses
    "a sum and its weight": case("Regression", loss="pipeline_zoo.py:weighted"),
    "a loss of the stem": case("Regression", loss="pipeline_zoo.py:with_embeddings"),
    "a loss of weights": case(
        "Regression", loss="pipeline_zoo.py:with_first_weights", close=TIED, optim=SGD
    ),
    "a penalty": case(
        "Regression", loss="zoo.py:with_penalty", close=TIED, optim=SGD, parallel={"pp": 2}
    ),
    "a penalty first": case(
        "Regression",
        loss="zoo.py:penalty_first",
        refused="blocks.0.down.bias is used outside of its module",
    ),
    "two forwards": case(
        "Regression", loss="zoo.py:twice", refused="blocks.0 is called twice in a forward"
    ),
    # batches
    "lengths differ": Case(
        {
            "model": "zoo.py:Tagger",
            "data": {"call": "zoo.py:ragged", "collate": "zoo.py:pad"},
            "loss": "zoo.py:masked_sum",
            "batch": {"global": 8, "micro": 2},
            "parallel": {"pp": 2},
        }
    ),
    "lengths of which one is given": case(
        "Resampled",
        data={"call": "pipeline_zoo.py:ragged_tokens", "collate": "zoo.py:pad", "shuffle": False},
        loss="pipeline_zoo.py:of_ids",
        close=UNITS,
        batch={"global": 8, "micro": 2},
        parallel={"pp": 2},
    ),
    "short last step": case(
        "Regression", data={"call": "zoo.py:vectors", "args": {"count": 21}}, steps=None, epochs=2
    ),
    "fewer micro-batches than stages": case("Regression", batch={"global": 2, "micro": 2}),
    # what a job does to blocks
    "recomputed": case("Regression", activations={"checkpoint": "full"}),
    "recomputed in part": case("Regression", activations={"checkpoint": "selective"}),
    "every second one": case("Regression", activations={"checkpoint": "every_n", "n": 2}),
    "the user's checkpoints": case("Checkpointing", args={"reentrant": False}),
    "reentrant checkpoints": case(
        "Checkpointing", args={"reentrant": True}, refused="blocks.0 runs without gradients"
    ),
    "bf16": case("Regression", precision="bf16"),
    "fp16 that overflows": case(
        "Regression", precision={"compute": "fp16", "loss_scale": {"init": 2.0**40}}
    ),
    **{
        name: Case(
            {
                **model.keys,
                **({"optim": SGD} if model.tied else {}),
                **({"parallel": {"pp": 2}} if model.refused else {}),
            },
            close=TIED if model.tied else "",
        )
        for name, model in MODELS.items()
    },
    "checkpoints of transformers": Case(
        {
            "model": {
                "call": "pretrained.py:own_checkpointing",
                "args": {"name": "LlamaForCausalLM"},
            },
            "data": "pretrained.py:Texts",
            "parallel": {"pp": 2},
        }
    ),
    "gradient penalty": case(
        "GradientPenalty",
        refused="gradients that the forward itself asks for, as of a gradient penalty, do not pass "
        "from one stage to another (",
    ),
}


def keys_of(case: Case, stage: int, schedule: str) -> dict[str, Any]:
    """Return the keys of a job with a pipeline."""
    keys = job(
        **{
            "steps": 3,
            "batch": {"global": 8, "micro": 1},
            "optim": OPTIM,
            "zero": stage,
            "hooks": {},
            "checkpoint": None,
            "parallel": {"pp": 2, "schedule": schedule},
            **case.keys,
        }
    )
    return {key: value for key, value in keys.items() if value is not None or key == "checkpoint"}


@pytest.mark.parametrize(
    ("name", "schedule", "stage"),
    [(name, schedule, stage) for name, (schedule, stage) in zip(CASES, WAYS, strict=False)][::-1],
)
@pytest.mark.at_most(5)
def test_model(ranks, tmp_path: Path, name: str, schedule: str, stage: int) -> None:
    case = CASES[name]
    refused = (
        case.refused if case.refused.startswith("parallel.") else f"parallel.pp: {case.refused}"
    )
    keys = keys_of(case, stage, schedule)
    many = ranks(2).run(run, keys, str(tmp_path / "many"), None, None, None, {"dp": 1, "pp": 2})
    if case.refused:
        for of_rank in many:
            assert of_rank["error"].startswith(f"JobError: {refused}")
            assert of_rank["code"] == 2
        return
    one = ranks(1).run(run, {**keys, "parallel": {}}, str(tmp_path / "one"))
    assert not one[0]["error"]
    expected = {"close", "equal"} if case.close else {"equal"}
    assert compared(one, many) in expected
    assert len(losses(one[0])) > 2


def run_counting_values(keys: dict[str, Any], run_dir: str, dims: dict[str, int]) -> dict[str, Any]:
    """As `run`; also the bytes of parameters that were given values in this process."""
    made: list[int] = []

    def reset(module: nn.Module, seed: int) -> dict[str, torch.Tensor]:
        values = _reset(module, seed)
        made.append(sum(value.nbytes for value in values.values()))
        return values

    with patch.object(meta_init, "_reset", reset):
        found = run(keys, run_dir, None, None, None, dims)
    return {**found, "made": sum(made)}


@pytest.mark.thorough
def test_only_values_of_the_own_stage_are_ever_made(ranks, tmp_path: Path) -> None:
    # The comparison of values makes those of the whole model on rank 0.
    guards = {"check_values": False}
    keys = {**keys_of(CASES["plain"], 3, "1f1b"), "init": "meta", "guards": guards}
    dims = {"dp": 1, "pp": 2}
    many = ranks(2).run(run_counting_values, keys, str(tmp_path / "many"), dims)
    one = ranks(1).run(run, {**keys, "parallel": {}}, str(tmp_path / "one"))
    assert compared(one, many) == "equal"
    for of_rank in many:
        own = [values for (_, state, _), values in of_rank["parts"].items() if state == "value"]
        assert of_rank["made"] == sum(values.nbytes for values in own)


@pytest.mark.parametrize("init", ["factory", "meta"])
@pytest.mark.at_most(1)
def test_weights_to_start_from(ranks, tmp_path: Path, init: str) -> None:
    torch.manual_seed(9)
    save_file(Regression().state_dict(), tmp_path / "model.safetensors")
    keys = {
        **keys_of(CASES["plain"], 1, "1f1b"),
        "init": init,
        "init_from": str(tmp_path / "model.safetensors"),
    }
    many = ranks(2).run(run, keys, str(tmp_path / "many"), None, None, None, {"dp": 1, "pp": 2})
    one = ranks(1).run(run, {**keys, "parallel": {}}, str(tmp_path / "one"))
    assert compared(one, many) == "equal"
    other = ranks(1).run(run, {**keys, "parallel": {}, "init_from": None}, str(tmp_path / "other"))
    assert losses(other[0]) != losses(one[0])


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    "keys",
    [
        transformer("MixtralForCausalLM", num_hidden_layers=4),
        small_gpt(),
        transformer("GPT2LMHeadModel", num_hidden_layers=4, **NO_DROPOUT),
    ],
    ids=["mixtral", "gpt", "gpt2"],
)
@pytest.mark.at_most(1)
def test_chunks_of_divided_layers(
    ranks, tmp_path: Path, keys: dict[str, Any], sequence: bool
) -> None:
    """While one chunk runs, the others of the stage are ghosts, and their layers are divided."""
    found = []
    for schedule in ("1f1b", "interleaved"):
        parallel = {"pp": 2, "tp": 2, "sequence": sequence, "schedule": schedule}
        job_keys = small_gpt(**{**keys, "parallel": parallel})
        many = on_axes(job_keys, tmp_path / schedule, ranks, dp=1, pp=2, tp=2)
        assert not [each["error"] for each in many if each["error"]]
        found.append(losses(many[0]))
    assert found[0] == found[1] != {}
