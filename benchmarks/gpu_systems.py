"""zrun at each ZeRO stage beside DDP, FSDP2 and a plain loop, on all GPUs of this machine or one.

    make bench-gpu                                                the same as
    python benchmarks/gpu_systems.py                              1.5B parameters, all GPUs
    python benchmarks/gpu_systems.py --write                      put the table into the docs, too
    python benchmarks/gpu_systems.py --ranks 2 --size 124m --rounds 5
    python benchmarks/gpu_systems.py --systems ddp,zrun3 --eager

Each system runs in processes of its own, one per GPU, and systems take turns, forwards in one
round and backwards in the next; the plain loop has one GPU to itself. All train one GPT-2 from the
same first values on the same tokens, in bf16 with gradients that are summed in fp32, clipping and
AdamW in fused calls, with every block compiled: `gpu_rank.py` states what each does. Every line
that is printed is one JSON object, appended to `--json` at once, so that a run that is cut off
keeps what it has. `--show FILE` prints the table of such a file again.

A system that fails, or does not end, is a row that says so, and the others go on. Of
1.5B parameters DDP holds 28 GB of states on each GPU: below 80 GB write `--size 124m`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from render import render

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "performance.md"
BEGIN, END = "<!-- make bench-gpu: begin -->", "<!-- make bench-gpu: end -->"
BATCH = {"1.5b": 8, "124m": 32, "tiny": 2}  # by size, sequences per rank and step
SYSTEMS = {
    "plain": "plain loop, one GPU",
    "ddp": "DDP",
    "fsdp2-z2": "FSDP2, no reshard",
    "fsdp2-z3": "FSDP2, reshard",
    **{f"zrun{stage}": f"zrun ZeRO-{stage}" for stage in range(4)},
}
LOOK = "look"  # what the machine is, and what a product of matrices reaches on it
SIMULATED = "Simulated GPU"
_END_S = 15.0  # that ranks have to end by themselves when another one has failed
_COLUMNS = (
    "",
    "GPUs",
    "ms/step",
    "range",
    "ratio to {base}",
    "range",
    "tokens/s per GPU",
    "of peak FLOP/s",
    "peak GiB",
    "reserved GiB",
    "max|dL|",
)
# Of others, on other machines and with another model: never to be divided by what is measured here.
PUBLISHED = (
    "For orientation, **published by torchtitan, not measured here**: Llama 3.1 8B with FSDP2 and "
    "`torch.compile`, bf16, sequences of 8192, selective activation checkpointing, 2 sequences per "
    "GPU, on 8 H100 with 96 GB of HBM2e and a limit of 500 W: 6667 tokens/s per GPU and 77.0 GiB "
    "(5762 and 82.4 without `torch.compile`), 33 to 39 % of the peak by its own count, which takes "
    "989 TFLOP/s and attention without the half that a causal mask saves "
    "([its table](https://github.com/pytorch/torchtitan/blob/main/benchmarks/"
    "llama3_h100_202412_torchtitan.md), December 2024). Another model, and another machine: only "
    "shares of the peak can be put side by side."
)

Record = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What the ranks of one run are asked to do; crosses to them as JSON."""

    system: str
    size: str
    ranks: int
    batch: int  # sequences per rank and step
    warmup: int  # steps whose losses are compared, and which are not timed
    steps: int
    compiled: bool
    store: str  # a file, by which the ranks meet


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write it where that is asked for."""
    options = parse(arguments)
    if options.show is not None:
        print(render_table(read(options.show)))
        return 0
    seen = look(options)
    if "error" in seen:
        print(f"nothing was measured: {seen['error']}", file=sys.stderr)
        return 1
    if options.write and seen["device"] == SIMULATED:
        print(f"--write: {SIMULATED}s have no speed; nothing was measured", file=sys.stderr)
        return 2
    if options.write:
        around(options.page)  # now, rather than when all is measured
    options.json.unlink(missing_ok=True)
    ranks = options.ranks or seen["devices"]
    if ranks > seen["devices"]:
        print(f"--ranks {ranks}: there are {seen['devices']} GPUs", file=sys.stderr)
        return 2
    command = " ".join(["python benchmarks/gpu_systems.py", *(arguments or sys.argv[1:])])
    emit(options.json, seen | {"event": "start", "ranks": ranks, "command": command})
    for number in range(options.rounds):
        began = time.monotonic()
        systems = options.systems if number % 2 == 0 else options.systems[::-1]
        for system in systems:
            found = run(request_of(system, ranks, options), options.timeout)
            emit(options.json, found | {"event": "run", "system": system, "round": number})
        options.seconds -= time.monotonic() - began
        if options.seconds < 1.2 * (time.monotonic() - began):
            break
    lines = read(options.json)
    print(f"\n{render_table(lines)}")
    runs = [line for line in lines if line["event"] == "run"]
    if options.write:
        if not any("ms" in line for line in runs):
            print("--write: no run came to its end", file=sys.stderr)
            return 1
        write(options.page, markdown(lines))
    return int(any("error" in line for line in runs))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, help="GPUs (default: all of this machine)")
    parser.add_argument("--size", choices=list(BATCH), default="1.5b")
    parser.add_argument(
        "--systems",
        type=lambda text: text.split(","),
        default=list(SYSTEMS),
        help=f"some of {','.join(SYSTEMS)}",
    )
    parser.add_argument("--batch", type=int, help=f"sequences per GPU and step (default: {BATCH})")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each system")
    parser.add_argument("--steps", type=int, default=20, help="that are timed in each turn")
    parser.add_argument("--warmup", type=int, default=4, help="steps before them, with compilation")
    parser.add_argument("--seconds", type=float, default=1500.0, help="for everything")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for one turn")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--json", type=Path, default=Path("bench-gpu-systems.jsonl"))
    parser.add_argument("--show", type=Path, help="print the table of such a file")
    parser.add_argument("--write", action="store_true", help="put the table into --page")
    parser.add_argument("--page", type=Path, default=PAGE, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.systems if name not in SYSTEMS]:
        parser.error(f"no system {', '.join(unknown)}")
    for name in ("rounds", "steps", "warmup"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: at least 1")
    return options


def request_of(system: str, ranks: int, options: argparse.Namespace) -> Request:
    return Request(
        system,
        options.size,
        1 if system in ("plain", LOOK) else ranks,
        options.batch or BATCH[options.size],
        options.warmup,
        options.steps,
        compiled=not options.eager,
        store="",
    )


def look(options: argparse.Namespace) -> Record:
    """What the machine is. In a process of its own: one that has asked keeps memory of GPUs."""
    return run(request_of(LOOK, 1, options), options.timeout)


# Runs


def run(request: Request, timeout_s: float) -> Record:
    """Run a system once. The record has `error` if it failed."""
    with tempfile.TemporaryDirectory(prefix="zrun-bench-") as name:
        folder = Path(name)
        path = folder / "request.json"
        path.write_text(json.dumps(asdict(request) | {"store": str(folder / "store")}))
        logs = [folder / f"rank-{rank}.log" for rank in range(request.ranks)]
        ranks = [_start(path, rank, log) for rank, log in enumerate(logs)]
        error = _wait(ranks, time.monotonic() + timeout_s)
        failed = [rank for rank, process in enumerate(ranks) if process.returncode]
        if error or failed:
            # Who was ended by a signal of ours says nothing of why.
            first = min(failed, key=lambda rank: ranks[rank].returncode < 0, default=0)
            return {"error": error or f"rank {first}: {_last_error(logs[first])}"}
        found = [
            json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(len(logs))
        ]
    return found[0] if request.system == LOOK else of_ranks(found)


def _start(request: Path, rank: int, log: Path) -> subprocess.Popen[bytes]:
    # The allocator of all of them holds what tensors take, as zrun's launcher has it.
    given = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} | os.environ
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, str(HERE / "gpu_rank.py"), str(request), str(rank)],
            env=given,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(ranks: Sequence[subprocess.Popen[bytes]], deadline: float) -> str:
    """Wait until all have ended; those that do not are ended. What went wrong, or nothing."""
    try:
        while any(process.poll() is None for process in ranks):
            if any(process.returncode for process in ranks):
                deadline = min(deadline, time.monotonic() + _END_S)
            if time.monotonic() > deadline:
                return "" if any(process.returncode for process in ranks) else "it did not end"
            time.sleep(0.05)
        return ""
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()


def _last_error(log: Path) -> str:
    """The line of a log that says what went wrong."""
    lines = log.read_text(errors="replace").strip().splitlines()
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["it said nothing"])[-1].strip()[:300]


def of_ranks(ranks: Sequence[Record]) -> Record:
    """One record of all ranks: the slowest one's times, the mean of losses, the most memory."""
    times = [max(each) for each in zip(*(rank["times"] for rank in ranks), strict=True)]
    losses = zip(*(rank["losses"] for rank in ranks), strict=True)
    return {
        "ranks": len(ranks),
        "ms": 1e3 * statistics.median(times),
        "times": times,
        "losses": [statistics.mean(each) for each in losses],
        **{key: max(rank[key] for rank in ranks) for key in ("allocated", "reserved")},
        **{key: ranks[0][key] for key in ("tokens", "flops_per_token", "params")},
    }


def emit(path: Path, line: Record) -> None:
    text = json.dumps(line | {"time": time.strftime("%Y-%m-%dT%H:%M:%S")})
    print(text, flush=True)
    with path.open("a") as file:
        file.write(text + "\n")


def read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Tables


def rows_of(lines: Iterable[Record]) -> tuple[str, list[list[str]], list[str]]:
    """The system that ratios are to, a row for each that has run, and what has failed."""
    start, *others = lines
    runs: dict[str, list[Record]] = {name: [] for name in SYSTEMS}
    for line in others:
        runs[line["system"]].append(line)
    base = "plain" if start["ranks"] == 1 else "ddp"
    bases = {record["round"]: record for record in runs[base] if "ms" in record}
    rows, failures = [], []
    for system, records in runs.items():
        good = [record for record in records if "ms" in record]
        bad = [record for record in records if "error" in record]
        if good:
            rows.append([SYSTEMS[system], *cells(good, bases, start["peak_flops"])])
        if bad:
            where = f"{len(bad)} of {len(records)} rounds"
            failures.append(f"{SYSTEMS[system]} failed in {where}: {bad[-1]['error']}")
    return SYSTEMS[base].partition(",")[0], rows, failures


def cells(
    records: Sequence[Record], bases: Mapping[int, Record], peak_flops: float | None
) -> list[str]:
    """The figures of a system in all rounds; ratios are taken inside each round."""
    times = [record["ms"] for record in records]
    pairs = [(record, bases[record["round"]]) for record in records if record["round"] in bases]
    ratios = [record["ms"] / base["ms"] for record, base in pairs]
    differences = [
        abs(ours - theirs)
        for record, base in pairs
        if record["ranks"] == base["ranks"]
        for ours, theirs in zip(record["losses"], base["losses"], strict=True)
    ]
    rate = records[0]["tokens"] / statistics.median(times) * 1e3
    return [
        str(records[0]["ranks"]),
        f"{statistics.median(times):.1f}",
        f"{min(times):.1f}-{max(times):.1f}",
        f"{statistics.median(ratios):.3f}" if ratios else "",
        f"{min(ratios):.3f}-{max(ratios):.3f}" if ratios else "",
        f"{rate:.0f}",
        f"{rate * records[0]['flops_per_token'] / peak_flops:.1%}" if peak_flops else "",
        f"{max(record['allocated'] for record in records) / 2**30:.2f}",
        f"{max(record['reserved'] for record in records) / 2**30:.2f}",
        f"{max(differences):.1e}" if differences else "",
    ]


def describe(lines: Sequence[Record]) -> str:
    """One paragraph: on what, and how it was measured."""
    start, runs = lines[0], [line for line in lines if "ms" in line]
    toolkit = f", CUDA {start['cuda']}" if start["cuda"] else ""
    text = (
        f"{start['time'][:10]}, {start['devices']} x {start['device']} with "
        f"{start['total_gib']:.0f} GiB, torch {start['torch']}{toolkit}; a product of matrices in "
        f"bf16 reaches {start['gemm_tflops']:.3g} TFLOP/s here"
    )
    if start["peak_flops"]:
        text += f", and {start['peak_flops'] / 1e12:.0f} by its vendor"
    if runs:
        text += (
            f". GPT-2 of {runs[0]['params'] / 1e6:.1f} million parameters, {runs[0]['tokens']} "
            f"tokens per GPU and step, turns of each system: "
            f"{1 + max(line['round'] for line in runs)}"
        )
    return f"{text}. `{start['command']}`"


def render_table(lines: Sequence[Record]) -> str:
    """The table as text."""
    base, rows, failures = rows_of(lines)
    columns = [column.format(base=base) for column in _COLUMNS]
    return "\n\n".join([describe(lines), render(columns, rows), *failures])


def markdown(lines: Sequence[Record]) -> str:
    """The table as the docs have it."""
    base, rows, failures = rows_of(lines)
    columns = [column.format(base=base).replace("|", r"\|") for column in _COLUMNS]
    table = [columns, ["---"] * len(columns), *rows]
    text = "\n".join(f"| {' | '.join(row)} |" for row in table)
    return "\n\n".join([describe(lines), text, *failures, PUBLISHED])


def around(page: Path) -> tuple[str, str]:
    """What is before and after the table of a page, with its marks.

    Raises:
        ValueError: it does not have each of them once.
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
