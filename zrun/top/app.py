"""`zrun top`: what keys do, and what is drawn.

pressed(Position, key)     -> Position      where a person is: pure
picture(Position, ...)     -> lines         what they see: pure
run_top                    reads, draws and waits for keys until they leave
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.text import Text

from zrun.runs.listing import RunSummary
from zrun.top.machine import Machine, MachineWatch
from zrun.top.terminal import FullScreen
from zrun.top.views import VIEWS, Scene, help_lines, machine
from zrun.watch.console import knows_ascii_only
from zrun.watch.formatting import duration
from zrun.watch.panel_layout import ALERT, GAP, GOOD, QUIET, PanelSpace
from zrun.watch.recording import Moment, Recording
from zrun.watch.remaining import remaining

_PERIOD_S = 0.5
_FAR = 10  # times as many moments as an arrow
_PAGE = 10  # lines
_LEAST = (40, 8)  # columns and lines


@dataclass(frozen=True)
class Position:
    """Where a person is.

    Attributes:
        view: number in `VIEWS`.
        at: number of the moment that is shown; None: the newest, as it comes.
        scroll: lines up from the newest message.
        is_still: nothing new is drawn.
        helps: keys are explained.
        is_over: they have left.
    """

    view: int = 0
    at: int | None = None
    scroll: int = 0
    is_still: bool = False
    helps: bool = False
    is_over: bool = False


def pressed(where: Position, key: str, num_moments: int) -> Position:
    """Return where a key leads to.

    Args:
        key: as `FullScreen.key` names it.
    """
    if key == "q":
        return replace(where, is_over=True)
    if where.helps:
        return replace(where, helps=False)
    if key.isdigit() and 1 <= int(key) <= len(VIEWS):
        return replace(where, view=int(key) - 1, scroll=0)
    steps = {"left": -1, "right": 1, ",": -_FAR, ".": _FAR}
    if key in steps and num_moments:
        return replace(where, at=_moved(where.at, steps[key], num_moments))
    lines = {"up": 1, "down": -1, "page up": _PAGE, "page down": -_PAGE}
    if key in lines:
        return replace(where, scroll=max(0, where.scroll + lines[key]))
    match key:
        case "next":
            return replace(where, view=(where.view + 1) % len(VIEWS), scroll=0)
        case "back":
            return replace(where, view=(where.view - 1) % len(VIEWS), scroll=0)
        case "home" if num_moments:
            return replace(where, at=0)
        case "end" | "l":
            return replace(where, at=None, scroll=0)
        case " ":
            return replace(where, is_still=not where.is_still)
        case "?" | "h":
            return replace(where, helps=True)
    return where


def _moved(at: int | None, steps: int, count: int) -> int | None:
    """Return another moment; behind the last one, the newest as it comes."""
    now = count - 1 if at is None else at
    found = max(0, now + steps)
    return None if found >= count else found


# Pictures


def picture(
    where: Position,
    recording: Recording,
    status: str,
    room: PanelSpace,
    seen: Machine | None,
) -> list[Text]:
    """Return the lines of a terminal: tabs, the view, and what keys there are.

    Args:
        status: of the run, such as "running".
    """
    moment = moment_at(where, recording)
    messages = [each for each in recording.messages if where.at is None or each.time <= moment.time]
    scene = Scene(
        moment.state,
        recording.facts,
        recording.curves,
        None if where.at is None else moment.state.step.step,
        messages,
        seen,
        where.scroll,
    )
    inner = PanelSpace(room.width, room.height - 3, room.ascii_only)
    view = help_lines(inner) if where.helps else VIEWS[where.view].lines(scene, inner)
    lines = [_title(scene, where, status, recording, room), _tabs(where, room)]
    lines += view[: inner.height]
    lines += [Text()] * (room.height - 1 - len(lines))
    return [*lines, _footer(where, recording, moment, room)]


def moment_at(where: Position, recording: Recording) -> Moment:
    """Return the moment that is shown."""
    if where.at is None or not recording.moments:
        return recording.now
    return recording.moments[min(where.at, len(recording.moments) - 1)]


def _title(
    scene: Scene, where: Position, status: str, recording: Recording, room: PanelSpace
) -> Text:
    state = scene.state
    words = [f"zrun top  {scene.facts.name}  {scene.facts.run_id}", status]
    if state.total_steps and (left := remaining(state)) is not None and status == "running":
        words.append(f"eta {left}")
    if recording.is_cut:
        words.append("a long record: start and end only")
    line = Text(GAP.join(words), style="bold")
    line.truncate(room.width)
    return line


def _tabs(where: Position, room: PanelSpace) -> Text:
    """Draw the views' names; in a narrow terminal that of the one that is shown."""
    names = [f" {number + 1} {view.name} " for number, view in enumerate(VIEWS)]
    if sum(map(len, names)) > room.width:
        names = [
            name if number == where.view else f" {number + 1} " for number, name in enumerate(names)
        ]
    styles = [QUIET] * len(names)
    styles[where.view] = f"reverse {GOOD}"
    return Text.assemble(*zip(names, styles, strict=True))


def _footer(where: Position, recording: Recording, moment: Moment, room: PanelSpace) -> Text:
    """Draw where the moment is among all of them, and the keys."""
    count = len(recording.moments)
    name = "live" if where.at is None else f"step {moment.state.step.step}"
    if where.is_still:
        name += ", still"
    keys = "  ? help  q leave"
    length = max(0, room.width - len(name) - len(keys) - 2)
    place = length - 1
    if where.at is not None and count > 1:
        place = round(where.at / (count - 1) * (length - 1))
    full, knob, empty = ("=", "O", "-") if room.ascii_only else ("━", "●", "─")
    bar = ((full * place, GOOD), (knob, ALERT if where.at is not None else GOOD))
    rest = (empty * (length - place - 1), QUIET)
    line = Text.assemble(f"{name} ", *bar, rest, (keys, QUIET)) if length > 8 else Text(name)
    line.truncate(room.width)
    return line


def machine_picture(seen: Machine, runs: Sequence[RunSummary], room: PanelSpace) -> list[Text]:
    """Return the lines of a terminal without a run: the machine, and the runs that there are."""
    lines = [Text("zrun top", style="bold"), Text(), *machine(seen, room), Text()]
    lines.append(Text("runs: zrun top RUN shows one", QUIET))
    for run in runs:
        steps = "" if run.step is None else f"step {run.step}/{run.total_steps or '?'}"
        took = "" if run.seconds is None else duration(run.seconds)
        line = Text(f"{run.run_id:<24}{run.job:<20}{run.state:<10}{steps:<20}{took}")
        line.truncate(room.width)
        lines.append(line)
    if not runs:
        lines.append(Text("none is active, and none began today", QUIET))
    lines = lines[: room.height - 1]
    lines += [Text()] * (room.height - 1 - len(lines))
    return [*lines, Text("q leave", QUIET)]


# Running


def run_top(
    recording: Recording, status: Callable[[Path], str], source: TextIO, console: Console
) -> None:
    """Show a run until a person leaves.

    Args:
        status: of a run directory, in a word.
        source: the terminal that keys come from.
    """
    where = Position()
    watch = MachineWatch()
    recording.read()
    with FullScreen(source.fileno(), console.file.fileno()) as screen:
        seen = watch.look()
        due = 0.0
        while not where.is_over:
            now = time.monotonic()
            if now >= due and not where.is_still:
                recording.read()
                seen = watch.look()
                due = now + _PERIOD_S
            room = _room(screen, console)
            lines = _too_small(room) or picture(
                where, recording, status(recording.run_dir), room, seen
            )
            screen.show(as_terminal_gets(lines, console, room))
            key = screen.key(max(0.0, due - time.monotonic()) if not where.is_still else 1.0)
            if key is not None:
                where = pressed(where, key, len(recording.moments))


def run_on_machine(
    list_runs: Callable[[], Sequence[RunSummary]], source: TextIO, console: Console
) -> None:
    """Show this machine until a person leaves."""
    watch = MachineWatch()
    with FullScreen(source.fileno(), console.file.fileno()) as screen:
        while True:
            room = _room(screen, console)
            lines = _too_small(room) or machine_picture(watch.look(), list_runs(), room)
            screen.show(as_terminal_gets(lines, console, room))
            if screen.key(2 * _PERIOD_S) == "q":
                return


def _room(screen: FullScreen, console: Console) -> PanelSpace:
    size = screen.size
    return PanelSpace(size.columns, size.lines, knows_ascii_only(console))


def _too_small(room: PanelSpace) -> list[Text]:
    if room.width >= _LEAST[0] and room.height >= _LEAST[1]:
        return []
    return [Text(f"{room.width}x{room.height}: too small"), Text("q leaves")]


def as_terminal_gets(lines: Sequence[Text], console: Console, room: PanelSpace) -> list[str]:
    """Return lines as a terminal gets them."""
    pen = Console(
        file=io.StringIO(),
        width=room.width,
        force_terminal=True,
        color_system=console.color_system,  # type: ignore[arg-type]
        no_color=console.no_color,
        highlight=False,
    )
    with pen.capture() as captured:
        pen.print(Text("\n").join(lines), end="", no_wrap=True, overflow="crop", crop=True)
    return captured.get().split("\n")
