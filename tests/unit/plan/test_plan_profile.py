"""A timeline's peak is a maximum over live sets, of a whole model and of a pipeline's stages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan_rows import Event, Op, events_of, trace_of

from zrun_core.plan.trace.peak import Moment, Passes, Peak, peak_of
from zrun_core.plan.trace.profile import ModuleInfo, ParamInfo, Profile, Trace
from zrun_core.plan.trace.rows import Affine, TracePhase
from zrun_core.plan.trace.waiting_inputs import input_bytes

F, B = TracePhase.FORWARD, TracePhase.BACKWARD


def event(
    tensor: int, per_sample: float, come: bool, phase: TracePhase, block: int, base: float = 0.0
) -> Event:
    module = f"blocks.{block}" if block >= 0 else ""
    return Event(tensor, Affine(base, per_sample), come, phase, module, block, "activation")


def trace() -> Trace:
    """Two blocks that keep 10 each; the loss takes 30 for a moment; a gradient passes through."""
    rows = [
        event(0, 5, True, F, -1),  # embedding, kept by block 0
        event(1, 10, True, F, 0),
        event(2, 4, True, F, 0),  # output of block 0, kept by block 1
        event(3, 10, True, F, 1),
        event(4, 4, True, F, 1),  # output of block 1
        event(5, 30, True, TracePhase.LOSS, -1),
        event(5, 30, False, TracePhase.LOSS, -1),
        event(6, 4, True, B, -1),  # gradient of block 1's output
        event(4, 4, False, B, -1),
        event(7, 4, True, B, 1, base=100),  # gradient of its input
        event(3, 10, False, B, 1),
        event(6, 4, False, B, 1),
        event(2, 4, False, B, 1),
        event(8, 4, True, B, 0),
        event(1, 10, False, B, 0),
        event(7, 4, False, B, 0, base=100),
        event(0, 5, False, B, -1),
        event(8, 4, False, B, -1),
    ]
    return trace_of(rows)


def test_peak_is_the_largest_moment() -> None:
    peak = peak_of(trace(), 2, steady={})
    assert (peak.num_bytes, peak.phase, peak.module) == (
        2 * (5 + 10 + 4 + 10 + 4 + 4 - 4) + 100 + 8,
        B,
        "blocks.1",
    )
    assert peak.holders[0] == ("activations of blocks.*", 2 * (10 + 4 + 10 + 4) + 100)
    assert (
        peak_of(trace(), 100, steady={}).phase is TracePhase.LOSS
    )  # there the logits are larger than what is fixed


def test_states_move_the_peak() -> None:
    steady = {F: 1000, TracePhase.LOSS: 1000, B: 10, TracePhase.UPDATE: 5}
    peak = peak_of(trace(), 2, steady=steady)
    assert (peak.num_bytes, peak.phase, peak.dynamic) == (1000 + 2 * 63, TracePhase.LOSS, 2 * 63)
    update = peak_of(trace(), 2, steady={TracePhase.UPDATE: 10_000})
    assert update == Peak(10_000, TracePhase.UPDATE, "", ())


@pytest.mark.parametrize("update", [5, 10_000])
def test_the_course_of_memory_is_highest_at_the_peak(update: int) -> None:
    steady = {F: 1000, TracePhase.LOSS: 1000, B: 10, TracePhase.UPDATE: update}
    passes = Passes.whole(trace(), 2, in_flight=3, steady=steady)
    peak, course = passes.peak(), passes.course()
    highest = max(course.num_bytes)
    at = course.num_bytes.index(highest)
    assert (highest, course.phases[at], course.modules[at]) == (
        peak.num_bytes,
        peak.phase,
        peak.module,
    )
    held = 2 * 2 * (5 + 10 + 4 + 10 + 4)  # of two other micro-batches
    assert course.num_bytes[0] == 1000 + held + 2 * 5
    assert course.num_bytes[-1] == update, "nothing happens in it: what is there anyway"
    assert course.phases == (*[F] * 5, *[TracePhase.LOSS] * 2, *[B] * 11, TracePhase.UPDATE)


def test_the_course_of_a_stage_is_that_of_its_fullest_moment() -> None:
    moments = [
        Moment(False, 0, (0,), (0,)),
        Moment(True, 0, (2,), (0,)),
        Moment(True, 0, (1,), (0,)),
    ]
    passes = Passes.of_stage(trace(), 2, [range(1, 3)], moments, steady={F: 0, B: 0}, beside=7)
    course = passes.course()
    assert max(course.num_bytes) == passes.peak().num_bytes
    kept = 2 * (4 + 10 + 4)  # of a micro-batch that waits
    alone = Passes.whole(trace(), 2, segments=range(1, 3), steady={F: 0, B: 0}).course()
    forward = sum(phase is not B for phase in course.phases)
    beside = [2 * kept + 7] * forward + [7] * (len(course.phases) - forward)
    assert [a - b for a, b in zip(course.num_bytes, alone.num_bytes, strict=True)] == beside


def test_each_allocation_is_rounded_up() -> None:
    one = trace_of((event(0, 100, True, F, 0), event(1, 513, True, F, 0)))
    assert peak_of(one, 1, steady={}, align=512).num_bytes == 512 + 1024


def test_stages_of_a_pipeline() -> None:
    first = peak_of(trace(), 1, segments=range(0, 1), steady={})
    # Embedding, block 0 and its output; in backward the gradient that arrives, and the one of the
    # embedding's output.
    assert first.num_bytes == 5 + 10 + 104 + 4
    last = peak_of(trace(), 1, segments=range(1, 3), steady={})
    assert (
        last.num_bytes == 4 + 10 + 4 + 104
    )  # its input has arrived; its output went when the loss was over
    assert (
        peak_of(trace(), 1, segments=range(1, 3), steady={F: 500, TracePhase.LOSS: 500}).phase
        is TracePhase.LOSS
    )


def recomputed(blocks: int) -> Trace:
    """A tensor of 100 bytes from block to block, and 10 bytes of each block's own work."""
    size, work = Affine(0.0, 100.0), Affine(10.0, 0.0)
    forward, backward = TracePhase.FORWARD, TracePhase.BACKWARD
    events = [Event(0, size, True, forward, "embedding", -1, "activation")]
    for block in range(blocks):
        name = f"blocks.{block}"
        events += [
            Event(100 + block, work, True, forward, name, block, "temp"),
            Event(block + 1, size, True, forward, name, block, "activation"),
            Event(100 + block, work, False, forward, name, block, "temp"),
        ]
    for block in reversed(range(blocks)):
        name = f"blocks.{block}"
        events += [
            Event(200 + block, work, True, backward, name, block, "temp"),
            Event(200 + block, work, False, backward, name, block, "temp"),
            Event(block, size, False, backward, name, block, "activation"),
        ]
    return trace_of(events)


@pytest.mark.parametrize(("every", "gone"), [(1, 6 - 2), (2, 3 - 1)])
def test_inputs_that_wait_elsewhere_are_two_at_a_time(every: int, gone: int) -> None:
    trace = recomputed(6)
    before = trace.events.copy()
    here = peak_of(trace, 1, steady={})
    away = peak_of(trace.with_inputs_apart(every, ranks=1, away=True), 1, steady={})
    assert here.num_bytes - away.num_bytes == gone * 100
    assert input_bytes(trace.events, every, 2).tolist() == [200.0] * (6 // every)
    balance = np.where(trace.with_inputs_apart(every, ranks=1, away=True).events["alloc"], 1, -1)
    assert balance.sum() == 1, "the output of the last block stays"
    assert (trace.events == before).all()


@pytest.mark.parametrize(("away", "slices"), [(False, 6), (True, 2)])
def test_inputs_that_are_divided_are_slices_but_of_the_block_that_runs(
    away: bool, slices: int
) -> None:
    trace = recomputed(6)
    here = peak_of(trace, 1, steady={})
    apart = trace.with_inputs_apart(1, ranks=4, away=away)
    # The first block's input is the batch's embedding, 100 too; and the last block's output stays.
    assert here.num_bytes - peak_of(apart, 1, steady={}).num_bytes == 6 * 100 - 100 - slices * 25
    balance = np.where(apart.events["alloc"], 1, -1)
    assert balance.sum() == 1, "the output of the last block stays"


def test_micro_batches_in_flight_hold_what_forward_kept() -> None:
    kept = 5 + 10  # block 0 of the first stage; its output has been sent
    one, three = (
        peak_of(trace(), 1, segments=range(0, 1), in_flight=n, steady={}).num_bytes for n in (1, 3)
    )
    assert three == one + 2 * kept


def test_micro_batches_that_wait_before_the_last_block_hold_the_blocks_before_it() -> None:
    whole = peak_of(trace(), 1, steady={}).num_bytes
    waiting = peak_of(trace(), 1, waiting=range(1), in_flight=3, steady={}).num_bytes
    assert waiting == whole + 2 * (5 + 10)


def test_a_second_micro_batch_is_added_to_the_first() -> None:
    cast = [
        Event(9, Affine(64, 0), come, B, "blocks.0", 0, "grad", accumulates=True)
        for come in (True, False)
    ]
    rows = events_of(trace())
    both = trace_of((*rows[:10], *cast, *rows[10:]))
    assert peak_of(both, 2, steady={}) == peak_of(trace(), 2, steady={})
    assert (
        peak_of(both, 2, steady={}, accumulating=True).num_bytes
        == peak_of(trace(), 2, steady={}).num_bytes + 64
    )


def test_some_micro_batches_are_exact() -> None:
    exact = trace_of((event(0, 0, True, F, 0, base=7),))
    mixed = trace_of(events_of(trace()), exact={1: exact})
    assert peak_of(mixed, 1, steady={}).num_bytes == 7
    assert peak_of(mixed, 2, steady={}) == peak_of(trace(), 2, steady={})


def profile() -> Profile:
    op = Op("mm", "gemm", Affine(0, 2.0), Affine(1, 3.5), F, "blocks.0", 0, "float32", (4, 2, 3))
    return Profile(
        source="traced",
        why="",
        params=(
            ParamInfo("w", (2, 3), "bfloat16", True, 0, (3, 1)),
            ParamInfo("b", (), "float32", False),
        ),
        buffer_bytes=12,
        num_blocks=2,
        batch_bytes=Affine(0, 16),
        tokens_per_sample=8,
        traces={"none": trace_of(events_of(trace()), (op,), {1: trace_of(ops=(op,))})},
        modules=(
            ModuleInfo("", 0),
            ModuleInfo("a", 1, "list", True, (("w", "w"),), ""),
            ModuleInfo("b", 0, same_as="a"),
        ),
        notes=("a note",),
    )


def test_a_profile_survives_json() -> None:
    assert Profile.from_json(profile().to_json()) == profile()
    assert profile().num_params == 6 + 1


def deep(blocks: int) -> Profile:
    """Each block keeps a tensor, and backward frees it."""
    forward = [event(n, 4.0, True, F, n, base=8.0) for n in range(blocks)]
    backward = [event(n, 4.0, False, B, n, base=8.0) for n in reversed(range(blocks))]
    ops = [
        Op("mm", "gemm", Affine(0, 2.0), Affine(1, 3.5), F, f"blocks.{n}", n, "float32", (4, 2, 3))
        for n in range(blocks)
    ]
    return replace(profile(), traces={"none": trace_of((*forward, *backward), ops)})


def test_blocks_are_stored_once() -> None:
    few, many = (deep(blocks).to_json() for blocks in (20, 200))
    names = sum(
        2 * len(f'"blocks.{n}",') for n in range(20, 200)
    )  # of modules, for events and operators
    assert len(many) - len(few) < names + 50
    found = Profile.from_json(many)
    assert found == deep(200)
    assert events_of(found.traces["none"]) == events_of(deep(200).traces["none"])
    for micro in (1, 3):
        one, other = (
            peak_of(each.traces["none"], micro, segments=range(5, 9), steady={})
            for each in (found, deep(200))
        )
        assert (
            one
            == other
            == peak_of(deep(200).traces["none"], micro, segments=range(5, 9), steady={})
        )
        assert one.num_bytes == 4 * (4 * micro + 8)


@pytest.mark.parametrize("text", ["{}", "[]", "nothing", '{"format": 99}', '{"format": 1}'])
def test_other_json_is_no_profile(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # of json or ours
        Profile.from_json(text)
