"""The agent before the start: it answers questions about its host, one after the other.

    {"ask": "facts", ...}  ->  {"frame": "answer", "to": "facts", ...}

What goes wrong is an answer too: `{"frame": "answer", "to": "facts", "error": "one line"}`.
"""

from __future__ import annotations

import socket

from zrun.agent.connectivity import Listener, connect, link_rates
from zrun.agent.store import open_store
from zrun.hosts import probe
from zrun.transport.frames import Frame


class RpcServer:
    """Answers, and keeps what was opened for an answer.

    Attributes:
        store: the socket at which the ranks of several hosts are to meet, once it was asked for.
    """

    def __init__(self) -> None:
        self._door: Listener | None = None
        self.store: socket.socket | None = None

    def answer(self, question: Frame) -> Frame:
        """What is to be sent up."""
        frame: Frame = {"frame": "answer", "to": question["ask"]}
        try:
            match question["ask"]:
                case "facts":
                    return frame | probe.facts(question)
                case "door":
                    return frame | self._open_door(question)
                case "store":
                    self.store = open_store(question["address"])
                    return frame | {"port": self.store.getsockname()[1]}
                case "knock":
                    peers = {
                        name: (address, port) for name, (address, port) in question["peers"].items()
                    }
                    return frame | {"failed": connect(peers, question["mark"])}
                case "link":
                    return frame | {
                        "rates": link_rates(question["address"], question["port"], question["mark"])
                    }
                case "bench":
                    from zrun.agent.bench import run_apart

                    return frame | {"rates": run_apart(question["folder"])}
                case other:
                    raise ValueError(
                        f"this agent knows no question {other!r}: its zrun is another one"
                    )
        except Exception as error:  # the launcher says it, with the host's name
            return frame | {"error": f"{type(error).__name__}: {error}"}

    def _open_door(self, question: Frame) -> Frame:
        """Listen at the address at which the others reach this host."""
        address = probe.own_address(question["known"], question["towards"])
        if address is None:
            return {"address": None, "port": None, "interface": None}
        self._door = Listener(address, question["mark"])
        return {
            "address": address,
            "port": self._door.port,
            "interface": probe.interface_of(address),
        }

    def close(self) -> None:
        """Leave no listener behind."""
        if self._door is not None:
            self._door.close()
