"""The agent of this machine, as a child of the launcher."""

from __future__ import annotations

import socket
import sys

from zrun.transport.agent_process import PATIENCE_S, AgentProcess


class LocalAgent(AgentProcess):
    """An agent that is already there when it is told what to run.

    It must be created by the main thread: the kernel ends it with the thread that started it.
    """

    def __init__(self) -> None:
        # -P: a json.py or types.py in the working directory is not meant for the agent.
        super().__init__(socket.gethostname(), [sys.executable, "-P", "-m", "zrun.agent.main"])

    def end_reason(self) -> str:
        return (
            "the agent of this host ended unexpectedly; its last words are above, or in logs/agent-<host>.log of the "
            "run directory"
        )

    def close(self, patience_s: float = PATIENCE_S) -> None:
        if not self._started:
            self._process.terminate()  # it may not be ready to hear of the end
        super().close(patience_s)
