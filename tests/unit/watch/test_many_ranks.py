"""Many ranks in one event of a step: what people see is what it is with an event of each rank."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import recorded_ranks
from recorded_ranks import GIB, Launcher, Simulated

from zrun.estimate.measured_launch import measured_of
from zrun.pages.outcome import Outcome
from zrun.pages.run_page import page
from zrun.top.views import VIEWS, Scene
from zrun.trackers.feed import scalars_of
from zrun.watch import formatting
from zrun.watch.axis_traffic import border_rows
from zrun.watch.panel_layout import Facts, PanelSpace
from zrun.watch.plain import step_line
from zrun.watch.rank_digest import digest, digest_of
from zrun.watch.recording import Recording
from zrun.watch.report import report_rows
from zrun.watch.run_record import RunRecord, read_record
from zrun.watch.run_state import RunState, fold
from zrun.watch.stages import stage_rows
from zrun.watch.stragglers import Stragglers
from zrun_core.sizes import format_size
from zrun_core.spine.events import Event, encode

STEPS = (1, 10, 20, 30, 40, 50, 60)
ROOMS = ((80, 24), (100, 40), (200, 100))


def told(ranks: Simulated) -> Iterator[Event]:
    """All that a launch tells: of some steps all ranks, of others rank 0."""
    yield from ranks.told_of_stages()
    yield ranks.start()
    for number in range(1, max(STEPS) + 1):
        yield ranks.step(number)
        if number in STEPS:
            # Rank 0 is not the first to speak, nor the last.
            order = list(range(ranks.num_ranks))
            random.Random(number).shuffle(order)
            yield from (ranks.memory(rank, number) for rank in order)
        if number == 2:
            yield from map(ranks.peak, range(ranks.num_ranks))
        if number % 15 == 0 and ranks.on_gpu:
            for host in ranks.hosts:
                yield sensed(host, number)


def sensed(host: range, number: int) -> Event:
    """What the GPUs of a host say; one is slowed down by its heat."""
    gpus = [
        {
            "rank": rank,
            "uuid": f"GPU-{rank}",
            "utilisation": 80 + rank % 7,
            "power_w": 300.0 + rank,
            "temperature_c": 60 + rank % 11,
            "slowed": ["heat"] if rank % 32 == 13 else [],
        }
        for rank in host
    ]
    about = {"type": "gpus", "time": 1.7e9 + number, "rank": host.start}
    return {**about, "gpus": gpus}


def of_each(events: Iterable[Event]) -> list[Event]:
    """The record with an event of each rank, those of a step in the order of the ranks."""
    return sorted(
        events,
        key=lambda event: (event.get("step", 0), event["type"] == "memory" and event["rank"]),
    )


def summed_up(ranks: Simulated, events: Iterable[Event]) -> Launcher:
    launcher = Launcher(ranks)
    for event in events:
        launcher.hear(event)
    launcher.close()
    return launcher


def write(folder: Path, lines: Iterable[bytes]) -> Path:
    folder.mkdir()
    (folder / "events.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    return folder


CASES = {  # one that is slow now and then is among them
    "64 on GPUs": Simulated(64, 8, slow={13: 2.2, 40: 2.6, 41: 1.83, 7: 1.4}),
    "64 on CPUs": Simulated(64, 8, on_gpu=False, slow={63: 2.2}),
    "64 in 4 stages": Simulated(64, 8, stages=4, slow=dict.fromkeys(range(16, 32), 2.2) | {45: 3}),
    "256 on GPUs": Simulated(256, 8, slow=dict.fromkeys(range(32, 64), 2.3) | {0: 2.5, 200: 2.9}),
    "256 alike": Simulated(256, 8, on_gpu=False),
}


class Told:
    """A run as its record tells of it."""

    def __init__(self, folder: Path, ranks: Simulated, lines: Iterable[bytes]) -> None:
        write(folder, lines)
        hosts = [f"n{number}" for number, host in enumerate(ranks.hosts) for _ in host]
        self.facts = Facts("gpt", "r", tuple(hosts))
        self.recording = Recording(folder)
        assert self.recording.read()
        self.record: RunRecord = read_record(folder)
        self.record.facts = self.facts
        self.state: RunState = self.record.state

    def views(self, back: int = 1) -> dict[tuple[str, int], list[str]]:
        """All views, at the newest step or before it."""
        state = self.recording.moments[-back].state if back > 1 else self.recording.now.state
        scene = Scene(state, self.facts, self.recording.curves, None, ())
        return {
            (view.name, width): [
                line.plain for line in view.lines(scene, PanelSpace(width, height))
            ]
            for width, height in ROOMS
            for view in VIEWS
        }


@pytest.fixture(params=CASES, name="both")
def make_both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Told, Told, Simulated]:
    ranks = CASES[request.param]
    events = list(told(ranks))
    oracle = Told(tmp_path / "each", ranks, map(encode, of_each(events)))
    folded = Told(tmp_path / "sum", ranks, summed_up(ranks, events).record)
    return oracle, folded, ranks


def test_screens_reports_and_pages_tell_the_same(both: tuple[Told, Told, Simulated]) -> None:
    oracle, folded, ranks = both
    assert len(oracle.state.memory) == ranks.num_ranks
    assert len(folded.state.memory) < 20, "the worst ones only"
    assert folded.views() == oracle.views()
    assert folded.views(20) == oracle.views(20) != oracle.views()
    assert step_line(folded.state) == step_line(oracle.state)
    assert report_rows(folded.state) == report_rows(oracle.state)
    assert stage_rows(folded.state) == stage_rows(oracle.state)
    assert border_rows(folded.state) == border_rows(oracle.state)
    assert bool(border_rows(folded.state)) == (ranks.stages > 1)
    for name in ("process", "torch", "device", "loss"):
        assert folded.record.curves.of(name).points == oracle.record.curves.of(name).points
    assert folded.record.curves.memory.moments == oracle.record.curves.memory.moments


def test_sums_are_of_all_ranks(both: tuple[Told, Told, Simulated]) -> None:
    """By plain sums over what each rank has told of the last step."""
    _, folded, ranks = both
    events = [ranks.memory(rank, STEPS[-1]) for rank in range(ranks.num_ranks)]
    busy = [sum(took for part, took in e["split"].items() if part != "comm") for e in events]
    lines = folded.views()["ranks", 100]
    assert lines[1] == f"min     busy {formatting.seconds(min(busy))} of a step"
    assert lines[2] == f"median  busy {formatting.seconds(statistics.median(busy))} of a step"
    assert lines[3] == f"max     busy {formatting.seconds(max(busy))} of a step"
    slowest = sorted(range(len(events)), key=lambda rank: -busy[rank])[:4]
    shown = [line for line in lines if line.startswith("rank ")]
    assert [int(line.split()[1]) for line in shown] == slowest
    most = statistics.median_low(busy) * 1.25  # where the rest of a step does not matter
    if ranks.stages == 1:
        late = [rank for rank, seconds in enumerate(busy) if seconds > most]
        assert digest_of(folded.state)["late"] == late
        assert [line.endswith("slow") for line in shown] == [rank in late for rank in slowest]
    measure = "device_reserved" if ranks.on_gpu else "peak_rss_bytes"
    fullest = sorted(range(len(events)), key=lambda rank: -events[rank][measure])[:4]
    words = [f"rank {rank} {format_size(events[rank][measure])}" for rank in fullest]
    assert f"fullest: {', '.join(words)}" in lines
    table = folded.views()["overview", 200]
    held = "device_allocated" if ranks.on_gpu else "rss_bytes"
    (median,) = (line.split() for line in table if line.startswith("median "))
    gib = statistics.median(event[held] for event in events) / GIB
    assert f"{gib:.2f}" in median


def test_slow_ranks_are_counted_and_named_with_their_cause(
    both: tuple[Told, Told, Simulated],
) -> None:
    oracle, folded, ranks = both
    expected, found = oracle.record.ranks, folded.record.ranks
    assert found.num_samples == expected.num_samples == len(STEPS) - 1
    assert found.late == expected.late
    assert bool(found.late) == bool(ranks.slow)
    for name in ("least", "median", "most"):
        assert getattr(found, name).points == getattr(expected, name).points
    (words,) = {_of_slow(page(each.record, Outcome.of(0))) for each in (oracle, folded)}
    if ranks.slow:
        assert "Slow, of 6 times compared" in words
        assert ("rank 13 6 times (its GPU was slowed down: heat)" in words) == (13 in ranks.slow)
    else:
        assert "No rank was slow: they were compared 6 times." in words


def _of_slow(text: str) -> str:
    """The sentence of a page on slow ranks."""
    (line,) = (
        part.split("<")[0] for part in text.split(">") if part.startswith(("Slow, of", "No rank "))
    )
    return line


@pytest.mark.parametrize("name", CASES)
def test_warnings_of_slow_ranks_are_the_same(name: str) -> None:
    ranks = CASES[name]
    events = list(told(ranks))
    facts = Facts("gpt", "r", tuple(f"n{rank}" for rank in range(ranks.num_ranks)))

    def warned(of: Iterable[Event]) -> list[str]:
        found: list[Event] = []
        stragglers = Stragglers(facts)
        for event in of:
            stragglers.see(event, found.append)
        return sorted(event["message"] for event in found)

    launcher = summed_up(ranks, events)
    assert warned(launcher.compared) == warned(events)
    assert bool(warned(events)) == bool(ranks.slow)


def test_what_is_measured_and_fed_is_the_same(tmp_path: Path) -> None:
    for ranks in CASES.values():
        events = list(told(ranks))
        recorded = [json.loads(line) for line in summed_up(ranks, events).record]
        found, expected = measured_of(recorded), measured_of(of_each(events))
        assert found == expected
        assert found is not None
        assert bool(found.most("process_bytes")) != ranks.on_gpu
        assert found.most("peak_bytes") > 41 * GIB
        fed, all_fed = (
            [each for event in of if (each := scalars_of(event))]
            for of in (recorded, of_each(events))
        )
        assert sorted(fed, key=repr) == sorted(all_fed, key=repr)


def test_a_rank_that_is_late_counts_with_what_it_told_last_and_again_once_it_tells() -> None:
    ranks = Simulated(64, 8, on_gpu=False)
    launcher = Launcher(ranks)
    for rank in range(64):
        launcher.hear(ranks.memory(rank, 10))
    late = ranks.memory(37, 20) | {"peak_rss_bytes": 900 * GIB}
    for rank in range(64):
        if rank != 37:
            launcher.hear(ranks.memory(rank, 20))
    assert [event["told"] for event in sums(launcher)] == [64]
    launcher.turn(0.9)
    launcher.turn(0.9)  # its agent waits no longer
    assert len(sums(launcher)) == 1
    launcher.turn(5.1)
    _, second = sums(launcher)
    assert (second["step"], second["told"], second["ranks"]) == (20, 63, 64)
    events = {rank: ranks.memory(rank, 10 if rank == 37 else 20) for rank in range(64)}
    assert second == through_json(digest(events))
    launcher.turn(60.0)
    assert len(sums(launcher)) == 2, "once for each thing that is new"
    launcher.hear(late)
    launcher.turn(1.1)
    *_, third = sums(launcher)
    assert (third["step"], third["told"]) == (20, 64)
    assert third["most"]["peak_rss_bytes"] == 900 * GIB
    assert 37 in [event["rank"] for event in third["worst"]]
    assert [event["rank"] for event in launcher.compared if event["step"] == 20][-1] == 37


def test_what_dead_ranks_told_last_is_in_the_record() -> None:
    ranks = Simulated(64, 8, on_gpu=False)
    launcher = Launcher(ranks)
    for number in (10, 20):
        for rank in range(64):
            if number == 10 or rank >= 8:  # the first host is gone, with rank 0
                launcher.hear(ranks.memory(rank, number))
    launcher.hear(ranks.memory(9, 30) | {"peak_rss_bytes": 500 * GIB})
    launcher.close()
    newest = sums(launcher)[-1]
    assert (newest["step"], newest["told"], newest["ranks"]) == (30, 1, 64)
    assert newest["most"]["peak_rss_bytes"] == 500 * GIB
    state = RunState()
    for line in launcher.record:
        state = fold(state, json.loads(line))
    assert state.memory[0]["step"] == 10, "rank 0's own is whole"
    assert state.memory[9]["peak_rss_bytes"] == 500 * GIB


def test_steps_of_which_hosts_tell_in_any_order_are_each_summed_up() -> None:
    ranks = Simulated(32, 2)
    launcher = Launcher(ranks)
    for host in ranks.hosts:  # the second one is three steps behind
        for number in (1, 2, 3):
            for rank in host:
                launcher.hear(ranks.memory(rank, number))
    assert [(event["step"], event["told"]) for event in sums(launcher)] == [
        (1, 32),
        (2, 32),
        (3, 32),
    ]
    launcher.close()
    assert len(sums(launcher)) == 3, "nothing is left to tell"


def test_what_a_rank_has_told_anew_already_is_left_out() -> None:
    ranks = Simulated(32, 2)
    launcher = Launcher(ranks)
    for rank in range(31):
        launcher.hear(ranks.memory(rank, 10))
    launcher.turn(1.1)
    for rank in range(32):
        launcher.hear(ranks.memory(rank, 20))
    launcher.hear(ranks.memory(31, 10))  # it was overtaken on its way
    launcher.turn(1.1)
    launcher.turn(60.0)
    launcher.close()
    assert [(event["step"], event["told"]) for event in sums(launcher)] == [(20, 32)]


def test_ranks_that_never_meet_are_summed_up_now_and_then() -> None:
    """Those of an asynchronous server are at different steps."""
    ranks = Simulated(32, 4)
    launcher = Launcher(ranks)
    for number in range(1, 201):
        for rank in range(32):
            launcher.hear(ranks.memory(rank, 40 * number + rank))
        launcher.turn(1.2)
    launcher.close()
    found = sums(launcher)
    assert 200 * 1.2 / 12 < len(found) < 200 * 1.2 / 5
    assert found[-1] == through_json(
        digest({rank: ranks.memory(rank, 8000 + rank) for rank in range(32)})
    )
    assert not launcher.compared


def test_up_to_sixteen_ranks_each_is_recorded() -> None:
    ranks = Simulated(16, 2)
    events = list(told(ranks))
    launcher = summed_up(ranks, events)
    assert launcher.record == [encode(event) for event in events]
    assert launcher.compared == events
    assert launcher.sent == launcher.record


def test_another_launch_of_the_run_begins_anew() -> None:
    ranks = Simulated(64, 8)
    state = RunState()
    for line in summed_up(ranks, told(ranks)).record:
        state = fold(state, json.loads(line))
    assert digest_of(state)["ranks"] == 64
    few = Simulated(2, 1)
    state = fold(state, few.start())
    assert digest_of(state) == {}
    for rank in range(2):
        state = fold(state, few.memory(rank, 70))
    assert digest_of(state)["ranks"] == 2
    assert sorted(state.memory) == [0, 1]


def test_the_page_says_of_how_many_ranks_it_shows_which(tmp_path: Path) -> None:
    ranks = replace(CASES["64 on GPUs"])
    launcher = summed_up(ranks, told(ranks))
    folded = Told(tmp_path / "sum", ranks, launcher.record)
    text = page(folded.record, Outcome.of(0))
    assert "Shown of 64 ranks: rank 0, the slowest and the fullest; least, median" in text
    assert "more ranks are in events.jsonl" not in text
    newest = sums(launcher)[-1]
    fullest = max(range(64), key=lambda rank: ranks.peak(rank)["peak_bytes"])
    assert fullest in folded.state.memory, "the peak over all ranks is drawn beside the plan"
    held = [ranks.memory(rank, STEPS[-1])["device_reserved"] for rank in range(64)]
    assert newest["least"]["device_reserved"] == min(held)
    assert newest["most"]["device_reserved"] == max(held)
    for name in ("least", "median", "most"):
        assert f"<td>{name}</td>" in text


def test_a_record_grows_alike_for_any_number_of_ranks() -> None:
    each, _, few = recorded_ranks.sizes(64, 2)
    _, sent, many = recorded_ranks.sizes(1024, 2)
    assert few < each / 3
    assert many < 1.5 * few
    assert sent < 1024 / 64 * each / 2, "what agents send is half of what ranks tell"


def sums(launcher: Launcher) -> list[dict[str, Any]]:
    events = map(json.loads, launcher.record)
    return [event for event in events if event["type"] == "ranks"]


def through_json(event: Event) -> Event:
    found: Event = json.loads(encode(event))
    return found
