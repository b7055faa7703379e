"""Take out each wait of the runtime, one at a time, and see which scenario notices, and by what."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import pool
from pool import RankPool, RanksHangError

from mutation import scenarios
from mutation.sites import Site, find
from mutation.unreached import reason

SEEDS = (4, 1, 2, 3)  # each has something else that is later than all others
BEGIN_S = 120.0  # ranks may take with all waits: they meet first
END_S = 25.0  # after which ranks have no end: they take two or three
FIRST_SCENARIOS = 3  # that a wait is taken out of: the quickest ones; then the others
UNDISTURBED_SEEDS = (1, 2)

Ranks = list[dict[str, Any]]


class Row(NamedTuple):
    """What taking out one wait came to.

    Attributes:
        site: of the wait.
        scenario: that noticed, "" if none did.
        how: it noticed: "a race: ...", "other numbers", "an error: ...", "no end".
        seconds: of the scenarios until then.
        reason: why no scenario waits there, if none does.
        runs: scenarios that were run.
    """

    site: Site
    scenario: str
    how: str
    seconds: float
    reason: str
    runs: int

    @property
    def is_good(self) -> bool:
        """Return whether it was noticed, or why not is known."""
        return bool(self.scenario or self.reason)

    @property
    def text(self) -> str:
        """Return a line of the table."""
        verdict = "good" if self.is_good else "BAD"
        found = f"{self.scenario}: {self.how}" if self.scenario else f"not noticed: {self.reason}"
        return (
            f"{verdict:4} {self.site.place:32} {self.site.function}: {self.site.call} | "
            f"{self.runs} runs, {self.seconds:.1f} s | {found}"
        )


class Table:
    """Ranks, most with simulated GPUs, and what each scenario comes to on them undisturbed."""

    def __init__(self, names: Collection[str] = scenarios.SCENARIOS.keys()) -> None:
        """Take the scenarios' names."""
        self._pools: dict[tuple[int, str], RankPool] = {}
        self._names = names
        self._results: dict[str, list[str]] = {}
        self._reached: dict[str, set[tuple[str, int]]] = {}
        self._seconds: dict[str, float] = {}

    def undisturbed(self) -> None:
        """Run all scenarios with all waits. They must come to the same in each run.

        Raises:
            AssertionError: one does not, or has a race, or waits where no site is.
        """
        known = {(s.file, line) for s in find() for line in range(s.first, s.last + 1)}
        for name in self._names:
            self._reached[name] = set()
            for seed in UNDISTURBED_SEEDS:
                begin = time.perf_counter()
                found = self._play(name, None, seed)
                self._seconds[name] = time.perf_counter() - begin
                for of_rank in found:
                    assert not of_rank["error"], f"{name}: {of_rank['error']}"
                    assert not of_rank["races"], f"{name}: {of_rank['races'][0]}"
                    above, innermost = of_rank["reached"]
                    self._reached[name] |= above
                    assert not (unknown := innermost - known), (
                        f"{name}: {sorted(unknown)} wait, and mutation/sites.py does not find them"
                    )
                results = [of_rank["result"] for of_rank in found]
                assert results == self._results.setdefault(name, results), f"{name} varies"

    def rows(self, parts: Sequence[str] = ("",)) -> Iterator[Row]:
        """Take out the waits whose place has one of `parts`, one after the other."""
        for site in find():
            if any(part in site.place for part in parts):
                yield self._row(site)

    def _row(self, site: Site) -> Row:
        lines = {(site.file, line) for line in range(site.first, site.last + 1)}
        names = [name for name in self._names if lines & self._reached[name]]
        names.sort(key=lambda name: (scenarios.SCENARIOS[name].on_cpus, self._seconds[name]))
        if not names:
            return Row(site, "", "", 0.0, reason(site), 0)
        begin, runs = time.perf_counter(), 0
        first, others = names[:FIRST_SCENARIOS], names[FIRST_SCENARIOS:]
        for seed, name in [*product(SEEDS, first), *product(SEEDS, others)]:
            runs += 1
            how = self._noticed(name, site, seed)
            if how:
                return Row(site, name, how, time.perf_counter() - begin, "", runs)
        return Row(site, "", "", time.perf_counter() - begin, "", runs)

    def _noticed(self, name: str, site: Site, seed: int) -> str:
        try:
            found = self._play(name, site, seed)
        except RanksHangError:
            return "no end" if self._ends(name, seed) else ""
        except AssertionError as error:  # of the pool: a rank is gone
            return f"an error: {_last_line(str(error))}"
        for of_rank in found:
            if of_rank["races"]:
                return str(of_rank["races"][0].splitlines()[0])  # "a race: ..."
        for of_rank in found:
            if of_rank["error"]:
                return f"an error: {of_rank['error']}"
        if [of_rank["result"] for of_rank in found] != self._results[name]:
            return "other numbers"
        return ""

    def _ends(self, name: str, seed: int) -> bool:
        """Return whether a scenario with all waits ends as soon as is asked of one without."""
        self._play(name, None, seed)  # by new ranks
        begin = time.perf_counter()
        self._play(name, None, seed)
        return time.perf_counter() - begin < END_S

    def _play(self, name: str, site: Site | None, seed: int) -> Ranks:
        scenario = scenarios.SCENARIOS[name]
        ranks = scenario.size, "cpu" if scenario.on_cpus else "cuda"
        if ranks not in self._pools:
            self._pools[ranks] = RankPool(*ranks)
        folder = tempfile.mkdtemp(dir="/var/tmp")
        fields = None if site is None else tuple(site)
        pool.TIMEOUT_S = BEGIN_S if site is None else END_S
        try:
            return self._pools[ranks].run(scenarios.play, name, fields, seed, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """End the ranks."""
        for each in self._pools.values():
            each.close()


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]
