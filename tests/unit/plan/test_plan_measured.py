"""What is foretold of a training step is what the step allocates: one real run of one rank."""

from __future__ import annotations

from pathlib import Path

import planner
import pytest

from zrun_core.plan.trace.trace_process import trace_job
from zrun_core.spine.config import JobConfig

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.thorough
def test_the_peak_of_a_rank_is_foretold_to_one_percent() -> None:
    case = planner.Case("llama", "bf16", "full", micro=2)
    profile = trace_job(
        JobConfig.model_validate(case.job()), BENCHMARKS, micros=(2,), checkpoints=("full",)
    )
    assert profile.source == "traced"
    predicted, measured = planner.predicted_peak(case, profile), planner.measure(case)["peak"]
    assert abs(predicted - measured) < 0.01 * measured
