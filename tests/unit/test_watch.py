"""Events to state, state to screens."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from zrun.watch import text
from zrun.watch.follow import Follower
from zrun.watch.plain import Plain, message_line, step_line
from zrun.watch.report import report
from zrun.watch.screen import Json, Nothing, open_screen
from zrun.watch.state import Curve, RunState, fold
from zrun.watch.ui import Ui, choose
from zrun.watch.view import Facts, panel
from zrun_core.events import Event, encode

FACTS = Facts("gpt-1b", "20260102-030405-ab12", 2)
MIB = 1 << 20


def event(kind: str, **fields: Any) -> Event:
    """As it comes out of the file: through JSON."""
    decoded: Event = json.loads(encode({"type": kind, "time": 1.0, "rank": 0, **fields}))
    return decoded


START = event(
    "start",
    job="gpt-1b",
    world_size=2,
    params=10_200_000,
    stage=2,
    precision="bf16",
    device="cpu",
    total_steps=1000,
    planned_bytes={"params": 20 * MIB, "grads": 20 * MIB, "optim": 60 * MIB, "rings": 24 * MIB},
    notes=["parameter head.bias is never used"],
)


def step(number: int, **fields: Any) -> Event:
    known = {
        "loss": 5.0 / number,
        "lr": 3e-4,
        "grad_norm": 0.84,
        "loss_scale": 65536.0,
        "skips": 2,
        "total_tokens": 18_300 * number,
        "total_samples": 8 * number,
        "epoch": 0.5,
        "step_s": 1.0,
        "tokens_per_s": 18_300.0,
        "tflops": 412.0,
        "mfu": 0.416,
        "split": {"data": 0.03, "forward": 0.24, "backward": 0.47, "comm": 0.17, "optim": 0.09},
        "traffic": {"sent_bytes": 100},
    }
    return event("step", step=number, **{**known, **fields})


def memory(rank: int, number: int = 1, **fields: Any) -> Event:
    known = {"rss_bytes": 500 * MIB, "peak_rss_bytes": 600 * MIB, "params": 20 * MIB, "grads": 20 * MIB}
    return event("memory", **{"step": number, **known, "optim": 60 * MIB, "rings": 24 * MIB, "rank": rank, **fields})


def after(*events: Event) -> RunState:
    state = RunState()
    for each in events:
        state = fold(state, each)
    return state


RUNNING = after(START, *map(step, range(1, 121)), memory(0), memory(1), event("eval", step=100, loss=2.5, samples=64))
ENDED = fold(
    RUNNING,
    event(
        "end",
        step=120,
        reason="steps",
        total_s=240.0,
        loss=0.04,
        traffic={
            "all_gather": {"measured_bytes": 12 * MIB, "expected_bytes": 12 * MIB},
            "reduce_scatter": {"measured_bytes": 11 * MIB, "expected_bytes": 10 * MIB},
        },
        memory={"planned_bytes": 124 * MIB, "measured_bytes": 124 * MIB},
    ),
)


def draw(state: RunState, width: int, ascii_only: bool = False) -> str:
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(panel(state, FACTS, width, ascii_only))
    return console.export_text()


def test_speeds_are_of_the_last_steps_and_without_the_first() -> None:
    assert after(step(1, step_s=30.0)).step_s == 30.0
    state = after(START, step(1, step_s=30.0), step(2, step_s=1.0), step(3, step_s=3.0))
    assert state.step_s == 2.0
    assert state.eta_s == 997 * 2.0
    assert state.speed == (18_300.0, "tok/s")
    assert after(step(1, tokens_per_s=None, samples_per_s=8.0)).speed == (8.0, "samples/s")


def test_shares_of_a_step_add_up() -> None:
    assert math.isclose(sum(RUNNING.split.values()), 1.0)
    assert after(step(1, split=None)).split == {}
    assert RUNNING.traffic_bytes == 120 * 100


def test_numbers_that_json_lacks_arrive() -> None:
    state = after(step(1, loss=math.nan, grad_norm=math.inf, skipped=True))
    assert math.isnan(state.step.loss)
    assert state.step.grad_norm == math.inf
    assert state.losses.points == ()
    assert "loss nan" in step_line(state)
    assert "loss nan" in draw(state, 80)


def test_events_of_another_version_are_left_out() -> None:
    assert after(event("future", step=3)) == RunState()
    assert after(event("step", step=3, loss=1.0, unheard_of=1)).step.step == 3


def test_a_curve_stays_short_and_keeps_its_ends() -> None:
    curve = Curve()
    for value in range(10_000):
        curve = curve.add(float(value))
    assert len(curve.points) <= 512
    assert curve.points[0] == 0.0
    assert curve.points[-1] > 9_900
    gaps = {b - a for a, b in zip(curve.points, curve.points[1:], strict=False)}
    assert gaps == {float(curve.stride)}


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("state", [RunState(), after(START), RUNNING, ENDED], ids=["none", "start", "running", "ended"])
def test_the_panel_fits(state: RunState, width: int, ascii_only: bool) -> None:
    drawn = draw(state, width, ascii_only)
    lines = drawn.splitlines()
    assert all(len(line) <= width for line in lines)
    assert len(lines) <= 17
    assert drawn.isascii() == ascii_only


@pytest.mark.parametrize("width", [80, 140])
def test_the_panel_says_all(width: int) -> None:
    drawn = draw(RUNNING, width)
    for words in (
        "gpt-1b  20260102-030405-ab12  2 ranks  zero 2  bf16  cpu",
        "step 120/1000",
        "12%  eta 14m40s",
        "loss 0.0417 █",
        "eval 2.5000 at 100",
        "lr 0.0003  grad norm 0.84  scale 65536  skipped 2",
        "18.3k tok/s  1.00s/step  412 TFLOP/s per rank  MFU 41.6%",
        "data 3%  forward 24%  backward 47%  comm 17%  optim 9%",
        " 376.0M ",  # what no kind accounts for
        "plan",
    ):
        assert words in drawn, words


def test_the_split_bar_is_filled() -> None:
    bar = text.share_bar([0.03, 0.24, 0.47, 0.17, 0.09], "dFBCO", 40)
    assert sum(size for _, size in bar) == 40
    assert bar[2] == ("B", 19)


def test_without_a_total_progress_is_what_was_consumed() -> None:
    drawn = draw(after(event("start", total_steps=None), step(3)), 80)
    assert "step 3  epoch 0.50  54.9k tokens" in drawn


def test_many_ranks_are_summed_up() -> None:
    state = after(START, step(1), *(memory(rank, rss_bytes=(500 + rank) * MIB) for rank in range(64)))
    drawn = draw(state, 140)
    assert len(drawn.splitlines()) <= 18
    assert " 63 " in drawn
    assert "+56" in drawn


def test_a_device_shows_its_own_memory() -> None:
    drawn = draw(after(START, step(1), memory(0, device_allocated=130 * MIB, device_reserved=150 * MIB)), 80)
    assert "device" in drawn
    assert "130.0M" in drawn
    assert " 6.0M " in drawn


def test_a_plain_line_says_all() -> None:
    assert step_line(RUNNING) == (
        "step 120/1000 loss 0.0416667 lr 0.0003 gnorm 0.84 scale 65536 skip 2 tok/s 18.3k tflops 412 mfu 41.6% "
        "mem 500.0M step 1.00s eta 14m40s"
    )


def test_plain_prints_the_first_each_nth_and_the_last_step() -> None:
    out = io.StringIO()
    follower = Follower(Plain(out, every=4), lambda _: None)
    for each in (
        event("start", params=5, total_steps=10, stage=0, precision="fp32", device="cpu"),
        *map(step, range(1, 11)),
    ):
        follower.event(each)
    follower.event(event("warning", message="[red]half[/red]", rank=1))
    follower.turn()
    follower.close()
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines[1:-1]] == ["1/10", "4/10", "8/10", "10/10"]
    assert lines[0] == "start: 5 parameters, zero 0, fp32, cpu"
    assert lines[-1] == "warning (rank 1): [red]half[/red]"
    assert "\x1b" not in out.getvalue()


def test_what_hooks_record_is_on_every_screen() -> None:
    out = io.StringIO()
    follower = Follower(Plain(out, every=4), lambda _: None)
    for number in range(1, 6):
        follower.event(step(number))
        follower.event(event("metrics", step=number, hook="on_step", values={"temper": number}))
    follower.event(event("metrics", step=5, hook="on_eval", values={"bleu": 31.25, "temper": 9}))
    end = event("end", step=5, reason="hook", why="hooks.on_step: enough", total_s=5.0)
    follower.event(end)
    follower.turn()
    told = [line for line in out.getvalue().splitlines() if line.startswith("metrics")]
    assert told == ["metrics at step 4: temper 4", "metrics at step 5: bleu 31.25  temper 9"]
    assert "temper 9  bleu 31.25" in draw(follower.state, 80)
    summary = report(follower.state, Path("runs/x"))
    assert "5 steps in 5.0s (hook: hooks.on_step: enough)\n" in summary
    assert "  temper 9  bleu 31.25\n" in summary


def test_notes_are_told_at_the_start() -> None:
    out = io.StringIO()
    Plain(out, 1).show(after(START), START)
    assert "note: parameter head.bias is never used" in out.getvalue()


def test_json_is_the_events_themselves() -> None:
    out = io.StringIO()
    follower = Follower(Json(out), lambda _: None)
    follower.event(step(1, loss=1 / 3))
    follower.turn()
    assert json.loads(out.getvalue())["loss"] == 1 / 3


def test_a_screen_that_is_gone_does_not_end_the_run() -> None:
    class Gone(Nothing):
        def show(self, state: RunState, event: Event) -> None:
            raise BrokenPipeError

    kept: list[bytes] = []
    follower = Follower(Gone(), kept.extend)
    follower.event(step(1))
    follower.turn()
    follower.event(step(2), b'{"type": "step", "step": 2}')
    follower.close()
    assert json.loads(kept[0])["step"] == 1
    assert kept[1:] == [b'{"type": "step", "step": 2}'], "as it came"
    assert follower.state.step.step == 2


def test_what_thousands_of_ranks_hold_is_kept_by_rank_and_shown_once_each() -> None:
    out = io.StringIO()
    follower = Follower(Json(out), lambda _: None)
    events = [event("memory", step=n, rank=rank, rss_bytes=n) for n in (1, 2) for rank in (5000, 0, 63, 64, 7)]
    for each in [*events[:8], step(1), *events[8:]]:
        follower.event(each)
    follower.turn()
    memory = follower.state.memory
    assert sorted(memory) == [0, 7, 63, 64, 5000]
    assert len(memory) == 5
    assert {rank: told["rss_bytes"] for rank, told in memory.items()} == dict.fromkeys((0, 7, 63, 64, 5000), 2)
    before = RunState().memory.plus([events[0]])
    after = before.plus([events[5]])
    assert (before[5000]["step"], after[5000]["step"]) == (1, 2), "what there was stays what it is"
    assert not RunState().memory
    shown = [json.loads(line) for line in out.getvalue().splitlines()]
    told = [*events[:8], step(1), *events[8:]]
    assert [(each["type"], each["rank"]) for each in shown] == [(each["type"], each["rank"]) for each in told]


@pytest.mark.parametrize(
    ("asked", "is_tty", "environ", "width", "chosen"),
    [
        (Ui.auto, True, {}, 80, Ui.live),
        (Ui.auto, False, {}, 80, Ui.plain),
        (Ui.auto, True, {}, 59, Ui.plain),
        (Ui.auto, True, {"TERM": "dumb"}, 80, Ui.plain),
        (Ui.auto, True, {"CI": "true"}, 80, Ui.plain),
        (Ui.auto, True, {"NO_COLOR": "1"}, 80, Ui.plain),
        (Ui.live, False, {"CI": "true"}, 40, Ui.live),
        (Ui.json, True, {}, 80, Ui.json),
    ],
)
def test_which_screen(asked: Ui, is_tty: bool, environ: dict[str, str], width: int, chosen: Ui) -> None:
    assert choose(asked, is_tty, environ, width) is chosen


def test_the_live_screen_prints_messages_above_its_panel() -> None:
    class Terminal(io.StringIO):
        encoding = "latin-1"

        def isatty(self) -> bool:
            return True

    out = Terminal()
    follower = Follower(open_screen(Ui.live, FACTS, 10, out, {"TERM": "xterm"}), lambda _: None)
    for each in (START, step(1), event("log", message="[b]bold[/b]")):
        follower.event(each)
        follower.turn()
    follower.close()
    written = out.getvalue()
    assert "rank 0: [b]bold[/b]" in written
    assert "step 1/1000" in written.rpartition("[b]bold[/b]")[2]
    assert written.isascii()


def test_the_report_sums_up() -> None:
    assert report(ENDED, Path("runs/x")).splitlines() == [
        "done                    120 steps in 4m00s (steps)",
        "loss                    5.0000 at the first step, 0.0417 at the last",
        "validation              2.5000 (step 100)",
        "speed                   9.2k tok/s over the whole run, 1.00s/step lately, MFU 41.6%",
        "traffic all_gather      12.0 MiB measured, equal to theory",
        "traffic reduce_scatter  11.0 MiB measured, 10.0 MiB theory (+10.00%)",
        "memory                  124.0 MiB measured, equal to planned",
        "run                     runs/x",
    ]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.04, "0.0s"), (9.94, "9.9s"), (59.6, "1m00s"), (3600, "1h00m"), (200_000, "2d07h")]
)
def test_durations(seconds: float, shown: str) -> None:
    assert text.duration(seconds) == shown


def test_small_texts() -> None:
    assert [text.count(value) for value in (0, 0.5, 999, 1000, 18_300, 2e6, 3e9, 4e12)] == [
        *("0", "0.5", "999", "1.0k", "18.3k", "2.0M", "3.0G", "4.0T"),
    ]
    assert text.seconds(0.0123) == "12ms"
    assert text.sparkline([], 10, False) == ""
    assert text.sparkline([1.0, 1.0], 10, True) == "__"
    assert text.sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8, False) == "▁▂▃▄▅▆▇█"
    assert message_line(event("memory")) is None


def test_a_logged_message_cannot_steer_the_terminal() -> None:
    line = message_line(event("log", message="def f():\n\treturn\x1b[31m\r\x07 é"))
    assert line == "rank 0: def f():\n        return�[31m�� é"


def test_saves_are_drawn() -> None:
    save = event("save", step=50, path="/x", reason="due", bytes=1200 * MIB, seconds=0.8, stall_s=0.1, removed=[])
    assert "ckpt 50" in draw(after(START, step(50), save, step(51)), 100)
    assert "ckpt" not in draw(after(START, step(50)), 100)
    assert message_line(save) == f"saved step 50 ({text.size(1200 * MIB)}, {text.seconds(0.8)})"
