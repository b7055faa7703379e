"""The order in which a model's gradients are reduced, learnt from the first backward pass.

[Note: one order]
Every rank issues its reductions in one fixed order, for two reasons: the backend pairs them up, and
a rank that waits for scratch must wait for something that the others have issued too. With the
order D C B A, and a backward in which C is complete before D:

    complete        C      D      B      A
    issued                 D C    B      A          C waits for its turn

- Units of which no module ran on this rank are complete from the start, with zeros.
- Units that are incomplete at the end of backward, because a parameter got no gradient, follow
  then, with zeros for that parameter.
- Before anything has run it is the order of registration, backwards; tiles come before the rest of
  their block, and units that are kept unsharded last. For the first backward it is the order in
  which the forward of rank 0 came to them, backwards (see [Note: first backward]); from then on,
  the one in which rank 0 completed them.

[Note: first backward]
Gradients that wait for their turn take scratch, so an order that is wrong for one backward only
makes the ring grow for good. Autograd runs the nodes that are ready in the reverse of the order in
which forward made them, so a unit gets its last gradient at the earliest of its modules:

    registered    tables.0  tables.1  {bottom,top}         tables are larger than a bucket
    forward       bottom  tables.0  tables.1  top
    completed     tables.1  tables.0  {bottom,top}         not {bottom,top} first

[Note: late units]
A unit can get another gradient after it was issued: a parameter is used outside of its module, or
a loop calls backward several times. The second gradient is collected apart and reduced at the end
of backward, and its sum is added to the first. From the next backward on that unit is left for the
end, so that it is reduced once. Both are part of `state_dict`: the order of additions changes the
last bits of a gradient, and a resumed run must add in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.transport import Group
from zrun_core.errors import CheckpointError
from zrun_core.zero.unit.flat_unit import FlatUnit


def _first_guess(units: Sequence[FlatUnit]) -> list[FlatUnit]:
    """Return the order in which to reduce `units`, before a backward has shown a better one."""
    guess: list[FlatUnit] = []
    for _, together in itertools.groupby(reversed(units), key=lambda unit: unit.layout.block):
        # Tiles would fill the ring, if they had to wait for a norm that is registered after them.
        guess += sorted(together, key=lambda unit: not unit.layout.tile)
    # Units that are kept unsharded have parameters of many modules: they are complete last.
    return sorted(guess, key=lambda unit: unit.layout.keep_unsharded)


class ReduceOrder:
    """The order of the reductions of one model's units, chunk by chunk.

    Attributes:
        units: the trained ones, in the order of before the first backward.
        backward: the same in the order of their reductions.
        chunks: of the model.
        left_for_end: indices of units that were late once.
    """

    def __init__(self, units: Sequence[FlatUnit], together: Group, comm: Comm) -> None:
        """
        Args:
            units: all units of the model, in order of registration; frozen ones are left out.
            together: the ranks that reduce in one order.
        """
        self.units: Sequence[FlatUnit] = _first_guess([unit for unit in units if unit.trainable])
        self.chunks = {unit.layout.chunk for unit in self.units}
        self.left_for_end: set[int] = set()
        self.backward = list(self.units)
        self._recorded: set[int] = set()  # chunks whose order a backward has shown
        self._foreseen: set[int] = set()  # whose order a forward has told
        self._together = together
        self._comm = comm

    def of_chunk(self, chunk: int) -> list[FlatUnit]:
        """Return the units of a chunk, in the order of their reductions."""
        return [unit for unit in self.backward if unit.layout.chunk == chunk]

    @property
    def forward(self) -> list[FlatUnit]:
        """The units in the order in which a forward should need them; alike on all ranks.

        Their gradients come in the opposite one.
        """
        return self.backward[::-1]

    @property
    def is_recorded(self) -> bool:
        """True once the order is known, which the first backward records."""
        return self._recorded == self.chunks

    def foresee(self, used: Sequence[int], chunk: int) -> None:
        """Expect the order of a chunk's first backward. Collective, as `adopt`.

        Args:
            used: indices of units, trained or not, in the order in which forward came to them.
        """
        if chunk in self._recorded | self._foreseen:
            return
        self._foreseen.add(chunk)
        trained = {unit.index for unit in self.of_chunk(chunk)}
        self.adopt([index for index in reversed(used) if index in trained], chunk)

    def record(self, seen: Iterable[int], chunk: int) -> None:
        """Adopt the order of a chunk's first backward.

        Args:
            chunk: that the backward has gone through.
        """
        if chunk not in self._recorded:
            self.adopt(seen, chunk)
            self._recorded.add(chunk)

    def adopt(self, seen_here: Iterable[int], chunk: int = 0) -> None:
        """Adopt the order in which rank 0 completed the units; those that it did not see come last.

        Collective over the ranks that reduce in one order.

        Args:
            seen_here: indices of units, in the order in which this rank completed them, or will.
        """
        by_index = {unit.index: unit for unit in self.of_chunk(chunk)}
        seen = list(seen_here)
        seen += [index for index in by_index if index not in seen]
        agreed = [by_index[index] for index in self.agree_on(seen)]
        orders = {each: self.of_chunk(each) for each in self.chunks} | {chunk: agreed}
        self.backward = [unit for each in sorted(orders, reverse=True) for unit in orders[each]]

    def agree_on(self, numbers: Sequence[int]) -> list[int]:
        """Return what the first of the ranks that reduce in one order has. Collective."""
        agreed = torch.tensor(numbers, device=self._comm.device)
        self._comm.broadcast(agreed, self._together, name="order of reductions")
        with self._comm.waiting():
            found: list[int] = agreed.tolist()
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return what backward passes have taught, as small JSON. See [Note: late units]."""
        order = None
        if self.is_recorded:
            order = [unit.name for unit in self.backward]
        late = sorted(unit.name for unit in self.backward if unit.index in self.left_for_end)
        return {"order": order, "late": late}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on as the same model on the same layout had gone on.

        Args:
            state: of its `state_dict`; None: begin anew.

        Raises:
            CheckpointError: it is of other units.
        """
        self.backward = list(self.units)
        self._recorded = set()
        self._foreseen = set()
        self.left_for_end = set()
        if state is None:
            return
        by_name = {unit.name: unit for unit in self.backward}
        order = state["order"]
        late = state["late"]
        fits = by_name.keys() >= set(late)
        if order is not None:
            fits = fits and sorted(order) == sorted(by_name)
        if not fits:
            raise CheckpointError("the order of reductions that it holds is of other units")
        if order is not None:
            self.backward = [by_name[name] for name in order]
            self._recorded = set(self.chunks)
        self.left_for_end = {by_name[name].index for name in late}
