"""The agent on the launcher's host reports that the launcher was killed."""

from __future__ import annotations

import time
from pathlib import Path

from zrun.runs import listing
from zrun.runs.run_lock import last_holder, ownerless
from zrun.runs.rundir import write_exit, write_failure


def report_killed_launcher(run_dir: Path) -> None:
    """Write `failure.json` and `exit.json` in the launcher's place.

    Nothing is written if the run's last launcher was on another machine, or left one of them.

    Raises:
        OSError: they cannot be written.
    """
    step = listing.read_run(run_dir).step
    with ownerless(run_dir) as is_free:  # a launcher that goes on with the run waits meanwhile
        holder = last_holder(run_dir)
        has_told = any((run_dir / name).exists() for name in ("failure.json", "exit.json"))
        if not is_free or has_told or holder is None or not holder.is_here:
            return
        after = f"after step {step}" if step else "before the first step ended"
        advice = (
            "find out who sent SIGKILL, or whether that host ran out of memory; continue from "
            "the last checkpoint with --resume auto"
        )
        report = {
            "host": holder.host,
            "step": step,
            "exit_code": None,
            "kind": "launcher",
            "message": f"the launcher, process {holder.pid} on {holder.host}, was killed {after}",
            "what_to_do": advice,
            "time": time.time(),
        }
        write_failure(run_dir, report)
        write_exit(run_dir, None)
