"""A micro-batch under way, from the beginning of its forward to the end of its backward.

Several may be under way at once, as a pipeline has them: forwards and backwards follow one another
in any order in which each backward comes after its own forward. One of them runs at a time. What
belongs to one micro-batch is here; what was learnt of the model, and the memory, is the
`Gatherer`'s and the `Reducer`'s.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from zrun_core.zero.unit import FlatUnit


class PassKind(Enum):
    """What runs. Each kind has a recorded order of its own."""

    FORWARD = "forward"
    BACKWARD = "backward"
    EVAL = "eval"


@dataclass
class ExpectedGradients:
    """What a backward has given so far, and what it is still to give. Units are known by index.

    Attributes:
        boundary: it is the last backward of the optimizer step.
        reduces: its gradients are reduced.
        missing: of each unit, the parameters whose gradients have not come.
        complete: units that expect no more gradients.
        issued: units whose reduction is on its way.
        late: units that got a gradient after that.
        seen: units in the order in which their last gradient came.
        turn: how many units have had their turn to be reduced.
    """

    boundary: bool
    reduces: bool
    missing: dict[int, set[int]]
    complete: set[int] = field(default_factory=set)
    issued: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    seen: list[int] = field(default_factory=list)
    turn: int = 0


@dataclass(eq=False)
class MicroPass:
    """One micro-batch's forward and backward.

    Attributes:
        pinned: units that stay whole for it until it ends.
        num_calls: by unit index, how often its forward called the unit's modules or looked at its
            parameters outside of them; a unit that it never used gets no gradient.
        open_calls: by hooked module, calls of its forward whose backward is not over.
        demanded: units in the order in which what runs of it has asked for them.
        cursor: place in the order of the last pass of this kind, as far as this one followed it.
        gradients: those of its backward while that is under way.
    """

    pinned: list[FlatUnit] = field(default_factory=list)
    num_calls: Counter[int] = field(default_factory=Counter)
    open_calls: Counter[object] = field(default_factory=Counter)
    unshard_order: list[FlatUnit] = field(default_factory=list)
    cursor: int = 0
    gradients: ExpectedGradients | None = None

    def on_gradient_arrival(self, *, of_param: bool) -> None:
        """Hear of a gradient before it is used; this pass was told of its backward beforehand.

        Args:
            of_param: it is a parameter's, not that of a module's output.
        """

    def gathered_refusal(self, kind: PassKind) -> str:
        """Return why `gathered()` cannot be entered while `kind` runs of this pass."""
        return "gathered() inside a forward or backward pass: enter it between steps, on all ranks"
