"""One sentence on what does not fit: which memory lacks how much, and what would fit.

Pure: estimates to text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zrun.estimate.bars import parts_of
from zrun.watch.memory_kinds import KINDS, MEANINGS
from zrun_core.sizes import format_size

if TYPE_CHECKING:
    from zrun_core.hardware.hardware import Hardware
    from zrun_core.plan.answer.outcome import Estimate, RankMemory

_SHOWN = 3


@dataclass(frozen=True)
class Overshoot:
    """A memory that is too small."""

    what: str  # whose
    used: int
    capacity: int
    moment: str  # of a step; "" where it does not matter
    largest: tuple[tuple[str, int], ...]

    @property
    def num_bytes(self) -> int:
        return self.used - self.capacity

    def __str__(self) -> str:
        holders = ", ".join(f"{format_size(size)} {name}" for name, size in self.largest)
        return (
            f"{self.what} would hold {format_size(self.used)}{self.moment}, "
            f"{format_size(self.num_bytes)} more than its {format_size(self.capacity)}: {holders}"
        )


def overshoot(estimate: Estimate, hardware: Hardware) -> Overshoot | None:
    """Return the memory that is exceeded by most; None: everything fits."""
    found = []
    fullest = max(estimate.ranks, key=lambda rank: rank.device_used)
    if fullest.device_used > estimate.capacity:
        found.append(
            Overshoot(
                _device(fullest, estimate, hardware),
                fullest.device_used,
                estimate.capacity,
                _moment(fullest),
                largest(fullest),
            )
        )
    parts = estimate.host_parts
    trained = sum(parts.values()) - parts["build"]
    if not hardware.shares_memory and trained > hardware.host_bytes:
        found.append(
            Overshoot(
                f"each host ({hardware.devices_per_node} ranks)",
                trained,
                hardware.host_bytes,
                "",
                _of_tier(estimate.ranks, hardware.devices_per_node, ("host",)),
            )
        )
    moved = parts["pinned"] + parts["pageable"]
    if hardware.offload_bytes is not None and moved > hardware.offload_bytes:
        found.append(
            Overshoot(
                "offload.host_memory of each host",
                moved,
                hardware.offload_bytes,
                "",
                _of_tier(estimate.ranks, hardware.devices_per_node, ("host",)),
            )
        )
    built = parts["build"] + parts["processes"]
    if built > hardware.host_bytes:
        values = ("the whole model as its factory makes it", parts["build"])
        found.append(
            Overshoot(
                "each host", built, hardware.host_bytes, " while the model is built", (values,)
            )
        )
    disk = hardware.devices_per_node * max(rank.disk for rank in estimate.ranks)
    if disk > hardware.disk_bytes:
        found.append(
            Overshoot(
                "the disks of each host",
                disk,
                hardware.disk_bytes,
                "",
                _of_tier(estimate.ranks, hardware.devices_per_node, ("disk",)),
            )
        )
    return max(found, key=lambda each: each.num_bytes, default=None)


def sentence(estimate: Estimate, hardware: Hardware, fix: str | None) -> str:
    """Return a sentence: which memory is too small, when, by how much, and what would help.

    Args:
        fix: the cheapest change that fits, in words; None: there is none.
    """
    over = overshoot(estimate, hardware)
    if over is None:
        return "fits"
    helps = "; no change of the job makes it fit here"
    if fix:
        helps = f"; the cheapest change that fits: {fix}"
    return f"{over}{helps}"


def uncertainty(estimate: Estimate, hardware: Hardware, fix: str | None) -> str:
    """Return a sentence on states that are known and activations that are not.

    Args:
        fix: the cheapest change that is known to fit, in words; None: there is none.
    """
    rank = max(estimate.ranks, key=lambda rank: rank.device_used)
    helps = f"; what is known to fit: {fix}" if fix else ""
    return (
        f"{_device(rank, estimate, hardware)} of {format_size(estimate.capacity)} would hold "
        f"{format_size(rank.device_used)} and the activations, which are not known{helps}"
    )


def largest(rank: RankMemory) -> tuple[tuple[str, int], ...]:
    """Return the largest holders of memory on the device at the peak, largest first.

    Model states count by kind, activations by module.
    """
    return _holders(rank, parts_of(rank))[:_SHOWN]


def tensors_at_peak(rank: RankMemory) -> tuple[tuple[str, int], ...]:
    """Return what holds tensors at the peak, largest first; counted as in `largest`."""
    return _holders(rank, {name: parts_of(rank)[name] for name in (*KINDS, "activations")})


def _holders(rank: RankMemory, sizes: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """Return parts with their bytes, largest first, and activations by module."""
    dynamic = sizes.pop("activations")
    named = [(MEANINGS[name], size) for name, size in sizes.items()]
    holders = list(rank.peak.holders[:_SHOWN])
    rest = dynamic - sum(size for _, size in holders)
    named += [
        *holders,
        ("other activations and temporaries" if holders else MEANINGS["activations"], rest),
    ]
    return tuple(sorted(((name, size) for name, size in named if size > 0), key=lambda x: -x[1]))


def time_of(fix: Estimate, before: Estimate) -> str:
    """Return the change of the time of a step: `+12% time`."""
    if not before.time.seconds:
        return ""
    change = fix.time.seconds / before.time.seconds - 1
    return "about the same time" if abs(change) < 0.005 else f"{change:+.0%} time"


def _device(rank: RankMemory, estimate: Estimate, hardware: Hardware) -> str:
    whose = {
        "first": " of the first stage",
        "middle": " of a stage in the middle",
        "last": " of the last stage",
    }
    many = estimate.candidate.dims.world_size > 1
    name = "rank's share of the host's memory" if hardware.shares_memory else hardware.device.name
    return f"{'each' if many else 'the'} {name}{whose.get(rank.role, '')}"


def _moment(rank: RankMemory) -> str:
    if rank.hook:
        return " in a hook"
    if rank.evaluation:
        return " in an evaluation"
    where = f" of {rank.peak.module}" if rank.peak.module else ""
    return f" in {rank.peak.phase.value}{where}"


def _of_tier(
    ranks: Sequence[RankMemory], per_node: int, tiers: tuple[str, ...]
) -> tuple[tuple[str, int], ...]:
    rank = max(ranks, key=lambda each: each.pinned + each.pageable + each.disk)
    sums: dict[str, int] = {}
    for buffer in rank.buffers:
        if buffer.tier.value in tiers:
            name = MEANINGS.get(buffer.kind.value, buffer.kind.value)
            sums[name] = sums.get(name, 0) + buffer.num_bytes * per_node
    return tuple(sorted(sums.items(), key=lambda item: -item[1])[:_SHOWN])
