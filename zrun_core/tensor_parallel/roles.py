"""Roles of a model's modules: those that zrun knows, and those that the job says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from zrun_core.errors import JobError
from zrun_core.spine.sections.tensor_roles import Entry, Role, read_entry
from zrun_core.tensor_parallel.known import known_entries

_KEY = "parallel.plan"

# Parameters of an nn.MultiheadAttention.
_ATTENTION = {
    "in_proj_weight": "fused 3",
    "in_proj_bias": "fused 3",
    "q_proj_weight": "colwise",
    "k_proj_weight": "colwise",
    "v_proj_weight": "colwise",
    "out_proj.weight": "rowwise",
}


@dataclass(frozen=True)
class Roles:
    """Roles of a model's modules, and of their parameters and attributes.

    Attributes:
        entries: by the name of a module, of a parameter, or of an attribute that is divided.
        said: names that the job speaks of.
    """

    entries: Mapping[str, Entry]
    said: frozenset[str] = frozenset()


def find_roles(model: nn.Module, plan: Mapping[str, str] | None) -> Roles:
    """Return the roles of a model's modules.

    Args:
        plan: of the job: texts of roles by pattern. They come before what is known. None: it has
            none.

    Raises:
        JobError: a pattern matches nothing, or what another one matches.
    """
    said: dict[str, Entry] = {}
    pattern_of: dict[str, str] = {}
    for pattern, text in (plan or {}).items():
        entry = read_entry(text)
        for name in _matches(model, pattern, entry.role):
            if name in said:
                raise JobError(
                    f"{_KEY}: {name} matches {pattern_of[name]!r} and {pattern!r}: write patterns "
                    "of which each module matches one",
                )
            said[name] = entry
            pattern_of[name] = pattern
    known = known_entries(model)
    entries = known | _of_whole_experts(model, known, said) | said
    return Roles(entries | _of_attention(model, entries), frozenset(said))


def _of_whole_experts(
    model: nn.Module, known: Mapping[str, Entry], said: Mapping[str, Entry]
) -> dict[str, Entry]:
    """Return entries of the parameters of packed experts that the job wants whole.

    Nothing would sum what slices of them come to.
    """
    return {
        f"{name}.{key}": entry
        for name, entry in said.items()
        if entry.role is Role.WHOLE and name in known and known[name].role is Role.EXPERTS
        for key in model.get_submodule(name)._parameters
    }


def _of_attention(model: nn.Module, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return entries of the parameters of torch's attention."""
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    found: dict[str, Entry] = {}
    for module, entry in entries.items():
        if entry.role is Role.ATTENTION:
            names = {f"{module}.{key}" if module else key: key for key in _ATTENTION}
            found |= {name: read_entry(_ATTENTION[names[name]]) for name in params & names.keys()}
    return found


def _matches(model: nn.Module, pattern: str, role: Role) -> list[str]:
    """Return the names that a pattern matches.

    Raises:
        JobError: there are none.
    """
    modules = [name for name, _ in model.named_modules() if name]
    params = [name for name, _ in model.named_parameters()]
    attributes = [
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) is int
    ]
    kinds = {Role.DIVIDE: [attributes], Role.WHOLE: [modules, params, attributes]}
    for names in kinds.get(role, [modules, params]):
        if found := [name for name in names if fnmatchcase(name, pattern)]:
            return found
    what = "integer attribute" if role is Role.DIVIDE else "module"
    names = attributes if role is Role.DIVIDE else modules
    raise JobError(f"{_KEY}: no {what} matches {pattern!r}{_hint(pattern, names)}")


def _hint(pattern: str, names: Iterable[str]) -> str:
    """Return what may have been meant by a pattern that matches nothing."""
    general = sorted({any_number(name) for name in names})
    deeper = f"*.{pattern}"
    if any(fnmatchcase(name, deeper) for name in general):
        return f": a pattern speaks of a whole name; write {deeper!r}"
    if close := get_close_matches(pattern, general, n=1, cutoff=0.4):
        return f"; did you mean {close[0]!r}?"
    return ""


def any_number(name: str) -> str:
    """Return the pattern of a name and of its like: `h.0.attn` gives `h.*.attn`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
