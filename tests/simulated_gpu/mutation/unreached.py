"""Waits at which no scenario waits, each by name (`Site.name`), with what else has it."""

from __future__ import annotations

from mutation.sites import Site

_PRUNED = "waits for a thread that removes older steps: tests/dist/checkpoint/test_saves.py has it"
_PROCESS = "waits for a process that has been ended: tests of those who start it have it"

REASONS: dict[str, str] = {
    "checkpoint/checkpointer.py Checkpointer.open: self._pruner.wait()": _PRUNED,
    "checkpoint/pruner.py Pruner.wait: wait(self._pending)": _PRUNED,
    "library/device_check.py _messages: run._comm.all_reduce(values, scratch, world, tag=0, "
    "name=...": "of `zrun doctor --gpu`, which test_boards.py runs",
    "plan/trace/trace_process.py _ask: process.wait()": _PROCESS,
    "spine/tracker_process.py TrackerProcess.end: self._process.wait()": _PROCESS,
    "train/async_windows.py AsyncWindows.run: self._comm.read(message)": (
        "trains on CPUs, where a number is there: `zrun/placement/late_updates.py` refuses GPUs"
    ),
    "zero/passes/stale_units.py StaleUnits.begin_pass: unit.param.wait_for_unshard()": (
        "for compiled blocks, which the simulated device has not"
    ),
}


def reason(site: Site) -> str:
    """Return why no scenario waits at a site; "" if there is no reason."""
    return REASONS.get(site.name, "")
