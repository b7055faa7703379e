"""Before anything is started: is every host there, and is it what the job needs?"""

from __future__ import annotations

import selectors
import time
from collections.abc import Sequence

from zrun.launch.agent_process import AgentProcess
from zrun_core.errors import PreflightError

HELLO_S = 12.0  # ssh may take 10 to connect


def greet(agents: Sequence[AgentProcess], patience_s: float = HELLO_S) -> dict[AgentProcess, str]:
    """Wait until every agent has said hello, all at the same time. Returns why those that did not have not."""
    waiting = {agent for agent in agents if agent.hello is None}
    missing: dict[AgentProcess, str] = {}
    deadline = time.monotonic() + patience_s
    with selectors.DefaultSelector() as selector:
        for agent in waiting:
            selector.register(agent, selectors.EVENT_READ, agent)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                agent = key.data
                ended = agent.read() is None
                if ended:
                    missing[agent] = agent.why_ended()
                if ended or agent.hello is not None:
                    selector.unregister(agent)
                    waiting.remove(agent)
    late = f"its agent has not answered after {patience_s:g} s: is the host, or where its Python lies, very slow?"
    missing |= {agent: f"{agent.host}: {late}" for agent in waiting}
    return {agent: missing[agent] for agent in agents if agent in missing}


def require_all(agents: Sequence[AgentProcess], patience_s: float = HELLO_S) -> None:
    """Wait until every agent is there.

    Raises:
        PreflightError: some are not; all of them are named.
    """
    missing = greet(agents, patience_s)
    if missing:
        raise PreflightError("\n  ".join(["not every host can be used:", *missing.values()]))
