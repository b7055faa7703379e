"""Train a model whose states are several times the memory that it may take.

    make bigger-than-memory                              366 million parameters, 1 GiB, 20 steps
    python benchmarks/bigger_than_memory.py --depth 48 --limit 800MiB --steps 3

Three runs of the same job:

    refused      within the limit, with all states in memory: exit code 3, and what would train
    within       within the limit, with all states on a disk
    unlimited    with all states in memory, and no limit: the losses are the same to the bit

The limit is a memory cgroup around the launcher and everything that it starts, where this user can
make one, and RLIMIT_DATA of each process elsewhere. RLIMIT_AS would not do: a unit has addresses of
its own all the time, and memory only while it is gathered.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # zrun without installing it

import yaml

from zrun_core.sizes import format_size, parse_size

_CGROUPS = Path("/sys/fs/cgroup")
# fp32 gradient, master and two moments, and the parameter in bf16.
_BYTES_PER_PARAM = 18


class Run(NamedTuple):
    """The outcome of a run.

    Attributes:
        peak: bytes of the rank, without those of files: these fill what a cgroup has left.
        page: what came of it, with curves.
    """

    name: str
    code: int
    seconds: float
    losses: list[float]
    peak: int
    num_params: int
    text: str
    page: Path


class Limit:
    """A limit on the memory of a command and all that it starts."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.group = _make_group(num_bytes)

    @property
    def kind(self) -> str:
        return "RLIMIT_DATA" if self.group is None else "memory cgroup"

    def enter(self) -> None:
        """Put this process under the limit; called between fork and exec."""
        if self.group is None:
            resource.setrlimit(resource.RLIMIT_DATA, (self.num_bytes, self.num_bytes))
        else:
            (self.group / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        if self.group is not None:
            self.group.rmdir()


def _make_group(num_bytes: int) -> Path | None:
    """Return a new cgroup with this limit, of version 1 or 2; None where none can be made."""
    for parent, key in ((_CGROUPS / "memory", "limit_in_bytes"), (_CGROUPS, "max")):
        group = parent / f"zrun-bigger-{os.getpid()}"
        try:
            group.mkdir()
            (group / f"memory.{key}").write_text(str(num_bytes))
        except OSError:
            if group.is_dir():
                group.rmdir()
            continue
        return group
    return None


@contextmanager
def limited(num_bytes: int) -> Iterator[Limit]:
    """Have a limit inside."""
    limit = Limit(num_bytes)
    try:
        yield limit
    finally:
        limit.remove()


def main() -> int:
    """Run all, print a table, and return 0 if everything is as it should be."""
    options = parse()
    folder = options.dir or Path(tempfile.mkdtemp(prefix="zrun-bigger-", dir=Path.cwd()))
    folder.mkdir(parents=True, exist_ok=True)
    job = make_job(options)
    (folder / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
    away = ["offload=disk", "offload.param=disk"]
    within_limit = [f"limits.memory={options.limit}"]

    with limited(options.limit) as limit:
        refused = run("refused", folder, within_limit, limit)
        within = run("within", folder, [*away, *within_limit], limit)
        kind = limit.kind
    unlimited = run("unlimited", folder, [])

    states = unlimited.num_params * _BYTES_PER_PARAM
    print(
        f"{unlimited.num_params / 1e6:.0f}M parameters, {format_size(states)} of states, "
        f"{states / options.limit:.1f} times {format_size(options.limit)} ({kind})"
    )
    print(f"{'run':10} {'exit':>4} {'seconds':>8} {'peak':>10}  last loss")
    for each in (refused, within, unlimited):
        last = f"{each.losses[-1]:.6f}" if each.losses else "-"
        peak = format_size(each.peak)
        print(f"{each.name:10} {each.code:>4} {each.seconds:>8.1f} {peak:>10}  {last}")
    print(f"\n{refused.text.strip()}\n")
    facts = {
        "refused with exit code 3": refused.code == 3,
        "the refusal says what trains": "offload" in refused.text,
        "all steps within the limit": within.code == 0 and len(within.losses) == options.steps,
        "the peak is below the limit": within.peak < options.limit,
        "the losses have the same bits": bool(within.losses) and within.losses == unlimited.losses,
    }
    for fact, is_so in facts.items():
        print(f"{'yes' if is_so else 'NO '}  {fact}")
    print(f"\nmemory, transfers and losses of the run within the limit: {within.page}")
    return 0 if all(facts.values()) else 1


def make_job(options: argparse.Namespace) -> dict[str, Any]:
    """Return a small GPT of many blocks, so that each unit is a small part of it."""
    model = {
        "flavour": "gpt2",
        "vocab_size": 1024,
        "dim": 512,
        "depth": options.depth,
        "heads": 8,
        "seq_len": 64,
    }
    return {
        "name": "bigger",
        "model": {"call": "zrun_core.models.gpt:gpt", "args": model},
        "data": {
            "call": "zrun_core.data.text:text",
            "args": {"paths": "stdlib", "seq_len": 64},
        },
        "steps": options.steps,
        "batch": {"global": 2, "micro": 2},
        "precision": "bf16",
        "zero": {"stage": 3, "bucket": "2MiB"},
        "init": "meta",
        "slots": 1,
        "activations": {"checkpoint": "full"},
        "log": {"every": 1},
    }


def run(name: str, folder: Path, changes: list[str], limit: Limit | None = None) -> Run:
    """Run the job in a process of its own.

    Args:
        folder: has the job; the states lie on its disk.
        limit: on the memory of all processes of the run; None: none.
    """
    run_dir = folder / name
    zrun_train = [sys.executable, "-m", "zrun", "train", "job.yaml"]
    command = [*zrun_train, "--run-dir", str(run_dir), *changes]
    enter: Callable[[], None] | None = None if limit is None else limit.enter
    start = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=enter,
        check=False,
    )
    seconds = time.perf_counter() - start
    events = [json.loads(line) for path in run_dir.glob("events.jsonl") for line in path.open()]
    losses = [each["loss"] for each in events if each["type"] == "step"]
    started = [each for each in events if each["type"] == "start"]
    peak = max((each.get("peak_rss_bytes") or 0 for each in events), default=0)
    num_params = started[0]["params"] if started else 0
    page = run_dir / "report.html"
    return Run(name, done.returncode, seconds, losses, peak, num_params, done.stdout, page)


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--depth", type=int, default=116, help="blocks of 3.2 million parameters")
    parser.add_argument("--limit", type=parse_size, default="1GiB", help="memory that it may take")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dir", type=Path, help="folder on the disk for the states")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
