"""One rank of a script of the user's own: forked for zrun's agent, it becomes what torchrun starts.

    python -u -m zrun.agent.fork_server zrun_core.script.worker run_dir/spec.json

The script finds itself as `__main__`, with its arguments in `sys.argv`, its folder first in
`sys.path`, and the variables of torchrun. Beside it, and before it, this process

    writes its page of the flight recorder   the agent knows its process, and a script that uses
                                             zrun_core goes on with the page
    obeys SIGQUIT                            every thread's stack, even while native code is stuck
    obeys ASK                                what torch's flight recorder says: `testimony.py`
    keeps the status of its script           should native code abort after Python's own end
    notes its failure                        `failures/rank-N.json`, from which the launcher tells
                                             which rank was first

It imports no torch: what a script sets before it does so still counts.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from zrun_core.errors import ExitCode, JobError, PeerError, ZrunError
from zrun_core.script import testimony
from zrun_core.spine import tracebacks
from zrun_core.spine.failure_files import TOLD_CHARS, write_note
from zrun_core.spine.flight_page import host_file
from zrun_core.spine.flight_recorder import FlightRecorder
from zrun_core.spine.script_files import SPEC, stacks_file, status_file
from zrun_core.spine.stop_signals import PROFILE, SAVE

_UNCAUGHT = 1  # Python's exit status of an exception


def main() -> None:
    """Run the script, and return at its end: the interpreter ends as it always does."""
    path = sys.argv[1]
    spec: dict[str, Any] = json.loads(Path(path).read_text())
    rank = int(os.environ["RANK"])
    run_dir = Path(spec["run_dir"])
    os.environ[SPEC] = path
    _begin_page(spec, rank, run_dir)
    _listen(run_dir, rank)
    ending = _Ending(status_file(run_dir, rank))
    try:
        _run(spec["script"])
    except SystemExit as end:
        ending.keep(_status_of(end))
        raise  # with a status of the script's own choice
    except KeyboardInterrupt as error:
        _show(error)
        sys.exit(ExitCode.INTERRUPTED)
    except BaseException as error:
        _fail(error, run_dir, rank)
    ending.keep(0)


class _Ending:
    """The status that the script has come to, whatever then becomes of this process.

    Other ranks fail as soon as its connections close, and the agent ends all ranks by SIGTERM while
    Python may take a second to end. And torch's own threads may abort behind Python's end, where
    nothing is left to lose: gloo's do where they let go of a tensor then. The agent finds the
    status in a file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pid = os.getpid()
        self._status: int | None = None
        path.unlink(missing_ok=True)  # of an earlier attempt
        atexit.register(self._tell)  # first of all, so it is called last

    def keep(self, status: int) -> None:
        """Note the status. A script whose threads go on is not at its end."""
        self._status = status
        others = [thread for thread in threading.enumerate() if not thread.daemon]
        if len(others) == 1 and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _tell(self) -> None:
        if self._status is None or os.getpid() != self._pid:  # a process that the script forked
            return
        with suppress(OSError):
            self._path.write_text(str(self._status))


def _status_of(end: SystemExit) -> int:
    """Return the exit status that Python makes of it."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    return _UNCAUGHT


def _begin_page(spec: Mapping[str, Any], rank: int, run_dir: Path) -> None:
    """Say that this process is there."""
    places = spec["plan"]["ranks"]
    host = places[rank]["host"]
    here = [place["rank"] for place in places if place["host"] == host]
    ranks = range(here[0], here[-1] + 1)
    page = FlightRecorder(host_file(run_dir, "board", ranks.start), rank, ranks, len(places))
    page.phase("script")


def _listen(run_dir: Path, rank: int) -> None:
    """Obey signals of the agent, and survive those that only a script with zrun_core obeys."""
    (run_dir / "stacks").mkdir(mode=0o700, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    stacks = os.open(stacks_file(run_dir, rank), flags, 0o600)  # open until the end
    faulthandler.enable()
    faulthandler.register(signal.SIGQUIT, stacks)
    for number in (SAVE, PROFILE):
        signal.signal(number, signal.SIG_IGN)
    testimony.listen(run_dir, rank)


def _run(script: Mapping[str, Any]) -> None:
    """Become the script, and run it.

    Raises:
        JobError: it is not there.
        BaseException: whatever it raises.
    """
    folder = script["folder"]
    try:
        os.chdir(folder)
    except OSError as error:
        raise JobError(
            f"{folder}: {error.strerror}: the script runs in the folder in which zrun run was "
            f"called: make it there on {os.uname().nodename}, or call it in one that all hosts have"
        ) from None
    module = ModuleType("__main__")
    if script["is_module"]:
        sys.path[0] = folder
        code = _find_module(script["name"], module)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(script["name"]))
        code = _find_file(script["name"], module)
    sys.argv = [str(module.__file__), *script["args"]]
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _find_file(path: str, module: ModuleType) -> CodeType:
    """Return the code of a file, whose module becomes what Python makes of a script."""
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    try:
        source = loader.get_data(path)
    except OSError as error:
        raise JobError(
            f"{path}: {error.strerror} on {os.uname().nodename}: all hosts need the script at the "
            "same path"
        ) from None
    module.__file__ = path
    module.__loader__ = loader
    return loader.source_to_code(source, path)


def _find_module(name: str, module: ModuleType) -> CodeType:
    """Return the code of a module, or of the `__main__` of a package, as `python -m` finds it."""
    asked = name
    spec = _spec_of(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = _spec_of(name)
    loader = None if spec is None else spec.loader
    code = None
    if isinstance(loader, importlib.abc.InspectLoader):
        code = loader.get_code(name)
    if spec is None or code is None:
        raise JobError(
            f"-m {asked}: {os.uname().nodename} has no module {name} for {sys.executable}: correct "
            "the name, or install it there"
        )
    module.__file__ = spec.origin
    module.__loader__ = loader
    module.__spec__ = spec
    module.__package__ = spec.parent
    return code


def _spec_of(name: str) -> importlib.machinery.ModuleSpec | None:
    """Return how a module is loaded; None: there is none, or no package that would hold it."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise  # a package on the way imports something else


def _fail(error: BaseException, run_dir: Path, rank: int) -> NoReturn:
    """Note an exception for the launcher, print it as Python does, and end.

    The launcher tells of the rank that was first, so what is printed behind the note is shown by
    nobody else.
    """
    is_before_script = isinstance(error, JobError) and _of_script(error.__traceback__) is None
    kind = "user"
    code = ExitCode.WORKER
    if isinstance(error, ZrunError):
        kind = "peer" if isinstance(error, PeerError) else "zrun"
        code = error.exit_code
    error.__traceback__ = _of_script(error.__traceback__)
    write_note(
        run_dir,
        rank,
        kind=kind,
        type=type(error).__name__,
        message=f"{type(error).__name__}: {tracebacks.first_line(error)}",
        traceback=str(error) if is_before_script else tracebacks.user_traceback(error),
        whole_traceback=tracebacks.full_traceback(error, TOLD_CHARS),
        exit_code=int(code),
    )
    if is_before_script:
        print(f"error: {error}", file=sys.stderr)
    else:
        _show(error)
    sys.exit(_UNCAUGHT)


def _show(error: BaseException) -> None:
    """Print an exception by the hook of the script, without the frames of this module.

    What runs at exit finds it where Python leaves it.
    """
    trace = _of_script(error.__traceback__)
    error.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    sys.stdout.flush()
    sys.excepthook(type(error), error, trace)


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins with the script."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace
