"""Calls of NVML that may fail, made of the driver's library or of a scenario in its place."""

from __future__ import annotations

from typing import Any, Protocol

GPU_IS_LOST = 15  # of nvml.h


class NotKnown(Exception):  # noqa: N818
    """A call failed. `code` is NVML's, or None where the binding itself could not make it."""

    def __init__(self, code: int | None) -> None:
        super().__init__(code)
        self.code = code


class MachineSource(Protocol):
    """The library, or a scenario in its place."""

    def call(self, name: str, *arguments: Any) -> Any:
        """Return the answer of the function of this name.

        Raises:
            NotKnown: there is none.
        """


def ask(source: MachineSource, name: str, *arguments: Any) -> Any | None:
    """The answer, or None where it is not known."""
    try:
        return source.call(name, *arguments)
    except NotKnown:
        return None
