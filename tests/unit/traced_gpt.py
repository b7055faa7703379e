"""GPTs by a few numbers, as the planner has them: built without memory, and traced once each.

Each is traced in a process of its own, as for an estimate: what makes a trace follow CUDA's kernels
holds for the whole process.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from formulas import TransformerShape
from warm import WarmPopen

from zrun_core.hardware.hardware import Hardware
from zrun_core.plan.answer.planner import Planner
from zrun_core.plan.trace.profile import Profile
from zrun_core.plan.trace.trace_process import trace_in_subprocess
from zrun_core.spine.config import JobConfig

POLICIES = ("none", "full")


@dataclass(frozen=True)
class GPT:
    """A GPT-2 of these numbers, without dropout, with a tied head."""

    layers: int
    hidden: int
    heads: int
    vocab: int = 51200
    seq: int = 2048

    @property
    def args(self) -> dict[str, Any]:
        """Arguments of `zrun_core.models.gpt:gpt`."""
        return {
            "vocab_size": self.vocab,
            "dim": self.hidden,
            "depth": self.layers,
            "heads": self.heads,
            "seq_len": self.seq,
        }

    @property
    def formula(self) -> TransformerShape:
        """The same by formulas."""
        return TransformerShape.from_model_args("zrun_core.models.gpt:gpt", self.args)

    @property
    def num_params(self) -> int:
        return traced(self).num_params

    def job(self, precision: str = "bf16", **keys: Any) -> JobConfig:
        """Return a job of it with blank text."""
        return JobConfig.model_validate(
            {
                "name": "gpt",
                "model": {"call": "zrun_core.models.gpt:gpt", "args": self.args},
                "data": {"call": "zrun_core.data.text:text", "args": {"seq_len": self.seq}},
                "steps": 1,
                "batch": {"micro": 1},
                "precision": precision,
                **keys,
            }
        )


@cache
def traced(
    gpt: GPT,
    precision: str = "bf16",
    policies: tuple[str, ...] = POLICIES,
    device: str = "cuda",
    tp: int = 1,
    sequence: bool = False,
) -> Profile:
    """Return what the first of `tp` ranks has, and what it does with each policy."""
    job = gpt.job(precision, parallel={"tp": tp, "sequence": sequence})
    with mock.patch.object(subprocess, "Popen", WarmPopen):
        return trace_in_subprocess(
            job,
            Path(__file__).parent,
            micros=(1,),
            checkpoints=policies,
            device=device,
            use_cache=False,
        )


def planner_of(
    gpt: GPT,
    hardware: Hardware,
    precision: str = "bf16",
    policies: tuple[str, ...] = POLICIES,
    divides: bool = False,
    **keys: Any,
) -> Planner:
    """Return the planner of a job of it.

    Args:
        policies: of checkpointing that are traced.
        divides: whether each way to divide its layers is traced when it is asked for; else there is
            none.
        keys: of the job.
    """

    device = "cpu" if hardware.device.kind == "cpu" else "cuda"

    def divide(tp: int, sequence: bool) -> Profile:
        return traced(gpt, precision, policies, device, tp, sequence)

    return Planner(
        traced(gpt, precision, policies, device),
        hardware,
        gpt.job(precision, **keys),
        divide=divide if divides else None,
    )
