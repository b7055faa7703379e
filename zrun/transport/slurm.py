"""The agent of a host of a Slurm job, started with `srun` as a step of its own.

Slurm knows the hosts, the user and the limits, so there is nothing to log in to. As with ssh, the
command is a constant but for the host and the Python, and stdin is the lifeline.
"""

from __future__ import annotations

import os
import subprocess

from zrun.transport.agent_process import PATIENCE_S, AgentProcess
from zrun_core.errors import PreflightError
from zrun_core.spine.printable import printable

_KEPT_STDERR = 1 << 14  # bytes


class SrunAgent(AgentProcess):
    """An agent at the other end of `srun`."""

    def __init__(self, host: str, python: str, srun: str = "srun") -> None:
        """Begin to start it. It is there once it has said hello.

        Args:
            host: as the allocation names it.
            python: a Python there that has zrun.

        Raises:
            PreflightError: there is no srun here.
        """
        argv = [
            srun,
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={host}",
            "--overlap",
            "--kill-on-bad-exit=1",
            "--unbuffered",
            "--quiet",
            "--",
            python,
            "-P",
            "-m",
            "zrun.agent.main",
        ]
        self._stderr = os.memfd_create("srun-stderr", os.MFD_CLOEXEC)
        try:
            super().__init__(host, argv, self._stderr)
        except OSError as error:
            os.close(self._stderr)
            raise PreflightError(
                f"{srun}: {error.strerror}: launch.backend: slurm needs Slurm's commands on this "
                "host"
            ) from None

    def end_reason(self) -> str:
        try:
            status: int | None = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            status = None
        size = os.fstat(self._stderr).st_size
        said = os.pread(self._stderr, _KEPT_STDERR, max(0, size - _KEPT_STDERR))
        lines = said.decode(errors="replace").strip().splitlines()
        last = "it gave no reason"
        if lines:
            last = printable(lines[-1].strip())
        what = "srun could not start the agent"
        if self.hello is not None:
            what = "its agent ended"
        return f"{self.host}: {what} (status {status}): {last}"

    def close(self, patience_s: float = PATIENCE_S) -> None:
        super().close(patience_s)
        if self._stderr >= 0:
            os.close(self._stderr)
            self._stderr = -1
