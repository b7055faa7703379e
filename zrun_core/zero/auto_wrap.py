"""Cut a module tree into flat units.

A unit is what is gathered, reduced and updated at once: a repeated block, or, where that is larger than the bucket, a
run of its submodules; small neighbours are merged up to the bucket. The cut follows the module tree because a unit is
gathered when one of its modules is called. It does not depend on the ZeRO stage: the stages stay bit-equal.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from zrun_core.errors import JobError
from zrun_core.memory.layout import NO_PARTS, UnitLayout, lay_out
from zrun_core.memory.tensors import TensorPart


@dataclass
class WrapTarget:
    """A module whose parameters are never separated by a module border: it is called as a whole, with one hook."""

    name: str
    module: nn.Module
    param_names: list[str] = field(default_factory=list)
    leaf: bool = False  # gathered and reduced as a whole, whatever runs inside
    alone: bool = False  # never merged with neighbours
    parent: str = ""
    block: str = ""  # the repeated block that it is, or lies in
    recurse: bool = True  # False: the module's own parameters, not those of its children

    def used(self) -> Iterator[nn.Parameter]:
        """The parameters that a call of the module needs, owned or tied."""
        return self.module.parameters(recurse=self.recurse)


@dataclass
class WrapUnit:
    """One unit before memory is given to it."""

    layout: UnitLayout
    params: list[nn.Parameter]  # as in layout.slots
    leaf: bool


@dataclass
class WrapPlan:
    """The units in order of registration, and for each hooked module the units that it needs."""

    units: list[WrapUnit]
    hooked: list[tuple[nn.Module, list[int], bool]]  # module, unit indices, leaf


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost repeated blocks: same-class members of a list or sequence that have modules inside."""
    found: list[tuple[str, nn.Module]] = []

    def visit(name: str, module: nn.Module) -> None:
        members = list(module.named_children())
        if isinstance(module, nn.ModuleList | nn.Sequential):
            composite = [
                type(m)
                for _, m in members
                if any(m.children()) and any(True for _ in m.parameters())
            ]
            repeated = {kind for kind in composite if composite.count(kind) > 1}
        else:
            repeated = set()
        for child_name, child in members:
            path = f"{name}.{child_name}" if name else child_name
            if type(child) in repeated:
                found.append((path, child))
            else:
                visit(path, child)

    visit("", model)
    return found


def _matches(patterns: Sequence[str], name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def _check_used(key: str, patterns: Sequence[str], model: nn.Module) -> None:
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not any(_matches([pattern], name) for name in names):
            near = next((name for name in names if re.search(pattern, name)), None)
            hint = (
                f"part of {near!r} does: write .*{pattern}.*"
                if near
                else f"names are like {', '.join(names[:3])}"
            )
            raise JobError(f"{key}: {pattern!r} matches no module's whole name; {hint}")


class _TargetCollector:
    """Walks the tree once and collects targets."""

    def __init__(
        self,
        model: nn.Module,
        param_bytes: dict[str, int],
        bucket: int,
        unit_names: Sequence[str],
        leaf_names: Sequence[str],
        whole_blocks: bool,
    ) -> None:
        self._param_bytes = (
            param_bytes  # parameter name -> bytes, each parameter under its first name only
        )
        self._bucket = bucket
        self._unit_names, self._leaf_names = unit_names, leaf_names
        self._blocks = {id(module) for _, module in repeated_blocks(model)}
        self._whole_blocks = whole_blocks
        self._above_blocks = {
            id(module)
            for module in model.modules()
            if any(id(inner) in self._blocks for inner in module.modules() if inner is not module)
        }
        forced = [*unit_names, *leaf_names]
        self._above_forced = {
            id(module)
            for name, module in model.named_modules()
            if any(
                _matches(forced, f"{name}.{inner}" if name else inner)
                for inner, _ in module.named_modules()
                if inner
            )
        }
        self.targets: list[WrapTarget] = []
        self._seen: set[int] = set()
        self._visit("", model, "", "")

    def _names(self, name: str, module: nn.Module, recurse: bool) -> list[str]:
        prefix = f"{name}." if name else ""
        inside = (prefix + n for n, _ in module.named_parameters(recurse=recurse))
        return [n for n in inside if n in self._param_bytes]

    def _visit(self, name: str, module: nn.Module, parent: str, block: str) -> None:
        if id(module) in self._seen:  # a module registered twice
            return
        self._seen.add(id(module))
        is_leaf = _matches(self._leaf_names, name)
        is_block = id(module) in self._blocks
        is_forced = _matches(self._unit_names, name) or is_block
        block = name if is_block else block
        names = self._names(name, module, recurse=True)
        size = sum(self._param_bytes[n] for n in names)
        is_open = id(module) in self._above_blocks or id(module) in self._above_forced
        children = [(n, m) for n, m in module.named_children() if any(True for _ in m.parameters())]
        is_target = is_leaf or (self._whole_blocks and is_block)
        if is_target or not children or (not is_open and size <= self._bucket):
            if any(True for _ in module.parameters()):
                self.targets.append(
                    WrapTarget(name, module, names, is_leaf, is_leaf or is_forced, parent, block)
                )
            return
        if any(True for _ in module.parameters(recurse=False)):
            # Parameters of the module itself are in use for as long as it runs: a unit apart from its children's.
            names = self._names(name, module, recurse=False)
            self.targets.append(
                WrapTarget(name, module, names, alone=True, parent=name, block=block, recurse=False)
            )
        for child_name, child in children:
            self._visit(
                f"{name}.{child_name}" if name else child_name, child, parent=name, block=block
            )


def _merge(
    targets: Sequence[WrapTarget], size_of: Callable[[WrapTarget], int], bucket: int
) -> Iterator[list[WrapTarget]]:
    """Runs of neighbouring targets under one parent that fit the bucket together."""
    run: list[WrapTarget] = []
    for target in targets:
        mergeable = (
            bool(run) and not target.alone and not run[-1].alone and target.parent == run[-1].parent
        )
        if run and not (mergeable and sum(map(size_of, run)) + size_of(target) <= bucket):
            yield run
            run = []
        run.append(target)
    if run:
        yield run


def auto_wrap(
    model: nn.Module,
    *,
    dtype: torch.dtype,
    num_shards: int,
    num_parts: int | None = None,
    bucket: int,
    unit_names: Sequence[str] = (),
    leaf_names: Sequence[str] = (),
    persist_below: int = 0,
    whole_blocks: bool = False,
    group_of: Callable[[str], int] = lambda name: 0,
    table: Mapping[str, TensorPart] = NO_PARTS,
) -> WrapPlan:
    """Cut `model` into units of at most `bucket` bytes in `dtype`, where the module tree allows it.

    Args:
        dtype: compute dtype; norms with running statistics stay fp32, because torch computes them in one dtype only.
        num_parts: that units are padded to; None: as many as shards.
        unit_names: regexes; a module whose whole name matches becomes units of its own.
        leaf_names: regexes; a matching module is gathered and reduced as a whole.
        whole_blocks: never cut inside a repeated block, whatever its size.
        persist_below: parameters of fewer bytes go to units that stay whole.
        group_of: optimizer group of a tensor's name.
        table: by parameter name, what it is of a tensor of the model; absent: all of one.

    Raises:
        JobError: a regex of `unit_names` or `leaf_names` matches no module.
        ValueError: the table contradicts the model, or itself.
    """
    _check_used("zero.units", unit_names, model)
    _check_used("zero.leaf", leaf_names, model)
    params = dict(model.named_parameters())  # a tied parameter appears once, under its first name
    _check_table(table, params)
    replicated_over = {
        name: table[name].replicated_over if name in table else () for name in params
    }
    in_fp32 = _of_running_norms(model)
    dtypes = {
        name: torch.float32 if id(param) in in_fp32 else dtype for name, param in params.items()
    }
    param_bytes = {name: param.numel() * dtypes[name].itemsize for name, param in params.items()}
    small = {name for name, num_bytes in param_bytes.items() if num_bytes < persist_below}
    targets = _TargetCollector(
        model, param_bytes, bucket, unit_names, leaf_names, whole_blocks
    ).targets
    in_use_throughout = _kept_until_pass_ends(
        targets, {id(param): name for name, param in params.items()}
    )

    units: list[WrapUnit] = []
    unit_of: dict[int, int] = {}  # id(parameter) -> unit

    def add(name: str, names: Sequence[str], leaf: bool, keep_unsharded: bool, block: str) -> None:
        formats = dict.fromkeys((dtype, torch.float32))
        axes = sorted({replicated_over[n] for n in names})
        for trainable, of_dtype, over in itertools.product((True, False), formats, axes):
            chosen = [
                n for n in names if params[n].requires_grad == trainable and dtypes[n] == of_dtype
            ]
            chosen = [n for n in chosen if replicated_over[n] == over]
            if not chosen:
                continue
            traits = [*["frozen"] * (not trainable), *["fp32"] * (of_dtype != dtype)]
            traits += [f"alike over {axis}" for axis in over]
            layout = lay_out(
                f"{name}({','.join(traits)})" if traits else name,
                [(n, params[n], group_of(table[n].tensor if n in table else n)) for n in chosen],
                dtype=of_dtype,
                trainable=trainable,
                num_shards=num_shards,
                num_parts=num_parts,
                keep_unsharded=keep_unsharded,
                keep_until_pass_ends=any(n in in_use_throughout for n in chosen),
                modules=name,
                block=block,
                table=table,
            )
            for n in chosen:
                unit_of[id(params[n])] = len(units)
            units.append(WrapUnit(layout, [params[slot.name] for slot in layout.slots], leaf))

    def size_of(target: WrapTarget) -> int:
        return sum(param_bytes[n] for n in target.param_names if n not in small)

    for run in _merge(targets, size_of, bucket):
        names = [n for target in run for n in target.param_names if n not in small]
        add(
            _title([target.name for target in run]),
            names,
            run[0].leaf,
            keep_unsharded=False,
            block=run[0].block,
        )
    add(
        "small parameters",
        [n for n in params if n in small],
        leaf=False,
        keep_unsharded=True,
        block="",
    )
    hooked = [
        (target.module, sorted({unit_of[id(p)] for p in target.used()}), target.leaf)
        for target in targets
    ]
    return WrapPlan(units, hooked)


def _check_table(table: Mapping[str, TensorPart], params: Mapping[str, nn.Parameter]) -> None:
    """Raise a ValueError if a part is of no parameter, or parts of a tensor disagree about it."""
    tensors: dict[str, tuple[object, object]] = {}
    for name, part in table.items():
        if name not in params:
            raise ValueError(f"the tensor table has {name}, which the model has not")
        if tensors.setdefault(part.tensor, (part.shape, part.stride)) != (part.shape, part.stride):
            raise ValueError(f"the tensor table has {part.tensor} in two shapes or memory orders")


def _of_running_norms(model: nn.Module) -> set[int]:
    """Identities of the parameters that share their module with running statistics, which are fp32 buffers."""
    norms = (
        inner
        for inner in model.modules()
        if isinstance(inner, _NormBase) and inner.track_running_stats
    )
    return {id(param) for norm in norms for param in norm.parameters(recurse=False)}


def _kept_until_pass_ends(targets: Sequence[WrapTarget], name_of: dict[int, str]) -> set[str]:
    """Parameters that are in use while others come and go: of containers themselves, or used by several modules."""
    tied = {
        name
        for target in targets
        for p in target.used()
        if (name := name_of[id(p)]) not in target.param_names
    }
    return tied.union(*(target.param_names for target in targets if not target.recurse))


def _title(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0] or "model"
    parent = names[0].rpartition(".")[0]
    short = [name.rpartition(".")[2] for name in names]
    inside = ",".join(short) if len(short) <= 4 else f"{short[0]}..{short[-1]}"
    return f"{parent}.{{{inside}}}" if parent else f"{{{inside}}}"
