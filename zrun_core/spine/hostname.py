"""Hosts as text, in a grammar so strict that no name is taken for an option, a command or a path.

[user@]name[:port] [slots=N]        a line of a host file
[user@]name[:slots]                 an item of a list, which may also be such a line
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

MAX_SLOTS = 1024
LINE_FORM = "[user@]name[:port] slots=N"

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?")
_USER = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9_$])?")
# The system's resolver takes these for parts of an address.
_NUMERIC_LABEL = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*")
_BRACKETS = re.compile(r"\[([^\[\]]*)\](?::(.*))?", re.DOTALL)
_ZONE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,14}")
_WORD = re.compile(r"[^ \t]+")
_MAX_NAME_CHARS = 253
_MAX_LABEL_CHARS = 63
_LOWEST_PORT = 22  # below are no ports of ssh, but numbers of slots
_MAX_SHOWN = 60


@dataclass(frozen=True)
class Host:
    """A host as a text describes it. An IPv6 address is a name without brackets."""

    name: str
    user: str | None = None
    port: int | None = None
    slots: int | None = None


@dataclass(frozen=True)
class Mistake:
    """A mistake in a text, after `offset` characters."""

    offset: int
    message: str


def parse_line(text: str) -> tuple[Host | None, list[Mistake]]:
    """Return the host of a host file's line without comment, or else every mistake in it."""
    words = list(_WORD.finditer(text))
    if not words:
        return None, [Mistake(0, f"no host; write {LINE_FORM}")]
    host: Host | None = None
    mistakes: list[Mistake] = []
    try:
        host = _address(words[0].group(), colon="port")
    except ValueError as error:
        mistakes.append(Mistake(words[0].start(), str(error)))
    found: dict[str, int] = {}
    for word in words[1:]:
        try:
            key, number = _setting(word.group())
            if key in found:
                raise ValueError(f"{key} is given twice")
            found[key] = number
        except ValueError as error:
            mistakes.append(Mistake(word.start(), str(error)))
            if "=" not in word.group().strip("="):
                break  # "slots = 8" is one mistake
    if not mistakes and _limits_nothing(found):
        message = f"max_slots says how far slots=N may go: {_write_slots(found)}"
        mistakes.append(Mistake(words[1].start(), message))
    if host is None or mistakes:
        return None, mistakes
    return Host(host.name, host.user, host.port, found.get("slots")), []


def _limits_nothing(found: dict[str, int]) -> bool:
    """Return whether a line has `max_slots` below its slots, or without any."""
    if "max_slots" not in found:
        return False
    return "slots" not in found or found["max_slots"] < found["slots"]


def _write_slots(found: dict[str, int]) -> str:
    advice = f"write slots={min(found.values())}"
    return advice if "slots" in found else f"{advice} too"


def parse_item(text: str) -> tuple[Host | None, list[Mistake]]:
    """Return the host of an item of a list, or else every mistake in it."""
    if len(_WORD.findall(text)) > 1:
        return parse_line(text)
    item = text.strip(" \t")
    try:
        return _address(item, colon="slots"), []
    except ValueError as error:
        num_blanks = len(text) - len(text.lstrip(" \t"))
        return None, [Mistake(num_blanks, str(error))]


def checked_item(text: str) -> str:
    """Return `text` itself.

    Raises:
        ValueError: it is no item of a list of hosts.
    """
    mistakes = parse_item(text)[1]
    if mistakes:
        raise ValueError("; ".join(mistake.message for mistake in mistakes))
    return text


def check_name(name: str) -> str:
    """Return `name` as ssh gets it.

    It is a host name, an IPv4 address, or an IPv6 address without brackets in its shortest form.

    Raises:
        ValueError: it is none of these, or a program could take it for more than a name.
    """
    if not name:
        raise ValueError(f"no host name; write {LINE_FORM}")
    if name.startswith("-"):
        raise ValueError(f'{_quoted(name)} begins with "-", which no host name does')
    if ":" in name:
        return _check_ipv6(name)
    if not name.isascii():
        raise ValueError(
            f"{_quoted(name)} is not ASCII; write the name as the network has it (xn--...)"
        )
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{_quoted(name)} is not a host name: letters, digits, dots, - and _, no other "
            "character"
        )
    labels = name.split(".")
    longest_label = max(map(len, labels))
    if len(name) > _MAX_NAME_CHARS or longest_label > _MAX_LABEL_CHARS:
        raise ValueError(
            f"{_quoted(name)} is too long for a host name: {_MAX_LABEL_CHARS} characters between "
            "dots"
        )
    if not all(labels):
        raise ValueError(f"{_quoted(name)} is not a host name: two dots in a row")
    if all(_NUMERIC_LABEL.fullmatch(label) for label in labels):
        try:
            ip_address(name)
        except ValueError:
            raise ValueError(
                f"{_quoted(name)} is not an IPv4 address: write four numbers from 0 to 255"
            ) from None
    return name


def _check_ipv6(name: str) -> str:
    address, percent, zone = name.partition("%")
    try:
        shortest = IPv6Address(address).compressed
    except ValueError:
        raise ValueError(
            f"{_quoted(name)} is not an IPv6 address, nor [user@]name:number"
        ) from None
    if percent and not _ZONE.fullmatch(zone):
        raise ValueError(f"{_quoted(name)}: after % comes the name of an interface, such as eth0")
    return shortest + percent + zone


def _address(text: str, *, colon: str) -> Host:
    """Parse `[user@]name[:number]`.

    `text` is without blanks; `colon` says what the number is: "port" or "slots".

    Raises:
        ValueError: it is not.
    """
    if text.startswith("-"):
        raise ValueError(f'{_quoted(text)} begins with "-", which no host name does')
    user, at, rest = text.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise ValueError(f"{_quoted(user)} is not the name of a user: write {LINE_FORM}")
    in_brackets = _BRACKETS.fullmatch(rest)
    number: str | None = None
    if in_brackets:
        name = _check_ipv6(in_brackets[1])
        number = in_brackets[2]
    elif rest.count(":") > 1:
        name = _check_ipv6(rest)
    else:
        before, has_number, after = rest.partition(":")
        name = check_name(before)
        if has_number:
            number = after
    if number is None:
        return Host(name, user or None)
    if colon == "port":
        return Host(name, user or None, port=_port(number, name))
    return Host(name, user or None, slots=parse_slots(number))


def _port(text: str, name: str) -> int:
    number = _number(text)
    if number is None or number > 65535:
        raise ValueError(
            f"port {_quoted(text)} is not a number from 22 to 65535: write {LINE_FORM}"
        )
    if number < _LOWEST_PORT:
        raise ValueError(
            f"{number} after the colon is a port, and ssh has none so low: write {name} "
            f"slots={number}"
        )
    return number


def parse_slots(text: str) -> int:
    """Return a number of slots.

    Raises:
        ValueError: it is none.
    """
    number = _number(text)
    if number == 0:
        raise ValueError("slots=0 is no place for a rank: leave the host out")
    if number is None or number > MAX_SLOTS:
        raise ValueError(
            f"slots {_quoted(text)} is not a whole number from 1 to {MAX_SLOTS}: write slots=8"
        )
    return number


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def _setting(word: str) -> tuple[str, int]:
    """Parse a word after the address.

    OpenMPI's `max_slots` never lets more ranks in, and so changes nothing here.

    Raises:
        ValueError: a line has no such word.
    """
    key, equals, value = word.partition("=")
    name = key.lower().replace("-", "_")
    if equals and name in ("slots", "max_slots"):
        return name, parse_slots(value)
    if name in ("slots", "max_slots") or not key or key.isdigit():
        raise ValueError(f"{_quoted(word)}: write slots=8, without blanks around =")
    raise ValueError(f"{_quoted(word)} means nothing here: a line is {LINE_FORM}")


def _quoted(text: str) -> str:
    """Return `text` in quotes, on one line of a terminal."""
    safe = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    if len(safe) > _MAX_SHOWN:
        safe = safe[: _MAX_SHOWN - 3] + "..."
    return f'"{safe}"'
