"""Which GPUs the variables of the environment leave to a process, and what is wrong with them.

Pure. CUDA and ROCm read such a variable up to the first entry that they cannot make out, and say
nothing: a typing error costs GPUs in silence. Here such an entry is named.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zrun_core.spine.visible_devices import HIDING

CUDA = "CUDA_VISIBLE_DEVICES"
# ROCm's driver leaves what the first names; HIP counts those anew, and takes CUDA's variable where
# its own is not set.
ROCR = "ROCR_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"

_SHOWN = 4  # GPUs in a message
_OLD_MIG = re.compile(r"MIG-GPU-[0-9a-f-]+/\d+/\d+")
_ROCM_UUID = re.compile(r"GPU-[0-9a-f]{16}")  # those of NVIDIA have dashes


@dataclass(frozen=True)
class NamedGpu:
    """A GPU, or a slice of one, by the names that people give it."""

    index: int  # of the GPU, as `nvidia-smi` and `amd-smi` count
    uuid: str
    is_rocm: bool = False


@dataclass(frozen=True)
class Visible:
    """What the variables leave.

    Attributes:
        places: in the list of GPUs, in the order of the variable.
        trouble: what is wrong with it; None: nothing.
        hidden: which one leaves none on purpose, as `CUDA_VISIBLE_DEVICES=-1`; None: none does.
    """

    places: tuple[int, ...]
    trouble: str | None = None
    hidden: str | None = None


def visible(gpus: Sequence[NamedGpu], environ: Mapping[str, str]) -> Visible:
    """Return which of a host's GPUs a process with this environment would see."""
    variables = [CUDA]
    if any(gpu.is_rocm for gpu in gpus):
        variables = [ROCR, HIP if HIP in environ else CUDA]
    left = Visible(tuple(range(len(gpus))))
    for variable in variables:
        wanted = environ.get(variable)
        if wanted is None or not left.places:  # machines without a GPU often have it too
            continue
        named = [gpus[place] for place in left.places]
        if variable != variables[0]:
            named = [NamedGpu(number, gpu.uuid, gpu.is_rocm) for number, gpu in enumerate(named)]
        found = _chosen(variable, wanted, named)
        places = tuple(left.places[place] for place in found.places)
        left = Visible(places, left.trouble or found.trouble, found.hidden)
    return left


def environment_of(uuids: Sequence[str]) -> dict[str, str]:
    """Return the variables that leave these GPUs to a process, in this order; {} for none."""
    if not uuids:
        return {}
    if all(_ROCM_UUID.fullmatch(uuid) for uuid in uuids):
        numbers = ",".join(map(str, range(len(uuids))))  # of those that the first one leaves
        return {ROCR: ",".join(uuids), HIP: numbers, CUDA: numbers}
    return {CUDA: ",".join(uuids)}


def _chosen(variable: str, wanted: str, gpus: Sequence[NamedGpu]) -> Visible:
    """Return the GPUs that a list names, by number or by the start of a UUID.

    As CUDA and torch read it: the first entry says which of both it is. A number of a GPU in MIG
    mode is its first slice.
    """
    hidden = f"{variable}={wanted.strip() or repr('')}"
    if wanted.strip() in HIDING:
        return Visible((), hidden=hidden)
    library = "ROCm" if any(gpu.is_rocm for gpu in gpus) else "CUDA"
    entries = [entry.strip() for entry in wanted.split(",")]
    by_number = entries[0].isdecimal()
    chosen: list[int] = []
    for entry in entries:
        if entry == "-1":  # ends the list on purpose
            break
        found = _matching(entry, gpus, by_number=by_number)
        if len(found) == 1 and found[0] in chosen:
            trouble = f"{variable} names {entry} twice, and then {library} shows no GPU"
            return Visible((), trouble)
        if len(found) != 1:
            why = _explain(entry, found, gpus, by_number=by_number)
            left = "shows no GPU"
            if chosen:
                left = f"shows only the {len(chosen)} before it"
            return Visible(tuple(chosen), f"{variable}: {why}, so {library} {left}")
        chosen += found
    return Visible(tuple(chosen), hidden=None if chosen else hidden)


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
