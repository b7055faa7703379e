"""Models whose optimizer does not fit on one GPU, beside what its links and its host can do.

    python benchmarks/gpu_offload.py                       under 8 minutes on one CUDA device
    python benchmarks/gpu_offload.py --cases ceilings,7b   some cases
    python benchmarks/gpu_offload.py --smoke               a test of the harness, without GPU

    ceilings   matrix products, copies, the host's memory and AdamW by threads, the disk
    7b         optimizer and gradients on the host, 16k tokens per step; each schedule
    split      the largest model that device and host hold together; a fraction on the host
    torchao    7b with CPUOffloadOptimizer, where torchao is installed: bf16 states, no masters
    deepspeed  7b with ZeRO-2 and its optimizer on the host, where DeepSpeed is installed

`--smoke` runs everything but the calls of CUDA, with host memory apart from the device's.

Every printed line is one JSON object, flushed at once and appended to `--json`; a table follows. A
case is a process of its own and ends when its time is over. The roofline of a schedule is what its
steps would take at the measured ceilings. TFLOP/s count the model's operations without those
that are repeated. Needs torch >= 2.11, pydantic and xxhash.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from render import render

# Seconds that a case may take.
CASES = {"ceilings": 60.0, "7b": 160.0, "split": 170.0, "torchao": 60.0, "deepspeed": 120.0}
_LEAST_OF_ROOFLINE, _LEAST_TFLOPS, _MOST_SLACK = 0.80, 220.0, 0.03


def main() -> int:
    """Run each case in a process of its own: a device's memory is clean again when it ends."""
    options = parse()
    if options.child:
        return child(options)
    import torch

    if not options.smoke and not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured")
        return 0
    options.json.unlink(missing_ok=True)
    deadline = time.monotonic() + options.seconds
    failed = [case for case in options.cases.split(",") if not run_case(case, options, deadline)]
    print(f"\n{table(read_lines(options.json))}")
    return int(bool(failed))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES), help="of: " + ", ".join(CASES))
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each schedule")
    parser.add_argument("--seconds", type=float, default=460.0, help="for everything")
    parser.add_argument(
        "--dir", type=Path, default=Path(tempfile.gettempdir()), help="a folder of the disk"
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    parser.add_argument(
        "--json", type=Path, default=Path("bench-gpu-offload.jsonl"), help="where the lines go"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := set(options.cases.split(",")) - CASES.keys():
        parser.error(f"no case {', '.join(sorted(unknown))}: there are {', '.join(CASES)}")
    return options


def run_case(case: str, options: argparse.Namespace, deadline: float) -> bool:
    """Run the child of a case; return whether it ended well, or had nothing to do."""
    seconds = min(CASES[case], deadline - time.monotonic())
    if seconds < 20:
        emit(options.json, {"case": case, "event": "skipped", "why": "no time is left"})
        return False
    command = [sys.executable, str(Path(__file__).resolve()), "--child", "--cases", case]
    command += ["--steps", str(options.steps), "--seconds", str(seconds - 5)]
    command += ["--dir", str(options.dir), "--json", str(options.json)]
    command += ["--smoke"] if options.smoke else []
    # As zrun starts its workers: memory that is reserved follows what is allocated.
    environment = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    try:
        code = subprocess.run(command, timeout=seconds, check=False, env=environment).returncode
    except subprocess.TimeoutExpired:
        code = -1
    if code:
        emit(options.json, {"case": case, "event": "failed", "exit_code": code})
    return code == 0


def child(options: argparse.Namespace) -> int:
    """Measure one case."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # zrun without installing it
    import gpu_offload_cases

    case = options.cases
    ceilings = [line for line in read_lines(options.json) if line["case"] == "ceilings"]

    def tell(line: dict[str, Any]) -> None:
        emit(options.json, {"case": case, **line})

    bench = gpu_offload_cases.Bench(options, ceilings[0] if ceilings else {}, tell)
    try:
        gpu_offload_cases.RUN[case](bench)
    except ImportError as error:
        tell({"event": "skipped", "why": str(error)})
    return 0


def emit(path: Path, line: dict[str, Any]) -> None:
    """Print a line, and keep it."""
    text = json.dumps(line | {"time": time.strftime("%Y-%m-%dT%H:%M:%S")})
    print(text, flush=True)
    with path.open("a") as file:
        file.write(text + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines that were kept so far."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(lines: list[dict[str, Any]]) -> str:
    """One row per case and schedule; the verdict is on zrun."""
    columns = (
        "case",
        "schedule",
        "parameters",
        "on host",
        "s/step",
        "range",
        "TFLOP/s",
        "of roofline",
        "peak GiB",
        "slack",
        "retries",
        "verdict",
    )
    rows = [
        [
            line["case"],
            line["schedule"],
            f"{line['params'] / 1e9:.2f}B",
            f"{line['fraction']:.0%}",
            f"{line['step_s']:.3f}",
            f"{line['step_s_range'][0]:.3f}-{line['step_s_range'][1]:.3f}",
            f"{line['tflops']:.1f}",
            f"{line['of_roofline']:.0%}" if line["of_roofline"] else "",
            f"{line['peak_gib']:.1f}",
            f"{line['slack']:.1%}",
            str(line["retries"]),
            verdict(line),
        ]
        for line in lines
        if line.get("event") == "result"
    ]
    return render(columns, rows)


def verdict(line: dict[str, Any]) -> str:
    """Return which targets a line of zrun misses; nothing about others."""
    if line["case"] in ("torchao", "deepspeed"):
        return ""
    missed = {
        "roofline": (line["of_roofline"] or 0) < _LEAST_OF_ROOFLINE,
        "TFLOP/s": line["tflops"] < _LEAST_TFLOPS,
        "slack": line["slack"] > _MOST_SLACK,
        "retries": line["retries"] > 0,
    }
    names = ", ".join(name for name, is_so in missed.items() if is_so)
    return f"MISSED {names}" if names else "met"


if __name__ == "__main__":
    sys.exit(main())
