"""Trackers: what they are fed, what they are spared, and that nobody waits for them.

`tests/trackers` feeds the real packages.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest

from zrun.job.flat_keys import flat_keys
from zrun.trackers import feed
from zrun.trackers.feed import Feed, scalars_of
from zrun.trackers.prometheus import PrometheusFile
from zrun.trackers.tracker import KINDS, TrackedRun, check_installed, maker_of
from zrun_core.errors import JobError
from zrun_core.spine import tracker_process
from zrun_core.spine.sections.launch import TrackerName
from zrun_core.spine.tracker_process import TrackerProcess


class Notes:
    """A tracker that notes what it is told; `fails` names the call that raises."""

    made: ClassVar[list[Notes]] = []
    fails = ""

    def __init__(self, run: TrackedRun) -> None:
        self.run = run
        self.told: list[tuple[int, str, float]] = []
        self.ended = ""
        self.name = run.unique_name
        run.ids["count"] = run.ids.get("count", 0) + 1
        self._call("init")
        Notes.made.append(self)

    def _call(self, name: str) -> None:
        if Notes.fails == name:
            raise SystemExit(f"{name} is broken\nin detail")

    def scalars(self, step: int, at: float, values: Mapping[str, float]) -> None:
        self._call("scalars")
        self.told += [(step, name, value) for name, value in values.items()]

    def flush(self) -> None:
        self._call("flush")

    def end(self, state: str) -> None:
        self._call("end")
        self.ended = state


@pytest.fixture(autouse=True)
def noting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "maker_of", lambda kind: Notes)
    Notes.made = []
    Notes.fails = ""


def make(folder: Path, told: list[str] | None = None) -> Feed:
    tell = (told if told is not None else []).append
    return Feed(["csv"], project="gpt", folder=folder, config={"a": 1}, args={}, tell=tell)


def make_in(folder: Path) -> TrackedRun:
    folder.mkdir()
    make(folder)
    return Notes.made[-1].run


def step(number: int, **keys: Any) -> dict[str, Any]:
    return {"type": "step", "time": 5.0, "rank": 0, "step": number, "loss": 1.0 / number, **keys}


def test_every_tracker_that_a_job_may_name_is_there() -> None:
    assert set(get_args(TrackerName)) == set(KINDS)
    for kind in ("csv", "prometheus", "tensorboard", "wandb", "mlflow", "trackio"):
        assert maker_of(kind).__module__.startswith("zrun.trackers.")


def test_numbers_of_events() -> None:
    split = {"data": 0.1, "forward": 0.2}
    event = step(
        3, lr=1e-3, grad_norm="inf", loss_scale=None, tokens=8, tokens_per_s=4.0, split=split
    )
    told = {"train/loss": 1 / 3, "train/lr": 1e-3, "train/grad_norm": math.inf}
    told |= {"speed/tokens_per_s": 4.0, "time/data": 0.1, "time/forward": 0.2}
    assert scalars_of(event) == (3, told)
    without = scalars_of(step(3, tokens=0, tokens_per_s=0.0))
    assert without == (3, {"train/loss": 1 / 3}), "its data have no tokens"
    sets = {"type": "eval", "step": 5, "loss": 2.0, "metrics": {"loss": 2.0, "top1": 0.5}}
    assert scalars_of(sets) == (5, {"eval/loss": 2.0, "eval/top1": 0.5})
    assert scalars_of({"type": "eval", "step": 5, "loss": 2.0}) == (5, {"eval/loss": 2.0})
    assert scalars_of({"type": "metrics", "step": 2, "values": {"mine": 1}}) == (2, {"mine": 1.0})
    memory = {"type": "memory", "step": 2, "rank": 0, "rss_bytes": 7, "device_allocated": None}
    assert scalars_of(memory) == (2, {"memory/process_bytes": 7.0})
    assert scalars_of(memory | {"rank": 1}) is None
    assert scalars_of({"type": "save", "step": 2}) is None


def test_a_step_that_is_made_twice_is_told_once(tmp_path: Path) -> None:
    first = make(tmp_path)
    for number in (1, 2, 3):
        first.event(step(number))
    first.flush()  # and the launcher is killed
    second = make(tmp_path)
    for number in (1, 2, 3, 2, 3, 4):  # the record from its beginning: steps 2 and 3 came again
        second.event(step(number))
    second.event({"type": "eval", "time": 5.0, "step": 2, "loss": 9.0})
    second.end("finished")
    one, other = Notes.made
    assert [(number, name) for number, name, _ in one.told] == [
        (number, "train/loss") for number in (1, 2, 3)
    ]
    assert other.told == [(4, "train/loss", 0.25), (2, "eval/loss", 9.0)], "each series by itself"
    assert (one.ended, other.ended) == ("", "finished")
    assert other.run.ids["count"] == 2, "what it kept is there again"
    assert one.name == other.name != make_in(tmp_path / "anew").unique_name
    assert (other.run.project, other.run.name, other.run.config) == ("gpt", tmp_path.name, {"a": 1})


@pytest.mark.parametrize(
    ("call", "what"),
    [
        ("init", "did not start, and is off from here on"),
        ("scalars", "failed, and is off from here on"),
        ("flush", "failed, and is off from here on"),
        ("end", "did not end cleanly, and is off from here on"),
    ],
)
def test_one_that_raises_is_left_out(tmp_path: Path, call: str, what: str) -> None:
    Notes.fails = call
    told: list[str] = []
    fed = make(tmp_path, told)
    for number in (1, 2, 3):
        fed.event(step(number))
    fed.flush()
    fed.end("finished")
    assert told == [f"log.to: csv {what}: {call} is broken"]


def test_odd_events_and_a_broken_file_of_its_own_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "trackers.json").write_text("{")
    fed = make(tmp_path)
    for event in (
        {},
        {"type": "step"},
        {"type": "eval", "step": 1},
        {"type": "metrics", "step": 1},
    ):
        fed.event(event)
    fed.event(step(1, loss=None))
    fed.event(step(1, loss="nan"))
    fed.end("failed")
    ((number, name, value),) = Notes.made[0].told
    assert (number, name, math.isnan(value)) == (1, "train/loss", True)
    assert json.loads((tmp_path / "trackers.json").read_text())["csv"]["last"] == {"train/loss": 1}


def test_a_file_for_prometheus_is_as_it_reads_them(tmp_path: Path) -> None:
    run = TrackedRun('a "b"\\', "r1", tmp_path, {}, {}, {})
    file = PrometheusFile(run)
    file.scalars(3, 1.0, {"eval/top-1": 0.5, "train/loss": float("nan"), "x": float("-inf")})
    file.flush()
    labels = '{job="a \\"b\\"\\\\",run="r1"}'
    assert (tmp_path / "metrics.prom").read_text().splitlines()[1::2] == [
        f"zrun_eval_top_1{labels} 0.5",
        f"zrun_is_over{labels} 0.0",
        f"zrun_step{labels} 3.0",
        f"zrun_train_loss{labels} NaN",
        f"zrun_x{labels} -Inf",
    ]


def test_what_an_earlier_launch_has_told_prometheus_stays(tmp_path: Path) -> None:
    ids: dict[str, Any] = {}
    for launch in range(2):
        file = PrometheusFile(TrackedRun("gpt", "r1", tmp_path, {}, {}, ids))
        if launch == 0:
            file.scalars(5, 1.0, {"eval/loss": 2.0})
        file.flush()
        ids = json.loads(json.dumps(ids))  # as trackers.json has it
    text = (tmp_path / "metrics.prom").read_text()
    assert 'zrun_eval_loss{job="gpt",run="r1"} 2.0' in text


# The process


def start(folder: Path) -> TrackerProcess:
    return TrackerProcess(["csv"], folder, project="gpt", config={}, args={})


def test_the_process_reads_the_record_to_its_end(tmp_path: Path) -> None:
    trackers = start(tmp_path)
    lines = [json.dumps(step(number)) for number in range(1, 501)]
    (tmp_path / "events.jsonl").write_text("\n".join([*lines, "garbage", ""]))
    warned: list[dict[str, Any]] = []
    trackers.turn(warned.append)
    assert trackers.end("finished") == []
    assert not warned
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 501


def test_one_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_process, "_END_S", 1.0)
    os.mkfifo(tmp_path / "metrics.csv")  # opening it waits for a reader, for ever
    trackers = start(tmp_path)
    (said,) = trackers.end("finished")
    assert said.startswith("log.to: the trackers did not end within 1 s, and were ended; ")
    assert trackers._process.returncode == -9


def test_one_that_dies_is_told_of_once(tmp_path: Path) -> None:
    trackers = start(tmp_path)
    trackers._process.kill()
    trackers._process.wait()
    warned: list[dict[str, Any]] = []
    for _ in range(3):
        trackers.turn(warned.append)
    assert [each["message"] for each in warned] == [
        "log.to: the process of the trackers ended (-9)"
    ]
    assert trackers.end("failed") == []


def test_a_launcher_that_is_gone_ends_it(tmp_path: Path) -> None:
    trackers = start(tmp_path)
    (tmp_path / "events.jsonl").write_text(json.dumps(step(1)) + "\n")
    assert trackers._process.stdin is not None
    trackers._process.stdin.close()
    assert trackers._process.wait(20) == 0
    assert "1,5.000,train/loss,1.0" in (tmp_path / "metrics.csv").read_text()


# The job


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_installed(["csv", "prometheus"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(JobError) as raised:
        check_installed(["csv", "wandb"])
    assert str(raised.value) == (
        "log.to: wandb needs the package wandb, which the launcher's Python does not have: "
        "pip install wandb, or leave it out"
    )


def test_keys_of_a_job_are_flat() -> None:
    keys = {"optim": {"lr": 0.1, "betas": [0.9, 0.95]}, "eval": None, "zero": {"stage": 2}}
    assert flat_keys({"sets": [{"a": 1}, {"a": 2}]}) == {"sets.0.a": 1, "sets.1.a": 2}
    assert flat_keys(keys) == {"optim.lr": 0.1, "optim.betas": [0.9, 0.95], "zero.stage": 2}
