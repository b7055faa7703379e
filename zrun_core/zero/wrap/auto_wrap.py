"""Auto-wrapping: divide the parameters of a module tree into flat units.

A unit is gathered, reduced and updated at once. It is a repeated block, or, where a block is larger
than the bucket, a run of its submodules; small neighbours are merged up to the bucket. Units follow
the module tree because a unit is gathered when one of its modules is called. No module is wrapped:
the targets get hooks. The plan does not depend on the ZeRO stage, so that stages stay bit-equal.

    module        size   targets (get hooks)     units, with a bucket of 8
    embed         6      embed                   embed                  6
    blocks.0      5      blocks.0                blocks.0               5    blocks stay apart
    blocks.1      12
      .attn       4      blocks.1.attn           blocks.1.{attn,norm}   5
      .norm       1      blocks.1.norm
      .mlp        7      blocks.1.mlp            blocks.1.mlp           7
    head          tied   head                    (needs embed)

The tiles of a tiled linear (`tiling.py`) are targets of their own inside of a target, which is what
is left of its modules: a block of 1 and a linear of 20 in tiles of 5 is five units.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from zrun_core.errors import JobError
from zrun_core.memory.layout import NO_PARTS, UnitLayout, lay_out
from zrun_core.memory.tensors import TensorPart
from zrun_core.zero.wrap.foreign import had_params
from zrun_core.zero.wrap.tiled_linear import TiledLinear
from zrun_core.zero.wrap.tiling import tiled_linears

NO_CHUNKS: Mapping[str, int] = {}  # all parameters of a rank are of one
NO_GROUPS: Mapping[str, str] = {}  # all parameters lie on the same ranks


@dataclass
class WrapTarget:
    """A module that is called as a whole: it gets one hook, and its parameters stay together.

    Attributes:
        params: that a call of it needs, owned or tied; not those of tiles inside.
        param_names: parameters that it owns; tied ones belong to the first module that has them.
        leaf: gathered and reduced as a whole, whatever runs inside.
        alone: never merged with neighbours.
        parent: name of the module that it is a child of.
        block: name of the repeated block that it is, or lies in.
        recurse: with the parameters of its children; False: the module's own ones only.
        tile: of a tiled linear.
        around: of a tile: the target that it lies in.
    """

    name: str
    module: nn.Module
    params: list[nn.Parameter]
    param_names: list[str]
    leaf: bool = False
    alone: bool = False
    parent: str = ""
    block: str = ""
    recurse: bool = True
    tile: bool = False
    around: WrapTarget | None = None


@dataclass
class WrapUnit:
    """One unit before memory is given to it.

    Attributes:
        params: as in `layout.slots`.
        leaf: gathered and reduced as a whole, whatever runs inside.
    """

    layout: UnitLayout
    params: list[nn.Parameter]
    leaf: bool


@dataclass
class WrapPlan:
    """The units of a model, and the modules that need them.

    Attributes:
        units: in order of registration.
        hooked: module, indices of the units that a call of it needs, whether it is a leaf.
    """

    units: list[WrapUnit]
    hooked: list[tuple[nn.Module, list[int], bool]]


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return name and module of the outermost repeated blocks.

    They are members of a ModuleList or Sequential that have modules inside and share their class
    with another member.
    """
    found: list[tuple[str, nn.Module]] = []

    def visit(name: str, module: nn.Module) -> None:
        repeated: set[type] = set()
        if isinstance(module, nn.ModuleList | nn.Sequential):
            kinds = Counter(type(child) for child in module.children() if _is_composite(child))
            repeated = {kind for kind, count in kinds.items() if count > 1}
        for child_name, child in module.named_children():
            path = _join(name, child_name)
            if type(child) in repeated:
                found.append((path, child))
            else:
                visit(path, child)

    visit("", model)
    return found


def _is_composite(module: nn.Module) -> bool:
    if isinstance(module, TiledLinear):
        return False
    return any(module.children()) and had_params(module)


def _has_params(module: nn.Module, recurse: bool = True) -> bool:
    return any(True for _ in module.parameters(recurse=recurse))


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def _matches(patterns: Sequence[str], name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def _check_used(key: str, patterns: Sequence[str], model: nn.Module) -> None:
    """Check that each pattern matches a module.

    Raises:
        JobError: it does not.
    """
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if any(_matches([pattern], name) for name in names):
            continue
        hint = f"names are like {', '.join(names[:3])}"
        near = next((name for name in names if re.search(pattern, name)), None)
        if near:
            hint = f"part of {near!r} does: write .*{pattern}.*"
        raise JobError(f"{key}: {pattern!r} matches no module's whole name; {hint}")


class _TargetCollector:
    """Walks the module tree once, and collects the targets in order of registration."""

    def __init__(
        self,
        model: nn.Module,
        param_bytes: dict[str, int],
        bucket: int,
        unit_names: Sequence[str],
        leaf_names: Sequence[str],
        whole_blocks: bool,
    ) -> None:
        """Get ready to walk `model`, on any device.

        A module of more than `bucket` bytes is divided into its children. `unit_names` are regexes
        of modules that become units of their own, and `leaf_names` of those that are targets as
        they are, as repeated blocks are with `whole_blocks`. `param_bytes` has each parameter under
        its first name only.
        """
        self._param_bytes = param_bytes
        self._bucket = bucket
        self._unit_names = unit_names
        self._leaf_names = leaf_names
        self._whole_blocks = whole_blocks
        self._blocks = {id(module) for _, module in repeated_blocks(model)}
        tiles = [tile for _, tiled in tiled_linears(model) for tile in tiled.children()]
        self._tiles = {id(tile) for tile in tiles}
        self._params_of_tiles = {id(param) for tile in tiles for param in tile.parameters()}
        # Modules that hold a block or a forced target are divided, however small they are.
        self._divided: set[int] = set()
        for name, module in model.named_modules():
            if self._holds_block(module) or self._holds_forced(name, module):
                self._divided.add(id(module))
        self.targets: list[WrapTarget] = []
        self._seen: set[int] = set()
        self._visit("", model, "", "")

    def _visit(
        self,
        name: str,
        module: nn.Module,
        parent: str,
        block: str,
        around: WrapTarget | None = None,
    ) -> None:
        if id(module) in self._seen:  # a module registered twice
            return
        self._seen.add(id(module))
        is_block = id(module) in self._blocks
        if is_block:
            block = name
        children = [(n, child) for n, child in module.named_children() if _has_params(child)]
        if self._is_target(name, module, children):
            target = self._add_target(name, module, parent, block, around, is_block=is_block)
            for inner_name, tiled in tiled_linears(module):
                self._visit(_join(name, inner_name), tiled, name, block, target)
            return
        if _has_params(module, recurse=False):
            # The module's own parameters are in use for as long as it runs: a unit apart from its
            # children's.
            params = list(module.parameters(recurse=False))
            names = self._owned_names(name, module, recurse=False)
            own = WrapTarget(
                name, module, params, names, alone=True, parent=name, block=block, recurse=False
            )
            self.targets.append(own)
        for child_name, child in children:
            self._visit(_join(name, child_name), child, name, block, around)

    def _add_target(
        self,
        name: str,
        module: nn.Module,
        parent: str,
        block: str,
        around: WrapTarget | None,
        *,
        is_block: bool,
    ) -> WrapTarget | None:
        """Add a module, without the tiles inside; return None if it has nothing else."""
        is_tile = id(module) in self._tiles
        params = list(module.parameters())
        names = self._owned_names(name, module, recurse=True)
        if not is_tile:
            params = [param for param in params if id(param) not in self._params_of_tiles]
        if not params:
            return None
        is_leaf = _matches(self._leaf_names, name)
        is_alone = is_leaf or is_block or is_tile or _matches(self._unit_names, name)
        target = WrapTarget(
            name, module, params, names, is_leaf, is_alone, parent, block, True, is_tile, around
        )
        self.targets.append(target)
        return target

    def _is_target(
        self, name: str, module: nn.Module, children: list[tuple[str, nn.Module]]
    ) -> bool:
        """Return whether the module is called as a whole; else it is divided into its children."""
        if _matches(self._leaf_names, name) or not children:
            return True
        if isinstance(module, TiledLinear):
            return False
        if self._whole_blocks and id(module) in self._blocks:
            return True
        if id(module) in self._divided:
            return False
        names = self._owned_names(name, module, recurse=True)
        return sum(self._param_bytes[n] for n in names) <= self._bucket

    def _holds_block(self, module: nn.Module) -> bool:
        inside = (inner for inner in module.modules() if inner is not module)
        return any(id(inner) in self._blocks for inner in inside)

    def _holds_forced(self, name: str, module: nn.Module) -> bool:
        forced = [*self._unit_names, *self._leaf_names]
        inside = (inner for inner, _ in module.named_modules() if inner)
        return any(_matches(forced, _join(name, inner)) for inner in inside)

    def _owned_names(self, name: str, module: nn.Module, recurse: bool) -> list[str]:
        """Return the parameters that no module before this one has; of others than tiles."""
        is_tile = id(module) in self._tiles
        named = module.named_parameters(recurse=recurse)
        names = [
            _join(name, inner)
            for inner, param in named
            if is_tile or id(param) not in self._params_of_tiles
        ]
        return [each for each in names if each in self._param_bytes]


def _merge(
    targets: Sequence[WrapTarget], size_of: Callable[[WrapTarget], int], bucket: int
) -> Iterator[list[WrapTarget]]:
    """Yield runs of neighbouring targets under one parent that fit the bucket together.

    `targets` are in order of registration; only a run of one target may exceed `bucket` bytes.
    """
    run: list[WrapTarget] = []
    size = 0
    for target in targets:
        if run:
            last = run[-1]
            may_merge = not (target.alone or last.alone) and target.parent == last.parent
            if not may_merge or size + size_of(target) > bucket:
                yield run
                run = []
                size = 0
        run.append(target)
        size += size_of(target)
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
    chunk_of: Mapping[str, int] = NO_CHUNKS,
    groups_of: Mapping[str, str] = NO_GROUPS,
) -> WrapPlan:
    """Divide `model` into units of at most `bucket` bytes, where the module tree allows it.

    Args:
        model: on any device, also meta.
        dtype: compute dtype; norms with running statistics stay fp32, because torch computes them
            in one dtype only.
        num_shards: ranks that divide each unit, but those with groups of their own.
        num_parts: that units are padded to; None: as many as shards.
        bucket: bytes, in `dtype`.
        unit_names: regexes; a module whose whole name matches becomes units of its own.
        leaf_names: regexes; a matching module is gathered and reduced as a whole.
        persist_below: parameters of fewer bytes go to units that are kept unsharded.
        whole_blocks: never divide a repeated block, whatever its size.
        group_of: optimizer group of a tensor's name.
        table: by parameter name, its part in a tensor of the model; absent: all of one.
        chunk_of: by parameter name, its chunk where a rank has several; absent: 0.
        groups_of: by parameter name, the groups of its unit: see `UnitLayout.groups`; absent: "".

    Raises:
        JobError: a regex of `unit_names` or `leaf_names` matches no module.
        ValueError: the table contradicts the model, or itself.
    """
    _check_used("zero.units", unit_names, model)
    _check_used("zero.leaf", leaf_names, model)
    params = dict(model.named_parameters())  # a tied parameter appears once, under its first name
    _check_table(table, params)
    dtypes = dict.fromkeys(params, dtype)
    in_fp32 = running_norm_params(model)
    for name, param in params.items():
        if id(param) in in_fp32:
            dtypes[name] = torch.float32
    param_bytes = {name: param.numel() * dtypes[name].itemsize for name, param in params.items()}
    small = {name for name, num_bytes in param_bytes.items() if num_bytes < persist_below}
    collector = _TargetCollector(model, param_bytes, bucket, unit_names, leaf_names, whole_blocks)
    targets = collector.targets
    kept = _kept_until_pass_ends(targets, {id(param): name for name, param in params.items()})

    units: list[WrapUnit] = []
    unit_of: dict[int, int] = {}  # id(parameter) -> unit

    def add_units(
        name: str,
        names: list[str],
        leaf: bool,
        keep_unsharded: bool,
        block: str,
        tile: bool = False,
        around: str = "",
    ) -> None:
        """Add a unit for each kind of parameter among `names`."""
        for traits, chosen in _alike(names, params, dtypes, dtype, table, chunk_of, groups_of):
            layout = lay_out(
                f"{name}({','.join(traits)})" if traits else name,
                [(n, params[n], group_of(table[n].tensor if n in table else n)) for n in chosen],
                dtype=dtypes[chosen[0]],
                trainable=params[chosen[0]].requires_grad,
                num_shards=num_shards,
                num_parts=num_parts,
                keep_unsharded=keep_unsharded,
                keep_until_pass_ends=any(n in kept for n in chosen),
                modules=name,
                block=block,
                tile=tile,
                around=around,
                chunk=chunk_of.get(chosen[0], 0),
                groups=groups_of.get(chosen[0], ""),
                table=table,
            )
            for n in chosen:
                unit_of[id(params[n])] = len(units)
            units.append(WrapUnit(layout, [params[slot.name] for slot in layout.slots], leaf))

    def size_of(target: WrapTarget) -> int:
        return sum(param_bytes[n] for n in target.param_names if n not in small)

    titles: dict[int, str] = {}  # of the units of targets, by their identity
    for run in _merge(targets, size_of, bucket):
        title = _title([target.name for target in run])
        names = [n for target in run for n in target.param_names if n not in small]
        titles |= {id(target): title for target in run}
        first = run[0]
        around = "" if first.around is None else titles[id(first.around)]
        add_units(title, names, first.leaf, False, first.block, first.tile, around)
    persistent = [name for name in params if name in small]
    add_units("small parameters", persistent, leaf=False, keep_unsharded=True, block="")
    hooked = []
    for target in targets:
        needed = sorted({unit_of[id(param)] for param in target.params})
        hooked.append((target.module, needed, target.leaf))
    return WrapPlan(units, hooked)


def _alike(
    names: Sequence[str],
    params: Mapping[str, nn.Parameter],
    dtypes: Mapping[str, torch.dtype],
    compute_dtype: torch.dtype,
    table: Mapping[str, TensorPart],
    chunk_of: Mapping[str, int],
    groups_of: Mapping[str, str],
) -> Iterator[tuple[list[str], list[str]]]:
    """Divide `names` by what a unit must have alike.

    That is trainable, dtype, axes of replication, chunk, and the groups of ranks that it lies on.

    Yields:
        Traits that distinguish the unit, for its name; and the names.
    """
    shared: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = dict.fromkeys(names, ((), ()))
    for name in names:
        if name in table:
            shared[name] = table[name].replicated_over, table[name].partial_over
    formats = dict.fromkeys((compute_dtype, torch.float32))
    axes = sorted({shared[name] for name in names})
    chunks = sorted({chunk_of.get(name, 0) for name in names})
    groups = sorted({groups_of.get(name, "") for name in names})
    kinds = itertools.product(chunks, groups, (True, False), formats, axes)
    for chunk, group, trainable, dtype, over in kinds:
        chosen = [
            name
            for name in names
            if params[name].requires_grad == trainable
            and dtypes[name] == dtype
            and shared[name] == over
            and chunk_of.get(name, 0) == chunk
            and groups_of.get(name, "") == group
        ]
        if not chosen:
            continue
        traits = []
        if not trainable:
            traits.append("frozen")
        if dtype != compute_dtype:
            traits.append("fp32")
        traits += [f"alike over {axis}" for axis in over[0]]
        if len(chunks) > 1:
            traits.append(f"chunk {chunk}")
        if group:
            traits.append(f"on {group}")
        yield traits, chosen


def _check_table(table: Mapping[str, TensorPart], params: Mapping[str, nn.Parameter]) -> None:
    """Check the parts of tensors.

    Raises:
        ValueError: a part is of no parameter, or parts of a tensor disagree about it.
    """
    tensors: dict[str, tuple[object, object]] = {}
    for name, part in table.items():
        if name not in params:
            raise ValueError(f"the tensor table has {name}, which the model has not")
        form = (part.shape, part.stride)
        if tensors.setdefault(part.tensor, form) != form:
            raise ValueError(f"the tensor table has {part.tensor} in two shapes or memory orders")


def running_norm_params(model: nn.Module) -> set[int]:
    """Return the identities of parameters of norms with running statistics, which are fp32."""
    found: set[int] = set()
    for module in model.modules():
        if isinstance(module, _NormBase) and module.track_running_stats:
            found.update(id(param) for param in module.parameters(recurse=False))
    return found


def _kept_until_pass_ends(targets: Sequence[WrapTarget], name_of: dict[int, str]) -> set[str]:
    """Return parameters in use while others come and go.

    They are of containers themselves, or used by several modules. `name_of` has the first name of a
    parameter, by its identity.
    """
    kept = set()
    for target in targets:
        if not target.recurse:
            kept.update(target.param_names)
        for param in target.params:
            name = name_of[id(param)]
            if name not in target.param_names:  # tied: another target owns it
                kept.add(name)
    return kept


def _title(names: Sequence[str]) -> str:
    """Return the name of a unit of these modules: blocks.1.{attn,norm}."""
    if len(names) == 1:
        return names[0] or "model"
    parent = names[0].rpartition(".")[0]
    short = [name.rpartition(".")[2] for name in names]
    inside = ",".join(short) if len(short) <= 4 else f"{short[0]}..{short[-1]}"
    return _join(parent, f"{{{inside}}}")
