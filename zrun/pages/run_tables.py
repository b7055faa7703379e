"""What ranks hold, do and send beside what was planned, as bars and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zrun.pages import document
from zrun.pages.bars import Bar, Piece, bars
from zrun.pages.run_curves import SPLIT_COLORS, TIERS
from zrun.watch import formatting
from zrun.watch.curves import held_by_tier
from zrun.watch.memory_course import held_by_kind
from zrun.watch.memory_kinds import KINDS, MEANINGS, PARTS
from zrun.watch.pushes import histogram, pushes_in_words
from zrun.watch.rank_digest import busy_s, digest_of
from zrun.watch.run_record import RunRecord
from zrun.watch.run_state import SPLIT, RunState
from zrun_core.sizes import format_size, several
from zrun_core.spine.events import Event

_RANKS_SHOWN = 64
_LATE_SHOWN = 8
_COLORS = {part.name: part.number for part in PARTS}


def memory_bars(record: RunRecord) -> str:
    """Return what each rank held at its peak, by kind: its buffers, and what came to them."""
    found = []
    for rank in _shown(record):
        event = record.state.memory[rank]
        held = held_by_kind(event).get("device", {})
        pieces = [Piece(MEANINGS[kind], held.get(kind, 0), _COLORS[kind]) for kind in KINDS]
        total = sum(held.values())
        peak = (record.history.peaks.get(rank) or {}).get("peak_bytes")
        end = format_size(total)
        if peak is not None and peak > total and not _is_mixed(record.state, event):
            pieces.append(Piece(MEANINGS["activations"], peak - total, _COLORS["activations"]))
            end = f"{format_size(peak)} at the peak of step {record.history.peaks[rank]['step']}"
        found.append(Bar(_name(record, rank), pieces, end, level=_predicted_peak(record.state)))
    meaning = "" if _predicted_peak(record.state) is None else "the peak of the estimate"
    return bars(found, _text, meaning)


def _is_mixed(state: RunState, event: Event) -> bool:
    """Return whether the tensors of the device's peak may be those of another tier too."""
    return (state.start or {}).get("device") == "cpu" and "host" in (event.get("tiers") or {})


def _predicted_peak(state: RunState) -> int | None:
    return ((state.estimate or {}).get("predicted") or {}).get("peak_bytes")


def memory_table(record: RunRecord) -> str:
    """Return what each rank holds, by tier, beside the plan."""
    state, facts = record.state, record.facts
    ranks = _shown(record)
    if not ranks:
        return ""
    held = {}
    for rank in ranks:
        planned = record.curves.planned if rank == 0 else {}
        held[rank] = held_by_tier(state.memory[rank], planned)
    tiers = [tier for tier in TIERS if any(tier in of_rank for of_rank in held.values())]
    on_gpu = any(state.memory[rank].get("device_reserved") is not None for rank in ranks)
    head = ["rank", "host"]
    if facts.places:
        head.append("place")
    for tier in tiers:
        head += [f"{tier}, planned", "measured"]
    if on_gpu:
        head += ["held by torch", "fragmented"]
    head.append("process, at most")
    rows = []
    for rank in ranks:
        event = state.memory[rank]
        cells = [str(rank), facts.hosts[rank] if rank < len(facts.hosts) else "?"]
        if facts.places:
            cells.append(facts.places[rank] if rank < len(facts.places) else "?")
        for tier in tiers:
            measured, planned_bytes = held[rank].get(tier, (None, None))
            cells += [_size(planned_bytes), _size(measured)]
        if on_gpu:
            cells += [_size(event.get("device_reserved")), _size(event.get("device_fragmented"))]
        cells.append(_size(event.get("peak_rss_bytes")))
        rows.append(document.row(cells))
    if state.ranks is not None:
        rows += _rows_of_all(state.ranks, tiers, len(head), on_gpu=on_gpu)
    left = len(state.memory) - len(ranks)
    more = document.soft(f"{left} more ranks are in events.jsonl.") if left else ""
    return document.table(head, rows) + more + _of_how_many(state)


def _rows_of_all(
    told: Event, tiers: Sequence[str], num_columns: int, *, on_gpu: bool
) -> Iterator[str]:
    """Yield the rows of all ranks together: `told` is their newest `ranks` event."""
    for name in ("least", "median", "most"):
        numbers = told[name]
        cells = []
        for tier in tiers:
            cells += ["", _size(numbers.get(f"{tier}_bytes"))]
        if on_gpu:
            cells += [
                _size(numbers.get("device_reserved")),
                _size(numbers.get("device_fragmented")),
            ]
        cells.append(_size(numbers.get("peak_rss_bytes")))
        lacking = [""] * (num_columns - 1 - len(cells))
        yield document.row([name, *lacking, *cells])


def _of_how_many(state: RunState) -> str:
    """Return which ranks are shown, where many are told of together."""
    if state.ranks is None:
        return ""
    return document.soft(
        f"Shown of {several(state.ranks['ranks'], 'rank')}: rank 0, the slowest and the fullest; "
        "least, median and most are over all ranks."
    )


def split_bars(record: RunRecord) -> str:
    """Return how each rank has lately spent a step."""
    found = []
    for rank in _shown(record):
        event = record.state.memory[rank]
        split = event.get("split") or {}
        pieces = [Piece(part, split.get(part, 0.0), SPLIT_COLORS[part]) for part in SPLIT]
        if not any(piece.amount for piece in pieces):
            continue
        busy = formatting.seconds(busy_s(event))
        took = formatting.seconds(sum(split.values()))
        found.append(Bar(_name(record, rank), pieces, f"busy {busy} of {took}"))
    return bars(found, formatting.seconds) + _busy_of_all(record.state)


def _busy_of_all(state: RunState) -> str:
    """Return how long many ranks are busy in a step, together."""
    if state.ranks is None or "busy_s" not in state.ranks["most"]:
        return ""
    parts = [
        f"{key} {formatting.seconds(state.ranks[key]['busy_s'])}"
        for key in ("least", "median", "most")
    ]
    return document.soft(f"Busy, of {several(state.ranks['ranks'], 'rank')}: {', '.join(parts)}.")


def stragglers(record: RunRecord) -> str:
    """Return which ranks the others have waited for."""
    ranks = record.ranks
    if not ranks.num_samples:
        return ""
    told = digest_of(record.state)
    now = [f"rank {rank}" for rank in told.get("late", ())] + told.get("late_stages", [])
    samples = several(ranks.num_samples, "time")
    if not ranks.late:
        return document.soft(f"No rank was slow: they were compared {samples}.")
    causes = {f"rank {rank}": gpu.throttled for rank, gpu in record.gpus.gpus.items()}
    words = []
    for name, number in ranks.late.most_common(_LATE_SHOWN):
        slowed = causes.get(name)
        cause = f" (its GPU was slowed down: {', '.join(slowed)})" if slowed else ""
        words.append(f"{name} {several(number, 'time')}{cause}")
    if len(ranks.late) > _LATE_SHOWN:
        words.append(f"{len(ranks.late) - _LATE_SHOWN} others")
    lately = f"; at their last report: {', '.join(now[:_LATE_SHOWN])}" if now else ""
    return document.soft(f"Slow, of {samples} compared: {', '.join(words)}{lately}.")


def staleness(state: RunState) -> str:
    """Return how many pushes to an asynchronous server came how many updates late."""
    pushes = state.pushes
    if pushes is None or not pushes.count:
        return ""
    rows = [
        Bar(
            f"{each.name} updates late",
            [Piece("pushes", each.number, 1)],
            f"{each.number} ({each.number / pushes.count:.0%})",
        )
        for each in histogram(pushes)
    ]
    return bars(rows, "{:.0f}".format) + document.soft("; ".join(pushes_in_words(pushes)) + ".")


def moved(state: RunState) -> str:
    """Return the bytes that the newest step moved between tiers, beside the plan."""
    rows = []
    for tier, use in state.step.tiers.items():
        for way, words in (("read", "read from"), ("written", "written to")):
            sizes = _sum(use["planned"][way]), _sum(use["moved"][way])
            rows.append(document.row([f"{words} {tier}", *map(format_size, sizes)]))
    if not rows:
        return ""
    title = f'<h3 class="part">Bytes between tiers in step {state.step.step}, rank 0</h3>'
    return title + document.table(("", "planned", "measured"), rows)


def _shown(record: RunRecord) -> list[int]:
    return sorted(record.state.memory)[:_RANKS_SHOWN]


def _name(record: RunRecord, rank: int) -> str:
    facts = record.facts
    is_known = rank < facts.num_ranks and (not facts.places or rank < len(facts.places))
    return facts.rank(rank) if is_known else f"rank {rank}"


def _sum(sizes: Mapping[str, Any]) -> int:
    return sum(sizes.values())


def _size(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else format_size(int(num_bytes))


def _text(size: float) -> str:
    return format_size(int(size))
