"""The GPUs of this machine, by the library of whichever driver is here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from zrun.topology import nvml
from zrun.topology.boards import Monitor, Reading
from zrun.topology.nvml_health import NvmlMonitor
from zrun.topology.nvml_source import NotKnown


def read_machine() -> Reading:
    """Return the GPUs of this machine; none where no driver answers."""
    return nvml.read_machine()


@contextmanager
def drivers_open() -> Iterator[None]:
    """Keep the libraries open in between: to open one may take seconds."""
    try:
        with nvml.library():
            yield
    except NotKnown:
        yield


@contextmanager
def monitor(uuids: Iterable[str]) -> Iterator[Monitor | None]:
    """Watch these GPUs of this machine; None where no driver answers."""
    try:
        with nvml.library() as source:
            yield NvmlMonitor(source, uuids)
    except NotKnown:
        yield None
