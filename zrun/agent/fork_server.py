"""`python -u -m zrun.agent.fork_server MODULE ARGUMENT`: imports once, and forks the ranks.

Torch takes two seconds of a core to import, and thousands of small reads of what may be a network
file system. One process does so for all ranks of the host, forks each of them, and ends. The agent
adopts them, as it does all orphans. What the import has made they share until they write to it.

    agent                          fork server                    ranks
      |-- ForkRequest (stdin) -------> imports MODULE, and what
      |                                its import_for(ARGUMENT) does
      |                                forks ---------------------> own session, log, environment
      |                                |                            close their end of `told`
      | <-- ForkReply (pipe `told`) ---| ends                       wait
      |  adopts them; end of `told`:                                |
      |  all ranks are set up                                       |
      |-- a byte for each rank (pipe `begin`) --------------------> run MODULE.main(ARGUMENT)

A rank that reads the end of `begin` and no byte ends too: the agent is gone, or the fork server
failed. A fork copies one thread. What other threads were doing stays half done, and their locks
taken: where the import has started a thread, the byte is BEGIN_ANEW, and each rank executes itself
anew and imports by itself. OpenBLAS ends its threads for a fork.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TypedDict

from zrun.system import processes
from zrun.topology.cpus import parse_cpus

BEGIN = b"b"
BEGIN_ANEW = b"a"
_SELF = "zrun.agent.fork_server"


class RankSlot(TypedDict):
    """A rank of this host."""

    rank: int
    env: dict[str, str]  # beyond that of this process
    log: str
    cpus: str | None  # that it keeps to, as Linux writes sets
    has_store: bool


class ForkRequest(TypedDict):
    """The agent's request: ranks to be forked."""

    agent: int
    told: int  # descriptor of the pipe up
    begin: int  # of the one down
    store: int | None  # the socket that listens for the ranks of several hosts
    seats: list[RankSlot]


class ForkReply(TypedDict):
    """The fork server's reply, once all ranks are forked."""

    pids: dict[str, int]  # by rank
    threads: list[str]  # names of those that another thread than this one started


def main() -> None:
    module, argument, *rank = sys.argv[1:]
    request = None if rank else _request()  # a rank that began anew has none
    # Nothing that an import makes is garbage, and to look for some takes a quarter of the time that
    # torch needs.
    gc.disable()
    loaded = importlib.import_module(module)
    import_for = getattr(loaded, "import_for", None)
    if import_for is not None:
        import_for(argument)
    gc.freeze()  # a collection would write to every object, and so copy it
    if request is not None:
        _fork_ranks(request, module, argument)
    gc.enable()
    sys.argv = [sys.modules[module].__file__ or module, argument]
    loaded.main()


def _request() -> ForkRequest:
    request: ForkRequest = json.load(sys.stdin)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for pipe in (request["told"], request["begin"]):
        # Their end would not come if a program that the import starts had them.
        os.set_inheritable(pipe, False)
    _end_with(request["agent"])
    return request


def _fork_ranks(request: ForkRequest, module: str, argument: str) -> None:
    """Fork, and return in the ranks only."""
    pids: dict[str, int] = {}
    for slot in request["seats"]:
        pid = os.fork()
        if pid == 0:
            _become(slot, request, module, argument)
            return
        pids[str(slot["rank"])] = pid
    _answer(request, {"pids": pids, "threads": _other_threads()})


def _answer(request: ForkRequest, answer: ForkReply) -> NoReturn:
    with suppress(OSError):  # the agent is gone
        os.write(request["told"], json.dumps(answer).encode())
    os._exit(0)


def _become(slot: RankSlot, request: ForkRequest, module: str, argument: str) -> None:
    """Set a forked rank up, and wait for the word to begin."""
    os.setsid()
    log = os.open(slot["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    os.environ.update(slot["env"])
    if slot["cpus"] is not None:  # no thread has been started
        # The host may have changed since it was looked at: the rank is slower then, not wrong.
        with suppress(OSError):
            os.sched_setaffinity(0, parse_cpus(slot["cpus"]))
    if request["store"] is not None and not slot["has_store"]:
        os.close(request["store"])
    name = f"rank={slot['rank']}"
    processes.show([sys.executable, "-u", "-m", module, argument, name])
    os.close(request["told"])
    word = os.read(request["begin"], 1)
    os.close(request["begin"])
    if not word:
        os._exit(1)
    _end_with(request["agent"])  # whose child it is by now
    if word == BEGIN_ANEW:
        os.execv(sys.executable, [sys.executable, "-u", "-m", _SELF, module, argument, name])
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()  # Python's own does so by itself


def _end_with(agent: int) -> None:
    """Be killed when the agent ends."""
    processes.die_with_parent(signal.SIGKILL)
    if os.getppid() != agent:  # it has ended in between
        os._exit(1)


def _other_threads() -> list[str]:
    """Return the names of this process's other threads."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != os.getpid():
            with suppress(OSError):
                found.append((task / "comm").read_text().strip())
    return found


if __name__ == "__main__":
    main()
