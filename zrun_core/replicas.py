"""Do the ranks still hold the same values where they must? One number per rank says so, and names follow if not.

Silent corruption and ranks that drift apart show in no loss. Every so many steps, and before a checkpoint is written,
each rank digests what others hold too, and the digests travel in one small message. What is replicated depends on the
stage: everything at stage 0, whole parameters at stages 1 and 2, shards between the groups of a hybrid, and small
persistent units at stage 3; the counters and the learning rate always.

On a CPU the digest is xxh3 over the bytes. On CUDA it is computed on the device: words times odd weights, summed in
integers that wrap around, so that the order of the sum does not matter and any one changed word changes the result.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash

from zrun_core.errors import DivergedError
from zrun_core.zero.sharded import ShardedModel
from zrun_core.zero.unit import FlatUnit

_CHUNK_WORDS = 1 << 24  # that a device digests at a time: 128 MiB of scratch
_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15, the golden ratio's bits, as a signed number


def digest(flat: torch.Tensor) -> int:
    """64 bits of a contiguous 1-D tensor's memory, as a signed number."""
    raw = flat.detach().view(torch.uint8)
    if flat.device.type == "cpu":
        return _signed(xxhash.xxh3_64_intdigest(raw.numpy().data))
    return int(device_digest(raw))


def device_digest(raw: torch.Tensor) -> torch.Tensor:
    """The same in arithmetic that any device has: 0-d int64 of `raw`, uint8, without waiting for the device."""
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
    """One piece of memory that several ranks hold.

    Attributes:
        everywhere: on all ranks; else on the ranks that hold the same shard in different groups.
        start: of its first element in the unit.
    """

    unit: FlatUnit
    what: str
    flat: torch.Tensor
    everywhere: bool
    start: int


class ReplicaGuard:
    """Compares what must be equal."""

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded, self._comm, self._mesh = sharded, sharded.comm, sharded.mesh

    def check(self, step: int, counters: Mapping[str, float]) -> None:
        """Compare replicas, and `counters`, which every rank must have alike. Collective.

        Raises:
            DivergedError: on every rank, if any two differ.
        """
        if self._mesh.world.size == 1:
            return
        replicas = self._replicas()
        packed = struct.pack(f"<{len(counters)}d", *counters.values())
        by_kind = [
            _signed(xxhash.xxh3_64_intdigest(packed)),
            _combined([digest(replica.flat) for replica in replicas if replica.everywhere]),
            _combined([digest(replica.flat) for replica in replicas if not replica.everywhere]),
        ]
        table = self._exchange(by_kind)
        wrong = [
            *self._odd_ones([row[0] for row in table], True),
            *self._odd_ones([row[1] for row in table], True),
            *self._odd_ones([row[2] for row in table], False),
        ]
        if wrong:
            raise DivergedError(self._name(step, counters, replicas))

    def _replicas(self) -> list[_Replica]:
        """List what other ranks hold too: whole units, and shards that groups have alike."""
        # With a parameter server only one rank keeps masters, and the others take its parameters before each forward.
        server = self._sharded.settings.server
        hybrid = self._mesh.replicate.size > 1 and not server
        found = []
        for unit in self._sharded.units:
            held = [("parameter", unit.resident_params())]
            if (masters := unit.masters()) is not None and not server:
                held.append(("fp32 master", masters))
            for what, (flat, start) in held:
                everywhere = flat.numel() == unit.layout.padded_numel
                if everywhere or hybrid:
                    unpadded = flat[: max(0, unit.layout.numel - start)]
                    found.append(_Replica(unit, what, unpadded, everywhere, start))
        return found

    def _exchange(self, own: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers, by rank."""
        world = self._mesh.world
        rows = torch.zeros(world.size, len(own), dtype=torch.int64)
        rows[world.index] = torch.tensor(own, dtype=torch.int64)
        summed = self._comm.sum_small(rows.view(-1).to(self._comm.device), world, name="replicas")
        table: list[list[int]] = summed.view(world.size, -1).tolist()
        return table

    def _odd_ones(self, values: Sequence[int], everywhere: bool) -> list[int]:
        """Ranks whose value is not the most frequent one among those that must agree; of two, the later."""
        groups = [range(len(values))]
        if not everywhere:
            shards = self._mesh.shard.size
            groups = [range(place, len(values), shards) for place in range(shards)]
        odd = []
        for group in groups:
            common = Counter(values[rank] for rank in group).most_common(1)[0][0]
            odd += [rank for rank in group if values[rank] != common]
        return sorted(odd)

    def _name(self, step: int, counters: Mapping[str, float], replicas: list[_Replica]) -> str:
        """What differs, on which ranks: by unit, then by tensor."""
        # Exact bits of each counter as an integer.
        own = [struct.unpack("<q", struct.pack("<d", value))[0] for value in counters.values()]
        table = self._exchange([*own, *(digest(replica.flat) for replica in replicas)])
        for place, name in enumerate(counters):
            odd = self._odd_ones([row[place] for row in table], True)
            if odd:
                values = {rank: struct.unpack("<d", struct.pack("<q", table[rank][place]))[0] for rank in (odd[0], 0)}
                other = next(rank for rank in range(len(table)) if rank not in odd)
                theirs = struct.unpack("<d", struct.pack("<q", table[other][place]))[0]
                return f"{_begin(step, odd)} has {name} {values[odd[0]]:.17g}, rank {other} has {theirs:.17g}{_END}"
        for place, replica in enumerate(replicas, start=len(counters)):
            odd = self._odd_ones([row[place] for row in table], replica.everywhere)
            if odd:
                return self._name_tensor(step, replica, odd)
        return f"step {step}: replicas differ, and no longer do at a second look: suspect the memory of this host{_END}"

    def _name_tensor(self, step: int, replica: _Replica, odd: list[int]) -> str:
        layout = replica.unit.layout
        own = [0] * len(layout.slots)
        for piece in layout.pieces(replica.start, replica.start + replica.flat.numel()):
            own[piece.index] = digest(replica.flat[piece.start : piece.stop])
        table = self._exchange(own)
        for place, slot in enumerate(layout.slots):
            again = self._odd_ones([row[place] for row in table], replica.everywhere)
            if again:
                return f"{_begin(step, again)} has another {replica.what} {slot.name} than the other ranks{_END}"
        return f"{_begin(step, odd)} has another {replica.what} unit {layout.name} than the other ranks{_END}"


_END = "; go on from the last checkpoint, on another machine if it happens again"


def _begin(step: int, odd: list[int]) -> str:
    """Of two ranks nobody can say which one is right."""
    return f"step {step}: replicas diverged: rank {' and '.join(str(rank) for rank in odd)}"


def _combined(digests: Sequence[int]) -> int:
    return _signed(xxhash.xxh3_64_intdigest(struct.pack(f"<{len(digests)}q", *digests)))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
