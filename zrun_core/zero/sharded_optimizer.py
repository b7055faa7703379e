"""The update of flat shards: any elementwise optimizer, on views of this rank's elements, one unit after the other.

Each parameter's part in the shard is a tensor of its own to the optimizer, so that parameter groups, parameters without
a gradient and per-parameter step counts behave as on the plain model.

[Note: records]
What an update reads and writes beside the gradient is one flat tensor per unit: see
`zero/record_layout.py`. Optimizers make their states themselves, in the first update of a parameter and
with the values that they begin with, as many small tensors. After that update they are copied into
the record, and the optimizer is given views of it instead: so memory is taken twice for one unit
at a time. Loading a checkpoint makes the views at once. A parameter without a gradient has room in
the record, and no state until it gets one.

[Note: layer-wise optimizers]
LAMB and LARS need the norms of whole tensors and of their updates. All units propose their updates
first; one small message sums the squared norms of all tensors, in float64; then all units apply
theirs. A rank counts the same parts at every stage, those of the shard that it has or would have,
and parts end where shards do: so the sums have the same bits at every stage. Ranks that have other
parts of the same tensors add up theirs in a second message; what all of them have counts on the
first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.transport import Group
from zrun_core.memory.arena import Ring
from zrun_core.memory.layout import ParamSlot, Piece
from zrun_core.optim import lightweight
from zrun_core.optim.chunked import Chunked, Scratch
from zrun_core.optim.layerwise import LayerWise, TrustRatios
from zrun_core.optim.resolve import OptimizerSpec, Options
from zrun_core.spine import heap
from zrun_core.zero.unit import FlatUnit


class UnitOptimizer:
    """The optimizer of one unit."""

    def __init__(
        self,
        unit: FlatUnit,
        chosen: OptimizerSpec,
        groups: Sequence[Options],
        group_of: Callable[[ParamSlot], int],
        number_of: Mapping[str, int],
        scratch: Scratch,
    ) -> None:
        """
        Args:
            number_of: by name of a tensor, its number in the model.
            scratch: that the optimizers of all units share.
        """
        self.unit = unit
        start, stop = unit.updated_range
        self.pieces: list[Piece] = list(unit.layout.pieces(start, stop))
        self._grad: torch.Tensor | None = None  # whose parts are below
        self._grad_parts: list[torch.Tensor] = []
        master, self._shown = unit.master, unit.record.at()
        self._params = [
            torch.nn.Parameter(master[piece.start : piece.stop])
            for piece in self.pieces  # those that this rank updates
        ]
        # By parameter and name, the states that are in the record.
        self._views: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._num_in_record = 0  # parameters whose states were moved there
        self._may_replace = False  # an optimizer of the user's may put others in their place
        self.optimizer: torch.optim.Optimizer | None = None
        if self._params:
            self.optimizer = chosen.make(self._params, None)
            is_known = type(self.optimizer).__module__.startswith(("torch.optim.", "zrun_core."))
            self._may_replace = not is_known
            self.optimizer.param_groups.clear()
            numbers = [group_of(piece.slot) for piece in self.pieces]
            self._group_numbers = sorted(set(numbers))  # of the optimizer's groups
            for group in self._group_numbers:
                members = [
                    param
                    for param, number in zip(self._params, numbers, strict=True)
                    if number == group
                ]
                self.optimizer.add_param_group({"params": members, **groups[group]})
        if isinstance(self.optimizer, Chunked):
            self.optimizer.scratch = scratch
            every = unit.layout.part_numel
            for param, piece in zip(self._params, self.pieces, strict=True):
                number = number_of[piece.slot.part.tensor]
                self.optimizer.place(param, number, start + piece.start, every)
        if self.optimizer is not None and self.optimizer.state:  # some make it at once
            self._move_into_record()

    # Its states. See [Note: records]

    def state_of(self, param: torch.nn.Parameter) -> dict[str, Any]:
        """Return what the optimizer keeps of a parameter of its: nothing until that is updated."""
        assert self.optimizer is not None
        state: dict[str, Any] = self.optimizer.state.get(param, {})
        return state

    def set_state(
        self,
        param: torch.nn.Parameter,
        piece: Piece,
        state: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """Give the optimizer another state of a parameter.

        Args:
            param: as the optimizer knows it.
            piece: where it lies in the elements that this rank updates.
            state: as the optimizer keeps it; a tensor with dimensions stands for one of its format
                with a number for each element. None: the parameter is as if it was never updated.

        Returns:
            What the optimizer has now. Numbers for each element are in the record, and undefined.
        """
        assert self.optimizer is not None
        self._views.pop(param, None)
        self.optimizer.state.pop(param, None)
        if state is not None:
            tensors = {name: each for name, each in state.items() if isinstance(each, torch.Tensor)}
            formats = {name: each.dtype for name, each in tensors.items() if each.dim()}
            self._make_room(formats)
            views = {name: self._view(param, piece, name) for name in formats}
            self.optimizer.state[param] = {**state, **views}
        self._num_in_record = len(self.optimizer.state)
        return self.state_of(param)

    def begin_update(self) -> None:
        """Have the record come here, and the optimizer see where it lies."""
        if self.unit.fetch_record() is not self._shown:
            self._show()

    def end_update(self) -> None:
        """After an update: new states move into the record, and parameters follow the masters."""
        assert self.optimizer is not None
        if self._may_replace or len(self.optimizer.state) != self._num_in_record:
            self._move_into_record()
        self.unit.end_update()

    def _show(self) -> None:
        """Point the optimizer's parameters and states at the record, as far as they are in it."""
        self._shown, master = self.unit.record.at(), self.unit.master
        for param, piece in zip(self._params, self.pieces, strict=True):
            param.data = master[piece.start : piece.stop]
            for name in self._views.get(param, {}):
                self.state_of(param)[name] = self._view(param, piece, name)

    def _view(self, param: torch.nn.Parameter, piece: Piece, name: str) -> torch.Tensor:
        view = self.unit.moments[name][piece.start : piece.stop]
        self._views.setdefault(param, {})[name] = view
        return view

    def _make_room(self, formats: Mapping[str, torch.dtype]) -> None:
        missing = {name: dtype for name, dtype in formats.items() if name not in self.unit.moments}
        if missing:
            self.unit.add_moments(missing)
            self._show()

    def _move_into_record(self) -> None:
        """Move what the optimizer has made for each element into the record."""
        assert self.optimizer is not None
        made = []
        for param, piece in zip(self._params, self.pieces, strict=True):
            views = self._views.get(param, {})
            for name, value in self.state_of(param).items():
                if _is_per_element(value, param) and value is not views.get(name):
                    made.append((param, piece, name, value.dtype))
        self._make_room({name: dtype for _, _, name, dtype in reversed(made)})  # the first one's
        for param, piece, name, dtype in made:
            if self.unit.moments[name].dtype == dtype:
                state = self.state_of(param)
                state[name] = self._view(param, piece, name).copy_(state[name])
        self._num_in_record = len(self.optimizer.state)

    # One update

    def set_options(self, groups: Sequence[Options]) -> None:
        """Replace the options of each group."""
        if self.optimizer is not None:
            for number, group in zip(self._group_numbers, self.optimizer.param_groups, strict=True):
                group.update(groups[number])

    def set_grads(self, grad: torch.Tensor | None, got: bytes | bytearray) -> None:
        """Show the optimizer `grad` [owned], or nothing for parameters that got none (or once the step is over)."""
        if grad is None:
            for param in self._params:
                param.grad = None
            return
        if grad is not self._grad:
            self._grad, self._grad_parts = (
                grad,
                [grad[piece.start : piece.stop] for piece in self.pieces],
            )
        for param, piece, part in zip(self._params, self.pieces, self._grad_parts, strict=True):
            param.grad = part if got[piece.index] else None


class ShardedOptimizer:
    """Updates the trainable units' masters in place, and the parameters in compute dtype from them."""

    def __init__(
        self,
        units: Sequence[FlatUnit],
        chosen: OptimizerSpec,
        groups: Sequence[Options],
        group_of: Callable[[ParamSlot], int],
        scratch: Ring,
        comm: Comm,
        tensor: Group,
    ) -> None:
        """An optimizer with `groups`, of which `group_of` gives a parameter's number.

        Args:
            scratch: memory that may be taken while units are updated.
            tensor: the ranks that have other parts of the same tensors.
        """
        self._chosen, self._scratch, self._comm, self._tensor = chosen, scratch, comm, tensor
        self._updates: list[UnitOptimizer] = []
        trained = [unit for unit in units if unit.trainable]
        slots = [slot for unit in trained for slot in unit.layout.slots]
        self._groups = {slot.part.tensor: group_of(slot) for slot in slots}  # a number for each
        numbers, of_chunks = {name: number for number, name in enumerate(self._groups)}, Scratch()
        for unit in trained:
            update = UnitOptimizer(unit, chosen, groups, group_of, numbers, of_chunks)
            self._updates.append(update)
        self._trust: TrustRatios | None = None
        if chosen.layer_wise:
            self._trust = chosen.trust(list(self._groups.values()), groups, comm.device)
        self._has_updated = False

    @property
    def scales_inside(self) -> bool:
        """Whether the device can scale and skip without the host's help."""
        return self._chosen.scales_inside

    def set_options(self, groups: Sequence[Options]) -> None:
        """Replace the options of each group, such as its learning rate. Each has its `weight_decay`, if any has one."""
        for update in self._updates:
            update.set_options(groups)
        if self._trust is not None:
            decays = [groups[number]["weight_decay"] for number in self._groups.values()]
            self._trust.set_decays(decays)

    def step(
        self,
        lr: float | None,
        got: Sequence[bytes | bytearray],
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        """One update. `found_inf` is None where the host knows already that the step is to be made.

        Args:
            lr: learning rate of this step, for all groups; None leaves each its own.
            got: by unit, which parameters got a gradient on any rank; the others are left alone.
            grad_scale: 0-d fp32; gradients are divided by it. None is 1, exactly.
            found_inf: 0-d fp32; 1 skips the update on the device.
        """
        begun = []
        for update, unit_got in zip(self._updates, got, strict=True):
            if update.optimizer is None:
                continue
            borrowed = self._begin(update, lr, unit_got, grad_scale, found_inf)
            if self._chosen.layer_wise:
                begun.append((update, borrowed))
            else:
                lightweight.step(update.optimizer)
                self._end(update, borrowed)
        if self._chosen.layer_wise:
            self._apply_together([update for update, _ in begun])
            for update, borrowed in begun:
                self._end(update, borrowed)
        if not self._has_updated and self._comm.device.type == "cpu":
            # States that moved into the records have left holes between small ones that stay.
            heap.give_back_freed_memory()
        self._has_updated = True

    def _begin(
        self,
        update: UnitOptimizer,
        lr: float | None,
        got: bytes | bytearray,
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Show the unit's optimizer its gradient; returns scratch that this took."""
        optimizer = update.optimizer
        assert optimizer is not None
        update.begin_update()
        grad, borrowed = self._fp32_grad(update.unit)
        if self._chosen.scales_inside:
            optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf  # type: ignore[attr-defined]
        elif grad_scale is not None:
            grad.div_(grad_scale)
        if lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = lr
        update.set_grads(grad, got)
        return grad if borrowed else None

    def _end(self, update: UnitOptimizer, borrowed: torch.Tensor | None) -> None:
        update.set_grads(None, b"")
        if borrowed is not None:
            self._scratch.give(borrowed)
        update.unit.grad.drop()
        update.end_update()

    def _apply_together(self, updates: Sequence[UnitOptimizer]) -> None:
        """The two halves of a layer-wise update. See [Note: layer-wise optimizers]."""
        assert self._trust is not None
        optimizers = [
            update.optimizer for update in updates if isinstance(update.optimizer, LayerWise)
        ]
        unit = self._updates[0].unit
        parts, group = unit.counted_once()
        proposed = [optimizer.propose() for optimizer in optimizers]
        counted = [
            norms
            for update, norms in zip(updates, proposed, strict=True)
            if self._tensor.index == 0
            or self._tensor.axis not in update.unit.layout.replicated_over
        ]
        squares = self._trust.squares(counted, parts)
        for each in (group, self._tensor):
            squares = self._comm.all_reduce_small(squares, each, name="trust ratios")
        ratios = self._trust.ratios(squares)
        for optimizer in optimizers:
            optimizer.apply(ratios)

    def _fp32_grad(self, unit: FlatUnit) -> tuple[torch.Tensor, bool]:
        """The unit's gradient in fp32, and whether it lies in scratch."""
        grad = unit.fetch_grad()
        if grad.dtype == torch.float32:
            return grad, False
        room = self._scratch.take(grad.numel(), torch.float32, grow=True)
        assert room is not None
        room.copy_(grad)
        unit.grad.drop()
        return room, True

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything that the optimizers keep on this rank."""
        for update in self._updates:
            for state in update.optimizer.state.values() if update.optimizer is not None else ():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def held(self) -> Iterator[tuple[FlatUnit, Piece, torch.nn.Parameter, UnitOptimizer]]:
        """Yield every part of a parameter that this rank updates.

        Each is (unit, part, the part as its optimizer knows it, whom to ask for that one's state).
        """
        for update in self._updates:
            update.begin_update()
            for piece, param in zip(update.pieces, update._params, strict=True):
                yield update.unit, piece, param, update


def _is_per_element(value: Any, param: torch.Tensor) -> bool:
    """Whether a state has a number for each element of a parameter, beside them."""
    if not isinstance(value, torch.Tensor):
        return False
    return value.shape == param.shape and value.device == param.device
