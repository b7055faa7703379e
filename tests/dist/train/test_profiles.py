"""Profiles of real ranks: what they name, and that training does not notice."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from runs import job, run
from small_jobs import small_gpt
from traces import names_in, read_trace

from zrun_core.spine.profile_request import ProfileRequest
from zrun_core.spine.stop_signals import PROFILE
from zrun_core.telemetry import trace_file
from zrun_core.telemetry.profiler import Profiler
from zrun_core.train.trainer import Trainer

STEPS = 6


def small(**keys: Any) -> dict[str, Any]:
    return job(**{"steps": STEPS, "checkpoint": None, "hooks": {}, **keys})


def losses(found: dict[str, Any]) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in found["events"] if event["type"] == "step"}


def told(found: dict[str, Any], kind: str = "profile") -> list[dict[str, Any]]:
    return [event for event in found["events"] if event["type"] == kind]


def test_the_work_of_shards_is_named(ranks, tmp_path):
    """By unit, pass and axis, in the steps that the job says, on each rank that it says."""
    keys = small(zero=3)
    plain = ranks(2).run(run, keys, str(tmp_path / "plain"))
    keys["profile"] = {"steps": [3, 4], "ranks": [0, 1]}
    found = ranks(2).run(run, keys, str(tmp_path / "traced"))
    assert [losses(each) for each in found] == [losses(each) for each in plain]
    for rank in (0, 1):
        (event,) = told(found[rank])
        path = tmp_path / "traced" / "profile" / "steps-3-4" / f"rank-{rank}.json.gz"
        assert (event["steps"], event["path"], event["memory"]) == ([3, 4], str(path), None)
        events = read_trace(path)
        names = names_in(events)
        assert {name for name in names if name.startswith("step ")} == {"step 3", "step 4"}
        assert names >= {
            *("data", "forward", "backward", "optim", "action F0.0", "action B0.3"),
            *("blocks.0 forward", "blocks.0 backward", "norm of the gradient"),
            *("all_gather blocks.0 (forward, shard)", "all_gather blocks.0 (backward, shard)"),
            *("reduce_scatter blocks.0 (backward, shard)", "update blocks.0"),
            *("message step (step, world)", "wait for message step (step, world)"),
        }
        assert any(name.startswith("wait for all_gather") for name in names)
        assert not any(name.startswith("zrun mark") for name in names)
        (process,) = [each for each in events if each["name"] == "process_name"]
        assert process["args"] == {"name": f"rank {rank} (host, cpu)"}
        assert {each["pid"] for each in events} == {rank}
        assert len(event["parts"]) == 10
        by_self = [part["self_s"] for part in event["parts"]]
        assert by_self == sorted(by_self, reverse=True)
        assert sum(by_self) <= event["seconds"] * 1.001
        assert {"shard", "world"} <= event["exposed_s"].keys()
        assert sum(event["exposed_s"].values()) < event["seconds"]
    assert not told(found[0], "warning")


def test_one_rank_may_be_traced_alone(ranks, tmp_path):
    found = ranks(2).run(run, small(profile=[2, 2]), str(tmp_path))
    assert [len(told(each)) for each in found] == [1, 0]
    assert [path.name for path in (tmp_path / "profile").rglob("*.*")] == ["rank-0.json.gz"]
    # Of the two profilers in a step the second would end the first: that of memory comes later.
    peaks = [told(each, "peak")[0] for each in found]
    assert [peak["step"] for peak in peaks] == [3, 2]
    assert all(peak["peak_bytes"] for peak in peaks)


@pytest.mark.parametrize(
    ("parallel", "dims", "expected"),
    [
        (
            {"pp": 2, "schedule": "1f1b"},
            {"dp": 1, "pp": 2},
            {
                *("action F0.0", "action B0.0", "blocks.0 forward", "blocks.0 backward"),
                "send activations of micro-batch 0 (forward, pipe)",
                "wait for receive gradients of micro-batch 0 (backward, pipe_back)",
            },
        ),
        (
            {"tp": 2, "plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}},
            {"dp": 1, "tp": 2},
            {"blocks.1 forward", "blocks.1 backward", "update blocks.1"},
        ),
    ],
    ids=["pp", "tp"],
)
def test_parts_of_a_model_are_named(ranks, tmp_path, parallel, dims, expected):
    model = {"call": "runs.py:Speaker", "args": {"norm": False}}
    keys = small(model=model, parallel=parallel, batch={"global": 4, "micro": 1})
    plain = ranks(2).run(run, keys, str(tmp_path / "plain"), None, None, None, dims)
    keys["profile"] = {"steps": [3, 4], "ranks": [0, 1]}
    found = ranks(2).run(run, keys, str(tmp_path / "traced"), None, None, None, dims)
    assert (losses(found[0]), found[0]["error"]) == (losses(plain[0]), "")
    assert not told(found[0], "warning")
    folder = tmp_path / "traced" / "profile" / "steps-3-4"
    traces = [read_trace(folder / f"rank-{rank}.json.gz") for rank in (0, 1)]
    assert names_in(traces[0]) >= expected
    axis = [*dims][1]
    named = [each["args"]["name"] for each in traces[1] if each["name"] == "process_name"]
    assert named == [f"rank 1 (host, cpu, {axis} 1)"]
    assert any(
        name.startswith(axis[0]) or name == "tensor" for name in told(found[0])[0]["exposed_s"]
    )


def run_asked(
    keys: dict[str, Any], run_dir: str, requests: dict[int, list[Any]], late: bool = False
) -> dict[str, Any]:
    """As `run`, where signals ask rank 0 for profiles, in the steps that `requests` names.

    With `late` the totals of a step are read in the next one.
    """
    first_sums, init = Trainer._first_sums, Trainer.__init__

    def asked(trainer: Trainer, read: Any) -> Any:
        request = requests.get(trainer.progress.steps)
        if request is not None and trainer.world.index == 0:
            number, ranks = request
            ProfileRequest(f"id{number}", number, tuple(ranks)).write(Path(run_dir))
            trainer.stop._note_profile(PROFILE, None)
        return first_sums(trainer, read)

    def reading_late(self: Trainer, *args: Any) -> None:
        init(self, *args)
        self.steps.reads_late = late

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_first_sums", asked)
        patch.setattr(Trainer, "__init__", reading_late)
        return run(keys, run_dir)


@pytest.mark.parametrize(("late", "expected"), [(False, [2, 3]), (True, [3, 4])])
def test_a_request_is_met_by_all_ranks_in_the_same_steps(ranks, tmp_path, late, expected):
    plain = ranks(2).run(run, small(), str(tmp_path / "plain"))
    found = ranks(2).run(run_asked, small(), str(tmp_path / "run"), {1: [2, [0, 1]]}, late)
    for rank in (0, 1):
        (event,) = told(found[rank])
        assert (event["steps"], event["request"]) == (expected, "id2")
        names = names_in(read_trace(Path(event["path"])))
        steps = {int(name.split()[1]) for name in names if name.startswith("step ")}
        assert steps == {*range(expected[0], expected[1] + 1)}
    assert losses(found[0]) == losses(plain[0])


def test_what_cannot_be_is_said_to_who_asked(ranks, tmp_path):
    """While one is on, where the job has its own, and beyond the end."""
    requests = {1: [3, [1]], 2: [1, [0]], 5: [2, [0]]}
    found = ranks(2).run(run_asked, small(), str(tmp_path / "a"), requests)
    assert [(each["unprofiled"], each["message"]) for each in told(found[0], "warning")] == [
        ("id1", "the profile is not taken: steps 2 to 4 are being profiled: ask again afterwards"),
        ("id2", "the profile is not taken: the run has 1 step left: ask for as many, or fewer"),
    ]
    assert not told(found[0])
    assert not told(found[1], "warning")
    assert [event["steps"] for event in told(found[1])] == [[2, 4]]
    found = ranks(2).run(run_asked, small(profile=[4, 5]), str(tmp_path / "b"), {1: [3, [0]]})
    (warning,) = told(found[0], "warning")
    assert "the job profiles steps 4 to 5 itself" in warning["message"]
    assert [event["steps"] for event in told(found[0])] == [[4, 5]]


def run_with_full_disk(keys: dict[str, Any], run_dir: str) -> dict[str, Any]:
    """As `run`, where a disk is full when half of a trace is on it."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_file._Converter, "end", fail)
        return run(keys, run_dir)


def test_a_full_disk_costs_the_trace_alone(ranks, tmp_path):
    plain = ranks(2).run(run, small(), str(tmp_path / "plain"))
    found = ranks(2).run(run_with_full_disk, small(profile=[2, 3]), str(tmp_path / "run"))
    assert (losses(found[0]), found[0]["error"]) == (losses(plain[0]), "")
    (warning,) = told(found[0], "warning")
    assert warning["message"] == (
        "the profile of steps 2 to 3 is not written, and training goes on: No space left on device"
    )
    assert [path for path in (tmp_path / "run" / "profile").rglob("*") if path.is_file()] == []


def test_steps_that_never_come_are_told(ranks, tmp_path):
    """The data ends before; or in the midst of the profile, which is written so far."""
    data = {"call": "runs.py:Tokens", "args": {"length": 32}}
    keys = small(data=data, steps=None, epochs=1)  # 4 steps
    found = ranks(2).run(run, keys | {"profile": [9, 12]}, str(tmp_path / "a"))
    (warning,) = told(found[0], "warning")
    assert warning["message"] == (
        "the profile of steps 9 to 12 is not taken: the run ended after step 4"
    )
    found = ranks(2).run(run, keys | {"profile": [4, 9]}, str(tmp_path / "b"))
    assert told(found[0])[0]["steps"] == [4, 4]
    assert len(losses(found[0])) == 4


def run_short_of_memory(keys: dict[str, Any], run_dir: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Profiler, "fills_memory", lambda self: True)
        return run(keys, run_dir)


def test_a_trace_that_would_fill_the_memory_ends_early(ranks, tmp_path):
    found = ranks(2).run(run_short_of_memory, small(profile=[2, 5]), str(tmp_path))
    (warning,) = told(found[0], "warning")
    assert warning["message"].startswith("the profile of steps 2 to 5 ends after step 2: ")
    assert [event["steps"] for event in told(found[0])] == [[2, 2]]


@pytest.mark.parametrize(
    "keys",
    [
        {"zero": 2, "offload": {"optimizer": "disk", "grad": "disk"}},
        {"zero": 3, "offload": {"param": "disk", "optimizer": "disk", "grad": "disk"}},
        {"zero": 2, "compile": True},
        {"zero": 3, "activations": "full", "parallel": {"schedule": "layer_major"}},
        {"zero": 0},
        {"zero": 3, "activations": "full"},
    ],
    ids=["states on disk", "all on disk", "compiled", "slices", "copies", "recomputed"],
)
@pytest.mark.at_most(3)
def test_other_ways_to_train_are_traced_too(ranks, tmp_path, keys):
    keys = small(**keys, optim={"lr": 1e-2})
    plain = ranks(2).run(run, keys, str(tmp_path / "plain"))
    assert plain[0]["error"] == ""
    found = ranks(2).run(run, keys | {"profile": [3, 4]}, str(tmp_path / "run"))
    assert losses(found[0]) == losses(plain[0])
    names = names_in(read_trace(Path(told(found[0])[0]["path"])))
    assert {"step 3", "step 4", "blocks.0 forward", "blocks.0 backward"} <= names
    assert {"update blocks.0"} <= names
    assert ("blocks.0 recompute" in names) == ("activations" in keys)
    if "offload" in keys:
        assert "read the optim of blocks.0" in names  # by a thread of the disk
        assert "store gradient of blocks.0" in names
        assert ("fetch blocks.0" in names) == (keys["zero"] == 3)


def test_a_window_of_steps_is_traced_whole(ranks, tmp_path):
    """Stages of PipeDream run several steps together, and the pipeline is drained in between."""
    keys = small_gpt(
        steps=STEPS,
        batch={"global": 2, "micro": 2},
        optim={"name": "sgd", "lr": 0.02},
        lr="constant",
        parallel={"pp": 2, "schedule": "pipedream", "split": ["blocks.2"]},
        guards={"replica_every": 3},
    )
    dims = {"dp": 1, "pp": 2}
    plain = ranks(2).run(run, keys, str(tmp_path / "plain"), None, None, None, dims)
    assert plain[0]["error"] == ""
    found = ranks(2).run(
        run, keys | {"profile": [5, 5]}, str(tmp_path / "run"), None, None, None, dims
    )
    assert losses(found[0]) == losses(plain[0])
    (event,) = told(found[0])
    assert event["steps"] == [4, 6]
    assert "action U0.1" in names_in(read_trace(Path(event["path"])))
