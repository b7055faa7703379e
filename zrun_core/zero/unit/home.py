"""Homes: the place of a unit's state between uses, which may be another tier than the device.

    fetch   before use: begin to bring the values to where they are used
    at      the memory in which they are used
    put     after they were written: begin to store the new values
    drop    release that memory until the next fetch

A unit has three: of what it keeps of its parameters between uses (`unit_params.py`), of its
gradient, and of the record that an update reads and writes beside it. It calls the verbs wherever
values that live elsewhere would have to be moved.

A state that lives elsewhere is used in the host's memory, where its update runs, and so is whatever
looks between two steps. What computes on the device gets parameters and gives gradients by two more
verbs:

              load  copy the values to memory of the device
    device  <======  home  ======>  host     fetch, at, put, drop
            ======>
              store  copy, or add, values of the device to the home

`InPlace`, on the device, is here: nothing moves. `home_elsewhere.py` has the others.
"""

from __future__ import annotations

from typing import Protocol

import torch

from zrun_core.memory.arena import byte_buffer
from zrun_core.tiers.stored import Stored
from zrun_core.tiers.transfer import Transfer


class Home(Protocol):
    """Memory of one state of one unit.

    The verbs of one home take effect in the order of the calls: there is no need to wait for what
    `put` returns before the next one.
    """

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes on its tier."""
        ...

    def fetch(self) -> Transfer | None:
        """Begin to bring the values. Returns what to wait for; None: they are here."""
        ...

    def fetch_if_free(self, *, waits: bool = False) -> None:
        """Do what `fetch` does, or nothing where others have the memory for it.

        Args:
            waits: for what leaves memory that others have given back.
        """
        ...

    def at(self) -> torch.Tensor:
        """Return the memory in which they are used. Without `fetch`: room for new values.

        Views of it must be made anew when another tensor is returned.
        """
        ...

    def put(self) -> Transfer | None:
        """Begin to store what was written there. Returns what to wait for; None: it is done."""
        ...

    def drop(self) -> None:
        """Release the memory, as far as it is not the home itself.

        Other ranks may still read what they were sent from it: see `Comm.settle`.
        """
        ...

    def grow(self, num_bytes: int) -> None:
        """Become `num_bytes` large. Values that are there stay at the beginning; zeros follow."""
        ...

    def stored(self, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor | Stored:
        """Return bytes [start, stop) as they are stored, for another thread to read.

        Nothing is fetched. Whoever reads them has to be done before the next `put` or `store`.
        """
        ...


class InPlace:
    """The home of a state that is used where it lives: nothing moves."""

    __slots__ = ("_memory",)

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    def fetch(self) -> None:
        return None

    def fetch_if_free(self, *, waits: bool = False) -> None:
        pass

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

    def stored(self, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
        return self._memory.view(torch.uint8)[start:stop].view(dtype)


def fetch_now(home: Home) -> torch.Tensor:
    """Fetch the values of `home`, wait for them, and return them."""
    home.fetch()
    return home.at()
