"""The output of a run's processes, as lines that do a terminal no harm.

    tails = [source.tail() for source in sources(run_dir, "all,messages")]
    for line in tails[0].lines(): ...

A file may be replaced while it is read: the logs of an earlier attempt move to `attempts/<n>`, and
new ones take their place.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO

from zrun.runs.rundir import LOG
from zrun.system.tail_file import LineSplitter, as_text
from zrun.watch.plain import message_line, start_line
from zrun_core.errors import JobError

_READ_BYTES = 1 << 16
_TURN_S = 0.1


@dataclass(frozen=True)
class LogSource:
    """A log, or the run's record.

    Attributes:
        name: what its lines are marked with.
        host: of the process that writes it; empty: that of the launcher.
        is_record: its lines are events, of which those are shown that are messages to a person.
    """

    name: str
    path: Path
    host: str = ""
    is_record: bool = False

    def tail(self, last: int | None = None) -> Tail:
        """Return its lines, from its beginning or from `last` lines before its end on."""
        if self.is_record:
            return Messages(self)
        return Tail(self, last)


def sources(run_dir: Path, asked: str) -> list[LogSource]:
    """Return the logs that `asked` names.

    Args:
        asked: words between commas: ranks such as "3" or "4-7", "all" of them, "messages" of the
            launcher, its own log "launcher" (its messages where it kept none), "agent".

    Raises:
        JobError: it names none.
    """
    found: dict[LogSource, None] = {}
    for part in asked.split(","):
        match part.strip():
            case "all":
                found |= dict.fromkeys(_ranks(run_dir).values())
            case "messages":
                found[_record(run_dir)] = None
            case "launcher":
                log = run_dir / LOG
                source = _record(run_dir)
                if log.exists():
                    source = LogSource("launcher", log)
                found[source] = None
            case "agent" | "agents":
                found |= dict.fromkeys(_agents(run_dir))
            case ranks:
                found |= dict.fromkeys(_numbered(ranks, _ranks(run_dir)))
    return list(found)


def _record(run_dir: Path) -> LogSource:
    return LogSource("launcher", run_dir / "events.jsonl", is_record=True)


def _numbered(asked: str, ranks: dict[int, LogSource]) -> list[LogSource]:
    match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", asked)
    if match is None:
        raise JobError(
            f"-r {asked}: write a rank, several such as 0,4-7, all, messages, launcher or agent"
        )
    first = int(match[1])
    last = int(match[2] or match[1])
    missing = [rank for rank in (first, last) if rank not in ranks]
    if missing or last < first:
        there = "no ranks yet"
        if len(ranks) > 1:
            there = f"ranks 0 to {max(ranks)}"
        elif ranks:
            there = "rank 0 only"
        raise JobError(f"-r {asked}: the run has {there}")
    return [ranks[rank] for rank in range(first, last + 1)]


def _ranks(run_dir: Path) -> dict[int, LogSource]:
    """Return the ranks' logs, by the plan, or by the files where there is no plan."""
    logs = run_dir / "logs"
    hosts: dict[int, str] = {}
    with suppress(OSError, ValueError, TypeError, KeyError):
        plan = json.loads((run_dir / "plan.json").read_bytes())
        hosts = {place["rank"]: place["host"] for place in plan["ranks"]}
    if not hosts:
        names = [path.stem.removeprefix("rank-") for path in logs.glob("rank-*.log")]
        hosts = dict.fromkeys(sorted(int(name) for name in names if name.isdigit()), "")
    return {
        rank: LogSource(f"rank {rank}", logs / f"rank-{rank}.log", host)
        for rank, host in hosts.items()
    }


def _agents(run_dir: Path) -> list[LogSource]:
    paths = sorted((run_dir / "logs").glob("agent-*.log"))
    return [LogSource(f"agent {path.stem.removeprefix('agent-')}", path) for path in paths]


class Tail:
    """The lines of a log, as they come."""

    def __init__(self, source: LogSource, last: int | None = None) -> None:
        """Begin at its beginning, or `last` lines before its end; it need not exist yet."""
        self.source = source
        self._file: IO[bytes] | None = None
        self._cutter = LineSplitter()
        self._open()
        if self._file is not None and last is not None:
            self._file.seek(_start_of_last(self._file, last))

    @property
    def exists(self) -> bool:
        return self._file is not None

    def lines(self) -> Iterator[str]:
        """Yield the lines that were completed since the last call, without their ends."""
        if self._file is None:
            self._open()
        while self._file is not None:
            while data := self._file.read(_READ_BYTES):
                for line in self._cutter.feed(data):
                    yield as_text(line)
            if not self._was_replaced():
                return
            yield from self.rest()
            self._open()

    def rest(self) -> Iterator[str]:
        """Yield the line that has no end."""
        line = self._cutter.rest()
        if line:
            yield as_text(line)

    def _open(self) -> None:
        if self._file is not None:
            self._file.close()
        try:
            self._file = self.source.path.open("rb", buffering=0)
        except OSError:
            self._file = None

    def _was_replaced(self) -> bool:
        """Return whether the path names another file now, or the file was truncated."""
        assert self._file is not None
        try:
            now = os.stat(self.source.path)
        except OSError:  # moved away, and nothing in its place yet
            return False
        opened = os.fstat(self._file.fileno())
        if (now.st_dev, now.st_ino) != (opened.st_dev, opened.st_ino):
            return True
        return opened.st_size < self._file.tell()


class Messages(Tail):
    """The launcher's messages, from the run's record: no steps, and no output of ranks."""

    def lines(self) -> Iterator[str]:
        for line in super().lines():
            yield from _messages_in(line)

    def rest(self) -> Iterator[str]:
        """Return nothing: an event without its end is none yet."""
        return iter(())


def _messages_in(line: str) -> list[str]:
    """Return the lines that a screen shows of an event, but for those that are in a log."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        event = json.loads(line)
        match event.get("type"):
            case "output":
                return []
            case "start":
                return start_line(event).splitlines()
            case _:
                return (message_line(event) or "").splitlines()
    return []


def _start_of_last(file: IO[bytes], count: int) -> int:
    """Return the byte at which the last `count` lines begin. An unfinished one counts."""
    end = position = file.seek(0, os.SEEK_END)
    if position == 0 or count == 0:
        return position
    while position > 0:
        top = position
        position = max(0, position - _READ_BYTES)
        file.seek(position)
        block = file.read(top - position)
        if top == end and block.endswith(b"\n"):
            block = block[:-1]
        found = block.count(b"\n")
        if found >= count:
            for _ in range(count - 1):
                block = block[: block.rindex(b"\n")]
            return position + block.rindex(b"\n") + 1
        count -= found
    return 0


def shown(
    tails: list[Tail],
    pattern: re.Pattern[str] | None,
    last: int | None,
    runs_on: Callable[[], bool] | None,
) -> Iterator[tuple[str, str]]:
    """Yield the lines of logs, each with the name of its log.

    What is there comes first, one log after the other; then lines follow as they are written.

    Args:
        pattern: only lines in which it is found; None: all lines.
        last: only so many lines of each log, not counting those that come later; None: all of them.
        runs_on: whether more may come; None: what is there is enough.
    """
    for tail in tails:
        lines = tail.lines()
        if runs_on is None:
            lines = chain(lines, tail.rest())
        matching: Iterable[str] = (
            line for line in lines if pattern is None or pattern.search(line)
        )
        if last is not None:
            matching = deque(matching, maxlen=last)
        for line in matching:
            yield tail.source.name, line
    while runs_on is not None:
        is_last = not runs_on()  # asked before reading: nothing comes after
        for tail in tails:
            for line in chain(tail.lines(), tail.rest() if is_last else ()):
                if pattern is None or pattern.search(line):
                    yield tail.source.name, line
        if is_last:
            return
        time.sleep(_TURN_S)
