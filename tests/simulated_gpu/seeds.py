"""Run tests on simulated GPUs with other delays, seed after seed, and say how many passed.

`python tests/simulated_gpu/seeds.py 1 2 3 -- -m covering tests/dist/hardware/test_devices.py`; a
range is `1-20`. A seed that failed has all that pytest said of it. A race counts once for each of
its two lines. It ends with 1 if a test failed, if none passed, or if anything raced.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
SETTINGS = "delay_us=300,devices=8"
_RACE = re.compile(r"a race: (.*?, and nothing orders them)")


@dataclass(frozen=True)
class Outcome:
    """What one seed, or several, came to.

    Attributes:
        passed, failed: numbers of tests; one that could not begin or end has failed.
        races: what pytest's report has of them, each once.
    """

    passed: int = 0
    failed: int = 0
    races: frozenset[str] = field(default_factory=frozenset)

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(
            self.passed + other.passed, self.failed + other.failed, self.races | other.races
        )

    def __str__(self) -> str:
        races = "1 race" if len(self.races) == 1 else f"{len(self.races)} races"
        return f"{self.passed} passed, {self.failed} failed, {races}"

    @property
    def is_good(self) -> bool:
        """Return whether tests passed, and all of them."""
        return self.passed > 0 and not self.failed and not self.races


def outcome_of(report: Path, output: str) -> Outcome:
    """Read pytest's report (`--junit-xml`); what ranks wrote is in `output` too."""
    passed = failed = 0
    found = set(_RACE.findall(output))
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        is_bad = bool(kinds & {"failure", "error"})
        failed += is_bad
        passed += not is_bad and "skipped" not in kinds
        found |= {race for child in case for race in _RACE.findall(child.text or "")}
    return Outcome(passed, failed, frozenset(found))


def run(seed: int, options: Sequence[str]) -> Outcome:
    """Run pytest with the delays of a seed, in a process of its own.

    Raises:
        SystemExit: pytest did not begin: no simulated GPU can be here, or a file is missing.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "simulated_gpu", f"seed={seed},{SETTINGS}"]
        command += ["-m", "pytest", "-q", f"--junit-xml={report}", *options]
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        ended = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        if not report.exists():
            print(ended.stdout)
            raise SystemExit(ended.returncode)
        outcome = outcome_of(report, ended.stdout)
    if ended.returncode and not outcome.failed:  # pytest itself had an error
        outcome += Outcome(failed=1)
    if not outcome.is_good:
        print(ended.stdout)
    return outcome


def seeds_of(words: Sequence[str]) -> list[int]:
    """Return the seeds that words name: `3`, or `1-20`.

    Raises:
        SystemExit: a word is neither.
    """
    seeds: list[int] = []
    for word in words:
        named = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        if named is None:
            raise SystemExit(f"{word!r} is no seed: write numbers, or a range such as 1-20")
        first, last = int(named[1]), int(named[2] or named[1])
        seeds += range(first, last + 1)
    if not seeds:
        raise SystemExit("no seed is given: write numbers, or a range such as 1-20")
    return seeds


def main(arguments: Sequence[str]) -> int:
    """Run every seed, and return the exit code."""
    words, options = list(arguments), []
    if "--" in arguments:
        cut = words.index("--")
        words, options = words[:cut], words[cut + 1 :]
    seeds = seeds_of(words)
    total, bad = Outcome(), []
    for seed in seeds:
        outcome = run(seed, options)
        print(f"seed {seed}: {outcome}", flush=True)
        total += outcome
        if not outcome.is_good:
            bad.append(seed)
    if len(seeds) > 1:
        wrong = f"; look at {', '.join(map(str, bad))}" if bad else ""
        print(f"{len(seeds)} seeds: {total}{wrong}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
