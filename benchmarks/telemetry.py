"""What it costs to watch a run: events, sampling, launcher, trackers, and a frame of `zrun top`.

    python benchmarks/telemetry.py                     8 ranks, steps of 0.3 s, 5 rounds: 12 minutes
    python benchmarks/telemetry.py --rounds 1 --steps 10 --write

A step sleeps, so that what is left of its time, and all of its CPU time, is the runtime's. Three
ways take turns in each round:

    alone      the same ranks under torchrun: no agent, no launcher, nobody who listens
    watched    `zrun train`, with the panel's events and a sample of memory every 10 steps
    tracked    the same with the trackers csv and prometheus

`top` draws a simulated run of 256 ranks. `--write` puts the table into docs/performance.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from render import render
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from zrun.top.app import Position, as_terminal_gets, picture  # noqa: E402
from zrun.top.views import VIEWS  # noqa: E402
from zrun.watch.panel_layout import PanelSpace  # noqa: E402
from zrun.watch.recording import Recording  # noqa: E402
from zrun_core.spine.events import encode  # noqa: E402

PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- benchmarks/telemetry.py: begin -->", "<!-- benchmarks/telemetry.py: end -->"
WAYS = ("alone", "watched", "tracked")
WARMUP = 4  # steps
PATIENCE_S = 300.0
# The targets.
SHARE_OF_STEP, SHARE_OF_CORE, FRAME_MS = 0.005, 0.05, 30.0
TOP_RANKS, TOP_STEPS = 256, 300
SCREENS = ((80, 24), (140, 40), (200, 60))

CODE = """
import json, os, time
from pathlib import Path

import torch
from torch import nn

TIMES = []


class Net(nn.Module):
    def __init__(self, pause):
        super().__init__()
        self.pause = pause
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        time.sleep(self.pause)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def data():
    return torch.utils.data.TensorDataset(torch.ones(4096, 64))


def note(context):
    TIMES.append((time.perf_counter(), time.process_time()))
    if context.step in (MARKS[0], MARKS[1]):
        path = Path(os.environ["TELEMETRY_TIMES"]) / f"{context.step}-{os.environ['RANK']}.json"
        path.write_text(json.dumps(TIMES))
"""


@dataclass
class Run:
    """One launch.

    Attributes:
        steps_s: of rank 0.
        cpu_s: of each rank, per step.
        shares: of one core, by what takes it: launcher, agent, trackers.
    """

    steps_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.write:
        around(options.page)  # now, rather than when all is measured
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for number in range(options.rounds):
            for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                runs[way].append(run(way, folder / f"{number}-{way}", options))
                print(f"round {number + 1}, {way}: {describe(runs[way][-1])}", file=sys.stderr)
        frames = frames_of(folder / "top", options.frames)
    lines = [*table(runs, options.step_s), "", *frame_table(frames)]
    print("\n".join(lines))
    if options.write:
        write(options.page, markdown(runs, frames, options, arguments))
    return 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way")
    parser.add_argument("--steps", type=int, default=60, help="that are timed in each turn")
    parser.add_argument("--step-s", type=float, default=0.3, help="seconds that a step sleeps")
    parser.add_argument("--frames", type=int, default=40, help="of each view of top")
    parser.add_argument("--write", action="store_true", help="put the table into --page")
    parser.add_argument("--page", type=Path, default=PAGE, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name in ("ranks", "rounds", "steps", "frames"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: at least 1")
    return options


# Launches


def run(way: str, folder: Path, options: argparse.Namespace) -> Run:
    """Launch the ranks one way, and measure them and what is around them."""
    marks = WARMUP, WARMUP + options.steps
    folder.mkdir(parents=True)
    (folder / "code.py").write_text(CODE + f"\n\nMARKS = {marks}\n")
    job = {
        "name": "telemetry",
        "model": {"call": "code.py:Net", "args": {"pause": options.step_s}},
        "data": "code.py:data",
        "steps": marks[1] + 2,
        "batch": 2 * options.ranks,
        "slots": options.ranks,
        "device": "cpu",
        "threads": 1,
        "bind": "off",
        "zero": 1,
        "checkpoint": None,
        "hooks": {"on_step": "code.py:note"},
        "log": {"to": ["csv", "prometheus"] if way == "tracked" else []},
    }
    (folder / "job.yaml").write_text(
        "".join(f"{key}: {json.dumps(value)}\n" for key, value in job.items())
    )
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "ZRUN_ESTIMATE": "off",
        "TELEMETRY_TIMES": str(folder),
    }
    train = [sys.executable, "-m", "zrun", "train", "job.yaml", "--run-dir", "run", "--ui", "plain"]
    command = train
    if way == "alone":
        spec(folder, [*train, "steps=1"], environment, marks[1] + 2)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(options.ranks), "-m", "zrun_core", "run/spec.json"]
    with started(command, folder, environment) as process:
        wait_for(folder / f"{marks[0]}-0.json", process)
        before, began = cpu_of(process.pid), time.monotonic()
        wait_for(folder / f"{marks[1]}-0.json", process)
        after, ended = cpu_of(process.pid), time.monotonic()
        if process.wait(PATIENCE_S):
            raise SystemExit(f"{way}: {' '.join(command)} failed: see {folder}/log")
    found = Run()
    for rank in range(options.ranks):
        times = json.loads((folder / f"{marks[1]}-{rank}.json").read_text())[WARMUP - 1 :]
        walls, cpus = zip(*times, strict=True)
        found.cpu_s.append((cpus[-1] - cpus[0]) / (len(cpus) - 1))
        if rank == 0:
            found.steps_s = [b - a for a, b in itertools.pairwise(walls)]
    if way != "alone":
        found.shares = {name: (after[name] - before[name]) / (ended - began) for name in after}
    return found


def spec(folder: Path, train: list[str], environment: dict[str, str], steps: int) -> None:
    """Have `zrun train` write what ranks are given, in a run of one step, and lengthen that."""
    with started(train, folder, environment) as process:
        if process.wait(PATIENCE_S):
            raise SystemExit(f"{' '.join(train)} failed: see {folder}/log")
    path = folder / "run" / "spec.json"
    told = json.loads(path.read_text())
    told["job"]["steps"] = steps
    told["job"]["log"] = {"every": 1_000_000}
    told.pop("telemetry", None)
    path.write_text(json.dumps(told))


@contextmanager
def started(
    command: Sequence[str], folder: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    """Return once the ranks have come so far."""
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"no {path.name}: see {path.parent}/log")
        time.sleep(0.02)


def cpu_of(pid: int) -> dict[str, float]:
    """CPU seconds so far of a launcher and of what it started, but for the ranks."""
    launcher = psutil.Process(pid)
    found = {"launcher": _cpu(launcher), "agent": 0.0, "trackers": 0.0}
    for child in launcher.children(recursive=True):
        with suppress(psutil.Error):
            line = " ".join(child.cmdline())
            if "zrun.trackers" in line:
                found["trackers"] += _cpu(child)
            elif "zrun.agent.main" in line:
                found["agent"] += _cpu(child)
    return found


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


# Frames of top


def frames_of(folder: Path, count: int) -> dict[tuple[str, int, int], list[float]]:
    """Milliseconds of each frame of each view, at each size of a terminal."""
    recording = Recording(simulated(folder))
    while recording.read():
        pass
    console = Console(force_terminal=True, color_system="truecolor")
    found: dict[tuple[str, int, int], list[float]] = {}
    for width, height in SCREENS:
        for number, view in enumerate(VIEWS):
            room = PanelSpace(width, height)
            times = []
            for _ in range(count + 2):
                start = time.perf_counter()
                lines = picture(Position(view=number), recording, "running", room, None)
                as_terminal_gets(lines, console, room)
                times.append(1e3 * (time.perf_counter() - start))
            found[view.name, width, height] = times[2:]
    return found


def simulated(folder: Path) -> Path:
    """Write the record of a run of many ranks, one of which is slow."""
    folder.mkdir(parents=True)
    kinds = ("params", "grads", "optim", "rings", "buffers")
    planned = dict.fromkeys(kinds, 1 << 30)
    parts = ("data", "forward", "backward", "comm", "optim")
    with (folder / "events.jsonl").open("wb") as file:
        known = {"job": "gpt", "world_size": TOP_RANKS, "params": 10**9, "stage": 2}
        start = {"type": "start", "time": 0.0, "rank": 0, "total_steps": 10**4, **known}
        file.write(encode(start | {"planned_bytes": planned}) + b"\n")
        for number in range(1, TOP_STEPS + 1):
            told = {"time": float(number), "step": number, "split": dict.fromkeys(parts, 0.2)}
            step = {"type": "step", "rank": 0, "loss": 5.0 / number, "lr": 1e-3, "step_s": 1.0}
            step |= {"grad_norm": 1.0, "tokens_per_s": 1e6, "samples_per_s": 1e3, "tokens": 10}
            file.write(encode(told | step) + b"\n")
            if number % 10:
                continue
            for rank in range(TOP_RANKS):
                split = dict.fromkeys(parts, 0.2)
                if rank == 77:
                    split |= {"forward": 0.5, "comm": 0.0}
                held = {"type": "memory", "rank": rank, **planned, "rss_bytes": 5 << 30}
                held |= {"peak_rss_bytes": 6 << 30, "planned_bytes": 5 << 30}
                file.write(encode(told | held | {"split": split}) + b"\n")
    return folder


# Tables


def spread(values: Sequence[float], digits: str) -> str:
    """A median, and the extremes that it lies between."""
    middle = statistics.median(values)
    return f"{middle:{digits}} ({min(values):{digits}} to {max(values):{digits}})"


def describe(found: Run) -> str:
    shares = ", ".join(f"{name} {share:.2%}" for name, share in found.shares.items())
    step = 1e3 * statistics.median(found.steps_s)
    cpu = 1e3 * statistics.median(found.cpu_s)
    return f"step {step:.2f} ms, CPU {cpu:.2f} ms per rank and step" + (
        f", {shares}" if shares else ""
    )


def rows_of(runs: dict[str, list[Run]], step_s: float) -> list[list[str]]:
    """A row for each thing that is measured: each way, and what watching adds."""

    def medians(way: str, of: str) -> list[float]:
        return [1e3 * statistics.median(getattr(each, of)) for each in runs[way]]

    rows = []
    for name, of in (("step of rank 0, ms", "steps_s"), ("CPU of a rank in a step, ms", "cpu_s")):
        alone = statistics.median(medians("alone", of))
        cells = [name, *(spread(medians(way, of), ".2f") for way in WAYS)]
        for way in WAYS[1:]:
            more = statistics.median(medians(way, of)) - alone
            cells.append(f"{more:+.2f} ({more / (1e3 * step_s):+.2%})")
        rows.append([*cells, f"{SHARE_OF_STEP:.1%} of a step"])
    for name in ("launcher", "agent", "trackers"):
        cells = [f"{name}, share of a core", ""]
        cells += [spread([each.shares[name] for each in runs[way]], ".2%") for way in WAYS[1:]]
        rows.append([*cells, "", "", f"{SHARE_OF_CORE:.0%}" if name == "launcher" else ""])
    return rows


COLUMNS = ("", *WAYS, "watched adds", "tracked adds", "target")


def table(runs: dict[str, list[Run]], step_s: float) -> list[str]:
    return render(COLUMNS, rows_of(runs, step_s)).splitlines()


def frame_rows(frames: dict[tuple[str, int, int], list[float]]) -> list[list[str]]:
    names = list(dict.fromkeys(view for view, _, _ in frames))
    return [
        [view, *(spread(frames[view, *size], ".1f") for size in SCREENS), f"{FRAME_MS:.0f}"]
        for view in names
    ]


FRAME_COLUMNS = (
    f"frame of top, {TOP_RANKS} ranks, ms",
    *(f"{width} x {height}" for width, height in SCREENS),
    "target",
)


def frame_table(frames: dict[tuple[str, int, int], list[float]]) -> list[str]:
    return render(FRAME_COLUMNS, frame_rows(frames)).splitlines()


def markdown(
    runs: dict[str, list[Run]],
    frames: dict[tuple[str, int, int], list[float]],
    options: argparse.Namespace,
    arguments: Sequence[str] | None,
) -> str:
    """Both tables, and how they were made."""
    command = " ".join(["python benchmarks/telemetry.py", *(arguments or sys.argv[1:])])
    day = time.strftime("%d %B %Y").lstrip("0")
    load = os.getloadavg()[0]
    head = (
        f"`{command}`, {day}, {os.cpu_count()} cores, load {load:.1f} at the end: {options.ranks} "
        f"ranks,\n{options.rounds} rounds of {options.steps} steps; medians, and the extremes of "
        "rounds or frames."
    )
    tables = [
        *_pipes(COLUMNS, rows_of(runs, options.step_s)),
        "",
        *_pipes(FRAME_COLUMNS, frame_rows(frames)),
    ]
    return "\n".join([head, "", *tables])


def _pipes(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def around(page: Path) -> tuple[str, str]:
    """What is before and after the tables of a page, with its marks.

    Raises:
        ValueError: it does not have both marks once.
    """
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{page} must have {BEGIN} and {END} once")
    return text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]


def write(page: Path, text: str) -> None:
    """Put `text` between the two marks of a page."""
    head, tail = around(page)
    page.write_text(f"{head}\n\n{text}\n\n{tail}")


if __name__ == "__main__":
    sys.exit(main())
