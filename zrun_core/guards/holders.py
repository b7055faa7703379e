"""What holds a rank's memory, with the line of the user's code that each part belongs to.

    held = held_memory(sharded, rank, CallsUnderWay.of_error(error), base)

Counted without an allocator's help, when memory has run out: the runtime's buffers by kind, what
autograd keeps for backward, tensors that Python knows beyond those, and the rest of the process.
"""

from __future__ import annotations

import gc
import inspect
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from types import CellType, FrameType
from typing import NamedTuple

import torch

from zrun_core.guards.kept_activations import kept_for_backward
from zrun_core.memory.buffers import Buffer, Kind
from zrun_core.sizes import format_size
from zrun_core.spine.held_memory import SHOWN, HeldMemory, Holder
from zrun_core.spine.tracebacks import causes, in_words, is_users, raised_at
from zrun_core.telemetry.metrics import process_memory
from zrun_core.user_code.places import called_at, made_at
from zrun_core.zero.account import allocated_memory, own_tensors, planned_memory
from zrun_core.zero.sharded_model import ShardedModel

ACTIVATIONS = "activations"
_LIBRARIES = "Python, torch and what else the process held before it trained"
_SINCE = "temporaries of the operation under way, and what else came since"
_NAMES = {
    Kind.PARAM: "parameters",
    Kind.GRAD: "gradients",
    Kind.OPTIM: "optimizer states and fp32 masters",
    Kind.RING: "scratch of gathers and reductions",
    Kind.BUFFER: "buffers of modules",
}
_BLOCK_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_OWNERS = 6  # how far what holds a tensor may be from it
_ASKED = 3  # groups of tensors whose owners are looked for
_CONTAINERS = (dict, list, tuple, set, CellType, torch.Tensor)
_MOST_ASKED = 200  # objects that may hold one, at one distance


class _Tensors(NamedTuple):
    """Tensors of one shape and format."""

    num_bytes: int
    num_tensors: int
    example: torch.Tensor


class CallsUnderWay(NamedTuple):
    """The user's calls in which memory ran out, innermost first.

    Attributes:
        frames: of the user's code.
        place: where the innermost one stands, in words; empty: there is none.
    """

    frames: tuple[FrameType, ...] = ()
    place: str = ""

    @classmethod
    def of_thread(cls, ident: int) -> CallsUnderWay:
        """Return those of a thread that goes on meanwhile."""
        frame = sys._current_frames().get(ident)
        frames = []
        while frame is not None:
            if is_users(frame.f_code.co_filename):
                frames.append(frame)
            frame = frame.f_back
        if not frames:
            return cls()
        return cls(tuple(frames), in_words(frames[0].f_code.co_filename, frames[0].f_lineno))

    @classmethod
    def of_error(cls, error: BaseException) -> CallsUnderWay:
        """Return those through which an error came, and its causes."""
        frames = [
            frame
            for each in causes(error)
            for frame, _ in traceback.walk_tb(each.__traceback__)
            if is_users(frame.f_code.co_filename)
        ]
        return cls(tuple(reversed(frames)), raised_at(error) or "")


def held_memory(
    models: Sequence[ShardedModel], rank: int, calls: CallsUnderWay, base_bytes: int
) -> HeldMemory:
    """Return what this rank holds.

    Args:
        base_bytes: that the process held beside the model before it trained.
    """
    device = models[0].comm.device
    holders: list[Holder] = []
    known: set[int] = set()
    for sharded in models:
        holders += _states(sharded)
        known |= {tensor.untyped_storage().data_ptr() for tensor in own_tensors(sharded)}
    for sharded in models:
        holders += _activations(sharded, known)
    holders += _other_tensors(device.type, known, calls)
    memory = process_memory(device)
    held = memory["device_allocated"]
    if held is None:  # on a CPU
        held = memory["rss_bytes"]
        holders.append(Holder(_LIBRARIES, "rest", base_bytes))
    counted = sum(each.num_bytes for each in holders)
    held = max(held or 0, counted)
    holders.append(Holder(_SINCE, "since", held - counted, place=calls.place))
    by_kind: Counter[str] = Counter()
    for each in holders:
        by_kind[each.kind] += each.num_bytes
    largest = sorted((each for each in holders if each.num_bytes), key=lambda x: -x.num_bytes)
    return HeldMemory(rank, held, calls.place, dict(by_kind), tuple(largest[:SHOWN]))


def base_bytes(sharded: ShardedModel) -> int:
    """Return what the process holds beside its model."""
    resident = process_memory(sharded.comm.device)["rss_bytes"] or 0
    return max(0, resident - sum(allocated_memory(sharded).by_kind.values()))


def _states(sharded: ShardedModel) -> list[Holder]:
    """Return the runtime's buffers by kind, beside what the layouts say."""
    held = allocated_memory(sharded).by_kind
    planned = planned_memory(sharded).by_kind
    found = []
    for kind, name in _NAMES.items():
        unit, place = _largest_unit(sharded, kind)
        found.append(Holder(name + unit, kind.value, held[kind], planned[kind], place))
    return found


def _largest_unit(sharded: ShardedModel, kind: Kind) -> tuple[str, str]:
    """Return in words which unit has most of a kind, and the line that makes its module."""
    sizes = [(_bytes_of(unit.allocated(), kind), unit.layout) for unit in sharded.units]
    size, layout = max(sizes, key=lambda each: each[0], default=(0, None))
    if not size or layout is None:
        return "", ""
    module = sharded.module
    name = layout.name
    if name not in dict(module.named_modules()):
        name = layout.slots[0].name.rpartition(".")[0]
    return f", largest unit {layout.name!r} with {format_size(size)}", made_at(module, name)


def _bytes_of(buffers: list[Buffer], kind: Kind) -> int:
    return sum(each.num_bytes for each in buffers if each.kind is kind)


def _activations(sharded: ShardedModel, known: set[int]) -> list[Holder]:
    """Return what autograd keeps, all blocks of a kind together."""
    module = sharded.module
    kept = kept_for_backward(module, sharded.comm.device.type, known)
    sizes: Counter[str] = Counter()
    examples: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for name, size in kept.items():
        group = _BLOCK_NUMBER.sub("*", name)
        sizes[group] += size
        counts[group] += 1
        examples[group] = name
    found = []
    for group, size in sizes.most_common():
        of = f" of {group}" if group else " of no module"
        many = f" ({counts[group]} of them)" if counts[group] > 1 else ""
        place = called_at(module, examples[group]) if group else ""
        found.append(
            Holder(f"activations for the backward{of}{many}", ACTIVATIONS, size, place=place)
        )
    return found


def _other_tensors(device_type: str, known: set[int], calls: CallsUnderWay) -> list[Holder]:
    """Return tensors that Python knows, by shape and format; those of `known` storages are out."""
    groups: dict[str, _Tensors] = {}
    for thing in gc.get_objects():
        if type(thing) is not torch.Tensor:
            continue
        if thing.device.type != device_type or thing.layout is not torch.strided:
            continue
        storage = thing.untyped_storage()
        if not storage.nbytes() or storage.data_ptr() in known:
            continue
        known.add(storage.data_ptr())
        name = f"tensors {tuple(thing.shape)} {str(thing.dtype).removeprefix('torch.')}"
        size, count, _ = groups.get(name, _Tensors(0, 0, thing))
        groups[name] = _Tensors(size + storage.nbytes(), count + 1, thing)
    largest = sorted(groups.items(), key=lambda item: -item[1].num_bytes)
    found = []
    for number, (name, group) in enumerate(largest):
        owner, place = _owner(group.example, calls) if number < _ASKED else ("", "")
        many = f" ({group.num_tensors} of them)" if group.num_tensors > 1 else ""
        found.append(Holder(name + many + owner, "tensors", group.num_bytes, place=place))
    return found


def _owner(tensor: torch.Tensor, calls: CallsUnderWay) -> tuple[str, str]:
    """Return in words what of the user's code holds a tensor, and a line of it; "" if nothing.

    That is a call under way, an object whose class is the user's, or a global of a module.
    """
    for frame in calls.frames:
        for name, value in frame.f_locals.items():
            if value is tensor or (isinstance(value, list) and any(x is tensor for x in value)):
                code = frame.f_code
                line = in_words(code.co_filename, frame.f_lineno)
                return f", {name} in {code.co_qualname}", line
    layer: list[object] = [tensor]
    seen: set[int] = set()
    for _ in range(_OWNERS):
        above: list[object] = []
        seen |= {id(layer), id(above)}
        for owner in gc.get_referrers(*layer):
            if id(owner) in seen:
                continue
            seen.add(id(owner))
            found = _in_users_words(owner)
            if found is not None:
                return found
            if isinstance(owner, _CONTAINERS):
                above.append(owner)
        layer = above
        if not layer or len(layer) > _MOST_ASKED:
            break
    return "", ""


def _in_users_words(owner: object) -> tuple[str, str] | None:
    """Return a holder of the user's and its line; None: it is none, or a container."""
    if isinstance(owner, dict):
        name = owner.get("__name__")
        file = owner.get("__file__")
        if isinstance(name, str) and isinstance(file, str) and is_users(file):
            return f", a global of {name}", os.path.relpath(file)
        return None
    kind = type(owner)
    with suppress(Exception):  # a class without a file, or an object that cannot be asked
        file = inspect.getfile(kind)
        if is_users(file):
            return f" in a {kind.__qualname__}", in_words(file, inspect.getsourcelines(kind)[1])
    return None
