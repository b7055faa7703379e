"""Kill a run at random places, resume it each time, and compare it with one left alone.

    python benchmarks/kill_resume.py jobs/stdlib-gpt.yaml steps=60 checkpoint.every=10 --kills 6

A rank, the agent and the launcher take turns; each is killed with SIGKILL after a random number of
further steps and a random part of a step. Equal are the losses of all steps, and every byte of the
last checkpoint: parameters, masters, optimizer, random streams.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from zrun_core.checkpoint.folder import CheckpointFolder
from zrun_core.checkpoint.step_index import open_index

VICTIMS = ("rank", "agent", "launcher")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", help="job file")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dice = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="zrun-kill-") as scratch:
        alone, killed = Path(scratch) / "alone", Path(scratch) / "killed"
        command = [
            sys.executable,
            "-m",
            "zrun",
            "train",
            options.job,
            *options.overrides,
            "--ui",
            "none",
        ]
        start = time.monotonic()
        subprocess.run([*command, "--run-dir", str(alone)], check=True)
        print(f"alone: {len(losses(alone))} steps in {time.monotonic() - start:.0f} s")
        resume = [*command, "--run-dir", str(killed), "--resume", "auto"]
        total = max(losses(alone))
        for number in range(options.kills):
            victim = VICTIMS[number % len(VICTIMS)]
            before = max(losses(killed), default=0)
            after = dice.randint(before + 1, max(before + 1, before + (total - before) // 3))
            code, step = kill(resume, killed, victim, after, dice.random())
            print(
                f"killed the {victim} in step {step + 1}: exit code {code}; saved so far: "
                f"{steps(killed)}"
            )
        subprocess.run(resume, check=True)
        same_losses = losses(killed) == losses(alone)
        ours, theirs = digest(killed), digest(alone)
        print(f"losses of {total} steps: {'equal' if same_losses else 'DIFFERENT'}")
        print(
            f"last checkpoint: alone {theirs[:16]}, killed {ours[:16]}: "
            f"{'equal' if ours == theirs else 'DIFFERENT'}"
        )
        sys.exit(not (same_losses and ours == theirs))


def kill(command: list[str], run: Path, victim: str, after: int, part: float) -> tuple[int, int]:
    """(exit code of the launcher, last step that it recorded).

    Kills in the step that follows `after`.
    """
    known = len(events(run))
    launcher = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while launcher.poll() is None:
        told = events(run)
        known = 0 if len(told) < known else known  # it has saved nothing before, and started over
        new = [event["step"] for event in told[known:] if event["type"] == "step"]
        if new and max(new) >= after:
            break
        time.sleep(0.01)
    own = psutil.Process(launcher.pid)
    workers = [
        each for each in own.children(recursive=True) if "zrun_core.train.worker" in each.cmdline()
    ]
    agent = workers[0].parent()
    assert agent is not None
    time.sleep(part * 0.5)  # anywhere in a step, a save or an evaluation
    chosen = {"rank": workers[-1], "agent": agent, "launcher": own}[victim]
    chosen.send_signal(signal.SIGKILL)
    code = launcher.wait()
    psutil.wait_procs([agent, *workers], timeout=60)
    return code, max(losses(run), default=0)


def events(run: Path) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def losses(run: Path) -> dict[int, float]:
    """By step; one that was made again counts as it was made last."""
    return {event["step"]: event["loss"] for event in events(run) if event["type"] == "step"}


def steps(run: Path) -> list[int]:
    return [found.step for found in CheckpointFolder(run / "checkpoints").scan() if found.manifest]


def digest(run: Path) -> str:
    """Sha256 over the digests of all fragments of the newest step, in a fixed order."""
    newest = CheckpointFolder(run / "checkpoints").scan()[0]
    assert newest.manifest is not None, newest.problem
    fragments = open_index(newest.path, newest.manifest).fragments()
    lines = sorted(f"{f.tensor} {f.state} {f.start} {f.stop} {f.digest}" for f in fragments)
    return hashlib.sha256("\n".join([str(newest.step), *lines]).encode()).hexdigest()


if __name__ == "__main__":
    main()
