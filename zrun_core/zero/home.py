"""Homes: the place of a unit's state between uses, which may be another tier than the device.

    fetch   before use: begin to bring the values to the device
    at      the memory on the device in which they are used
    put     after they were written: begin to store the new values
    drop    release the memory on the device until the next fetch

A unit has three: `param`, of what it keeps of its parameters between uses; `grad`; and `record`, of
what an update reads and writes beside the gradient. It never asks which kind they are: it calls the
verbs wherever values that live elsewhere would have to be moved. Today all states live in place;
`tests/dist/test_homes.py` has all of them elsewhere.
"""

from __future__ import annotations

from typing import Protocol

import torch

from zrun_core.distributed.handle import Handle
from zrun_core.memory.arena import byte_buffer


class Home(Protocol):
    """Memory of one state of one unit.

    The verbs of one home take effect in the order of the calls: there is no need to wait for what
    `put` returns before the next one.
    """

    def fetch(self) -> Handle | None:
        """Begin to bring the values here. Returns a handle to wait for; None: they are here."""
        ...

    def at(self) -> torch.Tensor:
        """Return the memory here: the values since `fetch`; without it, room for new ones.

        Views of it must be made anew when another tensor is returned.
        """
        ...

    def put(self) -> Handle | None:
        """Begin to store what was written here. Returns a handle to wait for, or None if done."""
        ...

    def drop(self) -> None:
        """Release the memory here, as far as it is not the home itself.

        Other ranks may still read what they were sent from it: see `Comm.settle`.
        """
        ...

    def grow(self, num_bytes: int) -> None:
        """Become `num_bytes` large. Values that are there stay at the beginning; zeros follow."""
        ...


class InPlace:
    """The home of a state that is used where it lives: nothing moves."""

    __slots__ = ("_memory",)

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory

    def fetch(self) -> None:
        return None

    def at(self) -> torch.Tensor:
        return self._memory

    def put(self) -> None:
        return None

    def drop(self) -> None:
        return None

    def grow(self, num_bytes: int) -> None:
        larger = byte_buffer(num_bytes, self._memory.device)
        larger[: self._memory.numel()].copy_(self._memory)
        self._memory = larger


def fetch_now(home: Home) -> torch.Tensor:
    """Fetch the values of `home`, wait for them, and return them."""
    coming = home.fetch()
    if coming is not None:
        coming.wait()
    return home.at()
