"""Compare what several ranks hold alike.

Silent corruption and ranks that drift apart show in no loss. Every so many steps, and before a
checkpoint is written, each rank digests what others hold too. The digests travel in one small
message; only if they differ, further ones find the tensor. What is replicated depends on the stage:

    stage 0         everything
    stages 1, 2     unsharded parameters
    stage 3         small units that are never sharded
    hybrid          shards, between the copies of the states
    always          the counters and the learning rate

What is alike along a tensor axis, or at both ends of a pipeline, is compared there too.

On a CPU the digest is xxh3 over the bytes. On CUDA it is computed on the device: words times odd
weights, summed in integers that wrap around, so that the order of the sum does not matter and any
one changed word changes the result.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import xxhash

from zrun_core.distributed.named_vector import sent_to
from zrun_core.distributed.transport import Group
from zrun_core.errors import DivergedError
from zrun_core.hardware import accelerator
from zrun_core.spine.spec import LaunchPlan
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.unit.flat_unit import FlatUnit, Values

_CHUNK_WORDS = 1 << 24  # that a device digests at a time: 128 MiB of scratch
_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15, the golden ratio's bits, as a signed number


def digest(flat: torch.Tensor) -> int | torch.Tensor:
    """Return 64 bits of a contiguous 1-D tensor's memory, as a signed number.

    That of a device's memory is 0-d int64 there: `_read` reads many at once.
    """
    raw = flat.detach().view(torch.uint8)
    if flat.device.type == "cpu":
        return _signed(xxhash.xxh3_64_intdigest(raw.numpy().data))
    return device_digest(raw)


def _read(digests: Sequence[int | torch.Tensor]) -> list[int]:
    """Return digests as numbers, for which the host waits once."""
    on_device = [each for each in digests if isinstance(each, torch.Tensor)]
    if not on_device:
        return [each for each in digests if isinstance(each, int)]
    numbers = iter(accelerator.fetch(torch.stack(on_device)).tolist())
    return [each if isinstance(each, int) else next(numbers) for each in digests]


def device_digest(raw: torch.Tensor) -> torch.Tensor:
    """Return a digest in arithmetic that any device has, without waiting for the device.

    Args:
        raw: uint8, [bytes].

    Returns:
        int64, 0-d, on the device.
    """
    total = torch.full((), raw.numel(), dtype=torch.int64, device=raw.device)
    whole = raw.numel() // 4 * 4
    words = [*raw[:whole].view(torch.int32).split(_CHUNK_WORDS), raw[whole:]]
    start = 1
    for chunk in words:
        places = torch.arange(start, start + chunk.numel(), device=raw.device)
        total += (chunk.long() * (places * _ODD | 1)).sum()
        start += chunk.numel()
    return total


@dataclass(frozen=True)
class _Replica:
    """A state of a unit that several ranks hold.

    Attributes:
        axes: along which all ranks hold it: `data`, or where it is a shard that copies of the
            states have alike, `replicate`, with the name of the unit's own groups if it has such;
            and what its unit is alike over.
        fetch: returns its memory, which may have to come from elsewhere.
    """

    unit: FlatUnit
    what: str
    axes: tuple[str, ...]
    fetch: Callable[[], Values]

    @contextmanager
    def values(self) -> Iterator[Values]:
        """Have its memory inside, without padding at the unit's end."""
        flat, start = self.fetch()
        try:
            yield Values(flat[: max(0, self.unit.layout.numel - start)], start)
        finally:
            self.unit.drop_values()

    def digest(self) -> int | torch.Tensor:
        with self.values() as (flat, _):
            return digest(flat)


def _replicas_of(groups: str) -> str:
    """Return the axis of replicas of units that lie on `groups`, as of `UnitLayout.groups`."""
    return f"replicate {groups}".rstrip()


class ReplicaGuard:
    """Compares replicas, and names the tensor and the ranks where they differ."""

    def __init__(self, sharded: ShardedModel, plan: LaunchPlan | None = None) -> None:
        """
        Args:
            plan: says where each rank is; None: that is not known.
        """
        self._sharded = sharded
        self._plan = plan
        self._comm = sharded.comm
        self._mesh = sharded.mesh
        # Along these replicas are compared, in this order on every rank: also on stages between
        # those that are tied.
        self._shard_sizes = {  # by the axis along which replicas of such shards are compared
            _replicas_of(name): self._mesh.groups_of(name).shard.size
            for name in ("", *self._mesh.own)
        }
        self._axes = ["data", *self._shard_sizes]
        if self._mesh.tensor.size > 1:
            self._axes.append("tensor")
        if self._mesh.pipe.size > 1:
            self._axes.append("tied")

    def check(self, step: int, counters: Mapping[str, float]) -> None:
        """Compare replicas and counters. Collective.

        Args:
            counters: numbers by name, which every rank must have alike.

        Raises:
            DivergedError: on every rank, if any two differ.
        """
        world = self._mesh.world
        data = self._mesh.data
        if world.size == 1:
            return
        self._sharded.settle_updates()
        replicas = self._replicas()
        packed = struct.pack(f"<{len(counters)}d", *counters.values())
        digests = _read([replica.digest() for replica in replicas])
        own = [_signed(xxhash.xxh3_64_intdigest(packed))]
        for axis in self._axes:
            pairs = zip(digests, replicas, strict=True)
            own.append(_combined([found for found, replica in pairs if axis in replica.axes]))
        table = self._exchange(own, world)
        problem = ""
        if _odd_ones(table, 0, [world.ranks]):
            problem = self._name_counter(step, counters)
        else:
            # Those who see that an axis is wrong compare further, in one order of the axes.
            for place, axis in enumerate(self._axes, start=1):
                if _odd_ones(table, place, self._holders(axis)):
                    named = self._name_replica(step, replicas, axis)
                    problem = problem or named
        if data.size < world.size:  # what other ranks have alike, they have compared
            everyones = self._comm.all_gather_bytes(problem.encode(), world, name="replicas")
            problem = next((each.decode() for each in everyones if each), "")
        if problem:
            raise DivergedError(problem)

    def _replicas(self) -> list[_Replica]:
        """List what other ranks hold too: whole units, and shards that groups have alike."""
        found = []
        for unit in self._sharded.units:
            copied_over = unit.exchange.updated_replicated_over(unit.layout)
            num_holders, _ = self._mesh.along(copied_over, unit.layout.groups)
            replicated_over = [axis for axis in self._axes if axis in unit.layout.replicated_over]
            start, stop = unit.updated_range
            is_whole = stop - start == unit.layout.padded_numel
            is_kept = unit.is_kept_unsharded
            held = [
                ("parameter", unit.resident_params, is_kept or is_whole, is_kept or num_holders > 1)
            ]
            if unit.has_master:
                held.append(("fp32 master", unit.values, is_whole, num_holders > 1))
            for what, fetch, is_everywhere, has_copies in held:
                axes = list(replicated_over)
                if has_copies:
                    axes.append("data" if is_everywhere else _replicas_of(unit.layout.groups))
                if axes:
                    found.append(_Replica(unit, what, tuple(axes), fetch))
        return found

    def _exchange(self, own: Sequence[int], group: Group) -> dict[int, list[int]]:
        """Return the numbers of every rank of `group`, by rank."""
        rows = torch.zeros(group.size, len(own), dtype=torch.int64)
        rows[group.index] = torch.tensor(own, dtype=torch.int64)
        on_device = sent_to(self._comm.device, rows.view(-1))
        summed = self._comm.all_reduce_small(on_device, group, name="replicas")
        with self._comm.waiting():
            everyones = accelerator.fetch(summed).view(group.size, -1).tolist()
        return dict(zip(group.ranks, everyones, strict=True))

    def _group(self, axis: str) -> Group:
        """Return the ranks among which replicas along `axis` are compared."""
        group: Group = getattr(self._mesh, "data" if axis in self._shard_sizes else axis)
        return group

    def _holders(self, axis: str) -> list[tuple[int, ...]]:
        """Return groups of ranks that hold the same: all of an axis, or those of equal shards."""
        ranks = self._group(axis).ranks
        shards = self._shard_sizes.get(axis)
        if shards is not None:
            return [ranks[place::shards] for place in range(shards)]
        return [ranks]

    def _name_counter(self, step: int, counters: Mapping[str, float]) -> str:
        """Say which counter differs, on which ranks."""
        world = self._mesh.world
        # Exact bits of each counter as an integer.
        own = [struct.unpack("<q", struct.pack("<d", value))[0] for value in counters.values()]
        table = self._exchange(own, world)
        for place, name in enumerate(counters):
            if odd := _odd_ones(table, place, [world.ranks]):
                other = next(rank for rank in world.ranks if rank not in odd)
                bits = struct.pack("<2q", table[odd[0]][place], table[other][place])
                value, theirs = struct.unpack("<2d", bits)
                return (
                    f"{self._begin(step, odd)} has {name} {value:.17g}, rank {other} has "
                    f"{theirs:.17g}{_END}"
                )
        return _changed_again(step)

    def _name_replica(self, step: int, replicas: Sequence[_Replica], axis: str) -> str:
        """Say which unit differs along `axis`, on which ranks: then which tensor of it."""
        along = [replica for replica in replicas if axis in replica.axes]
        digests = _read([replica.digest() for replica in along])
        table = self._exchange(digests, self._group(axis))
        for place, replica in enumerate(along):
            if odd := _odd_ones(table, place, self._holders(axis)):
                return self._name_tensor(step, replica, odd, axis)
        return _changed_again(step)

    def _name_tensor(self, step: int, replica: _Replica, odd: list[int], axis: str) -> str:
        layout = replica.unit.layout
        own: list[int | torch.Tensor] = [0] * len(layout.slots)
        with replica.values() as (flat, start):
            for piece in layout.pieces(start, start + flat.numel()):
                own[piece.index] = digest(flat[piece.start : piece.stop])
        table = self._exchange(_read(own), self._group(axis))
        for place, slot in enumerate(layout.slots):
            if again := _odd_ones(table, place, self._holders(axis)):
                who = self._begin(step, again)
                tensor = slot.part.tensor
                return f"{who} has another {replica.what} {tensor} than the other ranks{_END}"
        who = self._begin(step, odd)
        return f"{who} has another {replica.what} unit {layout.name} than the other ranks{_END}"

    def _begin(self, step: int, odd: Sequence[int]) -> str:
        """Name the ranks that differ. Of two, nobody can say which one is right."""
        named = map(str, odd)
        if self._plan is not None:
            named = map(self._plan.named, odd)
        return f"step {step}: replicas diverged: rank {' and '.join(named)}"


def _odd_ones(
    table: Mapping[int, Sequence[int]],
    place: int,
    groups: Sequence[tuple[int, ...]],
) -> list[int]:
    """Return the ranks whose number is not the most frequent one of their group; of two, the later.

    `table` has numbers by rank, of which the one at `place` is compared; ranks of a group must
    agree.
    """
    odd = []
    for ranks in groups:
        common = Counter(table[rank][place] for rank in ranks).most_common(1)[0][0]
        odd += [rank for rank in ranks if table[rank][place] != common]
    return sorted(odd)


_END = "; resume from the last checkpoint, on another machine if it happens again"


def _changed_again(step: int) -> str:
    return (
        f"step {step}: replicas differed, but not when compared again: suspect the memory of this "
        f"host{_END}"
    )


def _combined(digests: Sequence[int]) -> int:
    return _signed(xxhash.xxh3_64_intdigest(struct.pack(f"<{len(digests)}q", *digests)))


def _signed(value: int) -> int:
    """Return an unsigned 64-bit number as the signed one of the same bits."""
    if value < 1 << 63:
        return value
    return value - (1 << 64)
