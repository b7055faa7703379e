"""Models of transformers as they come, with nothing switched off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_library import start
from test_zoo import GLOBAL, HERE, OPTIM, STEPS, Run, plain, same, train

import zrun_core
from zrun_core.config import JobConfig
from zrun_core.plan.tracing import trace_job

pytest.importorskip("transformers")

import pretrained

LLAMA = "LlamaForCausalLM"
DROPS = ("GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration")  # out of some activations, at random


def keys_of(name: str, checkpoint: str, stage: int, factory: str = "build", **more: Any) -> dict[str, Any]:
    return {
        "model": {"call": f"pretrained.py:{factory}", "args": {"name": name}},
        "data": "pretrained.py:Texts",
        "activations": {"checkpoint": checkpoint},
        "zero": {"stage": stage},
        **more,
    }


def train_all(jobs: list[dict[str, Any]], run_dir: str) -> list[Run]:
    pretrained.SEEN.clear()
    return [{**train(job, run_dir), "seen": list(pretrained.SEEN)} for job in jobs]


@pytest.mark.parametrize("name", pretrained.SIZES)
def test_recomputed_models_train_as_a_plain_loop_does(ranks, tmp_path, name):
    jobs = [keys_of(name, "none", 0), keys_of(name, "full", 0), keys_of(name, "full", 3)]
    kept, *recomputed = (run["step"] for run in ranks(2).run(train_all, jobs, str(tmp_path))[0])
    for losses in recomputed:
        same(losses, kept)
    if name not in DROPS:
        same(kept, plain(lambda: pretrained.build(name), pretrained.Texts(), parts=2)[0])


def test_models_around_others_and_with_checkpointing_of_their_own(ranks, tmp_path):
    jobs = [
        keys_of(LLAMA, "full", 3, "Wrapped"),
        keys_of(LLAMA, "selective", 3, hooks={"on_step": "pretrained.py:look"}),
        keys_of(LLAMA, "none", 3, "own_checkpointing"),
        keys_of(LLAMA, "every_n", 3, "own_checkpointing"),
    ]
    expected, _ = plain(lambda: pretrained.build(LLAMA), pretrained.Texts(), parts=2)
    found = ranks(2).run(train_all, jobs, str(tmp_path))[0]
    for run in found:
        same(run["step"], expected)
    assert [bool(run["warnings"]) for run in found] == [False, False, True, False]  # of a ring
    kept, setting, text = found[1]["seen"][-1]
    assert (kept, setting, len(text[0])) == (True, True, 6)


def test_a_cache_that_is_asked_for_is_refused_where_blocks_are_recomputed(ranks, tmp_path):
    job = keys_of(LLAMA, "full", 0, loss="pretrained.py:asks_for_cache")
    with pytest.raises(AssertionError, match=r"UserCodeError: model\.layers\.0 is recomputed .* use_cache=False"):
        ranks(2).run(train_all, [job], str(tmp_path))


def loop() -> tuple[list[float], bool]:
    """The losses of a user's own loop, and whether the model keeps a cache outside of training."""
    run = start()
    model = zrun_core.shard(lambda: pretrained.build(LLAMA), zero=3, activations={"checkpoint": "full"})
    optimizer = zrun_core.optimizer(model, "adamw", **OPTIM)
    data, share, losses = pretrained.Texts(), GLOBAL // run.world_size, []
    for step in range(STEPS):
        first = step * GLOBAL + run.rank * share
        samples = [data[(first + i) % len(data)] for i in range(share)]
        loss = model(**torch.utils.data.default_collate(samples)).loss
        loss.backward()
        optimizer.step()
        losses.append(run.mean(loss))
    with zrun_core.evaluation(model):
        return losses, model(torch.tensor([[5, 6]])).past_key_values is not None


def test_in_a_loop_of_the_users_own(ranks):
    expected, _ = plain(lambda: pretrained.build(LLAMA), pretrained.Texts(), parts=2)
    for losses, keeps in ranks(2).run(loop):
        same(losses, expected)
        assert keeps


def test_a_plan_is_traced_as_the_model_trains():
    """Recomputed without a cache, and with one where nothing is recomputed."""
    traces = {}
    for setting in (True, False):
        keys = keys_of(LLAMA, "none", 0)
        keys["model"]["args"]["use_cache"] = setting
        job = JobConfig.model_validate({"name": "t", "steps": 1, "batch": GLOBAL, **keys})
        traces[setting] = trace_job(job, HERE, checkpoints=("full", "none")).traces
    assert traces[True]["full"] == traces[False]["full"]
    assert traces[True]["none"] != traces[False]["none"]
