"""The GPUs of this machine, by the library of whichever driver is here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from zrun.topology import amd, nvml
from zrun.topology.boards import Monitor, Reading
from zrun.topology.nvml_health import NvmlMonitor
from zrun.topology.nvml_source import NotKnown


def read_machine() -> Reading:
    """Return the GPUs of this machine; none where no driver answers."""
    found = nvml.read_machine()
    if found.devices:
        return found
    other = amd.read_machine()
    if other.devices or found.trouble is None:
        return other
    return found


@contextmanager
def drivers_open() -> Iterator[None]:
    """Keep the libraries open in between: to open one may take seconds."""
    with ExitStack() as opened:
        with suppress(NotKnown):
            opened.enter_context(nvml.library())
        with suppress(amd.NotThere):
            opened.enter_context(amd.library())
        yield


@contextmanager
def monitor(uuids: Iterable[str]) -> Iterator[Monitor | None]:
    """Watch these GPUs of this machine; None where no driver answers."""
    wanted = frozenset(uuids)
    with ExitStack() as opened:
        found: Monitor | None = None
        with suppress(NotKnown):
            source = opened.enter_context(nvml.library())
            found = NvmlMonitor(source, wanted)
        if found is None or not found.health():
            with suppress(amd.NotThere):
                found = amd.AmdMonitor(opened.enter_context(amd.library()), wanted)
        yield found
