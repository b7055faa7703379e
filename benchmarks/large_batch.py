"""LAMB and AdamW on the main job at 8 times the batch and an eighth of the steps.

`python benchmarks/large_batch.py`.

All runs see the same samples in the same order. The rate at batch 8 is each optimizer's own, from a
sweep at batch 8 (`--sweep`); from there on one rule holds for both: the rate times sqrt(8) (You et
al. 2020, section 4) or times 8 (Goyal et al. 2017), and warm-up over the same samples. The last
loss on held-out text is compared, as mean and extremes over seeds. `--steps` says how long all of
them train.

Runs are appended to a file as they end, and those that it has are not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from render import render

ROOT = Path(__file__).resolve().parents[1]
GROWTH = 8
BASE_LR = {"adamw": 1.5e-3, "lamb": 1e-2}
MODELS: dict[str, list[str]] = {
    "main": [],
    "short": [
        "model.args={flavour: llama, vocab_size: 256, dim: 128, depth: 3, heads: 4, seq_len: 128}",
        "data.args.seq_len=128",
        "eval.data.args.seq_len=128",
    ],
}
STEPS = {"main": 300, "short": 320}


@dataclass(frozen=True)
class Case:
    """One run: an optimizer at a batch and a rate."""

    model: str
    optimizer: str
    batch: int
    lr: float
    seed: int
    samples: int
    ranks: int

    @property
    def steps(self) -> int:
        return self.samples // self.batch

    def overrides(self) -> list[str]:
        return [
            *MODELS[self.model],
            f"slots={self.ranks}",
            f"steps={self.steps}",
            f"batch.global={self.batch}",
            f"batch.micro={min(self.batch // self.ranks, 16)}",
            f"lr.warmup={max(1, self.steps // 10)}",
            f"optim.name={self.optimizer}",
            f"optim.lr={self.lr:g}",
            *(
                ["optim.betas=[0.9,0.95]"]
                if self.optimizer == "adamw"
                else ["optim.betas=[0.9,0.98]"]
            ),
            f"seed={self.seed}",
            "eval.every=null",
            "eval.first=false",
            "hooks.on_eval=null",
        ]


RULES: dict[str, Callable[[float], float]] = {"sqrt": math.sqrt, "linear": float}


def cases(args: argparse.Namespace, samples: int, rates: dict[str, float]) -> list[Case]:
    """Small batch, then the large one, for both optimizers.

    All rates follow from those at batch 8 by the rule.
    """
    return [
        Case(
            args.model,
            optimizer,
            batch,
            round(lr * RULES[args.rule](batch / 8), 6),
            seed,
            samples,
            args.ranks,
        )
        for seed in range(args.seeds)
        for batch in (args.batch, args.batch * GROWTH)
        for optimizer, lr in rates.items()
    ]


def sweep(args: argparse.Namespace, samples: int, rates: dict[str, float]) -> list[Case]:
    """Each optimizer's rates at batch 8, of which the best is to be given as its own."""
    factors = (1.0, 2.0, 0.5, 4.0)
    return [
        Case(args.model, name, 8, lr * factor, 0, samples, args.ranks)
        for factor in factors
        for name, lr in rates.items()
    ]


def run(case: Case) -> dict[str, Any]:
    """Train `case` by the command line. The last held-out loss, and seconds of training."""
    with tempfile.TemporaryDirectory(prefix="zrun-large-batch-") as folder:
        zrun = [
            sys.executable,
            "-m",
            "zrun",
            "train",
            str(ROOT / "jobs" / "stdlib-gpt.yaml"),
            *case.overrides(),
        ]
        done = subprocess.run(
            [*zrun, "--run-dir", f"{folder}/run", "--ui", "none"],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
        if done.returncode:
            raise SystemExit(f"{case}: exit code {done.returncode}\n{done.stderr}")
        events = [
            json.loads(line)
            for line in (Path(folder) / "run" / "events.jsonl").read_text().splitlines()
        ]
    by_type = {event["type"]: event for event in events}
    return {**asdict(case), "loss": by_type["eval"]["loss"], "seconds": by_type["end"]["total_s"]}


def table(records: list[dict[str, Any]]) -> str:
    groups: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for record in records:
        key = record["model"], record["samples"], record["batch"], record["optimizer"], record["lr"]
        groups[key].append(record["loss"])
    rows = []
    for (model, samples, batch, optimizer, lr), losses in sorted(groups.items()):
        rows.append(
            [
                f"{model} {optimizer}",
                str(batch),
                str(samples // batch),
                f"{lr:.3g}",
                f"{statistics.mean(losses):.3f}",
                f"{min(losses):.3f} to {max(losses):.3f}",
                str(len(losses)),
            ]
        )
    return render(["", "batch", "steps", "lr", "held-out loss", "over seeds", "seeds"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--model", choices=MODELS, default="short", help="the main job's model, or a small one"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--rule", choices=RULES, default="sqrt", help="what the rate is multiplied by"
    )
    parser.add_argument("--batch", type=int, default=8, help="the small batch")
    parser.add_argument(
        "--ranks", type=int, default=2, help="of each run; --batch 1 takes --ranks 1"
    )
    parser.add_argument("--steps", type=int, help="at batch 8; fewer, where the batch is larger")
    for name, lr in BASE_LR.items():
        parser.add_argument(
            f"--{name}", type=float, default=lr, metavar="LR", help=f"its rate at batch 8; {lr:g}"
        )
    parser.add_argument(
        "--sweep", action="store_true", help="the rates at batch 8 instead: times 1, 2, 1/2 and 4"
    )
    parser.add_argument(
        "--record",
        type=Path,
        default=Path("large-batch.jsonl"),
        help="file of the runs that are made",
    )
    parser.add_argument("--runs", type=int, default=1000, help="make at most so many runs")
    args = parser.parse_args()
    if args.batch % args.ranks:
        parser.error(f"--batch {args.batch} cannot be divided by --ranks {args.ranks}")
    lines = args.record.read_text().splitlines() if args.record.exists() else []
    records = [json.loads(line) for line in lines]
    made = {Case(**{key: record[key] for key in Case.__dataclass_fields__}) for record in records}
    rates = {name: getattr(args, name) for name in BASE_LR}
    samples = 8 * (args.steps or STEPS[args.model])
    wanted = sweep(args, samples, rates) if args.sweep else cases(args, samples, rates)
    for case in [case for case in wanted if case not in made][: args.runs]:
        records.append(run(case))
        with args.record.open("a") as file:
            file.write(json.dumps(records[-1]) + "\n")
    print(table(records))


if __name__ == "__main__":
    main()
