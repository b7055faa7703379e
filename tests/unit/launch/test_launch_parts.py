"""The two streams between a launcher and an agent, and the agent's view of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrun.job.environment import forwarded_environment, worker_environment
from zrun.job.hidden import without_secrets
from zrun.runs.rundir import EarlierRun, RunDir
from zrun.system import cgroup, processes
from zrun.system.processes import Process
from zrun.transport.frame_reader import FrameReader
from zrun.transport.frames import EVENT, StartRequest, Unpacker, pack
from zrun_core.errors import ExitCode, JobError
from zrun_core.spine import memory_limits
from zrun_core.spine.config import JobConfig
from zrun_core.spine.spec import LaunchPlan, RankPlace, RunSpec, resolve_batch


def test_a_worker_knows_which_keys_the_job_gave(tmp_path: Path) -> None:
    job = JobConfig.model_validate(
        {
            "name": "x",
            "model": "a:b",
            "data": "a:b",
            "steps": 1,
            "batch": 2,
            "optim": {"name": "sgd"},
        }
    )
    plan = LaunchPlan(ranks=[RankPlace(rank=0, host="h", local_rank=0, device="cpu")])
    spec = RunSpec(
        job=job, plan=plan, batch=resolve_batch(job, 1), job_dir="/", run_dir="/", run_id="x"
    )
    spec.write(tmp_path / "spec.json")
    again = RunSpec.read(tmp_path / "spec.json")
    assert again == spec
    assert again.job.optim.model_fields_set == {"name"}  # betas were not asked for: sgd has none


def test_a_spec_of_an_earlier_version_knows_its_checkpoint_folder() -> None:
    keys = {"name": "x", "model": "a:b", "data": "a:b", "steps": 1, "batch": 2}
    plan = LaunchPlan(ranks=[RankPlace(rank=0, host="h", local_rank=0, device="cpu")])

    def spec(checkpoint: dict[str, str], **fields: str) -> RunSpec:
        job = JobConfig.model_validate(keys | {"checkpoint": checkpoint})
        batch = resolve_batch(job, 1)
        return RunSpec(
            job=job, plan=plan, batch=batch, job_dir="/", run_dir="/run", run_id="x", **fields
        )

    assert spec({}).checkpoint_folder == Path("/run/checkpoints")
    assert spec({"dir": "/mine"}).checkpoint_folder == Path("/mine")
    assert spec({"dir": "mine"}, checkpoints="/jobs/mine").checkpoint_folder == Path("/jobs/mine")


@given(st.dictionaries(st.text(), st.text()), st.integers(1, 50))
def test_any_environment_arrives_in_pieces_of_any_size(env: dict[str, str], piece: int) -> None:
    start = StartRequest({"run_dir": "/x"}, "host", env, "module")
    data, unpacker, frames = start.pack() + pack({"signal": 15}), Unpacker(), []
    for begin in range(0, len(data), piece):
        frames += unpacker.feed(data[begin : begin + piece])
    assert StartRequest(**frames[0]) == start
    assert frames[1:] == [{"signal": 15}]


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n", b"\0\0\0\2x\x9c", b"\0\0\0\3\x78\x9c!", b"\0\0\0\1" + b"7"]
)
def test_a_stream_of_something_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"not a launcher's stream|Expecting value"):
        Unpacker().feed(data)


def test_lines_that_are_no_frames_are_skipped() -> None:
    lines = FrameReader()
    assert lines.feed(b'{"frame":"done"}\nWelcome to node7!\n[1]\n{"fra') == [{"frame": "done"}]
    assert lines.feed(b'me":"exit"}\n') == [{"frame": "exit"}]


@pytest.mark.parametrize(
    ("told", "is_kept"),
    [
        (b'{"type":"log","message":"a\\nb"}', True),
        (b'{"loss": 1e3}', True),
        (b'{"loss":NaN}', False),
        (b'{"message":"\xc3\xa9"}', False),
        (b'{"a":1},"more":{"b":2}', False),
        (b'{"a":1},"event":{"a":2}', False),
    ],
)
def test_an_event_is_recorded_as_it_came_only_if_it_is_plain(told: bytes, is_kept: bool) -> None:
    (frame,) = FrameReader().feed(EVENT + told + b"}\n")
    assert frame.get("line") == (told if is_kept else None)
    assert isinstance(frame["event"], dict)


def test_a_session_is_told_apart_and_ended() -> None:
    code = (
        "import subprocess, sys; subprocess.Popen(['sleep', '600']); print(flush=True); "
        "sys.stdin.read()"
    )
    leader = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert leader.stdout is not None
    leader.stdout.readline()
    process = Process.find(leader.pid)
    assert process is not None
    both = processes.session_of(process)
    assert len(both) == 2
    assert (
        processes.session_of(Process(process.pid, process.started - 1)) == []
    )  # an earlier process of that number
    processes.send([Process(process.pid, process.started - 1)], signal.SIGKILL)
    assert process.alive()
    leader.kill()
    leader.wait()  # not communicate: the helper holds the pipe open
    left = processes.session_of(process)
    assert left == [each for each in both if each != process]
    processes.send(left, signal.SIGTERM)
    assert processes.wait_gone(left, 5.0) == []


def test_counters_of_the_group_are_numbers_or_none() -> None:
    for value in (cgroup.cpu_quota(), memory_limits.group_limit(), memory_limits.oom_kills()):
        assert value is None or value >= 0


def job(**env: str | None) -> JobConfig:
    return JobConfig.model_validate(
        {"name": "t", "model": "m:f", "data": "m:d", "steps": 1, "batch": 1, "env": env}
    )


def test_the_environment_comes_from_job_and_shell() -> None:
    asked = job(WANDB_API_KEY=None, MODE="fast")
    assert worker_environment(asked, {"WANDB_API_KEY": "s", "OTHER": "x"}) == {
        "WANDB_API_KEY": "s",
        "MODE": "fast",
    }
    with pytest.raises(JobError, match="WANDB_API_KEY: null takes the value from the shell"):
        worker_environment(asked, {})


def test_other_hosts_get_settings_of_libraries_but_no_secrets_and_no_paths() -> None:
    settings = {
        "NCCL_DEBUG": "INFO",
        "OMP_PROC_BIND": "true",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_LAUNCH_BLOCKING": "1",
    }
    others = {
        *(
            "HF_TOKEN",
            "WANDB_API_KEY",
            "MLFLOW_TRACKING_PASSWORD",
            "AWS_SECRET_ACCESS_KEY",
            "SSH_AUTH_SOCK",
        ),
        *("PATH", "HOME", "LD_PRELOAD", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "MY_NCCL_DEBUG"),
    }
    assert forwarded_environment(settings | dict.fromkeys(others, "x")) == settings


def test_secrets_are_not_written() -> None:
    assert without_secrets(job(HF_TOKEN="hf_1", MODE="fast", API_KEY=None)).env == {
        **{"HF_TOKEN": None, "MODE": "fast", "API_KEY": None},
    }


def test_a_run_directory_is_claimed_once(tmp_path: Path) -> None:
    with RunDir.claim("gpt", None, tmp_path) as rundir:
        assert rundir.path.parent == tmp_path / "gpt"
        with pytest.raises(JobError, match=f"in use by the zrun process {os.getpid()}"):
            RunDir.claim("gpt", rundir.path)
    with pytest.raises(JobError, match="holds an earlier run"):
        RunDir.claim("gpt", rundir.path)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    before = tmp_path.stat().st_mode
    with pytest.raises(JobError, match=r"not empty \(it holds thesis.tex\)"):
        RunDir.claim("gpt", tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]
    assert tmp_path.stat().st_mode == before


def test_an_empty_folder_becomes_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with RunDir.claim("gpt", tmp_path):
        assert tmp_path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", [".lock", "events.jsonl"])
def test_no_link_leads_out_of_a_run_directory(tmp_path: Path, name: str) -> None:
    victim, run = tmp_path / "victim.txt", tmp_path / "run"
    victim.write_text("mine\n")
    with RunDir.claim("gpt", run):
        pass
    (run / name).unlink()
    (run / name).symlink_to(victim)
    with pytest.raises(JobError, match=f"run directory {run}: Too many levels of symbolic links"):
        RunDir.claim("gpt", run, earlier=EarlierRun.CONTINUE)
    assert victim.read_text() == "mine\n"


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        ([], {}, "one argument is needed, the spec.json of a run directory; usage: torchrun"),
        (["nothing.json"], {}, "nothing.json cannot be read: No such file or directory"),
        (["empty.json"], {}, "empty.json is not the spec.json of a run directory"),
        (["spec.json"], {}, "RANK and WORLD_SIZE say which rank this is, and are not set"),
        (
            ["spec.json"],
            {"RANK": "2", "WORLD_SIZE": "3"},
            "is for 2 ranks, and this is rank 2 of 3",
        ),
    ],
)
def test_a_worker_that_is_started_by_hand_says_how(
    arguments: list[str],
    environment: dict[str, str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from zrun_core.train import worker

    job = JobConfig.model_validate(
        {"name": "x", "model": "a:b", "data": "a:b", "steps": 1, "batch": 2}
    )
    places = [RankPlace(rank=rank, host="h", local_rank=rank, device="cpu") for rank in range(2)]
    plan, batch = LaunchPlan(ranks=places), resolve_batch(job, 2)
    spec = RunSpec(job=job, plan=plan, batch=batch, job_dir="/", run_dir="/", run_id="x")
    spec.write(tmp_path / "spec.json")
    (tmp_path / "empty.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["zrun_core", *arguments])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        worker.main()
    assert ended.value.code == ExitCode.USAGE
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert says in told
    assert told.count("\n") == 1
