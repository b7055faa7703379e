"""Layers divided over ranks: the losses, parameters and moments of one process, to rounding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from distances import assert_close
from runs import JOB_DIR, PoolWorker, make_spec, run
from small_jobs import BERT, NO_DROPOUT, STEPS, gpt, on_axes, small, transformer
from torch import nn
from torch._subclasses import FakeTensor
from toys import world

from zrun_core.distributed.comm import CommPhase
from zrun_core.hardware.simulated import parse_simulate
from zrun_core.plan.answer.planner import Planner
from zrun_core.plan.question.candidate import Candidate
from zrun_core.plan.timing.layer_messages import Messages
from zrun_core.plan.trace.profile import Profile
from zrun_core.plan.trace.tracer import trace_job
from zrun_core.spine.config import JobConfig
from zrun_core.spine.parallel_dims import ParallelDims
from zrun_core.tensor_parallel import linear_product
from zrun_core.tensor_parallel.tensor_comm import TensorComm

TEXTS = "pretrained.py:Texts"
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"model": gpt()},
    "gpt, tied": {"model": gpt(tied=True)},
    "llama": {"model": gpt(flavour="llama", heads=4, kv_heads=2)},
    "bert": {
        "model": {
            "call": "zrun_core.models.bert:bert",
            "args": {"dim": 16, "depth": 2, "heads": 2, "vocab_size": 97, "seq_len": 12},
        },
        "data": TEXTS,
    },
    "transformers llama": transformer("LlamaForCausalLM"),
    "transformers qwen3": transformer("Qwen3ForCausalLM"),
    "transformers mistral": transformer("MistralForCausalLM"),
    "transformers gpt2": transformer("GPT2LMHeadModel", **NO_DROPOUT),
    "transformers bert": transformer("BertForMaskedLM", **BERT),
    "transformers mixtral": transformer("MixtralForCausalLM"),
    "torch": {"model": "tensor_parallel/test_tensor_parallel.py:Translator"},
}
MODELS["bert"]["model"]["args"]["dropout"] = 0.0


class Translator(nn.Module):
    """torch's own encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 16)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        x = self.embed(input_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.layers(x, x, tgt_mask=mask, src_key_padding_mask=input_ids == 3)
        return nn.functional.cross_entropy(self.out(hidden).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.at_most(2)
def test_models(ranks, tmp_path: Path, alone: Any, model: str, sequence: bool) -> None:
    keys = small(**MODELS[model], parallel={"tp": 2, "sequence": sequence})
    assert_close(on_axes(keys, tmp_path / "run", ranks), alone(keys), 1e-6)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.thorough
def test_weights_have_their_gradients_made_while_ranks_add_up(
    ranks, tmp_path: Path, sequence: bool
) -> None:
    parallel = {"tp": 2, "sequence": sequence}
    keys = small(**MODELS["llama"], parallel=parallel, zero=3)
    keys["activations"] = {"checkpoint": "full"}
    keys["guards"] = {"check_values": False}  # which makes a step of its own
    kind = "begin_reduce_scatter" if sequence else "begin_all_reduce"
    head = ["begin_all_reduce", "dw", "end"]
    mlp = [kind, "dw", "dw", "end"]
    attention = [kind, "dw", "end"]
    micro_batch = head + 4 * (mlp + attention)
    assert ranks(2).run(beside_sums, keys, str(tmp_path)) == [STEPS * 4 * micro_batch] * 2


def beside_sums(keys: dict[str, Any], run_dir: str) -> list[str]:
    """Return what backward does at the inputs of regions: sums of gradients, and products."""
    done: list[str] = []

    def logged(begin: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(comm: TensorComm, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            wait = begin(comm, tensor, *args, **options)
            if "input of" not in str((args, options)) or not _is_in_backward():
                return wait
            done.append(begin.__name__)
            return lambda: (wait(), done.append("end"))[0]

        return wrapped

    def weight_grad(*args: Any, **options: Any) -> Any:
        done.append("dw")
        return made(*args, **options)

    made = linear_product._weight_grad
    with ExitStack() as stack:
        stack.enter_context(patch.object(linear_product, "_weight_grad", weight_grad))
        for begin in (TensorComm.begin_all_reduce, TensorComm.begin_reduce_scatter):
            stack.enter_context(patch.object(TensorComm, begin.__name__, logged(begin)))
        found = run(keys, run_dir, dims={"dp": 1, "tp": 2})
    assert not found["error"], found["error"]
    return done


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class Adding(nn.Module):
    """A block that adds its input inside: its gradient is whole already, and not to be summed."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class User(nn.Module):
    """A model that zrun knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.Sequential(Adding(8), Adding(8))
        self.out = nn.Linear(8, 16)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        logits = self.out(self.layers(self.embed(input_ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_what_a_region_adds_to_its_result(ranks, tmp_path: Path, alone: Any) -> None:
    plan = {"*.up": "colwise", "*.down": "rowwise"}
    parallel = {"tp": 2, "plan": plan}
    keys = small(model="tensor_parallel/test_tensor_parallel.py:User", parallel=parallel)
    assert_close(on_axes(keys, tmp_path / "run", ranks), alone(keys), 1e-6)


TP: dict[str, Any] = {"tp": 2}
IN_STAGES: dict[str, Any] = {"tp": 2, "pp": 2, "sequence": True, "schedule": "zero_bubble"}
DISK = {"optimizer": "disk", "grad": "disk", "param": "disk"}
FEATURES: dict[str, dict[str, Any]] = {  # what test_axes.py has not
    "lars": {"optim": {"name": "lars", "lr": 1e-1}, "parallel": TP},
    "meta": {"init": "meta", "parallel": IN_STAGES},
    "compile": {"compile": True, "parallel": TP},
    "every other": {"activations": {"checkpoint": "every_n"}, "parallel": IN_STAGES},
    "sequence, stage 3": {"zero": 3, "activations": {"checkpoint": "full"}, "parallel": IN_STAGES},
    "sequence, disk": {"zero": 3, "offload": DISK, "parallel": {**TP, "sequence": True}},
    "dropout outside": {
        **transformer("GPT2LMHeadModel", attn_pdrop=0.0),
        "activations": {"checkpoint": "full"},
        "parallel": TP,
    },
    "gathered widths": {**transformer("Olmo2ForCausalLM"), "parallel": TP},
    "experts, stage 3": {
        **transformer("MixtralForCausalLM"),
        "zero": 3,
        "activations": {"checkpoint": "full"},
        "parallel": TP,
    },
    "sequence, bf16": {"precision": "bf16", "parallel": IN_STAGES},
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.at_most(1)
def test_features(ranks, tmp_path: Path, alone: Any, feature: str) -> None:
    keys = small(**{"model": gpt(), **FEATURES[feature]})
    close = 1e-2 if "bf16" in feature else 2e-6
    assert_close(on_axes(keys, tmp_path / "run", ranks), alone(keys), close)


Dropped = list[torch.Tensor]  # of each dropout, what it drops


def dropped(keys: dict[str, Any], run_dir: str) -> tuple[Dropped, dict[str, Any]]:
    """Train on two ranks that have slices; note what is dropped on this one."""
    dropout = nn.functional.dropout
    noted: Dropped = []

    def noting(x: torch.Tensor, p: float, training: bool, inplace: bool = False) -> torch.Tensor:
        y = dropout(x, p, training, inplace)
        if training and not isinstance(x, FakeTensor):
            noted.append(y.detach() == 0)
        return y

    with patch.object(nn.functional, "dropout", noting):
        found = run(keys, run_dir, dims={"dp": 1, "tp": 2})
    return noted, found


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.thorough
def test_what_is_dropped(ranks, tmp_path: Path, sequence: bool) -> None:
    """Ranks drop the same of what they have alike, and each its own of its slices.

    What is recomputed drops the same again: gradients are equal to the rounding of eager attention.
    """
    model = transformer("GPT2LMHeadModel", attn_implementation="eager", attn_pdrop=0.3)
    keys = small(**model, parallel={"tp": 2, "sequence": sequence})
    (one, found), (other, of_other) = ranks(2).run(dropped, keys, str(tmp_path / "kept"))
    of_heads = 0
    for ours, theirs in zip(one, other, strict=True):
        is_slice = ours.dim() == 4 or (sequence and ours.shape[1] < 12)
        assert torch.equal(ours, theirs) != is_slice, ours.shape
        of_heads += ours.dim() == 4
    assert 0 < of_heads < len(one)
    keys["activations"] = {"checkpoint": "full"}
    assert_close(on_axes(keys, tmp_path / "again", ranks), [found, of_other], 1e-6)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.at_most(1)
def test_what_is_told_of_the_run(ranks, tmp_path: Path, sequence: bool) -> None:
    """Sizes are those of the model, samples count once, and layers' messages are told apart."""
    keys = small(model=gpt(), zero=1, parallel={"tp": 2, "sequence": sequence})
    found = on_axes(keys, tmp_path / "run", ranks, dp=2)
    events = {event["type"]: event for event in found[0]["events"]}
    one = on_axes(small(model=gpt()), tmp_path / "one", ranks)
    of_one = {event["type"]: event for event in one[0]["events"]}
    assert events["start"]["params"] == of_one["start"]["params"]
    assert events["step"]["total_samples"] == 8 * STEPS
    assert events["step"]["total_tokens"] == of_one["step"]["total_tokens"]
    traffic = events["end"]["traffic"]
    layers = traffic.pop("tensor")
    assert {kind: each["measured_bytes"] for kind, each in traffic.items()} == {
        kind: each["expected_bytes"] for kind, each in traffic.items()
    }
    if not sequence:
        args = keys["model"]["args"]
        tokens = of_one["step"]["total_tokens"] // 2  # of this data-parallel rank
        sums = 1 + 4 * args["depth"] + 1  # embedding, 2 + 2 of each block, the head's input
        cross_entropy = 3  # numbers of each token: the largest logit, the sum, the label's logit
        summed = 4 * tokens * (sums * args["dim"] + cross_entropy - 1)
        largest = 4 * tokens  # logits, which ranks gather
        assert layers == {
            "measured_bytes": summed + largest,
            "by_kind": {"all_reduce": summed, "all_gather": largest},
        }
    else:
        assert {"all_gather", "reduce_scatter"} <= layers["by_kind"].keys()
        assert sum(layers["by_kind"].values()) == layers["measured_bytes"]


Counted = dict[tuple[str, str], tuple[int, int]]  # calls and bytes received, by kind and phase


def counted(keys: dict[str, Any], run_dir: str) -> Counted:
    """Count what a run sends among the ranks that have slices of the same layers."""
    Path(run_dir).mkdir(exist_ok=True)
    rank, _ = world()
    worker = PoolWorker(make_spec(keys, run_dir, None, {"dp": 1, "tp": 2}), rank)
    trainer = worker.prepare()
    trainer.stop.ignore = lambda: None  # type: ignore[method-assign]  # the process lives on
    trainer.run()
    trainer.loader._steps.close()
    worker.close()
    comm = trainer.comm
    return {
        (key.kind, key.phase.value): (calls, comm.received_bytes[key])
        for key, calls in comm.calls.items()
        if key.axis == "tensor" and key.phase in (CommPhase.FORWARD, CommPhase.BACKWARD)
    }


DEPTH, BATCH, LENGTH, DIM = 4, 2, 6, 16
PASSES = STEPS * 4  # micro-batches
FULL = {"checkpoint": "full"}
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"parallel": {"tp": 2}},
    "recomputed": {"parallel": {"tp": 2}, "activations": FULL},
    "inputs divided": {"parallel": {"tp": 2}, "activations": {**FULL, "partition": True}},
    "sequence": {"parallel": {"tp": 2, "sequence": True}, "activations": FULL},
}


def of_micro_batch(way: str) -> Counted:
    """The calls of a micro-batch, and the bytes that a rank of two receives by them.

    Of hidden states these are all by a sum, and half by a gather or a scattered sum. Recomputation
    stops before the block's last sum.
    """
    hidden, logits = 4 * BATCH * LENGTH * DIM, 4 * BATCH * LENGTH  # bytes; of a number per token
    again = 0 if way == "whole" else DEPTH  # blocks that are recomputed
    if way == "sequence":  # what goes into a region is gathered, and its gradient is scattered
        in_forward, in_backward = 2 * DEPTH + 1, 2 * DEPTH + 1 + 2 * again
        scattered = 2 * DEPTH + again
        return {
            ("all_reduce", "forward"): (1 + 2, hidden + 2 * logits),
            ("all_gather", "forward"): (in_forward + 1, in_forward * hidden // 2 + logits),
            ("reduce_scatter", "forward"): (2 * DEPTH, DEPTH * hidden),
            ("all_reduce", "backward"): (1, hidden),
            ("all_gather", "backward"): (in_backward, in_backward * hidden // 2),
            ("reduce_scatter", "backward"): (scattered, scattered * hidden // 2),
        }
    in_forward = 2 * DEPTH + 1  # with the embedding's rows
    in_backward = 2 * DEPTH + 1 + again  # with the gradient of the head's input
    found = {
        ("all_reduce", "forward"): (in_forward + 2, in_forward * hidden + 2 * logits),
        ("all_gather", "forward"): (1, logits),  # the largest ones
        ("all_reduce", "backward"): (in_backward, in_backward * hidden),
    }
    if way == "inputs divided":
        found["all_gather", "backward"] = (DEPTH, DEPTH * hidden // 2)
    return found


def of_messages(messages: Messages) -> Counted:
    """The same of what is planned. What one of two ranks sends is what the other receives."""
    found: Counted = {}
    for message, times in messages.items():
        key = message.kind, "backward" if message.is_backward else "forward"
        calls, num_bytes = found.get(key, (0, 0))
        found[key] = calls + times, num_bytes + times * message.sent_bytes(2)
    return found


@functools.cache
def traced(model: str, sequence: bool) -> Profile:
    """What one of two ranks has of a model, and does for a micro-batch."""
    keys = small(**MODELS[model], parallel={"tp": 2, "sequence": sequence})
    job = JobConfig.model_validate(keys)
    policies = ("full",) if sequence else ("none", "full")
    return trace_job(job, JOB_DIR, micros=(BATCH,), checkpoints=policies, threads=1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.thorough
def test_messages(ranks, tmp_path: Path, model: str, way: str) -> None:
    """Two sums of a block in forward and two in backward, or as many gathers and scattered sums.

    As many are planned.
    """
    keys = small(**MODELS[model], **WAYS[way], guards={"check_values": False})
    expected = of_micro_batch(way)
    for found in ranks(2).run(counted, keys, str(tmp_path / "run")):
        assert found == {
            key: (PASSES * calls, PASSES * size) for key, (calls, size) in expected.items()
        }
    job = JobConfig.model_validate(keys)
    candidate = Candidate(
        0,
        ParallelDims(1, tp=2),
        BATCH,
        4,
        job.activations.checkpoint,
        "fp32",
        sequence_parallel=job.parallel.sequence,
        partition=job.activations.partition,
    )
    hardware = parse_simulate("2xCPU")
    part = traced(model, job.parallel.sequence)
    planner = Planner(part, hardware, job, divide=lambda *_: part)
    assert of_messages(planner.layer_messages(candidate)) == expected


def continue_text(context: Any) -> None:
    """Call the model in a hook, as `sample` does, on the ranks that have it between them."""
    with context.gathered():
        if context.runs_model:
            logits = context.model(torch.zeros(1, LENGTH, dtype=torch.long))
            context.metric("best", float(logits.float().argmax()))


@pytest.mark.thorough
def test_an_evaluation_and_a_hook_that_calls_the_model(ranks, tmp_path: Path) -> None:
    evaluation = {"data": {"call": "runs.py:Plain", "args": {"length": 12}}, "every": 1}
    hooks = {"on_eval": "tensor_parallel/test_tensor_parallel.py:continue_text"}
    keys = small(model=gpt(), eval=evaluation, hooks=hooks)
    one = on_axes(keys, tmp_path / "one", ranks)
    many = on_axes({**keys, "parallel": {"tp": 2}}, tmp_path / "many", ranks, dp=2)
    ours, theirs = ([e for e in found[0]["events"] if e["type"] == "eval"] for found in (many, one))
    assert len(ours) == len(theirs) > 0
    for event, expected in zip(ours, theirs, strict=True):
        assert event["loss"] == pytest.approx(expected["loss"], rel=1e-6)
