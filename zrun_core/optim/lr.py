"""Learning rate as a factor of the peak, by optimizer step: pure functions of the step, equal on every rank.

Step 0 is the first update. A skipped step does not advance it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from zrun_core.errors import JobError
from zrun_core.spine.config import LrConfig, ScheduleName

Schedule = Callable[[int], float]


def make_schedule(
    config: LrConfig, total_steps: int | None, custom: Callable[[int], float] | None = None
) -> Schedule:
    """The factor of `optim.lr` at each optimizer step.

    Warm-up rises linearly, (step + 1) / warmup, so that the first update is not wasted on a rate of zero; the schedule
    proper runs from the end of warm-up to `decay_steps`.

    Raises:
        JobError: a decay without a known end, or one that ends before warm-up does.
    """
    if custom is not None:
        return custom
    assert isinstance(config.schedule, str)
    needs_end = config.schedule in ("linear", "cosine", "polynomial", "wsd")
    end = (
        total_steps
        if config.decay_steps == "auto" or config.schedule == "wsd"
        else config.decay_steps
    )
    if needs_end and end is None:
        raise JobError(
            f"lr.schedule: {config.schedule} needs an end, and how many steps this run has is not known: write "
            "lr.decay_steps: N, or give the job `steps`, or `epochs` of a dataset that has a length (`__len__`)"
        )
    if needs_end and end is not None and end < config.warmup:
        raise JobError(
            f"lr.warmup: {config.warmup} steps of warm-up are more than the {end} steps of the decay: write "
            f"lr.warmup={max(1, end // 10)} too, or try the whole job in {end} steps with zrun train --smoke {end}"
        )
    shape = _shape(config.schedule, config, end or 0, total_steps)

    def factor(step: int) -> float:
        if step < config.warmup:
            return (step + 1) / config.warmup
        return shape(step)

    return factor


def _shape(name: ScheduleName, config: LrConfig, end: int, total_steps: int | None) -> Schedule:
    low, warmup = config.min_factor, config.warmup

    def progress(step: int) -> float:
        """0 at the first step after warm-up, 1 from `end` on, the first step that there is not."""
        return min(1.0, (step - warmup) / max(1, end - warmup))

    match name:
        case "constant":
            return lambda step: 1.0
        case "linear":
            return lambda step: 1 - (1 - low) * progress(step)
        case "cosine":  # Loshchilov and Hutter 2017, equation 5, without restarts
            return lambda step: low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress(step)))
        case "polynomial":
            return lambda step: low + (1 - low) * (1 - progress(step)) ** config.power
        case (
            "inverse_sqrt"
        ):  # Vaswani et al. 2017, section 5.3, normalised to 1 at the end of warm-up
            return lambda step: max(low, math.sqrt(max(1, warmup) / max(1, step + 1)))
        case (
            "wsd"
        ):  # warm-up, stable, decay: Hu et al. 2024 (MiniCPM), section 4; linear decay to the end
            length = config.decay_steps if config.decay_steps != "auto" else max(1, end // 5)
            return lambda step: max(low, min(1.0, 1 - (1 - low) * (step - (end - length)) / length))
