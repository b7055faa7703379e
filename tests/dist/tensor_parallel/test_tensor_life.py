"""Divided layers from plain weights to plain weights: what a run does beside its steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pipeline_zoo
import pytest
import torch
from distances import values
from runs import losses
from safetensors.torch import load_file, save_file
from small_jobs import on_axes, small, transformer

from zrun_core.checkpoint.export import export
from zrun_core.checkpoint.folder import read_step
from zrun_core.checkpoint.manifest_fields import VALUE

STEPS = 4
SPOILED = 2  # the step whose gradient overflows, on one rank
LLAMA = transformer("LlamaForCausalLM")


def plain() -> torch.nn.Module:
    return pipeline_zoo.transformer("LlamaForCausalLM")


def spoil(context: Any) -> None:
    """Let the gradient of the last rank's slice overflow in the next step."""
    if context.step == SPOILED - 1 and context.rank == context.world_size - 1:
        param = dict(context.model.named_parameters())["model.layers.2.mlp.down_proj.weight"]
        hook = param.register_hook(lambda grad: (hook.remove(), grad * math.inf)[1])


def look(context: Any) -> None:
    """Generate text, and record its tokens as a number."""
    with context.gathered() as model:
        if context.runs_model:
            text = model.generate(torch.tensor([[5, 6, 7]]), max_length=7, do_sample=False)
            context.metric("text", float("".join(f"{token:02}" for token in text[0, 3:])))


@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": 2, "pp": 2}], ids=str)
@pytest.mark.at_most(1)
def test_from_plain_weights_to_plain_weights(ranks, tmp_path: Path, axes: dict[str, int]) -> None:
    """All ranks skip the step in which the gradient of one overflows.

    The others are those of one process, and so are evaluations, and text generated in a hook.
    """
    torch.manual_seed(21)
    save_file(plain().state_dict(), tmp_path / "plain.safetensors")
    keys = small(
        **LLAMA,
        steps=STEPS,
        precision={"compute": "fp16", "loss_scale": {"init": 1024.0}},
        init_from=str(tmp_path / "plain.safetensors"),
        eval={"data": "pretrained.py:Texts", "every": 2},
        hooks={"on_step": "tensor_parallel/test_tensor_life.py:spoil"},
        checkpoint={"every": STEPS},
    )
    if "pp" not in axes:
        keys["hooks"]["on_eval"] = "tensor_parallel/test_tensor_life.py:look"
    one = on_axes(keys, tmp_path / "one", ranks)
    many = on_axes({**keys, "parallel": axes}, tmp_path / "many", ranks)
    assert losses(many[0]) == pytest.approx(losses(one[0]), rel=2e-3)
    ours, theirs = (told(found[0]["events"]) for found in (many, one))
    assert ours == theirs
    assert [step for step, is_skipped, _ in ours["step"] if is_skipped] == [SPOILED]
    assert len(ours["eval"]) == STEPS // 2
    assert "pp" in axes or len(ours["metrics"]) == STEPS // 2
    step = tmp_path / "many" / "checkpoints" / f"step-{STEPS:08d}"
    export(step, read_step(step), tmp_path / "out.safetensors")
    model = plain()
    model.load_state_dict(load_file(tmp_path / "out.safetensors"))
    held = values(many)
    for name, param in model.named_parameters():
        np.testing.assert_array_equal(param.detach().numpy(), held[name, VALUE], err_msg=name)


def told(events: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return what steps and evaluations came to, but for rounding."""
    fields = {"step": ("skipped", "loss_scale"), "eval": ("samples",), "metrics": ("values",)}
    return {
        kind: [(e["step"], *map(e.__getitem__, keys)) for e in events if e["type"] == kind]
        for kind, keys in fields.items()
    }
