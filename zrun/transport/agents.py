"""The agents of all hosts of a run, as one thing to talk to and to listen to."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterable, Sequence

from zrun.transport.agent_process import AgentLink
from zrun.transport.frames import Frame, StartRequest, StopMode, pack

_MANY = 32  # hosts, from which on they are heard together instead of one by one
_LINGER_S = 0.25


class AgentGroup:
    """In the order of the hosts' ranks.

    Attributes:
        lost: hosts whose agents have ended without being done, with the reason, in the order in
            which it was noticed.
    """

    def __init__(self, members: Sequence[AgentLink]) -> None:
        self._members = {member.host: member for member in members}
        self._done: set[str] = set()
        self.lost: dict[str, str] = {}
        self._heard_at = 0.0
        self._selector = selectors.DefaultSelector()
        for member in members:
            self._selector.register(member, selectors.EVENT_READ, member)

    @property
    def hosts(self) -> list[str]:
        return list(self._members)

    @property
    def all_ended(self) -> bool:
        """Return whether each has cleaned up, or is gone."""
        return len(self._done) + len(self.lost) == len(self._members)

    @property
    def unfinished(self) -> list[str]:
        """Return the hosts that have not cleaned up yet, and are not gone."""
        return [host for host in self._members if host not in self._done and host not in self.lost]

    def drop_host(self, host: str) -> None:
        """Wait for this host no longer: it does not answer."""
        self._members[host].abandon()

    def start(self, starts: Iterable[StartRequest]) -> None:
        """Run the workers: a start for each agent."""
        last: StartRequest | None = None
        spec = b""
        for member, start in zip(self._members.values(), starts, strict=True):
            if last is None or start.spec is not last.spec:
                spec = start.pack_spec()  # once: with many hosts it is large
            last = start
            member.start(start, spec)

    def stop(self, how: StopMode) -> None:
        """Ask all workers to end."""
        self.send({"stop": how})

    def send(self, frame: Frame) -> None:
        """Say one thing to every host that is there."""
        data = pack(frame)
        for host, member in self._members.items():
            if host not in self.lost:
                member.send(data)

    def frames(self, patience_s: float) -> list[tuple[str, Frame]]:
        """Return what the agents say within `patience_s` seconds, each with its host."""
        found: list[tuple[str, Frame]] = []
        if len(self._members) > _MANY:
            time.sleep(max(0.0, self._heard_at + _LINGER_S - time.monotonic()))
            self._heard_at = time.monotonic()
        for key, _ in self._selector.select(patience_s):
            member: AgentLink = key.data
            frames = member.read()
            if frames is None:
                self._selector.unregister(member)
                if member.host not in self._done:
                    self.lost[member.host] = member.end_reason()
                continue
            for frame in frames:
                found.append((member.host, frame))
                if frame["frame"] == "done":
                    self._done.add(member.host)
        return found
