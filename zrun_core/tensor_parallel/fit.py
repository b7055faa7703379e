"""Check that a model's heads and widths divide over the ranks; refuse what goes wrong unseen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from zrun_core.errors import JobError
from zrun_core.spine.sections.tensor_roles import Role
from zrun_core.tensor_parallel.cuts import Cut
from zrun_core.tensor_parallel.region_plan import COLUMNS, Region
from zrun_core.tensor_parallel.roles import Roles, any_number

_ROWS = (Role.ROWWISE, Role.ROWWISE_SPLIT_INPUT)

# Attributes of attention modules, as models call them.
_HEAD_WIDTHS = (
    "head_dim",
    "attention_head_size",
    "head_size",
    "d_head",
    "dim_head",
    "dim_per_head",
)
_HEAD_COUNTS = {
    *("num_heads", "n_heads", "n_head", "nheads", "nhead", "heads", "num_attention_heads"),
    *("num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads", "num_key_value_heads"),
    *("n_local_heads", "n_local_kv_heads", "all_head_size", "split_size"),
}


class _Count(NamedTuple):
    """A number that the ranks must divide, such as heads.

    Attributes:
        name: of the linear or attribute that has them.
        number: how many there are.
        equation: from what.
        unit: what they are.
    """

    name: str
    number: int
    equation: str
    unit: str


def check_fit(
    model: nn.Module,
    roles: Roles,
    regions: Sequence[Region],
    cuts: Mapping[int, Cut],
    degree: int,
) -> None:
    """Check that a model divides over `degree` ranks, and that it computes the same so.

    Args:
        cuts: of its parameters, by identity.

    Raises:
        JobError: it does not, with the equation and what to write.
    """
    counts = list(_counts(model, roles, regions, cuts))
    for count in counts:
        if count.number % degree:
            raise _does_not_divide(count, counts, degree)
    for region in regions:
        _check_row(model, region)
        _check_running_norms(model, region)
        _check_head_counts(model, roles, region, degree)


def _does_not_divide(count: _Count, counts: Sequence[_Count], degree: int) -> JobError:
    common = math.gcd(*(each.number for each in counts))
    fitting = [str(tp) for tp in range(1, common + 1) if common % tp == 0][:8]
    written = " or ".join([", ".join(fitting[:-1]), fitting[-1]]) if fitting[1:] else fitting[0]
    if count.number < degree:
        problem = f"fewer than tp {degree}"
    else:
        problem = f"and {count.number} / tp {degree} = {count.number / degree:.4g} is not whole"
    return JobError(
        f"parallel.tp: {count.name} has {count.equation}{count.number} {count.unit}, {problem}; "
        f"write tp: {written}"
    )


def _counts(
    model: nn.Module, roles: Roles, regions: Sequence[Region], cuts: Mapping[int, Cut]
) -> Iterator[_Count]:
    in_regions: set[str] = set()
    for region in regions:
        for column in region.columns:
            cut = cuts[id(weight_of(model, column))]
            yield from _heads(model, column, cut, roles.entries[column].grain, region)
        if region.role is None:
            cut = cuts[id(weight_of(model, region.row))]
            yield _Count(region.row, sum(cut.sections), "", "columns")
        in_regions |= {*region.columns, region.row}
    for name, entry in roles.entries.items():
        prefix, _, key = name.rpartition(".")
        if entry.role is Role.DIVIDE:
            value: int = getattr(model.get_submodule(prefix), key)
            yield _Count(name, value, "the value ", "to divide")
        elif entry.role in (*COLUMNS, *_ROWS) and name not in in_regions:
            cut = cuts[id(weight_of(model, name))]
            yield _Count(name, cut.sections[0], "", "columns" if entry.role in _ROWS else "rows")


def _heads(model: nn.Module, column: str, cut: Cut, grain: int, region: Region) -> Iterator[_Count]:
    if grain == 1:
        grain = _head_width(model, column, region)
    of = "rows" if len(cut.sections) == 1 else "rows of a section"
    for length in sorted(set(cut.sections), reverse=True):
        if grain > 1 and length % grain == 0:
            yield _Count(column, length // grain, f"{length} {of} / {grain} of a head = ", "heads")
        else:
            yield _Count(column, length, "", of)


def weight_of(model: nn.Module, name: str) -> nn.Parameter:
    """Return the parameter that a role is of: the one of this name, or the weight of a linear."""
    prefix, _, key = name.rpartition(".")
    param = model.get_submodule(prefix)._parameters.get(key)
    return model.get_submodule(name).get_parameter("weight") if param is None else param


def _width(linear: nn.Module, *, rows: bool) -> int:
    """Return how many values a linear makes, or takes."""
    weight = linear.get_parameter("weight")
    is_transposed = not isinstance(linear, nn.Linear)
    return weight.shape[0] if rows != is_transposed else weight.shape[1]


def _modules_around(model: nn.Module, name: str, region: Region) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a region that a linear lies in, the innermost first."""
    while name != region.around:
        name = name.rpartition(".")[0]
        yield name, model.get_submodule(name)


def _head_width(model: nn.Module, column: str, region: Region) -> int:
    """Return the rows of one head, as the attention around says; 1: it does not."""
    for _, module in _modules_around(model, column, region):
        for key in _HEAD_WIDTHS:
            value = vars(module).get(key)
            if type(value) is int and value > 0:
                return value
    return 1


# What would go wrong unseen


def _check_row(model: nn.Module, region: Region) -> None:
    row = model.get_submodule(region.row)
    if isinstance(row, nn.Linear) and type(row).forward is not nn.Linear.forward:
        raise JobError(
            f"parallel.plan: {region.row} is a {type(row).__name__} with a forward of its own, and "
            "the bias of a rowwise linear is added after the sum over ranks: make it an nn.Linear, "
            f"or write {region.row}: whole"
        )


def _check_running_norms(model: nn.Module, region: Region) -> None:
    """Check that no norm with running statistics lies between the linears of a region."""
    is_between = False
    for name, module in model.get_submodule(region.around).named_modules():
        full = f"{region.around}.{name}" if region.around and name else region.around or name
        if full in region.columns:
            is_between = True
        if full == region.row:
            return
        if is_between and module._buffers.get("running_mean") is not None:
            raise JobError(
                f"parallel.tp: {full} is a {type(module).__name__}, whose running statistics would "
                f"be of slices, between {region.columns[0]} and {region.row}; write a norm without "
                f"them, or {region.columns[0]}: whole and {region.row}: whole"
            )


def _check_head_counts(model: nn.Module, roles: Roles, region: Region, degree: int) -> None:
    """Check that attributes which count heads are divided, where the job says the roles.

    A view with too many heads may have a shape that fits, and the heads are then too narrow.
    """
    for column in region.columns:
        if column not in roles.said:
            continue
        for name, module in _modules_around(model, column, region):
            for key, value in vars(module).items():
                attribute = f"{name}.{key}" if name else key
                if key in _HEAD_COUNTS and type(value) is int and attribute not in roles.entries:
                    pattern = any_number(attribute)
                    raise JobError(
                        f"parallel.plan: {attribute} is {value}, and each rank has {value} / tp "
                        f"{degree} of them: write {pattern!r}: divide, or {pattern!r}: whole if "
                        "its forward counts heads by the width of what it is given"
                    )


def counting_attributes(
    model: nn.Module, divided: Mapping[str, int], region: Region
) -> Iterator[str]:
    """Yield attributes of a region's modules that may count its heads or their widths."""
    if region.role is not None:
        return
    sizes = {_width(model.get_submodule(region.row), rows=False)}
    sizes |= {_width(model.get_submodule(column), rows=True) for column in region.columns}
    seen: set[str] = set()
    for column in region.columns:
        for name, module in _modules_around(model, column, region):
            for key, value in vars(module).items():
                attribute = f"{name}.{key}" if name else key
                if type(value) is not int or attribute in {*divided, *seen}:
                    continue
                if key in _HEAD_COUNTS or value in sizes:
                    seen.add(attribute)
                    yield f'"{any_number(attribute)}" is {value}'
