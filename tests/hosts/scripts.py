"""A plain DDP script under `zrun run`, on the hosts of a rig or of an allocation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import faults
from rig import Rig

DDP = Path(__file__).with_name("plain_ddp.py")
ENDLESS = "1000000"


def start(rig: Rig, folder: Path, steps: str, *keys: str, by_ssh: bool = True) -> faults.Launch:
    """Begin to run the script with a rank on each host; its step is in `folder`/step."""
    folder.mkdir(exist_ok=True)
    hosts = [f"hosts={json.dumps(list(rig.hosts))}", f"launch.ssh={json.dumps(rig.ssh)}"]
    command = [
        *(sys.executable, "-m", "zrun", "run", "--ui", "plain", "--run-dir", "run"),
        *("--slots", "1", "device=cpu", "threads=1", "log.ranks=all"),
        *(hosts if by_ssh else ()),
        *keys,
        *(str(DDP), str(folder / "step"), steps),
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return faults.Launch(rig, folder, subprocess.Popen(command, cwd=folder, text=True, **quiet))


def wait_for_steps(launch: faults.Launch) -> None:
    step = launch.folder / "step"
    launch.wait_for(lambda: step.exists() and int(step.read_text() or 0) > 3, "step 4")
