"""How each parameter of a model is divided, as the roles of its modules say. Pure.

colwise      nn.Linear [out, in]: rows        Conv1D [in, out]: columns
rowwise      nn.Linear [out, in]: columns     its bias: whole, and added after the sum
fused 3      rows of each third
experts      a parameter [experts, out, in]: as of a linear, in each of them
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from zrun_core.errors import JobError
from zrun_core.memory.tensors import Shape
from zrun_core.spine.sections.tensor_roles import Entry, Role
from zrun_core.tensor_parallel.region_plan import COLUMNS

_KEY = "parallel.plan"
# Of linears that stand alone, between whole activations.
ALONE = (Role.COLWISE_GATHER_OUTPUT, Role.ROWWISE_SPLIT_INPUT)


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


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer: torch's, or the Conv1D of transformers."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a linear layer has its weight as [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def find_cuts(model: nn.Module, entries: Mapping[str, Entry]) -> dict[int, Cut]:
    """Return how parameters are divided, by identity.

    Args:
        entries: roles, by the name of a module or parameter.

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


# Whether a module can have its role


def why_whole(module: nn.Module) -> str:
    """Return why the heads of a module cannot be divided; empty: they can."""
    kind = type(module).__name__
    if not isinstance(module, nn.MultiheadAttention):
        return f"is {_a(kind)}, and attention divides an nn.MultiheadAttention"
    if type(module).forward is not nn.MultiheadAttention.forward:
        return f"is a {kind} with a forward of its own"
    if module.bias_k is not None or module.add_zero_attn:
        return "adds keys of its own (add_bias_kv, add_zero_attn), which are not divided"
    return ""


def _a(kind: str) -> str:
    return f"an {kind}" if kind[0] in "AEIOU" else f"a {kind}"


def _check_role(name: str, module: nn.Module, entry: Entry) -> None:
    """Check that a module can have its role.

    Raises:
        JobError: it cannot.
    """
    role = entry.role
    kind = type(module).__name__
    if role is Role.VOCABULARY:
        if not isinstance(module, nn.Embedding):
            raise JobError(f"{_KEY}: {name} is {_a(kind)}, and vocabulary divides an nn.Embedding")
        if module.max_norm is not None:
            raise JobError(
                f"{_KEY}: {name} renormalises the rows that it looks up (max_norm), of which each "
                f"rank would have some; write {name}: whole"
            )
    if role is Role.ATTENTION and (reason := why_whole(module)):
        raise JobError(f"{_KEY}: {name} {reason}; write {name}: whole")
    if role in (*COLUMNS, Role.ROWWISE, Role.HEAD, *ALONE):
        _check_linear(name, module, entry)


def _check_linear(name: str, module: nn.Module, entry: Entry) -> None:
    role = entry.role
    needs_rows = role is Role.HEAD or role in ALONE
    if type(module).__module__.startswith("peft."):
        raise JobError(
            f"{_KEY}: {name} is a linear of peft with its adapter, which tp does not divide: write "
            "pp or zero: 3 in place of tp"
        )
    if entry.is_transposed or not is_linear(module) or (needs_rows and is_transposed(module)):
        raise JobError(
            f"{_KEY}: {name} is {_a(type(module).__name__)}, but {role} needs an nn.Linear: name "
            "the linears inside it, or leave it out"
        )
    others = module._parameters.keys() - {"weight", "bias"}
    if "weight" not in module._parameters or others:
        have = ", ".join(sorted(name for name, _ in module.named_parameters()))
        raise JobError(
            f"{_KEY}: {name} has the parameters {have}, but {role} needs a linear with only "
            "weight and bias: leave it out"
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
            f"whole: write {around}: attention, in place of {name}"
        )


# Cuts


def _cut(name: str, module: nn.Module, key: str, shape: Shape, entry: Entry) -> Cut | None:
    role = entry.role
    if role in (Role.VOCABULARY, Role.HEAD, Role.COLWISE_GATHER_OUTPUT):
        return Cut(0, (shape[0],), is_padded=True)
    out_dim = len(shape) - 1 if is_transposed(module) else 0
    if role in (Role.ROWWISE, Role.ROWWISE_SPLIT_INPUT):
        in_dim = 1 - out_dim
        return None if key == "bias" else Cut(in_dim, (shape[in_dim],))
    if role in COLUMNS:
        return Cut(out_dim, _sections(name.rpartition(".")[0], shape[out_dim], entry))
    if role is Role.EXPERTS:
        raise JobError(
            f"{_KEY}: {name} is whole, and {name.rpartition('.')[0]} sums what ranks make with "
            f"it; write {name}: colwise, fused 2 or rowwise, once where it is added to their "
            "results, or summed where it scales slices"
        )
    return None


def _cut_of_param(name: str, shape: Shape, entry: Entry) -> Cut | None:
    """Return the cut of a parameter that has a role of its own.

    Such are a number per head, [heads], and the weights of experts, [experts, out, in].
    """
    if entry.role is Role.HEAD:
        return Cut(0, (shape[0],), is_padded=True)
    if entry.role in (Role.SUMMED, Role.WHOLE, Role.ONCE):
        return None
    last = len(shape) - 1
    before = max(last - 1, 0)
    out_dim, in_dim = (last, before) if entry.is_transposed else (before, last)
    if entry.role in COLUMNS:
        return Cut(out_dim, _sections(name, shape[out_dim], entry))
    if entry.role is Role.ROWWISE and len(shape) > 1:
        return Cut(in_dim, (shape[in_dim],))
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
