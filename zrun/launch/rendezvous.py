"""How the elastic agents of a run find each other: by the plan, not by who arrives first.

torch's own handlers order hosts by name (`c10d`) or never restart peers (`static`). On one host there is nobody to
wait for: the agent's store lives in its own memory, and the workers meet in a file of the run directory, so that no
port is opened.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
else:
    # The base class is abstract and empty; naming it at run time would import torch with this module.
    RendezvousHandler = object

BACKEND = "zrun"


class PlannedRendezvous(RendezvousHandler):
    """The rendezvous of a run on one host."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._closed = False

    def next_rendezvous(self) -> RendezvousInfo:
        from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in __all__
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        # Our workers use the file that ZRUN_STORE names; address and port are for code that calls
        # `init_process_group("gloo")` by itself.
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", _free_port()))

    @property
    def use_agent_store(self) -> bool:
        return False

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self._closed = True
        return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
