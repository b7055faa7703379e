"""How a run ended, or that it goes on, for the top of its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Self

from zrun.runs.launches import Launch
from zrun.runs.listing import RunStatus, state_of

_KINDS = {
    RunStatus.RUNNING: "on",
    RunStatus.FINISHED: "yes",
    RunStatus.STOPPED: "no",
    RunStatus.FAILED: "no",
    RunStatus.VANISHED: "no",
}
STYLE = """
.outcome { font-weight: 600; font-size: 1.05em; }
.outcome b { display: inline-block; margin-right: .6em; padding: .05em .7em; border-radius: 1em; \
color: var(--back); background: var(--bad); }
.outcome.yes b { background: var(--good); } .outcome.on b { background: var(--c0); }
"""


@dataclass(frozen=True)
class Outcome:
    """End of a launch.

    Attributes:
        state: how it ended, or that it goes on.
        code: the exit code; None: there is none, or it is not known.
        message: what was told on the terminal; empty where all is well.
    """

    state: RunStatus
    code: int | None = None
    message: str = ""

    @classmethod
    def of(cls, code: int, message: str = "") -> Self:
        """Return the end of a launch with an exit code."""
        return cls(state_of(code), code, message)

    @classmethod
    def of_launch(cls, launch: Launch) -> Self:
        """Return the end of a launch as its files tell of it."""
        return cls(launch.state, launch.code, launch.message)

    def of_newest(self, launches: Sequence[Launch]) -> list[Launch]:
        """Return launches of which the newest ended so, which its files need not tell yet."""
        *earlier, newest = launches
        first, _, _ = self.message.strip().partition("\n")
        newest = replace(
            newest,
            state=self.state,
            code=self.code,
            headline=newest.headline or first,
            message=self.message,
        )
        return [*earlier, newest]

    @property
    def word(self) -> str:
        """The end in one word."""
        return "done" if self.state is RunStatus.FINISHED else str(self.state)

    def html(self) -> str:
        """Return the end in words, with the message of a run that did not reach its end."""
        told = ""
        if self.code is not None:
            told = f"exit code {self.code}"
        elif self.state is RunStatus.RUNNING:
            told = "this page is of the moment at which it was written"
        elif self.state is RunStatus.VANISHED:
            told = "its launcher was killed, or its machine went down"
        line = f'<p class="outcome {_KINDS[self.state]}"><b>{self.word}</b>{told}</p>'
        if not self.message:
            return line
        return f"{line}\n<pre>{escape(self.message)}</pre>"
