"""The page of a run, from planted events: its curves, its tables, and what it believes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from zrun.job.hidden import shown_command
from zrun.launch.page import write_page
from zrun.pages.outcome import Outcome
from zrun.pages.run_page import page
from zrun.runs.rundir import RunDir
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
    assert "does not allow to draw" not in text
    return text


def charts(text: str) -> dict[str, ElementTree.Element]:
    """Return each chart by its title; that it parses says that it is well-formed."""
    found = re.findall(r"<svg.*?</svg>", text)
    return {each.attrib["aria-label"]: each for each in map(ElementTree.fromstring, found)}


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
