"""Schedules of the learning rate: pure functions of the optimizer step, equal on every rank.

Step 0 is the first update. A skipped step does not advance it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from zrun_core.errors import JobError
from zrun_core.spine.sections.optim import LrConfig, ScheduleName

Schedule = Callable[[int], float]

_NEED_END = ("linear", "cosine", "polynomial", "wsd")


def make_schedule(
    config: LrConfig, total_steps: int | None, custom: Callable[[int], float] | None = None
) -> Schedule:
    """Return the factor of `optim.lr` at each optimizer step.

    Warm-up rises linearly, (step + 1) / warmup, so that the first update is not wasted on a rate of
    zero; the schedule proper runs from the end of warm-up to `decay_steps`.

    Args:
        total_steps: of the run; None: not known.
        custom: the user's own function, which is taken as it is.

    Raises:
        JobError: a decay without a known end, or one that ends before warm-up does.
    """
    if custom is not None:
        return custom
    assert isinstance(config.schedule, str)
    end = total_steps
    if config.decay_steps != "auto" and config.schedule != "wsd":
        end = config.decay_steps
    if config.schedule in _NEED_END:
        _check_end(config, end)
    shape = _shape(config.schedule, config, end or 0)

    def factor(step: int) -> float:
        if step < config.warmup:
            return (step + 1) / config.warmup
        return shape(step)

    return factor


def _check_end(config: LrConfig, end: int | None) -> None:
    if end is None:
        raise JobError(
            f"lr.schedule: {config.schedule} needs the number of steps, which is not known for "
            "this run: write lr.decay_steps: N, or give the job `steps`, or `epochs` of a "
            "dataset that has a length (`__len__`)"
        )
    if end < config.warmup:
        raise JobError(
            f"lr.warmup: {config.warmup} steps of warm-up are more than the {end} steps of the "
            f"decay: write lr.warmup={max(1, end // 10)} too, or try the whole job in {end} steps "
            f"with zrun train --smoke {end}"
        )


def _shape(name: ScheduleName, config: LrConfig, end: int) -> Schedule:
    """Return the factor after warm-up."""
    low = config.min_factor
    warmup = config.warmup

    def progress(step: int) -> float:
        """Return 0 at the first step after warm-up, and 1 from `end` on."""
        return min(1.0, (step - warmup) / max(1, end - warmup))

    match name:
        case "constant":
            return lambda step: 1.0
        case "linear":
            return lambda step: 1 - (1 - low) * progress(step)
        case "cosine":
            # Loshchilov and Hutter 2017, equation 5, without restarts.
            return lambda step: low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress(step)))
        case "polynomial":
            return lambda step: low + (1 - low) * (1 - progress(step)) ** config.power
        case "inverse_sqrt":
            # Vaswani et al. 2017, section 5.3, normalised to 1 at the end of warm-up.
            return lambda step: max(low, math.sqrt(max(1, warmup) / max(1, step + 1)))
        case "wsd":
            # Hu et al. 2024 (MiniCPM), section 4, with a linear decay to the end.
            length = max(1, end // 5) if config.decay_steps == "auto" else config.decay_steps
            start = end - length
            return lambda step: max(low, min(1.0, 1 - (1 - low) * (step - start) / length))
