"""An estimate as one HTML file that needs nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from zrun.estimate.bars import MEANINGS, PARTS, parts_of
from zrun.estimate.plan_tables import (
    fits,
    fullest,
    layer_lines,
    paper_bytes,
    state_bytes,
    step_range,
)
from zrun.watch import formatting, html
from zrun_core.sizes import format_size

if TYPE_CHECKING:
    from zrun_core.plan.answer.outcome import Estimate

# Pixels of the pictures.
_WIDTH = 760
_ROW = 34
_MARGIN = 90


def page(
    title: str, lines: Sequence[str], stages: Sequence[Estimate], chosen: Estimate, verdict: str
) -> str:
    """Return the whole file.

    Args:
        title: of the page.
        lines: the subject of the estimate, and notes.
        stages: estimates that differ in their ZeRO stage.
        chosen: that of the job as it is.
        verdict: why it does not fit, or that it does.
    """
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in lines),
        f'<p class="{"yes" if chosen.fits else "no"}">{escape(verdict)}</p>',
        "<h2>Memory of a rank, by ZeRO stage</h2>",
        _picture([(f"stage {each.candidate.stage}", each, 0) for each in stages]),
        _key(),
        _table(stages, chosen),
    ]
    if len(chosen.ranks) > 1:
        rows = [(f"{rank.role} stage", chosen, number) for number, rank in enumerate(chosen.ranks)]
        body += ["<h2>Memory by place in the pipeline</h2>", _picture(rows)]
    body += ["<h2>Time of a step</h2>", _times(chosen), "<h2>Buffers</h2>", _buffers(chosen)]
    return html.document(title, body)


def _picture(rows: Sequence[tuple[str, Estimate, int]]) -> str:
    """Return stacked bars.

    Each row: its name, an estimate, the number of a rank; 0: the fullest.
    """
    ranks = [(fullest(each) if not number else each.ranks[number]) for _, each, number in rows]
    top = max(
        [
            1,
            *(
                max(rank.device_used, each.capacity)
                for rank, (_, each, _) in zip(ranks, rows, strict=True)
            ),
        ]
    )
    scale = (_WIDTH - 2 * _MARGIN) / top
    parts = []
    for place, (rank, (name, each, _)) in enumerate(zip(ranks, rows, strict=True)):
        y = place * _ROW + 4
        parts.append(f'<text x="0" y="{y + 17}">{escape(name)}</text>')
        sizes = parts_of(rank)
        sums = itertools.pairwise([0, *itertools.accumulate(sizes[part.name] for part in PARTS)])
        for part, (start, stop) in zip(PARTS, sums, strict=True):
            if stop > start:
                what = f"{MEANINGS[part.name]}: {format_size(stop - start)}"
                parts.append(
                    f'<rect x="{_MARGIN + start * scale:.1f}" y="{y}" '
                    f'width="{(stop - start) * scale:.1f}" '
                    f'height="24" fill="{part.color}"><title>{escape(what)}</title></rect>'
                )
        line = _MARGIN + each.capacity * scale
        parts.append(
            f'<line x1="{line:.1f}" x2="{line:.1f}" y1="{y - 4}" y2="{y + 28}" stroke="var(--bad)" '
            'stroke-width="2"/>'
        )
        end = _MARGIN + max(rank.device_used, 0) * scale
        parts.append(
            f'<text x="{min(end, _WIDTH - _MARGIN) + 8:.1f}" '
            f'y="{y + 17}">{format_size(rank.device_used)}</text>'
        )
    height = len(rows) * _ROW + 8
    size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    return f'<svg role="img" {size}>{"".join(parts)}</svg>'


def _key() -> str:
    words = "".join(
        f'<span style="background:{part.color}"></span>{escape(MEANINGS[part.name])}'
        for part in PARTS
    )
    return f'<p class="key">{words}; the red line is what the device has</p>'


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
            html.row(cells, "chosen" if each.candidate.stage == chosen.candidate.stage else "")
        )
    return html.table(names, rows)


def _times(chosen: Estimate) -> str:
    parts = sorted(chosen.time.parts.items(), key=lambda item: -item[1])
    rows = [html.row((name, f"{value:.4g}")) for name, value in parts]
    links = [
        f"<p>{escape(f'{format_size(size)} over {link} per step and rank')}</p>"
        for link, size in chosen.time.link_bytes.items()
    ]
    links += [f"<p>{escape(line)}</p>" for line in layer_lines(chosen)]
    table = html.table(("part", "seconds"), rows)
    return f"<p>{step_range(chosen.time)}</p>{table}{''.join(links)}"


def _buffers(chosen: Estimate) -> str:
    found = sorted(fullest(chosen).buffers, key=lambda buffer: (-buffer.num_bytes, buffer.name))
    rows = [
        html.row(
            (
                each.name,
                MEANINGS.get(each.kind.value, each.kind.value),
                each.tier.value,
                f"{each.num_bytes:,}",
            ),
        )
        for each in found
    ]
    summary = f"<summary>{len(found)} buffers of the fullest rank</summary>"
    table = html.table(("buffer", "kind", "where", "bytes"), rows)
    return f"<details>{summary}{table}</details>"
