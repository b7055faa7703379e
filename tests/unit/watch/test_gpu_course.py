"""What GPUs said of themselves, on the page of a run, from planted `gpus` events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from test_report_page import charts, drawn, event, recorded, start, step

from zrun.topology.boards import HOT_SOFTWARE, POWER_CAP
from zrun.watch.gpu_course import GpuCourse
from zrun.watch.panel_layout import Facts
from zrun.watch.run_record import read_record
from zrun_core.spine.events import Event

FACTS = Facts("gpt", "r", ("n01", "n01", "n02", "n02"))


def gpu(rank: int, **fields: Any) -> Event:
    known = {"utilisation": 90, "power_w": 600.0, "power_limit_w": 700.0, "temperature_c": 60}
    more = {"clock_mhz": 1900, "used_bytes": 8 << 30, "slowed": [], "corrected": 0}
    return {"rank": rank, "uuid": f"GPU-{rank}", **known, **more, "uncorrected": 0, **fields}


def look(*told: Event) -> Event:
    return event("gpus", rank=told[0]["rank"], gpus=list(told))


def course(*events: Event) -> GpuCourse:
    found = GpuCourse()
    for each in events:
        found.take(each)
    return found


def hot_run() -> list[Event]:
    """Four GPUs on two hosts, of which one gets too hot, and one is at its power limit."""
    events = [start(world_size=4, device="NVIDIA H200")]
    for number in range(1, 5):
        events.append(step(number))
        slowed = {"slowed": [HOT_SOFTWARE, POWER_CAP], "clock_mhz": 765, "temperature_c": 92}
        errors = {"uncorrected": 2 + (number > 2), "corrected": 40 + number}
        events.append(look(gpu(0), gpu(1, slowed=[POWER_CAP])))
        events.append(look(gpu(2, **errors), gpu(3, **(slowed if number > 1 else {}))))
    return events


def test_each_sensor_has_a_chart_with_a_line_for_each_host(tmp_path: Path) -> None:
    text = drawn(tmp_path, *hot_run(), facts=FACTS)
    found = charts(text)
    for title in (
        "Percent of the time in which GPUs compute, mean of each host",
        "Watts of a GPU, mean of each host",
        "Degrees of the hottest GPU of each host",
        "GPUs of each host that are slowed by more than their power limit",
    ):
        assert len(found[title].findall("polyline")) == 2, "n01 and n02"
    hosts = read_record(tmp_path).gpus.hosts
    assert hosts[2]["temperature_c"].points == [(1, 60.0), (2, 92.0), (3, 92.0), (4, 92.0)]
    assert hosts[2]["slowed"].points == [(1, 0.0), (2, 1.0), (3, 1.0), (4, 1.0)]
    assert {value for _, value in hosts[0]["slowed"].points} == {0.0}, "a power limit is usual"
    rows = (
        ["0", "n01", "90%", "600 W", "700 W", "60 C", "1900 MHz", "8.0 GiB", "0", "0", "-"],
        ["1", "n01", "90%", "600 W", "700 W", "60 C", "1900 MHz", "8.0 GiB", "0", "0",
         f"{POWER_CAP} (100%)"],
        ["2", "n02", "90%", "600 W", "700 W", "60 C", "1900 MHz", "8.0 GiB", "44", "3", "-"],
        ["3", "n02", "90%", "600 W", "700 W", "92 C", "765 MHz", "8.0 GiB", "0", "0",
         f"{HOT_SOFTWARE} (75%), {POWER_CAP} (75%)".replace("'", "&#x27;")],
    )  # fmt: skip
    for cells in rows:
        assert "".join(f"<td>{cell}</td>" for cell in cells) in text


def test_throttling_and_new_errors_are_named_among_the_findings(tmp_path: Path) -> None:
    text = drawn(tmp_path, *hot_run(), facts=FACTS)
    why = HOT_SOFTWARE.replace("'", "&#x27;")
    said = f"rank 3 on n02: {why} in 3 of 4 looks, 92 degrees at most, down to 765 MHz"
    assert f"<th>slowed GPUs</th><td>{said}</td>" in text
    assert "<th>memory errors</th><td>rank 2 on n02: 1 new uncorrectable error</td>" in text
    calm = drawn(
        tmp_path, start(), step(1), look(gpu(0, slowed=[POWER_CAP], uncorrected=7)), facts=FACTS
    )
    assert "GPUs</h2>" in calm
    assert "slowed GPUs" not in calm
    assert "memory errors" not in calm, "they are older than the run"
    assert "that are slowed" not in calm
    gone = drawn(tmp_path, start(), step(1), look(gpu(0, remap="failed")), facts=FACTS)
    assert "no memory is left to replace what is broken: replace the GPU" in gone


def test_a_slow_rank_is_told_with_what_slows_its_gpu(tmp_path: Path) -> None:
    events = hot_run()
    for number in (5, 6):
        for rank in range(4):
            split = {"forward": 1.0 + (rank == 3)}
            events.append(event("memory", rank, step=number, split=split))
    text = drawn(tmp_path, *events, facts=FACTS)
    why = HOT_SOFTWARE.replace("'", "&#x27;")
    assert f"rank 3 1 time (its GPU was slowed down: {why})" in text


def test_many_gpus_are_named_in_part(tmp_path: Path) -> None:
    ranks = range(100)
    hosts = tuple(f"n{rank // 4:02}" for rank in ranks)
    events = [start(world_size=100), step(1)]
    for first in range(0, 100, 4):
        told = [
            gpu(rank, slowed=["heat"] if rank >= 90 else []) for rank in range(first, first + 4)
        ]
        events.append(look(*told))
    text = drawn(tmp_path, *events, facts=Facts("gpt", "r", hosts))
    assert "; 2 more GPUs</td>" in text, "eight of ten are named"
    assert "36 more GPUs are in events.jsonl" in text
    assert "16 more hosts are in events.jsonl" in text
    assert ">n24</span>" in text, "hosts with slowed GPUs are drawn first"
    assert ">n15</span>" not in text


def test_a_launch_that_goes_on_makes_its_steps_again() -> None:
    found = course(
        start(), step(1), look(gpu(0)), step(2), look(gpu(0, temperature_c=99)),
        start(resumed={"step": 1}), step(2), look(gpu(0, temperature_c=50)),
    )  # fmt: skip
    assert found.hosts[0]["temperature_c"].points == [(1, 60.0), (2, 50.0)]
    assert (found.gpus[0].num_looks, found.gpus[0].hottest) == (1, 50)


def test_ranks_that_share_a_gpu_count_it_once() -> None:
    shared = [gpu(rank, uuid="GPU-a", slowed=["heat"]) for rank in (0, 1)]
    found = course(start(), step(1), look(*shared, gpu(2, utilisation=10)))
    assert found.hosts[0]["slowed"].points == [(1, 1.0)]
    assert found.hosts[0]["utilisation"].points == [(1, 50.0)]


def test_sensors_that_say_nothing_leave_gaps(tmp_path: Path) -> None:
    mute = {"rank": 0, "uuid": "GPU-a", "power_w": None, "temperature_c": None, "slowed": []}
    text = drawn(tmp_path, start(), step(1), look(mute), look(mute), facts=FACTS)
    assert "<td>0</td><td>n01</td>" + "<td>-</td>" * 9 in text
    assert not any("GPU" in title for title in charts(text))


def test_without_gpus_there_is_no_such_part(tmp_path: Path) -> None:
    recorded(tmp_path, [start(), step(1)])
    assert read_record(tmp_path).gpus.gpus == {}
    assert "GPUs</h2>" not in drawn(tmp_path, start(), step(1), facts=FACTS)
