"""Hosts and slots picked from a list: `--include`, `--exclude`, `--nodes`, `--gpus`.

The grammar is that of DeepSpeed: `node1:0,1@node3` is slots 0 and 1 of node1, and all of node3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zrun.hosts.hostfile import HostEntry
from zrun.job.nearest import nearest
from zrun.job.problems import Problem, ValueOrigin, job_error, shown_text
from zrun_core.errors import JobError
from zrun_core.sizes import several
from zrun_core.spine.hostname import MAX_SLOTS

_PICK = re.compile(
    r"\[(?P<label>[^\[\]]*)\](?::(?P<its>.*))?|(?P<name>[^:\[\]]*)(?::(?P<slots>.*))?", re.DOTALL
)
_FORM = "NAME[:SLOT,SLOT]@NAME"
_MAX_SHOWN = 8


@dataclass(frozen=True)
class HostOptions:
    """The options of the command line about hosts."""

    hosts: Path | None = None
    host_list: str | None = None
    include: str | None = None
    exclude: str | None = None
    nodes: int | None = None
    gpus: int | None = None

    def check(self) -> None:
        """Refuse options that contradict each other.

        Raises:
            JobError: they do.
        """
        if self.hosts is not None and self.host_list is not None:
            raise JobError("--hosts and -H both name the hosts: keep one of them")
        if self.include is not None and self.exclude is not None:
            raise JobError(
                "--include says which hosts remain and --exclude which do not: keep one of them, "
                "since what is not included is excluded already"
            )
        by_name = _first_given({"--include": self.include, "--exclude": self.exclude})
        by_number = _first_given({"--nodes": self.nodes, "--gpus": self.gpus})
        if by_name is not None and by_number is not None:
            raise JobError(
                f"{by_name} picks hosts and slots by name, {by_number} the first ones: keep one "
                f"of them; {by_name} can name slots too, as in {by_name} node1:0,1@node2"
            )
        for option, number in (("--nodes", self.nodes), ("--gpus", self.gpus)):
            if number is not None and number < 1:
                raise JobError(f"{option} {number}: write a whole number > 0")

    def as_arguments(self) -> list[str]:
        """Return these options as a command line has them."""
        named = {
            "--hosts": self.hosts,
            "-H": self.host_list,
            "--include": self.include,
            "--exclude": self.exclude,
            "--nodes": self.nodes,
            "--gpus": self.gpus,
        }
        words = []
        for option, value in named.items():
            if value is not None:
                words += [option, str(value)]
        return words


def _first_given(options: Mapping[str, object]) -> str | None:
    return next((name for name, value in options.items() if value is not None), None)


def filtered(entries: Sequence[HostEntry], options: HostOptions) -> tuple[HostEntry, ...]:
    """Return what `options` leave of `entries`, in their order.

    Raises:
        JobError: they name a host or a slot that there is not, or leave none.
    """
    if options.include is not None:
        picks = _picks(entries, options.include, "--include")
        return tuple(replace(each, chosen=picks[each]) for each in entries if each in picks)
    if options.exclude is not None:
        left = _without(entries, _picks(entries, options.exclude, "--exclude"))
        if not left:
            raise JobError("--exclude leaves no host: exclude fewer")
        return left
    if options.nodes is not None and options.nodes > len(entries):
        raise JobError(
            f"--nodes {options.nodes}, but there are {several(len(entries), 'host')} "
            f"({entries[0].where} and below): write --nodes {len(entries)} or less"
        )
    return _first_slots(entries[: options.nodes], options.gpus)


def _first_slots(entries: Sequence[HostEntry], number: int | None) -> tuple[HostEntry, ...]:
    if number is None:
        return tuple(entries)
    small = [each for each in entries if each.slots is not None and each.slots < number]
    if small:
        names = _shown([f"{each} has {each.slots}" for each in small])
        least = min(each.slots or number for each in small)
        raise JobError(f"--gpus {number}, but {names}: write --gpus {least}, or choose other hosts")
    return tuple(replace(each, chosen=tuple(range(number))) for each in entries)


def _without(
    entries: Sequence[HostEntry], picks: dict[HostEntry, tuple[int, ...] | None]
) -> tuple[HostEntry, ...]:
    left = []
    for entry in entries:
        if entry not in picks:
            left.append(entry)
            continue
        gone = picks[entry]
        if gone is None:
            continue
        if entry.slots is None:
            raise JobError(
                f"--exclude: how many slots {entry} has is not written at {entry.where}: write "
                f"slots=N there, or --include with the slots to use, as in --include "
                f"{entry.name}:0,1"
            )
        kept = tuple(slot for slot in range(entry.slots) if slot not in gone)
        if kept:
            left.append(replace(entry, chosen=kept))
    return tuple(left)


def _picks(
    entries: Sequence[HostEntry], text: str, option: str
) -> dict[HostEntry, tuple[int, ...] | None]:
    """Return the slots that `text` names by host, None for all of them."""
    picks: dict[HostEntry, tuple[int, ...] | None] = {}
    problems = []
    column = 1
    for item in text.split("@"):
        try:
            entry, slots = _pick(entries, item)
            if entry in picks:
                raise ValueError(f"{entry} is named twice: write it once, with all its slots")
            picks[entry] = slots
        except ValueError as error:
            problems.append(Problem(ValueOrigin.in_file(option, 1, column), (), str(error)))
        column += len(item) + 1
    if problems:
        raise job_error(option, problems)
    return picks


def _pick(entries: Sequence[HostEntry], item: str) -> tuple[HostEntry, tuple[int, ...] | None]:
    match = _PICK.fullmatch(item)
    name = ""
    listed = None
    if match is not None and match["label"] is not None:
        name = match["label"]
        listed = match["its"]
    elif match is not None:
        name = match["name"]
        listed = match["slots"]
    if not name:
        raise ValueError(
            f'"{shown_text(item)}" is not a host with its slots; write {_FORM}, IPv6 in brackets'
        )
    entry = _named(entries, name)
    if listed is None:
        return entry, None
    return entry, _slots(entry, listed)


def _named(entries: Sequence[HostEntry], name: str) -> HostEntry:
    found = [each for each in entries if name.lower() in (each.name.lower(), str(each).lower())]
    if len(found) > 1:
        raise ValueError(f"{name} is {len(found)} hosts; write the port too, as in [{found[0]}]:0")
    if not found:
        near = nearest(name, [each.name for each in entries])
        hint = f"did you mean {near}?"
        if near is None:
            hint = f"there are {_shown(list(map(str, entries)))}"
        raise ValueError(f'there is no host "{shown_text(name)}"; {hint}')
    return found[0]


def _shown(texts: list[str]) -> str:
    more = ", ..." if len(texts) > _MAX_SHOWN else ""
    return ", ".join(texts[:_MAX_SHOWN]) + more


def _slots(entry: HostEntry, listed: str) -> tuple[int, ...]:
    slots: list[int] = []
    for number in listed.split(","):
        if not re.fullmatch(r"[0-9]{1,4}", number) or int(number) >= MAX_SLOTS:
            raise ValueError(
                f'"{shown_text(number)}" is not the number of a slot; write {entry.name}:0,1'
            )
        slot = int(number)
        if entry.slots is not None and slot >= entry.slots:
            raise ValueError(
                f"{entry} has no slot {slot}: {entry.where} gives it slots 0 to {entry.slots - 1}"
            )
        if slot in slots:
            raise ValueError(f"slot {slot} of {entry} is named twice: write it once")
        slots.append(slot)
    return tuple(sorted(slots))
