"""What is traced of a GPT is what formulas say: parameters, products, attention, activations."""

from __future__ import annotations

import numpy as np
import pytest
from formula_cost import FormulaCostModel, FormulaSettings
from formulas import TransformerShape
from traced_gpt import GPT, traced

from zrun_core.hardware.simulated import parse_simulate
from zrun_core.plan.question.candidate import Candidate
from zrun_core.plan.question.subject import Subject
from zrun_core.plan.timing.cost_model import CostModel
from zrun_core.plan.timing.micro_batch_cost import TimingSettings
from zrun_core.plan.trace.peak import peak_of
from zrun_core.plan.trace.profile import Trace
from zrun_core.plan.trace.rows import PHASE_NUMBER, Family, TracePhase, values_at
from zrun_core.spine.parallel_dims import ParallelDims

SMALL, DEEP = GPT(4, 1024, 16, vocab=8192, seq=512), GPT(12, 1024, 16, vocab=8192, seq=512)
MICRO = 3
POLICIES = ("none", "selective", "full")


def shape_of(gpt: GPT) -> TransformerShape:
    return gpt.formula


def flops_of(trace: Trace, family: Family, *phases: TracePhase) -> float:
    """Return the operations of a kind of operators in these phases, for `MICRO` samples."""
    is_of = np.array([each.family == family for each in trace.operators])
    ops = trace.ops[is_of[trace.ops["operator"]]]
    here = np.isin(ops["phase"], [PHASE_NUMBER[phase] for phase in phases])
    return float(values_at(ops["flops"][here], MICRO).sum())


def test_parameters_are_those_of_the_formula() -> None:
    for gpt in (SMALL, DEEP):
        assert traced(gpt, policies=POLICIES).num_params == shape_of(gpt).num_params


def test_operations_are_those_of_the_formula() -> None:
    """Those of products exactly: two products of backward for each one of forward.

    Recomputation stops before a block's last product, of which backward needs nothing.
    """
    shape, tokens = shape_of(DEEP), MICRO * DEEP.seq
    forward = TracePhase.FORWARD, TracePhase.LOSS
    products = shape.layers * shape.product_flops(tokens) + shape.head_flops(tokens)
    traces = traced(DEEP, policies=POLICIES).traces
    last = 2 * tokens * shape.hidden * shape.ffn
    repeated = shape.layers * (shape.product_flops(tokens) - last)
    for policy, again in (("none", 0.0), ("full", repeated)):
        assert flops_of(traces[policy], "gemm", *forward) == products
        assert flops_of(traces[policy], "gemm", TracePhase.BACKWARD) == 2 * products + again
        attention = flops_of(traces[policy], "attention", *forward)
        assert attention == shape.layers * shape.attention_flops(tokens)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_block_keeps_is_that_of_the_formula(policy: str) -> None:
    """The difference of two depths.

    What the formula does not know: autocast computes the two norms of a block in fp32 on CUDA, so
    that their inputs take twice as much where they are kept.
    """
    peaks = [
        peak_of(
            traced(gpt, policies=POLICIES).traces[policy],
            MICRO,
            steady=dict.fromkeys(TracePhase, 0),
        ).num_bytes
        for gpt in (SMALL, DEEP)
    ]
    kept = (peaks[1] - peaks[0]) / (DEEP.layers - SMALL.layers)
    expected = shape_of(DEEP).block_activations(MICRO, recompute=policy)  # type: ignore[arg-type]
    if policy == "none":
        expected += 2 * 2 * MICRO * DEEP.seq * DEEP.hidden
    assert kept == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("hardware", ["1xA100-80G", "1xH100-80G"])
def test_seconds_are_about_those_of_the_formula(hardware: str) -> None:
    on = parse_simulate(hardware)
    key = Candidate(0, ParallelDims(1), MICRO, 1).key
    profile = traced(DEEP, policies=POLICIES)
    by_trace = CostModel(Subject(profile), on, TimingSettings()).micro_batch(key)
    by_formula = FormulaCostModel(shape_of(DEEP), on, FormulaSettings()).micro_batch(key)
    for name in ("forward", "backward"):
        found, expected = (
            sum(getattr(segment, name) for segment in each) for each in (by_trace, by_formula)
        )
        assert found == pytest.approx(expected, rel=0.25)
