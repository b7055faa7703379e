"""Estimates as tables for a terminal, and as lines of text.

Pure: nothing is read or computed here but sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from zrun.estimate.bars import parts_of
from zrun.watch import formatting
from zrun.watch.memory_kinds import MEANINGS
from zrun_core.sizes import format_size

if TYPE_CHECKING:
    from zrun_core.hardware.hardware import Hardware
    from zrun_core.plan.answer.outcome import Estimate, RankMemory, StageEstimate
    from zrun_core.plan.question.candidate import Candidate
    from zrun_core.plan.timing.timing import StepTime

_GOOD = "green"
_BAD = "red"
_DOUBTFUL = "yellow"
_DAY_S = 86400.0
_WRAPPED = {"buffer": 24, "offloaded": 16}  # the least width where a value may take several lines
_MOST_STAGES = 16  # of which each has a row
_SHOWN_BLOCKS = 0.5  # that what follows them computes as much as
_SIZES = ("paper K=12", "states", "activations", "peak", "reserved", "device")


def fullest(estimate: Estimate) -> RankMemory:
    """Return the rank whose device is used most."""
    return max(estimate.ranks, key=lambda rank: rank.device_used)


def units_of(rank: RankMemory) -> dict[str, bool]:
    """Return the flat units of a rank by name, and whether a state of each leaves the device."""
    found: dict[str, bool] = {}
    for buffer in rank.buffers:
        unit, slash, _ = buffer.name.rpartition("/")
        if slash and buffer.kind.value in ("params", "grads", "optim"):
            found[unit] = found.get(unit, False) or buffer.tier.value != "device"
    return found


def stage_table(estimates: Sequence[Estimate], chosen: Candidate, width: int) -> Table:
    """Return a row for each estimate; they differ in their ZeRO stage.

    Columns that say nothing are left out, and in a small `width` those that are missed least.

    Args:
        chosen: the candidate whose stage is marked.
    """
    unit = _unit(estimates)
    cells: dict[str, Callable[[Estimate], str | Text]] = {
        "": lambda each: ">" if each.candidate.stage == chosen.stage else "",
        "stage": lambda each: str(each.candidate.stage),
        "paper K=12": lambda each: unit.text(paper_bytes(each)),
        "states": lambda each: unit.text(state_bytes(fullest(each))),
        "activations": lambda each: _mark(each) + unit.text(parts_of(fullest(each))["activations"]),
        "peak": lambda each: _mark(each) + unit.text(fullest(each).allocated),
        "reserved": lambda each: _mark(each) + unit.text(fullest(each).reserved),
        "device": lambda each: _mark(each) + unit.text(each.device_used),
        "fits": fits,
        "step": lambda each: _mark(each) + _seconds(each.time.seconds),
        "tok/s": lambda each: formatting.count(each.time.tokens_per_s or 0),
        "MFU": lambda each: _share(each.time.mfu),
    }
    if not any(each.device_used > fullest(each).allocated for each in estimates):
        del cells["reserved"], cells["device"]
    if not any(each.time.tokens_per_s for each in estimates):
        del cells["tok/s"]
    if not any(each.time.mfu for each in estimates):
        del cells["MFU"]
    columns = {name: [cell(each) for each in estimates] for name, cell in cells.items()}
    missed_least = "MFU", "reserved", "paper K=12", "peak", "tok/s", "step"
    styles = ["" if each.candidate.stage == chosen.stage else "dim" for each in estimates]
    return _table(_fitting(columns, missed_least, width), unit, styles)


CHOICES = (
    "dp x tp x pp: replicas x tensor-parallel ranks x pipeline stages (1f1b unless it says "
    "otherwise; chunks if interleaved); micro: samples of a micro-batch x accumulation; offloaded: "
    "states in host memory or on disk, and their share; free: memory left on the fullest device"
)


def choice_table(estimates: Sequence[Estimate], width: int) -> Table:
    """Return a row for each configuration of a search, in the order given."""
    unit = _unit(estimates)
    rows: list[dict[str, str | Text]] = []
    for number, each in enumerate(estimates, start=1):
        candidate = each.candidate
        dims = candidate.dims
        sharded = f"/{dims.shard_size}" if candidate.stage and dims.shard_size != dims.dp else ""
        words = [f"{dims.virtual} chunks"] if dims.virtual > 1 else []
        if dims.pp > 1 and candidate.order.splits_backward:
            words.append(candidate.schedule.replace("_", " "))
        if candidate.sequence_parallel:
            words.append("sequence")
        order = f" ({', '.join(words)})" if words else ""
        rows.append(
            {
                "": str(number),
                "zero": f"{candidate.stage}{sharded}",
                "dp x tp x pp": f"{dims.dp} x {dims.tp} x {dims.pp}{order}",
                "micro": f"{candidate.micro} x {candidate.accumulation}",
                "checkpoint": candidate.checkpoint,
                "offloaded": offloaded(candidate) or "-",
                "device": unit.text(fullest(each).device_used),
                "free": _free(each),
                "step": _step(each.time),
                "tok/s": formatting.count(each.time.tokens_per_s or 0),
                "MFU": _share(each.time.mfu),
            }
        )
    columns = {name: [row[name] for row in rows] for name in rows[0]} if rows else {"": []}
    if not any(each.time.tokens_per_s for each in estimates):
        columns.pop("tok/s", None)
    return _table(_fitting(columns, ("tok/s", "MFU", "device", "checkpoint"), width), unit)


def pipeline_table(estimate: Estimate, width: int) -> Table:
    """Return a row for each stage of a pipeline; of many alike in a row, the first and the last."""
    stages = estimate.stages
    unit = formatting.Unit.of(stage.device_used for stage in stages)
    step = estimate.time.seconds or 1.0
    names = (
        "pipeline",
        "blocks",
        "parameters",
        "busy",
        "waits",
        "in flight",
        "activations",
        "device",
    )
    columns: dict[str, list[str | Text]] = {name: [] for name in names}
    last = -1
    for number in _told_apart([_num_blocks(stage) for stage in stages]):
        stage = stages[number]
        row = (
            str(number),
            ", ".join(map(_run_in_words, stage.blocks)),
            formatting.count(stage.num_params),
            _seconds(stage.busy),
            f"{max(0.0, 1 - stage.busy / step):.0%}",
            str(stage.in_flight),
            _mark(estimate) + unit.text(stage.activations),
            _mark(estimate) + unit.text(stage.device_used),
        )
        rows = [row] if number == last + 1 else [("...", *[""] * (len(row) - 1)), row]
        for cells in rows:
            for name, cell in zip(names, cells, strict=True):
                columns[name].append(cell)
        last = number
    return _table(_fitting(columns, ("parameters", "busy", "activations"), width), unit)


def _num_blocks(stage: StageEstimate) -> int:
    return sum(stop - first for first, stop in stage.blocks)


def _told_apart(sizes: Sequence[int]) -> list[int]:
    """Return the places to show: all of a few, else the ends, and where a size changes."""
    last = len(sizes) - 1
    if last < _MOST_STAGES:
        return list(range(len(sizes)))
    return [
        place
        for place in range(len(sizes))
        if place in (0, last) or not sizes[place - 1] == sizes[place] == sizes[place + 1]
    ]


def pipeline_line(estimate: Estimate) -> str:
    """Return what a pipeline loses, and why its stages differ: `bubble 2% of a step: ...`."""
    candidate = estimate.candidate
    share = estimate.time.parts.get("bubble", 0.0) / (estimate.time.seconds or 1.0)
    line = (
        f"pipeline: {candidate.schedule} of {candidate.accumulation:,} micro-batches on "
        f"{candidate.dims.pp} stages, bubble {share:.1%} of a step"
    )
    if estimate.after_blocks >= _SHOWN_BLOCKS:
        line += (
            f"; the layers after the last block cost as much as {estimate.after_blocks:.1f} blocks"
        )
    return line


def _run_in_words(run: tuple[int, int]) -> str:
    first, stop = run
    return str(first) if stop == first + 1 else f"{first}-{stop - 1}"


def sweep_table(key: str, rows: Sequence[tuple[str, Estimate | str]], width: int) -> Table:
    """Return a row for each value of a key.

    Args:
        rows: a value, and its estimate or why there is none.
    """
    unit = _unit([found for _, found in rows if not isinstance(found, str)])
    cells: dict[str, Callable[[Estimate], str | Text]] = {
        "states": lambda each: unit.text(state_bytes(fullest(each))),
        "activations": lambda each: unit.text(parts_of(fullest(each))["activations"]),
        "peak": lambda each: unit.text(fullest(each).allocated),
        "device": lambda each: unit.text(fullest(each).device_used),
        "fits": fits,
        "step": lambda each: step_range(each.time),
        "tok/s": lambda each: (
            formatting.count(each.time.tokens_per_s) if each.time.tokens_per_s else "-"
        ),
    }
    columns: dict[str, list[str | Text]] = {key: [value for value, _ in rows]}
    for name, cell in cells.items():  # the reason for there being none is told below
        columns[name] = ["-" if isinstance(found, str) else cell(found) for _, found in rows]
    missed_least = "tok/s", "activations", "states", "peak", "step"
    return _table(_fitting(columns, missed_least, width), unit)


def buffer_table(estimate: Estimate, pattern: str) -> Table:
    """Return every buffer whose name contains `pattern`, largest first, of each class of ranks."""
    names = "rank", "buffer", "kind", "where", "bytes", "alive"
    columns: dict[str, list[str | Text]] = {name: [] for name in names}
    for rank in estimate.ranks:
        chosen = [
            buffer
            for buffer in rank.buffers
            if pattern in buffer.name or pattern == buffer.kind.value
        ]
        for buffer in sorted(chosen, key=lambda each: (-each.num_bytes, each.name)):
            where = "pinned host" if buffer.pinned else buffer.tier.value
            alive = "always" if buffer.phases is None else ", ".join(sorted(buffer.phases))
            kind = MEANINGS.get(buffer.kind.value, buffer.kind.value)
            row = (rank.role, buffer.name, kind, where, f"{buffer.num_bytes:,}", alive)
            for name, value in zip(names, row, strict=True):
                columns[name].append(value)
    return _table(columns)


def offloaded(candidate: Candidate) -> str:
    """Return the states and activations that live elsewhere: `host: grad, optim 50%`."""
    placement = candidate.placement
    kinds = {
        "param": placement.param,
        "grad": placement.grad,
        "optim": placement.optimizer,
        "act": placement.activation,
    }
    away: dict[str, list[str]] = {}
    for kind, tier in kinds.items():
        if tier.value != "device":
            away.setdefault(tier.value, []).append(kind)
    share = f" {placement.fraction:.0%}" if away and placement.fraction < 1 else ""
    return "; ".join(f"{tier}: {', '.join(kinds)}" for tier, kinds in away.items()) + share


def time_lines(estimate: Estimate) -> list[str]:
    """Return lines about time and traffic."""
    time = estimate.time
    parts = ", ".join(
        f"{name} {_seconds(value)}" for name, value in time.parts.items() if value >= 5e-5
    )
    lines = [f"step: {step_range(time)}" + (f": {parts}" if parts else "")]
    rates = [f"{formatting.count(time.tokens_per_s)} tok/s"] if time.tokens_per_s else []
    rates += [f"MFU {time.mfu:.1%}"] if time.mfu else []
    rates += [f"HFU {time.hfu:.1%}"] if time.hfu and time.hfu != time.mfu else []
    lines += [f"speed: {', '.join(rates)}"] if rates else []
    lines += [pipeline_line(estimate)] if estimate.stages else []
    sent = [f"{format_size(size)} over {link}" for link, size in time.link_bytes.items() if size]
    lines += [f"sent per step and rank: {', '.join(sent)}"] if sent else []
    return [*lines, *_server_lines(estimate), *layer_lines(estimate)]


def _server_lines(estimate: Estimate) -> list[str]:
    """Return what goes to a parameter server and comes from it, if there is one."""
    if not estimate.pushed:
        return []
    pulled = format_size(estimate.traffic.get("pull", 0))
    return [
        f"parameter server: each other rank pushes {format_size(estimate.pushed)} per step, and "
        f"rank 0 answers all of them with {pulled}, exactly where each rank takes its share"
    ]


def layer_lines(estimate: Estimate) -> list[str]:
    """Return a line about what ranks with slices of the same layers send; none if there are none.

    Args:
        estimate: complete with traffic.
    """
    num_bytes = estimate.traffic.get("tensor")
    if not num_bytes:
        return []
    rank = "a rank of the first stage" if estimate.stages else "a rank"
    others = "those that have the other slices of its layers"
    return [f"tensor parallel: {rank} sends {format_size(num_bytes)} per step to {others}"]


def tier_lines(estimate: Estimate, hardware: Hardware, tokens_per_sample: int | None) -> list[str]:
    """Return lines about states that live elsewhere than on the device; none if none do.

    Args:
        tokens_per_sample: None where samples are no tokens.
    """
    rank = fullest(estimate)
    ranks = min(hardware.devices_per_node, estimate.candidate.dims.world_size)
    each = "" if ranks == 1 else f" of {ranks} ranks"
    lines = []
    if rank.pinned and not hardware.shares_memory:
        lines.append(
            f"host: {format_size(ranks * _elsewhere(rank, 'host'))}{each} in the memory of each "
            f"host, of {format_size(hardware.offload_bytes or hardware.host_bytes)}"
            f"{_moved(estimate, 'host')}"
        )
    if rank.disk:
        lines.append(
            f"disk: {format_size(ranks * rank.disk)}{each} on the disk of each host, of "
            f"{format_size(hardware.disk_bytes)} free{_moved(estimate, 'disk')}"
        )
    if estimate.time.update_behind:
        lines.append(_update_line(estimate, tokens_per_sample))
    return lines


def _elsewhere(rank: RankMemory, tier: str) -> int:
    return sum(buffer.num_bytes for buffer in rank.buffers if buffer.tier.value == tier)


def _moved(estimate: Estimate, tier: str) -> str:
    """Return what a step of a rank reads from a tier and writes to it: `; a step reads 1 GiB`."""
    words = {"read": "reads", "written": "writes"}
    parts = [
        f"{verb} {format_size(sum(kinds.values()))} ({', '.join(kinds)})"
        for direction, verb in words.items()
        if (kinds := estimate.moved.get(tier, {}).get(direction))
    ]
    return f"; a step of a rank {' and '.join(parts)}" if parts else ""


def _update_line(estimate: Estimate, tokens_per_sample: int | None) -> str:
    """Return whether the update of states elsewhere hides behind a forward."""
    candidate = estimate.candidate
    time = estimate.time
    where = "a disk" if candidate.placement.optimizer.value == "disk" else "the host"
    line = (
        f"update on {where}: {_seconds(time.update_behind)} beside a forward of "
        f"{_seconds(time.first_forward)}"
    )
    if time.update_behind <= time.first_forward:
        return f"{line}, which hides it"
    enough = math.ceil(candidate.micro * time.update_behind / time.first_forward)
    what = f"{formatting.count(enough)} samples"
    if tokens_per_sample:
        what = f"{formatting.count(enough * tokens_per_sample)} tokens"
    return (
        f"{line}: the rest adds to each step; more tokens per step reduce it, and a micro-batch "
        f"of {what} hides it"
    )


def whole_run(time: StepTime, num_steps: int) -> str:
    """Return how long all steps of a job take: `run: 192 steps in 32s (25s to 41s)`."""
    total, low, high = (
        _days(num_steps * each / _DAY_S) for each in (time.seconds, time.low, time.high)
    )
    return f"run: {num_steps:,} steps in {total} ({low} to {high}), without evaluations and saves"


def cost_of_tokens(time: StepTime, tokens: int, devices: int, price: float | None) -> str:
    """Return how long so many tokens take, and their price.

    Args:
        price: of a device for an hour; None: not given.
    """
    if not time.tokens_per_s:
        return f"{formatting.count(tokens)} tokens: this model's samples are not tokens"
    days = tokens / time.tokens_per_s / _DAY_S
    low, high = (days * each / time.seconds for each in (time.low, time.high))
    line = f"{formatting.count(tokens)} tokens: {_days(days)} ({_days(low)} to {_days(high)})"
    if price is not None:
        cost, least, most = (price * devices * 24 * each for each in (days, low, high))
        line += f"; {cost:,.0f} ({least:,.0f} to {most:,.0f}) at {price:g} for a device and hour"
    return line


def step_range(time: StepTime) -> str:
    """Return the time of a step with its range: `1.94s (1.7-2.1)`."""
    if not time.seconds:
        return "-"
    unit = "s"
    factor = 1.0
    if time.seconds < 0.1:
        unit = "ms"
        factor = 1e3
    digits = 0
    if 0.1 <= time.seconds < 10:
        digits = 2
    elif 10 <= time.seconds < 100:
        digits = 1
    low, high = (f"{value * factor:.{digits}f}" for value in (time.low, time.high))
    return f"{time.seconds * factor:.{digits}f}{unit} ({low}-{high})"


def fits(estimate: Estimate) -> Text:
    """Return a cell that says whether it fits, and by how much."""
    if estimate.fits and estimate.knows_states_only:
        return Text("cannot say", _DOUBTFUL)
    free = estimate.capacity - fullest(estimate).device_used
    if estimate.fits:
        share = free / estimate.capacity if estimate.capacity else 0.0
        return Text(f"yes, {share:.0%} free", _GOOD)
    return Text(f"no, +{format_size(-free)}" if free < 0 else "no: host memory", _BAD)


def state_bytes(rank: RankMemory) -> int:
    """Return the bytes on the device that are there in every phase of a step."""
    sizes = parts_of(rank)
    return sum(sizes[name] for name in ("params", "grads", "optim", "rings", "buffers"))


def paper_bytes(estimate: Estimate) -> int:
    """Return the bytes of a rank's model states, as papers count them."""
    return round(sum(estimate.paper.values()))


def _mark(estimate: Estimate) -> str:
    """Return the mark of numbers that are a bound: it is more than that."""
    return ">" if estimate.knows_states_only else ""


def _free(estimate: Estimate) -> Text:
    free = estimate.capacity - fullest(estimate).device_used
    if not estimate.fits:
        lacking = f"-{format_size(-free)}" if free < 0 else "host"
        return Text(lacking, _BAD)
    if not estimate.capacity:
        return Text("-", _GOOD)
    return Text(f"{free / estimate.capacity:.0%}", _GOOD)


def _seconds(value: float) -> str:
    return f"{value:,.0f}s" if value >= 100 else formatting.seconds(value)


def _step(time: StepTime) -> str:
    """Return a step time, with the longest that it may be where nobody has compared such ones."""
    longest = f" to {_seconds(time.high)}" if time.doubt > 1 else ""
    return f"{_seconds(time.seconds)}{longest}"


def _days(days: float) -> str:
    if days < 1:
        return formatting.duration(days * _DAY_S)
    return f"{days:.1f} days" if days < 100 else f"{days:,.0f} days"


def _share(value: float | None) -> str:
    return f"{value:.1%}" if value else "-"


def _unit(estimates: Sequence[Estimate]) -> formatting.Unit:
    """Choose one for all sizes of a table."""
    return formatting.Unit.of(max(each.device_used, paper_bytes(each)) for each in estimates)


def _fitting(
    columns: dict[str, list[str | Text]], missed_least: Sequence[str], width: int
) -> dict[str, list[str | Text]]:
    """Leave columns out, those that are missed least first, until the others fit."""
    shown = dict(columns)
    for name in missed_least:
        if sum(_least_width(*each) + 2 for each in shown.items()) - 2 > width:
            shown.pop(name, None)
    return shown


def _least_width(name: str, cells: Sequence[str | Text]) -> int:
    widest = max(len(str(each)) for each in (name, *cells))
    return min(widest, _WRAPPED.get(name, widest))


def _table(
    columns: dict[str, list[str | Text]],
    unit: formatting.Unit | None = None,
    styles: Sequence[str] = (),
) -> Table:
    """Make a table; the head of a column of sizes names their unit on a second line."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    left = {"", "fits", "checkpoint", "offloaded", "buffer", "kind", "where", "alive", "*"}
    has_sizes = unit is not None and not columns.keys().isdisjoint(_SIZES)
    for name, cells in columns.items():
        head = "" if name == "*" else name
        table.add_column(
            f"{head}\n{unit.name if name in _SIZES else ''}" if unit and has_sizes else head,
            justify="left" if name in left else "right",
            no_wrap=name not in _WRAPPED,
            min_width=_least_width(name, cells),
        )
    for number, row in enumerate(zip(*columns.values(), strict=True)):
        table.add_row(*row, style=styles[number] if styles else "")
    return table
