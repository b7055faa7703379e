"""Options that several commands take, and how all commands read them.

Those of hosts together are a `HostOptions`.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from zrun_core.errors import JobError
from zrun_core.spine.hostname import MAX_SLOTS

HostsFile = Annotated[
    Path | None,
    typer.Option(
        "--hosts",
        metavar="FILE",
        help="Host file, a line for each: name slots=N.",
        show_default=False,
    ),
]
HostList = Annotated[
    str | None,
    typer.Option("-H", metavar="HOSTS", help="Hosts and slots: h1:8,h2:8.", show_default=False),
]
Include = Annotated[
    str | None,
    typer.Option(
        "--include", "-i", metavar="PICKS", help="Only these: h1:0,1@h2.", show_default=False
    ),
]
Exclude = Annotated[
    str | None,
    typer.Option("--exclude", "-e", metavar="PICKS", help="All but these.", show_default=False),
]
Nodes = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="The first N hosts.", show_default=False)
]
Gpus = Annotated[
    int | None,
    typer.Option(
        min=1, max=MAX_SLOTS, metavar="N", help="GPUs 0 to N-1 of each host.", show_default=False
    ),
]

# Of commands that start ranks.
Slots = Annotated[
    int | None, typer.Option(help="Ranks on each host; short for slots=N.", show_default=False)
]
RunFolder = Annotated[
    Path | None,
    typer.Option(help="Directory of this run.", show_default="runs/<name>/<run id>"),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would run, and stop.")]

_KEY = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
MOST_SECONDS = 1e6  # as of the limits of a job


def is_finite(value: float | None) -> float | None:
    """Refuse nan and infinity, which are within any bounds. A callback of options."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


class _Flags:
    """Shows options that take no value without a type."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in params:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return params


class Group(_Flags, TyperGroup):
    """A command that has others below it."""


class Command(_Flags, TyperCommand):
    """A command none of whose options takes the name of another one for its value.

    Where it takes keys of a job, `--steps 100` is `steps=100`. Where it takes a command, what
    follows that is the command's own.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read a command line.

        Raises:
            JobError: an option has no value: the next one follows, or nothing; or it is what
                another launcher calls something that no key is, or stands behind a script.
        """
        options = {name: each for each in self.get_params(ctx) for name in each.opts}
        if any(each.name == "overrides" for each in self.get_params(ctx)):
            args = with_keys(args, options)
        if any(each.name == "command" for each in self.get_params(ctx)):
            own, script = split_at_script(args, options)
            keys = with_keys(own, options)
            if args[len(own) : len(own) + 1] != ["--"]:
                _refuse_behind_script(own, script)
            args = [*keys, "--", *script]
        words = iter(args)
        for word in words:
            if word == "--":
                break
            option = options.get(word)
            if option is None or getattr(option, "is_flag", True):
                continue
            value = next(words, None)
            if value is None or value in options:
                example = (option.metavar or "VALUE").partition("|")[0]
                raise JobError(_no_value(f"{word} {example}", value, list(words)))
        return super().parse_args(ctx, args)


def with_keys(args: list[str], options: Mapping[str, Any]) -> list[str]:
    """Return a command line whose options that are keys of a job are written as keys.

    Raises:
        JobError: others have an option that is none here; with what to write for all such.
    """
    found: list[str] = []
    keys: list[str] = []  # behind all others: the job is named first
    answers: dict[str, list[str]] = {}
    words = deque(args)
    while words:
        word = words.popleft()
        name, equals, value = word.partition("=")
        if word == "--":
            found += [word, *words]
            break
        if not name.startswith("-") or name in options:
            found.append(word)
            if name in options and not equals and not getattr(options[name], "is_flag", True):
                found += [words.popleft()] if words else []
            continue
        following = words[0] if words else None
        meant = _key_meant(name)
        if meant is None:
            answer = _answer(name, equals, value, following)
            if answer is not None:
                answers.setdefault(answer, []).append(name)
            found.append(word)  # typer says that there is none
            continue
        key, is_switch = meant
        if not equals and is_switch:
            value = "true"
        elif not equals:
            if following is None or following.startswith("--"):
                raise JobError(f"{name} takes a value: write {key}=VALUE")
            value = words.popleft()
        keys.append(f"{key}={value}")
    if answers:
        told = [f"{', '.join(names)}: {answer}" for answer, names in answers.items()]
        raise JobError("\n".join(told))
    return found + keys


def split_at_script(args: list[str], options: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return what stands before the script of a command line, and the script with what follows.

    Args:
        args: the command line. Before the script are options, their values, and KEY=VALUE.
        options: those that are known, by name.
    """
    number = 0
    while number < len(args):
        word = args[number]
        if word == "--":
            return args[:number], args[number + 1 :]
        name, equals, _ = word.partition("=")
        if word.startswith("-"):
            following = args[number + 1] if number + 1 < len(args) else None
            number += 2 if not equals and _takes_value(name, options, following) else 1
        elif _KEY.fullmatch(name) and equals:
            number += 1
        else:
            return args[:number], args[number:]
    return args, []


def _refuse_behind_script(own: list[str], script: list[str]) -> None:
    """Refuse an option of a launcher that stands behind a script, which would get it in silence."""
    for number, word in enumerate(script[1:], 1):
        name, equals, _ = word.partition("=")
        if name.replace("_", "-") != "--nproc-per-node":
            continue
        end = number + (1 if equals else 2)
        before = [*own, *script[number:end], *script[:number], *script[end:]]
        raise JobError(
            f"{name} comes after {script[0]}, so the script would get it: for zrun write zrun run "
            f"{shlex.join(before)}; for the script, zrun run {shlex.join([*own, '--', *script])}"
        )


def _takes_value(name: str, options: Mapping[str, Any], following: str | None) -> bool:
    """Return whether the word behind an option is its value; one that nobody knows has none."""
    if name in options:
        return not getattr(options[name], "is_flag", True)
    meant = _key_meant(name)
    if meant is not None:
        return not meant[1]
    is_word = following is not None and not following.startswith("-")
    is_script = is_word and str(following).endswith(".py")
    return is_word and not is_script and _answer(name, "", "", following) is not None


def _key_meant(option: str) -> tuple[str, bool] | None:
    """Return the dotted key of a job that an option like `--steps` means; None: there is none.

    Also whether it is true or false, so that the option alone says so.
    """
    from zrun.job.other_words import key_meant
    from zrun.job.schema import find_key

    if not option.startswith("--"):
        return None
    path: tuple[str | int, ...] = tuple(option.removeprefix("--").replace("-", "_").split("."))
    if find_key(path) is None:
        path = key_meant(option.removeprefix("--")) or path
    key = find_key(path)
    return None if key is None else (".".join(map(str, path)), key.takes == "true | false")


def _answer(option: str, equals: str, value: str, following: str | None) -> str | None:
    """Return what to write for an option that no key of ours is for sure; None: nobody has it.

    Its value is `value`, behind `equals`, if there is one; else `following` may be it.
    """
    from zrun.job.other_words import SHORT, advice, key_called, value_called
    from zrun.job.scalars import write

    name = option.removeprefix("--")
    instead = SHORT.get(option) if not option.startswith("--") else advice(name)
    if instead is None and option.startswith("--"):
        given: str | bool = value or True
        if not equals and following is not None and not following.startswith("-"):
            given = True if "=" in following else following
        found = value_called(name, given)
        called = key_called(name)
        path = found.path if found is not None else called
        if path is None:
            return None
        key = ".".join(map(str, path))
        if found is None:
            example = "VALUE" if given is True else str(given)
            instead = f"if the job's {key} is meant, write {shlex.quote(f'{key}={example}')}"
        elif found.value is None:
            instead = f"leave it out: without {key} it is off"
        else:
            example = "" if found.is_exact else "for example "
            instead = f"write {example}{shlex.quote(f'{key}={write(found.value)}')}"
    return None if instead is None else f"there is no such option; {instead}"


def _no_value(meant: str, following: str | None, rest: list[str]) -> str:
    """Return the message for an option without a value.

    `meant` is the option with a value, as it is to be written; `rest` comes after `following`.
    """
    name = meant.partition(" ")[0]
    if following is None:
        return f"{name} takes a value, and none follows: write {meant}"
    written = [meant, following, *(each for each in rest[:1] if not each.startswith("-"))]
    return f"{name} takes a value, and the option {following} follows: write {' '.join(written)}"
