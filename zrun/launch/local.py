"""The agent of this machine, as a child of the launcher."""

from __future__ import annotations

import signal
import socket
import sys

from zrun.launch import processes
from zrun.launch.agent_process import PATIENCE_S, AgentProcess
from zrun.launch.frames import Frame


class LocalAgent(AgentProcess):
    """An agent that is already there when it is told what to run.

    It must be created by the main thread: the kernel ends it with the thread that started it.
    """

    def __init__(self) -> None:
        # -P: a json.py or types.py in the working directory is not meant for the agent.
        super().__init__(socket.gethostname(), [sys.executable, "-P", "-m", "zrun.launch.agent"])
        self._leaders: list[processes.Process] = []

    def read(self) -> list[Frame] | None:
        frames = super().read()
        for frame in frames or ():
            if frame.get("frame") == "started":
                found = (processes.Process.find(pid) for pid in frame["pids"].values())
                self._leaders = [process for process in found if process is not None]
        if frames is None:  # workers die with their agent; what they started does not
            left = [each for leader in self._leaders for each in processes.session_of(leader)]
            processes.send(left, signal.SIGKILL)
        return frames

    def why_ended(self) -> str:
        return (
            "the agent of this host ended unexpectedly; its last words are above, or in logs/agent-<host>.log of the "
            "run directory"
        )

    def close(self, patience_s: float = PATIENCE_S) -> None:
        if not self._started:
            self._process.kill()  # it has nothing to clean up, and may not be ready to hear of the end
        super().close(patience_s)
