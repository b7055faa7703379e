"""Random models on several layouts: each trains what a plain loop trains, or is refused in time.

    python tests/dist/models_table.py 0 3000

prints how many of the seeds came to what, what is refused and how often, and each failure as the
smallest program that still fails.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # zrun without installing it

import torch
from fuzzed_models import idioms_of
from pool import RankPool, RanksHangError
from test_tensor_parallel import small
from verifying import recorded, verdict_of

from zrun_core.errors import ZrunError

PLAN = {"*.up": "colwise", "*.down": "rowwise"}
BLOCK = {"draws": "block"}
# By name: keys of the job, and its data-parallel ranks.
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "zero 3, recomputed": ({"zero": 3, "activations": {"checkpoint": "full"}}, 2),
    "pp": ({"parallel": {"pp": 2}}, 1),
    "interleaved": ({"parallel": {"pp": 2, "schedule": "interleaved"}}, 1),
    "tp": ({"parallel": {"tp": 2, "plan": PLAN}}, 1),
    "sequence": ({"parallel": {"tp": 2, "plan": PLAN, "sequence": True}}, 1),
    "layer-major, offload": (
        {"zero": 3, "parallel": {"schedule": "layer_major"}, "offload": {"optimizer": "host"}},
        2,
    ),
}
_ALONE_S = 20.0  # that a stage may wait for one that has failed
_TOLD_EVERY = 100  # seeds
GOOD = ("equal", "refused", "stopped", "own draws")


class Outcome(NamedTuple):
    """What a model came to on a layout.

    Attributes:
        kind: equal; refused before the first step; stopped in it, before anything changed; own
            draws, which no other layout has; unlike itself; invalid, also on one rank; failed in a
            step; or silent: it trained something else.
        text: why, or what differs.
    """

    kind: str
    text: str = ""


def outcome(
    ranks: Any, seed: int, layout: str, folder: Path, without: Sequence[int] = ()
) -> Outcome:
    """Train a model on a layout, and compare it with a plain loop.

    Args:
        ranks: returns the pool of so many ranks.
        without: numbers of idioms that are left out.
    """
    keys, dp = LAYOUTS[layout]
    error = _error_of(ranks, seed, keys, dp, folder / "many", without)
    if error:
        alone = _error_of(ranks, seed, {}, 1, folder / "one", without)
        if alone:
            return Outcome("invalid", alone)
        # A rank that has recorded its first step has made one.
        has_stepped = any((folder / "many").glob("record/*/step-1"))
        if has_stepped:
            return Outcome("failed", error)
        if error.startswith("DivergedError: in step 1 "):
            return Outcome("stopped", error)
        is_ours = error.startswith(("JobError: ", "UserCodeError: "))
        return Outcome("refused" if is_ours else "failed", error)
    try:
        verdict = verdict_of(folder / "many")
    except ZrunError as error:
        return Outcome("failed", f"the plain loop: {error}")
    if verdict.why_not:
        kind = "own draws" if "draw their own" in verdict.why_not else "unlike itself"
        return Outcome(kind, verdict.why_not)
    if verdict.difference is not None:
        return Outcome("silent", verdict.difference.in_words)
    return Outcome("equal")


def _error_of(
    ranks: Any,
    seed: int,
    keys: dict[str, Any],
    dp: int,
    run_dir: Path,
    without: Sequence[int],
) -> str:
    """Train a model; return the error with which it ends, "" if there is none."""
    args = {"seed": seed, "without": list(without)}
    job = small(model={"call": "fuzzed_models.py:Fuzzed", "args": args}, steps=2, **keys)
    job["precision"] = "bf16" if seed % 6 == 5 else "fp32"
    parallel = keys.get("parallel", {})
    dims = {"dp": dp, "tp": parallel.get("tp", 1), "pp": parallel.get("pp", 1)}
    size = dims["dp"] * dims["tp"] * dims["pp"]
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    try:
        found = ranks(size).run(recorded, job, str(run_dir), dims, None, None, True)
    except RanksHangError as hang:  # one returned why, and others wait for it
        found = list(hang.results.values())
        return next((each["error"] for each in found if each["error"]), str(hang))
    except AssertionError as error:  # a rank died, hung, or raised what no user should see
        return str(error)[-2000:]
    return next((each["error"] for each in found if each["error"]), "")


def smallest(ranks: Any, seed: int, layout: str, folder: Path, kind: str) -> str:
    """Return the fewest idioms of a model that still fail so, in words."""
    without: list[int] = []
    idioms = idioms_of(seed)
    for number in range(len(idioms)):
        tried = [*without, number]
        if outcome(ranks, seed, layout, folder, tried).kind == kind:
            without = tried
    kept = [idiom for number, idiom in enumerate(idioms) if number not in without]
    return ", ".join(f"{i.table}: {i.name}" + _in_block(i.block) for i in kept)


def _in_block(block: int | None) -> str:
    return "" if block is None else f" (block {block})"


def _reason(text: str) -> str:
    """The kind of a refusal: its words without names and numbers."""
    text = re.sub(r"blocks\.\d+(\.\w+)*", "BLOCK", text.splitlines()[0])
    return re.sub(r"[\d.e+-]*\d[\d.e+-]*", "N", text)[:150]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as the ranks do
    folder = Path(tempfile.mkdtemp(prefix="models-"))
    pools = {size: RankPool(size, alone_s=_ALONE_S) for size in (1, 2)}
    kinds: dict[str, Counter[str]] = {layout: Counter() for layout in arguments.layouts}
    reasons: Counter[str] = Counter()
    for seed in range(arguments.first, arguments.last):
        for layout in arguments.layouts:
            found = outcome(pools.__getitem__, seed, layout, folder)
            kinds[layout][found.kind] += 1
            if found.kind == "refused":
                reasons[_reason(found.text)] += 1
            if found.kind not in (*GOOD, "invalid"):
                least = smallest(pools.__getitem__, seed, layout, folder, found.kind)
                print(f"{found.kind}: seed {seed}, {layout}: {least}\n    {found.text[:300]}")
                sys.stdout.flush()
        if (seed + 1) % _TOLD_EVERY == 0:
            print(f"up to seed {seed}: {dict(sum(kinds.values(), Counter()))}", flush=True)
    for layout, counts in kinds.items():
        print(layout, dict(counts))
    for reason, count in reasons.most_common(12):
        print(count, reason)
    for pool in pools.values():
        pool.close()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
