"""Small jobs of several models, and runs of them on ranks along the axes of a job."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from distances import Found
from runs import job, run

GPT_STEPS, STEPS = 4, 2
GPT = {"vocab_size": 13, "dim": 16, "depth": 4, "heads": 2, "seq_len": 6}
SGD = {"name": "sgd", "lr": 0.1, "clip": 1.0, "args": {"momentum": 0.9}}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt(**args: Any) -> dict[str, Any]:
    """Return the reference of a GPT of four blocks."""
    return {"call": "zrun_core.models.gpt:gpt", "args": {**GPT, "tied": False, **args}}


def small_gpt(**keys: Any) -> dict[str, Any]:
    """Return the keys of a job of this GPT."""
    return job(
        **{
            "model": gpt(),
            "data": {"call": "runs.py:Plain", "shuffle": True},
            "steps": GPT_STEPS,
            "batch": {"global": 8, "micro": 1},
            "hooks": {},
            "checkpoint": None,
            **keys,
        }
    )


def small(**keys: Any) -> dict[str, Any]:
    """Return the keys of a job of few steps, without a hook or a checkpoint."""
    given = {"steps": STEPS, "batch": {"global": 8, "micro": 2}, "optim": SGD}
    return job(**{**given, "data": "runs.py:Plain", "hooks": {}, "checkpoint": None, **keys})


def transformer(name: str, **settings: Any) -> dict[str, Any]:
    """Return keys of a job with a model of transformers."""
    args = {"name": name, **settings}
    return {
        "model": {"call": "pipeline_zoo.py:transformer", "args": args},
        "data": "pretrained.py:Texts",
    }


def on_axes(keys: dict[str, Any], folder: Path, ranks: Any, **dims: int) -> Found:
    """Run a job on the ranks of the axes that `axes_of` gives."""
    axes = axes_of(keys, **dims)
    pool = ranks(math.prod(axes.values()))
    found: Found = pool.run(run, keys, str(folder), None, None, None, axes)
    return found


def axes_of(keys: dict[str, Any], **dims: int) -> dict[str, int]:
    """Return the ranks along each axis: `dims`, else tp and pp as the job says and dp of 1."""
    parallel = keys.get("parallel", {})
    return {"dp": 1, **{axis: parallel[axis] for axis in ("tp", "pp") if axis in parallel}, **dims}
