"""What a rank holds of a sharded model, as flat ranges of named tensors: to be saved by it, and to be found again.

Each element is written by one rank: the owned range of a unit is cut once more over the ranks that hold equal copies of
it, so that every rank writes about 1/N of everything. Loading is the intersection of what files have with what a rank
owns now: stage, number of ranks, shard group, bucket and precision may all be others. Values travel as fp32 masters
where there are any, and the parameters follow from them by the cast that every update ends with, so they have the same
bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from zrun_core.checkpoint.digest import digest
from zrun_core.checkpoint.manifest import RANK, VALUE, Fragment, Manifest, TensorInfo, number_class
from zrun_core.checkpoint.model_files import ModelFiles, describe, tokenizer_files
from zrun_core.checkpoint.shard_file import DTYPES, Part, as_bytes, check_header, read_fragment
from zrun_core.comm import Group, slice_start
from zrun_core.errors import CheckpointError, SaveError
from zrun_core.layout import ParamSlot, Piece, dense_stride
from zrun_core.optim import lightweight
from zrun_core.zero.sharded import ShardedModel
from zrun_core.zero.unit import FlatUnit

_READERS = 4  # threads; reading and digesting hold no lock
_TORCH = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class Target:
    """Where a flat range of one state of a tensor goes.

    Attributes:
        names: of the tensor; any of them will do.
        shape, stride: of the whole tensor; the range counts in its memory order.
        memory: [stop - start], of any format, on any device.
    """

    names: tuple[str, ...]
    state: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    memory: torch.Tensor

    @property
    def stop(self) -> int:
        return self.start + self.memory.numel()


class State(Protocol):
    """What is saved and loaded: a `ModelState`, or several as one. Its methods say what they do."""

    @property
    def layout(self) -> dict[str, Any]: ...
    def tensors(self) -> list[TensorInfo]: ...
    def parts(self) -> list[Part]: ...
    def scalars(self) -> dict[str, dict[str, float]]: ...
    def learnt(self) -> dict[str, Any]: ...
    def model_files(self) -> ModelFiles: ...
    def buffer_digests(self) -> dict[str, str]: ...
    def own_buffers(self, first: Mapping[str, str]) -> list[Part]: ...
    def before_update(self, call: Callable[[], None]) -> None: ...
    def check(self, manifest: Manifest) -> None: ...
    def load(self, folder: Path, manifest: Manifest) -> None: ...


class ModelState:
    """Parameters, masters, optimizer state and persistent buffers of one sharded model, on this rank."""

    def __init__(self, sharded: ShardedModel, *, weights_only: bool = False) -> None:
        """
        Args:
            weights_only: `check` and `load` leave the optimizer alone.
        """
        self._sharded, self._weights_only = sharded, weights_only
        self.holders: Sequence[object] = ()  # of what may be a tokenizer, beside the module
        self._tokenizer: dict[str, bytes] | None = None  # its files, once asked for
        self._aliases = _names(sharded.module.named_parameters(remove_duplicate=False))
        self._buffer_aliases = _names(_all_persistent_buffers(sharded.module))

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The persistent buffers as they are now, each under the first of its names."""
        return {n: b for n, b in _all_persistent_buffers(self._sharded.module) if n in self._buffer_aliases}

    @property
    def layout(self) -> dict[str, Any]:
        """How the model is cut here: for people to read, and to tell whether two layouts are the same."""
        settings, mesh = self._sharded.settings, self._sharded.mesh
        return {
            "stage": settings.zero.stage,
            "shard_group": mesh.shard.size,
            "precision": DTYPES[settings.precision.compute],
            "reduce": DTYPES[settings.precision.reduce],
            "bucket": settings.bucket,
            "optimizer": settings.optimizer.name.lower() if settings.optimizer is not None else None,
            "units": [unit.name for unit in self._sharded.units],
        }

    # Saving

    def model_files(self) -> ModelFiles:
        """What others need beside the tensors to build the model."""
        if self._tokenizer is None:
            self._tokenizer = tokenizer_files([self._sharded.module, *self.holders])
        return describe(self._sharded.module, self._tokenizer)

    def tensors(self) -> list[TensorInfo]:
        """Every parameter and persistent buffer of the model; without the optimizer's scalars."""
        found = {}
        for unit in self._sharded.units:
            kind, dtype = "param" if unit.trainable else "frozen", DTYPES[unit.layout.dtype]
            for slot in unit.layout.slots:
                aliases = self._aliases[slot.name]
                found[slot.name] = TensorInfo(slot.name, slot.shape, slot.stride, dtype, kind, aliases, {})
        names = [name for name, _ in self._sharded.module.named_parameters()]
        buffers = [
            TensorInfo(
                name, tuple(buffer.shape), dense_stride(buffer), DTYPES[buffer.dtype], "buffer",
                self._buffer_aliases[name], {},
            )
            for name, buffer in self.buffers.items()
        ]  # fmt: skip
        return [*(found[name] for name in names), *buffers]

    def parts(self) -> list[Part]:
        """What this rank writes. Views of live memory, on its device, where that is flat already."""
        found: list[Part] = []
        for unit in self._sharded.units:
            low, high = self._written(unit)
            values = unit.values()
            for piece in unit.layout.pieces(low, high):
                start = low + piece.start - piece.slot.offset
                first, last = low + piece.start - values.start, low + piece.stop - values.start
                data = values.flat[first:last].detach()
                found.append(Part(piece.slot.name, VALUE, start, start + data.numel(), data))
        for unit, slot, start, held, state in self._optimizer_states():
            low, high = self._written(unit)
            for key, tensor in _per_element(slot, state, held).items():
                # The part of what is held that this rank writes, from the first element of the parameter.
                begin = max(start, low - slot.offset)
                end = min(start + tensor.numel(), high - slot.offset)
                if begin < end:
                    found.append(Part(slot.name, key, begin, end, tensor[begin - start : end - start].detach()))
        if self._sharded.mesh.world.index == 0:
            for name, buffer in self.buffers.items():
                if buffer.numel():
                    found.append(Part(name, VALUE, 0, buffer.numel(), flat(buffer)))
        return found

    def before_update(self, call: Callable[[], None]) -> None:
        """Call `call` once, before the parts that are the optimizer's state are changed."""
        self._sharded.before_update(call)

    def scalars(self) -> dict[str, dict[str, float]]:
        """Optimizer state that is one number per parameter, of the parameters of which this rank holds a part."""
        return {
            slot.name: {key: float(value) for key, value in state.items() if _is_scalar(value)}
            for _, slot, _, _, state in self._optimizer_states()
        }

    def _written(self, unit: FlatUnit) -> tuple[int, int]:
        """The elements of the unit that this rank writes: its shard, divided among the ranks that hold the same."""
        mesh = self._sharded.mesh
        if unit.policy.server and unit.trainable:  # it alone has masters
            return unit.owned
        start, stop = unit.layout.shard_range(unit.split.index)
        if unit.split is not mesh.shard:
            return start, stop
        copies, index = mesh.replicate.size, mesh.replicate.index
        numel = stop - start
        return start + slice_start(numel, copies, index), start + slice_start(numel, copies, index + 1)

    def _optimizer_states(self) -> Iterator[tuple[FlatUnit, ParamSlot, int, int, dict[str, Any]]]:
        """(unit, parameter, the first of its elements held here, how many, state) of what has been updated so far."""
        for unit, piece, param, optimizer in self._held():
            state = optimizer.state.get(param)
            if state:
                yield unit, piece.slot, unit.owned[0] + piece.start - piece.slot.offset, param.numel(), state

    def _held(self) -> Iterator[tuple[FlatUnit, Piece, nn.Parameter, torch.optim.Optimizer]]:
        return self._sharded.optimizer.held() if self._sharded.settings.optimizer is not None else iter(())

    # Loading

    def check(self, manifest: Manifest) -> None:
        """Whether the checkpoint is of this model and this optimizer. The same on every rank.

        Raises:
            CheckpointError: it is not; the message names the first difference.
        """
        known = _by_name(manifest.tensors)
        for info in self.tensors():
            saved = known.get(info.name) or next((known[name] for name in info.aliases if name in known), None)
            if saved is None:
                raise CheckpointError(f"the checkpoint has no tensor {info.name} {list(info.shape)}; {_ADVICE}")
            if saved.shape != info.shape:
                raise CheckpointError(
                    f"{info.name} is {list(saved.shape)} in the checkpoint and {list(info.shape)} in the model; "
                    f"{_ADVICE}"
                )
            if number_class(saved.dtype) != number_class(info.dtype):
                raise CheckpointError(
                    f"{info.name} is {saved.dtype} in the checkpoint and {info.dtype} in the model; {_ADVICE}"
                )
        own = _by_name(self.tensors())
        for saved in manifest.tensors:
            if not any(name in own for name in (saved.name, *saved.aliases)):
                raise CheckpointError(
                    f"the checkpoint has a tensor {saved.name} {list(saved.shape)}, which the model has not; {_ADVICE}"
                )
        if not self._weights_only:
            self._check_optimizer(manifest, known)

    def _check_optimizer(self, manifest: Manifest, known: Mapping[str, TensorInfo]) -> None:
        asked, used = self.layout["optimizer"], manifest.layout.get("optimizer")
        if used != asked:
            raise CheckpointError(
                f"the checkpoint was made with the optimizer {used}, and optim.name is {asked}: write optim.name: "
                f"{used}, or start from its weights alone with init_from"
            )
        expected = {key: _kind(value) for key, value in self._prototype().items() if value is not None}
        states: dict[str, dict[str, str]] = defaultdict(dict)
        for fragment in manifest.fragments:
            if fragment.state not in (VALUE, RANK):
                states[fragment.tensor][fragment.state] = number_class(fragment.dtype)
        for name, info in known.items():
            kept = states[info.name] | dict.fromkeys(info.scalars, _SCALAR)
            if kept and kept != expected:
                keeps = ", ".join(sorted(expected)) or "nothing"
                raise CheckpointError(
                    f"the optimizer kept {_kinds(kept, expected)} of {name} in the checkpoint, and keeps {keeps} with "
                    "the options of this job: give optim the same options"
                )

    def _prototype(self) -> dict[str, Any]:
        """The state that the optimizer has of a parameter once it was updated."""
        chosen = self._sharded.settings.optimizer
        if chosen is None:
            return {}
        param = nn.Parameter(torch.zeros(2, device=self._sharded.comm.device))
        optimizer = chosen.make([param], None)
        param.grad = torch.zeros_like(param)
        lightweight.step(optimizer)
        return dict(optimizer.state.get(param, {}))

    def load(self, folder: Path, manifest: Manifest) -> None:
        """Fill this rank's part of the model and of the optimizer from a checkpoint that `check` has passed.

        The foreign parts of units are stale afterwards, as after an update. Where the model is cut as it was then, its
        reductions go on in the order that was learnt. Beside the model, memory is taken for one fragment per thread.

        Raises:
            CheckpointError: a file is missing or damaged, or what it says of this rank cannot be. The model may hold
                anything then.
        """
        world = self._sharded.mesh.world
        with torch.no_grad():
            reader = Reader(folder, manifest, world)
            reader.check_files()
            if not self._weights_only:
                is_cut_alike = manifest.layout == self.layout and manifest.world_size == world.size
                own = manifest.of_rank(world.index) if is_cut_alike else None
                self._sharded.reducer.adopt(None if own is None else own.learnt)
                reader.fill(self._optimizer_targets(manifest))
            self.fill(reader.fill)
            if manifest.world_size == world.size:
                self._load_own_buffers(reader)

    def fill(self, fill: Callable[[Sequence[Target]], None]) -> None:
        """Have `fill` write the values that this rank keeps; what follows from them is brought up to date."""
        self._sharded.comm.settle()
        with torch.no_grad():
            flat_buffers = {name: flat(buffer) for name, buffer in self.buffers.items() if buffer.numel()}
            buffer_targets = [self._buffer_target(name, memory) for name, memory in flat_buffers.items()]
            fill([*self._value_targets(), *buffer_targets])
            for name, memory in flat_buffers.items():
                _put_back(memory, self.buffers[name])
            for unit in self._sharded.units:
                unit.values_changed()

    def _value_targets(self) -> Iterator[Target]:
        for unit in self._sharded.units:
            values, low = unit.values()
            for piece in unit.layout.pieces(low, low + values.numel()):
                slot, memory = piece.slot, values[piece.start : piece.stop]
                names, start = (slot.name, *self._aliases[slot.name]), low + piece.start - slot.offset
                yield Target(names, VALUE, slot.shape, slot.stride, start, memory)

    def _buffer_target(self, name: str, memory: torch.Tensor) -> Target:
        buffer = self.buffers[name]
        names = (name, *self._buffer_aliases[name])
        return Target(names, VALUE, tuple(buffer.shape), dense_stride(buffer), 0, memory)

    def _optimizer_targets(self, manifest: Manifest) -> list[Target]:
        """Give the optimizer the state that the checkpoint has, without values yet. Scalars are complete."""
        known, prototype, targets = _by_name(manifest.tensors), self._prototype(), []
        states: dict[str, set[str]] = defaultdict(set)
        for fragment in manifest.fragments:
            if fragment.state not in (VALUE, RANK):
                states[fragment.tensor].add(fragment.state)
        for unit, piece, param, optimizer in self._held():
            slot = piece.slot
            names = (slot.name, *self._aliases[slot.name])
            info = next(known[name] for name in names if name in known)
            if not states[info.name] and not info.scalars:
                optimizer.state.pop(param, None)  # it had not been updated then, whatever has become of it here
                continue
            state: dict[str, Any] = {}
            for key, value in prototype.items():
                if _is_scalar(value):
                    state[key] = _like(value, info.scalars[key])
                elif isinstance(value, torch.Tensor):
                    state[key] = torch.empty(param.shape, dtype=value.dtype, device=param.device)
                    start = unit.owned[0] + piece.start - slot.offset
                    targets.append(Target(names, key, slot.shape, slot.stride, start, state[key]))
                else:
                    state[key] = value
            optimizer.state[param] = state
        return targets

    # What differs between ranks

    def learnt(self) -> dict[str, Any]:
        """What this rank knows of the order of its reductions, as small JSON."""
        return self._sharded.reducer.learnt()

    def buffer_digests(self) -> dict[str, str]:
        """A digest of each persistent buffer as this rank has it."""
        return {name: digest(as_bytes(flat(buffer).cpu()).data) for name, buffer in self.buffers.items()}

    def own_buffers(self, first: Mapping[str, str]) -> list[Part]:
        """The buffers of this rank that are not those of the first rank, whose digests are `first`."""
        rank = self._sharded.mesh.world.index
        found = []
        for name, own in self.buffer_digests().items():
            if own != first.get(name) and self.buffers[name].numel():
                data = flat(self.buffers[name])
                found.append(Part(f"buffer/{rank}/{name}", RANK, 0, data.numel(), data))
        return found

    def _load_own_buffers(self, reader: Reader) -> None:
        prefix = f"buffer/{self._sharded.mesh.world.index}/"
        for tensor, data in reader.rank_tensors(prefix).items():
            buffer = self.buffers.get(tensor.removeprefix(prefix))
            if buffer is not None:
                memory = flat(buffer)
                _put_back(memory.copy_(data), buffer)


class Reader:
    """Fills flat ranges from the fragments of one checkpoint, each verified while it is read."""

    def __init__(self, folder: Path, manifest: Manifest, world: Group) -> None:
        self._folder, self._manifest, self._world = folder, manifest, world
        self._known = _by_name(manifest.tensors)
        self._fragments: dict[tuple[str, str], list[Fragment]] = defaultdict(list)
        for fragment in manifest.fragments:
            self._fragments[fragment.tensor, fragment.state].append(fragment)

    def check_files(self) -> None:
        """Verify what no rank needs to read: headers, and states of ranks that are no more. Ranks divide the work.

        Raises:
            CheckpointError: one is damaged.
        """
        index, size = self._world.index, self._world.size
        for file in self._manifest.files[index::size]:
            check_header(self._folder, file)
        for fragment in [each for each in self._manifest.fragments if each.state == RANK][index::size]:
            self._read(fragment)

    def fill(self, targets: Sequence[Target]) -> None:
        """Fill the memory of all `targets`.

        Raises:
            CheckpointError: a file is missing or damaged, or has no such tensor.
        """
        tasks: list[Callable[[], None]] = []
        for target in targets:
            info = next((self._known[name] for name in target.names if name in self._known), None)
            fragments = self._fragments.get((info.name, target.state)) if info is not None else None
            if info is None or fragments is None:
                raise CheckpointError(f"the checkpoint has no {target.state} of {target.names[0]}")
            if _memory_order(info.shape, info.stride) != _memory_order(target.shape, target.stride):
                tasks.append(partial(self._copy_reordered, info, fragments, target))
                continue
            tasks += [
                partial(self._copy, fragment, target)
                for fragment in fragments
                if max(target.start, fragment.start) < min(target.stop, fragment.stop)
            ]
        with ThreadPoolExecutor(_READERS, thread_name_prefix="zrun-load") as pool:
            for done in [pool.submit(task) for task in tasks]:
                done.result()

    def rank_tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """The tensors of a rank's own whose names begin with `prefix`."""
        found = [each for each in self._manifest.fragments if each.state == RANK and each.tensor.startswith(prefix)]
        return {fragment.tensor: self._read(fragment) for fragment in found}

    def _read(self, fragment: Fragment) -> torch.Tensor:
        data = torch.empty(fragment.stop - fragment.start, dtype=_TORCH[fragment.dtype])
        read_fragment(self._folder, fragment, data)
        return data

    def _copy(self, fragment: Fragment, target: Target) -> None:
        """The part of `target` that the fragment covers."""
        start, stop = max(target.start, fragment.start), min(target.stop, fragment.stop)
        part = target.memory[start - target.start : stop - target.start]
        whole = stop - start == fragment.stop - fragment.start
        if whole and part.device.type == "cpu" and part.dtype == _TORCH[fragment.dtype]:
            read_fragment(self._folder, fragment, part)
        else:
            part.copy_(self._read(fragment)[start - fragment.start : stop - fragment.start])

    def _copy_reordered(self, info: TensorInfo, fragments: Sequence[Fragment], target: Target) -> None:
        """A tensor that lies in another order here (channels_last): whole, then turned."""
        whole = torch.empty(info.numel, dtype=_TORCH[fragments[0].dtype])
        for fragment in fragments:
            read_fragment(self._folder, fragment, whole[fragment.start : fragment.stop])
        turned = torch.empty_strided(target.shape, target.stride, dtype=whole.dtype)
        turned.copy_(whole.as_strided(info.shape, info.stride))
        target.memory.copy_(turned.as_strided((info.numel,), (1,))[target.start : target.stop])


_ADVICE = "it is another model: give the job the model that was saved, or start from the weights with init_from"


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in memory order, [numel]: a view if they are dense, else a copy in the order of `dense_stride`."""
    dense, stride = tensor.detach(), dense_stride(tensor)
    if tensor.stride() != stride:
        dense = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(dense)
    return dense.as_strided((tensor.numel(),), (1,), dense.storage_offset())


def _put_back(memory: torch.Tensor, buffer: torch.Tensor) -> None:
    """What `flat` of a buffer has been filled with."""
    if memory.data_ptr() != buffer.data_ptr():
        once = tuple(slice(1) if stride == 0 else slice(None) for stride in buffer.stride())  # an expanded tensor
        whole = memory.as_strided(buffer.shape, dense_stride(buffer))
        buffer[once].copy_(whole[once])


_SCALAR = "a number"


def _kind(value: Any) -> str:
    """What the optimizer keeps: one number, or numbers of a class for every element."""
    return number_class(DTYPES[value.dtype]) if isinstance(value, torch.Tensor) and value.dim() else _SCALAR


def _kinds(kept: Mapping[str, str], usual: Mapping[str, str]) -> str:
    """By name, and how, where that is not as usual."""
    return ", ".join(key if usual.get(key, how) == how else f"{key} ({how})" for key, how in sorted(kept.items()))


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _like(value: Any, number: float) -> Any:
    """`number` as a tensor or as what `value` is."""
    return torch.full_like(value, number) if isinstance(value, torch.Tensor) else type(value)(number)


def _per_element(slot: ParamSlot, state: Mapping[str, Any], numel: int) -> dict[str, torch.Tensor]:
    """The states that have a number for every element.

    Raises:
        SaveError: the optimizer keeps something else of the parameter.
    """
    found = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == (numel,):
            found[key] = value
        elif value is not None and not _is_scalar(value):
            shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise SaveError(f"cannot save the optimizer's {key} of {slot.name} ({shape}): write checkpoint: null")
    return found


def _memory_order(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The dimensions from the slowest to the fastest; those of one element lie anywhere."""
    return sorted((dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: -stride[dim])


def _by_name(tensors: Sequence[TensorInfo]) -> dict[str, TensorInfo]:
    """By every name that a tensor has."""
    return {name: info for info in tensors for name in (info.name, *info.aliases)}


def _names(found: Iterator[tuple[str, Any]]) -> dict[str, tuple[str, ...]]:
    """First name of an object -> its other names."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, each in found:
        if id(each) in first:
            names[first[id(each)]].append(name)
        else:
            first[id(each)] = name
            names[name] = []
    return {name: tuple(others) for name, others in names.items()}


def _all_persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, inner in module.named_modules(remove_duplicate=False):
        for key, buffer in inner._buffers.items():
            if buffer is not None and key not in inner._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, buffer
