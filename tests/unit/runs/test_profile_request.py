"""`zrun profile` and the section `profile`: what is refused, what counts as the answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from zrun.commands.profile import profile
from zrun.estimate.trial import trial_overrides as measured_trial
from zrun.job.load import load_job
from zrun.job.smoke import smoke_of
from zrun.launch import profile_request
from zrun.placement.remarks import _not_profiled
from zrun.runs.listing import read_run
from zrun.runs.rundir import RunDir
from zrun.verification.trial import trial_of as verified_trial
from zrun.watch.plain import message_line
from zrun.watch.profile_table import profile_line, profile_text
from zrun_core.errors import HangError, JobError, PreflightError
from zrun_core.spine import profile_request as words
from zrun_core.spine.events import encode
from zrun_core.spine.profile_request import ProfileRequest
from zrun_core.spine.stop_signals import PROFILE, StopSignals

START = {"type": "start", "rank": 0, "time": 1.0, "total_steps": 20, "world_size": 2}
STEP = {"type": "step", "rank": 0, "time": 2.0, "step": 5}


def told(rank: int, request: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "profile",
        "rank": rank,
        "time": 3.0,
        "steps": [7, 9],
        "path": f"/run/profile/steps-7-9/rank-{rank}.json.gz",
        "host": None,
        "bytes": 2048,
        "memory": None,
        "seconds": 2.0,
        "parts": [
            {"name": "blocks.0 forward", "self_s": 0.5, "calls": 6},
            {"name": "wait for all_gather blocks.1 (forward, shard)", "self_s": 0.25, "calls": 3},
        ],
        "exposed_s": {"shard": 0.3, "world": 0.1, "any": 0.0},
        "request": request,
        **fields,
    }


Answer = Callable[..., None]


@pytest.fixture
def run() -> Iterator[ExitStack]:
    """Ends with the launcher, when it is closed."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def rundir(tmp_path: Path, run: ExitStack) -> RunDir:
    """Of a run that trains, and whose launcher is this process."""
    claimed = run.enter_context(RunDir.claim("gpt", tmp_path / "run"))
    claimed.exit_code = 0
    claimed.write_job("name: gpt\n")
    claimed.append([encode(START), encode(STEP)])
    return claimed


@pytest.fixture
def answer(rundir: RunDir, run: ExitStack) -> Iterator[Answer]:
    """Called with what the record gets each time that the launcher is asked: a function of the
    request for each; None ends the run.
    """
    turns: list[Any] = []

    def obey(number: int, _: object) -> None:
        events_of = turns.pop(0)
        if events_of is None:
            run.close()
        else:
            request = words.read(rundir.path)
            rundir.append([encode(event) for event in events_of(request)])

    before = signal.signal(PROFILE, obey)
    yield lambda *events: turns.extend(events)
    signal.signal(PROFILE, before)
    assert not turns, "it was asked less often"


def test_the_answer_is_of_each_rank_that_was_asked_for(rundir: RunDir, answer: Answer) -> None:
    answer(lambda asked: [told(0, "another"), told(1, asked.id), told(0, asked.id)])
    found = profile_request.profile(read_run(rundir.path), 3, [0, 1], 60.0)
    assert [event["rank"] for event in found] == [0, 1]
    asked = words.read(rundir.path)
    assert (asked.steps, asked.ranks) == (3, (0, 1))


def test_a_refusal_is_told(rundir: RunDir, answer: Answer) -> None:
    warning = {"type": "warning", "rank": 0, "time": 3.0, "message": "the profile is not taken: no"}
    answer(lambda asked: [warning, {**warning, "unprofiled": asked.id}])
    with pytest.raises(JobError, match="the profile is not taken: no") as error:
        profile_request.profile(read_run(rundir.path), 3, [0], 60.0)
    assert error.value.exit_code == 2


def test_a_restart_is_asked_again(rundir: RunDir, answer: Answer) -> None:
    answer(lambda asked: [START], lambda asked: [told(0, asked.id)])
    assert profile_request.profile(read_run(rundir.path), 3, [0], 60.0)[0]["rank"] == 0


def test_a_run_that_ends_first_and_patience(rundir: RunDir, answer: Answer) -> None:
    answer(lambda asked: [], None)
    with pytest.raises(HangError, match="was not profiled within 0 s; it may still be"):
        profile_request.profile(read_run(rundir.path), 3, [0], 0.0)
    with pytest.raises(profile_request.RunEndedError, match="run finished after step 5"):
        profile_request.profile(read_run(rundir.path), 3, [0], 60.0)


@pytest.mark.parametrize(
    ("steps", "ranks", "message"),
    [
        (3, [0, 2], "--ranks: there is no rank 2: the run has ranks 0 to 1; write --ranks 0"),
        (16, [0], "--steps 16: run run is at step 5 of 20: ask for 15 or fewer"),
        (101, [0], "--steps 101: a profile of 101 steps would fill memory and disk: trace at most"),
    ],
)
def test_what_a_run_does_not_have_is_refused(
    rundir: RunDir, answer: Answer, steps: int, ranks: list[int], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        profile_request.check(read_run(rundir.path), steps, ranks)


def test_what_cannot_be_asked(
    rundir: RunDir, run: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PreflightError, match="has not started to train"):  # no handler
        profile_request.check(read_run(rundir.path), 3, [0])
    run.close()
    with pytest.raises(
        JobError, match="is not running: it finished; for the next run write profile"
    ):
        profile(str(rundir.path))
    assert capsys.readouterr().err == ""


def test_a_table_and_a_line() -> None:
    event = told(1, "id")
    assert profile_text(event).splitlines() == [
        "profile of rank 1, steps 7 to 9 (2.00s):",
        "   by itself   share   calls  part",
        "       0.50s   25.0%       6  blocks.0 forward",
        "       0.25s   12.5%       3  wait for all_gather blocks.1 (forward, shard)",
        "  waited for other ranks: 0.40s (20.0%): shard 0.30s, world 0.10s",
        "  trace, for https://ui.perfetto.dev: /run/profile/steps-7-9/rank-1.json.gz (2.0 KiB)",
    ]
    assert message_line(event) == profile_text(event)
    assert profile_line(event) == (
        "rank 1, steps 7 to 9: blocks.0 forward 25.0%, wait for all_gather blocks.1 (forward, "
        "shard) 12.5%, waited for other ranks: 0.40s (20.0%): shard 0.30s, world 0.10s; "
        "/run/profile/steps-7-9/rank-1.json.gz"
    )


def test_a_table_of_a_gpu_elsewhere() -> None:
    parts = [{"name": "forward", "self_s": 0.1, "calls": 6, "device_s": 1.5}]
    memory = "/run/profile/steps-7-9/rank-0.memory.pickle"
    event = told(0, "id", parts=parts, host="node2", memory=memory, exposed_s={})
    lines = profile_text(event).splitlines()
    assert lines[1:4] == [
        "  on the GPU   by itself   share   calls  part",
        "       1.50s       0.10s    5.0%       6  forward",
        "  waited for no other rank",
    ]
    assert lines[-1] == f"  memory, for https://pytorch.org/memory_viz: {memory} on node2"


def test_a_request_is_read_as_it_was_written(tmp_path: Path) -> None:
    request = ProfileRequest.new(3, (0, 1))
    request.write(tmp_path)
    assert words.read(tmp_path) == request
    assert os.listdir(tmp_path / "profile") == ["asked.json"]
    for text in ("[]", "{}", "no"):
        with pytest.raises(ValueError, match=r"."):
            ProfileRequest.parse(text)


def test_a_signal_asks_once() -> None:
    signals = StopSignals()
    assert not signals.take_profile()
    signals._note_profile(PROFILE, None)
    assert (signals.take_profile(), signals.take_profile()) == (True, False)


def load(tmp_path: Path, profile: str, *overrides: str, length: str = "steps: 20") -> Any:
    text = f"name: a\nmodel: a.py:m\ndata: a.py:d\n{length}\nbatch: {{global: 2}}\n{profile}\n"
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "a.py").write_text("def m(): ...\ndef d(): ...\n", encoding="utf-8")
    return load_job(tmp_path / "job.yaml", overrides, environ={}).config


def test_both_forms_of_the_section(tmp_path: Path) -> None:
    short = load(tmp_path, "profile: [10, 12]").profile
    assert (short.first, short.last, short.ranks) == (10, 12, [0])
    long = load(tmp_path, "profile: {steps: [10, 10], ranks: [0, 3]}").profile
    assert (long.first, long.last, long.ranks) == (10, 10, [0, 3])
    assert load(tmp_path, "", "profile=[3,4]").profile.last == 4


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ("profile: [12, 10]", r"\[12, 10\] ends before it begins: write \[10, 12\]"),
        ("profile: [10]", "write the first and the last step, such as"),
        ("profile: [0, 3]", "steps"),
        ("profile: [15, 22]", r"goes beyond the job's 20 steps; write \[13, 20\], or raise steps"),
        ("profile: {steps: [1, 2], ranks: []}", "name at least one rank"),
        ("profile: {steps: [1, 2], ranks: [1, 1]}", "a rank is named twice"),
        ("profile: {steps: [1, 2], rank: [1]}", "ranks"),
    ],
)
def test_what_no_job_can_have(tmp_path: Path, profile: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        load(tmp_path, profile)


def test_trials_of_a_job_are_not_profiled(tmp_path: Path) -> None:
    """They have fewer steps, and other ranks."""
    job = load(tmp_path, "profile: {steps: [15, 16], ranks: [5]}")
    for overrides in (
        smoke_of(job, 3).overrides,
        measured_trial(job),
        verified_trial(job, 3, None, 0).overrides,
    ):
        assert list(overrides).count("profile=null") == 1


def test_ranks_that_do_not_exist_are_refused_or_told(tmp_path: Path) -> None:
    job = load(tmp_path, "profile: {steps: [1, 2], ranks: [0, 4]}")
    with pytest.raises(JobError, match=r"profile.ranks: there is no rank 4: .* write ranks: \[0\]"):
        list(_not_profiled(job, 4))
    assert not list(_not_profiled(job, 5))
    smaller = load(tmp_path, "profile: {steps: [1, 2], ranks: [0, 4]}", "min_hosts=1")
    (warning,) = _not_profiled(smaller, 4)  # a restart on fewer hosts goes on
    assert "there is no rank 4" in warning


def test_more_steps_than_a_trace_can_hold(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="trace at most 100"):
        load(tmp_path, "profile: [1, 101]", length="epochs: 1")
