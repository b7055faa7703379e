"""Regions of a model: linears between which activations are slices.

    model.layers.0.self_attn       q_proj, k_proj, v_proj  ->  o_proj
    model.layers.0.mlp             gate_proj, up_proj      ->  down_proj

A row linear takes what the column linears make that lie with it under one module, the deepest such.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from torch import nn

from zrun_core.errors import JobError
from zrun_core.spine.sections.tensor_roles import Entry, Role

COLUMNS = (Role.COLWISE, Role.FUSED)
_MODULES = (Role.ATTENTION, Role.EXPERTS)

_Pair = tuple[tuple[str, ...], str]  # names of columns, and of the row that takes what they make


@dataclass(frozen=True)
class Region:
    """Linears between which activations are slices.

    Attributes:
        entries: names of the modules at whose inputs it begins. Mostly one, that has all of the
            columns, or is the only one; else it begins at each of the columns.
        columns: names of its column linears.
        row: name of the row linear that takes what they make, where it ends.
        around: name of the deepest module that all of them lie in.
        role: attention or experts, of a module whose columns are parameters of its own. Experts
            are their own row: what they return is summed.
    """

    entries: tuple[str, ...]
    columns: tuple[str, ...]
    row: str
    around: str
    role: Role | None = None

    def rejects_sequence(self, model: nn.Module) -> str:
        """Return why activations cannot be divided along the sequence there; empty: they can."""
        if self.role is Role.EXPERTS:
            experts = model.get_submodule(self.row)
            if len(inspect.signature(experts.forward).parameters) == 1:
                return f"{self.row} is given tokens by expert, and not how they are routed"
            config = vars(experts).get("config")
            if getattr(config, "output_router_logits", False):
                return (
                    "each rank would have the router's logits of its slice only, for the loss "
                    "that balances experts (output_router_logits)"
                )
            return ""
        if len(self.entries) == 1:
            return ""
        names = ", ".join(self.columns)
        return (
            f"no module has the inputs of {names} as its own, where a sequence could be gathered: "
            f"put them into one module with {self.row}"
        )


def find_regions(model: nn.Module, entries: Mapping[str, Entry]) -> tuple[Region, ...]:
    """Return the regions of a model, in the order of their rows.

    Raises:
        JobError: a row linear has no columns, or a column no row.
    """
    names = [name for name, _ in model.named_modules()]
    of_modules = list(_module_regions(model, entries))
    left = [name for name in names if name in entries and _is_inside(entries[name].role)]
    fed: list[_Pair] = []
    for around in sorted(names, key=_depth, reverse=True):
        inside = [name for name in left if _lies_in(name, around)]
        for columns, row in _pairs(inside, entries):
            fed.append((columns, row))
            left = [name for name in left if name != row and name not in columns]
    fed = _joined(fed, left, entries)
    own = _own_parameters(model, entries)
    order = {name: number for number, name in enumerate(names)}
    found = [
        _region(model, tuple(sorted(columns, key=order.__getitem__)), row, own)
        for columns, row in fed
    ]
    return tuple(sorted([*found, *of_modules], key=lambda region: order[region.row]))


def _module_regions(model: nn.Module, entries: Mapping[str, Entry]) -> Iterator[Region]:
    """Yield the regions that are a module each, which uses parameters of its own."""
    for name, module in model.named_modules():
        role = entries[name].role if name in entries else None
        if role in _MODULES:
            keys = [f"{name}.{key}" if name else key for key in module._parameters]
            columns = tuple(key for key in keys if key in entries and entries[key].role in COLUMNS)
            row = name if role is Role.EXPERTS else f"{name}.out_proj".lstrip(".")
            yield Region((name,), columns, row, name, role)


def _is_inside(role: Role) -> bool:
    return role in COLUMNS or role is Role.ROWWISE


def _depth(name: str) -> int:
    return len(_path(name))


def _path(name: str) -> list[str]:
    return name.split(".") if name else []


def _lies_in(name: str, around: str) -> bool:
    return not around or name.startswith(f"{around}.")


def _pairs(inside: Sequence[str], entries: Mapping[str, Entry]) -> list[_Pair]:
    """Return columns with the row that takes what they make, of linears under one module.

    Where there are several rows, each takes what the columns before it make: q, k, v, o, up, down.
    """
    rows = [name for name in inside if entries[name].role is Role.ROWWISE]
    columns = [name for name in inside if entries[name].role is not Role.ROWWISE]
    if not rows or not columns:
        return []
    if len(rows) == 1:
        return [(tuple(columns), rows[0])]
    pairs = []
    waiting: list[str] = []
    for name in inside:
        if entries[name].role is not Role.ROWWISE:
            waiting.append(name)
        elif waiting:
            pairs.append((tuple(waiting), name))
            waiting = []
    return pairs


def _joined(fed: Sequence[_Pair], left: Sequence[str], entries: Mapping[str, Entry]) -> list[_Pair]:
    """Return pairs with the columns that are left, whose row lies deeper than they do.

        self_attn                q_proj, k_proj, v_proj
        self_attn.output         gate_proj -> o_proj

    Raises:
        JobError: a linear is still left.
    """
    found = list(fed)
    for name in left:
        parent = name.rpartition(".")[0]
        deeper = [at for at, (_, row) in enumerate(found) if _lies_in(row, parent)]
        if entries[name].role is Role.ROWWISE or len(deeper) != 1:
            raise _unpaired(name, entries[name].role)
        columns, row = found[deeper[0]]
        found[deeper[0]] = (*columns, name), row
    return found


def _unpaired(name: str, role: Role) -> JobError:
    if role is Role.ROWWISE:
        return JobError(
            f"parallel.plan: {name} is rowwise, and no column linear before it makes the slices "
            f"that it takes: give a role colwise too, or write {name}: whole"
        )
    return JobError(
        f"parallel.plan: {name} is {role}, and no row linear after it takes the slices that it "
        f"makes: give a role rowwise too, or write {name}: whole"
    )


def _own_parameters(model: nn.Module, entries: Mapping[str, Entry]) -> AbstractSet[str]:
    """Return the names of parameters that may be used on slices, but those of module regions."""
    inside = (*COLUMNS, Role.ROWWISE, Role.SUMMED)
    modules = [f"{name}." for name, entry in entries.items() if entry.role in _MODULES]
    return {
        name
        for name, _ in model.named_parameters(remove_duplicate=False)
        if not name.startswith(tuple(modules))
        and any(
            key in entries and entries[key].role in inside
            for key in (name, name.rpartition(".")[0])
        )
    }


def _region(model: nn.Module, columns: tuple[str, ...], row: str, own: AbstractSet[str]) -> Region:
    around = _common([*columns, row])
    for entry in (around, columns[0] if len(columns) == 1 else _common(columns)):
        if entry in columns or _is_clean(model, entry, own):
            return Region((entry,), columns, row, around)
    return Region(columns, columns, row, around)


def _common(names: Sequence[str]) -> str:
    """Return the deepest module that all of these lie in."""
    paths = [_path(name)[:-1] for name in names]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _is_clean(model: nn.Module, name: str, own: AbstractSet[str]) -> bool:
    """Return whether a module is called, and has no parameters that want whole activations."""
    module = model.get_submodule(name)
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    prefix = f"{name}." if name else ""
    return all(prefix + key in own for key, _ in module.named_parameters(remove_duplicate=False))
