"""The timeline of a micro-batch whose weights' gradients are made in a later pass, as ZB-H1 does.

As `zrun_core/stages/weight_grads.py` keeps what they are made of: a linear of a block leaves its
input and the gradient of its output behind, in place of its gradients; all other parameters of
blocks leave their gradients, and those outside of blocks too unless they are added up at once. What
is left stays beyond the end of the timeline.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from zrun_core.plan.trace.rows import KIND_NUMBER, PHASE_NUMBER, Operator, Rows, TracePhase

_ELEMENT = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes


def with_late_weights(
    events: Rows,
    ops: Rows,
    modules: Sequence[str],
    operators: Sequence[Operator],
    *,
    adds_others: bool,
) -> Rows:
    """Return the events of the same micro-batch whose weights' gradients are made later.

    Args:
        events: rows of memory that comes or goes.
        modules: names that the numbers in rows stand for.
        operators: that the numbers in rows stand for.
        adds_others: gradients of what lies outside of blocks are added up at once.
    """
    is_backward = events["phase"] == PHASE_NUMBER[TracePhase.BACKWARD]
    is_grad = is_backward & (events["kind"] == KIND_NUMBER["grad"])
    goes = is_backward & ~events["alloc"]
    stays = events["block"] >= 0
    keep = np.ones(len(events), dtype=bool)
    if not adds_others:
        stays[:] = True
        keep = ~_goes_to_others(events, goes)
    # What it takes to add them up comes and goes in the later pass, which begins with all that is
    # left: much as at the end of this one.
    keep &= ~(is_grad & goes & stays & ~events["accumulates"])
    changed: Rows = events.copy()
    for module, size in _left_by_linears(ops, modules, operators).items():
        of_module = is_grad & (events["module"] == module)
        made = np.flatnonzero(of_module & events["alloc"])
        if not len(made):  # it is not trained
            continue
        keep[of_module] = False
        # Where the gradient went, what it is made of would have gone too.
        left = np.flatnonzero(of_module & (events["tensor"] == events["tensor"][made[0]]))[-1]
        keep[left] = True
        changed["alloc"][left] = True
        changed["size"][left] = size
        changed["kind"][left] = KIND_NUMBER["activation"]
    kept: Rows = changed[keep]
    return kept


def _goes_to_others(events: Rows, goes: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return where a gradient of a tied parameter that is made behind the blocks goes before them.

    There it is added to that of the other use, which in a pipeline is on another stage. `goes`
    marks the events of memory that goes in backward.
    """
    found = np.zeros(len(events), dtype=bool)
    inside = np.flatnonzero(goes & (events["block"] >= 0))
    if not len(inside):
        return found
    came = {int(events["tensor"][row]): int(row) for row in np.flatnonzero(events["alloc"])}
    first_backward = int(np.flatnonzero(goes)[0])
    for row in np.flatnonzero(goes & (events["size"][:, 1] == 0)).tolist():
        comes = came[int(events["tensor"][row])]
        found[row] = first_backward < comes < inside[0] and row > inside[-1]
    return found


def _left_by_linears(
    ops: Rows, modules: Sequence[str], operators: Sequence[Operator]
) -> dict[int, NDArray[np.float64]]:
    """Return what the linears of blocks leave behind, by module: bytes, affine in the samples.

    Linears of one module in a row that multiply rows of one length are taken to have one input, as
    those of queries and keys, unless such rows are normalised between them.
    """
    is_inside = (ops["phase"] == PHASE_NUMBER[TracePhase.FORWARD]) & (ops["block"] >= 0)
    found: dict[int, NDArray[np.float64]] = {}
    last: tuple[int, str, int] | None = None  # block, parent, length of rows of the last product
    for op in ops[is_inside]:
        operator = operators[op["operator"]]
        if operator.family == "attention" or "bmm" in operator.name:
            last = None
        elif operator.family == "norm":
            if last is not None and operator.shape[-1] == last[2]:
                last = None
        elif operator.family == "gemm" and len(operator.shape) == 3:
            _, outputs, inputs = operator.shape
            module = int(op["module"])
            here = int(op["block"]), modules[module].rpartition(".")[0], inputs
            widths = outputs if here == last else outputs + inputs
            rows = op["flops"] / (2 * outputs * inputs)
            size = rows * widths * _ELEMENT[operator.dtype.removeprefix("torch.")]
            found[module] = found.get(module, 0.0) + size
            last = here
    return found
