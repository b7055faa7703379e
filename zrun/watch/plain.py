"""One line at a time, for files and pipes: no colour, nothing is ever overwritten."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TextIO

from zrun.watch import formatting
from zrun.watch.profile_table import profile_text
from zrun.watch.remaining import remaining
from zrun.watch.run_state import RunState, Step
from zrun.watch.tiers import in_short, planned_elsewhere
from zrun_core.sizes import format_size
from zrun_core.spine.events import Event
from zrun_core.spine.printable import printable

_OF_STEPS = ("on_step", "script")  # hooks whose numbers come with every step


class Plain:
    """Prints a line every `every` steps, and each evaluation and message."""

    def __init__(self, out: TextIO, every: int) -> None:
        self._out = out
        self._every = every

    def show(self, state: RunState, event: Event) -> None:
        line = self._line(state, event)
        if line is not None:
            print(line, file=self._out, flush=True)

    def turn(self, state: RunState) -> None:
        """Lines come with events."""

    def close(self, state: RunState) -> None:
        """Lines are complete as they are."""

    def _line(self, state: RunState, event: Event) -> str | None:
        match event.get("type"):
            case "start":
                return start_line(event)
            case "step":
                step = state.step.step
                if step % self._every and step not in (1, state.total_steps):
                    return None
                return step_line(state)
            case "phase":
                seconds = formatting.duration(float(event["seconds"]))
                return f"{printable(str(event.get('what')))}: {seconds} so far"
            case "metrics" if event.get("hook") in _OF_STEPS:
                if event["step"] % self._every:
                    return None
                return metrics_line(event)
        return message_line(event)


def start_line(event: Event) -> str:
    if event.get("params") is None:  # of a script
        return "\n".join([f"start: zrun_core on {event.get('device')}", *_notes(event)])
    params = f"{formatting.count(event.get('params') or 0)} parameters"
    how = f"zero {event.get('stage')}, {event.get('precision')}, {event.get('device')}"
    line = f"start: {params}, {how}"
    if elsewhere := planned_elsewhere(event):
        line += f"; rank 0 plans {elsewhere}"
    return "\n".join([line, *_notes(event)])


def _notes(event: Event) -> list[str]:
    return [f"note: {printable(str(note))}" for note in event.get("notes") or ()]


def message_line(event: Event) -> str | None:
    """Return the line of an event that is worth one on any screen; None if it is not."""
    match event.get("type"):
        case "start":
            return "\n".join(_notes(event)) or None
        case "eval":
            numbers = formatting.metrics(event.get("metrics") or {"loss": event["loss"]})
            return f"eval at step {event['step']}: {numbers} over {event.get('samples')} samples"
        case "metrics" if event.get("hook") not in _OF_STEPS:
            return metrics_line(event)
        case "save":
            size = format_size(int(event.get("bytes") or 0))
            cost = f"{size}, {formatting.seconds(float(event.get('seconds') or 0))}"
            best = event.get("best")
            mark = ""
            if best:
                mark = f", the best so far: {formatting.metrics({best['metric']: best['value']})}"
            return f"saved step {event['step']} ({cost}){mark}"
        case "profile":
            return profile_text(event)
        case "estimate":
            return f"estimate: {formatting.foretold(event)}"
        case "warning":
            return f"warning (rank {event['rank']}): {printable(str(event.get('message')))}"
        case "stop" if event.get("signal") != "SIGUSR1":  # the launcher's own way to ask
            return f"rank {event['rank']}: {event.get('signal')}: finishing the step"
        case "output":
            return output_lines(event)
        case "log":
            return f"rank {event['rank']}: {printable(str(event.get('message')))}"
    return None


def output_lines(event: Event) -> str:
    """Return the output of a rank; each line says which rank."""
    rank = f"rank {event['rank']}"
    left_out = int(event.get("left_out") or 0)
    lines = [f"{rank}: {line}" for line in event.get("lines") or ()]
    if left_out:
        number = f"{left_out:,} lines"
        if left_out == 1:
            number = "1 line"
        log = str(event.get("log")).removeprefix(f"{os.getcwd()}/")
        lines.insert(0, f"{rank}: ... {number} left out, see {log}")
    return "\n".join(lines)


def metrics_line(event: Event) -> str:
    return f"metrics at step {event['step']}: {formatting.metrics(event.get('values') or {})}"


def _update(step: Step) -> Iterator[str]:
    """Yield what a step says of its update."""
    if step.has_loss:
        yield f"loss {step.loss:.6g}"
    if step.lr is not None:
        yield f"lr {step.lr:.3g}"
    if step.grad_norm is not None:
        yield f"gnorm {step.grad_norm:.3g}"
    if step.loss_scale is not None:
        yield f"scale {step.loss_scale:g} skip {step.skips}"


def _of_total(state: RunState) -> str:
    if state.total_steps is None:
        return f"{state.step.step}"
    return f"{state.step.step}/{state.total_steps}"


def step_line(state: RunState) -> str:
    """Return the line of the newest step."""
    step = state.step
    parts = [f"step {_of_total(state)}", *_update(step)]
    if state.speed is not None:
        parts.append(f"{state.speed[1]} {formatting.count(state.speed[0])}")
    if state.tflops is not None:
        number, unit = formatting.flops(state.tflops)
        parts.append(f"{unit.lower()}flops {number}")
    if state.mfu is not None:
        parts.append(f"mfu {state.mfu:.1%}")
    if state.memory:
        held = max(
            event.get("device_allocated") or event.get("rss_bytes") or 0
            for event in state.memory.events
        )
        parts.append(f"mem {format_size(held)}")
    parts += in_short(state)
    if state.step_s is not None:
        parts.append(f"step {formatting.seconds(state.step_s)}")
    if step.epoch is not None:
        parts.append(f"epoch {step.epoch:.2f}")
    if state.elapsed_s is not None:
        parts.append(f"elapsed {formatting.duration(state.elapsed_s)}")
    if (left := remaining(state)) is not None:
        parts.append(f"eta {left}")
    return " ".join(parts)
