"""Questions to the agents of many hosts before anything runs there, all at once.

Each is answered, or it is explained why it was not. The other end: `zrun.agent.rpc_server`.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Mapping

from zrun.transport.agent_process import AgentLink
from zrun.transport.frames import Frame, pack

_ANSWER_S = 30.0  # a driver that has to wake GPUs up takes several

OTHER_ZRUN = (  # of an answer that cannot be read
    "its agent does not understand the request, so it runs another version of zrun: install the "
    "same one there"
)

Answers = dict[AgentLink, Frame | str]  # or why there is none


def ask(
    questions: Mapping[AgentLink, Frame],
    patience_s: float,
    settle_s: float | None = None,
    answer_s: float = _ANSWER_S,
) -> Answers:
    """Put a question to each agent as soon as it has said hello, and wait for the answers.

    Args:
        patience_s: seconds to wait for a hello.
        settle_s: return without those that have not said hello when there was no news for so many
            seconds, if some answered; None: wait for all of them.
        answer_s: seconds to wait for the answer, after the hello.

    Returns:
        The answers, with the times at which this host `asked` and `got` them; or why there is none.
    """
    asking = _Call(questions)
    start = news = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for agent in questions:
            selector.register(agent, selectors.EVENT_READ, agent)
        while len(asking.answers) < len(questions):
            now = time.monotonic()
            limit_s = patience_s
            if asking.awaited:
                limit_s += answer_s
            if now > start + limit_s:
                break
            is_quiet = settle_s is not None and now > news + settle_s
            if is_quiet and asking.answers and not asking.awaited:
                return asking.answers
            for key, _ in selector.select(0.1):
                news = time.monotonic()
                if asking.hear(key.data):
                    selector.unregister(key.data)
    asking.give_up(time.monotonic() - start)
    return asking.answers


class _Call:
    """One question to each of many agents.

    Attributes:
        answers: those that have come.
    """

    def __init__(self, questions: Mapping[AgentLink, Frame]) -> None:
        self.answers: Answers = {}
        self._questions = questions
        self._asked: dict[AgentLink, float] = {}
        for agent in questions:
            self._put(agent)

    @property
    def awaited(self) -> bool:
        """Return whether an agent was asked and has not answered."""
        return bool(self._asked.keys() - self.answers.keys())

    def _put(self, agent: AgentLink) -> None:
        if agent.hello is not None and agent not in self._asked:
            self._asked[agent] = time.time()
            agent.send(pack(self._questions[agent]))

    def hear(self, agent: AgentLink) -> bool:
        """Read what an agent said, and return whether that settles it."""
        frames = agent.read()
        if frames is None:
            self.answers[agent] = agent.end_reason().removeprefix(f"{agent.host}: ")
            return True
        self._put(agent)
        for frame in frames:
            if frame.get("frame") == "answer" and frame.get("to") == self._questions[agent]["ask"]:
                self.answers[agent] = frame | {"asked": self._asked[agent], "got": time.time()}
        return agent in self.answers

    def give_up(self, waited_s: float) -> None:
        """Explain the answers that did not come."""
        for agent in self._questions.keys() - self.answers.keys():
            what = "its agent said nothing"
            if agent in self._asked:
                what = f"no answer to {self._questions[agent]['ask']}"
            self.answers[agent] = (
                f"{what} in {waited_s:.0f} s: is the host, or the disk of its Python, very slow?"
            )
