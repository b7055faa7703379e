"""zrun against a hand-written loop on one CUDA device.

GPT-2 of 124M and 1.5B parameters, bf16, blocks compiled.

    python benchmarks/gpu.py                                     under 6 minutes, with compilation
    python benchmarks/gpu.py --sizes 1.5b --batch 8 --rounds 3
    python benchmarks/gpu.py --device cpu --sizes tiny --eager   a test of the harness, without GPU

Needs torch >= 2.11 and pydantic; zrun need not be installed. `gpu_loops.py` states what each loop
does and holds. Every line that is printed is one JSON object, flushed at once and appended to
`--json`, so that a run that is cut off keeps what it has; a table of the results follows. MFU
counts 6 FLOPs per weight of a matrix product and token, and causal attention at half of the full
square, against the dense bf16 peak that the vendor states.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from render import render

SIZES = ("124m", "1.5b")
OUT_OF_MEMORY = 42  # exit code of a child: try a smaller batch
_SHARE = {"124m": 0.4}  # of the time that is left, at most
_LEAST_RATIO, _LEAST_MFU = 0.98, 0.45  # of zrun; the second for 1.5b on a Hopper


def main() -> int:
    """One child process per size: a device's memory is clean again when its process ends."""
    options = parse()
    if options.child:
        return child(options)
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured")
        return 0
    options.json.unlink(missing_ok=True)
    deadline = time.monotonic() + options.seconds
    for size in options.sizes.split(","):
        run_size(size, options, deadline)
    lines = (
        [json.loads(line) for line in options.json.read_text().splitlines()]
        if options.json.exists()
        else []
    )
    results = [line for line in lines if line["event"] == "result"]
    print(f"\n{table(results)}")
    return int({line["size"] for line in results} != set(options.sizes.split(",")))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default=",".join(SIZES), help="some of 124m, 1.5b, tiny")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each loop")
    parser.add_argument(
        "--batch",
        type=int,
        help="sequences per step (default: 32 or 16; halved if memory runs out)",
    )
    parser.add_argument("--seconds", type=float, default=340.0, help="for everything")
    parser.add_argument(
        "--peak", type=float, help="dense bf16 TFLOP/s of the device, if it is not known by name"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument(
        "--json", type=Path, default=Path("bench-gpu.jsonl"), help="where the lines go"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := set(options.sizes.split(",")) - {*SIZES, "tiny"}:
        parser.error(f"no size {', '.join(sorted(unknown))}")
    return options


def run_size(size: str, options: argparse.Namespace, deadline: float) -> None:
    """Run the child of one size, with smaller batches if need be."""
    batch = options.batch
    while True:
        left = (deadline - time.monotonic()) * (
            _SHARE.get(size, 1.0) if "," in options.sizes else 1.0
        )
        if left < 20:
            print(
                json.dumps({"size": size, "event": "skipped", "why": "no time is left"}), flush=True
            )
            return
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--child",
            "--sizes",
            size,
            "--rounds",
            str(options.rounds),
            "--seconds",
            str(left - 5),
            "--device",
            options.device,
            "--json",
            str(options.json),
            *(["--batch", str(batch)] if batch else []),
            *(["--peak", str(options.peak)] if options.peak else []),
            *(["--eager"] if options.eager else []),
        ]
        try:
            code = subprocess.run(command, timeout=left, check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
        if code != OUT_OF_MEMORY:
            if code:
                print(json.dumps({"size": size, "event": "failed", "exit_code": code}), flush=True)
            return
        batch = last_batch(options.json, size) // 2
        if not batch:
            print(
                json.dumps({"size": size, "event": "failed", "why": "one sequence is too much"}),
                flush=True,
            )
            return


def last_batch(path: Path, size: str) -> int:
    """The batch of the last child of `size`."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return int(
        [line["batch"] for line in lines if line["event"] == "start" and line["size"] == size][-1]
    )


def child(options: argparse.Namespace) -> int:
    """Compare the loops on one size."""
    import torch
    from gpu_loops import MODELS, Comparison, gemm_tflops

    from zrun_core.hardware.catalogue import peak_flops  # beside gpu_loops, which finds it

    deadline = time.monotonic() + options.seconds
    size = options.sizes
    cuda = options.device == "cuda"
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    batch = options.batch or MODELS[size].batch
    peak = options.peak and options.peak * 1e12
    start: dict[str, Any] = {
        "size": size,
        "event": "start",
        "batch": batch,
        "torch": torch.__version__,
    }
    if cuda:
        torch.cuda.set_device(device)
        name = torch.cuda.get_device_name(device)
        peak = peak or peak_flops(name, "bf16")
        total = torch.cuda.get_device_properties(device).total_memory
        start |= {
            "device": name,
            "total_gib": round(total / 2**30, 1),
            "cuda": torch.version.cuda,
            "peak_tflops": peak and peak / 1e12,
            "gemm_tflops": round(gemm_tflops(device), 1),
        }

    def emit(line: dict[str, Any]) -> None:
        text = json.dumps(line | {"time": time.strftime("%Y-%m-%dT%H:%M:%S")})
        print(text, flush=True)
        with options.json.open("a") as file:
            file.write(text + "\n")

    emit(start)
    try:
        comparison = Comparison(size, batch, device, not options.eager, emit)
        comparison.run(options.rounds, deadline)
    except torch.OutOfMemoryError as error:
        emit(
            {
                "size": size,
                "event": "out of memory",
                "batch": batch,
                "why": str(error).splitlines()[0],
            }
        )
        return OUT_OF_MEMORY
    for line in comparison.results(peak):
        emit(line)
    return 0


def table(results: list[dict[str, Any]]) -> str:
    """One row per size and loop; the verdict is on zrun."""
    columns = (
        "size",
        "loop",
        "ms/step",
        "by rounds",
        "tokens/s",
        "TFLOP/s",
        "MFU",
        "x torch",
        "range",
        "peak GiB",
        "state GiB",
        "max|dL|",
        "verdict",
    )
    rows = [
        [
            line["size"],
            line["loop"],
            f"{line['ms']:.1f}",
            f"{line['ms_range'][0]:.1f}-{line['ms_range'][1]:.1f}",
            f"{line['tokens_per_s']:.0f}",
            f"{line['tflops']:.1f}",
            f"{line['mfu']:.1%}" if line["mfu"] else "",
            f"{line['ratio']:.3f}",
            f"{line['ratio_range'][0]:.3f}-{line['ratio_range'][1]:.3f}",
            f"{line['peak_gib']:.1f}",
            f"{line['state_gib']:.1f}",
            f"{line['max_loss_difference']:.1e}",
            verdict(line),
        ]
        for line in results
    ]
    return render(columns, rows)


def verdict(line: dict[str, Any]) -> str:
    """Whether zrun meets its targets in this line; nothing about other loops."""
    if line["loop"] != "zrun":
        return ""
    met = line["ratio"] >= _LEAST_RATIO and (
        line["size"] != "1.5b" or (line["mfu"] or 0) >= _LEAST_MFU
    )
    return "must" if met else "MISSED"


if __name__ == "__main__":
    sys.exit(main())
