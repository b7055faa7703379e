"""Compare a run with its estimate: what is predicted of its job now, and what it has measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from zrun.estimate.forecast import PATIENCE_S
from zrun.estimate.measured_launch import MeasuredLaunch, measured_of
from zrun.hosts.cluster import Cluster, probe_host
from zrun.job.load import LoadedJob
from zrun.watch import formatting
from zrun_core.errors import JobError
from zrun_core.sizes import format_size
from zrun_core.spine.events import Event
from zrun_core.spine.releases import own_release
from zrun_core.spine.spec import RunSpec

if TYPE_CHECKING:
    from zrun_core.hardware.hardware import Hardware
    from zrun_core.plan.answer.outcome import Estimate

# Shares of the measured value that a predicted one may be off.
_ON_CPU_ALONE = 0.01  # peak, on one rank
_ON_CPU = 0.02
_ON_GPU = 0.03
_RESERVED = 0.07
_TIME_GPU = 0.10
_SMALL_BYTES = 1 << 20  # that do not matter, whatever their share


@dataclass(frozen=True)
class ComparedLine:
    """One comparison.

    Attributes:
        tolerance: share of the measured value that the predicted one may be off; None: it is not
            judged.
        is_bound: more may be predicted than was measured.
    """

    what: str
    predicted: float
    measured: float
    tolerance: float | None
    is_bound: bool = False

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted / self.measured - 1

    @property
    def is_right(self) -> bool:
        if self.tolerance is None:
            return True
        if self.what != "step" and abs(self.predicted - self.measured) <= _SMALL_BYTES:
            return True
        is_too_low = self.error < -self.tolerance
        is_too_high = self.error > self.tolerance and not self.is_bound
        return not (is_too_low or is_too_high)

    def __str__(self) -> str:
        in_words = formatting.seconds if self.what == "step" else format_size
        limit = "not judged"
        if self.tolerance is not None:
            small = "" if self.what == "step" else f", or {format_size(_SMALL_BYTES)}"
            limit = f"at most {self.tolerance:.0%}{' below' if self.is_bound else ''}{small}"
        verdict = ""
        if self.tolerance is not None:
            verdict = "  ok" if self.is_right else "  WRONG"
        return (
            f"{self.what:9} {in_words(self.predicted):>12} predicted "
            f"{in_words(self.measured):>12} measured "
            f"{self.error:+8.2%}  ({limit}){verdict}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "predicted": self.predicted,
            "measured": self.measured,
            "error": self.error,
            "tolerance": self.tolerance,
            "is_right": self.is_right,
        }


@dataclass(frozen=True)
class RunComparison:
    """A run beside its estimate."""

    run: Path
    source: str
    lines: tuple[ComparedLine, ...]
    notes: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        return all(line.is_right for line in self.lines)


def check_run(run: Path, patience_s: float = PATIENCE_S) -> RunComparison:
    """Estimate the job of a run again, and compare.

    Args:
        patience_s: seconds that the job's model and data may take.

    Raises:
        JobError: the run has no record, or none of what is to be compared.
        UserCodeError: the job's own code fails.
    """
    spec = _spec(run)
    found = measured_of(_events(run / "events.jsonl"))
    if found is None:
        raise JobError(f"{run} never started to train: there is nothing to compare")
    if not found.timed and not found.most("peak_bytes"):
        raise JobError(
            f"{run} is too short: memory is compared at step 2, and times from step 3 on"
        )
    hardware, notes = _hardware(spec, found.start)
    return _compared(run, spec, hardware, patience_s, found, notes)


def _compared(
    run: Path,
    spec: RunSpec,
    hardware: Hardware,
    patience_s: float,
    found: MeasuredLaunch,
    notes: list[str],
) -> RunComparison:
    from zrun.estimate.plan_tables import fullest
    from zrun.estimate.question import of_job_on

    is_alike = not notes  # the run and this estimate are of one zrun and one machine
    loaded = LoadedJob(spec.job, Path(spec.job_dir) / "job.yaml", {})
    question = of_job_on(loaded, hardware, patience_s)
    chosen = question.planner.estimate(question.base)
    rank = fullest(chosen)
    on_cpu = spec.job.device == "cpu"
    is_bound = chosen.is_bound
    if chosen.knows_states_only:
        notes += [note for note in chosen.notes if "are not known" in note]
    if is_bound:
        notes.append("samples differ in size: predicted for the longest, and most steps take less")
    lines = []
    if peak := found.most("peak_bytes"):
        judged: float | None = _ON_CPU
        if chosen.knows_states_only:
            judged = None
        elif not on_cpu:
            judged = _ON_GPU
        elif spec.plan.world_size == 1:
            judged = _ON_CPU_ALONE
        lines.append(ComparedLine("peak", rank.allocated, peak, judged, is_bound))
    else:
        notes.append(
            "the run did not measure its memory: it is of another version, or had its own "
            "profiler in step 2"
        )
    if reserved := found.most("reserved_bytes"):
        judged = None if chosen.knows_states_only else _RESERVED
        lines.append(ComparedLine("reserved", rank.reserved, reserved, judged, is_bound))
    if process := found.most("process_bytes"):
        lines.append(ComparedLine("process", rank.device_used, process, None))
    if times := found.timed:
        limit_s, why = _limit_of_time(chosen, hardware, is_alike=is_alike)
        lines.append(ComparedLine("step", chosen.time.seconds, statistics.median(times), limit_s))
        notes += [f"the time is not judged: {why}"] if why else []
    return RunComparison(run, chosen.source, tuple(lines), tuple(notes))


def _limit_of_time(
    chosen: Estimate,
    hardware: Hardware,
    *,
    is_alike: bool,
) -> tuple[float | None, str]:
    """Return how far off a time may be; None, and why, where it is not judged."""
    if not hardware.measured:
        return None, "this machine was not measured (zrun doctor --bench)"
    if chosen.knows_states_only or chosen.is_bound or not is_alike:
        return None, ""
    if hardware.device.kind == "cpu":
        return None, "on a CPU it is a rough guess (zrun estimate --measure runs the job)"
    return _TIME_GPU, ""


def _hardware(spec: RunSpec, start: Event) -> tuple[Hardware, list[str]]:
    """Return the hardware of the run as far as it is known here, and notes on the rest."""
    from zrun.estimate.machine import hardware_of

    notes = []
    made_by = (start.get("versions") or {}).get("zrun")
    if made_by != own_release():
        notes.append(
            f"the run was made by zrun {made_by or 'of an earlier version'}, this is "
            f"{own_release()}"
        )
    hosts = spec.plan.hosts
    per_host = max(len(spec.plan.ranks_on(host)) for host in hosts)
    here = probe_host()
    device = "cpu" if spec.job.device == "cpu" else "cuda"
    if hosts[0] not in (here.hostname, gethostname(), "localhost"):
        notes.append(
            f"the run was on {hosts[0]}, this is {here.hostname}: times of another machine are "
            "not judged"
        )
    if device == "cuda" and not here.gpus:
        from zrun_core.hardware.catalogue import like
        from zrun_core.hardware.simulated import parse_simulate

        return parse_simulate(
            f"{len(hosts)}x{per_host}x{like(str(start.get('device'))).name}"
        ), notes
    cluster = Cluster(tuple(replace(here, hostname=host) for host in hosts))
    job = spec.job
    limit = job.limits.memory
    found = hardware_of(cluster, device, per_host, memory=limit, folder=spec.offload_folder)
    return found, notes


def _spec(run: Path) -> RunSpec:
    try:
        return RunSpec.read(run / "spec.json")
    except OSError:
        raise JobError(f"{run} has no spec.json: it is no run, or one that never began") from None
    except ValidationError:
        raise JobError(
            f"{run}/spec.json is of another version of zrun: its job cannot be estimated here"
        ) from None


def _events(path: Path) -> Iterator[Event]:
    try:
        with path.open("rb") as file:
            for line in file:
                with suppress(ValueError):
                    event = json.loads(line)
                    if isinstance(event, dict):
                        yield event
    except OSError as error:
        raise JobError(f"{path}: {error.strerror}: there is nothing to compare") from None
