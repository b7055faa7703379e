"""The least share of a model's states with which a configuration fits: `fraction: auto`."""

from __future__ import annotations

from dataclasses import replace

from zrun_core.memory.placement import share_of
from zrun_core.plan.answer.planner import Planner
from zrun_core.plan.question.candidate import Candidate


def with_least_share(planner: Planner, candidate: Candidate) -> Candidate:
    """Return a candidate of which fewer units would not do: all of them if no number does.

    The first units that leave may take more scratch than they save, so none is tried first.

    Args:
        candidate: with a way to offload, of which the share is looked for.

    Raises:
        JobError: it is impossible.
    """
    layouts = planner.layouts(candidate)

    def with_units(count: int) -> Candidate:
        share = share_of(layouts, count)
        return replace(candidate, placement=replace(candidate.placement, fraction=share))

    if planner.device_suffices(with_units(0)):
        return with_units(0)
    short = 0  # so many units are too few
    enough = len(layouts)
    while enough - short > 1:
        middle = (short + enough) // 2
        if planner.device_suffices(with_units(middle)):
            enough = middle
        else:
            short = middle
    return with_units(enough)
