"""The state of one micro-batch, from the beginning of its forward to the end of its backward.

Several micro-batches may be under way at once, as in a pipeline:

    runs            F0      F1      B0      F2      B1      B2
    under way       0       0 1     0 1     1 2     1 2     2

Any order will do in which each backward comes after its own forward. One of them runs at a time.
What belongs to one micro-batch is here. What passes teach about the model (orders, units that get
late gradients), and the memory, belong to the `Gatherer` and the `Reducer`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch

from zrun_core.zero.unit.flat_unit import FlatUnit


class PassKind(Enum):
    """The kinds of passes. Each has its own recorded order of unshards."""

    FORWARD = "forward"
    BACKWARD = "backward"
    EVAL = "eval"


@dataclass
class BackwardGrads:
    """Progress of one backward, by unit index. See [Note: one order] in `reduce_order.py`.

    The parameters of a unit leave `missing` one by one; then the unit is `complete`, and at its
    `turn` it is `issued`. A gradient that comes after that makes it `late`.

    Attributes:
        order: of the reductions.
        boundary: it is the last backward of the optimizer step.
        reduced: units whose gradients are reduced over ranks; those of others accumulate locally.
        missing: by unit, the parameters that have no gradient yet.
        again: parameters, a unit and the number there, that got their gradient in several parts.
        awaited: units that are not complete yet, whatever comes: see `Reducer.begin_slice`.
        complete: units that expect no more gradients.
        issued: units whose reduction was issued.
        late: units that got a gradient after that.
        seen: units in the order in which their last gradient came.
        turn: position in the order of reductions of the unit that is to be issued next.
    """

    order: list[FlatUnit]
    boundary: bool
    reduced: Set[int]
    missing: dict[int, set[int]]
    awaited: set[int]
    again: set[tuple[FlatUnit, int]] = field(default_factory=set)
    complete: set[int] = field(default_factory=set)
    issued: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    seen: list[int] = field(default_factory=list)
    turn: int = 0


class HeldGrad(NamedTuple):
    """The gradient of a parameter, to be made.

    Attributes:
        unit, number: the parameter.
        make: returns the gradient; None: it is added up already.
    """

    unit: FlatUnit
    number: int
    make: Callable[[], torch.Tensor] | None


@dataclass
class HeldGrads:
    """Gradients of a micro-batch that wait until its weights' turn.

    Attributes:
        grads: in the order in which backward came to them.
        at_once: indices of units whose gradients do not wait, but are added up as they come.
        missing: by unit index, the parameters to which it has not come yet.
    """

    at_once: Set[int]
    grads: list[HeldGrad] = field(default_factory=list)
    missing: dict[int, set[int]] = field(default_factory=dict)

    def add(self, held: HeldGrad) -> bool:
        """Keep a gradient; return whether backward has come to all parameters of the unit."""
        self.grads.append(held)
        index = held.unit.index
        missing = self.missing.setdefault(index, set(range(len(held.unit.params))))
        missing.discard(held.number)
        return not missing


@dataclass(eq=False)
class MicroPass:
    """One micro-batch's forward and backward, of the model or of one chunk of it.

    Attributes:
        chunk: of the model, where this rank has several: see `UnitLayout.chunk`.
        pinned: units that stay unsharded until it ends.
        num_calls: by unit index, how often its forward called the unit's modules or accessed its
            parameters outside of them, in the order of the first calls. A unit that it never used
            gets no gradient.
        open_calls: by `ModuleHooks`, the forward calls whose backward is not over.
        left: what begins the backward of calls that its forward has left: see `ModuleCalls.leave`.
        grads: progress of its backward while that runs.
        held: gradients that its backward has made, or what makes them, for a later pass; None:
            backward takes them at once.
    """

    chunk: int = 0
    pinned: list[FlatUnit] = field(default_factory=list)
    num_calls: Counter[int] = field(default_factory=Counter)
    open_calls: Counter[object] = field(default_factory=Counter)
    left: list[Callable[[], None]] = field(default_factory=list)
    grads: BackwardGrads | None = None
    held: HeldGrads | None = None

    def on_gradient_arrival(self, *, of_param: bool) -> None:
        """Learn of a gradient before it is used.

        Nothing to do here: this pass was told of its backward beforehand. `ImplicitPasses` is not.

        Args:
            of_param: it is a parameter's, not that of a module's output.
        """

    def gathered_refusal(self, kind: PassKind) -> str:
        """Return why `gathered()` cannot be entered while the `kind` of this pass runs."""
        return "gathered() inside a forward or backward pass: enter it between steps, on all ranks"
