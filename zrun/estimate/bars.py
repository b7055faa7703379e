"""Memory of each class of ranks as stacked bars, with the line that must not be crossed.

Pure: estimates to text.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from zrun.watch.memory_kinds import KINDS, PARTS
from zrun_core.sizes import format_size

if TYPE_CHECKING:
    from zrun_core.plan.answer.outcome import Estimate, RankMemory

_NARROWEST = 24  # of a bar


def parts_of(rank: RankMemory) -> dict[str, int]:
    """Return the bytes on the device at the peak, by the name of each part."""
    found = dict.fromkeys((part.name for part in PARTS), 0)
    for buffer in rank.buffers:
        if buffer.tier.value == "device" and buffer.kind.value in KINDS:
            found[buffer.kind.value] += buffer.num_bytes
    found["activations"] = max(0, rank.allocated - sum(found.values()))
    found["allocator"] = max(0, rank.reserved - rank.allocated)
    found["communicators"] = rank.communicators
    found["context"] = max(0, rank.device_used - rank.reserved - rank.communicators)
    return found


def bars(estimate: Estimate, width: int, ascii_only: bool = False) -> list[Text]:
    """Return a line for each class of ranks, then the meaning of the letters.

    Args:
        width: characters of the longest line.
    """
    ranks = estimate.ranks
    capacity = estimate.capacity
    heads = [""]
    if len(ranks) > 1:
        heads = [f"{rank.role} " for rank in ranks]
    tails = [f" {format_size(rank.device_used)} of {format_size(capacity)}" for rank in ranks]
    room = max(_NARROWEST, width - max(map(len, heads)) - max(map(len, tails)))
    scale = max([capacity, *(rank.device_used for rank in ranks)]) or 1
    lines = [
        Text.assemble(
            head.ljust(max(map(len, heads))), bar(rank, capacity, scale, room, ascii_only), tail
        )
        for rank, head, tail in zip(ranks, heads, tails, strict=True)
    ]
    return [*lines, *_legend([parts_of(rank) for rank in ranks], width)]


def bar(rank: RankMemory, capacity: int, scale: int, width: int, ascii_only: bool = False) -> Text:
    """Return the bar of a rank; `|` is the capacity.

    Args:
        capacity: bytes of the rank's device.
        scale: bytes that the whole bar stands for.
        width: characters of the bar.
    """
    sizes = parts_of(rank)
    sums = [0, *itertools.accumulate(sizes[part.name] for part in PARTS)]
    edges = [round(total / scale * (width - 1)) for total in sums]
    cells: list[tuple[str, str]] = [(" " if ascii_only else "·", "grey37")] * (width - 1)
    for part, (start, stop) in zip(PARTS, itertools.pairwise(edges), strict=True):
        cells[start:stop] = [(part.letter, part.color)] * (stop - start)
    line = min(width - 1, round(capacity / scale * (width - 1)))
    cells.insert(line, ("|", "bold red" if rank.device_used > capacity else "bold"))
    return Text.assemble(*cells)


def _legend(found: Sequence[dict[str, int]], width: int) -> list[Text]:
    """Return the meaning of the letters, with sizes; the largest of all classes counts."""
    largest = {part: max(sizes[part.name] for sizes in found) for part in PARTS}
    words = [
        Text.assemble((part.letter, part.color), f" {part.name} {format_size(size)}")
        for part, size in largest.items()
        if size
    ]
    lines: list[Text] = []
    for word in words:
        if lines and len(lines[-1]) + len(word) + 2 <= width:
            lines[-1].append("  ").append_text(word)
        else:
            lines.append(Text("  ").append_text(word))
    return lines
