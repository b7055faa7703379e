"""What a tracker is: something outside of zrun that keeps a run's numbers.

Each is a module of this package with one class, which imports its package when it is made. Nothing
else of zrun knows the packages. To add one: write its class, and name it in `KINDS`.
"""

from __future__ import annotations

import importlib
import importlib.util
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from zrun_core.errors import JobError

# By name in `log.to`: the module here, its class, and the package that it needs.
KINDS: Mapping[str, tuple[str, str, str | None]] = {
    "csv": ("csv_file", "CsvFile", None),
    "prometheus": ("prometheus", "PrometheusFile", None),
    "tensorboard": ("tensorboard", "TensorBoard", "tensorboard"),
    "wandb": ("wandb_run", "WandbRun", "wandb"),
    "mlflow": ("mlflow_run", "MlflowRun", "mlflow"),
    "trackio": ("trackio_run", "TrackioRun", "trackio"),
}


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker is told of it.

    Attributes:
        project: the job's name, under which its runs belong together.
        name: of this run.
        folder: the run directory.
        config: the job's keys, each value one that JSON has.
        args: of this tracker, from `log.args`.
        ids: what the tracker has kept of an earlier launch of this run; it writes there.
    """

    project: str
    name: str
    folder: Path
    config: Mapping[str, Any]
    args: Mapping[str, Any]
    ids: dict[str, Any]

    @property
    def unique_name(self) -> str:
        """The same for all launches that go on with each other, and for no others.

        A run directory that is begun anew has the name of the one before.
        """
        name: str = self.ids.setdefault("name", f"{self.name}-{secrets.token_hex(2)}")
        return name


class Tracker(Protocol):
    """Keeps numbers. Its methods may raise whatever its package raises, and take their time.

    It is made with a `TrackedRun`, which it goes on with where `ids` says so.
    """

    def scalars(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Keep numbers of a step; `at` is in unix seconds."""
        ...

    def flush(self) -> None:
        """Let what was kept reach its place: called every few seconds."""
        ...

    def end(self, state: str) -> None:
        """The launch is over: "finished", or "failed"."""
        ...


def check_installed(kinds: Sequence[str]) -> None:
    """Refuse trackers whose package is not there.

    Raises:
        JobError: it is not.
    """
    for kind in kinds:
        package = KINDS[kind][2]
        if package is not None and importlib.util.find_spec(package) is None:
            raise JobError(
                f"log.to: {kind} needs the package {package}, which the launcher's Python does not "
                f"have: pip install {package}, or leave it out"
            )


def maker_of(kind: str) -> Callable[[TrackedRun], Tracker]:
    """Return the class of a tracker."""
    module, name, _ = KINDS[kind]
    made: Callable[[TrackedRun], Tracker] = getattr(
        importlib.import_module(f"zrun.trackers.{module}"), name
    )
    return made
