"""The workers of one host under torch's elastic agent, which starts them, notices the first failure and stops the rest.

Only this module and the rendezvous know torch's classes. Their names are imported inside functions because nothing in
the launcher may load torch, which takes 1.4 s and 220 MB.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING, Any

from zrun.launch.rendezvous import PlannedRendezvous

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
else:
    LogsSpecs = object  # abstract and empty, see rendezvous.py

_MONITOR_S = 0.1

# Both streams of a worker go to one file. torch opens a file for each, and two descriptors of one file overwrite each
# other; the shell makes the second a copy of the first and becomes the worker.
_SHELL = "/bin/sh"
_ONE_STREAM = 'exec "$0" "$@" 2>&1'

Workers = dict[int, "Popen[bytes]"]  # by local rank


@dataclass(frozen=True)
class Command:
    """What runs on this host: `python -u -m module argument`, once per local rank."""

    run_id: str
    module: str
    argument: str
    logs: dict[int, Path]  # one per local rank


def load() -> None:
    """Import torch now, while the launcher still reads the job."""
    gc.disable()  # nothing that an import makes is garbage, and looking for some takes a quarter of the time
    importlib.import_module("torch.distributed.elastic.agent.server.local_elastic_agent")
    gc.freeze()
    gc.enable()


def run(command: Command, on_start: Callable[[Workers], None]) -> None:
    """Start the workers, tell `on_start` about them, and return when none is left."""
    from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    class Agent(LocalElasticAgent):
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            pids: dict[int, Any] = super()._start_workers(worker_group)
            assert isinstance(self._pcontext, SubprocessContext)
            on_start({local: handler.proc for local, handler in self._pcontext.subprocess_handlers.items()})
            return pids

    python = (_ONE_STREAM, sys.executable, "-u", "-m", command.module, command.argument)
    spec = WorkerSpec(
        role="worker",
        local_world_size=len(command.logs),
        entrypoint=_SHELL,
        args=("-c", *(part.replace("$", "$$") for part in python)),  # torch expands $local_rank in arguments
        rdzv_handler=PlannedRendezvous(command.run_id),
        max_restarts=0,
        monitor_interval=_MONITOR_S,
    )
    Agent(spec, _LogPerRank(command.logs)).run()


class _LogPerRank(LogsSpecs):
    def __init__(self, logs: dict[int, Path]) -> None:
        self._logs = logs

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        from torch.distributed.elastic.multiprocessing import LogsDest

        files = {local: str(path) for local, path in self._logs.items()}
        nothing = dict.fromkeys(files, "")
        return LogsDest(stdouts=files, stderrs=nothing, error_files=nothing)

    @property
    def root_log_dir(self) -> str:
        return str(self._logs[0].parent)
