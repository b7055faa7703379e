"""Models of transformers as they come, with nothing switched off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from own_loop import start
from runs import JOB_DIR
from torch import nn
from zoo_runs import GLOBAL, OPTIM, STEPS, Run, plain, same, train

import zrun_core
from zrun_core.checkpoint.export import export
from zrun_core.checkpoint.folder import read_step
from zrun_core.checkpoint.model_files import describe, tokenizer_files
from zrun_core.checkpoint.verify import verify
from zrun_core.errors import CheckpointError
from zrun_core.plan.trace.tracer import trace_job
from zrun_core.spine.config import JobConfig

transformers = pytest.importorskip("transformers")

import pretrained  # noqa: E402

LLAMA = "LlamaForCausalLM"
AUTO = {
    "BertForMaskedLM": "AutoModelForMaskedLM",
    "T5ForConditionalGeneration": "AutoModelForSeq2SeqLM",
}
DROPS = (
    "GPT2LMHeadModel",
    "BertForMaskedLM",
    "T5ForConditionalGeneration",
)  # out of some activations, at random


def keys_of(
    name: str, policy: str, stage: int, factory: str = "build", **more: Any
) -> dict[str, Any]:
    return {
        "model": {"call": f"pretrained.py:{factory}", "args": {"name": name}},
        "data": "pretrained.py:Texts",
        "activations": {"checkpoint": policy},
        "zero": {"stage": stage},
        **more,
    }


def train_all(jobs: list[dict[str, Any]], run_dir: str) -> list[Run]:
    pretrained.SEEN.clear()
    found = []
    for number, job in enumerate(jobs):
        folder = Path(run_dir, str(number))
        folder.mkdir(exist_ok=True)
        found.append({**train(job, str(folder)), "seen": list(pretrained.SEEN)})
    return found


@pytest.mark.parametrize("name", list(pretrained.SIZES)[::-1])
@pytest.mark.thorough
def test_recomputed_models_train_as_a_plain_loop_does_and_are_exported(ranks, tmp_path, name):
    saved = keys_of(name, "full", 3, checkpoint={"every": STEPS})
    jobs = [keys_of(name, "none", 0), keys_of(name, "full", 0), saved]
    kept, *recomputed = (run["step"] for run in ranks(2).run(train_all, jobs, str(tmp_path))[0])
    for losses in recomputed:
        same(losses, kept)
    if name not in DROPS:
        same(kept, plain(lambda: pretrained.build(name), pretrained.Texts(), parts=2)[0])
    step = tmp_path / "2" / "checkpoints" / f"step-{STEPS:08d}"
    loads(step, tmp_path, pretrained.build(name))


def loads(step: Path, tmp_path: Path, plain_model: nn.Module) -> None:
    """`from_pretrained` makes of an exported folder what a strict load makes of the state_dict."""
    manifest = read_step(step)
    files = export(step, manifest, tmp_path / "hub", max_shard_bytes=10_000)
    assert {"config.json", "model.safetensors.index.json"} <= {file.name for file in files}
    (state,) = export(step, manifest, tmp_path / "state.pt")
    plain_model.load_state_dict(torch.load(state))
    inner = getattr(plain_model, "inner", plain_model)
    theirs, told = type(inner).from_pretrained(tmp_path / "hub", output_loading_info=True)
    assert not any(told.values()), told
    automatic = AUTO.get(type(inner).__name__, "AutoModelForCausalLM")
    others = [theirs, getattr(transformers, automatic).from_pretrained(tmp_path / "hub")]
    ids = torch.arange(3, 13).view(1, 10)
    asked = {"input_ids": ids}
    if inner.config.is_encoder_decoder:
        asked["decoder_input_ids"] = ids
    with torch.no_grad():
        logits = [model.eval()(**asked).logits for model in (inner, *others)]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    assert theirs.config.use_cache == inner.config.use_cache
    if theirs.can_generate():
        assert theirs.generation_config == inner.generation_config
    config = step / "config.json"
    config.write_bytes(config.read_bytes().replace(b"true", b"True", 1))
    assert [problem for problem in verify(step, manifest) if "config.json is damaged" in problem]
    with pytest.raises(CheckpointError, match=r"config\.json is damaged"):
        export(step, manifest, tmp_path / "damaged")
    config.write_bytes(config.read_bytes().replace(b"True", b"true", 1))
    export(step, manifest, tmp_path / "half", "bf16")
    assert type(inner).from_pretrained(tmp_path / "half").dtype == torch.bfloat16


@pytest.mark.thorough
def test_models_around_others_and_with_checkpointing_of_their_own(ranks, tmp_path):
    jobs = [
        keys_of(LLAMA, "full", 3, "Wrapped", checkpoint={"every": STEPS}),
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
    step = tmp_path / "0" / "checkpoints" / f"step-{STEPS:08d}"
    loads(step, tmp_path, pretrained.Wrapped(LLAMA))
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "hub")
    assert reader("AB")["input_ids"] == [33, 34]


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (
            lambda: nn.Linear(2, 2),
            "of torch.nn.modules.linear.Linear, which is not a model of transformers",
        ),
        (
            lambda: pretrained.WithHead(LLAMA),
            "LlamaForCausalLM, which does not contain head.weight",
        ),
        (
            pretrained.adapted,
            "LlamaForCausalLM, with model.layers.0.self_attn.q_proj added to it (Adapted)",
        ),
    ],
)
def test_models_that_transformers_cannot_load_are_exported_without_a_config(model, why):
    found = describe(model(), {"tokenizer.json": b"{}"})
    assert not found.files
    assert f"of {found.model.class_name}, {found.model.obstacle}".endswith(why)


def test_a_cache_that_is_asked_for_is_refused_where_blocks_are_recomputed(ranks, tmp_path):
    job = keys_of(LLAMA, "full", 0, loss="pretrained.py:asks_for_cache")
    with pytest.raises(
        AssertionError, match=r"UserCodeError: model\.layers\.0 is recomputed .* use_cache=False"
    ):
        ranks(2).run(train_all, [job], str(tmp_path))


class Awkward:
    """What looks like it has a tokenizer, and raises."""

    @property
    def tokenizer(self) -> None:
        raise RuntimeError("it is not there yet")


def test_the_first_tokenizer_that_can_be_saved_is_taken():
    assert tokenizer_files([Awkward(), None, object()]) == {}
    found = tokenizer_files([Awkward(), pretrained.Texts()])
    assert {"tokenizer.json", "tokenizer_config.json"} <= found.keys()


def loop(folder: str) -> tuple[list[float], bool]:
    """The losses of a user's own loop, and whether the model keeps a cache outside of training."""
    run = start()
    model = zrun_core.shard(
        lambda: pretrained.build(LLAMA), zero=3, activations={"checkpoint": "full"}
    )
    optimizer = zrun_core.optimizer(model, "adamw", **OPTIM)
    data, share, losses = pretrained.Texts(), GLOBAL // run.world_size, []
    for step in range(STEPS):
        first = step * GLOBAL + run.rank * share
        samples = [data[(first + i) % len(data)] for i in range(share)]
        loss = model(**torch.utils.data.default_collate(samples)).loss
        loss.backward()
        optimizer.step()
        losses.append(run.mean(loss))
    zrun_core.save(folder, model, step=STEPS)
    with zrun_core.evaluation(model):
        return losses, model(torch.tensor([[5, 6]])).past_key_values is not None


def test_in_a_loop_of_the_users_own(ranks, tmp_path):
    expected, _ = plain(lambda: pretrained.build(LLAMA), pretrained.Texts(), parts=2)
    for losses, keeps in ranks(2).run(loop, str(tmp_path / "saved")):
        same(losses, expected)
        assert keeps
    loads(tmp_path / "saved" / f"step-{STEPS:08d}", tmp_path, pretrained.build(LLAMA))


@pytest.mark.thorough
def test_a_plan_is_traced_as_the_model_trains():
    """Without a cache, whatever the config says of it."""
    traces = {}
    for setting in (True, False):
        keys = keys_of(LLAMA, "none", 0)
        keys["model"]["args"]["use_cache"] = setting
        job = JobConfig.model_validate({"name": "t", "steps": 1, "batch": GLOBAL, **keys})
        traces[setting] = trace_job(job, JOB_DIR, checkpoints=("full", "none")).traces
    assert traces[True] == traces[False]
