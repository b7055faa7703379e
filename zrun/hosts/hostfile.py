"""Host files and lists of hosts, parsed to `HostEntry`s.

Every mistake is reported at once, each with file:line:column.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zrun.job.problems import Problem, ValueOrigin, job_error, shown_text
from zrun_core.errors import JobError
from zrun_core.spine.hostname import Host, parse_item, parse_line

MAX_FILE_BYTES = 2**20
_EXAMPLE = "write a line for each host, such as: node1 slots=8"


@dataclass(frozen=True)
class HostEntry:
    """A host that ranks may be started on.

    Attributes:
        name: that ssh takes: a name, an alias of ~/.ssh/config, an IPv4 or IPv6 address; never with
            a leading "-".
        slots: None: its GPUs, else 1.
        chosen: slot numbers that are left of them; None: all.
        where: it is written: "hostfile:3:1", "-H:1:4", "SLURM_JOB_NODELIST".
    """

    name: str
    user: str | None = None
    port: int | None = None
    slots: int | None = None
    chosen: tuple[int, ...] | None = None
    where: str = ""

    @property
    def num_slots(self) -> int | None:
        """Return how many slots are used; None: that depends on its GPUs."""
        if self.chosen is not None:
            return len(self.chosen)
        return self.slots

    def __str__(self) -> str:
        if self.port is None:
            return self.name
        return f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"


def read_hostfile(path: Path) -> tuple[HostEntry, ...]:
    """Return the hosts of the file at `path`, in its order.

    Raises:
        JobError: it cannot be read, holds mistakes, or names no host.
    """
    return parse_hostfile(_read(path), str(path))


def parse_hostfile(raw: bytes, name: str) -> tuple[HostEntry, ...]:
    """Return the hosts of `raw`, the content of the file `name`.

    Raises:
        JobError: with every mistake in it.
    """
    hosts: list[tuple[Host, ValueOrigin]] = []
    problems: list[Problem] = []
    for number, line in enumerate(_decoded(raw, name).split("\n"), start=1):
        text = line.removesuffix("\r").partition("#")[0].rstrip(" \t")
        if not text.strip(" \t"):
            continue
        indent = len(text) - len(text.lstrip(" \t"))
        host, mistakes = parse_line(text)
        problems += [
            Problem(ValueOrigin.in_file(name, number, each.offset + 1), (), each.message)
            for each in mistakes
        ]
        if host is not None:
            hosts.append((host, ValueOrigin.in_file(name, number, indent + 1)))
    if not hosts and not problems:
        raise JobError(f"{name} names no host: {_EXAMPLE}")
    return _entries(name, hosts, problems)


def parse_option(text: str, name: str) -> tuple[HostEntry, ...]:
    """Return the hosts of "h1:8,h2:8", which was given with the option `name`.

    Raises:
        JobError: with every mistake in it.
    """
    hosts: list[tuple[Host, ValueOrigin]] = []
    problems: list[Problem] = []
    column = 1
    for item in text.split(","):
        host, mistakes = parse_item(item)
        problems += [
            Problem(ValueOrigin.in_file(name, 1, column + each.offset), (), each.message)
            for each in mistakes
        ]
        if host is not None:
            hosts.append((host, ValueOrigin.in_file(name, 1, column)))
        column += len(item) + 1
    return _entries(name, hosts, problems)


def parse_items(items: Sequence[str], key: str) -> tuple[HostEntry, ...]:
    """Return the hosts of a list, the value of `key`, with the places "key[0]" and so on.

    Raises:
        JobError: with every mistake in it.
    """
    hosts: list[tuple[Host, ValueOrigin]] = []
    problems: list[Problem] = []
    for index, item in enumerate(items):
        place = ValueOrigin("file", f"{key}[{index}]", 1, index + 1)
        host, mistakes = parse_item(item)
        problems += [Problem(place, (), each.message) for each in mistakes]
        if host is not None:
            hosts.append((host, place))
    return _entries(key, hosts, problems)


def _entries(
    name: str, hosts: Iterable[tuple[Host, ValueOrigin]], problems: list[Problem]
) -> tuple[HostEntry, ...]:
    first: dict[tuple[str, int], ValueOrigin] = {}
    entries = []
    for host, origin in hosts:
        known = first.setdefault((host.name.lower(), host.port or 22), origin)
        if known is not origin:
            what = (
                f"{host.name} is named twice, first at {known}: write it once, with all its slots"
            )
            problems.append(Problem(origin, (), what))
        entries.append(HostEntry(host.name, host.user, host.port, host.slots, where=str(origin)))
    if problems:
        raise job_error(name, problems)
    return tuple(entries)


def _read(path: Path) -> bytes:
    shown = shown_text(str(path))
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise JobError(f"{shown} is a directory, not a host file; name the file in it")
        # A pipe that nobody writes to would be waited for; `<(command)` is one that somebody does.
        if not stat.S_ISREG(mode) and not str(path).startswith(
            ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
        ):
            raise JobError(f"{shown} is not a regular file; {_EXAMPLE}")
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise JobError(f"{shown}: there is no such host file; {_EXAMPLE}") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise JobError(
            f"host file {shown} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    if len(raw) > MAX_FILE_BYTES:
        raise JobError(
            f"{shown} is larger than 1 MiB, which no host file needs; is it the right file?"
        )
    return raw


def _decoded(raw: bytes, name: str) -> str:
    if b"\0" in raw:
        raise JobError(f"{shown_text(name)} is a binary file, not a host file; {_EXAMPLE}")
    try:
        return raw.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode().split("\n")
        place = ValueOrigin.in_file(name, len(before), len(before[-1]) + 1)
        raise job_error(
            name, [Problem(place, (), "not UTF-8 text; save the file as UTF-8")]
        ) from None
