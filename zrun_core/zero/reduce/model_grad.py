"""The gradient of a whole model at the end of a step: its norm, and which parameters got one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.named_vector import sent_to
from zrun_core.zero.reduce.nonfinite import Inspector, UnitNorms
from zrun_core.zero.reduce.reducer import Reducer
from zrun_core.zero.unit.flat_unit import FlatUnit


def square_norm_of(
    units: Sequence[FlatUnit],
    norms_of: Callable[[FlatUnit, int], list[torch.Tensor]],
    device: torch.device,
) -> tuple[torch.Tensor, UnitNorms]:
    """Return a rank's part of a gradient's squared norm, 0-d float64, and what it is made of.

    Args:
        units: that it counts; none on a stage of a pipeline that is frozen.
        norms_of: the 2-norms of pieces of the gradient in a part of a unit, 0-d each.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    evidence: UnitNorms = []
    by_groups: dict[str, list[FlatUnit]] = defaultdict(list)  # of which a rank counts alike parts
    for unit in units:
        by_groups[unit.layout.groups].append(unit)
    for alike in by_groups.values():
        first = alike[0]
        for part in first.exchange.counted_parts(first.layout, first.mesh_info):
            norms: list[torch.Tensor] = []
            of_units: list[FlatUnit] = []
            for unit in alike:
                found = sent_to(device, torch.stack(norms_of(unit, part)))
                norms.append(found)
                of_units += [unit] * len(found)
            values = torch.cat(norms)
            total += values.double().square().sum()
            evidence.append((of_units, values))
    return total, evidence


class ModelGrad:
    """The gradients of a model's trained units together.

    Attributes:
        inspector: finds what is not finite in them.
    """

    def __init__(self, units: Sequence[FlatUnit], reducer: Reducer, mesh: Mesh, comm: Comm) -> None:
        """
        Args:
            units: of the model; frozen ones are left out.
        """
        self._units = [unit for unit in units if unit.trainable]
        # Ranks along these axes hold equal copies of a unit: the first one counts it in norms.
        self._counted = [u for u in self._units if mesh.is_first(u.layout.replicated_over)]
        self._reducer = reducer
        self._device = comm.device
        self._never: set[str] | None = None  # parameters without a gradient in any step so far
        self.inspector = Inspector(units, comm, mesh)

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        self._reducer.begin_step()
        for unit in self._units:
            unit.grad.begin_step()
        self.inspector.begin_step()

    def square_norm(self) -> torch.Tensor:
        """Return this rank's part of the squared norm, 0-d float64.

        Each element counts once over all ranks. Parts are the same at every stage, and so are the
        bits of the norm.
        """
        total, self.inspector.norms = square_norm_of(
            self._counted, lambda unit, part: unit.grad.norms(part), self._device
        )
        return total

    def has_grad_here(self) -> bytes:
        """Return for each trained parameter whether it got a gradient on this rank: a byte each."""
        return b"".join(unit.grad.has_grad for unit in self._units)

    def has_grad_elsewhere(self, counts: Mapping[FlatUnit, torch.Tensor]) -> torch.Tensor | None:
        """Return on how many other stages each trained parameter of this rank got a gradient.

        Args:
            counts: of the units that other stages have too, as `Reducer.sum_shared` returns them.

        Returns:
            [parameters] float64 on the device; None: there are no such units.
        """
        if not counts:
            return None
        of_units = []
        for unit in self._units:
            found = counts.get(unit)
            if found is None:
                found = torch.zeros(len(unit.params), dtype=torch.float64, device=self._device)
            of_units.append(found)
        return torch.cat(of_units)

    def has_grad_anywhere(self, has_grad_here: bytes, counts: torch.Tensor) -> list[bytes]:
        """Return by unit which parameters got a gradient on any rank.

        Args:
            has_grad_here: a byte for each trained parameter of this rank.
            counts: [parameters] on how many ranks each got one. The host reads them, and waits,
                only if some parameter got none here.
        """
        has_grad = has_grad_here
        if not all(has_grad_here):
            has_grad = bytes(count > 0 for count in counts.tolist())
        by_unit = []
        missing = set()
        start = 0
        for unit in self._units:
            stop = start + len(unit.params)
            of_unit = has_grad[start:stop]
            by_unit.append(of_unit)
            for slot, has_one in zip(unit.layout.slots, of_unit, strict=True):
                if not has_one:
                    missing.add(slot.part.tensor)
            start = stop
        self._never = missing if self._never is None else self._never & missing
        return by_unit

    @property
    def without_gradient(self) -> list[str]:
        """Names of the trained parameters that have never got a gradient on any rank."""
        return sorted(self._never or ())
