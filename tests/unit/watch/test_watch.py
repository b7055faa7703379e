"""Events to state, state to screens."""

from __future__ import annotations

import io
import json
import math
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, ConsoleDimensions

from zrun.system.output import Dispensable
from zrun.watch import formatting
from zrun.watch.follow import Follower
from zrun.watch.live import Live
from zrun.watch.panel import panel
from zrun.watch.panel_layout import Facts
from zrun.watch.phases import Doing
from zrun.watch.plain import Plain, message_line, start_line, step_line
from zrun.watch.remaining import Remaining, remaining
from zrun.watch.report import report
from zrun.watch.run_state import Curve, RunState, fold
from zrun.watch.screen import Json, Nothing, open_screen
from zrun.watch.stragglers import Stragglers
from zrun.watch.ui import Ui, choose
from zrun_core.errors import HangError
from zrun_core.spine.events import Event, encode

FACTS = Facts("gpt-1b", "20260102-030405-ab12", ("localhost",) * 2)
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
        "tokens": 18_300,
        "samples": 8,
        "tflops": 412.0,
        "mfu": 0.416,
        "split": {"data": 0.03, "forward": 0.24, "backward": 0.47, "comm": 0.17, "optim": 0.09},
        "traffic": {"sent_bytes": 100},
    }
    return event("step", step=number, **{**known, **fields})


def memory(rank: int, number: int = 1, **fields: Any) -> Event:
    known = {
        "rss_bytes": 500 * MIB,
        "peak_rss_bytes": 600 * MIB,
        "params": 20 * MIB,
        "grads": 20 * MIB,
    }
    return event(
        "memory",
        **{"step": number, **known, "optim": 60 * MIB, "rings": 24 * MIB, "rank": rank, **fields},
    )


def after(*events: Event) -> RunState:
    state = RunState()
    for each in events:
        state = fold(state, each)
    return state


RUNNING = after(
    START,
    *map(step, range(1, 121)),
    memory(0),
    memory(1),
    event("eval", step=100, loss=2.5, samples=64),
)
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


def draw(state: RunState, width: int, ascii_only: bool = False, height: int = 100) -> str:
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(panel(state, FACTS, width, height, ascii_only=ascii_only))
    return console.export_text()


def test_all_speeds_are_of_the_same_steps_without_those_that_warm_up() -> None:
    assert after(step(201, step_s=30.0)).step_s == 30.0
    assert after(step(201, step_s=30.0), step(202, step_s=9.0)).step_s == 9.0
    warm = step(201, step_s=30.0), step(202, step_s=9.0, mfu=0.1)
    state = after(START, *warm, step(203, step_s=1.0), step(204, step_s=3.0, mfu=0.2))
    assert state.step_s == 2.0
    assert remaining(state) == Remaining((1000 - 204) * 2.0)
    assert state.speed == (18_300 / state.step_s, "tok/s"), "tokens of a step = speed x its time"
    assert state.mfu == pytest.approx((0.416 + 3 * 0.2) / 4)
    assert after(step(1, tokens=0)).speed == (8.0, "samples/s")


EVALS, SAVES = (
    {"every": 100, "minutes": None, "at_end": True},
    {"every": 300, "minutes": None, "at_end": True},
)


def left(*events: Event, total_steps: int = 1000, **pauses: Any) -> str:
    start = event("start", total_steps=total_steps, pauses=pauses)
    return str(remaining(after(start, *map(step, range(1, 251)), *events)))


def test_the_time_that_is_left_counts_evaluations_and_saves() -> None:
    evaluated = event("eval", step=200, loss=1.0, seconds=60.0)
    saved = event("save", step=240, stall_s=30.0)
    assert left() == "12m30s"  # 750 steps of a second
    assert left(eval=EVALS) == ">12m30s"  # nobody knows how long one takes
    assert left(evaluated, eval=EVALS) == "20m30s"  # and 8 evaluations
    assert (
        left(evaluated, saved, eval=EVALS, save=SAVES) == "22m30s"
    )  # and saves at 300, 600, 900, 1000
    assert left(saved, save=SAVES | {"at_end": False}) == "14m00s"
    assert (
        left(saved, save=SAVES | {"every": None, "minutes": 5}) == "14m00s"
    )  # two and the last one
    assert left(evaluated, eval=EVALS, total_steps=250) == "1m00s"  # it is under way
    at_end = event("eval", step=250, loss=1.0, seconds=60.0)
    assert left(at_end, eval=EVALS, total_steps=250) == "0.0s"
    assert left(evaluated, eval=EVALS | {"every": None}) == "13m30s"


def test_a_run_that_goes_on_does_not_make_its_evaluations_again() -> None:
    start = event("start", total_steps=1000, pauses={"eval": EVALS}, resumed={"step": 900})
    state = after(
        start, step(901), step(902), step(903), event("eval", step=900, loss=1.0, seconds=10.0)
    )
    assert remaining(state) == Remaining(97.0 + 10.0)
    assert remaining(after(start, step(901))) == Remaining(99.0, is_least=True)


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
    assert "loss     nan" in draw(state, 80)


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


@pytest.mark.parametrize("width", [40, 60, 80, 120, 140])
@pytest.mark.parametrize("height", [8, 10, 16, 24, 50])
@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize(
    "state", [RunState(), after(START), RUNNING, ENDED], ids=["none", "start", "running", "ended"]
)
def test_the_panel_fits_and_cuts_no_word(
    state: RunState, width: int, height: int, ascii_only: bool
) -> None:
    drawn = draw(state, width, ascii_only, height)
    lines = drawn.splitlines()
    assert all(len(line) == width for line in lines)
    assert len(lines) <= max(5, height * 2 // 3)
    assert drawn.isascii() == ascii_only
    whole = draw(state, 140, ascii_only)
    curves = "_.-=+*#@" if ascii_only else "━─▁▂▃▄▅▆▇█"
    for word in re.findall(r"[\w./%]+", drawn):
        assert word in re.findall(r"[\w./%]+", whole) or set(word) <= {*curves, *"dFBCO"}, word


@pytest.mark.parametrize("width", [80, 140])
def test_the_panel_says_all(width: int) -> None:
    drawn = draw(RUNNING, width)
    for words in (
        "gpt-1b  20260102-030405-ab12  2 ranks  zero 2  bf16  cpu",
        "step     120/1000  ━",
        "12%  eta 14m40s",
        "epoch 0.50  2.2M tokens",
        "loss     0.0417  █",
        "eval 2.5000 at step 100",
        "lr 0.0003  grad norm 0.84  loss scale 65536  2 steps skipped",
        "18.3k tok/s  1.00s/step  412 TFLOP/s per rank  MFU 41.6%",
        "data 3%  forward 24%  backward 47%  comm 17%  optim 9%",
        "MiB      params  grads  optim  rings  other    rss   peak",
        # no kind accounts for the others
        "rank 1     20.0   20.0   60.0   24.0  376.0  500.0  600.0",
        "planned    20.0   20.0   60.0   24.0 ",
    ):
        assert words in drawn, words


def test_the_panel_says_what_is_being_done() -> None:
    def drawn(state: RunState, step: int, *, is_long: bool) -> str:
        doing = Doing(0, step, "evaluation", "evaluating", 12.0, is_long)
        return draw(replace(state, doing=doing), 80)

    assert "step     starting 2 workers  evaluating 12s" in drawn(RunState(), 0, is_long=False)
    assert "step     10.2M parameters ready  evaluating 12s" in drawn(after(START), 0, is_long=True)
    assert "run      evaluating 12s  epoch 0.50" in drawn(RUNNING, 120, is_long=True)
    assert "evaluating" not in drawn(RUNNING, 120, is_long=False)
    assert "evaluating" not in drawn(RUNNING, 119, is_long=True)  # a board is seen late


def test_the_split_bar_is_filled() -> None:
    bar = formatting.share_bar([0.03, 0.24, 0.47, 0.17, 0.09], "dFBCO", 40)
    assert sum(size for _, size in bar) == 40
    assert bar[2] == ("B", 19)


def test_without_a_total_progress_is_what_was_consumed() -> None:
    drawn = draw(after(event("start", total_steps=None), step(3)), 80)
    assert "step     3 " in drawn
    assert "epoch 0.50  54.9k tokens" in drawn


def test_many_ranks_are_summed_up() -> None:
    state = after(
        START, step(1), *(memory(rank, rss_bytes=(500 + rank) * MIB) for rank in range(64))
    )
    drawn = draw(state, 140)
    assert len(drawn.splitlines()) <= 18
    rows = [line.split()[1:3] for line in drawn.splitlines()[-8:-1]]
    assert [row[0] for row in rows[:4]] == ["MiB", "min", "median", "max"]
    assert rows[4:] == [["rank", "63"], ["rank", "62"], ["planned", "20.0"]]
    assert re.search(r"median .* 531.5  600.0", drawn)


def spent(forward: float, comm: float, data: float = 0.0) -> dict[str, Any]:
    return {
        "split": {"data": data, "forward": forward, "backward": 0.2, "comm": comm, "optim": 0.0}
    }


def test_of_many_ranks_the_slowest_can_be_seen() -> None:
    late = {17: spent(0.4, 0.0)}
    told = [memory(rank, **late.get(rank, spent(0.2, 0.2))) for rank in range(64)]
    hosts = tuple(f"n{rank // 8}" for rank in range(64))
    places = tuple(f"pp {rank // 32} tp {rank % 2}" for rank in range(64))
    facts = Facts("gpt-1b", "20260102-030405-ab12", hosts, places)
    for width, name in ((140, r"rank 17 on n2 \(pp 0 tp 1\)"), (60, "rank 17")):
        console = Console(record=True, width=width, file=io.StringIO())
        console.print(panel(after(START, step(1), *told), facts, width))
        drawn = console.export_text()
        assert re.search(r"MiB +busy ", drawn)
        assert re.search(r"median +0.40s ", drawn)
        assert re.search(rf"{name} +0.60s ", drawn)
    assert "planned" not in draw(after(START, step(1), told[0]), 40), "no column of it is left"
    assert re.search(r"rank 1 +0.40s +20.0", draw(after(START, step(1), *told[:2]), 80)), (
        "few: each of them"
    )


def test_a_rank_that_stays_slow_is_named_once() -> None:
    facts = Facts("gpt-1b", "id", ("n0", "n0", "n1", "n1"))
    stragglers, told = Stragglers(facts), list[Event]()

    def pass_on(number: int, **late: dict[str, Any]) -> None:
        for rank in (3, 0, 1, 2):
            split = late.get(f"rank{rank}", spent(0.2, 0.2))
            stragglers.see(memory(rank, number, **split), told.append)

    pass_on(1, rank0=spent(9.0, 0.0))  # the first step warms up
    pass_on(10, rank1=spent(0.4, 0.0))
    pass_on(20, rank1=spent(0.4, 0.0), rank2=spent(0.4, 0.0))
    pass_on(30, rank2=spent(0.4, 0.0))
    assert not told, "rank 1 has recovered, rank 2 may"
    for number in (40, 50, 60):
        pass_on(number, rank2=spent(0.2, 0.0, data=0.25))
    (warning,) = told
    assert (warning["type"], warning["rank"]) == ("warning", 2)
    assert warning["message"] == (
        "rank 2 on n1 is slow, and the others wait for it: busy 0.65s of each step, the median "
        "rank 0.40s, most of the difference is in data; this has been so for 30 steps"
    )


def test_in_a_pipeline_a_slow_stage_is_no_slow_rank() -> None:
    """Ranks are compared within their stages, and stages with each other."""
    facts = Facts("gpt-1b", "id", ("n0", "n0", "n1", "n1"))
    stragglers, told = Stragglers(facts), list[Event]()
    times = [spent(0.2, 0.4), spent(0.4, 0.2), spent(0.6, 0.0), spent(0.6, 0.0)]
    for number in (1, 10, 20, 30, 40):
        for rank, split in enumerate(times):
            stage = {"pipeline": {"stage": rank // 2}}
            stragglers.see(memory(rank, number, **stage, **split), told.append)
    assert [each["message"] for each in told] == [
        "stage 1 (rank 2 on n1, rank 3 on n1) is slow, and the others wait for it: busy 0.80s of "
        "each step, the median stage 0.40s, most of the difference is in forward; this has been so "
        "for 29 steps; move the borders with parallel.split",
        "rank 1 on n0 is slow, and the others wait for it: busy 0.60s of each step, the median "
        "rank 0.40s, most of the difference is in forward; this has been so for 29 steps",
    ]


def test_what_a_gpu_waits_for_is_not_its_own() -> None:
    on_gpu = {"device_allocated": MIB, "device_reserved": MIB}
    stragglers, told = Stragglers(FACTS), list[Event]()
    for number in (1, 10, 20, 30):
        stragglers.see(memory(0, number, **on_gpu, **spent(0.2, 0.4)), told.append)
        stragglers.see(memory(1, number, **on_gpu, **spent(0.2, 0.0, data=0.4)), told.append)
    assert ["rank 1 is slow" in each["message"] for each in told] == [True]
    assert "most of the difference is in data" in told[0]["message"]
    drawn = draw(after(START, step(1), memory(0, **on_gpu, **spent(0.6, 0.0))), 80)
    assert re.search(r"MiB +busy +params", drawn)


def test_a_device_shows_its_own_memory() -> None:
    drawn = draw(
        after(START, step(1), memory(0, device_allocated=130 * MIB, device_reserved=150 * MIB)), 80
    )
    assert re.search(r"other +peak +reserved", drawn)
    assert re.search(r"rank 0 .* 6.0 +130.0 +150.0", drawn)


def test_sensors_of_gpus_are_columns() -> None:
    """Where a GPU tells nothing its cells are empty; in a narrow panel they go before times."""
    on_gpu = {"device_allocated": 130 * MIB, "device_reserved": 150 * MIB}
    sensed = {"utilisation": 97, "power_w": 412.6, "temperature_c": 71, "slowed": []}
    gpus = [{"rank": 0, **sensed}, {"rank": 1, "utilisation": None}]
    told = [START, step(1), *(memory(rank, **on_gpu, **spent(0.6, 0.0)) for rank in (0, 1))]
    told.append({"type": "gpus", "time": 0.0, "rank": 0, "gpus": gpus})
    drawn = draw(after(*told), 120)
    assert re.search(r"MiB +busy +gpu +power +heat +params", drawn)
    assert re.search(r"rank 0 .* 97% +413 W +71 C", drawn)
    assert re.search(r"rank 1 [^%]*\n", drawn)
    narrow = draw(after(*told), 40)
    assert "heat" not in narrow
    assert re.search(r"gpu +power +peak", narrow)


def test_what_is_missed_least_goes_first() -> None:
    low = draw(RUNNING, 80, height=10)
    assert "loss" in low
    assert "tok/s" in low
    assert "rank 0" not in low
    narrow = draw(RUNNING, 40, height=50)
    assert "rss" in narrow
    assert "rings" not in narrow
    assert "gpt-1b  2 ranks  zero 2  bf16  cpu" in narrow
    assert FACTS.run_id not in narrow


def test_a_table_has_one_unit_for_all_its_sizes() -> None:
    assert formatting.Unit.of([]).name == "KiB"
    assert formatting.Unit.of([3 * MIB, 10 * MIB]).text(3 * MIB) == "3.0"
    assert formatting.Unit.of([3 * MIB]).name == "KiB"
    assert formatting.Unit.of([9 << 30, MIB]).name == "MiB"
    assert formatting.Unit.of([61 << 30, MIB]).text(100 * MIB) == "0.10"


@pytest.mark.parametrize(
    ("tera", "shown"),
    [
        (412.0, ("412", "T")),
        (0.00321, ("0.00321", "T")),
        (3.15e-5, ("0.0315", "G")),
        (5e-7, ("0.5", "M")),
    ],
)
def test_slow_ranks_have_a_smaller_unit(tera: float, shown: tuple[str, str]) -> None:
    assert formatting.flops(tera) == shown


def test_a_plain_line_says_all() -> None:
    assert step_line(replace(RUNNING, elapsed_s=125.0)) == (
        "step 120/1000 loss 0.0416667 lr 0.0003 gnorm 0.84 scale 65536 skip 2 tok/s 18.3k tflops "
        "412 mfu 41.6% "
        "mem 500.0 MiB step 1.00s epoch 0.50 elapsed 2m05s eta 14m40s"
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


def test_every_number_of_an_evaluation_is_shown() -> None:
    def evaluated(step: int, **metrics: float) -> Event:
        values = {name.replace("_", "/"): value for name, value in metrics.items()}
        return event("eval", step=step, loss=metrics["val_loss"], metrics=values, samples=64)

    first = evaluated(100, val_loss=2.5, code_loss=3.5, code_accuracy=0.25)
    last = evaluated(200, val_loss=1.5, code_loss=2.0, code_accuracy=0.75)
    assert message_line(first) == (
        "eval at step 100: val/loss 2.5  code/loss 3.5  code/accuracy 0.25 over 64 samples"
    )
    state = after(START, step(1), first, last, event("end", step=200, reason="steps"))
    drawn = draw(state, 80)
    assert "eval 1.5000 at step 200" in drawn
    assert "code/loss 2  code/accuracy 0.75" in drawn
    assert "validation code/accuracy  0.2500 (step 100) -> 0.7500 (step 200)" in report(
        state, Path("x")
    )


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


def test_a_mistake_in_drawing_does_not_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    class Mistaken(Nothing):
        def turn(self, state: RunState) -> None:
            raise KeyError("step")

    follower = Follower(Mistaken(), lambda _: None)
    for number in (1, 2):
        follower.event(step(number))
        follower.turn()
    follower.close()
    assert follower.state.step.step == 2
    left_out = "warning: the screen is off from here on: KeyError: 'step'\n"
    assert capsys.readouterr().err == left_out


def test_what_is_dispensable_is_left_out_once_it_fails(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []

    def fails_at_two(number: int) -> None:
        calls.append(number)
        if number == 2:
            raise TypeError("no number")
        if number == 0:
            raise HangError("stopped")

    tell = Dispensable("the report")
    with pytest.raises(HangError):
        tell(fails_at_two, 0)
    for number in (1, 2, 3):
        tell(fails_at_two, number)
    assert calls == [0, 1, 2]
    left_out = "warning: the report is off from here on: TypeError: no number\n"
    assert capsys.readouterr().err == left_out


def test_what_thousands_of_ranks_hold_is_kept_by_rank_and_shown_once_each() -> None:
    out = io.StringIO()
    follower = Follower(Json(out), lambda _: None)
    events = [
        event("memory", step=n, rank=rank, rss_bytes=n)
        for n in (1, 2)
        for rank in (5000, 0, 63, 64, 7)
    ]
    for each in [*events[:8], step(1), *events[8:]]:
        follower.event(each)
    follower.turn()
    memory = follower.state.memory
    assert sorted(memory) == [0, 7, 63, 64, 5000]
    assert len(memory) == 5
    assert {rank: told["rss_bytes"] for rank, told in memory.items()} == dict.fromkeys(
        (0, 7, 63, 64, 5000), 2
    )
    before = RunState().memory.plus([events[0]])
    after = before.plus([events[5]])
    assert (before[5000]["step"], after[5000]["step"]) == (1, 2), "what there was stays what it is"
    assert not RunState().memory
    shown = [json.loads(line) for line in out.getvalue().splitlines()]
    told = [*events[:8], step(1), *events[8:]]
    assert [(each["type"], each["rank"]) for each in shown] == [
        (each["type"], each["rank"]) for each in told
    ]


@pytest.mark.parametrize(
    ("asked", "is_tty", "environ", "width", "chosen"),
    [
        (Ui.auto, True, {}, 80, Ui.live),
        (Ui.auto, False, {}, 80, Ui.plain),
        (Ui.auto, True, {}, 40, Ui.live),
        (Ui.auto, True, {}, 39, Ui.plain),
        (Ui.auto, True, {"TERM": "dumb"}, 80, Ui.plain),
        (Ui.auto, True, {"CI": "true"}, 80, Ui.plain),
        (Ui.auto, True, {"NO_COLOR": "1"}, 80, Ui.live),
        (Ui.auto, False, {"FORCE_COLOR": "1"}, 80, Ui.plain),
        (Ui.live, False, {"CI": "true"}, 40, Ui.live),
        (Ui.json, True, {}, 80, Ui.json),
    ],
)
def test_which_screen(
    asked: Ui, is_tty: bool, environ: dict[str, str], width: int, chosen: Ui
) -> None:
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
    assert "1/1000" in written.rpartition("[b]bold[/b]")[2]
    assert written.isascii()


class Terminal(io.StringIO):
    """Text too long for a row goes on in the next one, also after a change of the size.

    So most terminals are.

    It understands text at its end, and the sequences that erase from a row further up.
    """

    encoding = "utf-8"

    def __init__(self, width: int, height: int) -> None:
        super().__init__()
        self.size = width, height
        self.lines = [""]
        self.raw = ""

    def isatty(self) -> bool:
        return True

    @property
    def rows(self) -> list[tuple[int, str]]:
        """Each row with the line that it belongs to."""
        width = self.size[0]
        return [
            (number, line[at : at + width])
            for number, line in enumerate(self.lines)
            for at in range(0, max(1, len(line)), width)
        ]

    def write(self, written: str) -> int:
        self.raw += written
        for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
            if part == "\n":
                self.lines.append("")
            elif up := re.fullmatch(r"\x1b\[(\d+)A", part):
                assert self.lines[-1] == "", "the cursor waits at the beginning of a row"
                rows = self.rows
                place = max(len(rows) - 1 - int(up[1]), len(rows) - self.size[1], 0)
                line = rows[place][0]
                offset = sum(
                    len(formatting) for number, formatting in rows[:place] if number == line
                )
                self.lines[line:] = [self.lines[line][:offset]]
            elif not part.startswith(("\x1b", "\r")):
                self.lines[-1] += part
        return len(written)


@pytest.mark.parametrize(
    "sizes",
    [[(100, 40), (80, 40), (60, 40), (120, 50)], [(120, 40), (40, 10), (60, 12), (100, 16)]],
)
def test_a_change_of_size_leaves_nothing_behind(
    sizes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, errors = Terminal(*sizes[0]), io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", errors)
    console = Console(file=terminal, force_terminal=True, color_system=None, width=1, height=1)
    console.size = ConsoleDimensions(*terminal.size)
    live = Live(console, FACTS, 0.0)
    shown = []
    for number, size in enumerate(sizes):
        terminal.size = console.size = ConsoleDimensions(*size)
        live.show(RUNNING, event("log", message=f"message {number}"))
        visible = [formatting for _, formatting in terminal.rows][-size[1] :]
        assert sum("╭" in formatting for formatting in visible) == 1
        assert len(visible[-2]) == min(size[0], 140), "the lower border, above the cursor"
        print(f"line {number}")
        print(f"error {number}", file=sys.stderr)
        shown += [f"rank 0: message {number}", f"line {number}"]
    live.close(RUNNING)
    assert [formatting for formatting in terminal.lines if formatting in shown] == shown
    assert errors.getvalue().splitlines() == [f"error {number}" for number in range(len(sizes))], (
        "no terminal"
    )
    assert sys.stdout is terminal
    if (
        min(width for width, _ in sizes) > 40
    ):  # else rows of a panel were pushed into the scrollback
        assert sum("╭" in formatting for formatting in terminal.lines) == 1


def test_after_a_stop_the_panel_leaves_alone_what_was_written_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal, before = Terminal(80, 40), signal.getsignal(signal.SIGCONT)
    console = Console(file=terminal, force_terminal=True, color_system=None)
    console.size = ConsoleDimensions(80, 40)
    live = Live(console, FACTS, 0.0)
    terminal.write("$ echo hello\nhello\n$ fg\n")
    signal.raise_signal(signal.SIGCONT)
    live.show(RUNNING, event("log", message="a message"))
    live.close(RUNNING)
    told = [line for line in terminal.lines if not line.startswith(("│", "╭", "╰"))]
    assert told == ["$ echo hello", "hello", "$ fg", "rank 0: a message", ""]
    assert "\x1b[?25l" not in terminal.raw, "the cursor is the shell's meanwhile"
    assert signal.getsignal(signal.SIGCONT) == before


def test_a_terminal_without_colour_still_has_a_panel() -> None:
    written = {}
    for environ in (
        {},
        {"NO_COLOR": "1"},
        {"CLICOLOR": "0"},
        {"NO_COLOR": ""},
        {"CLICOLOR": "0", "FORCE_COLOR": "1"},
    ):
        out = Terminal(80, 24)
        screen = open_screen(Ui.auto, FACTS, 10, out, {"TERM": "xterm-256color", **environ})
        screen.turn(RUNNING)
        screen.close(RUNNING)
        assert "╭" in "".join(out.lines)
        written[tuple(environ.items())] = re.search(r"\x1b\[\d[\d;]*m", out.raw) is not None
    assert list(written.values()) == [True, False, False, True, True]


def test_the_report_sums_up() -> None:
    assert report(ENDED, Path("runs/x")).splitlines() == [
        "done            120 steps in 4m00s (steps)",
        "loss            5.0000 (step 1) -> 0.0417 (step 120) █▃▂▂▂▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁",
        "validation      2.5000 (step 100)",
        "speed           9.2k tok/s over the run, evaluations and saves included; "
        "18.3k tok/s, 1.00s/step, MFU 41.6% over the last 20 steps",
        "all_gather      12.0 MiB sent by rank 0, equal to theory",
        "reduce_scatter  11.0 MiB sent by rank 0; 10.0 MiB in theory (+10.00%)",
        "memory          124.0 MiB in buffers of rank 0, equal to plan",
        "run             runs/x",
    ]
    narrow = report(ENDED, Path("runs/x"), width=60).splitlines()
    assert narrow[4:7] == [
        "speed           9.2k tok/s over the run, evaluations and",
        "                saves included; 18.3k tok/s, 1.00s/step, MFU",
        "                41.6% over the last 20 steps",
    ]


def test_the_report_says_what_a_gpu_held_in_vain_and_what_is_elsewhere() -> None:
    ranks = [
        memory(0, device_reserved=10 * MIB, device_fragmented=MIB, alloc_retries=2),
        memory(1, device_reserved=8 * MIB, device_fragmented=2 * MIB, alloc_retries=0),
    ]
    lines = report(after(START, *ranks), Path("runs/x")).splitlines()
    assert (
        "fragmentation  2.0 MiB of 8.0 MiB held by torch on rank 1 (25%); "
        "an allocation had to be retried 2 times"
    ) in lines
    elsewhere = memory(0, kept_bytes={"disk": 3 * MIB, "host": MIB})
    lines = report(after(START, elsewhere, memory(1)), Path("runs/x")).splitlines()
    assert "inputs of blocks  3.0 MiB on disk and 1.0 MiB in host memory" in lines


TIERS = {
    "disk": {
        "moved": {"read": {"params": 200 * MIB, "optim": 400 * MIB}, "written": {"optim": 10**9}},
        "planned": {"read": {"params": 200 * MIB, "optim": 400 * MIB}, "written": {"optim": 10**9}},
        "waited_s": 0.02,
    }
}
HELD = {"disk": {"planned": {"optim": 6 << 30}, "allocated": {"optim": 6 << 30}}}


def elsewhere(**fields: Any) -> list[Event]:
    start = {**START, "planned_tiers": {"device": {"params": 1}, "disk": {"optim": 6 << 30}}}
    updates = {"beside_s": 0.31, "lag_s": 0.125}
    steps = [step(n, tiers=TIERS, updates=updates, **fields) for n in range(1, 5)]
    end = {"measured_bytes": MIB, "planned_bytes": MIB, "tiers": HELD}
    return [start, *steps, memory(0, tiers=HELD), event("end", step=4, reason="steps", memory=end)]


def test_states_elsewhere_are_on_every_screen() -> None:
    state = after(*elsewhere())
    drawn = draw(state, 120)
    assert "disk     6.0 GiB  read 629 MB/s  wrote 1.0 GB/s  waited 20ms/step  (rank 0)" in drawn
    assert "updates  0.31s/step overlapped  waited 0.12s/step" in drawn
    line = step_line(state)
    assert " disk 6.0 GiB read 629 MB/s wrote 1.0 GB/s waited 20ms/step " in line
    assert " updates 0.31s/step overlapped waited 0.12s/step " in line
    assert start_line(elsewhere()[0]).endswith(
        "zero 2, bf16, cpu; rank 0 plans 6.0 GiB on disk\nnote: parameter head.bias is never used"
    )
    rows = report(state, Path("runs/x"))
    assert (
        "disk     6.0 GiB of rank 0, equal to plan; the last step read 600.0 MiB and wrote "
        "953.7 MiB, equal to plan; waited 0.1s in all"
    ) in rows
    assert "updates  0.31s/step overlapped; training waited 0.5s for them in all" in rows


def test_what_differs_from_the_plan_is_said() -> None:
    fewer = {**TIERS["disk"], "planned": {"read": {"optim": 400 * MIB}, "written": {}}}
    events = elsewhere()
    events[4] = step(4, tiers={"disk": fewer}, updates={"beside_s": 0.31, "lag_s": 0.125})
    less = {"disk": {"planned": {"optim": 6 << 30}, "allocated": {"optim": 3 << 30}}}
    events[-1] = event("end", step=4, reason="steps", memory={"measured_bytes": 1, "tiers": less})
    rows = report(after(*events), Path("runs/x"))
    assert "3.0 GiB of rank 0; 6.0 GiB planned; " in rows
    assert "read 600.0 MiB and wrote 953.7 MiB; 400.0 MiB and 0 B planned; " in rows


def test_without_states_elsewhere_no_screen_speaks_of_them() -> None:
    shown = [draw(ENDED, 120), step_line(ENDED), start_line(START), report(ENDED, Path("runs/x"))]
    for words in ("disk", "host ", "updates", "behind", "plans"):
        assert not [text for text in shown if words in text]


def test_a_report_says_what_is_of_this_attempt() -> None:
    told = {"step": 200, "path": "/x", "seconds": 60.0, "first_loss": 5.5}
    end = event(
        "end",
        step=220,
        reason="steps",
        total_s=2.0,
        traffic={"all_gather": {"measured_bytes": MIB}},
    )
    events = [event("start", total_steps=220, resumed=told), *map(step, range(201, 221)), end]
    assert report(after(*events), Path("runs/x")).splitlines() == [
        "done          220 steps in 1m02s (steps)",
        "this attempt  20 steps after step 200, in 2.0s",
        "loss          5.5000 (step 1) -> 0.0227 (step 220)",
        "speed         183.0k tok/s over this attempt, evaluations and saves included; "
        "18.3k tok/s, 1.00s/step, MFU 41.6% over the last 18 steps",
        "all_gather    1.0 MiB sent by rank 0 in this attempt",
        "run           runs/x",
    ]
    older = event("start", total_steps=220, resumed={"step": 200, "path": "/x"})
    lines = report(after(older, *events[1:]), Path("runs/x")).splitlines()
    assert lines[0].split() == ["done", "220", "steps", "(steps)"]
    assert lines[2].endswith("0.0249 (step 201) -> 0.0227 (step 220)")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.04, "0.0s"), (9.94, "9.9s"), (59.6, "1m00s"), (3600, "1h00m"), (200_000, "2d07h")],
)
def test_durations(seconds: float, shown: str) -> None:
    assert formatting.duration(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.5, "0.5"), (999, "999"), (999.96, "1.0k"), (999_970_000_000, "1.0T"), (1.25e9, "1.2B")],
)
def test_counts_never_have_a_thousand_of_a_unit(value: float, shown: str) -> None:
    assert formatting.count(value) == shown


def test_small_texts() -> None:
    assert [formatting.count(value) for value in (0, 0.5, 999, 1000, 18_300, 2e6, 3e9, 4e12)] == [
        *("0", "0.5", "999", "1.0k", "18.3k", "2.0M", "3.0B", "4.0T"),
    ]
    assert formatting.seconds(0.0123) == "12ms"
    assert formatting.sparkline([], 10, False) == ""
    assert formatting.sparkline([1.0, 1.0], 10, True) == "__"
    assert formatting.sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8, False) == "▁▂▃▄▅▆▇█"
    assert message_line(event("memory")) is None


def test_a_logged_message_cannot_steer_the_terminal() -> None:
    line = message_line(event("log", message="def f():\n\treturn\x1b[31m\r\x07 é"))
    assert line == "rank 0: def f():\n        return^M^G é"


def test_saves_are_drawn() -> None:
    save = event(
        "save",
        step=50,
        path="/x",
        reason="due",
        bytes=1200 * MIB,
        seconds=0.8,
        stall_s=0.1,
        removed=[],
    )
    assert "saved at step 50" in draw(after(START, step(50), save, step(51)), 100)
    assert "saved" not in draw(after(START, step(50)), 100)
    told = "saved step 50 (1.2 GiB, 0.80s)"
    assert message_line(save) == told
    best = {"step": 50, "metric": "val/loss", "mode": "min", "value": 0.125}
    assert message_line({**save, "best": best}) == f"{told}, the best so far: val/loss 0.125"
