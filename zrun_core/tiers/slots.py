"""Pieces of host memory that transfers take turns in."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from zrun_core.memory.arena import byte_buffer
from zrun_core.tiers.transfer import DONE, Transfer

_LOOK_S = 0.5  # between two looks whether anything has failed


class Slots:
    """Pieces of one size. Several threads may take and give them.

    A transfer or an update that fails keeps what it has taken, so nobody waits for a piece without
    looking whether anything has failed.

    Attributes:
        num_bytes: of all pieces.
    """

    def __init__(
        self,
        pieces: Sequence[torch.Tensor],
        check: Callable[[], None],
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Take the memory.

        Args:
            pieces: uint8 [size] each, on borders of pages.
            check: raises the error of whoever may have pieces, if there is one.
            waiting: around each wait for a piece.
        """
        self._check = check
        self._waiting = waiting
        self._free: deque[tuple[torch.Tensor, Transfer]] = deque((each, DONE) for each in pieces)
        self._pieces = {each.data_ptr(): each for each in pieces}
        self._changed = threading.Condition()

    @property
    def num_bytes(self) -> int:
        with self._changed:
            return sum(piece.numel() for piece in self._pieces.values())

    @property
    def num_taken(self) -> int:
        """Pieces that somebody holds."""
        return len(self._pieces) - len(self._free)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return [num_bytes] uint8 of undefined values, as soon as a piece is free.

        A piece that is too small is replaced: more was needed than planned.

        Raises:
            Exception: of a transfer or an update that has failed.
        """
        with self._changed:
            if not self._free:
                with self._waiting():
                    self._wait()
            piece, leaving = self._free.popleft()
        return self._left(piece, leaving, num_bytes)

    def take_free(self, num_bytes: int, *, waits: bool = False) -> torch.Tensor | None:
        """Return what `take` does, without waiting for whoever has a piece.

        Args:
            num_bytes: as of `take`.
            waits: for what leaves a piece that was given back.

        Returns:
            The piece; None: there is none.
        """
        with self._changed:
            if not self._free or not (waits or self._free[0][1].is_completed()):
                return None
            piece, leaving = self._free.popleft()
        return self._left(piece, leaving, num_bytes)

    def _left(self, piece: torch.Tensor, leaving: Transfer, num_bytes: int) -> torch.Tensor:
        """Return a piece, or a larger one, when what leaves it is over."""
        try:
            leaving.wait_on_host()
        except BaseException:
            self.give(piece, leaving)
            raise
        return self._large_enough(piece, num_bytes)[:num_bytes]

    def extend(self, part: torch.Tensor, num_bytes: int) -> torch.Tensor:
        """Return [num_bytes] that begin with the values of `part`, which is not used any more.

        No other piece is waited for.
        """
        piece = self._large_enough(self._pieces[part.data_ptr()], num_bytes)
        if piece.data_ptr() != part.data_ptr():
            piece[: part.numel()].copy_(part)
        return piece[:num_bytes]

    def _large_enough(self, piece: torch.Tensor, num_bytes: int) -> torch.Tensor:
        """Return a piece, or a larger one in its place."""
        if piece.numel() >= num_bytes:
            return piece
        larger = byte_buffer(num_bytes, torch.device("cpu"))
        with self._changed:
            del self._pieces[piece.data_ptr()]
            self._pieces[larger.data_ptr()] = larger
        return larger

    def _wait(self) -> None:
        while not self._free:
            self._check()
            self._changed.wait(_LOOK_S)

    def give(self, part: torch.Tensor, after: Transfer = DONE) -> None:
        """Take back a piece, or a view of its beginning.

        Args:
            part: as `take` returned it, of any format.
            after: until this is over, it is not free.
        """
        piece = self._pieces[part.data_ptr()]
        with self._changed:
            self._free.append((piece, after))
            self._changed.notify()
