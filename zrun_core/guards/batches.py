"""Ranks that compute the same samples must have read the same batches.

With tensor parallelism and pipelines each batch is read by several ranks: all parts of a layer and
all stages need it. Data that differ between them, such as what a dataset draws from the clock, show
in no loss. So each rank digests what it reads, and one number in the message that a step has anyway
says whether all agree; only if they do not, a further message finds rank and tensor.

[Note: one number for all groups]
Each rank adds its digest to a sum over all ranks, and the first one of each group takes away its
own for each of the others: the sum is 0 if all of each group are alike. Digests have 32 bits, so
that the sum is exact in float64, and another seed at each place along `data`, so that differences
of two groups cannot cancel out.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import xxhash

from zrun_core.data.batch import MicroBatch
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.errors import HangError, JobError
from zrun_core.guards.replicas import device_digest
from zrun_core.spine.spec import LaunchPlan

_BITS = (1 << 32) - 1
_ADVICE = (
    "draw from the generators of Python, numpy and torch, which zrun seeds for each sample; not "
    "from the clock, from the rank, or from a generator without a seed; and have the same files "
    "on every host"
)


class Field(NamedTuple):
    """A tensor or number of a batch.

    Attributes:
        path: where it is, as in `batch['labels']`.
        shape: with the dtype, in words.
        digest: 32 bits; 0-d int64 on its device, if that is none of the host's.
    """

    path: str
    shape: str
    digest: int | torch.Tensor


@dataclasses.dataclass(frozen=True)
class BatchDigest:
    """A digest of the samples that a rank has read for a step.

    Attributes:
        fields: of each micro-batch.
        number: to be summed over all ranks: 0 if those of each group have read the same.
    """

    fields: Sequence[Sequence[Field]] = ()
    number: float | torch.Tensor = 0.0


class BatchGuard:
    """Compares what the ranks that compute the same samples have read.

    Attributes:
        first_sums: what a step's sums begin with, where there are several of them: `batches`.
    """

    def __init__(self, mesh: Mesh, comm: Comm, plan: LaunchPlan) -> None:
        self._world = mesh.world
        self._comm = comm
        self._plan = plan
        self._seed = mesh.data.index
        num_ranks = mesh.tensor.size * mesh.pipe.size
        is_first = mesh.tensor.index == 0 and mesh.pipe.index == 0
        self._factor = 1 - num_ranks if is_first else 1
        self._is_needed = num_ranks > 1
        self.first_sums = {"batches": 0.0} if self._is_needed else {}

    def digest(self, micro_batches: Sequence[MicroBatch]) -> BatchDigest:
        """Digest what this rank has read; the host does not wait for a device here."""
        if not self._is_needed:
            return BatchDigest()
        fields = [list(fields_of(micro.batch, self._seed)) for micro in micro_batches]
        on_host = xxhash.xxh3_64()
        on_device: torch.Tensor | None = None
        for field in (field for of_one in fields for field in of_one):
            on_host.update(f"{field.path} {field.shape}".encode())
            if isinstance(field.digest, int):
                on_host.update(field.digest.to_bytes(4, "little"))
            else:  # the order counts
                before = 0 if on_device is None else 3 * on_device
                on_device = (before + field.digest) & _BITS
        number: float | torch.Tensor = float(self._factor * (on_host.intdigest() & _BITS))
        if on_device is not None:
            number = number + self._factor * on_device.double()
        return BatchDigest(fields, number)

    def add(self, own: BatchDigest, sums: NamedVector) -> None:
        """Add what this rank has read to numbers that ranks sum: see `first_sums`."""
        if self._is_needed:
            sums.add(batches=own.number)

    @contextmanager
    def explaining(self, own: BatchDigest) -> Iterator[None]:
        """Say what this rank has read if ranks send messages of other sizes than are expected.

        Batches of other lengths end a step before its message could tell.
        """
        try:
            yield
        except HangError as error:
            if not self._is_needed:
                raise
            shapes = ", ".join(f"{field.path} ({field.shape})" for field in own.fields[0])
            what = f"its first micro-batch is {shapes}, and must be that of all ranks that compute"
            raise HangError(f"{error}; {what} the same samples") from None

    def check(self, total: float, own: BatchDigest, when: str) -> None:
        """Make sure that all ranks of each group have read the same. Collective if they have not.

        Args:
            when: it was read, as in "step 3".

        Raises:
            JobError: they have not.
        """
        if total:
            raise self._difference(when, own)

    def _difference(self, when: str, own: BatchDigest) -> JobError:
        """Find which ranks have read something else. Collective."""
        told = [[[*field[:2], int(field.digest)] for field in of_one] for of_one in own.fields]
        rows = self._comm.all_gather_bytes(json.dumps(told).encode(), self._world, name="batches")
        groups: dict[int, dict[int, list[list[list[Any]]]]] = {}
        for rank, row in enumerate(rows):
            groups.setdefault(self._plan.ranks[rank].dp, {})[rank] = json.loads(row)
        found = [odd for group in groups.values() if (odd := _first_difference(group)) is not None]
        if not found:
            what = "but not when compared again: suspect the memory of these hosts"
            return JobError(f"data: in {when} ranks read different batches, {what}")
        first = min(found, key=lambda each: each.micro)
        ranks = [rank for each in found if each.what == first.what for rank in each.ranks]
        return JobError(
            f"data: in {when} {self._name(ranks)} read {first.what} than "
            f"{self._name([first.other])}, though they compute the same samples: {_ADVICE}"
        )

    def _name(self, ranks: Sequence[int]) -> str:
        """Return some ranks in words, with their places."""
        shown = [self._plan.named(rank) for rank in ranks[:4]]
        if len(ranks) > 4:
            shown.append("...")
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(shown)}"


class _Difference(NamedTuple):
    """The first difference within a group.

    Attributes:
        ranks: that differ from the most; of two, the later.
        other: one of those from which they differ.
        micro: number of the micro-batch.
        what: they read, in words.
    """

    ranks: list[int]
    other: int
    micro: int
    what: str


def _first_difference(group: Mapping[int, list[list[list[Any]]]]) -> _Difference | None:
    """Return where the ranks of a group differ first.

    `group` has, by rank and micro-batch, the fields as lists.
    """
    num_micro = max(len(told) for told in group.values())
    for micro in range(num_micro):
        of_micro = {rank: told[micro] if micro < len(told) else [] for rank, told in group.items()}
        names = {rank: [field[0] for field in fields] for rank, fields in of_micro.items()}
        where = f"in micro-batch {micro}"
        odd, other = _odd_ones({rank: repr(each) for rank, each in names.items()})
        if odd:
            theirs, common = (", ".join(names[rank]) or "nothing" for rank in (odd[0], other))
            return _Difference(odd, other, micro, f"{theirs}, in place of {common}, {where}")
        for place in range(len(names[other])):
            at_place = {rank: fields[place] for rank, fields in of_micro.items()}
            odd, other = _odd_ones({rank: repr(field) for rank, field in at_place.items()})
            if odd:
                path, shape, _ = at_place[odd[0]]
                common = at_place[other][1]
                is_same = "" if shape == common else f", not {common}"
                what = f"another {path} {where} ({shape}{is_same})"
                return _Difference(odd, other, micro, what)
    return None


def _odd_ones(values: Mapping[int, str]) -> tuple[list[int], int]:
    """Return the ranks whose value is not the most frequent one, and one that has that."""
    common = Counter(values.values()).most_common(1)[0][0]
    other = next(rank for rank, value in values.items() if value == common)
    return [rank for rank, value in values.items() if value != common], other


def fields_of(value: Any, seed: int, path: str = "batch") -> Iterator[Field]:
    """Yield the tensors and numbers of a batch, in order."""
    if isinstance(value, torch.Tensor):
        words = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        yield Field(path, words, _digest(value, seed))
    elif isinstance(value, bool | int | float):
        digest = xxhash.xxh3_64_intdigest(repr(value).encode(), seed) & _BITS
        yield Field(path, type(value).__name__, digest)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from fields_of(item, seed, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from fields_of(item, seed, f"{path}[{place}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from fields_of(getattr(value, field.name), seed, f"{path}.{field.name}")


def _digest(tensor: torch.Tensor, seed: int) -> int | torch.Tensor:
    """Return 32 bits of a tensor's values; on its device if that is none of the host's."""
    if tensor.layout != torch.strided:
        return 0
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if tensor.device.type == "cpu":
        return xxhash.xxh3_64_intdigest(raw.numpy().data, seed) & _BITS
    return (device_digest(raw) * (2 * seed + 1)) & _BITS
