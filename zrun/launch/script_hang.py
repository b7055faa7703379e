"""A hang of ranks that run a script: what each waits for, by torch's flight recorder and stacks.

rank 0 is idle at train.py:31, waits for all_reduce 12 ([1000] Float)
rank 1 is idle at train.py:20, last: all_reduce 11           <- has not come to it: to blame
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zrun.launch.failures import Hang, ranks_in_words

_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in')
_LIBRARIES = re.compile(
    r"[/\\](site|dist)-packages[/\\]|[/\\]lib[/\\]python\d|^<|[/\\]zrun(_core)?[/\\]"
)
_RUNNER = "zrun_core/script/worker.py"
_DEFAULT_GROUP = "0"


@dataclass(frozen=True)
class ScriptHang(Hang):
    """Ranks of a script of which none does anything.

    Attributes:
        ended: ranks that had ended by themselves.
    """

    ended: tuple[int, ...] = ()

    @property
    def first(self) -> dict[str, Any]:
        blamed = self.blamed
        found: dict[str, Any] = next(told for told in self.frame["ranks"] if told["rank"] in blamed)
        return found

    @property
    def blamed(self) -> list[int]:
        """Return the ranks for which the others wait, as far as anybody knows; else all of them."""
        halted = [told["rank"] for told in self.frame["ranks"] if told["does"] in _CANNOT]
        return halted or self._missing or list(self.frame["to_blame"])

    @property
    def headline(self) -> str:
        limit = f"no progress for {self.frame['limit_s']:.3g} s ({self.frame['key']})"
        if self.links:
            return f"{limit}: {self.links[0]}"
        rank = self.first["rank"]
        who = f"rank {rank} of {self.plan.world_size} ({self.plan.place_in_words(rank)})"
        if (why := _CANNOT.get(self.first["does"])) is not None:
            return f"{limit}: {who} is {why}"
        if self.ended:
            done = f"{ranks_in_words(self.ended)} ended with status 0"
            return f"{limit}: {done}, and no other rank does anything"
        if self._missing:
            if len(self._missing) > 1:
                who = f"{ranks_in_words(self._missing)} of {self.plan.world_size}"
            has = "has" if len(self._missing) == 1 else "have"
            return f"{limit}: {who} {has} not reached {self._awaited}, which others wait for"
        return f"{limit}: no rank uses the CPU or prints anything"

    @property
    def advice(self) -> str:
        if self.fault is not None or self.links or self.first["does"] in _CANNOT:
            return super().advice
        key = self.frame["key"]
        if self.ended:
            return "make every rank reach the same collectives, and end after the last one"
        return f"see in the stacks what each waits for; if it is only slow, raise {key}"

    @property
    def _pending(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each collective that a rank waits in, with the rank."""
        for told in self.frame["ranks"]:
            for each in (told.get("torch") or {}).get("waits", ()):
                if not each["is_message"]:
                    yield told["rank"], each

    @property
    def _awaited(self) -> str:
        """Return the collective that some ranks have not come to, in words."""
        for told in self.frame["ranks"]:
            if told.get("awaits") is not None:
                return str(told["awaits"]["what"])
        return next((_named(each) for _, each in self._pending if self._behind(each)), "")

    @property
    def _missing(self) -> list[int]:
        """Return the ranks that have not come to a collective in which others wait."""
        missing = {rank for _, each in self._pending for rank in self._behind(each)}
        for told in self.frame["ranks"]:  # by the pages of those that use zrun_core
            missing |= set((told.get("awaits") or {}).get("ranks", ()))
        return sorted(missing - self._waiting)

    @property
    def _waiting(self) -> set[int]:
        return {told["rank"] for told in self.frame["ranks"] if told.get("awaits") is not None}

    def _behind(self, awaited: dict[str, Any]) -> list[int]:
        """Return the ranks that have not come to a collective.

        Only those count of a group of which they are known to be: all are of the first one.
        """
        group = awaited["group"]
        found = []
        for told in self.frame["ranks"]:
            counts = (told.get("torch") or {}).get("counts")
            if counts is None or (group not in counts and group != _DEFAULT_GROUP):
                continue
            if counts.get(group, 0) < awaited["number"]:
                found.append(told["rank"])
        return found

    def _doing(self, told: dict[str, Any]) -> str:
        does = _CANNOT.get(told["does"])
        text = told["does"] if does is None else f"is {does}"
        where = self._where(told["rank"])
        if where:
            text += f" at {where}"
        answer = told.get("torch") or {}
        waits = [_named(each) for each in answer.get("waits", ())]
        if waits:
            return f"{text}, waits for {', '.join(waits[:3])}"
        awaits = told.get("awaits")
        if awaits is not None:
            return f"{text}, waits for {ranks_in_words(awaits['ranks'])}: {awaits['what']}"
        if told["last"] != "no collective":  # the script uses zrun_core
            return f"{text}, last: {told['last']}"
        if answer.get("last"):
            return f"{text}, last: {_named(answer['last'])}"
        return text

    def _main_thread(self, rank: int) -> list[str]:
        """Return the stack of a rank's main thread, down to where the script began."""
        lines = super()._main_thread(rank)
        return list(itertools.takewhile(lambda line: _RUNNER not in line, lines))

    def _where(self, rank: int) -> str:
        """Return the innermost line of the user's own code in the main thread of a rank."""
        for line in self._main_thread(rank):
            found = _FRAME.match(line)
            if found is not None and _LIBRARIES.search(found["file"]) is None:
                return f"{os.path.basename(found['file'])}:{found['line']}"
        return ""


# What ranks do that cannot go on, in words.
_CANNOT = {
    "is stopped": "stopped by a signal or a debugger",
    "is silent": "silent, as is the agent of its host",
}


def _named(collective: dict[str, Any]) -> str:
    """Return a collective in words: its number, sizes and group."""
    sizes = ", ".join(map(str, collective["sizes"][:2]))
    if len(collective["sizes"]) > 2:
        sizes += ", ..."
    about = f"{sizes} {collective['dtype']}".strip()
    group = f" of {collective['described']}" if collective["described"] else ""
    return f"{collective['name']} {collective['number']}{group} ({about})"
