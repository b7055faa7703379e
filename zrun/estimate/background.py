"""A process that makes a job's forecast: `python -m zrun.estimate.background PACE LAUNCHER`.

It reads a `Request` on stdin, prints a `Forecast` as JSON, stores it, and ends; with anything else
to say it ends with another status. It runs the user's code, so it ends with its launcher, however
that ends, and leaves nothing behind that the code has started.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from zrun.system import processes

_LONGEST_S = 300
_PATIENCE_S = 200.0  # for model and data where nobody waits, on what cores others leave
_GRACE_S = 10.0  # for what is killed to be gone


def _main() -> None:
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, _end)
    signal.alarm(_LONGEST_S)
    processes.adopt_orphans()
    processes.die_with_parent(signal.SIGTERM)
    if os.getppid() != int(sys.argv[2]):  # it was killed before
        sys.exit(1)
    _step_back(sys.argv[1])
    answer_fd = os.dup(1)
    os.dup2(2, 1)  # what the user's code prints is chatter
    forecast = _make(json.load(sys.stdin), sys.argv[1])
    processes.end_children(_GRACE_S)
    with open(answer_fd, "w") as file:
        json.dump(forecast, file)


def _end(*_: object) -> None:
    """End what traces the model and all that the user's code has started, and nothing more: another
    thread may be importing torch."""
    processes.end_children(_GRACE_S)
    os._exit(1)


def _step_back(pace: str) -> None:
    """Leave the cores to others: see `forecast.Pace`."""
    with suppress(OSError):
        os.nice({"now": 0, "aside": 10}.get(pace, 19))
    with suppress(
        OSError
    ):  # niceness orders processes inside one session only: tell the session too
        Path("/proc/self/autogroup").write_text(str(os.getpriority(os.PRIO_PROCESS, 0)))
    if pace == "idle":
        with suppress(OSError, AttributeError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _make(request: dict[str, Any], pace: str) -> dict[str, Any]:
    from zrun.estimate.answer import answer, forecast_of
    from zrun.estimate.forecast import PATIENCE_S, Pace, store
    from zrun.estimate.question import of_job
    from zrun.hosts.cluster import Cluster, HostFacts
    from zrun.job.load import LoadedJob
    from zrun_core.spine.config import JobConfig

    loaded = LoadedJob(JobConfig.model_validate(request["job"]), Path(request["path"]), {})
    cluster = Cluster(tuple(HostFacts.from_json(facts) for facts in request["hosts"]))
    patience_s = PATIENCE_S if pace == Pace.NOW else _PATIENCE_S
    forecast = forecast_of(answer(of_job(loaded, cluster, patience_s=patience_s)))
    store(request["key"], forecast)
    return forecast.to_json()


if __name__ == "__main__":
    _main()
