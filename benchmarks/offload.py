"""What states elsewhere than on the device cost, in parts.

    python benchmarks/offload.py                       all parts
    python benchmarks/offload.py --parts disk          the file of a rank, beside the disk itself
    python benchmarks/offload.py --parts update        an update on a core, beside torch's
    python benchmarks/offload.py --parts saves         memory of a save of states on the disk
    python benchmarks/offload.py --parts step          whole steps with states on disk
    python benchmarks/offload.py --dir /mnt/nvme --rounds 10
    python benchmarks/offload.py --quick               little of everything: a test of the harness

What is compared takes turns, forwards in one round and backwards in the next, and ratios are taken
inside each round. Each part is a module, which says what it measures.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # zrun without installing it

import offload_disk
import offload_saves
import offload_step
import offload_update

Rows = list[dict[str, Any]]


class Part(NamedTuple):
    """A part of the benchmark.

    Attributes:
        measure: returns rows that JSON can hold.
        table: of these rows.
    """

    measure: Callable[[argparse.Namespace], Rows]
    table: Callable[[Rows], str]


PARTS = {
    "disk": Part(offload_disk.measure, offload_disk.table),
    "update": Part(offload_update.measure, offload_update.table),
    "saves": Part(offload_saves.measure, offload_saves.table),
    "step": Part(offload_step.measure, offload_step.table),
}


def main() -> None:
    """Measure, print, and write the results."""
    options = parse()
    results = {}
    for name in options.parts.split(","):
        part = PARTS[name]
        results[name] = part.measure(options)
        print(f"{name}\n{part.table(results[name])}\n", flush=True)
        options.json.write_text(json.dumps(results, indent=1))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options; unknown parts are refused."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="of: " + ", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--dir", type=Path, default=Path(tempfile.gettempdir()), help="a folder of the disk"
    )
    parser.add_argument(
        "--peer-python", default=sys.executable, help="interpreter that has DeepSpeed: part step"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, one round: a test of the harness"
    )
    parser.add_argument(
        "--json", type=Path, default=Path("bench-offload.json"), help="where the results go"
    )
    options = parser.parse_args(arguments)
    unknown = set(options.parts.split(",")) - PARTS.keys()
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    return options


if __name__ == "__main__":
    main()
