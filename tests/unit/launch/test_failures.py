"""Which of several dying ranks is told of, and how."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zrun.launch.failures import (
    Failure,
    FailureNote,
    Hang,
    LostHost,
    Stopped,
    WorkerExit,
    first_failure,
    is_cause,
)
from zrun.launch.gpu_faults import GpuFault, explaining
from zrun.system.tail_file import last_lines
from zrun.topology.xids import fault_of
from zrun_core.errors import ExitCode
from zrun_core.spine.spec import LaunchPlan, RankPlace

TERM, KILL, ABORT = -signal.SIGTERM, -signal.SIGKILL, -signal.SIGABRT
GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer "
    "[127.0.0.1]:33210"
)


def note(rank: int, kind: str = "user", message: str = "boom", **fields: Any) -> FailureNote:
    known = {"rank": rank, "kind": kind, "type": "ValueError", "message": message, "exit_code": 5}
    return FailureNote.model_validate(known | fields)


@pytest.mark.parametrize(
    ("exits", "notes", "first"),
    [
        ([WorkerExit(0, TERM, 1.2), WorkerExit(1, 5, 1.0)], [note(1)], 1),
        ([WorkerExit(0, 5, 1.0), WorkerExit(1, 5, 1.1)], [note(0, message=GLOO), note(1)], 1),
        ([WorkerExit(0, 5, 1.0), WorkerExit(1, KILL, 1.1)], [note(0, message=GLOO)], 1),
        (
            [WorkerExit(0, 5, 1.0), WorkerExit(1, KILL, 6.1)],
            [note(0, message=GLOO)],
            0,
        ),  # killed by the agent, for not listening
        ([WorkerExit(0, 5, 1.0), WorkerExit(1, KILL, 6.1, oom=True)], [note(0, message=GLOO)], 1),
        ([WorkerExit(0, 5, 1.0), WorkerExit(1, TERM, 1.1)], [note(0, "peer")], 0),
        ([WorkerExit(0, TERM, 1.0), WorkerExit(1, ABORT, 1.1)], [], 0),
        ([WorkerExit(0, ABORT, 1.1), WorkerExit(1, 0, 1.0)], [], 1),
        (
            [WorkerExit(0, 5, 1.0), WorkerExit(1, 7, 1.1)],
            [note(0, "bug", "KeyError"), note(1, "zrun", "not finite")],
            1,
        ),
        ([WorkerExit(0, 7, 1.1), WorkerExit(1, 7, 1.0)], [note(0, "zrun"), note(1, "zrun")], 1),
        ([WorkerExit(0, 143, 1.1), WorkerExit(1, 3, 1.0)], [], 1),
    ],
)
def test_the_cause_comes_before_its_echoes(
    exits: list[WorkerExit], notes: list[FailureNote], first: int
) -> None:
    found = {each.rank: each for each in notes}
    end = first_failure([replace(each, note=found.get(each.rank)) for each in exits], ended=False)
    assert end is not None
    assert end.rank == first


def test_status_0_is_a_failure_only_before_the_end() -> None:
    exits = [WorkerExit(0, 0, 1.0), WorkerExit(1, 0, 0.9)]
    assert first_failure(exits, ended=True) is None
    assert first_failure(exits, ended=False) == exits[1]
    assert first_failure([*exits, WorkerExit(2, ABORT, 1.1)], ended=True) == WorkerExit(
        2, ABORT, 1.1
    )


def failure(end: WorkerExit, found: FailureNote | None) -> Failure:
    places = [
        RankPlace(rank=rank, host="node", local_rank=rank, device=f"cuda:{rank}")
        for rank in range(4)
    ]
    log = tuple(f"line {number}" for number in range(50, 100))
    plan = LaunchPlan(ranks=places)
    return Failure(replace(end, note=found, log=log), plan, last_step=12, log=Path("rank-1.log"))


@pytest.mark.parametrize(
    ("end", "found", "headline", "code"),
    [
        (
            WorkerExit(1, 5, 1.0),
            note(1, step=13, phase="backward"),
            "failed at step 13 in backward",
            ExitCode.WORKER,
        ),
        (WorkerExit(1, 7, 1.0), note(1, "zrun", exit_code=7), "failed", ExitCode.NUMERIC),
        (WorkerExit(1, 2, 1.0), note(1, "zrun", exit_code=2), "failed", ExitCode.USAGE),
        (WorkerExit(1, 2, 1.0), note(1, "bug", exit_code=2), "failed", ExitCode.WORKER),
        (WorkerExit(1, 130, 1.0), note(1, "zrun", exit_code=130), "failed", ExitCode.WORKER),
        (WorkerExit(1, KILL, 1.0), None, "was killed by SIGKILL after step 12", ExitCode.WORKER),
        (
            *(WorkerExit(1, KILL, 1.0, oom=True), None),
            *("was killed by SIGKILL because memory ran out after step 12", ExitCode.WORKER),
        ),
        (
            *(WorkerExit(1, KILL, 1.0, oom=True, shortage="8.0 MiB were left"), None),
            *(
                "was killed by SIGKILL because memory ran out: 8.0 MiB were left, after step 12",
                ExitCode.WORKER,
            ),
        ),
        (WorkerExit(1, 3, 1.0), None, "ended with status 3 after step 12", ExitCode.WORKER),
        (
            WorkerExit(1, 0, 1.0),
            None,
            "ended with status 0 after step 12, before the end of training",
            ExitCode.WORKER,
        ),
    ],
)
def test_headlines_and_codes(
    end: WorkerExit, found: FailureNote | None, headline: str, code: ExitCode
) -> None:
    told = failure(end, found)
    assert told.headline == f"rank 1 of 4 (node, cuda:1) {headline}"
    assert told.exit_code is code
    assert told.advice
    assert json.loads(json.dumps(told.to_json()))["last_lines"] == [
        f"line {number}" for number in range(50, 100)
    ]


def test_what_is_wrong_with_the_job_is_no_fault_of_the_rank_that_found_it() -> None:
    found = note(1, "zrun", exit_code=2, phase="build").model_copy(update={"type": "JobError"})
    told = failure(WorkerExit(1, 2, 1.0), found)
    assert told.headline == "an error of the job, found in build"  # by any of them
    assert told.exit_code is ExitCode.USAGE


def test_memory_that_is_taken_beside_the_steps_is_not_blamed_on_the_batch() -> None:
    short = {"oom": True, "shortage": "ranks held too much (evaluation of step 9)"}
    took = failure(WorkerExit(1, -9, 1.0, short_in="evaluation", **short), None)
    assert took.advice.startswith("the evaluation took the memory: see what eval.metrics")
    assert (
        "batch.micro" in failure(WorkerExit(1, -9, 1.0, short_in="backward", **short), None).advice
    )


def test_sentences_of_a_run_that_has_no_step_yet() -> None:
    left = replace(failure(WorkerExit(1, 0, 1.0), None), last_step=0)
    assert left.headline.endswith("ended with status 0 before the first step ended")
    stopped = Stopped(130, "SIGINT", last_step=0, committed=0)
    assert stopped.describe(None) == "stopped before the first step ended, not saved"
    rank = {"rank": 0, "step": 0, "phase": "build", "does": "waits", "last": "no collective"}
    frame = {
        "ranks": [rank],
        "to_blame": [0],
        "limit_s": 9.0,
        "key": "limits.first_step_s",
        "reason": None,
        "stacks": {},
        "logs": {},
    }
    places = [RankPlace(rank=0, host="node", local_rank=0, device="cpu")]
    hang = Hang(frame, LaunchPlan(ranks=places), Path("run"))
    assert (
        "all ranks wait for each other in build\n  rank 0 waits in build, last:" in hang.describe()
    )


def test_the_traceback_is_told_or_else_the_message() -> None:
    trace = (
        "hooks.on_step failed\nTraceback (most recent call last):\n  File ...\nValueError: boom\n"
    )
    for found in (
        note(1, traceback=trace, message="hooks.on_step failed: ValueError: boom"),
        note(1),
    ):
        assert failure(WorkerExit(1, 5, 1.0), found).describe().count("boom") == 1


def test_who_had_no_memory_is_known() -> None:
    assert failure(WorkerExit(1, KILL, 1.0, oom=True), None).is_out_of_memory
    assert failure(WorkerExit(1, 5, 1.0), note(1, "zrun", type="OutOfMemoryError")).is_out_of_memory
    assert not failure(WorkerExit(1, 5, 1.0), note(1, "zrun")).is_out_of_memory


def test_half_a_note_is_none() -> None:
    assert FailureNote.parse(None) is None
    assert FailureNote.parse('{"rank": 0, "kind": "us') is None
    assert FailureNote.parse(note(0).model_dump_json()) == note(0)


def test_a_missing_log_is_said() -> None:
    told = replace(failure(WorkerExit(1, KILL, 1.0), None), end=WorkerExit(1, KILL, 1.0))
    headline, log, advice = told.describe().splitlines()
    assert headline == told.headline
    assert log.endswith("rank-1.log (empty)")
    assert advice == (
        "  next: something outside the job sent SIGKILL: see dmesg and the scheduler's log"
    )


def test_ranks_that_differ_are_no_mistake_in_the_job() -> None:
    told = failure(WorkerExit(1, 5, 1.0), note(1, "zrun", type="DivergedError")).advice
    assert told.startswith(
        "check for bad memory or a broken link (dmesg, zrun doctor), and your code "
    )


CRASH = """Fatal Python error: Segmentation fault

Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f0000000002 (most recent call first):
  File "/venv/site-packages/kernels/ops.py", line 7 in launch
  File "/home/me/train.py", line 12 in attend
  File "/venv/site-packages/torch/nn/modules/module.py", line 1789 in _call_impl
  File "/home/me/train.py", line 30 in forward
  File "/venv/site-packages/torch/nn/modules/module.py", line 1789 in _call_impl

Extension modules: numpy, torch._C (total: 2)
"""


def test_a_crash_of_native_code_shows_the_users_frames_first(tmp_path: Path) -> None:
    log = tmp_path / "rank-1.log"
    log.write_text("step\n" * 100 + CRASH)
    told = replace(
        failure(WorkerExit(1, -signal.SIGSEGV, 1.0), None).end, log=tuple(last_lines(log))
    )
    shown = replace(failure(told, None), end=told).describe().splitlines()
    assert shown[:5] == [
        "Fatal Python error: Segmentation fault",
        "Stack of the thread that crashed (most recent call last):",
        '  File "/home/me/train.py", line 30 in forward',
        '  File "/home/me/train.py", line 12 in attend',
        '  File "/venv/site-packages/kernels/ops.py", line 7 in launch',
    ]
    assert (
        shown[-1]
        == "  next: native code crashed: check what the last line of your code in the stack passes "
        "to it"
    )


def test_all_of_a_crash_is_kept(tmp_path: Path) -> None:
    frame = '  File "/home/me/train.py", line 3 in f\n'
    log = tmp_path / "rank-1.log"
    log.write_text(CRASH + frame * 100)
    assert len(last_lines(log)) == 100 + len(CRASH.splitlines())


def test_a_log_is_kept_from_its_end(tmp_path: Path) -> None:
    log = tmp_path / "rank-1.log"
    assert last_lines(log) == []
    log.write_bytes(b"\xff\n" + b"".join(b"line %d\n" % number for number in range(100)))
    assert last_lines(log) == [f"line {number}" for number in range(50, 100)]


def test_a_progress_bar_is_one_line_of_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    bar = "".join(f"\r\x1b[32m{step / 50:.1f}%\x1b[0m" for step in range(5001))
    log.write_text(f"what matters\n{bar}\nlast words", newline="")
    assert last_lines(log) == ["what matters", "100.0%", "last words"]
    log.write_text("")
    assert last_lines(log) == []


def test_a_lost_host_is_the_cause_where_ranks_only_felt_it() -> None:
    found = LostHost("node2", "node2: the connection broke", 12)
    assert found.headline == "lost node2: the connection broke, after step 12"
    assert found.exit_code is ExitCode.HANG
    echo = replace(WorkerExit(0, 5, 1.0), note=note(0, message=GLOO))
    assert not is_cause(echo, [echo])
    assert is_cause(WorkerExit(0, KILL, 1.0), [echo, WorkerExit(0, KILL, 1.0)])


def test_a_lost_host_tells_who_was_there_and_who_waits_for_them() -> None:
    hosts = ["node1"] * 5 + ["node2"] * 5
    places = [
        RankPlace(rank=rank, host=host, local_rank=rank % 5, device=f"cuda:{rank % 5}")
        for rank, host in enumerate(hosts)
    ]

    def told(rank: int, awaits: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "rank": rank,
            "step": 6,
            "phase": "backward",
            "does": "waits",
            "last": "reduce_scatter 3",
            "awaits": awaits,
        }

    at_host = {"ranks": [5], "what": "all_gather 9, 'head' (2 MiB)", "is_message": False}
    survivors = [told(rank, None) for rank in range(4)] + [told(4, at_host)]
    found = LostHost("node2", "node2: gone", 5, LaunchPlan(ranks=places), tuple(survivors))
    assert found.describe().splitlines() == [
        "lost node2: gone, after step 5",
        "  gone with it: rank 5 (node2, cuda:0), 6 (node2, cuda:1), 7 (node2, cuda:2), "
        "8 (node2, cuda:3), and 1 more",
        "  rank 4 waits for rank 5 in backward of step 6: all_gather 9, 'head' (2 MiB)",
        *(f"  rank {r} waits in backward of step 6, last: reduce_scatter 3" for r in range(3)),
        "  1 more rank: see failure.json",
        "  next: check that host; the run can be started again",
    ]
    written = found.to_json()
    assert [each["rank"] for each in written["lost_ranks"]] == [5, 6, 7, 8, 9]
    assert written["ranks"] == survivors


def reported(rank: int, xid: int, time: float) -> GpuFault:
    fault = fault_of(f"GPU-{rank}", xid)
    assert fault is not None
    return GpuFault((rank,), fault, time)


@pytest.mark.parametrize(
    ("faults", "explains"),
    [
        ([], None),
        ([(1, 31, 99.0)], 0),
        ([(1, 31, 60.0)], None),  # it went on for 40 s
        ([(1, 79, 60.0)], 0),
        ([(1, 63, 99.0), (1, 94, 99.1)], 1),  # the second one ends the process
        ([(0, 31, 99.0)], None),  # another rank's
        ([(0, 79, 10.0)], 0),  # the other rank does not come any more
        ([(0, 79, 10.0), (1, 13, 99.0)], 1),
    ],
)
def test_what_gpus_reported_explains_failures(
    faults: list[tuple[int, int, float]], explains: int | None
) -> None:
    """Rank 1 failed, at 100 s."""
    found = [reported(*fault) for fault in faults]
    assert explaining(found, [1], 100.0) == (None if explains is None else found[explains])


def test_the_rank_that_lost_its_gpu_failed_first() -> None:
    exits = [WorkerExit(0, 5, 1.0, note=note(0)), WorkerExit(1, KILL, 11.0)]
    assert first_failure(exits, ended=False) == exits[0]
    assert first_failure(exits, ended=False, lost={1}) == exits[1]
