"""The views of `zrun top`: pure functions from a scene to lines that fit.

`VIEWS` lists them in the order of their numbers. Each returns its lines for the room that it gets;
what does not fit is left out from the end, or scrolls.
"""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.text import Text

from zrun.top.machine import Machine, Use, usage_line
from zrun.watch import formatting
from zrun.watch.braille import plot
from zrun.watch.curves import Curves, held_by_tier
from zrun.watch.memory_course import held_by_kind
from zrun.watch.memory_kinds import KINDS
from zrun.watch.panel import body
from zrun.watch.panel_layout import ALERT, GAP, GOOD, QUIET, Facts, PanelSpace, packed
from zrun.watch.rank_digest import busy_s, digest_of, process_or_device
from zrun.watch.recording import Message
from zrun.watch.run_state import SPLIT, RunState
from zrun.watch.stages import stage_rows
from zrun.watch.thinned import Point
from zrun_core.sizes import format_size, several
from zrun_core.spine.events import Event

_MOST_RANKS = 12  # that are shown one by one
_WORST = 4  # of more than that
_LEAST_CHART = 40  # columns
_CHART_LINES = 7  # with its title
_LEAST_WARM = 3  # steps
_LETTERS = "dFBCO"  # of the parts of a step
STYLES = ("#999999", "#56B4E9", "#0072B2", "#E69F00", "#009E73")  # Okabe and Ito's
_KIND_LETTERS = "PGOrb"


@dataclass(frozen=True)
class Scene:
    """What there is to draw.

    Attributes:
        state: of the run, at the moment that is shown.
        facts: of the run.
        curves: of all that was read.
        until: the step after which curves are left out; None: the newest.
        messages: up to that moment.
        machine: this one, now; None: it was not looked at.
        scroll: lines that the view was moved down.
    """

    state: RunState
    facts: Facts
    curves: Curves
    until: int | None
    messages: Sequence[Message]
    machine: Machine | None = None
    scroll: int = 0


@dataclass(frozen=True)
class View:
    """A view.

    Attributes:
        name: on its tab.
        lines: draws it.
    """

    name: str
    lines: Callable[[Scene, PanelSpace], list[Text]]


# Overview


def overview(scene: Scene, room: PanelSpace) -> list[Text]:
    """Draw what the panel says, and curves in what room is left."""
    charts = _charts(scene)
    lines = body(scene.state, scene.facts, room)
    left = room.height - len(lines) - 1
    if charts and left < _CHART_LINES:  # a low terminal: the first curve before the last rows
        lines = lines[: max(3, room.height - _CHART_LINES - 1)]
        left = room.height - len(lines) - 1
    return [*lines, Text(), *_arranged(charts, scene, replace(room, height=left))]


@dataclass(frozen=True)
class _Chart:
    title: str
    points: Sequence[Point]
    text: Callable[[float], str]


def _charts(scene: Scene) -> list[_Chart]:
    curves = scene.curves
    speed = "tokens_per_s" if curves.of("tokens_per_s").points else "samples_per_s"
    unit = "tok/s" if speed == "tokens_per_s" else "samples/s"
    found = [
        _Chart("loss", curves.of("loss").points, "{:.4g}".format),
        _Chart(unit, _warm(curves.of(speed).points), formatting.count),
        _Chart("gradient norm", curves.of("grad_norm").points, "{:.3g}".format),
        _Chart("learning rate", curves.of("lr").points, "{:.3g}".format),
        _Chart("evaluation", curves.of("eval loss").points, "{:.4g}".format),
        _Chart("process of rank 0", curves.of("process").points, _bytes),
        _Chart("step", _warm(curves.of("step_s").points), formatting.seconds),
        *(
            _Chart(name, curves.of(f"metric {name}").points, "{:.4g}".format)
            for name in curves.metrics
        ),
    ]
    until = scene.until
    if until is not None:
        found = [
            _Chart(each.title, [p for p in each.points if p[0] <= until], each.text)
            for each in found
        ]
    return [each for each in found if len(each.points) > 1]


def _warm(points: Sequence[Point]) -> Sequence[Point]:
    """Return times without the first step's, beside which all others would look alike."""
    return points[1:] if len(points) > _LEAST_WARM else points


def _bytes(value: float) -> str:
    return format_size(int(value))


def _arranged(charts: Sequence[_Chart], scene: Scene, room: PanelSpace) -> list[Text]:
    """Put charts side by side, in as many rows as fit; they share what lines there are."""
    across = max(1, min(len(charts), 3, room.width // _LEAST_CHART)) if charts else 1
    rows = min(room.height // _CHART_LINES, -(-len(charts) // across))
    if rows < 1:
        return []
    height = min(14, room.height // rows)
    width = (room.width - (across - 1) * len(GAP)) // across
    lines: list[Text] = []
    for row in range(rows):
        drawn = [
            _drawn(each, width, height, scene, room.ascii_only)
            for each in charts[row * across : (row + 1) * across]
        ]
        for number in range(height):
            parts = [cell[number] if number < len(cell) else Text() for cell in drawn]
            line = Text()
            for column, part in enumerate(parts):
                line.append_text(part)
                line.pad_right(max(0, (column + 1) * (width + len(GAP)) - len(line)))
            lines.append(line)
    return lines


def _drawn(chart: _Chart, width: int, height: int, scene: Scene, ascii_only: bool) -> list[Text]:
    newest = chart.points[-1]
    title = Text.assemble((chart.title, QUIET), f"  {chart.text(newest[1])} at step {newest[0]}")
    title.truncate(width)
    picture = plot(chart.points, width, height - 2, chart.text, ascii_only=ascii_only)
    return [title, *(Text(line, GOOD) for line in picture)]


# Ranks


def ranks(scene: Scene, room: PanelSpace) -> list[Text]:
    """Draw how each rank spends a step; of many, what is usual and the four slowest."""
    events = scene.state.memory
    told = {rank: each for rank, each in events.items() if each.get("split")}
    if not told:
        return [Text("no rank has reported a step yet", QUIET)]
    together = digest_of(scene.state)
    shown = list(told)
    lines = [_legend(_LETTERS, SPLIT)]
    if together["ranks"] > _MOST_RANKS:
        shown = heapq.nlargest(_WORST, told, key=lambda rank: busy_s(told[rank]))
        lines += [
            Text(f"{name:<8}busy {formatting.seconds(together[key]['busy_s'])} of a step")
            for name, key in (("min", "least"), ("median", "median"), ("max", "most"))
        ]
    names = {
        rank: scene.facts.rank(rank) if rank < scene.facts.num_ranks else f"rank {rank}"
        for rank in shown
    }
    margin = max(map(len, names.values())) + len(GAP)
    most = max(sum(told[rank]["split"].values()) for rank in shown)
    for rank in shown:
        is_late = rank in together["late"]
        lines.append(_rank_line(told[rank], names[rank], margin, most, is_late, room))
        sensors = scene.state.gpus.get(rank)
        if sensors and room.height > 2 * len(shown) + 4:
            lines.append(Text(f"{'':<{margin}}{_sensors(sensors)}", QUIET))
    lines += [Text(), *_memory_of_ranks(events, room)]
    return lines


def _rank_line(
    event: Event, name: str, margin: int, most: float, is_late: bool, room: PanelSpace
) -> Text:
    split = event["split"]
    took = sum(split.values())
    words = f"  busy {formatting.seconds(busy_s(event))} of {formatting.seconds(took)}"
    length = max(8, room.width - margin - len(words) - 6)
    shares = [split.get(part, 0.0) / (most or 1.0) for part in SPLIT]
    line = Text(f"{name:<{margin}}", ALERT if is_late else "")
    line.append_text(_bar(shares, _LETTERS, length))
    line.pad_right(max(0, margin + length - len(line)))
    line.append(words)
    if is_late:
        line.append("  slow", ALERT)
    return line


def _bar(shares: Sequence[float], letters: str, width: int) -> Text:
    pieces = formatting.share_bar(shares, letters, width)
    styles = [STYLES[number % len(STYLES)] for number in range(len(pieces))]
    return Text.assemble(
        *((letter * size, style) for (letter, size), style in zip(pieces, styles, strict=True))
    )


def _legend(letters: str, names: Iterable[str]) -> Text:
    pairs = zip(letters, names, STYLES, strict=True)
    return Text.assemble(*((f"{letter} {name}{GAP}", style) for letter, name, style in pairs))


def _memory_of_ranks(events: Mapping[int, Event], room: PanelSpace) -> list[Text]:
    """Say which ranks hold most."""

    held = {rank: process_or_device(event) for rank, event in events.items()}
    fullest = heapq.nlargest(_WORST, held, key=lambda rank: held[rank])
    words = [f"rank {rank} {format_size(held[rank])}" for rank in fullest if held[rank]]
    if not words:
        return []
    return _behind("fullest: ", Text(", ".join(words), QUIET), room.width)


def _behind(head: str, words: Text, width: int) -> list[Text]:
    """Return words on as many lines as they need, all of them behind a head."""
    lines = packed([words], max(1, width - len(head)))
    heads = [head, *[" " * len(head)] * (len(lines) - 1)]
    return [Text.assemble((head, QUIET), line) for head, line in zip(heads, lines, strict=True)]


# Memory


def memory(scene: Scene, room: PanelSpace) -> list[Text]:
    """Draw rank 0's memory by tier and kind beside its plan, and over time."""
    event = scene.state.memory.get(0)
    if event is None:
        return [Text("rank 0 has not reported its memory yet", QUIET)]
    lines = [_legend(_KIND_LETTERS, KINDS)]
    tiers = held_by_kind(event)
    planned = {tier: held[1] for tier, held in held_by_tier(event, scene.curves.planned).items()}
    largest = max(
        [
            1,
            *(sum(kinds.values()) for kinds in tiers.values()),
            *(size for size in planned.values() if size),
        ]
    )
    for tier, kinds in tiers.items():
        lines += _tier(tier, kinds, planned.get(tier), largest, room)
    lines.append(Text())
    lines += _process(event)
    chart = _Chart("process of rank 0", scene.curves.of("process").points, _bytes)
    if chart.points and room.height - len(lines) > _CHART_LINES:
        height = min(14, room.height - len(lines) - 1)
        lines += [Text(), *_drawn(chart, room.width, height, scene, room.ascii_only)]
    return lines


def _tier(
    tier: str, kinds: Mapping[str, int], planned: int | None, largest: int, room: PanelSpace
) -> list[Text]:
    total = sum(kinds.values())
    length = max(8, room.width - 10)
    known = [kinds.get(kind, 0) / largest for kind in KINDS]
    line = Text(f"{tier:<8}")
    line.append_text(_bar(known, _KIND_LETTERS, length))
    says = f"{'':<8}{format_size(total)}"
    if planned is not None:
        mark = 8 + min(length - 1, round(planned / largest * length))
        line.pad_right(max(0, mark - len(line)))
        line = line[:mark] + Text("|" if room.ascii_only else "▏", ALERT) + line[mark + 1 :]
        is_equal = "equal to plan" if planned == total else f"{format_size(planned)} planned"
        says += f", {is_equal}"
    return [line, Text(says, QUIET)]


def _process(event: Event) -> list[Text]:
    rows = (
        ("tensors on the GPU, at most", event.get("device_allocated")),
        ("held by torch, at most", event.get("device_reserved")),
        ("of it fragmented", event.get("device_fragmented")),
        ("process now", event.get("rss_bytes")),
        ("process at most", event.get("peak_rss_bytes")),
    )
    return [Text(f"{name:<28}{format_size(int(size))}") for name, size in rows if size is not None]


# Hosts


def hosts(scene: Scene, room: PanelSpace) -> list[Text]:
    """Draw each host, as its agent and its GPUs tell of it, and this machine."""
    lines: list[Text] = []
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank, host in enumerate(scene.facts.hosts):
        by_host[host].append(rank)
    for host, members in by_host.items():
        sensed = {rank: scene.state.gpus.get(rank) for rank in members}
        lines.append(Text(f"{host or 'this host'}: {several(len(members), 'rank')}", GOOD))
        lines += _host(scene.state.hosts.get(members[0]), room)
        told = {rank: each for rank, each in sensed.items() if each}
        lines += [Text(f"  rank {rank:<4} {_sensors(each)}") for rank, each in told.items()]
        if not told:
            lines.append(Text("  no GPU has reported yet", QUIET))
    if scene.machine is not None:
        lines += [Text(), *machine(scene.machine, room)]
    return lines


def _host(told: Event | None, room: PanelSpace) -> list[Text]:
    """Draw what is used of a host; nothing where its agent has not told."""
    if told is None:
        return []
    uses = []
    if (busy := told.get("cores_busy")) is not None:
        load = f", load {told['load']:.1f}" if told.get("load") is not None else ""
        words = f"{told.get('cores') or '?'} cores{load}"
        uses.append(Use("cores", float(busy), words))
    if (size := told.get("memory_bytes")) and (used := told.get("memory_used_bytes")) is not None:
        words = f"{format_size(used)} of {format_size(size)}"
        uses.append(Use("memory", used / size, words))
    if (size := told.get("disk_bytes")) and (free := told.get("disk_free_bytes")) is not None:
        uses.append(Use("disk", 1 - free / size, f"{format_size(free)} free of the run's"))
    rates = [
        f"{format_size(told[key])}/s {word}"
        for key, word in (
            ("sent_bytes_per_s", "sent"),
            ("received_bytes_per_s", "received"),
            ("disk_read_bytes_per_s", "read"),
            ("disk_written_bytes_per_s", "written"),
        )
        if told.get(key) is not None
    ]
    drawn = [usage_line(use, room.width - 2, ascii_only=room.ascii_only) for use in uses]
    shown = [Text.assemble("  ", line) for line in drawn]
    return shown + (_behind("  ", Text(", ".join(rates)), room.width) if rates else [])


def _sensors(sensed: Mapping[str, Any]) -> str:
    """Return what a GPU says in words."""
    words = []
    if (value := sensed.get("utilisation")) is not None:
        words.append(f"{value:.0f}% busy")
    if (value := sensed.get("power_w")) is not None:
        limit = sensed.get("power_limit_w")
        words.append(f"{value:.0f} W" + (f" of {limit:.0f}" if limit else ""))
    if (value := sensed.get("temperature_c")) is not None:
        words.append(f"{value:.0f} C")
    if (value := sensed.get("clock_mhz")) is not None:
        words.append(f"{value:.0f} MHz")
    if (value := sensed.get("used_bytes")) is not None:
        words.append(format_size(int(value)))
    if slowed := sensed.get("slowed"):
        words.append(f"slowed by {', '.join(map(str, slowed))}")
    return ", ".join(words)


def machine(seen: Machine, room: PanelSpace) -> list[Text]:
    """Draw a machine: its cores, memory, disk and GPUs, and who is busy on it."""
    lines = [Text(seen.name, GOOD)]
    lines += [usage_line(use, room.width, ascii_only=room.ascii_only) for use in seen.uses]
    lines += [Text(f"{gpu.name}: {_sensors(gpu.sensed)}") for gpu in seen.gpus]
    if seen.why_no_gpus:
        lines.append(Text(seen.why_no_gpus, QUIET))
    return lines


# Stages, messages


def stages(scene: Scene, room: PanelSpace) -> list[Text]:
    """Say what each stage of a pipeline has, does and waits for."""
    rows = stage_rows(scene.state)
    if not rows:
        return [Text("the job has no pipeline, or has not begun", QUIET)]
    margin = max(len(name) for name, _ in rows) + len(GAP)
    lines = [
        line for name, text in rows for line in _behind(f"{name:<{margin}}", Text(text), room.width)
    ]
    bars = _stage_bars(scene.state, room.width - margin)
    return [*lines, Text(), *(Text(f"{name:<{margin}}") + bar for name, bar in bars)]


def _stage_bars(state: RunState, width: int) -> list[tuple[str, Text]]:
    """Draw the recorded step of each stage on one line: what runs, and where it waits."""
    from zrun_core.pipeline.actions import ActionKind

    told = {stage: event["actions"] for stage, event in sorted(state.schedules.items())}
    last = max((end for actions in told.values() for *_, end, _ in actions), default=0.0)
    if not last or width < _LEAST_CHART:
        return []
    styles = dict(zip("FBWU", STYLES[1:], strict=True))
    found = []
    for stage, actions in told.items():
        cells = ["."] * width
        for kind, _, _, begin, end, waited in actions:
            first = round((begin + waited) / last * (width - 1))
            for place in range(first, max(first + 1, round(end / last * (width - 1)))):
                cells[place] = ActionKind(kind).value
        line = Text("".join(cells))
        for letter, style in styles.items():
            line.highlight_regex(letter, style)
        found.append((f"stage {stage}", line))
    return found


def messages(scene: Scene, room: PanelSpace) -> list[Text]:
    """Show the newest messages; scrolled, older ones."""
    wanted = list(scene.messages)
    stop = max(_first_page(wanted, room), len(wanted) - scene.scroll)
    lines = []
    for each in wanted[max(0, stop - room.height) : stop]:
        lines += _message(each, room.width)
    return lines[-room.height :] or [Text("no messages so far", QUIET)]


def _message(told: Message, width: int) -> list[Text]:
    """Draw a message, which may take several lines."""
    clock = time.strftime("%H:%M:%S", time.localtime(told.time))
    style = ALERT if told.text.startswith("warning") else ""
    return _behind(f"{clock}  ", Text(told.text, style), width)


def _first_page(told: Sequence[Message], room: PanelSpace) -> int:
    """Return how many of the oldest messages fit, at least one: none is older."""
    left = room.height
    for number, each in enumerate(told):
        left -= len(_message(each, room.width))
        if left < 0:
            return max(1, number)
    return len(told)


VIEWS = (
    View("overview", overview),
    View("ranks", ranks),
    View("memory", memory),
    View("stages", stages),
    View("hosts", hosts),
    View("messages", messages),
)
HELP = (
    ("1 to 6, Tab", "a view"),
    ("left, right", "a step back or forward; , and . by ten"),
    ("Home", "the first step"),
    ("End, l", "live: the newest step"),
    ("up, down, PgUp, PgDn", "scroll messages"),
    ("space", "pause or resume"),
    ("?, h", "this help"),
    ("q, Ctrl-C", "leave; the run continues"),
)


def help_lines(room: PanelSpace) -> list[Text]:
    """Return what keys do."""
    margin = max(len(keys) for keys, _ in HELP) + len(GAP)
    return [
        line for keys, what in HELP for line in _behind(f"{keys:<{margin}}", Text(what), room.width)
    ]
