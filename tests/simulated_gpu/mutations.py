"""Print the table of mutations: each wait of the runtime is taken out, and something notices.

    python tests/simulated_gpu/mutations.py                           all of them
    python tests/simulated_gpu/mutations.py zero/passes/gather.py:89  those of a file, or of a line
    python tests/simulated_gpu/mutations.py --write                   all, and docs/gpu-waits.md

Exits with 1 if nothing notices that a wait is gone. Where no scenario waits,
`mutation/unreached.py` says why.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "dist"), str(HERE.parents[1])]

import simulated_gpu  # noqa: E402
from simulated_gpu import build  # noqa: E402

DELAYS = {"delay_us": 300, "delay_share": 0.3}  # of kernels; the rest is in mutation/disturbed.py


def main() -> int:
    """Print the table; return the exit code."""
    from mutation import page
    from mutation.scenarios import SCENARIOS
    from mutation.table import Row, Table

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=[""], help="of a file's name, or of FILE:LINE")
    parser.add_argument(
        "--scenario", action="append", help="of the name, in place of all of them; may be repeated"
    )
    parser.add_argument("--json", type=Path, help="file for the rows, by name of the wait")
    parser.add_argument("--write", action="store_true", help="write docs/gpu-waits.md; of all")
    options = parser.parse_args()
    if options.write and (options.parts != [""] or options.scenario):
        parser.error("--write is about all waits and scenarios: leave out those that you name")
    rows: list[Row] = []
    table = Table(options.scenario or SCENARIOS.keys())
    try:
        table.undisturbed()
        for row in table.rows(options.parts):
            rows.append(row)
            print(row.text, flush=True)
    finally:
        table.close()
    if options.json is not None:
        options.json.write_text(json.dumps({row.site.name: row._asdict() for row in rows}))
    if options.write:
        page.PAGE.write_text(page.page(rows), encoding="utf-8")
        print(f"written: {page.PAGE}")
    noticed = sum(bool(row.scenario) for row in rows)
    unreached = sum(bool(row.reason) for row in rows)
    print(f"{noticed} of {len(rows)} waits are noticed; at {unreached} no scenario waits")
    return 0 if all(row.is_good for row in rows) else 1


if __name__ == "__main__":
    reason = simulated_gpu.why_not()
    if reason is not None:
        sys.exit(reason)
    if not simulated_gpu.is_installed() and "SIMULATED_GPU" not in os.environ:
        build.build()
        environment = simulated_gpu.environment(devices=4, races=1, **DELAYS)
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    sys.exit(main())
