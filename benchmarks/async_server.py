"""The asynchronous parameter server beside the ring and the synchronous one.

`python benchmarks/async_server.py`.

Each run trains a small GPT on the main job's data for the same time, with and without one rank
slowed threefold. Passes pause, so that ranks are like devices of their own however few cores there
are: what takes time is the pause, the messages and the updates. Losses on held-out text are
compared after the same samples and after the same seconds of training, which are those of steps
alone.

Runs are appended to a file as they end, and those that it has are not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from render import render

HERE = Path(__file__).resolve().parent
METHODS: dict[str, dict[str, Any]] = {
    "stage 0": {},
    "server": {"sync": "server"},
    "async, 2": {"sync": "async_server", "staleness": 2},
    "async, any": {"sync": "async_server", "staleness": "any"},
}
MODEL = {"flavour": "llama", "vocab_size": 256, "dim": 64, "depth": 2, "heads": 4, "seq_len": 64}
EVERY = 20  # steps between evaluations


@dataclass(frozen=True)
class Case:
    """One run."""

    method: str
    ranks: int
    slowed: float
    seconds: float
    lr: float
    seed: int

    def job(self, pause_s: float) -> dict[str, Any]:
        text = {"call": "zrun_core.data.text:text"}
        args = {"paths": "stdlib", "seq_len": MODEL["seq_len"]}
        return {
            "name": "paced",
            "model": {
                "call": "paced_gpt.py:Paced",
                "args": {**MODEL, "pause_s": pause_s, "slowed": self.slowed},
            },
            "data": {**text, "args": {**args, "split": "train"}, "shuffle": True},
            "steps": 100_000,
            "batch": {"global": 16, "micro": 16 // self.ranks},
            "slots": self.ranks,
            "device": "cpu",
            "threads": 1,
            "seed": self.seed,
            "optim": {"name": "adamw", "lr": self.lr, "betas": [0.9, 0.95], "clip": 1.0},
            "lr": {"schedule": "constant", "warmup": 20},
            "eval": {
                "data": {**text, "args": {**args, "split": "val"}},
                "every": EVERY,
                "samples": 128,
                "first": True,
            },
            "hooks": {"on_step": "paced_gpt.py:end_in_time"},
            "log": {"every": 1000},
            **METHODS[self.method],
        }


def run(case: Case, pause_s: float) -> dict[str, Any]:
    """Train `case` by the command line; its curve, and the staleness of its pushes."""
    with tempfile.TemporaryDirectory(prefix="zrun-async-") as name:
        folder = Path(name)
        shutil.copy(HERE / "paced_gpt.py", folder)
        keys = case.job(pause_s)
        (folder / "job.yaml").write_text(
            "".join(f"{k}: {json.dumps(v)}\n" for k, v in keys.items())
        )
        command = [sys.executable, "-m", "zrun", "train", "job.yaml", "--ui", "none"]
        environment = os.environ | {
            "SECONDS_TO_TRAIN": str(case.seconds),
            "ZRUN_ESTIMATE": "off",
        }
        done = subprocess.run(
            [*command, "--run-dir", "run"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{case}: {done.stderr}")
        lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return summary([json.loads(line) for line in lines])


def summary(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The curve of a run, as (step, seconds of training, held-out loss), and its staleness."""
    seconds = 0.0
    curve: list[tuple[int, float, float]] = []
    staleness: Counter[int] = Counter()
    for event in events:
        match event["type"]:
            case "step":
                seconds += event["step_s"]
            case "eval":
                curve.append((event["step"], seconds, float(event["loss"])))
            case "pushes":
                staleness += Counter({int(k): n for k, n in event["staleness"].items()})
    steps = max(event["step"] for event in events if event["type"] == "step")
    return {
        "curve": curve,
        "steps_per_s": steps / seconds,
        "staleness": sorted(staleness.items()),
    }


def at_step(record: dict[str, Any], step: int) -> float:
    """The held-out loss of the last evaluation up to a step."""
    return float([loss for at, _, loss in record["curve"] if at <= step][-1])


def at_second(record: dict[str, Any], second: float) -> float:
    """The held-out loss of the last evaluation up to some seconds of training."""
    return float([loss for _, at, loss in record["curve"] if at <= second][-1])


def rows_of(records: dict[Case, dict[str, Any]]) -> list[list[str]]:
    """A row for each run; runs with the same ranks and slowness are compared with each other."""
    rows = []
    setups = dict.fromkeys((case.ranks, case.slowed, case.lr, case.seed) for case in records)
    for setup in setups:
        group = {
            case: record
            for case, record in records.items()
            if (case.ranks, case.slowed, case.lr, case.seed) == setup
        }
        step = min(record["curve"][-1][0] for record in group.values())
        second = min(record["curve"][-1][1] for record in group.values())
        for case, record in group.items():
            late = Counter(dict(record["staleness"]))
            mean = sum(k * n for k, n in late.items()) / max(1, late.total())
            rows.append(
                [
                    f"{case.ranks}" + (f", one slowed {case.slowed:g}x" if case.slowed > 1 else ""),
                    case.method,
                    f"{record['steps_per_s']:.2f}",
                    *(
                        f"{at_step(record, step * part // 4 // EVERY * EVERY):.3f}"
                        for part in (2, 4)
                    ),
                    f"{step}",
                    *(f"{at_second(record, second * part / 4):.3f}" for part in (2, 4)),
                    f"{second:.0f}",
                    f"{mean:.1f}, {max(late)}" if late else "",
                ]
            )
    return rows


COLORS = {"stage 0": "#777777", "server": "#0072B2", "async, 2": "#E69F00", "async, any": "#009E73"}
WIDTH, HEIGHT, MARGIN = 420, 240, 46  # of a picture, and around its axes


def picture(records: dict[Case, dict[str, Any]]) -> str:
    """Held-out loss over steps, and beside it over seconds of training, a row for each setup."""
    setups = list(dict.fromkeys((case.ranks, case.slowed) for case in records))
    losses = [loss for record in records.values() for _, _, loss in record["curve"]]
    low, high = min(losses), max(losses)
    shapes = []
    for row, (ranks, slowed) in enumerate(setups):
        of_setup = {
            case.method: record["curve"]
            for case, record in records.items()
            if (case.ranks, case.slowed) == (ranks, slowed)
        }
        title = f"{ranks} ranks" + (f", one slowed {slowed:g}x" if slowed > 1 else "")
        for column, unit in enumerate(("steps of 16 samples", "s")):
            most = max(point[column] for curve in of_setup.values() for point in curve)
            left, top = column * WIDTH + MARGIN, row * HEIGHT + MARGIN
            wide, tall = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
            shapes += [
                f'<rect x="{left}" y="{top}" width="{wide}" height="{tall}" fill="none" '
                'stroke="#999999"/>',
                f'<text x="{left}" y="{top - 8}" font-weight="600">{title}</text>',
                f'<text x="{left - 4}" y="{top + 10}" text-anchor="end">{high:.1f}</text>',
                f'<text x="{left - 4}" y="{top + tall}" text-anchor="end">{low:.1f}</text>',
                f'<text x="{left + wide}" y="{top + tall + 14}" text-anchor="end">'
                f"{most:.0f} {unit}</text>",
            ]
            for method, curve in of_setup.items():
                points = " ".join(
                    f"{left + wide * point[column] / most:.1f},"
                    f"{top + tall * (high - point[2]) / (high - low):.1f}"
                    for point in curve
                )
                shapes.append(
                    f'<polyline points="{points}" fill="none" stroke="{COLORS[method]}" '
                    'stroke-width="1.5"/>'
                )
    for number, (name, color) in enumerate(COLORS.items()):
        at = MARGIN + number * 110
        y = len(setups) * HEIGHT + 8
        shapes.append(f'<rect x="{at}" y="{y - 9}" width="10" height="10" fill="{color}"/>')
        shapes.append(f'<text x="{at + 15}" y="{y}">{name}</text>')
    size = f'viewBox="0 0 {2 * WIDTH} {len(setups) * HEIGHT + 20}"'
    style = 'font-family="system-ui, sans-serif" font-size="12"'
    back = '<rect width="100%" height="100%" fill="#fff"/>'
    shown = "\n".join([back, *shapes])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{shown}</svg>\n'


HEAD = [
    "ranks",
    "method",
    "steps/s",
    "loss at half",
    "and all samples",
    "steps",
    "loss at half",
    "and all time",
    "s",
    "late: mean, most",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run")
    parser.add_argument("--pause", type=float, default=0.08, help="seconds of a pass")
    parser.add_argument("--slowed", type=float, nargs="+", default=[1.0, 3.0])
    parser.add_argument("--lr", type=float, nargs="+", default=[4e-3])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--out", type=Path, default=Path("async_server.jsonl"))
    parser.add_argument("--svg", type=Path, help="picture of the curves")
    args = parser.parse_args()
    known: dict[Case, dict[str, Any]] = {}
    if args.out.exists():
        for line in args.out.read_text().splitlines():
            record = json.loads(line)
            known[Case(**record.pop("case"))] = record
    cases = [
        Case(method, ranks, slowed, args.seconds, lr, seed)
        for seed in range(args.seeds)
        for ranks in args.ranks
        for slowed in args.slowed
        for lr in args.lr
        for method in args.methods
    ]
    for case in cases:
        if case not in known:
            known[case] = run(case, args.pause)
            with args.out.open("a") as file:
                file.write(json.dumps({"case": asdict(case), **known[case]}) + "\n")
    chosen = {case: known[case] for case in cases}
    print(render(HEAD, rows_of(chosen)))
    if args.svg is not None:
        args.svg.write_text(picture(chosen))


if __name__ == "__main__":
    main()
