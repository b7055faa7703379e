"""An estimate as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from zrun.estimate.bars import parts_of
from zrun.estimate.plan_tables import (
    fits,
    fullest,
    paper_bytes,
    state_bytes,
    step_range,
)
from zrun.pages import document
from zrun.pages.bars import STYLE, Bar, Piece, bars
from zrun.pages.traffic_tables import planned_traffic
from zrun.watch import formatting
from zrun.watch.memory_kinds import MEANINGS, PARTS
from zrun_core.sizes import format_size

if TYPE_CHECKING:
    from zrun_core.plan.answer.outcome import Estimate, RankMemory


def page(
    title: str, lines: Sequence[str], stages: Sequence[Estimate], chosen: Estimate, verdict: str
) -> str:
    """Return the whole file.

    Args:
        lines: the subject of the estimate, and notes.
        stages: estimates that differ in their ZeRO stage.
        chosen: the estimate of the job as it is.
        verdict: why it does not fit, or that it does.
    """
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in lines),
        f'<p class="{"yes" if chosen.fits else "no"}">{escape(verdict)}</p>',
        "<h2>Memory of a rank, by ZeRO stage</h2>",
        _bars([(f"stage {each.candidate.stage}", each, fullest(each)) for each in stages]),
        _table(stages, chosen),
    ]
    if len(chosen.ranks) > 1:
        rows = [(f"{rank.role} stage", chosen, rank) for rank in chosen.ranks]
        body += ["<h2>Memory by place in the pipeline</h2>", _bars(rows)]
    body += ["<h2>Time of a step</h2>", _times(chosen), "<h2>Buffers</h2>", _buffers(chosen)]
    return document.whole(title, body, STYLE)


def _bars(rows: Sequence[tuple[str, Estimate, RankMemory]]) -> str:
    """Return a bar for each row: its name, an estimate, and one of its ranks."""
    found = []
    for name, each, rank in rows:
        sizes = parts_of(rank)
        pieces = [Piece(MEANINGS[part.name], sizes[part.name], part.number) for part in PARTS]
        found.append(Bar(name, pieces, format_size(rank.device_used), level=each.capacity))
    return bars(found, lambda size: format_size(int(size)), "what the device has")


def _table(stages: Sequence[Estimate], chosen: Estimate) -> str:
    names = (
        "stage",
        "paper, K=12",
        "states",
        "activations",
        "peak",
        "reserved",
        "device",
        "fits",
        "step",
        "tok/s",
    )
    rows = []
    for each in stages:
        rank = fullest(each)
        tokens = formatting.count(each.time.tokens_per_s) if each.time.tokens_per_s else "-"
        cells = (
            str(each.candidate.stage),
            *map(
                format_size,
                (
                    paper_bytes(each),
                    state_bytes(rank),
                    parts_of(rank)["activations"],
                    rank.allocated,
                    rank.reserved,
                    rank.device_used,
                ),
            ),
            fits(each).plain,
            step_range(each.time),
            tokens,
        )
        rows.append(
            document.row(cells, "chosen" if each.candidate.stage == chosen.candidate.stage else "")
        )
    return document.table(names, rows)


def _times(chosen: Estimate) -> str:
    parts = sorted(chosen.time.parts.items(), key=lambda item: -item[1])
    rows = [document.row((name, f"{value:.4g}")) for name, value in parts]
    links = [
        f"<p>{escape(f'{format_size(size)} over {link} per step and rank')}</p>"
        for link, size in chosen.time.link_bytes.items()
    ]
    table = document.table(("part", "seconds"), rows)
    sent = "".join(links) + planned_traffic(chosen)
    return f"<p>{step_range(chosen.time)}</p>{table}{sent}"


def _buffers(chosen: Estimate) -> str:
    found = sorted(fullest(chosen).buffers, key=lambda buffer: (-buffer.num_bytes, buffer.name))
    rows = [
        document.row(
            (
                each.name,
                MEANINGS.get(each.kind.value, each.kind.value),
                each.tier.value,
                f"{each.num_bytes:,}",
            ),
        )
        for each in found
    ]
    table = document.table(("buffer", "kind", "where", "bytes"), rows)
    return document.details(f"{len(found)} buffers of the fullest rank", table)
