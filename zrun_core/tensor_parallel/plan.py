"""Plan which slices of a model's layers each rank has. Pure: on a tree of modules, without values.

    plan = plan_model(model, None, degree=2)
    plan.regions[0]         # columns q_proj, k_proj and v_proj, and row o_proj, of model.layers.0
    plan.parts(0)           # by name of a parameter: what rank 0 of the tensor group has of it

The model may be real, on meta or fake: the runtime divides what it plans, and the planner counts
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from zrun_core.errors import JobError
from zrun_core.memory.layout import dense_stride
from zrun_core.memory.tensors import Shape, TensorPart, full_part, sliced_part
from zrun_core.spine.sections.tensor_roles import Entry, Role
from zrun_core.tensor_parallel.cuts import ALONE, Cut, find_cuts, is_linear, is_transposed
from zrun_core.tensor_parallel.fit import check_fit
from zrun_core.tensor_parallel.reads import NO_READS, Reads
from zrun_core.tensor_parallel.region_plan import COLUMNS, Region, find_regions
from zrun_core.tensor_parallel.roles import any_number, find_roles

_AXES = ("tensor",)
_KEY = "parallel.plan"


class _Tensor(NamedTuple):
    shape: Shape
    stride: Shape
    cut: Cut | None


@dataclass(frozen=True)
class TensorPlan:
    """The division of a model over the ranks of a tensor group.

    Attributes:
        degree: ranks of the group.
        entries: roles, by the name of a module, or of a parameter that has one of its own.
        regions: where activations are slices.
        attributes: "transformer.h.0.attn.num_heads": the value on each rank.
        summed: names of parameters that are whole and used on slices: their gradients are summed.
        tensors: of the model, by the first name of a parameter.
        reads: of parameters outside of their modules; a forward shows them.
    """

    degree: int
    entries: Mapping[str, Entry]
    regions: tuple[Region, ...]
    attributes: Mapping[str, int]
    summed: frozenset[str]
    tensors: Mapping[str, _Tensor]
    reads: Reads = NO_READS

    def parts(self, index: int) -> dict[str, TensorPart]:
        """Return what a rank has of each parameter, by its first name.

        Args:
            index: of the rank in its group.
        """
        return {name: self._part(name, tensor, index) for name, tensor in self.tensors.items()}

    def _part(self, name: str, tensor: _Tensor, index: int) -> TensorPart:
        shape, stride, cut = tensor
        if cut is None:
            return full_part(name, shape, stride, replicated_over=_AXES)
        ranges = []
        start = 0
        size = 0
        for length in cut.sections:
            per_rank = -(-length // self.degree)
            low = min(index * per_rank, length)
            high = min(low + per_rank, length)
            ranges.append((start + low, start + high))
            start += length
            size += per_rank
        return sliced_part(name, shape, cut.dim, ranges, size=size, stride=stride)


def plan_model(model: nn.Module, plan: Mapping[str, str] | None, degree: int) -> TensorPlan:
    """Return how a model is divided.

    Args:
        model: before it is transformed, on any device.
        plan: of the job, texts of roles by pattern; None: what zrun knows is all.

    Raises:
        JobError: it cannot be divided so; says what to write.
    """
    roles = find_roles(model, plan)
    cuts = find_cuts(model, roles.entries)
    regions = find_regions(model, roles.entries)
    stands_alone = any(entry.role in ALONE for entry in roles.entries.values())
    if plan is None and not regions and not stands_alone:
        raise _unknown(model)
    check_fit(model, roles, regions, cuts, degree)
    tensors = {
        name: _Tensor(tuple(param.shape), tuple(dense_stride(param)), cuts.get(id(param)))
        for name, param in model.named_parameters()
    }
    entries = {
        name: entry
        for name, entry in roles.entries.items()
        if entry.role not in (Role.DIVIDE, Role.WHOLE)
    }
    return TensorPlan(
        degree,
        entries,
        regions,
        dict(_attributes(model, roles.entries, degree)),
        frozenset(_summed(model, entries)),
        tensors,
    )


def _unknown(model: nn.Module) -> JobError:
    linears = {
        any_number(name): None for name, module in model.named_modules() if is_linear(module)
    }
    names = [f'"{name}"' for name in linears if "*" in name] or [f'"{name}"' for name in linears]
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    example = '{"*.q_proj": colwise, "*.o_proj": rowwise}'
    of_model = f": its linears are {shown}" if names else ", which has no linears"
    return JobError(
        f"parallel.tp: zrun does not know how to divide {type(model).__name__}; write their roles "
        f"in {_KEY}, as in {example}, or tp: 1{of_model}"
    )


# What else changes


def _attributes(
    model: nn.Module, entries: Mapping[str, Entry], degree: int
) -> Iterator[tuple[str, int]]:
    for name, entry in entries.items():
        prefix, _, key = name.rpartition(".")
        if entry.role is Role.DIVIDE:
            value: int = getattr(model.get_submodule(prefix), key)
            yield name, value // degree
        elif entry.role in COLUMNS:
            module = model.get_submodule(prefix)._modules.get(key)
            if module is not None and is_transposed(module):
                yield f"{name}.nf", int(module.nf) // degree  # type: ignore[arg-type]


def _summed(model: nn.Module, entries: Mapping[str, Entry]) -> Iterator[str]:
    for name, _ in model.named_parameters():
        keys = (name, name.rpartition(".")[0])
        if any(key in entries and entries[key].role in (Role.SUMMED, Role.ONCE) for key in keys):
            yield name
