"""Attributes of a model while forwards of several micro-batches take turns.

What a forward writes to an attribute is its own until it ends: noise that it adds in front of the
blocks, and that its loss reads, is not that of the micro-batch which came between.

    micro-batch 0   self.noise = a  |                    |  loss reads a
    micro-batch 1                   |  self.noise = b    |                  |  loss reads b

A counter goes from one micro-batch to the next in the part of the forward that counts. They come to
that part in their order, unless one leaves blocks out: then it ends before others have changed what
it would have read of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zrun_core.errors import JobError
from zrun_core.user_code.trial import Attributes, AttributesCopy, as_in, goes_on, joined


class Turns:
    """The attributes that are looked at: all in the first step, then those that it has changed."""

    def __init__(self, attributes: Attributes, key: str, instead: str) -> None:
        """
        Args:
            attributes: of the model, and of its loss.
        """
        self.attributes = attributes
        self.key = key
        self.instead = instead
        self.has_changed = False  # something, in a turn of the first step
        self._is_first_step = True
        self._begun: AttributesCopy = []  # the first turn
        self._seen: AttributesCopy = []  # what has changed in the first step
        self._ended = -1  # the last of this step's micro-batches whose forward is over

    @property
    def are_watched(self) -> bool:
        """False if no forward of the first step has changed any."""
        return self._is_first_step or self.has_changed

    def note(self, begun: AttributesCopy, changed: AttributesCopy) -> None:
        """Note what a turn has changed, which began with `begun`."""
        self.has_changed |= any(changed)
        if self._is_first_step:
            self._begun = self._begun or begun
            self._seen = joined(self._seen, changed) if self._seen else changed

    def note_end(self, number: int) -> None:
        """Note that the forward of a micro-batch is over."""
        self._ended = max(self._ended, number)

    def check_order(self, number: int, changed: AttributesCopy) -> None:
        """Check that no later micro-batch has ended before it could read what this one changes.

        Args:
            number: of the micro-batch whose turn ends.

        Raises:
            JobError: one has.
        """
        name = next((name for now in changed for name in now), None)
        if name is not None and self._ended > number:
            raise JobError(
                f"{self.key}: the forward of micro-batch {self._ended} leaves blocks out, and so "
                f"ends before that of micro-batch {number} changes `{name}` of a module, which it "
                f"may read: change it in front of the blocks, or {self.instead}"
            )

    def end_step(self) -> None:
        """Know from now on whether forwards change any, and which."""
        self._ended = -1
        if self._is_first_step and self._begun:
            self.attributes.leave_out_steady(self._begun, self._seen)
        self._is_first_step = False
        self._begun, self._seen = [], []


class OwnAttributes:
    """What the forward of one micro-batch has written so far."""

    def __init__(self, turns: Turns, number: int) -> None:
        """
        Args:
            number: of the micro-batch in its step.
        """
        self._turns = turns
        self._number = number
        self._own: AttributesCopy | None = None  # None: nothing, before its first turn

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Go on with the forward inside.

        Raises:
            JobError: it changes a number again that it has changed in an earlier turn, so that the
                next micro-batch has begun with another.
        """
        if not self._turns.are_watched:
            yield
            return
        attributes = self._turns.attributes
        others = attributes.copy()
        begun = others
        if self._own is not None:
            attributes.put_back_only(self._own)
            begun = attributes.copy()
        yield
        changed = attributes.changed(begun)
        self._turns.check_order(self._number, changed)
        if self._own is None:
            self._own = changed
        else:
            self._refuse_numbers(self._own, changed)
            mine = joined(self._own, changed)
            kept = [
                {key: each for key, each in own.items() if key not in now}
                for own, now in zip(self._own, changed, strict=True)
            ]
            attributes.put_back_only(as_in(others, kept))
            self._own = mine
        self._turns.note(begun, changed)

    def _refuse_numbers(self, own: AttributesCopy, changed: AttributesCopy) -> None:
        for mine, now in zip(own, changed, strict=True):
            for name, value in now.items():
                if name in mine and goes_on(value, mine[name]):
                    raise JobError(
                        f"{self._turns.key}: forward goes on with `{name}` (a number, a generator "
                        "or a tensor) of a module before and after a border, where other "
                        "micro-batches come between: do it in one place, or "
                        f"{self._turns.instead}"
                    )
