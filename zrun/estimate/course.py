"""What a rank holds through a step, drawn: `zrun estimate --at-peak`.

257.1 MiB ┤                 ⢀⣠⠤⣄
          │          ⣀⡤⠖⠋⠉⠁  ⠉⠓⢤⣀
123.2 MiB ┤⣀⡤⠖⠋⠉⠁                ⠉⠓⠤⣀
           forward          backward
                             ^ at most: in backward, blocks.5.mlp
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from zrun.estimate.plan_tables import fullest
from zrun.estimate.why import tensors_at_peak
from zrun.watch.braille import plot
from zrun_core.sizes import format_size

if TYPE_CHECKING:
    from zrun.estimate.answer import Answer
    from zrun_core.plan.trace.peak import Course

_HEIGHT = 12  # lines
_ROLES = {
    "all": "a rank",
    "first": "a rank of the first stage",
    "middle": "a rank of a stage in the middle",
    "last": "a rank of the last stage",
}


def lines_at_peak(found: Answer, width: int, *, ascii_only: bool) -> list[str]:
    """Return the picture of the fullest rank's tensors, and what is there at the peak.

    Args:
        width: of the terminal, in characters.

    Raises:
        JobError: its model was not traced.
    """
    chosen = found.chosen
    course = found.question.planner.course(chosen.candidate)
    rank = fullest(chosen)
    whose = _ROLES.get(rank.role, f"a rank of {rank.role}")
    over = "a step"
    if chosen.candidate.dims.pp > 1:
        over = "one micro-batch with others in flight"
    most = format_size(rank.peak.num_bytes)
    lines = [f"tensors of {whose} over {over}: peak {most}", ""]
    lines += _picture(course, width, ascii_only=ascii_only)
    lines += ["", "held at the peak:"]
    sizes = [(format_size(size), name) for name, size in tensors_at_peak(rank)]
    column = max((len(size) for size, _ in sizes), default=0)
    lines += [f"  {size:>{column}}  {name}" for size, name in sizes]
    beyond = rank.device_used - rank.peak.num_bytes
    lines.append(
        f"beyond tensors: {format_size(beyond)} in the allocator and libraries, "
        f"{format_size(rank.device_used)} in all"
    )
    return lines


def _picture(course: Course, width: int, *, ascii_only: bool) -> list[str]:
    """Return the curve, the phases below it, and where it is highest."""
    count = len(course.num_bytes)
    drawn = plot(
        list(enumerate(course.num_bytes)),
        width,
        _HEIGHT,
        format_size,
        ascii_only=ascii_only,
    )
    if not drawn:
        return []
    sizes = max(course.num_bytes), min(course.num_bytes)
    margin = max(len(format_size(size)) for size in sizes) + 2
    columns = width - margin

    def column(event: int) -> int:
        return margin + round(event / max(1, count - 1) * (columns - 1))

    peak = max(range(count), key=course.num_bytes.__getitem__)
    where = f", {course.modules[peak]}" if course.modules[peak] else ""
    words = f"peak: in {course.phases[peak].value}{where}"
    return [*drawn, _ruler(course.phases, column, width), *_mark(words, column(peak), width)]


def _mark(words: str, place: int, width: int) -> list[str]:
    """Return a mark at a place, with words where they have room."""
    mark = " " * place + "^"
    if len(f"{mark} {words}") <= width:
        return [f"{mark} {words}"]
    if place > len(words):
        return [f"{words} ^".rjust(place + 1)]
    return [mark, words]


def _ruler(phases: Sequence[str], column: Callable[[int], int], width: int) -> str:
    """Return the names of phases where they begin, as far as they have room."""
    line = ""
    begin = 0
    for phase, events in groupby(phases):
        num_events = len(list(events))
        start, end = column(begin), column(begin + num_events)
        is_last = begin + num_events == len(phases)
        begin += num_events
        room = (width if is_last else end) - start
        if len(phase) < room and len(line) <= start:
            line = line.ljust(start) + phase + " "
    return line.rstrip()
