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
from zrun_core.tensor_parallel.fit import check_fit
from zrun_core.tensor_parallel.region import COLUMNS, Region, find_regions
from zrun_core.tensor_parallel.roles import any_number, find_roles

_AXES = ("tensor",)
_KEY = "parallel.plan"


class Cut(NamedTuple):
    """The division of a parameter.

    Attributes:
        dim: along which.
        sections: their lengths along it; of each, a rank has a slice.
        is_padded: slices are as long as the first one, whatever they hold.
    """

    dim: int
    sections: tuple[int, ...]
    is_padded: bool = False


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
    """

    degree: int
    entries: Mapping[str, Entry]
    regions: tuple[Region, ...]
    attributes: Mapping[str, int]
    summed: frozenset[str]
    tensors: Mapping[str, _Tensor]

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
        degree: ranks of a tensor group.

    Raises:
        JobError: it cannot be divided so; says what to write.
    """
    roles = find_roles(model, plan)
    cuts = _cuts(model, roles.entries)
    regions = find_regions(model, roles.entries)
    if plan is None and not regions:
        raise _unknown(model)
    check_fit(model, roles, regions, degree)
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


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer: torch's, or the Conv1D of transformers."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a linear layer has its weight as [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


# Parameters


def _cuts(model: nn.Module, entries: Mapping[str, Entry]) -> dict[int, Cut]:
    """Return how parameters are divided, by identity.

    Raises:
        JobError: a role does not suit its module, or tied parameters are divided in two ways.
    """
    cuts: dict[int, Cut] = {}
    holders: dict[int, list[tuple[str, Cut | None]]] = {}
    for prefix, module in model.named_modules():
        of_module = entries.get(prefix)
        if of_module is not None:
            _check_role(prefix, module, of_module)
            _check_parent(prefix, model.get_submodule(prefix.rpartition(".")[0]))
        for key, param in module._parameters.items():
            if param is None:
                continue
            name = f"{prefix}.{key}" if prefix else key
            entry = entries.get(name)
            if entry is not None:
                cut = _cut_of_param(name, tuple(param.shape), entry)
            elif of_module is not None:
                cut = _cut(name, module, key, tuple(param.shape), of_module)
            else:
                cut = None
            holders.setdefault(id(param), []).append((name, cut))
            if cut is not None:
                cuts[id(param)] = cut
    for key_of_param, cut in cuts.items():
        for name, other in holders[key_of_param]:
            if other != cut:
                raise _tied_otherwise(holders[key_of_param], name, cut)
    return cuts


def _tied_otherwise(holders: list[tuple[str, Cut | None]], name: str, cut: Cut) -> JobError:
    divided = next(holder for holder, of_holder in holders if of_holder == cut)
    module = name.rpartition(".")[0]
    return JobError(
        f"{_KEY}: {divided} and {name} are one parameter, and only the first is divided so: give "
        f"both modules a role, for example {module}: head or vocabulary, or {module} and "
        f"{divided.rpartition('.')[0]}: whole"
    )


def _check_role(name: str, module: nn.Module, entry: Entry) -> None:
    """Check that a module can have its role.

    Raises:
        JobError: it cannot.
    """
    role = entry.role
    kind = type(module).__name__
    if role is Role.VOCABULARY:
        if not isinstance(module, nn.Embedding):
            raise JobError(f"{_KEY}: {name} is of {kind}, and vocabulary divides an nn.Embedding")
        if module.max_norm is not None:
            raise JobError(
                f"{_KEY}: {name} renormalises the rows that it looks up (max_norm), of which each "
                f"rank would have some; write {name}: whole"
            )
    if role in (*COLUMNS, Role.ROWWISE, Role.HEAD):
        if not is_linear(module) or (role is Role.HEAD and is_transposed(module)):
            raise JobError(
                f"{_KEY}: {name} is of {kind}, and {role} divides an nn.Linear; name the linears "
                "in it, or leave it out"
            )
        others = module._parameters.keys() - {"weight", "bias"}
        if "weight" not in module._parameters or others:
            have = ", ".join(sorted(name for name, _ in module.named_parameters()))
            raise JobError(
                f"{_KEY}: {name} has the parameters {have}, and {role} divides a linear with a "
                "weight and a bias alone; leave it out"
            )


def _check_parent(name: str, parent: nn.Module) -> None:
    """Check that a module is not one whose parent uses its weights without calling it.

    Raises:
        JobError: it is.
    """
    if isinstance(parent, nn.MultiheadAttention):
        around = name.rpartition(".")[0]
        raise JobError(
            f"{_KEY}: {around} is an nn.MultiheadAttention, which computes with its weights as a "
            f"whole: leave {name} out, or write an attention with linears for queries, keys, "
            "values and its output, around F.scaled_dot_product_attention"
        )


def _cut(name: str, module: nn.Module, key: str, shape: Shape, entry: Entry) -> Cut | None:
    role = entry.role
    if role in (Role.VOCABULARY, Role.HEAD):
        return Cut(0, (shape[0],), is_padded=True)
    out_dim = len(shape) - 1 if is_transposed(module) else 0
    if role is Role.ROWWISE:
        in_dim = 1 - out_dim
        return None if key == "bias" else Cut(in_dim, (shape[in_dim],))
    if role in COLUMNS:
        return Cut(out_dim, _sections(name.rpartition(".")[0], shape[out_dim], entry))
    return None


def _cut_of_param(name: str, shape: Shape, entry: Entry) -> Cut | None:
    """Return the cut of a parameter that has a role of its own, such as one number per head."""
    if entry.role in COLUMNS:
        return Cut(0, _sections(name, shape[0], entry))
    if entry.role is Role.HEAD:
        return Cut(0, (shape[0],), is_padded=True)
    if entry.role in (Role.SUMMED, Role.WHOLE):
        return None
    raise JobError(f"{_KEY}: {name} is a parameter, which cannot be {entry.role}: write colwise")


def _sections(name: str, length: int, entry: Entry) -> tuple[int, ...]:
    total = sum(entry.sections)
    unit, rest = divmod(length, total)
    if rest:
        said = ":".join(map(str, entry.sections))
        raise JobError(
            f"{_KEY}: {name} has {length} rows, and {length} / ({said}) = {length / total:.2f} "
            "is not whole: write the sections in the proportions that they have"
        )
    return tuple(unit * section for section in entry.sections)


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
        if any(key in entries and entries[key].role is Role.SUMMED for key in keys):
            yield name
