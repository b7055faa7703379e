"""The update of flat shards, one unit after the other.

[Note: layer-wise optimizers]
LAMB and LARS need the norms of whole tensors and of their updates. So an update has two halves:

    every unit      propose     moments are updated, the gradient becomes the proposed update
    all ranks       one small message sums the squared norms of all tensors, in float64
    every unit      apply       the proposed update times the tensor's trust ratio

A rank counts the same parts at every stage, those of the shard that it has or would have, and parts
end where shards do: so the sums have the same bits at every stage. Ranks that have other parts of
the same tensors (tensor parallelism) add up theirs in a second message; what all of them have
counts on the first.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.transport import Group
from zrun_core.hardware import accelerator
from zrun_core.memory.arena import Ring
from zrun_core.memory.layout import ParamSlot, Piece
from zrun_core.memory.state_policy import DISK_SLOTS
from zrun_core.optim.chunked import Scratch
from zrun_core.optim.layerwise import RangeNorms, TrustRatios
from zrun_core.optim.resolve import OptimizerSpec, Options
from zrun_core.spine import heap
from zrun_core.tiers.tiers import Tiers
from zrun_core.tiers.transfer import DONE, Transfer
from zrun_core.zero.unit.flat_unit import FlatUnit
from zrun_core.zero.unit.update_side import UpdateSide
from zrun_core.zero.update.unit_optimizer import UnitOptimizer

_MOST_HOLES = 64 << 20  # bytes of freed memory in a CPU's heap


class Decision(NamedTuple):
    """Decision of all ranks about a step, where an update on the host can use it.

    Attributes:
        grad_scale: 0-d fp32 on the host; gradients are divided by it. None is 1, exactly.
        skipped: the update is not made.
    """

    grad_scale: torch.Tensor | None
    skipped: bool


class ShardedOptimizer:
    """Updates the trainable units' masters in place, and the parameters from them."""

    def __init__(
        self,
        units: Sequence[FlatUnit],
        spec: OptimizerSpec,
        groups: Sequence[Options],
        group_of: Callable[[ParamSlot], int],
        ring: Ring,
        comm: Comm,
        tensor: Group,
    ) -> None:
        """
        Args:
            units: all units of the model; frozen ones are left out.
            group_of: number of the group of a parameter.
            ring: memory that may be taken while units are updated together.
            comm: for the norms of layer-wise optimizers.
            tensor: the ranks that have other parts of the same tensors.
        """
        self._spec = spec
        self._ring = ring
        self._comm = comm
        self._tensor = tensor
        trained = [unit for unit in units if unit.trainable]
        slots = [slot for unit in trained for slot in unit.layout.slots]
        # By name of a tensor, the number of its group. Its position is the tensor's number.
        self._groups = {slot.part.tensor: group_of(slot) for slot in slots}
        numbers = {name: number for number, name in enumerate(self._groups)}
        scratch = Scratch()
        scratch_beside = Scratch()  # of the thread that updates beside training
        self._updates = [
            UnitOptimizer(
                unit,
                spec,
                groups,
                group_of,
                numbers,
                scratch_beside if unit.update_side.is_elsewhere else scratch,
            )
            for unit in trained
        ]
        self._trust: TrustRatios | None = None
        if spec.layer_wise:
            self._trust = spec.trust(list(self._groups.values()), groups, comm.device)
        self._has_updated = False
        self._ahead: list[FlatUnit] = []  # whose records were read for the next updates
        self._made_bytes = 0  # of states, since their holes were given back

    @property
    def scales_inside(self) -> bool:
        """True if the device can scale and skip without the host's help."""
        updates_both = self._trust is not None and self._updates_elsewhere
        return self._spec.scales_inside and not updates_both

    @property
    def _updates_elsewhere(self) -> bool:
        return any(each.unit.update_side.is_elsewhere for each in self._updates)

    def set_options(self, groups: Sequence[Options]) -> None:
        """Replace the options of each group, such as its learning rate.

        It is called between the end of a step's gradients, each of which has waited for the last
        update of its unit, and the next update: none reads the old options any more.

        Args:
            groups: each has its `weight_decay`, if any has one.
        """
        for update in self._updates:
            update.set_options(groups)
        if self._trust is not None:
            decays = [groups[number]["weight_decay"] for number in self._groups.values()]
            self._trust.set_decays(decays)

    def step(
        self,
        lr: float | None,
        has_grad: Sequence[bytes | bytearray],
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        """Update all units.

        Args:
            lr: learning rate of this step, for all groups; None leaves each its own.
            has_grad: by unit, which parameters got a gradient on any rank; others are left alone.
            grad_scale: 0-d fp32; gradients are divided by it. None is 1, exactly.
            found_inf: 0-d fp32; 1 skips the update on the device. None where the host knows that
                the step is to be made.
        """
        updates = [
            (update, of_unit)
            for update, of_unit in zip(self._updates, has_grad, strict=True)
            if update.pieces
        ]
        if self._trust is not None:
            self._step_layer_wise(self._trust, updates, lr, grad_scale, found_inf)
        else:
            before: UpdateSide | None = None
            for update, of_unit in updates:
                if not update.unit.update_side.is_elsewhere:
                    with self._comm.spans.named("update", update.unit.name):
                        _update(update, of_unit, lr, grad_scale, found_inf)
                    if before is not None:
                        before.wait_for_arrival()
                    before = update.unit.update_side
            if before is not None:
                before.wait_for_arrival()
        self._end_first_update()

    def step_by(
        self,
        grads: Mapping[FlatUnit, torch.Tensor],
        lr: float,
        has_grad: Sequence[bytes],
        grad_scale: torch.Tensor | None,
    ) -> None:
        """Update all units by gradients that are none of their own. Not for layer-wise optimizers.

        Args:
            grads: of each unit, [updated range] in reduce dtype, on the device; undefined
                afterwards.
            lr, has_grad, grad_scale: as of `step`.
        """
        for update, of_unit in zip(self._updates, has_grad, strict=True):
            if update.pieces:
                _update(update, of_unit, lr, grad_scale, None, grad=grads[update.unit])
        self._end_first_update()

    def _end_first_update(self) -> None:
        if not self._has_updated and self._comm.device.type == "cpu":
            # States that moved into the records have left holes between small ones that stay.
            heap.give_back_freed_memory()
        self._has_updated = True

    @property
    def starts_updates(self) -> bool:
        """True if `start` has something to do."""
        return self._trust is None and self._updates_elsewhere

    def _updated_beside(self, order: Sequence[FlatUnit]) -> list[FlatUnit]:
        """Return the units that are updated beside training, in the order of `order`."""
        units = {u.unit for u in self._updates if u.pieces and u.unit.update_side.is_elsewhere}
        return [unit for unit in order if unit in units]

    def read_ahead(self, order: Sequence[FlatUnit], tiers: Tiers) -> Transfer:
        """Begin to read the records of the first units that `start` will have updated.

        These records take all slots, until `start` or `forget_ahead`.

        Args:
            order: as of `start`.

        Returns:
            What is over when these reads have begun, and are counted.
        """
        if not self._ahead:  # else after an earlier backward
            self._ahead = self._updated_beside(order)[:DISK_SLOTS]

        def read(units: Sequence[FlatUnit]) -> None:
            for unit in units:
                unit.update_side.read_ahead(waits=True)

        return tiers.submit(partial(read, self._ahead))

    def forget_ahead(self) -> None:
        """Let go of what was read ahead, whose slots are needed by others."""
        for unit in self._ahead:
            unit.update_side.forget()
        self._ahead = []

    def start(
        self,
        lr: float | None,
        has_grad: Sequence[bytes | bytearray],
        decide: Callable[[], Decision],
        order: Sequence[FlatUnit],
        tiers: Tiers,
        *,
        delayed: bool,
    ) -> None:
        """Have the units updated, whose records are elsewhere, beside training.

            disk, or the device's gradient     read 1 | read 2   | read 3   |
            worker                                    | update 1 | update 2 | update 3 |
            disk, or the device's parameters                     | write 1  | write 2  | write 3

        Args:
            lr, has_grad: as of `step`.
            decide: returns what all ranks have decided about the step; it may wait.
            order: of the units that forward will need first.
            delayed: the next forward does not wait, and uses the parameters of now.
        """
        by_unit = {
            update.unit: (update, of_unit)
            for update, of_unit in zip(self._updates, has_grad, strict=True)
        }
        units = [*self._ahead, *(u for u in self._updated_beside(order) if u not in self._ahead)]
        self._ahead = []
        for number, unit in enumerate(units):
            update, of_unit = by_unit[unit]
            later = units[number + 1 : number + DISK_SLOTS]
            task = partial(self._update_beside, update, of_unit, lr, decide, later, tiers, delayed)
            unit.begin_updating(tiers.worker.submit(task), delayed=delayed)
        for each in self._updates:
            if each.unit.update_side.is_elsewhere and not each.pieces:
                # Padding only. All ranks must take the same units for being updated: they gather
                # these later than others, and find them stale where an update has been delayed.
                each.unit.begin_updating(DONE, delayed=delayed)

    def _update_beside(
        self,
        update: UnitOptimizer,
        has_grad: bytes | bytearray,
        lr: float | None,
        decide: Callable[[], Decision],
        later: Sequence[FlatUnit],
        tiers: Tiers,
        delayed: bool,
    ) -> None:
        """Update one unit, in the worker, while what `later` ones need is fetched."""
        decision = decide()
        if decision.skipped:
            update.unit.update_side.forget()
            return
        start = time.perf_counter()
        record_bytes = update.unit.record.layout.num_bytes
        update.unit.update_side.prefetch()
        for following in later[:1]:
            following.update_side.prefetch()

        def read_ahead() -> None:
            for unit in later[1:]:
                unit.update_side.read_ahead()

        named = self._comm.spans.named("update", update.unit.name)
        with tiers.traced(f"update {update.unit.name}"), named, torch.no_grad():
            _update(
                update,
                has_grad,
                lr,
                decision.grad_scale,
                None,
                keeps_params=delayed,
                meanwhile=read_ahead,
            )
        tiers.count_update(time.perf_counter() - start)
        self._give_back_holes(update.unit.record.layout.num_bytes - record_bytes)

    def _give_back_holes(self, num_made: int) -> None:
        """Give the system back what states have left that were made on the heap and moved.

        Of a model that does not fit in memory, these holes would not fit either. `num_made` are the
        bytes of states that the last update has made.
        """
        self._made_bytes += num_made
        if self._made_bytes > _MOST_HOLES:
            self._made_bytes = 0
            heap.give_back_freed_memory()

    def _fp32_grad(self, unit: FlatUnit) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the unit's gradient [updated range] in fp32, and the scratch to give back."""
        if unit.update_side.is_elsewhere:
            proposal = unit.update_side.grad().to(torch.float32, copy=True)
            unit.update_side.drop_grad()  # its slot is needed by others
            return proposal, None
        grad = unit.grad.fetch()
        if grad.dtype == torch.float32:
            return grad, None
        wide = self._ring.take(grad.numel(), torch.float32, grow=True)
        assert wide is not None
        wide.copy_(grad)
        unit.grad.drop()
        return wide, wide

    def _step_layer_wise(
        self,
        trust: TrustRatios,
        updates: Sequence[tuple[UnitOptimizer, bytes | bytearray]],
        lr: float | None,
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        """Propose and apply. See [Note: layer-wise optimizers]."""
        borrowed: list[torch.Tensor] = []
        counted: dict[str, list[RangeNorms]] = defaultdict(list)  # by the groups of their units
        scale_on_host = grad_scale
        if grad_scale is not None and self._updates_elsewhere:
            scale_on_host = accelerator.fetch(grad_scale)
        for update, of_unit in updates:
            update.begin_update()
            grad, scratch = self._fp32_grad(update.unit)
            if scratch is not None:
                borrowed.append(scratch)
            scale = scale_on_host if grad.device.type == "cpu" else grad_scale
            with self._comm.spans.named("propose", update.unit.name):
                norms = update.propose(grad, of_unit, lr=lr, grad_scale=scale, found_inf=found_inf)
            is_replicated = self._tensor.axis in update.unit.layout.replicated_over
            if self._tensor.index == 0 or not is_replicated:
                counted[update.unit.layout.groups].append(norms.to(self._comm.device))
        squares = self._summed_squares(trust, counted)
        squares = self._comm.all_reduce_small(squares, self._tensor, name="trust ratios")
        ratios = trust.ratios(squares)
        ratios_elsewhere = ratios
        if self._updates_elsewhere and squares.device.type != "cpu":
            ratios_elsewhere = torch.tensor(self._comm.read(torch.stack(list(ratios)))).unbind()
        for update, _ in updates:
            is_elsewhere = update.unit.update_side.is_elsewhere
            with self._comm.spans.named("update", update.unit.name):
                update.apply(
                    ratios_elsewhere if is_elsewhere else ratios,
                    out=update.unit.update_side.target(),
                )
            update.unit.update_side.end()
            update.unit.settle()
        for scratch in borrowed:
            self._ring.give(scratch)

    def _summed_squares(
        self, trust: TrustRatios, counted: Mapping[str, Sequence[RangeNorms]]
    ) -> torch.Tensor:
        """Return the squared norms of all units, each summed over the ranks that it lies on.

        `counted` has the norms that this rank counts, by the groups of their units.
        """
        units = {update.unit.layout.groups: update.unit for update in self._updates}
        summed = []
        for groups in sorted(units):  # alike on all ranks
            parts, group = units[groups].counted_once()
            squares = trust.squares(counted.get(groups, ()), parts)
            summed.append(self._comm.all_reduce_small(squares, group, name="trust ratios"))
        return summed[0] if len(summed) == 1 else torch.stack(summed).sum(0)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield everything that the optimizers keep on this rank."""
        for update in self._updates:
            yield from update.tensors()

    def updated_pieces(self) -> Iterator[tuple[FlatUnit, Piece, UnitOptimizer]]:
        """Yield every part of a parameter that this rank updates, with the unit's optimizer.

        Nothing is fetched.
        """
        for update in self._updates:
            for piece in update.pieces:
                yield update.unit, piece, update

    def of(self, unit: FlatUnit) -> UnitOptimizer | None:
        """Return the optimizer of a unit; None: it is not trained."""
        return next((update for update in self._updates if update.unit is unit), None)


def _update(
    update: UnitOptimizer,
    has_grad: bytes | bytearray,
    lr: float | None,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    *,
    grad: torch.Tensor | None = None,
    keeps_params: bool = False,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Update one unit.

    `grad` is what it is updated by (None: its own gradient), and `has_grad` is by parameter of the
    unit. With `keeps_params` only the masters are updated. `meanwhile` is as of
    `UnitOptimizer.update`, the rest as of `ShardedOptimizer.step`.
    """
    unit = update.unit
    update.begin_update()
    if grad is None:
        grad = unit.update_side.grad()
    update.update(
        grad,
        has_grad,
        lr=lr,
        grad_scale=grad_scale,
        found_inf=found_inf,
        out=None if keeps_params else unit.update_side.target(),
        meanwhile=meanwhile,
    )
    unit.update_side.end()
