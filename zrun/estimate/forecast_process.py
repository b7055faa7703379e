"""A process that makes the forecast of a job while its launcher goes on.

    launcher                                     python -m zrun.estimate.forecast_process PACE PID
    ForecastProcess(request, ...)  -- JSON -->   traces the model, which runs the user's code
    poll() or wait()               <-- JSON --   stores the forecast for the next launch, and exits

It ends with its launcher, however that ends, and leaves nothing behind that the user's code has
started. With no forecast to give it exits with another status.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from zrun.estimate.forecast import PATIENCE_S, Forecast, key_of, store
from zrun.system import processes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zrun.hosts.cluster import Cluster
    from zrun.job.load import LoadedJob

_LONGEST_S = 300
_PATIENCE_BESIDE_S = 200.0  # for model and data, on the cores that a run leaves
_GRACE_S = 10.0  # for processes that were killed
_CLOSE_S = 3.0  # for the process, which ends its children first


@dataclass(frozen=True)
class ForecastRequest:
    """All that a process needs to make a forecast."""

    job: dict[str, Any]  # a JobConfig without defaults
    path: str  # of its file
    hosts: list[dict[str, Any]]  # `HostFacts`
    key: str

    @classmethod
    def of(cls, loaded: LoadedJob, cluster: Cluster) -> Self:
        """Return the request for a job as it was read, on hosts as they were found."""
        return cls(
            job=loaded.config.model_dump(mode="json", by_alias=True, exclude_unset=True),
            path=str(loaded.path.absolute()),
            hosts=[host.to_json() for host in cluster.hosts],
            key=key_of(loaded.config, loaded.path.absolute().parent, cluster),
        )


class Pace(StrEnum):
    """The share of the cores that the process takes from others."""

    NOW = "now"  # its share: somebody waits
    BESIDE = "beside"  # a tenth of a core, where a run keeps all of them busy


class ForecastProcess:
    """A forecast in the making.

    Attributes:
        forecast: None until the process has ended, or where it could make none.
    """

    def __init__(
        self, request: ForecastRequest, environment: Mapping[str, str], pace: Pace
    ) -> None:
        """Start the process.

        Args:
            environment: of the workers, whose code is traced; added to this process's own.
            pace: whether somebody waits for it.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, pace.value, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | dict(environment),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(asdict(request)).encode())
            self._process.stdin.close()
        self.forecast: Forecast | None = None

    def poll(self) -> bool:
        """Return whether the process has ended, and read the forecast if it has."""
        if self._process.poll() is None:
            return False
        self._read()
        return True

    def wait(self, timeout_s: float) -> Forecast | None:
        """Return the forecast if it is made in `timeout_s` seconds; end the process either way."""
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
                self._read()
        finally:
            self.close()
        return self.forecast

    def close(self) -> None:
        """End the process and all that it has started."""
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        if self.forecast is None and not self._process.stdout.closed:
            # A few hundred bytes: the pipe holds them, so the process never waited for a reader.
            self.forecast = Forecast.from_json(self._process.stdout.read())


# The other side of the pipe


def _main() -> None:
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, _end)
    signal.alarm(_LONGEST_S)
    processes.adopt_orphans()
    processes.die_with_parent(signal.SIGTERM)
    if os.getppid() != int(sys.argv[2]):  # the launcher was killed before
        sys.exit(1)
    pace = Pace(sys.argv[1])
    if pace is Pace.BESIDE:
        _leave_cores_to_others()
    answer_fd = os.dup(1)
    os.dup2(2, 1)  # stdout is the answer's alone: the user's code may print
    forecast = _make(json.load(sys.stdin), pace)
    processes.end_children(_GRACE_S)
    with open(answer_fd, "w") as file:
        json.dump(forecast, file)


def _end(*_: object) -> None:
    """End the tracing process and all that the user's code has started, and exit.

    Nothing else is cleaned up: another thread may be importing torch.
    """
    processes.end_children(_GRACE_S)
    os._exit(1)


def _leave_cores_to_others() -> None:
    with suppress(OSError):
        os.nice(10)
    # Niceness orders processes within a session only. The session has a niceness of its own.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(os.getpriority(os.PRIO_PROCESS, 0)))


def _make(request: dict[str, Any], pace: Pace) -> dict[str, Any]:
    from zrun.estimate.answer import answer, forecast_of
    from zrun.estimate.question import of_job
    from zrun.hosts.cluster import Cluster, HostFacts
    from zrun.job.load import LoadedJob
    from zrun_core.spine.config import JobConfig

    loaded = LoadedJob(JobConfig.model_validate(request["job"]), Path(request["path"]), {})
    cluster = Cluster(tuple(HostFacts.from_json(facts) for facts in request["hosts"]))
    patience_s = PATIENCE_S if pace is Pace.NOW else _PATIENCE_BESIDE_S
    forecast = forecast_of(answer(of_job(loaded, cluster, patience_s=patience_s)))
    store(request["key"], forecast)
    return forecast.to_json()


if __name__ == "__main__":
    _main()
