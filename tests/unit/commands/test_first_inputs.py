"""What people type first who know another tool: taken where it is plain, else answered."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from first_inputs import ANSWERED, PRINTED, TAKEN, counts

from zrun.cli import main
from zrun.job.load import job_values, load_job
from zrun.launch import session
from zrun.launch.launch_request import LaunchRequest
from zrun.transport import agent_process

LENGTH = "steps: 10\n"
JOB = {
    "name": "toy",
    "model": "train.py:build_model",
    "data": "train.py:build_data",
    "batch": "{global: 8, micro: 4}",
}
FILES = {
    "hosts": "localhost slots=2\n",
    "train.py": """\
import torch


def build_model():
    model = torch.nn.Linear(8, 8)
    return torch.nn.Sequential(model, torch.nn.Flatten(0))


def build_data():
    return torch.utils.data.TensorDataset(torch.zeros(64, 8))


def loss_fn(model, batch):
    return model(batch[0]).sum()
""",
    "pkg/train.py": "",
    "default_config.yaml": "compute_environment: LOCAL_MACHINE\nnum_processes: 8\n",
    "axolotl.yml": "base_model: x/y\nsequence_len: 2048\n",
    "ds_config.json": '{"train_batch_size": 8, "zero_optimization": {"stage": 2}}',
    "llama3_8b.toml": "[training]\nsteps = 10\n",
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[LaunchRequest]:
    """Stand in a folder with files of all tools, where launches are recorded in place of made."""
    found: list[LaunchRequest] = []

    def launch(request: LaunchRequest, _early: Any) -> int:
        found.append(request)
        return 0

    monkeypatch.setattr(session, "launch", launch)
    monkeypatch.setattr(agent_process, "LocalAgent", nullcontext)
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    Path("job.yaml").write_text(job_text("loss: train.py:loss_fn\noptim: lion"))
    return found


def job_text(line: str, length: str = LENGTH) -> str:
    key = line.partition(":")[0]
    lines = [f"{name}: {value}\n" for name, value in JOB.items() if name != key]
    return "".join([*lines, length, line, "\n"])


def run(monkeypatch: pytest.MonkeyPatch, typed: str) -> int:
    """Call zrun with what was typed, and return its exit code."""
    if ": " in typed:
        # A length of others stands in the place of ours.
        is_length = any(word in typed for word in ("epochs", "max_steps"))
        Path("own.yaml").write_text(job_text(typed, "" if is_length else LENGTH))
        typed = "train own.yaml"
    monkeypatch.setattr(sys, "argv", ["zrun", *shlex.split(typed)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(("typed", "keys"), [row[1:] for row in TAKEN])
def test_what_is_plain_starts(
    launched: list[LaunchRequest],
    monkeypatch: pytest.MonkeyPatch,
    typed: str,
    keys: Mapping[str, Any],
) -> None:
    plain = {str(each): each.value for each in job_values(load_job(Path("job.yaml")).config)}
    assert run(monkeypatch, typed) == 0
    (request,) = launched
    found = {str(each): each.value for each in job_values(request.loaded.config)}
    found["options"] = " ".join(request.resume_command.split()[3:-2])
    found["script"] = None if request.script is None else request.script.args
    assert {key: found[key] for key in keys} == keys
    assert any(plain.get(key) != value for key, value in keys.items())


@pytest.mark.parametrize(("typed", "part"), [row[1:] for row in PRINTED])
def test_what_is_plain_is_printed(
    launched: list[LaunchRequest],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    typed: str,
    part: str,
) -> None:
    assert run(monkeypatch, typed) == 0
    assert part in capsys.readouterr().out


@pytest.mark.parametrize(("typed", "told"), [row[1:] for row in ANSWERED])
def test_what_is_not_is_answered_in_a_line(
    launched: list[LaunchRequest],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    typed: str,
    told: str,
) -> None:
    assert run(monkeypatch, typed) == 2
    assert not launched
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert told in printed.err
    assert printed.err.count("\n") <= 2, printed.err


def test_there_are_ninety() -> None:
    assert sum(map(sum, counts().values())) == 90
    typed = [row[1] for row in [*TAKEN, *PRINTED, *ANSWERED]]
    assert len(set(typed)) == len(typed)
