"""A trial of a job beside its estimate.

Its keys, its measurements, and the times that it scales.
"""

from __future__ import annotations

import html
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from warm import WarmPopen

from zrun.estimate import question
from zrun.estimate.answer import Answer, answer
from zrun.estimate.plan_tables import fullest
from zrun.estimate.question import of_model
from zrun.estimate.screens import print_answer, to_json, write_page
from zrun.estimate.trial import Trial, read_trial, trial_overrides, with_trial
from zrun.job.document import Document
from zrun.job.overrides import apply
from zrun.job.validate import validate
from zrun_core.errors import JobError
from zrun_core.hardware.simulated import parse_simulate
from zrun_core.spine.config import JobConfig

GIB = 1 << 30


def job(**keys: Any) -> JobConfig:
    return JobConfig.model_validate(
        {"name": "t", "model": "m:f", "data": "m:d", "steps": 1000, "batch": 8} | keys
    )


def trial_of(**keys: Any) -> JobConfig:
    """The trial of a job, as its file and the overrides make it."""
    given = {"name": "t", "model": "m:f", "data": "m:d", "steps": 1000, "batch": 8} | keys
    given = {key: value for key, value in given.items() if value is not None}
    text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in given.items())
    document = Document.parse(text, "job.yaml", {})
    apply(document, trial_overrides(job(**keys)), {})
    return validate(document)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"steps": 4, "checkpoint": {"every": 2}},
        {"steps": None, "tokens": 10**6, "lr": {"schedule": "cosine", "warmup": 100}},
        {"eval": {"data": "m:d", "every": 5, "stop": 3}, "checkpoint": {"best": "loss"}},
        {"restarts": 3, "resume": "auto", "checkpoint": {"every": 10}},
    ],
)
def test_a_trial_has_few_steps_and_leaves_nothing(keys: dict[str, Any]) -> None:
    found = trial_of(**keys)
    assert found.steps == min(5, keys.get("steps") or 5)
    assert (found.eval, found.checkpoint, found.restarts) == (None, None, 0)
    assert found.resume == "never"


def test_a_job_of_two_steps_has_none_that_could_be_timed() -> None:
    with pytest.raises(JobError, match="after the first 2, and the job has 2"):
        trial_overrides(job(steps=2))


def test_warm_steps_do_not_count_and_the_fullest_rank_does(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [
        *({"type": "step", "step_s": seconds} for seconds in (9.0, 8.0, 0.5, 0.7, 0.6)),
        {"type": "peak", "rank": 0, "peak_bytes": 100, "process_bytes": None},
        {"type": "peak", "rank": 1, "peak_bytes": 300, "process_bytes": 500},
        {"type": "memory", "rank": 0, "process_bytes": 700},
    ]
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events) + '{"type": "st')
    found = read_trial(path)
    assert found == Trial((0.5, 0.7, 0.6), peak_bytes=300, process_bytes=700)
    assert found.step_s == 0.6
    path.write_text(json.dumps(events[0]) + "\n")
    with pytest.raises(JobError, match="ended after 1 steps"):
        read_trial(path)


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Traces are kept, and not in the home of who runs this; they begin at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(subprocess, "Popen", WarmPopen)
        patch.setattr(question, "_MOST_TRACES", 1)  # no thread forks while another one holds a lock
        yield


@pytest.fixture(scope="module")
def predicted() -> Answer:
    return answer(of_model("1B", parse_simulate("1xA100-80G"), ("zero=1",)), "best")


def test_all_times_are_scaled_by_the_jobs_own(predicted: Answer) -> None:
    seconds = predicted.chosen.time.seconds
    trial = Trial((2 * seconds, 2.5 * seconds, 3 * seconds), peak_bytes=7 * GIB)
    found = with_trial(predicted, trial)
    assert found.measured is not None
    assert found.measured.scale == pytest.approx(2.5)
    assert found.chosen.time.seconds == pytest.approx(trial.step_s)
    assert found.found is not None
    assert predicted.found is not None
    before = [*predicted.stages, *predicted.found.best, *predicted.found.pareto]
    after = [*found.stages, *found.found.best, *found.found.pareto]
    for old, new in zip(before, after, strict=True):
        assert new.candidate == old.candidate
        assert new.device_used == old.device_used
        assert new.time.seconds == pytest.approx(2.5 * old.time.seconds)
        assert sum(new.time.parts.values()) == pytest.approx(new.time.seconds)
        assert new.time.high - new.time.seconds == pytest.approx(new.time.seconds - new.time.low)
        assert new.time.tokens_per_s is not None
        assert old.time.tokens_per_s is not None
        assert new.time.tokens_per_s == pytest.approx(old.time.tokens_per_s / 2.5)


@pytest.mark.parametrize(
    ("overrides", "label"),
    [
        (("sync=async_server", "staleness=3"), "sync: async_server, staleness 3"),
        (("parallel.pp=2", "parallel.schedule=pipedream"), "parallel.schedule: pipedream"),
        (("sync=async_server",), None),
        (("parallel.pp=2",), None),
    ],
)
def test_a_job_whose_gradients_are_late_is_labelled(
    overrides: tuple[str, ...],
    label: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = answer(of_model("1B", parse_simulate("2xA100-80G"), overrides))
    print_answer(found, None, None)
    lines = capsys.readouterr().out.splitlines()
    told = [line.strip() for line in lines if "changes numerics" in line]
    assert told == ([] if label is None else [f"changes numerics ({label})"])
    data = json.loads(json.dumps(to_json(found, None, None)))
    assert data["changes_numerics"] == label
    write_page(found, tmp_path / "page.html")
    page = html.unescape((tmp_path / "page.html").read_text())
    assert (f"changes numerics ({label})" in page) is (label is not None)
    assert ("changes numerics" in page) is (label is not None)


def test_what_was_measured_is_told_beside_the_prediction(
    predicted: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = Trial((0.4, 0.5, 0.7), peak_bytes=7 * GIB)
    found = with_trial(predicted, trial)
    print_answer(found, None, None)
    out = capsys.readouterr().out
    assert "measured: 3 steps of 0.50s (0.40s to 0.70s), " in out
    assert f"all times here are predicted ones x {0.5 / predicted.chosen.time.seconds:.2f}" in out
    assert "measured: peak 7.0 GiB, " in out
    assert "times from data sheets" not in out
    data = to_json(found, None, None)
    assert data["measured"]["step_s"] == 0.5
    assert data["measured"]["predicted_step_s"] == predicted.chosen.time.seconds
    assert data["measured"]["predicted_peak_bytes"] == fullest(predicted.chosen).allocated
    assert "measured" not in to_json(predicted, None, None)
