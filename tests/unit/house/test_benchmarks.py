"""The benchmarks' tables, verdicts and command lines; nothing is measured here."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gpu
import gpu_offload
import gpu_offload_cases
import gpu_planner
import gpu_systems
import hybrid
import launch
import offload
import offload_disk
import offload_saves
import offload_step
import offload_update
import offload_worker
import pipeline_worker
import pipelines
import planner_time
import pytest
import render
import report_screens
import step
import step_profile
import systems
import table
import telemetry
import turns
from cases import PARTS, SYSTEMS, Case, cases_of
from table import Spread, Verdict

from zrun_core.spine.config import JobConfig
from zrun_core.tiers.swap_file import Span

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def record(times: list[float], *, number: int = 0, clean: int = 9, **fields: Any) -> launch.Record:
    """What one run of a case comes to."""
    return {
        "round": number,
        "timed": times,
        "clean": clean,
        "losses": [3.0, 2.0],
        "rank_losses": [[3.0, 2.0]] * 2,
        "digests": ["a", "a"],
        "payload": 100,
        "loopback": 110,
        "counted": None,
        "first_s": 4.0,
        "start_mb": 900.0,
        "peak_mb": 800.0,
        "foreign": 0.0,
        **fields,
    }


def case(text: str) -> Case:
    return Case.parse(text, 2)


def test_case_names_are_read_and_written() -> None:
    assert case("zrun3-bf16@4") == Case("zrun3", True, 4)
    assert case("fsdp2-z2") == Case("fsdp2-z2", False, 2)
    for text in ("zrun3-bf16@4", "ddp", "single@1", "train", "zrun2-sockets-other-bf16@4"):
        assert case(text).label(2) == text
    assert case("zrun2@1").base == case("single@1")
    assert case("ds3-bf16").base == case("ddp-bf16")
    assert case("zrun3-other-bf16").base == case("ddp-bf16")
    assert case("zrun3-other-bf16").twin == case("zrun3-bf16")


@pytest.mark.parametrize("text", ["zrun4", "ddp@0", "", "bf16", "zrun3@", "ddp-other"])
def test_unknown_systems_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no system"):
        case(text)


def test_every_system_can_be_loaded_and_every_part_names_systems() -> None:
    assert set(systems._LOADERS) == set(SYSTEMS)
    assert len(cases_of(list(PARTS), 2)) == len(set(cases_of(list(PARTS), 2)))
    with pytest.raises(ValueError, match="no part"):
        cases_of(["fp16"], 2)


def test_ratios_are_taken_inside_each_round() -> None:
    runs = {
        case("ddp"): [record([1.0, 1.0, 1.2]), record([2.0, 2.0], number=1)],
        case("zrun3"): [record([0.9, 0.9, 5.0]), record([2.2, 2.2], number=1)],
    }
    found = table.ratio(runs, case("zrun3"))
    assert found is not None
    assert (found.low, found.high) == pytest.approx((0.9, 1.1))
    assert found.median == pytest.approx(1.0)


def test_checkouts_are_compared_inside_each_round() -> None:
    runs = {
        case("ddp"): [record([1.0])],
        case("zrun1"): [record([0.9]), record([1.0], number=1)],
        case("zrun1-other"): [record([1.0]), record([2.0], number=1, digests=["b", "b"])],
    }
    *_, row = table.twin_table(runs, 2).splitlines()
    assert row.split() == ["zrun1", "950", "1500", "0.700", "0.500-0.900", "800", "800", "yes"]
    assert table.twin_table({case("zrun1"): [record([1.0])]}, 2) == ""


def test_each_of_our_systems_runs_in_both_checkouts() -> None:
    options = step.parse(["--systems", "ddp,zrun1,train", "--other", sys.executable])
    labels = [each.label(2) for each in step.choose(options)]
    assert labels == ["ddp", "zrun1", "zrun1-other", "train", "train-other"]
    settings = launch.Settings("tiny", 1, 1, 1.0, "", other_python=sys.executable)
    assert settings.benchmarks(case("zrun1-other")) == BENCHMARKS


@pytest.mark.parametrize("arguments", [["--systems", "zrun1-other"], ["--other", "/no/python"]])
def test_a_missing_checkout_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        step.parse(arguments)


def test_names_of_pipelines_are_read() -> None:
    assert set(pipelines.NAMES) == set(pipeline_worker._LOADERS)
    assert pipelines.parse([]).systems == ",".join(pipelines.SYSTEMS)
    for name in ("zrun-1f1b", "zrun-1f1b/x", "pipes/8"):
        with pytest.raises(SystemExit):
            pipelines.parse(["--systems", name])


def test_pipelines_are_compared_with_their_own_actions() -> None:
    # Of two stages with two micro-batches, the last one waits a second longer than it must.
    first = [
        ["F", 0, 0, 0, 1, 0],
        ["F", 0, 1, 1, 2, 0],
        ["B", 0, 0, 2, 7, 3],
        ["B", 0, 1, 7, 11, 2],
    ]
    last = [["F", 1, 0, 0, 3, 2], ["B", 1, 0, 3, 5, 0], ["F", 1, 1, 5, 6, 0], ["B", 1, 1, 6, 8, 0]]
    clock = pipelines.Clock.of([first, last])
    assert (clock.span, clock.replayed, clock.computing) == (11, 9, 12)
    assert clock.idle(clock.span) == pytest.approx(1 - 12 / 22)
    ranks = [
        {"times": [9.0, 11.5], "cpu": [9.0, 6.0], "busy": [18.0, 12.5], "losses": [], "actions": []}
        for _ in range(2)
    ]
    for rank, actions, losses in zip(ranks, (first, last), ([0.0, 0.0], [2.0, 1.5]), strict=True):
        rank |= {"actions": [[], actions], "losses": losses}
    record = turns.of_ranks(ranks, warmup=1, cores=2)
    assert record["losses"] == [2.0, 1.5]
    plain = {"timed": [20.0], "cpu": [20.0], "clean": 1, "losses": [2.0, 1.25], "schedules": [[[]]]}
    lines = pipelines.report(
        {"plain/2": [plain | {"round": 0}], "zrun-1f1b/2": [record | {"round": 0}]}
    ).splitlines()
    row = next(line for line in lines if line.startswith("zrun")).split()
    assert row[:4] == ["zrun-1f1b/2", "11500", "11500-11500", "12000"]
    assert row[4:] == ["87.0%", "87.0%-87.0%", "66.7%", "2.5e-01", "1"]
    assert lines[-1].split() == [
        *("zrun-1f1b/2", "11000", "11000-11000", "1.222", "1.222-1.222"),
        *("45.5%", "33.3%", "33.3%", "0"),
    ]


def test_parts_of_offload_are_chosen_by_name() -> None:
    assert offload.parse([]).parts == ",".join(offload.PARTS)
    with pytest.raises(SystemExit):
        offload.parse(["--parts", "disk,disc"])


def test_updates_are_compared_inside_each_round() -> None:
    rates = {"zrun": [1e9, 2e9], "loop": [0.1e9, 0.5e9], "copy": [30e9, 30e9]}
    rows = [{"way": name, "numel": 8, "rates": found} for name, found in rates.items()]
    lines = offload_update.table(rows).splitlines()
    assert lines[3].split() == ["loop", "0.30", "0.10-0.50", "7.00", "4.00-10.00"]
    assert lines[4].split()[-4:] == ["1.00", "1.00-1.00", "1.50", "1.00-2.00"]
    assert [line.rpartition(" ")[2] for line in lines[5:]] == ["met"] * 3


def test_memory_of_a_save_is_measured(tmp_path: Path) -> None:
    row = offload_saves.save_once("disk", "goes on", 256, 2, str(tmp_path))
    assert row["file_mib"] == pytest.approx(12 * 2 * 256**2 / 2**20, rel=0.05)
    assert row["without_mib"] > 100
    *_, line = offload_saves.table([row]).splitlines()
    assert line.split()[:4] == ["disk", "goes", "on", "2"]


def test_blocks_beside_what_computes_are_counted() -> None:
    spans = [
        Span("zrun-disk-0", "read record of a", 0.0, 4.0),  # begins before what is looked at
        Span("zrun-disk-1", "write record of a", 3.0, 7.0),
        Span("MainThread", "wait", 2.0, 6.0),
        Span("zrun-update_0", "update a", 3.0, 5.0),
        Span("zrun-update_0", "wait", 3.0, 4.5),
        Span("zrun-disk-0", "read record of b", 9.5, 12.0),
    ]
    found = offload_worker.overlap(spans, (1.0, 10.0))
    assert found["io_s"] == 6.5
    assert found["update_s"] == 0.5
    # Nothing computes from 2 to 4.5 and from 5 to 6.
    assert found["beside"] == pytest.approx(1 - 3.5 / 6.5)


def test_a_step_is_compared_with_what_bounds_it_in_its_round() -> None:
    def turn(seconds: float, **fields: float) -> dict[str, Any]:
        return {"times": [seconds], "disk_bytes": 0.0, "losses": [1.0], **fields}

    raw = [1e9, 2e9]
    on_disk = {"planned_bytes": 1e9, "moved_bytes": 1e9, "io_s": 1, "update_s": 1, "beside": 0.5}
    rows = [
        {"way": "in memory", "raw": raw, "turns": [turn(0.5), turn(0.75)]},
        {
            "way": "disk",
            "raw": raw,
            "turns": [turn(s, **on_disk | {"disk_bytes": 1e9}) for s in (1.0, 0.9)],
        },
        {"way": "DeepSpeed", "error": "RuntimeError: no"},
    ]
    lines = offload_step.table(rows).splitlines()
    # The disk bounds the first round (1 s), computing the second one (0.75 s).
    assert lines[3].split()[6:9] == ["0.875", "1.10", "1.00-1.20"]
    assert lines[3].endswith("50%     met")
    assert lines[4:] == [
        "the disk, reading and writing: 1.50 1.00-2.00 GB/s",
        "DeepSpeed: RuntimeError: no",
    ]


def test_the_largest_split_fills_device_and_host() -> None:
    gib = 2**30
    shape, fraction = gpu_offload_cases.largest(125 * gib, 100 * gib)
    kept = 16 * shape.params - 14 * fraction * shape.params
    assert kept == pytest.approx(125 * gib)
    assert 14 * fraction * shape.params <= 100 * gib
    assert 16 * (shape.params + 12 * shape.dim**2) > 225 * gib, "a deeper one fits too"
    shape, _ = gpu_offload_cases.largest(20 * gib, 10000 * gib)  # the parameters alone fill it
    assert 2 * shape.params <= 20 * gib < 2 * (shape.params + 12 * shape.dim**2)


def test_a_roofline_hides_what_its_schedule_can() -> None:
    shape = gpu_offload_cases.Shape()
    ceilings = {
        "gemm_tflops": shape.step_flops * 8 / 6 / 1e12,  # computing takes 1 s
        "copies_gb_s": {"pinned up": 50.0, "pinned down": 50.0},
        "adamw_gparam_s": {"1": 1.0, "8": 4.0},
    }
    found = {
        schedule: gpu_offload_cases.roofline_s(ceilings, shape, 2e9, schedule)
        for schedule in gpu_offload_cases.SCHEDULES
    }
    # The update takes 0.5 s; the forward of one of two micro-batches an eighth of a second.
    assert found == pytest.approx({"serial": 1.5, "overlap": 1.375, "delayed": 1.0})


def test_a_gpu_s_verdict_names_what_is_missed() -> None:
    line = {"case": "7b", "of_roofline": 0.9, "tflops": 230.0, "slack": 0.01, "retries": 0}
    assert gpu_offload.verdict(line) == "met"
    assert gpu_offload.verdict(line | {"slack": 0.05, "retries": 2}) == "MISSED slack, retries"
    assert gpu_offload.verdict(line | {"case": "torchao", "tflops": 1.0}) == ""


def test_a_disk_is_compared_inside_each_round() -> None:
    rates = {"disk": [1e9, 2e9, 4e9], "SwapFile": [0.9e9, 1.6e9, 3.6e9]}
    row = {"operation": "read", "bytes": 8 << 20, "rates": rates, "cpu_s": rates}
    *_, line = offload_disk.table([row]).splitlines()
    assert line.split()[:8] == [
        "read",
        "8.0",
        "MiB",
        "2.00",
        "1.60",
        "1.00-4.00",
        "0.90-3.60",
        "0.900",
    ]
    assert line.endswith("met")


def test_every_part_of_a_step_is_there_to_be_timed() -> None:
    assert {part for part, _, _ in step_profile.targets()} == set(step_profile.PARTS)


def test_time_counts_for_the_innermost_part(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(step_profile.time, "perf_counter", lambda: 10 * next(clock))
    monkeypatch.setattr(step_profile.time, "thread_time", lambda: 0)
    watch = step_profile.Stopwatch()
    copy = watch.wrap("copies between ranks", lambda: None)
    with watch.part("backward"):
        copy()
    spent = {name: clock for name, (_, clock) in watch.lap().items() if clock}
    assert spent == {"backward": 20, "copies between ranks": 10, step_profile.REST: 20}
    assert not any(clock for _, clock in watch.lap().values() if clock > 10)


def test_a_profile_shows_the_median_of_all_steps() -> None:
    steps = [dict.fromkeys(step_profile.ROWS, (0.001 * ms, 0.002 * ms)) for ms in (1, 2, 9)]
    rows = step_profile.table({case("zrun1"): steps, case("ddp"): []}, 2).splitlines()
    assert rows[0].split()[-1] == "zrun1"
    assert rows[2].split() == ["forward", "2", "/", "4"]


def test_a_disturbed_run_counts_only_where_there_is_no_other() -> None:
    quiet, disturbed = record([1.0]), record([9.0], number=1, clean=0)
    assert table.step_ms({case("ddp"): [quiet, disturbed]}, case("ddp")) == Spread(
        1000.0, 1000.0, 1000.0
    )
    assert table.step_ms({case("ddp"): [disturbed]}, case("ddp")) == Spread(9000.0, 9000.0, 9000.0)


def test_failed_runs_are_left_out_and_shown() -> None:
    runs = {case("ddp"): [record([1.0])], case("ds3"): [{"round": 0, "error": "no compiler"}]}
    assert table.ratio(runs, case("ds3")) is None
    assert table.case_table(runs, 2, 512, 1e6).splitlines()[-1].split() == ["ds3", "FAILED"]


@pytest.mark.parametrize(
    ("value", "must", "aim", "exact", "text"),
    [
        (0.94, 1.0, 0.95, False, "aim"),
        (1.0, 1.0, 0.95, False, "must"),
        (1.01, 1.0, 0.95, False, "MISSED"),
        (1.004, 1.0, None, True, "must"),
        (
            0.9,
            1.0,
            None,
            True,
            "MISSED",
        ),  # fewer bytes than theory are no success: something was not sent
        (1.5, None, None, False, ""),
        (None, 1.0, None, False, ""),
    ],
)
def test_verdicts(
    value: float | None, must: float | None, aim: float | None, exact: bool, text: str
) -> None:
    assert Verdict("step", value, must=must, aim=aim, exact=exact).text == text


def test_targets_are_judged_from_records() -> None:
    runs = {
        case("single"): [record([9.0], losses=[3.0, 2.0 + 1e-7])],
        case("ddp"): [record([1.0])],
        case("zrun3-sockets"): [record([1.1], payload=150)],
        case("zrun3"): [
            record([1.2], payload=0, peak_mb=700.0, counted=[10, 10], digests=["a", "b"])
        ],
        case("fsdp2-z3"): [record([1.3], payload=200)],
        case("train"): [{"round": 0, "first_s": 5.5, "losses": [3.0]}],
    }
    found = {verdict.label: verdict for verdict in table.verdicts(runs, "50m", 2)}
    assert found["ZeRO-3 step / DDP"].text == "MISSED"
    assert found["ZeRO-3 step / DDP"].peer == "1.300 fsdp2-z3"
    assert found["bytes through sockets, ZeRO-3 / DDP"].text == "must"
    assert found["bytes that zrun counts / plan"].value == 1.0
    assert found["resident memory, ZeRO-3, 2 ranks, MB"].text == "must"
    assert found["zrun train to first step, s"].text == "must"
    assert found["largest loss difference from one process"].value == pytest.approx(1e-7)
    assert found["stages that differ from DDP in any bit"].text == "MISSED"
    assert "ZeRO-1 step / DDP" not in found  # it did not run
    small = {verdict.label: verdict for verdict in table.verdicts(runs, "10m", 2)}
    assert small["resident memory, ZeRO-3, 2 ranks, MB"].text == ""  # its target is for 50m


def test_ranks_are_reduced_to_the_slowest_and_disturbed_steps_left_out() -> None:
    def rank(times: list[float], busy: list[float]) -> launch.Record:
        return {
            "times": times,
            "busy": busy,
            "cpu": [0.5] * 5,
            "losses": [1.0] * 5,
            "payload": [7] * 5,
            "loopback": [8] * 5,
            "digest": "a",
            "counted": None,
            "first_s": 1.0,
            "base_mb": 1.0,
            "start_mb": 2.0,
            "peak_mb": 3.0,
            "torch": "2",
        }

    found = launch.reduce_ranks(
        [rank([1, 1, 1, 1, 1], [1.0] * 5), rank([2, 2, 3, 2, 2], [1.0, 1.0, 1.0, 3.0, 1.0])],
        warmup=1,
        cores=2,
    )
    assert found["timed"] == [
        2,
        3,
        2,
    ]  # the fourth step was disturbed by two seconds of somebody else's
    assert (found["clean"], found["payload"]) == (3, 7)


def test_tables_are_aligned() -> None:
    assert render.render(("name", "n"), [("a", "1"), ("long", "10")]).splitlines() == [
        "name   n",
        "--------",
        "a      1",
        "long  10",
    ]


def test_gpu_results_are_judged() -> None:
    line = {
        "size": "1.5b",
        "loop": "zrun",
        "ms": 300.0,
        "ms_range": [299.0, 301.0],
        "tokens_per_s": 1e5,
        "tflops": 460.0,
        "mfu": 0.46,
        "ratio": 0.99,
        "ratio_range": [0.98, 1.0],
        "peak_gib": 80.0,
        "state_gib": 27.0,
        "max_loss_difference": 1e-4,
    }
    assert gpu.verdict(line) == "must"
    assert gpu.verdict(line | {"mfu": 0.44}) == "MISSED"
    assert gpu.verdict(line | {"size": "124m", "mfu": 0.3}) == "must"
    assert gpu.verdict(line | {"ratio": 0.97}) == "MISSED"
    assert gpu.verdict(line | {"loop": "torch"}) == ""
    assert "46.0%" in gpu.table([line])


def test_results_are_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = step.parse(["--size", "10m", "--json", str(tmp_path / "results.json")])
    step.save({case("ddp"): [record([1.0])]}, options)
    saved = json.loads((tmp_path / "results.json").read_text())
    assert saved["runs"][0]["case"] == asdict(case("ddp"))
    runs = {Case(**entry["case"]): entry["records"] for entry in saved["runs"]}
    assert "1.000-1.000" in step.report(runs, "10m", 2)


def test_quick_fills_in_only_what_was_not_given() -> None:
    options = step.parse(["--quick", "--rounds", "3"])
    assert (options.size, options.rounds, options.steps) == ("tiny", 3, 4)
    assert step.parse([]).rounds >= 4


@pytest.mark.parametrize("name", ["step", "comm", "limits", "gpu", "launches", "telemetry"])
def test_help(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"python benchmarks/{name}.py" in done.stdout


@pytest.mark.parametrize("name", ["comm", "gpu"])
def test_runs_where_zrun_is_not_installed(name: str) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); sys.modules['zrun'] = None; import "
        f"{name}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def line_of(predicted: list[float], measured: list[float]) -> dict[str, Any]:
    names = list(gpu_planner.BOUNDS)
    return {
        "case": "gpt",
        "predicted": dict(zip(names, predicted, strict=True)),
        "measured": dict(zip(names, measured, strict=True)),
    }


def test_the_gpu_planners_bounds_are_those_of_each_number() -> None:
    good = line_of([1.02e9, 1.06e9, 0.0108], [1e9, 1e9, 0.0100])
    late = line_of([1.02e9, 1.06e9, 0.0112], [1e9, 1e9, 0.0100])
    low = line_of([0.96e9, 1.06e9, 0.0100], [1e9, 1e9, 0.0100])
    assert [gpu_planner.is_good(line) for line in (good, late, low)] == [True, False, False]
    assert gpu_planner.errors_of(late) == pytest.approx(
        {"allocated": 0.02, "reserved": 0.06, "seconds": 0.12}
    )
    text = gpu_planner.table([good, low])
    assert [row.split()[-1] for row in text.splitlines()[2:]] == ["within", "MISSED"]


def test_the_gpu_planners_jobs_are_valid_and_it_refuses_without_a_device() -> None:
    jobs = [JobConfig.model_validate(gpu_planner.job_of(case)) for case in gpu_planner.cases()]
    assert {job.device for job in jobs} == {"cuda"}
    assert {"gpt2-124m", "moe", "conv"} <= {job.name for job in jobs}
    assert gpu_planner.parse([]).seconds < 360
    with pytest.raises(SystemExit):
        gpu_planner.parse(["--only", "gpt5"])


def test_step_times_are_judged_as_they_are_and_scaled_by_the_first_of_their_model() -> None:
    def result(predicted: float, measured: float) -> planner_time.Timed:
        return planner_time.Timed("gpt", "gpt x1", predicted, measured, (0.0, 1.0), {}, {})

    first, second = planner_time.scaled([result(0.110, 0.100), result(0.100, 0.080)])
    assert (first.is_good, second.is_good) == (True, False)
    assert "BAD" in str(second)
    assert (first.error, second.error) == pytest.approx((0.10, 0.25))
    assert (first.scaled_error, second.scaled_error) == pytest.approx((0.0, 0.1364), abs=1e-4)
    plain, others = planner_time.summary([first, second]).splitlines()
    assert plain.startswith("1 of 2 step times are within 15 %")
    assert others.startswith("1 of 1"), "the first one scales, and is not judged"


def test_the_cases_of_step_times_are_jobs_that_may_lie_anywhere() -> None:
    cases = planner_time.cases()
    assert {case.model for case in cases} == {"gpt", "llama", "bert", "encdec", "conv", "moe"}
    assert {case.stage for case in cases} == {0, 1, 2, 3}
    jobs = [JobConfig.model_validate(planner_time.job_of(case)) for case in cases]
    assert all(Path(job.data.call.partition(":")[0]).is_absolute() for job in jobs)
    assert {job.slots for job in jobs} == {1, 2}


def test_what_a_hybrid_waits_for_is_the_slowest_ranks() -> None:
    ranks = [
        {"step_s": 0.1, "after_s": after, "issued": issued, "over": 3.0, "reductions": 12.0}
        for after, issued in ((0.01, 6.0), (0.02, 12.0))
    ]
    step = hybrid.of_step(ranks)
    assert (step["after_s"], step["issued"]) == (0.02, 9.0)
    *_, row = hybrid.table({"this": [step] * 4}).splitlines()
    times = ["20.0", "[20.0,", "20.0]", "100.0", "[100.0,", "100.0]"]
    assert row.split() == ["this", "75%", "25%", *times, "20%"]


# All systems on all GPUs


def lines_of_gpus() -> list[dict[str, Any]]:
    """Two rounds of DDP, of ZeRO-3 that failed in the second one, and of a plain loop."""
    start = {
        "event": "start",
        "ranks": 2,
        "device": "NVIDIA H100 80GB HBM3",
        "devices": 2,
        "total_gib": 79.6,
        "torch": "2.13.0",
        "cuda": "13.0",
        "gemm_tflops": 700.0,
        "peak_flops": 1e15,
        "command": "python benchmarks/gpu_systems.py --write",
        "time": "2026-11-24T00:00:00",
    }

    def ran(system: str, number: int, ms: float, loss: float, ranks: int = 2) -> dict[str, Any]:
        return {
            "event": "run",
            "system": system,
            "round": number,
            "ranks": ranks,
            "ms": ms,
            "losses": [3.0, loss],
            "allocated": 2**30,
            "reserved": 2**31,
            "tokens": 1000,
            "flops_per_token": 10**10,
            "params": 10**9,
        }

    return [
        start,
        ran("ddp", 0, 100.0, 2.0),
        ran("zrun3", 0, 90.0, 2.25),
        {"event": "run", "system": "zrun3", "round": 1, "error": "rank 1: OutOfMemoryError"},
        ran("ddp", 1, 120.0, 2.0),
        ran("plain", 1, 60.0, 9.0, ranks=1),
    ]


def test_ratios_between_systems_on_gpus_are_taken_inside_each_round() -> None:
    base, rows, failures = gpu_systems.rows_of(lines_of_gpus())
    assert base == "DDP"
    plain, ddp, zrun = rows
    assert ddp[:6] == ["DDP", "2", "110.0", "100.0-120.0", "1.000", "1.000-1.000"]
    assert zrun[:6] == ["zrun ZeRO-3", "2", "90.0", "90.0-90.0", "0.900", "0.900-0.900"]
    assert zrun[6:] == ["11111", "11.1%", "1.00", "2.00", "2.5e-01"]
    assert plain[4] == "0.500"
    assert plain[-1] == ""  # it has half the batch: no losses to compare
    assert failures == ["zrun ZeRO-3 failed in 1 of 2 rounds: rank 1: OutOfMemoryError"]


def test_the_table_of_gpus_goes_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{gpu_systems.BEGIN}\nold\n{gpu_systems.END}\nafter\n")
    for _ in range(2):
        gpu_systems.write(page, gpu_systems.markdown(lines_of_gpus()))
    text = page.read_text()
    assert text.startswith(f"before\n{gpu_systems.BEGIN}\n\n2026-11-24, 2 x NVIDIA H100")
    assert text.endswith(f"{gpu_systems.END}\nafter\n")
    assert "old" not in text
    assert text.count("| zrun ZeRO-3 | 2 | 90.0 |") == 1
    assert text.count("published by torchtitan, not measured here") == 1
    page.write_text("none")
    with pytest.raises(ValueError, match="once"):
        gpu_systems.write(page, "table")


def test_the_page_has_a_place_for_the_table_of_gpus() -> None:
    head, tail = gpu_systems.around(gpu_systems.PAGE)
    between = gpu_systems.PAGE.read_text()[len(head) : -len(tail)]
    assert gpu_systems.PUBLISHED in between
    assert "Simulated" not in between


def test_what_watching_costs_is_told_beside_ranks_that_nobody_watches(tmp_path: Path) -> None:
    runs = {
        way: [telemetry.Run([0.3 + more, 0.3 + more], [0.006 + more], shares)]
        for way, more, shares in (
            ("alone", 0.0, {}),
            ("watched", 0.0015, {"launcher": 0.004, "agent": 0.002, "trackers": 0.0}),
            ("tracked", 0.003, {"launcher": 0.005, "agent": 0.002, "trackers": 0.001}),
        )
    }
    step, cpu, launcher, *_ = telemetry.rows_of(runs, 0.3)
    assert step[-3:] == ["+1.50 (+0.50%)", "+3.00 (+1.00%)", "0.5% of a step"]
    assert cpu[1:3] == ["6.00 (6.00 to 6.00)", "7.50 (7.50 to 7.50)"]
    assert launcher[1:4] == ["", "0.40% (0.40% to 0.40%)", "0.50% (0.50% to 0.50%)"]

    frames = telemetry.frames_of(tmp_path / "top", 1)
    views = {view for view, _, _ in frames}
    assert {"overview", "ranks", "memory"} <= views
    assert all(len(times) == 1 for times in frames.values())
    page = tmp_path / "page.md"
    page.write_text(f"before {telemetry.BEGIN} old {telemetry.END} after")
    text = telemetry.markdown(runs, frames, telemetry.parse(["--rounds", "1"]), ["--rounds", "1"])
    telemetry.write(page, text)
    assert "`python benchmarks/telemetry.py --rounds 1`, " in page.read_text()
    assert page.read_text().startswith("before ")
    assert page.read_text().endswith(" after")
    assert "old" not in page.read_text()
    with pytest.raises(ValueError, match="must have"):
        telemetry.around(tmp_path / "top" / "events.jsonl")


def test_what_a_page_says_and_loads_in_a_browser_is_told(tmp_path: Path) -> None:
    page = tmp_path / "good.html"
    sent = "Network.requestWillBeSent"
    events = [
        {"method": sent, "params": {"request": {"url": page.as_uri()}}},
        {"method": "Page.loadEventFired", "params": {}},
        {"id": 3, "result": {}},
    ]
    assert list(report_screens.said(events, page)) == []
    events += [
        {"method": sent, "params": {"request": {"url": "https://example.org/x.js"}}},
        {"method": "Log.entryAdded", "params": {"entry": {"text": "not found"}}},
        {"method": "Runtime.consoleAPICalled", "params": {"type": "error"}},
        {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": {"text": "Uncaught"}}},
    ]
    assert list(report_screens.said(events, page)) == [
        "it loads https://example.org/x.js",
        "console: not found",
        "console: error",
        "console: Uncaught",
    ]
