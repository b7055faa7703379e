"""A movement of bytes between tiers that is under way."""

from __future__ import annotations

from typing import Protocol

from zrun_core.distributed.transport import Work


class Transfer(Work, Protocol):
    """Bytes on their way to another tier, or from it.

    Source and target must stay as they are until it is over. It is a `Work`, so that more may
    follow it: see `distributed/handle.py`.
    """

    def is_completed(self) -> bool:
        """Return whether it is over, well or badly, without waiting."""
        ...

    def wait(self) -> None:
        """Return when what this thread gives to the device from now on may use both memories.

        On CUDA the current stream waits, and this thread does not.

        Raises:
            Exception: of the transfer, which has failed.
        """
        ...

    def wait_on_host(self) -> None:
        """Return when the bytes have arrived: this thread may read the target.

        Raises:
            Exception: of the transfer, which has failed.
        """
        ...


class _Done:
    """A transfer that has nothing left to do."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def wait_on_host(self) -> None:
        pass


DONE: Transfer = _Done()
