"""A rank's part of a sharded model as flat ranges of named tensors, to be saved and to be loaded.

Each element is written by one rank: the updated range of a unit is divided once more among the
ranks that hold equal copies of it, so that every rank writes about 1/N of everything.

    a unit of 12 elements, 4 ranks, shard group of 2 (ranks 0 and 1; 2 and 3)
    held        0 0 0 0 0 0 1 1 1 1 1 1      by rank 0 and, the same, by rank 2; by ranks 1 and 3
    written     0 0 0 2 2 2 1 1 1 3 3 3      half of its range by each of the two: see `divisions`

Loading is the intersection of what files have with what a rank holds now: stage, number of ranks,
shard group, bucket and precision may all be others. Values are saved as fp32 masters where there
are any, and the parameters follow from them by the cast that every update ends with, so they have
the same bits.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import nn

from zrun_core.checkpoint.digest import digest
from zrun_core.checkpoint.divisions import Share, part_start, single_unit
from zrun_core.checkpoint.manifest import Manifest, merge_tensors, tensors_from_json
from zrun_core.checkpoint.manifest_fields import RANK, VALUE, number_class
from zrun_core.checkpoint.manifest_parts import TensorInfo, UnitInfo, UnitRun
from zrun_core.checkpoint.model_files import ModelFiles, describe, tokenizer_files
from zrun_core.checkpoint.optimizer_state import (
    check_same,
    is_scalar,
    like,
    per_element,
    state_once_updated,
)
from zrun_core.checkpoint.reader import Reader, Target, by_name
from zrun_core.checkpoint.shard_file import DTYPES, WriteItem, as_bytes
from zrun_core.checkpoint.step_index import StepIndex
from zrun_core.errors import CheckpointError
from zrun_core.memory.layout import ParamSlot, Piece, TensorRange, dense_stride
from zrun_core.tiers.stored import Stored
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.unit.flat_unit import FlatUnit
from zrun_core.zero.update.unit_optimizer import UnitOptimizer


class CheckpointState(Protocol):
    """A `ModelState`, or several as one, whose methods say what these do."""

    @property
    def layout(self) -> dict[str, Any]: ...
    @property
    def describes_part(self) -> bool: ...
    @property
    def order(self) -> Sequence[str]: ...
    def tensors(self) -> list[TensorInfo]: ...
    def write_items(self) -> list[WriteItem]: ...
    def shares(self) -> list[Share]: ...
    def scalars(self) -> dict[str, dict[str, float]]: ...
    def reducer_state(self) -> dict[str, Any]: ...
    def model_files(self) -> ModelFiles: ...
    def buffer_digests(self) -> dict[str, str]: ...
    def own_buffers(self, first: Mapping[str, str]) -> list[WriteItem]: ...
    def before_update(self, call: Callable[[], None]) -> None: ...
    def check(self, manifest: Manifest) -> None: ...
    def load(self, step: StepIndex) -> None: ...


@dataclass(frozen=True)
class _Part:
    """A rank's part of a unit: see `Share`."""

    copies: int
    shards: int
    index: int


class ModelState:
    """Parameters, masters, optimizer state and persistent buffers of a model, on this rank."""

    def __init__(
        self,
        sharded: ShardedModel,
        *,
        weights_only: bool = False,
        advice: str = "give the job the model that was saved, "
        "or start from the weights with init_from",
        order: Sequence[str] = (),
        saved_elsewhere: Container[str] = (),
    ) -> None:
        """
        Args:
            weights_only: `check` and `load` leave the optimizer alone.
            advice: what the user can do if the checkpoint is of another model.
            order: of a model that is cut, the tensors of all parts as the whole one has them.
            saved_elsewhere: buffers that this rank has and another part saves.
        """
        self._other_model = f"it is another model: {advice}"
        self._sharded = sharded
        self._weights_only = weights_only
        self.order = order
        self._saved_elsewhere = saved_elsewhere
        self.holders: Sequence[object] = ()  # of what may be a tokenizer, beside the module
        self._tokenizer: dict[str, bytes] | None = None  # its files, once asked for
        self._aliases = _names(sharded.module.named_parameters(remove_duplicate=False))
        self._buffer_aliases = _names(persistent_buffers(sharded.module))

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The persistent buffers as they are now, each under the first of its names."""
        found = persistent_buffers(self._sharded.module)
        known = {name: buffer for name, buffer in found if name in self._buffer_aliases}
        return {name: buffer for name, buffer in known.items() if not buffer.is_meta}

    @property
    def layout(self) -> dict[str, Any]:
        """Return how the model is cut here: for people to read, and to compare two layouts."""
        settings = self._sharded.settings
        mesh = self._sharded.mesh
        optimizer = None
        if settings.optimizer is not None:
            optimizer = settings.optimizer.name.lower()
        layout = {
            "stage": settings.zero.stage,
            "shard_group": mesh.shard.size,
            "precision": DTYPES[settings.precision.compute],
            "reduce": DTYPES[settings.precision.reduce],
            "bucket": settings.bucket,
            "optimizer": optimizer,
            "units": [unit.name for unit in self._sharded.units],
        }
        if mesh.own:
            layout["own_groups"] = {name: own.shard.size for name, own in mesh.own.items()}
        if mesh.data.size < mesh.world.size:
            ranks = list(mesh.data.ranks)  # that have this part of the model
            layout |= {"tensor": mesh.tensor.size, "pipe": mesh.pipe.size, "ranks": ranks}
        return layout

    @property
    def describes_part(self) -> bool:
        """True if this rank describes its part of the model, for all that have the same."""
        return self._sharded.mesh.data.index == 0

    # Saving

    def model_files(self) -> ModelFiles:
        """Return what others need beside the tensors to build the model."""
        if self._tokenizer is None:
            self._tokenizer = tokenizer_files([self._sharded.module, *self.holders])
        return describe(self._sharded.module, self._tokenizer)

    def tensors(self) -> list[TensorInfo]:
        """Return all tensors and persistent buffers of which this rank has a part; no scalars."""
        found = {}  # by name of a parameter
        for unit in self._sharded.units:
            kind = "param" if unit.trainable else "frozen"
            dtype = DTYPES[unit.layout.dtype]
            for slot in unit.layout.slots:
                name, *aliases = self._names_of(slot)
                part = slot.part
                found[slot.name] = TensorInfo(
                    name, part.shape, part.stride, dtype, kind, tuple(aliases), {}
                )
        in_order = [found[name] for name, _ in self._sharded.module.named_parameters()]
        params = {info.name: info for info in in_order}  # several may be parts of one
        buffers = [
            TensorInfo(
                name,
                tuple(buffer.shape),
                dense_stride(buffer),
                DTYPES[buffer.dtype],
                "buffer",
                self._buffer_aliases[name],
                {},
            )
            for name, buffer in self._saved_buffers().items()
        ]
        return [*params.values(), *buffers]

    def _saved_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that this part of the model saves."""
        found = self.buffers.items()
        return {name: buffer for name, buffer in found if name not in self._saved_elsewhere}

    def all_tensors(self) -> list[TensorInfo]:
        """Return those of all ranks. Collective."""
        mesh = self._sharded.mesh
        if mesh.data.size == mesh.world.size:
            return self.tensors()
        own: list[dict[str, Any]] = []
        if self.describes_part:
            own = [asdict(info) for info in self.tensors()]
        # Through rank 0, which leaves out what several ranks say: of thousands few describe a part.
        payload = json.dumps(own).encode()
        by_rank = self._sharded.comm.gather_bytes(payload, mesh.world, name="tensors")
        distinct = b"\n".join(dict.fromkeys(by_rank))
        told = self._sharded.comm.share_bytes(distinct, mesh.world, name="tensors")
        parts = (tensors_from_json(json.loads(each)) for each in told.split(b"\n"))
        return merge_tensors(parts, self.order)

    def _names_of(self, slot: ParamSlot) -> tuple[str, ...]:
        """Return all names of the tensor that a parameter is a part of."""
        tensor = slot.part.tensor
        return (tensor, *self._aliases[slot.name]) if tensor == slot.name else (tensor,)

    def write_items(self) -> list[WriteItem]:
        """Return what this rank writes: views of the memory of training where that is flat.

        States that live elsewhere are not fetched: whoever writes them reads them there.
        """
        self._sharded.settle_updates()
        found: list[WriteItem] = []
        for unit in self._sharded.units:
            low, high = self._written(unit)
            values = unit.stored_values()
            for each in unit.layout.tensor_ranges(low, high):
                first = low + each.start - values.start
                last = low + each.stop - values.start
                found.append(_part(each, VALUE, values.flat[first:last]))
        for unit, piece, state in self._optimizer_states():
            # What this rank writes of what it holds.
            low, high = self._written(unit)
            held = unit.updated_range[0] + piece.start
            low, high = max(low, held), min(high, unit.updated_range[0] + piece.stop)
            for key, tensor in per_element(piece, state).items():
                for each in unit.layout.tensor_ranges(low, high):
                    data = tensor[low + each.start - held : low + each.stop - held]
                    found.append(_part(each, key, data))
        if self._writes_buffers:
            for name, buffer in self._saved_buffers().items():
                if buffer.numel():
                    found.append(WriteItem(name, VALUE, 0, buffer.numel(), flat(buffer)))
        return found

    def before_update(self, call: Callable[[], None]) -> None:
        """Call `call` once, before the optimizer's state, or one that lives elsewhere, changes."""
        self._sharded.updates.before_update(call)

    def scalars(self) -> dict[str, dict[str, float]]:
        """Return optimizer state that is one number, of tensors that this rank has a part of."""
        self._sharded.settle_updates()
        found = {}
        for _, piece, state in self._optimizer_states():
            numbers = {key: float(value) for key, value in state.items() if is_scalar(value)}
            found[piece.slot.part.tensor] = numbers
        return found

    def shares(self) -> list[Share]:
        """Return what this rank writes, as parts of units that it divides with others."""
        found: dict[tuple[_Part, tuple[str, ...]], list[UnitInfo]] = defaultdict(list)
        for unit in self._sharded.units:
            layout = unit.layout
            runs = [
                UnitRun(each.part.tensor, each.first, each.start, each.stop - each.start)
                for each in layout.tensor_ranges(0, layout.padded_numel)
            ]
            part = self._part_of(unit)
            if runs and part is not None:
                # By the axes too: other ranks tell apart what is one part on this one.
                key = part, self._copied_over(unit)
                found[key].append(UnitInfo(unit.name, layout.padded_numel, runs))
        shares = [
            Share(part.copies, part.shards, part.index, tuple(units))
            for (part, _), units in found.items()
        ]
        if self._writes_buffers:
            buffers = self._saved_buffers().items()
            unit_of_all = single_unit("buffers", ((name, each.numel()) for name, each in buffers))
            if unit_of_all is not None:
                shares.append(Share(1, 1, 0, (unit_of_all,)))
        return shares

    @property
    def _writes_buffers(self) -> bool:
        """Return whether this rank writes the buffers, for all that have the same layers."""
        return self.describes_part and self._sharded.mesh.tensor.index == 0

    def _copied_over(self, unit: FlatUnit) -> tuple[str, ...]:
        """Return the axes of the mesh along which ranks hold the same elements of a unit."""
        of_updates = unit.exchange.updated_replicated_over(unit.layout)
        return (*unit.layout.replicated_over, *of_updates)

    def _part_of(self, unit: FlatUnit) -> _Part | None:
        """Return this rank's part of a unit; None: it writes nothing."""
        start, stop = unit.updated_range
        if start == stop:
            return None
        copies, index = self._sharded.mesh.along(self._copied_over(unit), unit.layout.groups)
        shards = unit.layout.padded_numel // (stop - start)
        return _Part(copies, shards, start // (stop - start) * copies + index)

    def _written(self, unit: FlatUnit) -> tuple[int, int]:
        """Return the first element of the unit that this rank writes, and the one after the last.

        That is its shard, divided among the ranks that hold the same.
        """
        part = self._part_of(unit)
        if part is None:
            return 0, 0
        numel = unit.layout.padded_numel
        low, high = (
            part_start(numel, part.shards, part.copies, index)
            for index in (part.index, part.index + 1)
        )
        return low, high

    def _optimizer_states(self) -> Iterator[tuple[FlatUnit, Piece, dict[str, Any]]]:
        """Yield (unit, part of a parameter in its owned range, state) of what has been updated."""
        if self._sharded.settings.optimizer is None:
            return
        for unit, piece, update in self._sharded.optimizer.updated_pieces():
            state = update.stored_state_of(piece)
            if state:
                yield unit, piece, state

    # Loading

    def check(self, manifest: Manifest) -> None:
        """Check that the checkpoint is of this model and this optimizer; the same on every rank.

        Raises:
            CheckpointError: it is not; the message names the first difference.
        """
        self.check_tensors(manifest)
        self.check_optimizer(manifest)

    def check_tensors(self, manifest: Manifest) -> None:
        """Check that the checkpoint is of this model.

        Raises:
            CheckpointError: as of `check`.
        """
        known = by_name(manifest.tensors)
        tensors = self.all_tensors()
        for info in tensors:
            saved = _first_known((info.name, *info.aliases), known)
            if saved is None:
                raise CheckpointError(
                    f"the checkpoint has no tensor {info.name} {list(info.shape)}; "
                    f"{self._other_model}"
                )
            if saved.shape != info.shape:
                raise CheckpointError(
                    f"{info.name} is {list(saved.shape)} in the checkpoint and "
                    f"{list(info.shape)} in the model; {self._other_model}"
                )
            if number_class(saved.dtype) != number_class(info.dtype):
                raise CheckpointError(
                    f"{info.name} is {saved.dtype} in the checkpoint and "
                    f"{info.dtype} in the model; {self._other_model}"
                )
        own = by_name(tensors)
        for saved in manifest.tensors:
            if _first_known((saved.name, *saved.aliases), own) is None:
                raise CheckpointError(
                    f"the checkpoint has a tensor {saved.name} {list(saved.shape)}, "
                    f"which the model has not; {self._other_model}"
                )

    def check_optimizer(self, manifest: Manifest) -> None:
        """Check that the checkpoint is of this optimizer, unless only weights are loaded.

        Raises:
            CheckpointError: as of `check`.
        """
        if not self._weights_only:
            spec = self._sharded.settings.optimizer
            state = state_once_updated(spec, self._sharded.comm.device)
            check_same(manifest, self.layout["optimizer"], state)

    def load(self, step: StepIndex) -> None:
        """Fill this rank's part of the model and of the optimizer from a checkpoint.

        The foreign parts of units are stale afterwards, as after an update. Where the model is cut
        as it was then, its reductions go on in the order that was learnt. Beside the model, memory
        is taken for one fragment per thread.

        Raises:
            CheckpointError: a file is missing or damaged, or what it says of this rank cannot be.
                The model may hold anything then.
        """
        world = self._sharded.mesh.world
        manifest = step.manifest
        with torch.no_grad():
            reader = Reader(step, world)
            if not self._weights_only:
                is_cut_alike = self.layout in manifest.layouts and manifest.world_size == world.size
                own = reader.rank_state(world.index) if is_cut_alike else None
                learnt = None if own is None else own.learnt
                self._sharded.reducer.order.load_state_dict(learnt)
                self._sharded.updates.num_made = manifest.step
                self.fill(reader.fill, self._states_of(manifest))
            else:
                self.fill(reader.fill)
            if self._had_these_ranks(manifest):
                self._load_own_buffers(reader)
            else:
                reader.check_of_ranks("buffer/")

    def _had_these_ranks(self, manifest: Manifest) -> bool:
        """Return whether each rank had then what it has now of the batch and of the model."""
        mesh = self._sharded.mesh
        was = manifest.layout
        sizes = (manifest.world_size, was.get("tensor", 1), was.get("pipe", 1))
        return sizes == (mesh.world.size, mesh.tensor.size, mesh.pipe.size)

    def fill(
        self,
        fill: Callable[[Sequence[Target]], None],
        states_of: Callable[[FlatUnit], list[Target]] = lambda unit: [],
    ) -> None:
        """Have `fill` write the values that this rank keeps, and update what follows from them.

        It is called once for all that is on the device, and once for each unit that has states
        elsewhere, of which few are in memory at a time. All ranks have met, and no save is under
        way: nobody reads what was there before.

        Args:
            states_of: returns what else of a unit is to be filled.
        """
        self._sharded.settle_updates()
        units = self._sharded.units
        here = [unit for unit in units if not unit.has_states_elsewhere]
        with torch.no_grad():
            flat_buffers = {
                name: flat(buffer) for name, buffer in self.buffers.items() if buffer.numel()
            }
            buffer_targets = [
                self._buffer_target(name, memory) for name, memory in flat_buffers.items()
            ]
            of_units = [each for unit in here for each in self._targets_of(unit, states_of)]
            fill([*of_units, *buffer_targets])
            for name, memory in flat_buffers.items():
                _put_back(memory, self.buffers[name])
            for unit in here:
                unit.values_changed()
            for unit in units:
                if unit.has_states_elsewhere:
                    try:
                        fill(self._targets_of(unit, states_of))
                        unit.values_changed()
                    finally:
                        unit.drop_values()

    def _targets_of(
        self, unit: FlatUnit, states_of: Callable[[FlatUnit], list[Target]]
    ) -> list[Target]:
        states = states_of(unit)  # it may move the values
        return [*states, *self._targets(unit, VALUE, *unit.values())]

    def _targets(
        self,
        unit: FlatUnit,
        state: str,
        memory: torch.Tensor,
        low: int,
    ) -> Iterator[Target]:
        """Yield where a state of a unit goes: into `memory`, from element `low` on.

        Padding becomes 0.
        """
        high = low + memory.numel()
        for start, stop in unit.layout.padding(low, high):
            memory[start:stop].zero_()
        for each in unit.layout.tensor_ranges(low, high):
            part = each.part
            names = self._names_of(each.slot)
            target = memory[each.start : each.stop]
            yield Target(names, state, part.shape, part.stride, each.first, target)

    def _buffer_target(self, name: str, memory: torch.Tensor) -> Target:
        buffer = self.buffers[name]
        names = (name, *self._buffer_aliases[name])
        return Target(names, VALUE, tuple(buffer.shape), dense_stride(buffer), 0, memory)

    def _states_of(self, manifest: Manifest) -> Callable[[FlatUnit], list[Target]]:
        """Return what gives a unit's optimizer the states of the checkpoint.

        These are scalars, and memory to be filled, which is returned.
        """
        known = by_name(manifest.tensors)
        state_on = cache(partial(state_once_updated, self._sharded.settings.optimizer))

        def states_of(unit: FlatUnit) -> list[Target]:
            update = self._optimizer_of(unit)
            if update is None:
                return []
            targets: list[Target] = []
            update.begin_update()
            for piece in update.pieces:
                info = _first_known(self._names_of(piece.slot), known)
                assert info is not None  # `check` has passed
                if not info.states.keys() - {VALUE} and not info.scalars:
                    update.set_state(piece, None)  # it had not been updated then
                    continue
                state = dict(state_on(unit.update_device))
                for key, value in state.items():
                    if is_scalar(value):
                        state[key] = like(value, info.scalars[key])
                for key, value in update.set_state(piece, state).items():
                    if isinstance(value, torch.Tensor) and value.dim():
                        first = unit.updated_range[0] + piece.start
                        targets += self._targets(unit, key, value, first)
            return targets

        return states_of

    def _optimizer_of(self, unit: FlatUnit) -> UnitOptimizer | None:
        has_none = self._sharded.settings.optimizer is None
        return None if has_none else self._sharded.optimizer.of(unit)

    # What differs between ranks

    def reducer_state(self) -> dict[str, Any]:
        """Return the order of this rank's reductions, as small JSON."""
        return self._sharded.reducer.order.state_dict()

    def buffer_digests(self) -> dict[str, str]:
        """Return a digest of each buffer that this part of the model saves, as this rank has it."""
        return _digests(self._saved_buffers())

    def own_buffers(self, first: Mapping[str, str]) -> list[WriteItem]:
        """Return the buffers that differ on this rank from those that are saved for all.

        Args:
            first: the digests of those that are saved for all.
        """
        rank = self._sharded.mesh.world.index
        found = []
        for name, own in _digests(self.buffers).items():
            if own != first.get(name) and self.buffers[name].numel():
                data = flat(self.buffers[name])
                found.append(WriteItem(f"buffer/{rank}/{name}", RANK, 0, data.numel(), data))
        return found

    def _load_own_buffers(self, reader: Reader) -> None:
        rank = self._sharded.mesh.world.index
        prefix = f"buffer/{rank}/"
        for tensor, data in reader.rank_tensors(rank, prefix).items():
            buffer = self.buffers.get(tensor.removeprefix(prefix))
            if buffer is not None:
                memory = flat(buffer)
                _put_back(memory.copy_(data), buffer)


def _digests(buffers: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest(as_bytes(flat(each).cpu()).data) for name, each in buffers.items()}


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in memory order, [numel].

    A view of the tensor if it is dense, else a copy in the order of `dense_stride`.
    """
    dense = tensor.detach()
    stride = dense_stride(tensor)
    if tensor.stride() != stride:
        dense = torch.empty_strided(
            tensor.shape, stride, dtype=tensor.dtype, device=tensor.device
        ).copy_(dense)
    return dense.as_strided((tensor.numel(),), (1,), dense.storage_offset())


def _put_back(memory: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy to a buffer what its `flat` has been filled with, unless that was a view of it."""
    if memory.data_ptr() == buffer.data_ptr():
        return
    # An expanded dimension, of stride 0, has one element in memory: it is written once.
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in buffer.stride())
    dense = memory.as_strided(buffer.shape, dense_stride(buffer))
    buffer[once].copy_(dense[once])


def _first_known(names: Sequence[str], known: Mapping[str, TensorInfo]) -> TensorInfo | None:
    """Return the tensor that goes by one of `names`, the first that there is."""
    for name in names:
        if name in known:
            return known[name]
    return None


def _part(each: TensorRange, state: str, data: torch.Tensor | Stored) -> WriteItem:
    return WriteItem(each.part.tensor, state, each.first, each.first + data.numel(), data)


def _names(found: Iterator[tuple[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Return the other names of each object, by its first."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, each in found:
        if id(each) in first:
            names[first[id(each)]].append(name)
        else:
            first[id(each)] = name
            names[name] = []
    return {name: tuple(others) for name, others in names.items()}


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that are saved, under all of their names."""
    for prefix, inner in module.named_modules(remove_duplicate=False):
        for key, buffer in inner._buffers.items():
            if buffer is not None and key not in inner._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, buffer
