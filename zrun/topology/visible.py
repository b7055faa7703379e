"""Which GPUs the variables of the environment leave to a process, and what is wrong with them.

Pure. CUDA reads CUDA_VISIBLE_DEVICES up to the first entry that it cannot make out, and says
nothing: a typing error costs GPUs in silence. Here such an entry is named.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CUDA = "CUDA_VISIBLE_DEVICES"

_HIDDEN = {"", "-1", "none", "void", "NoDevFiles"}  # ways to ask for no GPU
_SHOWN = 4  # GPUs in a message
_OLD_MIG = re.compile(r"MIG-GPU-[0-9a-f-]+/\d+/\d+")


@dataclass(frozen=True)
class NamedGpu:
    """A GPU, or a slice of one, by the names that people give it."""

    index: int  # of the GPU, as `nvidia-smi` counts
    uuid: str


@dataclass(frozen=True)
class Visible:
    """What a variable leaves.

    Attributes:
        places: in the list of GPUs, in the order of the variable.
        trouble: what is wrong with it; None: nothing.
    """

    places: tuple[int, ...]
    trouble: str | None = None


def visible(gpus: Sequence[NamedGpu], environ: Mapping[str, str]) -> Visible:
    """Return which of a host's GPUs a process with this environment would see."""
    wanted = environ.get(CUDA)
    if wanted is None or not gpus:  # many machines without a GPU have the variable too
        return Visible(tuple(range(len(gpus))))
    return _chosen(CUDA, wanted, gpus)


def _chosen(variable: str, wanted: str, gpus: Sequence[NamedGpu]) -> Visible:
    """Return the GPUs that a list names, by number or by the start of a UUID.

    As CUDA and torch read it: the first entry says which of both it is. A number of a GPU in MIG
    mode is its first slice.
    """
    if wanted.strip() in _HIDDEN:
        return Visible(())
    entries = [entry.strip() for entry in wanted.split(",")]
    by_number = entries[0].isdecimal()
    chosen: list[int] = []
    for entry in entries:
        if entry == "-1":  # ends the list on purpose
            break
        found = _matching(entry, gpus, by_number=by_number)
        if len(found) == 1 and found[0] in chosen:
            return Visible((), f"{variable} names {entry} twice, and then CUDA shows no GPU")
        if len(found) != 1:
            why = _explain(entry, found, gpus, by_number=by_number)
            left = "shows no GPU"
            if chosen:
                left = f"shows only the {len(chosen)} before it"
            return Visible(tuple(chosen), f"{variable}: {why}, so CUDA {left}")
        chosen += found
    return Visible(tuple(chosen))


def _matching(entry: str, gpus: Sequence[NamedGpu], *, by_number: bool) -> list[int]:
    if by_number:
        number = int(entry) if entry.isdecimal() else None
        return [place for place, gpu in enumerate(gpus) if gpu.index == number][:1]
    if not entry:
        return []
    return [place for place, gpu in enumerate(gpus) if gpu.uuid.startswith(entry)]


def _explain(entry: str, found: Sequence[int], gpus: Sequence[NamedGpu], *, by_number: bool) -> str:
    """Say why an entry is no GPU."""
    if len(found) > 1:
        return f"{entry} is the start of {len(found)} UUIDs"
    if by_number != entry.isdecimal() and entry:
        return f"{entry!r} stands among {'numbers' if by_number else 'UUIDs'}"
    if _OLD_MIG.fullmatch(entry):
        return f"{entry} is a name of drivers before 470; nvidia-smi -L has the slice's UUID"
    names = [gpu.uuid for gpu in gpus[:_SHOWN]]
    if by_number:
        names = [str(number) for number in sorted({gpu.index for gpu in gpus})]
    there = ", ".join(names[:_SHOWN])
    if len(gpus) > _SHOWN:
        there += ", ..."
    return f"{entry!r} is no GPU of this host, which has {there}"
