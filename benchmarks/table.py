"""From the records of all rounds to two tables: every case, and every target with its verdict.

Pure functions.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cases import TRAIN, Case
from launch import LEAST_CLEAN, Record
from render import render

Runs = Mapping[
    Case, Sequence[Record]
]  # each record has `round` from 0, and `error` or what `launch.run` returns


@dataclass(frozen=True)
class Spread:
    """A median, and the extremes it lies between."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        values = list(values)
        return cls(statistics.median(values), min(values), max(values)) if values else None


def good(runs: Runs, case: Case) -> list[Record]:
    """The records of `case` that hold results."""
    return [record for record in runs.get(case, ()) if "error" not in record]


def used(runs: Runs, case: Case) -> list[Record]:
    """Those that time it: a run that was disturbed throughout counts only if there is no other."""
    records = [record for record in good(runs, case) if "timed" in record]
    return [record for record in records if record["clean"] >= LEAST_CLEAN] or records


def step_ms(runs: Runs, case: Case) -> Spread | None:
    """Milliseconds per step, over all timed steps of all rounds."""
    return Spread.of(1e3 * seconds for record in used(runs, case) for seconds in record["timed"])


def ratio(runs: Runs, case: Case, base: Case | None = None) -> Spread | None:
    """Return step time in units of a base's, by rounds, each compared in its own round.

    Args:
        base: `case.base` if it is not given.
    """
    bases = {record["round"]: record for record in used(runs, base or case.base)}
    pairs = [
        (record, bases[record["round"]]) for record in used(runs, case) if record["round"] in bases
    ]
    return Spread.of(
        statistics.median(a["timed"]) / statistics.median(b["timed"]) for a, b in pairs
    )


def sent(runs: Runs, case: Case, key: str = "payload") -> float | None:
    """Bytes that rank 0 sends per step.

    What others send through the same device can only add to it.
    """
    if case.processes == 1:
        return None
    return min((record[key] for record in good(runs, case) if key in record), default=None)


def wire(runs: Runs, case: Case, key: str = "payload") -> float | None:
    """That, in units of DDP's in fp32."""
    own, base = sent(runs, case, key), sent(runs, Case("ddp", False, case.ranks), key)
    return own / base if own is not None and base else None


def counted(runs: Runs, case: Case) -> float | None:
    """Bytes that zrun counted in units of those that it should have sent."""
    found = [record["counted"] for record in good(runs, case) if record.get("counted")]
    return found[0][0] / found[0][1] if found and found[0][1] else None


def largest(runs: Runs, case: Case, key: str) -> float | None:
    """The largest `key` of all rounds."""
    return max((record[key] for record in good(runs, case) if key in record), default=None)


def first_step(runs: Runs, case: Case) -> Spread | None:
    """Seconds from starting the launcher to the end of the first step."""
    return Spread.of(record["first_s"] for record in good(runs, case) if "first_s" in record)


def same_round(runs: Runs, case: Case, other: Case) -> tuple[Record, Record] | None:
    """Records of both from the first round in which both ran."""
    others = {record["round"]: record for record in good(runs, other)}
    return next(
        ((each, others[each["round"]]) for each in good(runs, case) if each["round"] in others),
        None,
    )


def loss_difference(runs: Runs, case: Case) -> float | None:
    """The largest difference of a step's loss from one process over the same global batches."""
    if (pair := same_round(runs, case, Case("single", False, case.ranks))) is None:
        return None
    return max(abs(a - b) for a, b in zip(pair[0]["losses"], pair[1]["losses"], strict=False))


def equal_bits(runs: Runs, case: Case, base: Case | None = None) -> bool | None:
    """Return whether all losses and final parameters have the bits of another's, DDP's in fp32
    if it is not given.
    """
    pair = same_round(runs, case, base or Case("ddp", False, case.ranks))
    if pair is None or case.system in ("single", TRAIN) or None in pair[0]["digests"]:
        return None
    return all(pair[0][key] == pair[1][key] for key in ("rank_losses", "digests"))


# Targets


@dataclass(frozen=True)
class Verdict:
    """One target and what came of it."""

    label: str
    value: float | None
    spread: str = ""
    must: float | None = None
    aim: float | None = None
    exact: bool = (
        False  # `must` is the number itself, to half a percent: small messages are counted too
    )
    peer: str = ""  # the best peer of the same run
    digits: str = ".2f"

    @property
    def text(self) -> str:
        """aim, must, missed; or nothing where there is no number or no target."""
        if self.value is None or self.must is None:
            return ""
        if self.exact:
            return "must" if abs(self.value / self.must - 1) <= 0.005 else "MISSED"
        if self.aim is not None and self.value <= self.aim:
            return "aim"
        return "must" if self.value <= self.must else "MISSED"


def verdicts(runs: Runs, size: str, ranks: int) -> list[Verdict]:
    """Every target that these runs say something about."""

    def case(text: str) -> Case:
        return Case.parse(text, ranks)

    def best(names: str, of: Callable[[Runs, Case], Any], digits: str = ".2f") -> str:
        values = {each.label(ranks): of(runs, each) for each in map(case, names.split())}
        known = {
            name: getattr(value, "median", value)
            for name, value in values.items()
            if value is not None
        }
        return (
            f"{min(known.values()):{digits}} {min(known, key=known.__getitem__)}" if known else ""
        )

    def speed(label: str, name: str, must: float | None, aim: float | None, peers: str) -> Verdict:
        found = ratio(runs, case(name))
        spread = f"{found.low:.3f}-{found.high:.3f}" if found else ""
        peer = best(peers, ratio, ".3f")
        return Verdict(label, found and found.median, spread, must, aim, peer=peer, digits=".3f")

    def on_wire(stage: int, must: float, peers: str) -> Verdict:
        name = case(f"zrun{stage}-sockets")
        device = wire(runs, name, "loopback")
        return Verdict(
            f"bytes through sockets, ZeRO-{stage} / DDP",
            wire(runs, name),
            f"device {device:.3f}" if device else "",
            must if ranks == 2 else None,
            exact=True,
            peer=best(peers, wire, ".3f"),
            digits=".3f",
        )

    def memory(name: str, must: float, aim: float) -> Verdict:
        peers = " ".join(
            f"{peer}{name.removeprefix('zrun3')}" for peer in ("fsdp2-z3", "ds3", "ddp")
        )
        found = largest(runs, case(name), "peak_mb")
        label = f"resident memory, ZeRO-3, {case(name).ranks} ranks, MB"
        peer = best(peers, lambda runs, case: largest(runs, case, "peak_mb"), ".0f")
        targets = (must, aim) if size == "50m" else (None, None)
        return Verdict(label, found, "", *targets, peer=peer, digits=".0f")

    stages = [case(f"zrun{stage}{way}") for stage in range(4) for way in ("", "-sockets")]
    shares = [share for each in stages if (share := counted(runs, each)) is not None]
    launch = first_step(runs, case(TRAIN))
    differences = [loss_difference(runs, each) for each in stages]
    known = [difference for difference in differences if difference is not None]
    bits = [equal_bits(runs, each) for each in stages]
    same = [each for each in bits if each is not None]
    found = [
        speed("ZeRO-0 step / DDP", "zrun0", None, None, ""),
        speed("ZeRO-1 step / DDP", "zrun1", 1.00, 0.95, "ds1 ds2 fsdp2-z2"),
        speed("ZeRO-2 step / DDP", "zrun2", 1.00, 0.95, "ds1 ds2 fsdp2-z2"),
        speed("ZeRO-3 step / DDP", "zrun3", 1.05, 0.97, "ds3 fsdp2-z3"),
        speed(
            "ZeRO-2 step / DDP, both over sockets", "zrun2-sockets", 1.00, 0.95, "ds1 ds2 fsdp2-z2"
        ),
        speed("ZeRO-3 step / DDP, both over sockets", "zrun3-sockets", 1.05, 0.97, "ds3 fsdp2-z3"),
        speed(
            "bf16 ZeRO-3 step / DDP autocast", "zrun3-bf16", 1.05, 1.00, "ds3-bf16 fsdp2-z3-bf16"
        ),
        speed("one rank / plain loop", "zrun2@1", 1.02, 1.005, ""),
        on_wire(1, 1.0, "ds1 ds2 fsdp2-z2"),
        on_wire(2, 1.0, "ds1 ds2 fsdp2-z2"),
        on_wire(3, 1.5, "ds3 fsdp2-z3"),
        memory("zrun3@2", 760, 690),
        memory("zrun3@4", 560, 500),
        Verdict(
            "bytes that zrun counts / plan",
            max(shares, default=None),
            "",
            1.0,
            exact=True,
            digits=".6f",
        ),
        Verdict(
            "zrun train to first step, s",
            launch and launch.median,
            f"{launch.low:.1f}-{launch.high:.1f}" if launch else "",
            *((6.0, 5.0) if size == "50m" else (None, None)),
            peer=best("ddp fsdp2-z3 ds3", first_step),
            digits=".1f",
        ),
        Verdict(
            "largest loss difference from one process",
            max(known, default=None),
            "",
            2.4e-7,
            peer=best("ddp fsdp2-z2 fsdp2-z3 ds1 ds2 ds3", loss_difference, ".1e"),
            digits=".1e",
        ),
        Verdict(
            "stages that differ from DDP in any bit",
            float(same.count(False)) if same else None,
            f"of {len(same)}" if same else "",
            0.0 if ranks == 2 else None,
            digits=".0f",
        ),
    ]
    return [verdict for verdict in found if verdict.value is not None]


# Text


def number(value: float | None, digits: str) -> str:
    return "" if value is None else f"{value:{digits}}"


def case_table(runs: Runs, ranks: int, tokens_per_rank: int, flops_per_token: float) -> str:
    """Every case: what a step takes, what it holds, what it sends, what it learns."""
    columns = (
        "system",
        "ms/step",
        "min-max",
        "/ base",
        "range",
        "tok/s",
        "GF/s/core",
        "peak MB",
        "start MB",
        "first s",
        "MB sent",
        "/ DDP",
        "max|dL|",
        "= DDP",
        "clean",
    )
    rows = []
    for case in runs:
        records, label = good(runs, case), case.label(ranks)
        if not runs[case]:  # not yet
            continue
        if not records:
            rows.append([label, "FAILED", *[""] * (len(columns) - 2)])
            continue
        step, relative, first = step_ms(runs, case), ratio(runs, case), first_step(runs, case)
        tokens = 1e3 * tokens_per_rank * case.ranks / step.median if step else None
        num_bytes = sent(runs, case)
        bits = equal_bits(runs, case) if not case.bf16 else None
        rows.append(
            [
                label,
                number(step and step.median, ".0f"),
                f"{step.low:.0f}-{step.high:.0f}" if step else "",
                number(relative and relative.median, ".3f"),
                f"{relative.low:.3f}-{relative.high:.3f}" if relative else "",
                number(tokens, ".0f"),
                number(tokens and tokens * flops_per_token / case.processes / 1e9, ".1f"),
                number(largest(runs, case, "peak_mb"), ".0f"),
                number(largest(runs, case, "start_mb"), ".0f"),
                number(first and first.median, ".1f"),
                number(num_bytes and num_bytes / 1e6, ".1f"),
                number(wire(runs, case), ".3f"),
                number(loss_difference(runs, case), ".1e"),
                "" if bits is None else "yes" if bits else "no",
                number(largest_sum(records, "clean"), "d"),
            ]
        )
    return render(columns, rows)


def twin_table(runs: Runs, ranks: int) -> str:
    """Every case of both checkouts, side by side; nothing where there is one checkout."""
    rows = []
    for case in runs:
        here, other = step_ms(runs, case), step_ms(runs, case.twin)
        if case.other or not here or not other:
            continue
        relative, bits = ratio(runs, case, case.twin), equal_bits(runs, case, case.twin)
        rows.append(
            [
                case.label(ranks),
                f"{here.median:.0f}",
                f"{other.median:.0f}",
                number(relative and relative.median, ".3f"),
                f"{relative.low:.3f}-{relative.high:.3f}" if relative else "",
                *(number(largest(runs, each, "peak_mb"), ".0f") for each in (case, case.twin)),
                "" if bits is None else "yes" if bits else "no",
            ]
        )
    columns = (
        "system",
        "ms/step",
        "other's",
        "/ other",
        "range",
        "peak MB",
        "other's",
        "= other",
    )
    return render(columns, rows) if rows else ""


def largest_sum(records: Sequence[Record], key: str) -> int | None:
    """`key` over all rounds."""
    return sum(record[key] for record in records) if key in records[0] else None


def verdict_table(found: Sequence[Verdict]) -> str:
    """Every target. `must` and `aim` in the last column say which of them was met."""
    rows = [
        [
            verdict.label,
            verdict.peer,
            number(verdict.must, verdict.digits),
            number(verdict.aim, verdict.digits),
            number(verdict.value, verdict.digits),
            verdict.spread,
            verdict.text,
        ]
        for verdict in found
    ]
    return render(("target", "best peer here", "must", "aim", "zrun", "spread", "verdict"), rows)
