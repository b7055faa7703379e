"""The agent before the start: it answers questions about its host, one after the other.

    {"ask": "facts", ...}  ->  {"frame": "answer", "to": "facts", ...}

What goes wrong is an answer too: `{"frame": "answer", "to": "facts", "error": "one line"}`.
"""

from __future__ import annotations

import socket

from zrun.agent.connectivity import Listener, connect, link_rates, listen
from zrun.hosts import probe
from zrun.system.ports import listen_below_range
from zrun.transport.frames import Frame


class RpcServer:
    """Answers, and keeps what was opened for an answer.

    Attributes:
        store: the socket at which the ranks of several hosts meet, once it was asked for. The first
            host's agent opens it, since the others must know its port before they start; rank 0
            inherits it, or opens it anew if it runs a script of the user's own.
    """

    def __init__(self) -> None:
        self.store: socket.socket | None = None
        self._listener: Listener | None = None

    def answer(self, question: Frame) -> Frame:
        """Return what is to be sent up."""
        frame: Frame = {"frame": "answer", "to": question["ask"]}
        try:
            return frame | self._find(question)
        except Exception as error:  # the launcher says it, with the host's name
            return frame | {"error": f"{type(error).__name__}: {error}"}

    def _find(self, question: Frame) -> Frame:
        match question["ask"]:
            case "facts":
                return probe.facts(question)
            case "door":
                return self._open_listener(question)
            case "store":
                if question.get("for_script"):  # which listens there much later
                    self.store = listen_below_range(question["address"])
                else:
                    self.store = listen(question["address"])
                return {"port": self.store.getsockname()[1]}
            case "knock":
                peers = {name: (host, port) for name, (host, port) in question["peers"].items()}
                return {"failed": connect(peers, question["mark"])}
            case "link":
                rates = link_rates(question["address"], question["port"], question["mark"])
                return {"rates": rates}
            case "bench":
                from zrun.agent.bench import run_apart

                return {"rates": run_apart(question["folder"])}
            case "gpu check":
                from zrun.agent import gpu_check

                return {"rows": gpu_check.run_apart(question["gpus"])}
            case other:
                raise ValueError(
                    f"this agent does not know the request {other!r}: it runs another version of "
                    "zrun"
                )

    def _open_listener(self, question: Frame) -> Frame:
        """Listen at the address at which the others reach this host."""
        address = probe.own_address(question["known"], question["towards"])
        if address is None:
            return {"address": None, "port": None, "interface": None}
        self._listener = Listener(address, question["mark"])
        interface = probe.interface_of(address)
        return {"address": address, "port": self._listener.port, "interface": interface}

    def close(self) -> None:
        """Leave no listener behind but the store."""
        if self._listener is not None:
            self._listener.close()
