"""Names of what a rank does, for a profile: nothing is named, and nothing timed, without one.

    with comm.spans.named("update", unit.name):
        ...

What is named is a `record_function` of torch's: it ends up in the trace of torch's profiler, beside
the operators inside of it. Nobody else asks whether a profile is taken.

[Note: backwards of blocks]
Hooks tell where the backward of a block begins and ends, and they run inside of operators of
autograd, one of which may have ended before the other hook runs. Spans must not overlap like that:

    autograd        [ MulBackward ........ ][ AddmmBackward ............. ]
    the hooks            ^ blocks.1 begins                  ^ blocks.0 begins

So the hooks leave marks, which take no time, and `telemetry/trace_file.py` makes a track of its own
of them: what lies between a mark and the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch

from zrun_core.hardware.clock import Waits

MARK = "zrun mark: "  # how names of marks begin
WAIT = "wait for"  # and those of waits for other ranks
NOTHING: AbstractContextManager[None] = nullcontext()  # what names nothing


class Issued(NamedTuple):
    """What is issued between ranks, as a profile names it: "all_gather blocks.0", over "shard"."""

    what: str
    axis: str


class Spans:
    """Names of what one rank does.

    Attributes:
        is_on: a profile is taken: names are recorded.
        issued: what is being issued between ranks; None: nothing is, or no profile is taken.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_on = False
        self.issued: Issued | None = None
        self._device = device
        self._waits: dict[str, Waits] = {}

    def named(self, *words: object) -> AbstractContextManager[object]:
        """Return a context that names what happens inside: its words, with blanks between."""
        if not self.is_on:
            return NOTHING
        return torch.profiler.record_function(" ".join(map(str, words)))

    def mark(self, *words: object) -> None:
        """Name what happens from here to the next mark; without words nothing in particular.

        See [Note: backwards of blocks].
        """
        if self.is_on:
            with torch.profiler.record_function(MARK + " ".join(map(str, words))):
                pass

    @contextmanager
    def issuing(self, kind: str, name: str, phase: str, axis: str) -> Iterator[None]:
        """Name what is issued inside, and what waits for it later. Only in a profile."""
        before = self.issued
        self.issued = Issued(f"{kind} {name}", axis)
        try:
            with self.named(self.issued.what, f"({phase}, {axis})"):
                yield
        finally:
            self.issued = before

    @contextmanager
    def waiting(self, issued: Issued | None, phase: str) -> Iterator[None]:
        """Name and time a wait for other ranks inside. Only in a profile.

        Args:
            issued: what is waited for; None: until others have read what was sent.
        """
        what, axis = issued or self.issued or Issued("others to read", "any")
        waits = self._waits.setdefault(axis, Waits(self._device))
        with self.named(WAIT, what, f"({phase}, {axis})"), waits.counting():
            yield

    def take_waits(self) -> dict[str, float]:
        """Return the seconds that the device has waited for others, by axis, and begin anew.

        The device must have passed them.
        """
        taken, self._waits = self._waits, {}
        return {axis: waits.seconds() for axis, waits in taken.items()}
