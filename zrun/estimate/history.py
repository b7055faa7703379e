"""What steps of earlier runs took beside what was predicted: it corrects the next estimates.

    kind = kind_of(job, job_dir, cluster)
    remember(kind, ratio)                # a launcher, as a run ends
    earlier = earlier_runs(kind)         # an estimate: predicted seconds x earlier.scale

A prediction of the same model on the same hosts is off for the same reasons again: kernels that are
slower than the roofline says, Python between them. Runs are of one kind if these are equal.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING

from zrun_core.spine.cache import cache_folder, digest_of_file, write_cached
from zrun_core.spine.releases import own_release

if TYPE_CHECKING:
    from pathlib import Path

    from zrun.estimate.answer import Answer
    from zrun.estimate.forecast import Forecast
    from zrun.hosts.cluster import Cluster
    from zrun_core.spine.config import JobConfig

_RUNS = 5  # of which the median counts
_KINDS = 200  # that are kept
# Two runs of one job on a host of its own differ by less; one run says little of the next.
_LEAST_SPREAD = 0.15
_SPREAD_OF_ONE = 0.25


@dataclass(frozen=True)
class History:
    """Measured over predicted seconds of the last runs of a kind, the newest last; at least one."""

    ratios: tuple[float, ...]

    @property
    def scale(self) -> float:
        """By which predicted seconds are multiplied: the median."""
        return statistics.median(self.ratios)

    @property
    def spread(self) -> float:
        """The share by which a step may differ from the scaled prediction, either way."""
        if len(self.ratios) == 1:
            return _SPREAD_OF_ONE
        widest = max(abs(ratio / self.scale - 1) for ratio in self.ratios)
        return max(widest, _LEAST_SPREAD)

    def line(self) -> str:
        """Return what it does to an estimate, in words."""
        runs = "the last run" if len(self.ratios) == 1 else f"the last {len(self.ratios)} runs"
        return (
            f"{runs} of this model here took {self.scale:.2f} of what was predicted: "
            "all times are scaled by that"
        )


def kind_of(job: JobConfig, job_dir: Path, cluster: Cluster) -> str:
    """Return a digest that is equal for runs whose predictions are off alike.

    Args:
        job: with all overrides applied.
    """
    facts = {
        "folder": str(job_dir),
        "model": job.model_dump(mode="json", include={"model", "loss", "precision", "compile"}),
        "divided": job.model_dump(mode="json", include={"parallel", "zero", "offload"}),
        "device": job.device,
        "hosts": [
            (host.hostname, host.cores, host.slots, [gpu.name for gpu in host.gpus])
            for host in cluster.hosts
        ],
        "slots": job.slots,
        "rates": _rates(),
        "versions": (own_release(), version("torch")),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _rates() -> str:
    """Return a digest of what `zrun doctor --bench` has measured: predictions follow from it."""
    from zrun.preflight.calibration import Calibration

    return digest_of_file(Calibration.default_path(os.environ))


def earlier_runs(kind: str) -> History | None:
    """Return what is known of earlier runs of a kind; None if nothing is."""
    with suppress(OSError, ValueError, TypeError):
        ratios = json.loads((cache_folder("ratios") / f"{kind}.json").read_bytes())
        kept = tuple(float(ratio) for ratio in ratios if 0 < float(ratio) < float("inf"))
        if kept:
            return History(kept[-_RUNS:])
    return None


def remember(kind: str, ratio: float) -> None:
    """Keep what a run took: measured over predicted seconds of a step, unscaled."""
    earlier = earlier_runs(kind)
    before = () if earlier is None else earlier.ratios
    kept = [*before, ratio][-_RUNS:]
    write_cached(cache_folder("ratios") / f"{kind}.json", json.dumps(kept) + "\n", _KINDS)


def with_history(found: Answer, history: History | None) -> Answer:
    """Return an answer with the times of all its estimates scaled by earlier runs of its kind."""
    from zrun.estimate.trial import scaled_answer

    if history is None or found.measured is not None:
        return found
    return replace(scaled_answer(found, history.scale, history.spread), history=history)


def forecast_with_history(forecast: Forecast, history: History) -> Forecast:
    """Return a forecast whose times are scaled by earlier runs of its kind."""
    seconds = forecast.step_s * history.scale
    return replace(
        forecast,
        step_s=seconds,
        low_s=seconds * (1 - history.spread),
        high_s=seconds * (1 + history.spread),
        runs=len(history.ratios),
    )
