"""The results of `planner.py` as tables: every case with all predictions, and the errors by model.
Pure functions.

A result has the fields of its case, `peak` in bytes as measured, `predicted`, and in `peers` the
bytes that others say, None where they do not answer; a peer that was not there has no entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from render import render

PEERS = {
    "deepspeed": "DeepSpeed",
    "accelerate": "accelerate",
    "memtracker": "MemTracker",
    "formulas": "formulas",
}
Result = Mapping[str, Any]


def error(result: Result, peer: str = "") -> float | None:
    """Predicted over measured, less 1, of zrun or a peer; None where it does not answer."""
    said = result["peers"].get(peer) if peer else result["predicted"]
    return None if said is None else float(said / result["peak"] - 1)


def is_good(result: Result) -> bool:
    """At most 1 % above on one rank and 2 % on several, and nowhere more than 1 % below."""
    peak = result["peak"]
    return -peak <= 100 * (result["predicted"] - peak) <= (1 if result["world"] == 1 else 2) * peak


def percent(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{100 * value:+.{digits}f} %"


def there(results: Sequence[Result]) -> list[str]:
    """The peers of which there are answers, or that were asked."""
    return [peer for peer in PEERS if any(peer in result["peers"] for result in results)]


def peer_table(results: Sequence[Result]) -> str:
    """Every case: what was measured, what each predicts, and by how much that is wrong."""
    peers = there(results)
    columns = ["case", "measured MiB", "zrun", "error"]
    for peer in peers:
        columns += [PEERS[peer], "error"]
    rows = []
    for result in results:
        row = [
            result["case"],
            mib(result["peak"]),
            mib(result["predicted"]),
            percent(error(result)),
        ]
        for peer in peers:
            row += [mib(result["peers"].get(peer)), percent(error(result, peer), 0)]
        rows.append(row)
    return render(columns, rows)


def mib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**20:.1f}"


def spread(errors: Iterable[float | None], digits: int = 2) -> str:
    """The lowest and the highest of those that are there."""
    known = [each for each in errors if each is not None]
    if not known:
        return "-"
    return f"{100 * min(known):+.{digits}f} to {100 * max(known):+.{digits}f} %"


def summary(results: Sequence[Result]) -> str:
    """A row per model: zrun's errors on one rank and on several, and those of each peer over what
    it answers.
    """
    peers = there(results)
    models = list(dict.fromkeys(result["model"] for result in results))
    rows = []
    for model in [*models, *(["all"] if len(models) > 1 else [])]:
        own = [result for result in results if model in (result["model"], "all")]
        one, several = (
            [row for row in own if (row["world"] > 1) == is_shared] for is_shared in (False, True)
        )
        row = [model, str(len(own)), spread(map(error, one)), spread(map(error, several))]
        rows.append(row + [spread((error(result, peer) for result in own), 0) for peer in peers])
    return render(
        ["model", "cases", "one rank", "2-4 ranks", *(PEERS[peer] for peer in peers)], rows
    )
