"""Random models on several layouts: each trains what a plain loop trains, or is refused in time.

    python tests/dist/models/models_table.py 0 3000

prints how many of the seeds came to what, what is refused and how often, and each failure as the
smallest program that still fails, on the fewest changes of its layout. Each seed has a variant of
its own of each family of layouts (`models_layouts.py`).
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what tests of ranks share
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # zrun without installing it

import torch
from fuzzed_models import BY_RANK, MORE_BUILT, Idiom, idioms_of
from models_layouts import FAMILIES, Layout, layout_of
from pool import RankPool, RanksHangError
from small_jobs import small
from verifying import recorded, verdict_of

from zrun_core.errors import ZrunError

ALONE_S = 5.0  # that a stage may wait for one that has failed
_TOLD_EVERY = 100  # seeds
_LEFT_EARLY = (
    "the model's forward is not the one by which it was cut into stages",
    "leaves blocks out, and so ends before",
    "is called a second time by a micro-batch, or in another order than by the first one",
)
GOOD = ("equal", "refused", "stopped", "ended", "own draws")


class Outcome(NamedTuple):
    """What a model came to on a layout.

    Attributes:
        kind: equal; refused before the first step; stopped in it, before anything changed; ended in
            a later one, whose forward calls other modules than the first, by which a pipeline was
            cut; own draws, which no other layout has; unlike itself; invalid, also on one rank;
            failed in a step; or silent: it trained something else.
        text: why, or what differs.
    """

    kind: str
    text: str = ""


class Program(NamedTuple):
    """A model, and the layout that it is trained on.

    Attributes:
        seed: of the model.
        layout: it is trained on.
        more: it has what the second generator draws, too.
        without: numbers of idioms that are left out.
    """

    seed: int
    layout: Layout
    more: bool = True
    without: tuple[int, ...] = ()

    @property
    def idioms(self) -> list[Idiom]:
        """Those that it has."""
        found = enumerate(idioms_of(self.seed, more=self.more))
        return [idiom for number, idiom in found if number not in self.without]

    def __str__(self) -> str:
        named = ", ".join(f"{i.table}: {i.name}" + _in_block(i.block) for i in self.idioms)
        return f"seed {self.seed}, {self.layout}: {named}"


def program_of(seed: int, family: str) -> Program:
    """Return what a seed draws: its model, and its variant of a family of layouts.

    Ranks that run other blocks than others wait for each other at ZeRO stage 3, as is documented:
    what each of them decides by its own batch is left out there. A pipeline ends where a forward
    leaves early, which takes the others long to notice: one seed in ten shows that it does.
    """
    layout = layout_of(family, seed)
    left_out: tuple[str, ...] = ()
    if layout.dims["pp"] > 1 and seed % 10:
        left_out = tuple(MORE_BUILT)
    elif layout.dp > 1 and layout.keys["zero"]["stage"] == 3:
        left_out = BY_RANK
    idioms = enumerate(idioms_of(seed, more=True))
    without = [number for number, idiom in idioms if idiom.name in left_out]
    return Program(seed, layout, without=tuple(without))


def outcome(ranks: Any, program: Program, folder: Path, fault: str | None = None) -> Outcome:
    """Train a model on a layout, and compare it with a plain loop.

    Args:
        ranks: returns the pool of so many ranks.
        fault: name of a mistake that is put into the run (`verifying.py`).
    """
    layout = program.layout
    error = _error_of(ranks, program, layout.keys, layout.dims, folder / "many", fault)
    if error:
        one = {"dp": 1, "tp": 1, "pp": 1}
        alone = _error_of(ranks, program, layout.alone, one, folder / "one", None)
        if alone:
            return Outcome("invalid", alone)
        # A rank that has recorded its first step has made one.
        has_stepped = any((folder / "many").glob("record/*/step-1"))
        if has_stepped:
            return Outcome("ended" if any(why in error for why in _LEFT_EARLY) else "failed", error)
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
    program: Program,
    keys: dict[str, Any],
    dims: dict[str, int],
    run_dir: Path,
    fault: str | None,
) -> str:
    """Train a model; return the error with which it ends, "" if there is none."""
    args = {"seed": program.seed, "more": program.more, "without": list(program.without)}
    model = {"call": "models/fuzzed_models.py:Fuzzed", "args": args}
    batch = {"global": 8, "micro": 2, **keys.get("batch", {})}
    job = small(**{**keys, "model": model, "steps": 2, "batch": batch})
    size = dims["dp"] * dims["tp"] * dims["pp"]
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    try:
        found = ranks(size).run(recorded, job, str(run_dir), dims, None, fault, True)
    except RanksHangError as hang:  # one returned why, and others wait for it
        found = list(hang.results.values())
        return next((each["error"] for each in found if each["error"]), str(hang))
    except AssertionError as error:  # a rank died, hung, or raised what no user should see
        return str(error)[-2000:]
    return next((each["error"] for each in found if each["error"]), "")


def smallest(ranks: Any, program: Program, folder: Path, kind: str) -> Program:
    """Return a program with the fewest idioms, and the fewest changes, that still fails so."""
    for number in range(len(idioms_of(program.seed, more=program.more))):
        if number in program.without:
            continue
        tried = program._replace(without=(*program.without, number))
        if outcome(ranks, tried, folder).kind == kind:
            program = tried
    for key in program.layout.changes:
        tried = program._replace(layout=program.layout.without(key))
        if outcome(ranks, tried, folder).kind == kind:
            program = tried
    return program


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
    parser.add_argument("--layouts", nargs="*", default=list(FAMILIES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as the ranks do
    folder = Path(tempfile.mkdtemp(prefix="models-"))
    pools = {size: RankPool(size, alone_s=ALONE_S) for size in (1, 2)}
    kinds: dict[str, Counter[str]] = {layout: Counter() for layout in arguments.layouts}
    reasons: Counter[str] = Counter()
    for seed in range(arguments.first, arguments.last):
        for layout in arguments.layouts:
            program = program_of(seed, layout)
            found = outcome(pools.__getitem__, program, folder)
            kinds[layout][found.kind] += 1
            if found.kind == "refused":
                reasons[_reason(found.text)] += 1
            if found.kind not in (*GOOD, "invalid"):
                least = smallest(pools.__getitem__, program, folder, found.kind)
                print(f"{found.kind}: {least}\n    as drawn: {program}\n    {found.text[:300]}")
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
