"""What a micro-batch leaves behind until its weights' gradients are made."""

from __future__ import annotations

from plan_rows import Event, Op, trace_of

from zrun_core.plan.trace.peak import Moment, Passes
from zrun_core.plan.trace.rows import Affine, EventKind, Family, TracePhase

ROWS, WIDTH = 8, 16  # of the input of each product, for one sample
ELEMENT = 4
BACKWARD = TracePhase.BACKWARD


def op(module: str, family: Family, shape: tuple[int, ...], flops: float = 0.0) -> Op:
    size = Affine(0, 0)
    return Op(
        family, family, Affine(0, flops), size, TracePhase.FORWARD, module, 0, "float32", shape
    )


def product(module: str, outputs: int) -> Op:
    return op(module, "gemm", (ROWS, outputs, WIDTH), 2.0 * ROWS * outputs * WIDTH)


def grads(modules: list[str], kind: EventKind = "grad") -> list[Event]:
    """The gradient of each module's weight comes and goes."""
    return [
        Event(number, Affine(100, 0), comes, BACKWARD, module, 0, kind)
        for number, module in enumerate(modules)
        for comes in (True, False)
    ]


def left(events: list[Event], ops: list[Op], *, adds_others: bool = False) -> float:
    """Bytes that another micro-batch has left, seen from a backward in which nothing happens."""
    trace = trace_of(events, ops).with_late_weights(adds_others=adds_others)
    alone, waiting = (
        Passes.of_stage(trace, 1, [range(2)], [Moment(False, 0, (0,), (n,))], steady={})
        .peak()
        .dynamic
        for n in (0, 1)
    )
    return waiting - alone


def test_queries_and_keys_have_one_input() -> None:
    ops = [product("0.attention.query", 16), product("0.attention.key", 16)]
    widths = 16 + 16 + 16
    assert left(grads([each.module for each in ops]), ops) == ELEMENT * ROWS * widths
    ops.insert(1, op("0.attention.query_norm", "norm", (1, ROWS, 4, 4)))  # of each head
    assert left(grads(["0.attention.query", "0.attention.key"]), ops) == ELEMENT * ROWS * widths


def test_what_follows_a_norm_has_an_input_of_its_own() -> None:
    ops = [product("0.out", 16), op("0.norm", "norm", (1, ROWS, WIDTH)), product("0.up", 64)]
    widths = 16 + 16 + 16 + 64
    assert left(grads(["0.up", "0.out"]), ops) == ELEMENT * ROWS * widths
    ops = [product("0.attention.out", 16), product("0.mlp.up", 64)]
    assert left(grads(["0.mlp.up", "0.attention.out"]), ops) == ELEMENT * ROWS * widths


def test_other_parameters_leave_their_gradients_and_frozen_ones_nothing() -> None:
    ops = [product("0.up", 64), product("0.frozen", 64)]
    assert left(grads(["0.up", "0.norm"]), ops) == ELEMENT * ROWS * (16 + 64) + 100
    assert left(grads(["0.norm"]), ops) == 100
    of_head = [event._replace(block=-1) for event in grads(["head"])]
    assert left(of_head, ops) == 100
    assert left(of_head, ops, adds_others=True) == 0


def test_a_tied_gradient_waits_where_it_was_made() -> None:
    ops = [product("0.up", 64)]
    head = Event(9, Affine(1000, 0), True, BACKWARD, "head", -1, "temp")
    tied = [
        Event(8, Affine(0, 1), True, TracePhase.FORWARD, "0.up", 0, "activation"),
        Event(8, Affine(0, 1), False, BACKWARD, "head", -1, "activation"),
        head,
        *grads(["0.up"]),
        head._replace(alloc=False, module="tokens"),
    ]
    assert left(tied, ops) == ELEMENT * ROWS * (16 + 64) + 1000
