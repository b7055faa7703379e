"""The update of flat shards: any elementwise optimizer, one unit after the other.

Each parameter's part in the updated range is a tensor of its own to the optimizer, so that
parameter groups, parameters without a gradient and per-parameter step counts behave as on the
plain model:

    updated range of a unit    |--- w1 ---|-- b1 --|--- part of w2 ---|  padding
    optimizer's parameters     |  group 0 | group 1|  group 0         |

[Note: records]
What an update reads and writes beside the gradient is one flat tensor per unit: see
`zero/record_layout.py`. Optimizers make their states themselves, in the first update of a
parameter and with the values that they begin with, as many small tensors. After that update they
are copied into the record, and the optimizer is given views of it instead: memory is taken twice
for one unit at a time. Loading a checkpoint makes the views at once. A parameter without a gradient
has room in the record, and no state until it gets one.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.transport import Group
from zrun_core.memory.arena import Ring
from zrun_core.memory.layout import ParamSlot, Piece
from zrun_core.optim import lightweight
from zrun_core.optim.chunked import Chunked, Scratch
from zrun_core.optim.layerwise import LayerWise, RangeNorms, TrustRatios
from zrun_core.optim.resolve import OptimizerSpec, Options
from zrun_core.spine import heap
from zrun_core.zero.unit import FlatUnit


class UnitOptimizer:
    """The optimizer of one unit.

    Attributes:
        unit: whose updated range it updates.
        pieces: the parts of parameters in that range.
        optimizer: knows each piece as a parameter; None where this rank updates nothing.
    """

    def __init__(
        self,
        unit: FlatUnit,
        spec: OptimizerSpec,
        groups: Sequence[Options],
        group_of: Callable[[ParamSlot], int],
        number_of: Mapping[str, int],
        scratch: Scratch,
    ) -> None:
        """
        Args:
            unit: trainable.
            spec: class and arguments of the optimizer.
            groups: options of each parameter group.
            group_of: number of the group of a parameter.
            number_of: by name of a tensor, its number in the model.
            scratch: that the optimizers of all units share.
        """
        self.unit = unit
        self.pieces: list[Piece] = list(unit.layout.pieces(*unit.updated_range))
        self._grad: torch.Tensor | None = None  # whose slices are below
        self._grad_slices: list[torch.Tensor] = []
        master = unit.master
        self._seen_record = unit.record.at()
        slices = [master[piece.start : piece.stop] for piece in self.pieces]
        self._params = [torch.nn.Parameter(each) for each in slices]
        # By parameter and name, the states that are views of the record.
        self._views: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._num_in_record = 0  # parameters whose states were moved there
        self._group_numbers: list[int] = []  # of the optimizer's groups
        self._may_replace_states = False
        self.optimizer: torch.optim.Optimizer | None = None
        if self._params:
            self.optimizer = self._build(spec, groups, group_of)
            # A user's own class may put other tensors in the place of our views, in any step.
            module = type(self.optimizer).__module__
            self._may_replace_states = not module.startswith(("torch.optim.", "zrun_core."))
        if isinstance(self.optimizer, Chunked):
            self._place_in_shards(self.optimizer, number_of, scratch)
        if self.optimizer is not None and self.optimizer.state:  # some make it at once
            self._move_into_record()

    def _build(
        self,
        spec: OptimizerSpec,
        groups: Sequence[Options],
        group_of: Callable[[ParamSlot], int],
    ) -> torch.optim.Optimizer:
        """Build the optimizer with those of `groups` that have a parameter here."""
        optimizer = spec.make(self._params)
        optimizer.param_groups.clear()
        members: dict[int, list[torch.nn.Parameter]] = {}
        for param, piece in zip(self._params, self.pieces, strict=True):
            members.setdefault(group_of(piece.slot), []).append(param)
        self._group_numbers = sorted(members)
        for number in self._group_numbers:
            optimizer.add_param_group({"params": members[number], **groups[number]})
        return optimizer

    def _place_in_shards(
        self, optimizer: Chunked, number_of: Mapping[str, int], scratch: Scratch
    ) -> None:
        """Tell an optimizer of ours where its parameters lie, so that all ranks chunk alike."""
        optimizer.scratch = scratch
        first = self.unit.updated_range[0]
        every = self.unit.layout.part_numel
        for param, piece in zip(self._params, self.pieces, strict=True):
            number = number_of[piece.slot.part.tensor]
            optimizer.place(param, number, first + piece.start, every)

    # Its states. See [Note: records]

    def state_of(self, param: torch.nn.Parameter) -> dict[str, Any]:
        """Return the optimizer's state of one of its parameters: empty until it is updated."""
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
            The new state. Numbers for each element are views of the record, and undefined.
        """
        assert self.optimizer is not None
        self._views.pop(param, None)
        self.optimizer.state.pop(param, None)
        if state is not None:
            formats = {}
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    formats[name] = value.dtype
            self._make_room(formats)
            views = {name: self._view(param, piece, name) for name in formats}
            self.optimizer.state[param] = {**state, **views}
        self._num_in_record = len(self.optimizer.state)
        return self.state_of(param)

    def begin_update(self) -> None:
        """Fetch the record, and show the optimizer where it lies."""
        if self.unit.fetch_record() is not self._seen_record:
            self._use_record()

    def end_update(self) -> None:
        """Move new states into the record, and update the parameters from their masters."""
        assert self.optimizer is not None
        if self._may_replace_states or len(self.optimizer.state) != self._num_in_record:
            self._move_into_record()
        self.unit.end_update()

    def _use_record(self) -> None:
        """Point the optimizer's parameters and states at the record, which has moved."""
        self._seen_record = self.unit.record.at()
        master = self.unit.master
        for param, piece in zip(self._params, self.pieces, strict=True):
            param.data = master[piece.start : piece.stop]
            for name in self._views.get(param, {}):
                self.state_of(param)[name] = self._view(param, piece, name)

    def _view(self, param: torch.nn.Parameter, piece: Piece, name: str) -> torch.Tensor:
        view = self.unit.moments[name][piece.start : piece.stop]
        self._views.setdefault(param, {})[name] = view
        return view

    def _make_room(self, formats: Mapping[str, torch.dtype]) -> None:
        """Add the moments that the record lacks."""
        missing = {name: dtype for name, dtype in formats.items() if name not in self.unit.moments}
        if missing:
            self.unit.add_moments(missing)
            self._use_record()

    def _move_into_record(self) -> None:
        """Copy the states that the optimizer has made for each element into the record.

        Where two parameters have a state of one name in different formats, the record has room in
        the first one's format; a state in another format stays where the optimizer made it.
        """
        assert self.optimizer is not None
        made = []
        for param, piece in zip(self._params, self.pieces, strict=True):
            views = self._views.get(param, {})
            for name, value in self.state_of(param).items():
                if _is_per_element(value, param) and value is not views.get(name):
                    made.append((param, piece, name, value.dtype))
        # Backwards, so that the first format of a name is the one that stays.
        self._make_room({name: dtype for _, _, name, dtype in reversed(made)})
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

    def set_grads(self, grad: torch.Tensor, has_grad: bytes | bytearray) -> None:
        """Give the optimizer its gradients.

        Args:
            grad: [updated range] fp32.
            has_grad: by parameter of the unit; one without a gradient is left alone by the update.
        """
        if grad is not self._grad:
            self._grad = grad
            self._grad_slices = [grad[piece.start : piece.stop] for piece in self.pieces]
        for param, piece, part in zip(self._params, self.pieces, self._grad_slices, strict=True):
            param.grad = part if has_grad[piece.index] else None

    def clear_grads(self) -> None:
        """Take the gradients away from the optimizer."""
        for param in self._params:
            param.grad = None


class ShardedOptimizer:
    """Updates the trainable units' masters in place, and the parameters from them."""

    def __init__(
        self,
        units: Sequence[FlatUnit],
        spec: OptimizerSpec,
        groups: Sequence[Options],
        group_of: Callable[[ParamSlot], int],
        scratch: Ring,
        comm: Comm,
        tensor: Group,
    ) -> None:
        """
        Args:
            units: all units of the model; frozen ones are left out.
            spec: class and arguments of the optimizer.
            groups: options of each parameter group.
            group_of: number of the group of a parameter.
            scratch: memory that may be taken while units are updated.
            comm: for the norms of layer-wise optimizers.
            tensor: the ranks that have other parts of the same tensors.
        """
        self._spec = spec
        self._scratch = scratch
        self._comm = comm
        self._tensor = tensor
        trained = [unit for unit in units if unit.trainable]
        slots = [slot for unit in trained for slot in unit.layout.slots]
        # By name of a tensor, the number of its group. Its position is the tensor's number.
        self._groups = {slot.part.tensor: group_of(slot) for slot in slots}
        numbers = {name: number for number, name in enumerate(self._groups)}
        of_chunks = Scratch()
        self._updates = [
            UnitOptimizer(unit, spec, groups, group_of, numbers, of_chunks) for unit in trained
        ]
        self._trust: TrustRatios | None = None
        if spec.layer_wise:
            self._trust = spec.trust(list(self._groups.values()), groups, comm.device)
        self._has_updated = False

    @property
    def scales_inside(self) -> bool:
        """True if the device can scale and skip without the host's help."""
        return self._spec.scales_inside

    def set_options(self, groups: Sequence[Options]) -> None:
        """Replace the options of each group, such as its learning rate.

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
        begun = []
        for update, of_unit in zip(self._updates, has_grad, strict=True):
            if update.optimizer is None:
                continue
            borrowed = self._begin(update, lr, of_unit, grad_scale, found_inf)
            if self._trust is not None:
                begun.append((update, borrowed))
                continue
            lightweight.step(update.optimizer)
            self._end(update, borrowed)
        if self._trust is not None:
            self._step_layer_wise(self._trust, [update for update, _ in begun])
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
        has_grad: bytes | bytearray,
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Give the unit's optimizer its gradient. Returns the scratch that it lies in, if any."""
        optimizer = update.optimizer
        assert optimizer is not None
        update.begin_update()
        grad, borrowed = self._fp32_grad(update.unit)
        if self._spec.scales_inside:
            optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        elif grad_scale is not None:
            grad.div_(grad_scale)
        if lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = lr
        update.set_grads(grad, has_grad)
        return borrowed

    def _end(self, update: UnitOptimizer, borrowed: torch.Tensor | None) -> None:
        update.clear_grads()
        if borrowed is not None:
            self._scratch.give(borrowed)
        update.unit.grad.drop()
        update.end_update()

    def _fp32_grad(self, unit: FlatUnit) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the unit's gradient [updated range] in fp32, and the scratch to give back."""
        grad = unit.fetch_grad()
        if grad.dtype == torch.float32:
            return grad, None
        wide = self._scratch.take(grad.numel(), torch.float32, grow=True)
        assert wide is not None
        wide.copy_(grad)
        unit.grad.drop()
        return wide, wide

    def _step_layer_wise(self, trust: TrustRatios, updates: Sequence[UnitOptimizer]) -> None:
        """Propose and apply. See [Note: layer-wise optimizers]."""
        optimizers: list[LayerWise] = []
        counted: list[RangeNorms] = []
        for update in updates:
            assert isinstance(update.optimizer, LayerWise)
            optimizers.append(update.optimizer)
            norms = update.optimizer.propose()
            is_replicated = self._tensor.axis in update.unit.layout.replicated_over
            if self._tensor.index == 0 or not is_replicated:
                counted.append(norms)
        parts, group = self._updates[0].unit.counted_once()
        squares = trust.squares(counted, parts)
        squares = self._comm.all_reduce_small(squares, group, name="trust ratios")
        squares = self._comm.all_reduce_small(squares, self._tensor, name="trust ratios")
        ratios = trust.ratios(squares)
        for optimizer in optimizers:
            optimizer.apply(ratios)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield everything that the optimizers keep on this rank."""
        for update in self._updates:
            if update.optimizer is None:
                continue
            for state in update.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        yield value

    def updated_pieces(
        self,
    ) -> Iterator[tuple[FlatUnit, Piece, torch.nn.Parameter, UnitOptimizer]]:
        """Yield every part of a parameter that this rank updates.

        Each is (unit, part, the part as its optimizer knows it, the optimizer of the unit).
        """
        for update in self._updates:
            update.begin_update()
            for piece, param in zip(update.pieces, update._params, strict=True):
                yield update.unit, piece, param, update


def _is_per_element(value: Any, param: torch.Tensor) -> bool:
    """Return whether a state has a number for each element of a parameter, in the same memory."""
    if not isinstance(value, torch.Tensor):
        return False
    return value.shape == param.shape and value.device == param.device
