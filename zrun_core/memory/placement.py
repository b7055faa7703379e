"""Choose the units whose states leave the device. Pure: runtime and planner ask alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zrun_core.memory.buffers import ON_DEVICE, Placement, Tier
from zrun_core.memory.layout import UnitLayout


def place(units: Sequence[UnitLayout], placement: Placement) -> Mapping[str, Placement]:
    """Return where each unit's states are that leave the device, by its name.

    These are the fewest that have the wanted fraction, taken from the end of the model, whose
    gradients come first: the device keeps those that come last, whose update could not be hidden
    behind the rest of the backward pass. Small parameters that are never resharded stay.
    """
    away: dict[str, Placement] = {}
    at_home = replace(ON_DEVICE, activation=placement.activation, fraction=placement.fraction)
    if placement == at_home:
        return away
    wanted = placement.fraction * sum(unit.numel for unit in units)
    for unit in reversed(units):
        if wanted <= 0:
            break
        of_unit = replace(placement, fraction=1.0)
        if unit.keep_unsharded:
            of_unit = replace(of_unit, param=Tier.DEVICE)
        away[unit.name] = of_unit
        wanted -= unit.numel
    return away


def share_of(units: Sequence[UnitLayout], count: int) -> float:
    """Return the fraction with which `place` moves the last `count` units, in as few digits as do.

    Args:
        count: of them that leave; all of them at most.
    """
    total = sum(unit.numel for unit in units)
    wanted = sum(unit.numel for unit in units[len(units) - count :])
    for digits in range(1, 16):
        scale: int = 10**digits
        share = wanted * scale // total / scale
        if _num_moved(units, share) == count:
            return share
    return wanted / total


def _num_moved(units: Sequence[UnitLayout], fraction: float) -> int:
    return len(place(units, Placement(optimizer=Tier.HOST, fraction=fraction)))
