"""Whether the ranks of a group have found the same plan, each by its own forward without values.

    if rank == 0: print(self.head.weight.norm())

One rank would gather what the others have slices of, and wait for them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from zrun_core.errors import JobError
from zrun_core.tensor_parallel.plan import TensorPlan
from zrun_core.tensor_parallel.tensor_comm import TensorComm

_SHAPE = "the shape of "
_GRADIENT = "a slice of "
_REGION = "a region that ends at "


def check_same(plan: TensorPlan | None, comm: TensorComm) -> None:
    """Check that all ranks gather, sum and begin regions alike. Collective over the group.

    Args:
        plan: None on all ranks: nothing is divided.

    Raises:
        JobError: they do not, the same on all of them; it names a parameter, and the line that
            reads it.
    """
    if plan is None:
        return
    text = json.dumps(sorted(_described(plan))).encode()
    name = "plan of slices"
    if len(set(comm.all_gather_bytes(hashlib.sha256(text).digest(), name))) == 1:
        return
    by_rank = [
        {(what, by): line for what, by, line in json.loads(each)}
        for each in comm.all_gather_bytes(text, name)
    ]
    for what, by in sorted({key for found in by_rank for key in found}):
        lines = [found.get((what, by)) for found in by_rank]
        if None in lines:
            raise JobError(_message(what, by, lines, comm.ranks))


def _described(plan: TensorPlan) -> set[tuple[str, str, str]]:
    """Return what a rank does of a plan: what it is, by whom and in which line, if any."""
    reads = plan.reads
    return {
        *((read.name, read.reader, reads.lines.get(read, "")) for read in reads.whole),
        *((_SHAPE + read.name, read.reader, reads.lines.get(read, "")) for read in reads.shapes),
        *((_GRADIENT + name, "", "") for name in plan.summed),
        *((_REGION + each.row, ", ".join(each.entries), "") for each in plan.regions),
    }


def _message(what: str, by: str, lines: Sequence[str | None], ranks: Sequence[int]) -> str:
    """Return what to say of what some ranks do, in `lines`, and others, with None, do not."""
    place = next(line for line in lines if line is not None)
    there = _listed([rank for rank, line in zip(ranks, lines, strict=True) if line is not None])
    elsewhere = _listed([rank for rank, line in zip(ranks, lines, strict=True) if line is None])
    how = "used" if what.startswith((_GRADIENT, _REGION)) else "read outside of its module"
    where = f", by {by or 'the model or the loss function'} ({place})" if place else ""
    return (
        f"parallel.tp: {what} is {how} on {there}{where}, and not on {elsewhere}: ranks that share "
        "layers gather and sum together, so all of them must come there: do it on each rank, and "
        "leave to one what is made of its result, as what is printed; or write tp: 1"
    )


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
