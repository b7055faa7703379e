"""The optimizer of one unit: any elementwise one, on chunks that stay in a CPU's cache.

To the optimizer each parameter's part in the updated range, a *piece*, is made of parameters, so
that parameter groups, parameters without a gradient and step counts behave as on the plain model:

    updated range of a unit    |--- w1 ---|-- b1 --|--- part of w2 ---|  padding
    parameter group            |  group 0 | group 1|  group 0         |

[Note: records]
What an update reads and writes beside the gradient is one flat tensor per unit: see
`zero/unit/record_layout.py`. Optimizers make their states themselves, in the first update of a
parameter and with the values that they begin with, as many small tensors. After that update they
are copied into the record, and the optimizer is given views of it instead: memory is taken twice
for one group at a time. Loading a checkpoint makes the views at once. A parameter without a
gradient has room in the record, and no state until it gets one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch

from zrun_core.memory.layout import ParamSlot, Piece
from zrun_core.optim import lightweight
from zrun_core.optim.chunked import CHUNK, GROUP, Chunked, Scratch, shard_borders
from zrun_core.optim.layerwise import LayerWise, RangeNorms
from zrun_core.optim.resolve import OptimizerSpec, Options
from zrun_core.tiers.stored import Stored
from zrun_core.zero.unit.flat_unit import FlatUnit
from zrun_core.zero.update.chunk_group import Chunk, ChunkGroup, cut_into_groups


class UnitOptimizer:
    """The optimizer of one unit.

    It moves nothing between homes: whoever updates calls `begin_update` before, and
    `UpdateSide.end` after it.

    Attributes:
        unit: whose updated range it updates.
        pieces: the parts of parameters in that range; none where this rank updates nothing.
        scratch: that it shares with the optimizers of other units.
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
            group_of: number of the group of a parameter.
            number_of: by name of a tensor, its number in the model.
            scratch: of the thread that updates this unit. Optimizers share it that take turns.
        """
        self.unit = unit
        self.pieces: list[Piece] = list(unit.layout.pieces(*unit.updated_range))
        self._scales_inside = spec.scales_inside
        self.scratch = scratch
        self._seen_record = unit.fetch_record()
        self._seen_window = unit.param.window
        self._chunk_groups: list[ChunkGroup] = []
        self._chunks_of: dict[int, list[tuple[ChunkGroup, Chunk]]] = {}  # by parameter's number
        self._may_replace_states = False
        for chunks in self._cut(spec):
            group = ChunkGroup(chunks, spec, groups, group_of)
            self._chunk_groups.append(group)
            for chunk in chunks:
                self._chunks_of.setdefault(chunk.piece.index, []).append((group, chunk))
            # A user's own class may put other tensors in the place of our views, in any step.
            module = type(group.optimizer).__module__
            self._may_replace_states = not module.startswith(("torch.optim.", "zrun_core."))
            if isinstance(group.optimizer, Chunked):
                self._place_in_shards(group.optimizer, chunks, number_of)
            if group.optimizer.state:  # some make it at once
                self._move_into_record(group)
        if unit.record.moments:
            unit.record.home.put()
        unit.drop_values()

    def _cut(self, spec: OptimizerSpec) -> Iterator[list[Chunk]]:
        """Yield the chunks of each group. See `chunk_group.py`."""
        device = self.unit.master.device.type
        limit = GROUP[device]
        if spec.layer_wise:  # it proposes all updates before it applies the first
            limit = self.unit.master.numel()
        runs = [
            (piece, start, stop)
            for piece in self.pieces
            for start, stop in self._runs_of(piece, spec)
        ]
        for group in cut_into_groups(runs, limit, CHUNK[device]):
            # Not of one `master`: moments that the group before made have moved it.
            master = self.unit.master
            yield [
                Chunk(piece, start, stop, torch.nn.Parameter(master[start:stop]))
                for piece, start, stop in group
            ]

    def _runs_of(self, piece: Piece, spec: OptimizerSpec) -> Iterable[tuple[int, int]]:
        """Return the ranges of a piece in which chunks are counted from the beginning."""
        if not spec.restarts_in_shards:
            return [(piece.start, piece.stop)]
        first = self.unit.updated_range[0]
        borders = shard_borders(
            first + piece.start, first + piece.stop, self.unit.layout.part_numel
        )
        return pairwise(border - first for border in borders)

    def _place_in_shards(
        self, optimizer: Chunked, chunks: Sequence[Chunk], number_of: Mapping[str, int]
    ) -> None:
        """Tell an optimizer of ours where its parameters lie, so that all ranks chunk alike."""
        optimizer.scratch = self.scratch
        first = self.unit.updated_range[0]
        every = self.unit.layout.part_numel
        for chunk in chunks:
            number = number_of[chunk.piece.slot.part.tensor]
            optimizer.place(chunk.param, number, first + chunk.start, every)

    def set_options(self, groups: Sequence[Options]) -> None:
        """Replace the options of each parameter group."""
        for group in self._chunk_groups:
            group.set_options(groups)

    # Its states. See [Note: records]

    def state_of(self, piece: Piece) -> dict[str, Any]:
        """Return what the optimizer keeps of one of `pieces`: nothing until it is updated.

        Numbers for each element are views of the record if it has room for them.
        """
        return self._state_of(piece, self.unit.record.moments.__getitem__)

    def stored_state_of(self, piece: Piece) -> dict[str, Any]:
        """Return the same without fetching the record: its parts as they are stored."""
        return self._state_of(piece, self.unit.stored_moment)

    def _state_of(
        self, piece: Piece, moment: Callable[[str], torch.Tensor | Stored]
    ) -> dict[str, Any]:
        members = self._chunks_of[piece.index]
        states = [group.state_of(chunk) for group, chunk in members]
        found: dict[str, Any] = dict(states[0])
        for name, value in found.items():
            if all(name in chunk.views for _, chunk in members):
                found[name] = moment(name)[piece.start : piece.stop]
            elif _is_per_element(value, members[0][1].param):
                found[name] = torch.cat([state[name] for state in states])
        return found

    def set_state(self, piece: Piece, state: Mapping[str, Any] | None) -> dict[str, Any]:
        """Give the optimizer another state of one of `pieces`.

        Args:
            state: as the optimizer keeps it; a tensor with dimensions stands for one of its format
                with a number for each element. None: the piece is as if it was never updated.

        Returns:
            The new state. Numbers for each element are views of the record, and undefined.
        """
        formats = {}
        scalars = {}
        for name, value in (state or {}).items():
            if isinstance(value, torch.Tensor) and value.dim():
                formats[name] = value.dtype
            else:
                scalars[name] = value
        self._make_room(formats)
        for group, chunk in self._chunks_of[piece.index]:
            chunk.views = {name: self._view(chunk, name) for name in formats}
            group.optimizer.state.pop(chunk.param, None)
            if state is not None:
                # Each chunk has scalars of its own: optimizers count them up in place.
                group.optimizer.state[chunk.param] = deepcopy(scalars) | chunk.views
            group.num_in_record = len(group.optimizer.state)
        return self.state_of(piece)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield everything that the optimizer keeps. An update may run meanwhile, in a thread."""
        for group in self._chunk_groups:
            for state in list(group.optimizer.state.values()):
                for value in list(state.values()):
                    if isinstance(value, torch.Tensor):
                        yield value

    def _use_record(self) -> None:
        """Point the optimizer's parameters and states at where they are now."""
        self._seen_record = self.unit.record.home.at()
        self._seen_window = self.unit.param.window
        master = self.unit.master
        for group in self._chunk_groups:
            for chunk in group.chunks:
                chunk.param.data = master[chunk.start : chunk.stop]
                for name in chunk.views:
                    chunk.views[name] = self._view(chunk, name)
                    group.state_of(chunk)[name] = chunk.views[name]

    def _view(self, part: Piece | Chunk, name: str) -> torch.Tensor:
        return self.unit.record.moments[name][part.start : part.stop]

    def _make_room(self, formats: Mapping[str, torch.dtype]) -> None:
        """Add the moments that the record lacks."""
        missing = {
            name: dtype for name, dtype in formats.items() if name not in self.unit.record.moments
        }
        if missing:
            self.unit.record.add_moments(missing)
            self._use_record()

    def _move_into_record(self, group: ChunkGroup) -> None:
        """Copy the states that the optimizer has made for each element into the record.

        Where two parameters have a state of one name in different formats, the record has room in
        the first one's format; a state in another format stays where the optimizer made it.
        """
        made = []
        for chunk in group.chunks:
            for name, value in group.state_of(chunk).items():
                if _is_per_element(value, chunk.param) and value is not chunk.views.get(name):
                    made.append((chunk, name, value.dtype))
        # Backwards, so that the first format of a name is the one that stays.
        self._make_room({name: dtype for _, name, dtype in reversed(made)})
        for chunk, name, dtype in made:
            if self.unit.record.moments[name].dtype == dtype:
                state = group.state_of(chunk)
                chunk.views[name] = self._view(chunk, name).copy_(state[name])
                state[name] = chunk.views[name]
        group.num_in_record = len(group.optimizer.state)

    # One update

    def begin_update(self) -> None:
        """Fetch the record, and show the optimizer where it and the parameters lie."""
        record = self.unit.fetch_record()
        is_own_master = not self.unit.has_master
        has_moved = is_own_master and self.unit.param.window is not self._seen_window
        if record is not self._seen_record or has_moved:
            self._use_record()

    def update(
        self,
        grad: torch.Tensor,
        has_grad: bytes | bytearray,
        *,
        lr: float | None,
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        out: torch.Tensor | None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Update the masters, and cast them to the parameters. Not for layer-wise optimizers.

        Args:
            grad: [updated range] in reduce dtype, on the device of the record; may be overwritten.
            has_grad: by parameter of the unit; one without a gradient is left alone.
            lr: learning rate of all parameter groups; None leaves each its own.
            grad_scale: 0-d fp32; gradients are divided by it. None is 1, exactly.
            found_inf: 0-d fp32; 1 skips the update on the device. None: it is to be made.
            out: [updated range] in compute dtype, the parameters; None: they are the masters.
            meanwhile: called before each part of the work.
        """
        for group in self._chunk_groups:
            meanwhile()
            if self._scales_inside:
                wide = self._fp32(grad[group.start : group.stop], None)
            else:
                wide = self._fp32(grad[group.start : group.stop], grad_scale)
            self._prepare(group, wide, has_grad, lr, grad_scale, found_inf)
            lightweight.step(group.optimizer)
            self._finish(group, out)
        self._cast_padding(out)

    def propose(
        self,
        grad: torch.Tensor,
        has_grad: bytes | bytearray,
        *,
        lr: float | None,
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> RangeNorms:
        """Make the first half of a layer-wise update.

        Args:
            grad: [updated range] fp32; it holds the proposed update until `apply`.
            has_grad: as of `update`, like the others.
        """
        (group,) = self._chunk_groups
        assert isinstance(group.optimizer, LayerWise)
        wide = grad[group.start : group.stop]
        self._prepare(group, wide, has_grad, lr, grad_scale, found_inf)
        return group.optimizer.propose()

    def apply(self, ratios: Sequence[torch.Tensor], *, out: torch.Tensor | None) -> None:
        """Make the second half of a layer-wise update.

        Args:
            ratios: as of `LayerWise.apply`.
            out: as of `update`.
        """
        (group,) = self._chunk_groups
        assert isinstance(group.optimizer, LayerWise)
        group.optimizer.apply(ratios)
        self._finish(group, out)
        self._cast_padding(out)

    def _fp32(self, grad: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient of a group in fp32, divided by `scale` if there is one."""
        is_wide = grad.dtype == torch.float32
        if is_wide and scale is None:
            return grad
        wide = self.scratch.of_group(grad.numel(), grad.device)
        if is_wide and scale is not None:
            return torch.div(grad, scale, out=wide)
        wide.copy_(grad)
        return wide if scale is None else wide.div_(scale)

    def _prepare(
        self,
        group: ChunkGroup,
        grad: torch.Tensor,
        has_grad: bytes | bytearray,
        lr: float | None,
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        """Give a group its gradient, [elements of the group] fp32, and the rest of the step."""
        if self._scales_inside:
            group.optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
            group.optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        if lr is not None:
            group.set_lr(lr)
        group.set_grads(grad, has_grad)

    def _finish(self, group: ChunkGroup, out: torch.Tensor | None) -> None:
        """Take the gradient away, move new states into the record, and cast the masters."""
        group.clear_grads()
        if self._may_replace_states or len(group.optimizer.state) != group.num_in_record:
            self._move_into_record(group)
        if out is not None:
            _cast(self.unit.master, out, group.start, group.stop)

    def _cast_padding(self, out: torch.Tensor | None) -> None:
        """Cast what follows the last piece too: other ranks and homes get all of `out`."""
        if out is not None:
            _cast(self.unit.master, out, self.pieces[-1].stop, out.numel())


def _cast(master: torch.Tensor, out: torch.Tensor, start: int, stop: int) -> None:
    out[start:stop].copy_(master[start:stop])


def _is_per_element(value: Any, param: torch.Tensor) -> bool:
    """Return whether a state has a number for each element of a parameter, in the same memory."""
    if not isinstance(value, torch.Tensor):
        return False
    return value.shape == param.shape and value.device == param.device
