"""Draw the streams of a step as a timeline: what is beside what, by the order of the host.

    python benchmarks/timeline.py                    docs/timeline.svg: three minutes

Two ranks train a GPT of 470 million parameters on simulated GPUs, whose large kernels do nothing: a
trace is all that is wanted. It is replayed with the rates of two L40S, as the planner knows them: a
kernel taking as long as its bytes or its products need. So the picture shows order and waits, which
are zrun's, and lengths, which are assumed. Nothing in it is a measurement of a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "simulated_gpu"))

import simulated_gpu  # noqa: E402
from simulated_gpu.replay import HOST, Rates, Span, replay  # noqa: E402

from zrun_core.hardware.simulated import parse_simulate  # noqa: E402

RANKS = 2
SETTINGS = {"devices": RANKS, "races": 0, "poison": 0, "most_bytes": 1 << 16, "stall_s": 60}
SHAPE = {"vocab_size": 32_000, "dim": 2048, "depth": 8, "heads": 16, "seq_len": 2048}
MICRO, ACCUMULATION = 4, 1
STEPS = 3  # the last one is traced
PLANS: dict[str, dict[str, Any]] = {
    "ZeRO-3": {"zero": 3},
    "ZeRO-2": {"zero": 2},
    "ZeRO-2, optimizer on the host": {
        "zero": 2,
        "offload": {"optimizer": "host", "grad": "device"},
    },
    "ZeRO-2, optimizer and gradients on the host": {
        "zero": 2,
        "offload": {"optimizer": "host", "grad": "host"},
    },
}


def main() -> None:
    """Trace each plan, and draw all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "timeline.svg")
    parser.add_argument("--plan", help="of a rank of this script's own")
    options = parser.parse_args()
    if options.plan:
        json.dump(trace_of(PLANS[options.plan]), sys.stdout)
        sys.stdout.flush()
        os._exit(0)
    panels = []
    for name in PLANS:
        spans = replay(in_ranks(name), rates())
        panels.append((name, spans))
        print(f"{name}: {summary(spans)}")
    options.out.write_text(drawn(panels), encoding="utf-8")
    print(options.out)


def rates() -> Rates:
    """Return those of two L40S, which have PCIe between them."""
    machine = parse_simulate(f"{RANKS}xL40S")
    device = machine.device
    return Rates(
        flops=device.peak["bf16"] * device.gemm,
        memory=device.bandwidth * device.streaming,
        link=machine.intra.bandwidth,
        up=machine.host.bandwidth,
        down=machine.host.bandwidth,
        host=machine.host_bandwidth / machine.devices_per_node,
        launch_s=device.launch_s,
        ranks=RANKS,
    )


# A rank


def trace_of(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Train, and return the trace of the last step."""
    import torch

    import zrun_core
    from zrun_core.models.gpt import gpt

    zrun_core.init(device="cuda", threads=1)
    torch.manual_seed(0)
    model = zrun_core.shard(lambda: gpt(**SHAPE), precision="bf16", **plan)
    optimizer = zrun_core.optimizer(model, "adamw", lr=1e-4, clip=1.0)
    tokens = torch.zeros(MICRO, SHAPE["seq_len"], dtype=torch.long, device="cuda")

    def step() -> None:
        for _ in range(ACCUMULATION):
            model(input_ids=tokens, labels=tokens).backward()
        optimizer.step()

    for _ in range(STEPS - 1):
        step()
    torch.cuda.synchronize()
    with marked_tasks(), simulated_gpu.trace() as found:
        step()
    return found


@contextmanager
def marked_tasks() -> Iterator[None]:
    """Have the trace tell what runs in the thread that updates, and who waits for it."""
    from zrun_core.tiers import worker

    numbers = count()
    submit = worker.Worker.submit
    wait = worker._Task.wait

    def submit_marked(own: Any, task: Any) -> Any:
        number = next(numbers)
        simulated_gpu.mark("submit", number)

        def marked() -> None:
            simulated_gpu.mark("begin", number)
            task()
            simulated_gpu.mark("end", number)

        made = submit(own, marked)
        made.number = number
        return made

    def wait_marked(own: Any) -> None:
        wait(own)
        if hasattr(own, "number"):  # else it is of before the trace
            simulated_gpu.mark("join", own.number)

    with (
        patch.object(worker.Worker, "submit", submit_marked),
        patch.object(worker._Task, "wait", wait_marked),
    ):
        yield


def in_ranks(plan: str) -> list[dict[str, Any]]:
    """Return the trace of rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = simulated_gpu.environment(**SETTINGS) | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
    }
    with tempfile.TemporaryFile("w+") as said:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--plan", plan],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=said if rank == 0 else subprocess.DEVNULL,
            )
            for rank in range(RANKS)
        ]
        try:
            codes = [rank.wait(timeout=300) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise SystemExit(f"{plan}: ranks ended with {codes}")
        said.seek(0)
        found: list[dict[str, Any]] = json.load(said)
        return found


# What is said of it

LANES = ("computes", "gathers", "reduces", "to the host", "to the device", "the host updates")
KINDS = {
    "forward": "#4c78a8",
    "backward": "#72b7b2",
    "update": "#f58518",
    "gather": "#54a24b",
    "reduction": "#e45756",
    "copy": "#b279a2",
}


def lane(span: Span) -> str:
    """Return the row that a span is drawn in."""
    if span.stream == HOST:
        return "the host updates"
    if span.name.startswith("nccl:"):
        return "gathers" if "GATHER" in span.name else "reduces"
    if span.link == "down":
        return "to the host"
    if span.link == "up":
        return "to the device"
    return "computes"


def kind(span: Span) -> str:
    """Return what a span is for, which has a colour."""
    row = lane(span)
    if row == "gathers":
        return "gather"
    if row == "reduces":
        return "reduction"
    if row in ("to the host", "to the device"):
        return "copy"
    if row == "the host updates" or "/optim/" in span.line or "optimizer" in span.line:
        return "update"
    return "backward" if "Backward" in span.line else "forward"


def busy(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Return the times in which one of the spans lasts."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted((span.begin, span.end) for span in spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def overlap(some: Sequence[Span], others: Sequence[Span]) -> float:
    """Return the share of the time of `some` in which `others` last too."""
    total = sum(end - begin for begin, end in busy(some))
    both = sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for begin, end in busy(some)
        for other_begin, other_end in busy(others)
    )
    return both / total if total else 1.0


def _seconds(spans: Sequence[Span], row: str) -> float:
    return sum(end - begin for begin, end in busy([span for span in spans if lane(span) == row]))


def summary(spans: Sequence[Span]) -> str:
    """Return the length of the step, and how much of each row is beside computation."""
    by_lane = {name: [span for span in spans if lane(span) == name] for name in LANES}
    computes = by_lane["computes"]
    parts = [f"{1e3 * max(span.end for span in spans):.1f} ms"]
    parts += [
        f"{name} {1e3 * sum(end - begin for begin, end in busy(own)):.1f} ms, "
        f"{overlap(own, computes):.0%} beside computation"
        for name, own in by_lane.items()
        if name != "computes" and _seconds(spans, name) > 1e-4
    ]
    return "; ".join(parts)


# The picture

_WIDTH, _LEFT, _ROW, _GAP = 1100, 130, 18, 34


def drawn(panels: Sequence[tuple[str, list[Span]]]) -> str:
    """Return an SVG with a panel below the other, all at one scale."""
    longest = max(span.end for _, spans in panels for span in spans)
    scale = (_WIDTH - _LEFT - 10) / longest
    parts, top = [], 10
    for name, spans in panels:
        rows = [row for row in LANES if _seconds(spans, row) > longest / 1000]
        parts.append(f'<text x="8" y="{top + 13}" font-weight="600">{escape(name)}</text>')
        top += 22
        for number, row in enumerate(rows):
            y = top + number * _ROW
            parts.append(f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{row}</text>')
            parts.append(
                f'<rect x="{_LEFT}" y="{y + 2}" width="{longest * scale:.1f}" '
                f'height="{_ROW - 3}" fill="#8883" />'
            )
            parts += _bars([span for span in spans if lane(span) == row], scale, y)
        top += len(rows) * _ROW + _GAP - 22
    x = _LEFT
    for label, colour in KINDS.items():
        parts.append(f'<rect x="{x}" y="{top}" width="12" height="12" fill="{colour}" />')
        parts.append(f'<text x="{x + 17}" y="{top + 11}">{label}</text>')
        x += 100
    parts.append(
        f'<text x="{_WIDTH - 10}" y="{top + 11}" text-anchor="end">'
        f"{1e3 * longest:.0f} ms from end to end</text>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top + 24}" '
        'font-family="system-ui, sans-serif" font-size="12">'
        '<rect width="100%" height="100%" fill="#fff" />' + "\n".join(parts) + "</svg>\n"
    )


def _bars(spans: Sequence[Span], scale: float, y: int) -> list[str]:
    """Return a bar for each run of spans of a kind, with less than a tenth of a pixel between."""
    runs: list[list[Any]] = []  # kind, begin, end
    for span in sorted(spans, key=lambda each: each.begin):
        name = kind(span)
        is_next = runs and runs[-1][0] == name and (span.begin - runs[-1][2]) * scale < 0.1
        if is_next:
            runs[-1][2] = max(runs[-1][2], span.end)
        else:
            runs.append([name, span.begin, span.end])
    return [
        f'<rect x="{_LEFT + begin * scale:.2f}" y="{y + 2}" '
        f'width="{max(0.15, (end - begin) * scale - 0.3):.2f}" height="{_ROW - 3}" '
        f'fill="{KINDS[name]}" />'
        for name, begin, end in runs
    ]


if __name__ == "__main__":
    main()
