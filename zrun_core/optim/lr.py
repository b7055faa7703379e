"""Schedules of the learning rate: pure functions of the optimizer step, equal on every rank.

Step 0 is the first update. A skipped step does not advance it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from zrun_core.spine.sections.optim import LrConfig, ScheduleName

Schedule = Callable[[int], float]


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
    end = config.decay_end(total_steps) if config.decays else 0
    shape = _shape(config.schedule, config, end)

    def factor(step: int) -> float:
        if step < config.warmup:
            return (step + 1) / config.warmup
        return shape(step)

    return factor


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
            length = config.decay_length(end)
            start = end - length
            return lambda step: max(low, min(1.0, 1 - (1 - low) * (step - start) / length))
