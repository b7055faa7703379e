"""Models of transformers by config: a trace on fake tensors is what a run on values takes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from zrun_core.plan.trace.peak import peak_of
from zrun_core.plan.trace.trace_process import trace_job
from zrun_core.spine.config import JobConfig

HERE = Path(__file__).parents[1]
MODELS = HERE.parent / "dist"


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "Qwen2ForCausalLM"])
@pytest.mark.at_most(1)
def test_what_is_traced_is_what_a_run_takes(
    name: str,
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [str(MODELS), *sys.path])
    job = JobConfig.model_validate(
        {
            "name": "t",
            "model": {"call": "pretrained:build", "args": {"name": name}},
            "data": "plan_models.py:sentences",
            "steps": 1,
            "batch": {"micro": 4},
        }
    )
    peaks = {}
    for mode in ("fake", "values"):
        found = trace_job(job, HERE, micros=(4,), checkpoints=(policy,), mode=mode)
        peaks[found.source] = peak_of(found.traces[policy], 4, steady={}).num_bytes
    assert peaks["traced"] == pytest.approx(peaks["measured on the CPU"], rel=0.01)
