"""The parent of an agent: it cleans up where the agent can no longer do so.

An agent that is killed takes its workers along, but not what those have started: loader processes,
shells, programs that made a session of their own. The kernel hands all of them to their nearest
living ancestor that asked for it (PR_SET_CHILD_SUBREAPER, see prctl(2)), which is this process. It
does nothing else, so there is little that could end it before the agent.

    launcher, or sshd -> reaper -> agent -> workers -> what they start
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from zrun.system import processes
from zrun.transport.frames import GRACE_S

SOCKET = "telemetry.sock"  # of an agent, in its folder
_OF_LOADERS = "listener-xxxxxxxx"  # as multiprocessing names those of loader processes, there too
ABANDONED = signal.SIGRTMIN  # the agent gets it when this process was killed
_NAME = re.compile(r"zrun-[0-9a-f]{16}")
_LONGEST_PATH = 107  # bytes of a socket's path: see unix(7)
_HOUR_S = 3600.0
_PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def private_folder() -> Path:
    """Return a path at which an agent may make a folder for itself; its name cannot be foreseen."""
    return Path(_temporary(), f"zrun-{secrets.token_hex(8)}")


def _temporary() -> str:
    """Return the folder of temporary files; /tmp where a socket in it would have too long a path.

    Schedulers name TMPDIR after jobs, containers and users.
    """
    found = tempfile.gettempdir()
    socket_name = max(SOCKET, _OF_LOADERS, key=len)
    longest = os.path.join(found, f"zrun-{'0' * 16}", socket_name)
    return found if len(os.fsencode(longest)) <= _LONGEST_PATH else "/tmp"


def sweep() -> None:
    """Remove the folders of this user's agents that were killed together with their reapers."""
    with suppress(OSError), os.scandir(_temporary()) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name) and _is_abandoned(entry):
                with suppress(OSError):  # it holds something else, too: then it stays
                    for each in Path(entry.path).iterdir():
                        if each.is_socket():  # its own, and those of loader processes
                            each.unlink()
                    os.rmdir(entry.path)


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    """Return whether a folder is this user's, and no agent listens in it any more."""
    try:
        facts = entry.stat(follow_symlinks=False)
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as visitor:
            visitor.connect(f"{entry.path}/{SOCKET}")
    except ConnectionRefusedError:
        return True
    except FileNotFoundError:  # not there yet, or not any more
        with suppress(OSError):
            return time.time() - os.lstat(entry.path).st_mtime > _HOUR_S
    except OSError:
        pass
    return False


def fork_agent() -> Path:
    """Go on in a child of this process, the agent; this process outlives it and ends as it did.

    To be called before there are other threads.

    Returns:
        The path at which the agent may make a folder for itself, which is removed when it ends.
    """
    folder = private_folder()
    processes.die_with_parent(signal.SIGTERM)
    processes.adopt_orphans()
    reaper = os.getpid()
    agent = os.fork()
    if agent:
        _reap(agent, folder)
    processes.die_with_parent(ABANDONED)
    if os.getppid() != reaper:  # it was killed in between
        os._exit(1)
    return folder


def _reap(agent: int, folder: Path) -> NoReturn:
    descriptor = os.pidfd_open(agent)

    def pass_on(number: int, _: object) -> None:
        with suppress(ProcessLookupError):  # it is just ending
            signal.pidfd_send_signal(descriptor, number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    # The streams are the agent's: its launcher sees their end when the agent closes them.
    with open(os.devnull, "r+b", buffering=0) as nothing:
        for stream in range(3):
            os.dup2(nothing.fileno(), stream)
    sweep()
    _, status = os.waitpid(agent, 0)
    for number in _PASSED_ON:
        signal.signal(number, signal.SIG_IGN)
    processes.end_children(GRACE_S)
    shutil.rmtree(folder, ignore_errors=True)
    if os.WIFSIGNALED(status):  # the parent of this process is to see the same end
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
