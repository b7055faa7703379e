"""The page of a run, from planted events: its curves, its tables, and what it believes."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrun.job.hidden import shown_command
from zrun.launch.page import write_page
from zrun.pages.outcome import Outcome
from zrun.pages.run_page import page
from zrun.runs.listing import RunStatus
from zrun.runs.rundir import EarlierRun, RunDir
from zrun.watch import run_record
from zrun.watch.panel_layout import Facts
from zrun.watch.report import report
from zrun.watch.run_record import RunRecord, read_record
from zrun.watch.run_state import SPLIT, RunState, fold
from zrun.watch.thinned import Thinned
from zrun_core.spine.events import Event, encode

MIB = 1 << 20
DONE = Outcome.of(0)
FACTS = Facts("gpt", "20260102-030405-ab12", ("n01", "n02"))


def event(kind: str, rank: int = 0, **fields: Any) -> Event:
    return {"type": kind, "time": 1.0, "rank": rank, **fields}


def start(**fields: Any) -> Event:
    planned = {"params": 20 * MIB, "rings": 4 * MIB}
    known = {"job": "gpt", "device": "cpu", "stage": 3, "total_steps": 9, "planned_bytes": planned}
    return event("start", **{**known, **fields})


def step(number: int, loss: float = 2.0, **fields: Any) -> Event:
    known = {"lr": 0.1, "grad_norm": 1.5, "step_s": 0.5, "tokens": 64, "tokens_per_s": 128.0}
    return event("step", step=number, loss=loss, **{**known, **fields})


def recorded(folder: Path, events: Iterable[Event]) -> Path:
    path = folder / "events.jsonl"
    path.write_bytes(b"".join(encode(each) + b"\n" for each in events))
    return path


def drawn(folder: Path, *events: Event, outcome: Outcome = DONE, facts: Facts = FACTS) -> str:
    recorded(folder, events)
    record = read_record(folder)
    record.facts = facts
    text = page(record, outcome)
    assert "cannot be drawn" not in text
    return text


def charts(text: str) -> dict[str, ElementTree.Element]:
    """Return each chart by its title; that it parses says that it is well-formed."""
    found = re.findall(r"<svg.*?</svg>", text)
    return {each.attrib["aria-label"]: each for each in map(ElementTree.fromstring, found)}


DAMAGE: list[Callable[[bytes], bytes]] = [
    lambda line: line[: len(line) // 2],
    lambda line: b"\xff\x00" + line,
    lambda line: b"[" * 100_000,
    lambda line: b"",
    lambda line: b"null",
    lambda line: b'{"type": 1, "time": 1, "rank": 0}',
    lambda line: re.sub(rb":\d+", b":null", line),
    lambda line: re.sub(rb":\d+", b':"x"', line, count=4),
    lambda line: re.sub(rb"\{\"params.*?\}", b"[1]", line),
    lambda line: re.sub(rb'"step":\d+', b'"step":1e400', line),
    lambda line: re.sub(rb'"step":\d+', b'"step":-3', line),
    lambda line: re.sub(rb'"loss":[\d.]+', b'"loss":1' + b"0" * 400, line),
    lambda line: re.sub(rb'"time":[\d.]+', b'"time":1e300', line),
    lambda line: re.sub(rb'"(grad_norm|step_s|waited_s)":[\d.]+', rb'"\1":1e308', line),
    lambda line: re.sub(rb'"(grad_norm|step_s|waited_s)":[\d.]+', rb'"\1":{}', line),
]
TIERS = {
    "disk": {
        "moved": {"read": {"params": 6 * MIB}, "written": {"optim": 3 * MIB}},
        "planned": {"read": {"params": 5 * MIB}, "written": {"optim": 3 * MIB}},
        "waited_s": 0.25,
    }
}
HELD = {
    "device": {"planned": {"rings": 4 * MIB}, "allocated": {"rings": 4 * MIB}},
    "disk": {"planned": {"optim": 96 * MIB}, "allocated": {"optim": 97 * MIB}},
}


def test_it_shows_what_was_planned_and_what_was_measured(tmp_path: Path) -> None:
    planned = {tier: use["planned"] for tier, use in HELD.items()}
    updates = {"beside_s": 0.2, "lag_s": 0.1}
    text = drawn(
        tmp_path,
        start(planned_tiers=planned, precision="bf16", params=1_000_000),
        *(step(n, 5.0 / n, tiers=TIERS, updates=updates) for n in range(1, 10)),
        event("memory", step=9, rss_bytes=300 * MIB, peak_rss_bytes=321 * MIB, tiers=HELD),
        event(
            "memory",
            rank=1,
            step=9,
            params=7 * MIB,
            planned_bytes=8 * MIB,
            device_reserved=50 * MIB,
            device_fragmented=11 * MIB,
        ),
        event("eval", step=9, loss=0.7, metrics={"loss": 0.7, "top1": 0.5}),
        event(
            "end",
            step=9,
            reason="steps",
            total_s=4.5,
            traffic={"all_gather": {"measured_bytes": 12 * MIB, "expected_bytes": 13 * MIB}},
        ),
    )
    found = charts(text)
    for title in (
        "Loss",
        "Gradient norm",
        "Tokens per second",
        "Seconds of a step",
        "Learning rate",
        "top1 (evaluation)",
        "Buffers of rank 0 in memory (dashed: plan)",
        "Buffers of rank 0 on disk (dashed: plan)",
        "Whole process of rank 0",
        "Seconds of waiting in a step, rank 0",
    ):
        assert title in found
    (line,) = found["Loss"].findall("polyline")
    heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert len(heights) == 9
    assert heights == sorted(heights), "a loss that falls goes down"
    for place in ("in memory", "on disk"):
        stacked = found[f"Buffers of rank 0 {place} (dashed: plan)"]
        assert len(stacked.findall("line[@class='level plan']")) == 1
        assert len(stacked.findall("polygon")) == 1, "of the one kind that is there"
    assert "done</b>exit code 0" in text
    assert "2 ranks on n01, n02 · cpu · ZeRO stage 3 · bf16 · 1.0M parameters" in text
    for cells in (
        ["0", "n01", "4.0 MiB", "4.0 MiB", "96.0 MiB", "97.0 MiB", "-", "-", "321.0 MiB"],
        ["1", "n02", "8.0 MiB", "7.0 MiB", "-", "-", "50.0 MiB", "11.0 MiB", "-"],
        ["read from disk", "5.0 MiB", "6.0 MiB"],
        ["written to disk", "3.0 MiB", "3.0 MiB"],
        ["data", "all_gather", "13.0 MiB", "12.0 MiB", "-7.69%"],
    ):
        assert "".join(f"<td>{cell}</td>" for cell in cells) in text
    assert "training waited 0.9s for them in all" in text


def rects(text: str, bar: str, after: str = "") -> dict[str, float]:
    """Return the lengths of the parts of a bar, by what they say of themselves."""
    start = text.index(f'aria-label="{bar}"', text.index(after))
    picture = text[start : text.index("</svg>", start)]
    found = re.findall(r'width="([\d.]+)"[^>]*><title>(.*?)</title>', picture)
    return {what: float(width) for width, what in found}


def test_memory_by_kind_and_the_parts_of_a_step_are_those_of_the_events(tmp_path: Path) -> None:
    split = {"data": 0.25, "forward": 1.0, "backward": 2.0, "comm": 0.5, "optim": 0.25}
    text = drawn(
        tmp_path,
        start(world_size=2, planned_bytes={"params": 10 * MIB, "optim": 20 * MIB}),
        *(step(n, split=split, traffic={"sent_bytes": n * MIB}) for n in range(1, 5)),
        event("memory", 0, step=2, params=10 * MIB, optim=10 * MIB, split=split),
        event("memory", 0, step=4, params=10 * MIB, optim=20 * MIB, split=split),
        event("memory", 1, step=4, params=10 * MIB, optim=20 * MIB, split=split | {"comm": 1.5}),
        event("peak", 0, step=2, peak_bytes=70 * MIB),
        event("estimate", step=3, predicted={"peak_bytes": 80 * MIB}, measured={}),
    )
    bar = rects(text, "rank 0 on n01", "Memory</h2>")
    assert list(bar) == [
        "parameters: 10.0 MiB",
        "optimizer states and fp32 masters: 20.0 MiB",
        "activations, temporaries and the batch: 40.0 MiB",
    ]
    assert [round(4 * width / list(bar.values())[2], 2) for width in bar.values()] == [1, 2, 4]
    assert "70.0 MiB at the peak of step 2" in text
    assert "the red line is the peak of the estimate" in text
    parts = rects(text, "rank 1 on n02", "Time of a step</h2>")
    assert list(parts) == [
        "data: 0.25s", "forward: 1.00s", "backward: 2.00s", "comm: 1.50s", "optim: 0.25s"
    ]  # fmt: skip
    assert "busy 3.50s of 5.00s" in text
    found = charts(text)
    stacked = found["Buffers of rank 0 in memory (dashed: plan)"]
    assert len(stacked.findall("polygon")) == 2
    (plan,) = stacked.findall("line[@class='level plan']")
    tops = [each.attrib["points"].split() for each in stacked.findall("polygon")][1]
    assert any(point.split(",")[1] == plan.attrib["y1"] for point in tops), "the end is the plan"
    assert len(found["Parts of a step, seconds of rank 0"].findall("polyline")) == len(split)
    (sent,) = found["Sent by rank 0 in a step"].findall("polyline")
    heights = [float(point.split(",")[1]) for point in sent.attrib["points"].split()]
    assert heights[0] - heights[1] == pytest.approx((heights[0] - heights[3]) / 3, abs=0.2)
    assert "10.0 MiB were sent by rank 0 in this launch" in text


def test_ranks_that_were_waited_for_are_counted(tmp_path: Path) -> None:
    def told(number: int, slow: float) -> list[Event]:
        splits = [{"forward": 1.0, "comm": slow - 1}, {"forward": slow}, {"forward": 1.0}]
        return [
            event("memory", rank, step=number, split=split) for rank, split in enumerate(splits)
        ]

    events = [start(world_size=3), step(1)]
    for number, slow in enumerate([9.0, 2.0, 1.0, 2.0], 1):  # the first one warms up
        events += told(number, slow)
    text = drawn(tmp_path, *events, facts=Facts("gpt", "r", ("n1", "n1", "n1")))
    assert "Slow, of 3 times compared: rank 1 2 times; at their last report: rank 1." in text
    busy = charts(text)["Seconds that ranks are busy in a step"]
    assert len(busy.findall("polyline")) == 3, "least, median, most"
    again = read_record(tmp_path).ranks
    assert again.most.points == [(2, 2.0), (3, 1.0), (4, 2.0)]
    assert again.median.points == [(2, 1.0), (3, 1.0), (4, 1.0)]
    assert "No rank was slow: they were compared 1 time." in drawn(
        tmp_path, start(world_size=3), step(1), *told(1, 1.0), *told(2, 1.0)
    )


def test_saves_and_warnings_are_listed(tmp_path: Path) -> None:
    best = {"step": 4, "metric": "top1", "mode": "max", "value": 0.5}
    saves = [
        event("save", step=4, path="x", reason="best", bytes=3 * MIB, seconds=0.5, stall_s=0.25)
        | {"best": best, "removed": [1, 2]},
        event("save", step=5, path="x"),  # of an older version
    ]
    warnings = [event("warning", rank=n % 7, message=f"number {n} <b>") for n in range(150)]
    text = drawn(tmp_path, start(), step(4), saves[0], step(5), saves[1], *warnings)
    row = ["best; removed 1, 2", "3.0 MiB", "0.50s", "0.25s", "top1 0.5"]
    assert "".join(f"<td>{cell}</td>" for cell in row) in text
    assert "The newest 100 of 150 messages" in text
    assert "<td>warning (rank 2): number 149 &lt;b&gt;</td>" in text
    assert "number 49 " not in text


def launched(path: Path, number: int, code: int | None, events: Iterable[Event]) -> None:
    """Launch a run in a folder, or go on with it."""
    claimed = RunDir.claim("gpt", path, earlier=EarlierRun.CONTINUE)
    with claimed as rundir:
        rundir.write_launch(f"zrun train gpt.yaml steps={number}")
        rundir.append([encode(each) for each in events])
        if code:
            rundir.write_failure({"message": f"it <broke> {number}", "told": f"all of {number}"})
        rundir.exit_code = code


def test_each_launch_of_a_run_is_told_with_its_steps_and_its_end(tmp_path: Path) -> None:
    path = tmp_path / "run"
    launched(path, 1, 5, [start(), *map(step, range(1, 6))])
    launched(path, 2, 3, [])  # it failed before it began
    went_on = start(resumed={"step": 3, "path": "x"}, versions={"torch": "2.13"})
    launched(path, 3, 0, [went_on, step(4), step(5), event("end", step=5, reason="steps")])
    text = page(read_record(path), DONE)
    assert "cannot be drawn" not in text
    table = re.findall(r"<tr>(.*?)</tr>", text[text.index("Launches</h2>") :])
    rows = [re.findall("<td>(.*?)</td>", each) for each in table[1:4]]
    assert [row[:1] + row[2:] for row in rows] == [
        ["1", "1 to 5", "failed, exit code 5", "it &lt;broke&gt; 1", "zrun train gpt.yaml steps=1"],
        ["2", "-", "failed, exit code 3", "it &lt;broke&gt; 2", "zrun train gpt.yaml steps=2"],
        ["3", "4 to 5", "done", "steps", "zrun train gpt.yaml steps=3"],
    ]
    assert "<pre>all of 1</pre>" in text
    assert "after step 3 of x" in text
    assert "<th>versions</th><td>torch 2.13</td>" in text
    # An older version kept no launch.json: it is not known whose the two starts are.
    for folder in (path, path / "attempts" / "1", path / "attempts" / "2"):
        (folder / "launch.json").unlink()
    text = page(read_record(path), DONE)
    assert "the record has 2 starts" in text
    assert "<td>4 to 5</td>" in text
    shutil.rmtree(path / "attempts" / "2")  # of two launches it is
    text = page(read_record(path), DONE)
    assert "<td>1 to 5</td><td>failed, exit code 5</td>" in text
    assert "the record has" not in text


def test_a_run_that_was_begun_anew_has_the_steps_of_its_own_record_only(tmp_path: Path) -> None:
    path = tmp_path / "run"
    launched(path, 1, 5, [start(), *map(step, range(1, 9))])
    with RunDir.claim("gpt", path, earlier=EarlierRun.START_OVER) as rundir:
        rundir.write_launch("zrun train gpt.yaml --fresh")
        rundir.append([encode(start()), encode(step(1))])
        rundir.exit_code = 0
    text = page(read_record(path), DONE)
    assert "<td>set aside: the run was started over</td><td>failed, exit code 5</td>" in text
    assert "<td>1 to 1</td><td>done</td>" in text


def test_what_a_launch_told_is_of_that_launch(tmp_path: Path) -> None:
    """Stages are told before the start; steps, ends and evaluations belong to the newest launch."""

    def stage(number: int, stages: int) -> Event:
        facts = {"virtual": 1, "schedule": "1f1b", "blocks": ["b"], "params": 1, "trainable": 1}
        return event("stage", rank=number, stage=number, stages=stages, **facts)

    first = [stage(0, 3), stage(1, 3), stage(2, 3), start(), step(1), step(2)]
    second = [start(resumed={"step": 2}), step(3), event("end", step=3, reason="hook", total_s=1.0)]
    recorded(tmp_path, [*first, event("end", step=2, reason="steps", total_s=9.0), *second])
    state = read_record(tmp_path).state
    assert (state.first.step, state.step.step, state.stages) == (3, 3, {})
    assert state.end is not None
    assert state.end["reason"] == "hook"
    recorded(tmp_path, [*first, stage(0, 2), stage(1, 2), start(resumed={"step": 2})])
    state = read_record(tmp_path).state
    assert (sorted(state.stages), state.end) == ([0, 1], None)
    assert (state.first.step, state.step.step, state.step.loss) == (0, 2, 2.0)
    recorded(tmp_path, [*first[:4], stage(0, 2), stage(1, 2), start()])
    assert sorted(read_record(tmp_path).state.stages) == [0, 1], "the first made no step"


@given(st.lists(st.sampled_from(DAMAGE), max_size=6), st.randoms(use_true_random=False))
def test_no_damaged_record_keeps_its_page_from_being_written(
    damage: list[Callable[[bytes], bytes]], random: Random
) -> None:
    held = event("memory", step=1, params=MIB, split={"forward": 1.0})
    save = event("save", step=1, path="x", bytes=1)
    lines = [
        encode(each)
        for each in (start(), *(step(n, tiers=TIERS) for n in range(1, 9)), held, save, start())
    ]
    for harm in damage:
        place = random.randrange(len(lines))
        lines[place] = harm(lines[place])
    with TemporaryDirectory() as folder:
        (Path(folder) / "events.jsonl").write_bytes(b"\n".join(lines))
        text = page(read_record(Path(folder)), DONE)
    assert text.endswith("</html>\n")
    assert not re.search(r'(points|x|y|width|[xy][12])="[^"]*\b(nan|inf)\b', text)


def test_steps_that_are_made_again_count_as_they_came_last(tmp_path: Path) -> None:
    text = drawn(
        tmp_path,
        start(),
        *(step(n, 3.0) for n in range(1, 7)),
        event("eval", step=6, loss=77.0),
        start(resumed={"step": 4, "path": "x"}),
        step(5, 1.0),
        step(6, 1.0),
    )
    curves = read_record(tmp_path).curves
    assert curves.of("loss").points == [(1, 3.0), (2, 3.0), (3, 3.0), (4, 3.0), (5, 1.0), (6, 1.0)]
    assert curves.of("eval loss").points == []
    assert "resumed after step 4: dotted lines" in text
    assert len(charts(text)["Loss"].findall("line[@class='mark']")) == 1
    curves.take(start())
    curves.take(step(1, 9.0))
    assert curves.of("loss").points == [(1, 9.0)], "from the beginning"
    assert curves.went_on == []


def test_losses_that_are_no_numbers_are_gaps_with_marks(tmp_path: Path) -> None:
    losses = [3.0, 2.5, math.nan, math.inf, 2.0, 1.9]
    text = drawn(tmp_path, start(), *(step(n, loss) for n, loss in enumerate(losses, 1)))
    loss = charts(text)["Loss"]
    assert len(loss.findall("polyline")) == 2
    assert len(loss.findall("line[@class='bad']")) == 2
    assert "the loss was not a finite number in 2 steps: red marks" in text
    assert not re.search(r'="[^"]*\b(nan|inf)\b', text)
    charts(drawn(tmp_path, start(), step(1, math.nan)))  # nothing else to scale an axis by


def test_each_metric_of_the_users_own_has_a_curve(tmp_path: Path) -> None:
    events = [start()]
    for n in range(1, 6):
        events += [step(n), event("metrics", step=n, values={"temperature": 1 / n, "top1": n})]
        events.append(event("eval", step=n, loss=1.0, metrics={"loss": 1.0, "top1": n / 9}))
    events += [start(resumed={"step": 4, "path": "x"}), step(5)]
    found = charts(drawn(tmp_path, *events))
    for name in ("temperature", "top1", "top1 (evaluation)"):
        assert len(found[name].findall("circle")) == 4, "what was made again is not told twice"
    names = {f"m{n}": 1.0 for n in range(200)}
    many = charts(drawn(tmp_path, start(), step(1), event("metrics", step=1, values=names)))
    assert len([name for name in many if name.startswith("m")]) == 40


@pytest.mark.parametrize("low", [6.26, 1e-9, 0.0, 999.0, 12_345.0, 1_234_567.0])
@pytest.mark.parametrize("width", [1e-4, 0.011, 3.0, 5e4])
def test_no_two_lines_of_a_chart_have_one_number(tmp_path: Path, low: float, width: float) -> None:
    losses = [low, low + width / 3, low + width]
    loss = charts(drawn(tmp_path, start(), *(step(n, each) for n, each in enumerate(losses))))
    numbers = [each.text for each in loss["Loss"].findall("text[@text-anchor='end']")]
    assert len(set(numbers)) == len(numbers)
    assert numbers


def test_small_memory_is_told_in_the_unit_of_its_size(tmp_path: Path) -> None:
    held = event("memory", step=1, params=3 * MIB, rss_bytes=3000 * 1024)
    planned = {"params": 3 * MIB}
    found = charts(drawn(tmp_path, start(planned_bytes=planned), step(1), held))
    texts = [each.text for each in found["Whole process of rank 0"].findall("text")]
    assert "2 MiB" in texts
    assert not any("KiB" in (text or "") for text in texts)


@pytest.mark.parametrize(
    "word", ["env.HF_HOME=hidden", "env={HF_TOKEN: hidden}", "data.args.api_key=hidden"]
)
def test_no_secret_of_the_command_is_on_the_page(word: str) -> None:
    told = shown_command(f"zrun train job.yaml '{word}' model.args.tokenizer=bpe steps=5")
    assert "hidden" not in told
    assert "***" in told
    assert told.endswith(" model.args.tokenizer=bpe steps=5")


def test_a_run_without_steps_says_why(tmp_path: Path) -> None:
    message = 'rank 1 failed\n  ValueError: <b> & "quotes"'
    text = drawn(tmp_path, outcome=Outcome.of(5, message))
    assert "failed</b>exit code 5" in text
    assert "ValueError: &lt;b&gt; &amp; " in text
    assert "No step was made" in text
    assert charts(text) == {}
    assert "stopped</b>exit code 75" in drawn(tmp_path, step(1), outcome=Outcome.of(75, "stopped"))


def test_text_of_others_stays_text(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    text = drawn(
        tmp_path,
        start(device=bad, precision=bad, versions={bad: bad}),
        step(1, tiers={bad: TIERS["disk"]}),
        event("metrics", step=1, hook="on_step", values={bad: 1.0}),
        event("end", step=1, reason=bad, total_s=1.0, traffic={bad: {"measured_bytes": 1}}),
        outcome=Outcome.of(5, bad),
        facts=Facts(bad, bad, (bad,)),
    )
    assert "<script" not in text
    assert not re.search(r"(src|href|url\()\s*=?", text)
    charts(text)


def long_run(losses: dict[int, float]) -> Iterator[Event]:
    """A run whose numbers differ in each step, with all that four ranks tell of a step."""
    yield start(world_size=4)
    for n, loss in losses.items():
        noise = [math.sin(n * each) for each in range(1, 7)]
        split = dict(zip(SPLIT, (1.1 + each for each in noise), strict=False))
        traffic = {"sent_bytes": 1_000_000 + n % 977}
        more = {"grad_norm": 2 + noise[1], "step_s": 2 + noise[2], "tokens_per_s": 9 + noise[3]}
        yield step(n, loss, split=split, traffic=traffic, **more)
        if n % 10 == 0:
            for rank in range(4):
                held = {"params": n % 1009 * MIB, "optim": n % 499 * MIB}
                yield event("memory", rank, step=n, rss_bytes=n * MIB, split=split, **held)
            values = {f"m{each}": value for each, value in enumerate(noise)}
            yield event("metrics", step=n, values=values)
        if n % 100 == 0:
            yield event("eval", step=n, loss=loss, metrics={"loss": loss, "top1": noise[0]})
            yield event("save", step=n, path="x", reason="due", bytes=n, seconds=1.0, stall_s=0.5)
            yield event("warning", rank=n % 4, message=f"at step {n}")


@pytest.mark.thorough
def test_a_long_run_is_thinned_and_keeps_its_spikes(tmp_path: Path) -> None:
    steps = 100_000
    losses = {n: 2.0 + math.sin(n / 9000) for n in range(1, steps + 1)} | {77_777: 50.0}
    recorded(tmp_path, long_run(losses))
    loss = read_record(tmp_path).curves.of("loss")
    assert 500 <= len(loss.points) <= 1001
    assert (77_777, 50.0) in loss.points
    assert loss.points[-1] == (steps, losses[steps])
    assert all(losses[n] == value for n, value in loss.points)
    assert [n for n, _ in loss.points] == sorted({n for n, _ in loss.points})
    text = page(read_record(tmp_path), DONE)
    assert 100_000 < len(text.encode()) < 1_000_000


def test_of_a_record_of_any_length_a_bounded_part_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recorded(tmp_path, (step(n, 1.0 / n) for n in range(1, 20_001)))
    monkeypatch.setattr(run_record, "_MOST_BYTES", path.stat().st_size // 8)
    taken: list[int] = []
    take = RunRecord.take

    def watched(self: RunRecord, event: Event, offset: int) -> None:
        assert path.read_bytes()[offset:].startswith(encode(event))
        taken.append(event["step"])
        take(self, event, offset)

    monkeypatch.setattr(RunRecord, "take", watched)
    record = read_record(tmp_path)
    assert record.is_sampled
    assert 2000 < len(taken) < 4000
    assert taken[0] == 1
    assert taken[-1] == 20_000
    assert max(b - a for a, b in pairwise(taken)) < 60
    assert "evenly spaced parts" in page(record, DONE)


def test_a_series_forgets_from_the_middle_of_a_bucket() -> None:
    series = Thinned()
    for n in range(2000):
        series.add(n, float(n))
    series.forget(1001)
    assert series.points[-1][0] <= 1000
    series.add(1001, 7.0)
    assert series.points[-1] == (1001, 7.0)


def test_lines_that_are_no_events_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    good = encode(step(1)) + b"\n"
    path.write_bytes(b'{"type":"step","step":"x"\n{"type":"step"}\n\xff\n' + good + good[:40])
    record = read_record(tmp_path)
    assert record.curves.of("loss").points == [(1, 2.0)]
    assert (record.num_events, record.num_skipped) == (1, 4)
    assert "skipped of it, as no events: 4 lines" in page(record, DONE)


def test_a_page_that_cannot_be_written_is_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunDir.claim("gpt", tmp_path / "run") as rundir:
        written = write_page(rundir, FACTS, RunState(), DONE)
        assert written == rundir.path / "report.html"
        assert written.stat().st_mode & 0o777 == 0o600
        assert "exit code 0" in written.read_text()
        assert not list(rundir.path.glob(".report*"))
        written.unlink()
        written.mkdir()
        assert write_page(rundir, FACTS, RunState(), DONE) is None
        assert not list(rundir.path.glob(".report*"))
        rundir.events.unlink()
        assert write_page(rundir, FACTS, RunState(), DONE) is None
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2
    assert warnings[1] == f"warning: {written} was not written: No such file or directory"


def test_the_text_names_the_page_and_draws_the_loss() -> None:
    state = RunState()
    for n in range(1, 9):
        state = fold(state, step(n, 9.0 - n))
        assert ("█" in report(state, Path("run"))) == (n >= 3)
    lines = report(state, Path("run"), page=Path("run/report.html")).splitlines()
    assert "loss   8.0000 (step 1) -> 1.0000 (step 8) █▇▆▅▄▃▂▁" in lines
    assert lines[-1] == "page   run/report.html"
    assert report(state, Path("run"), ascii_only=True).isascii()


def test_the_newest_launch_has_the_end_that_its_launcher_tells(tmp_path: Path) -> None:
    """Its files do not tell of it yet: the launcher still holds the lock."""
    with RunDir.claim("gpt", tmp_path / "run") as rundir:
        rundir.write_launch("zrun train gpt.yaml")
        rundir.append([encode(start()), encode(step(1))])
        record = read_record(rundir.path)
        text = page(record, Outcome.of(7, "all <losses>\nwent wrong"))
        assert "<td>failed, exit code 7</td><td>all &lt;losses&gt;</td>" in text
        assert "<td>running</td>" in page(record, Outcome(RunStatus.RUNNING))
