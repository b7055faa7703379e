"""Mistakes on the command line and in the job file: a line that says what to do, and the right exit
code.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from zrun import cli

JOB = """\
name: first
model: train.py:build_model
data: train.py:build_data
loss: train.py:loss_fn
steps: 3
batch: {global: 8, micro: 2}
slots: 2
device: cpu
"""

# name: what is appended to the job; the command; exit code; what the message says
MISTAKES: dict[str, tuple[str, list[str], int, list[str]]] = {
    # The job file
    "an unknown key": ("stepz: 3\n", [], 2, ["job.yaml:9:1: stepz: unknown key", "steps"]),
    "a tab": ("optim:\n\tlr: 1\n", [], 2, ["job.yaml:10:1: ", "indent with spaces, not with tabs"]),
    "a line too far in": (" optim: {lr: 1}\n", [], 2, ["job.yaml:9:7: ", "check the indentation"]),
    "a key twice": ("steps: 4\n", [], 2, ["steps: duplicate key, first on line 5; keep one"]),
    "a word for a number": (
        "threads: many\n",
        [],
        2,
        ["job.yaml:9:10: threads: expected whole number", "write"],
    ),
    "a reference without a colon": (
        "hooks: {on_step: train.hook}\n",
        [],
        2,
        ["is not a reference", "file.py:attr"],
    ),
    "a notebook": ("hooks: {on_step: train.ipynb:hook}\n", [], 2, ["is in a notebook", "train.py"]),
    "two ends": ("epochs: 2\n", [], 2, ["exactly one of steps, tokens, epochs"]),
    "a batch that does not divide": ("threads: 1\n", ["batch.global=9"], 2, ["batch", "write"]),
    # The command line
    "no such job": ("", ["train", "jobb.yaml"], 2, ["jobb.yaml: no such file", "zrun init"]),
    "a folder for a job": ("", ["train", "."], 2, [". is a directory", "name the job file in it"]),
    "an override without a value": ("", ["optim.lr"], 2, ["override optim.lr: expected key=value"]),
    "an override with a typo": ("", ["optim.lrr=1"], 2, ["optim.lrr", "lr"]),
    "an option with a typo": ("", ["--slotz", "3"], 2, ["--slotz", "--slots"]),
    "too many slots": ("", ["slots=5000"], 2, ["slots: expected whole number", "1024"]),
    "a GPU that is not there": (
        "",
        ["device=cuda"],
        3,
        ["no usable GPU: write device: cpu or auto"],
    ),
    "a host file that is not there": (
        "",
        ["--hosts", "rack.hosts"],
        2,
        ["rack.hosts: there is no such host file"],
    ),
    # Resume and checkpoints
    "a resume with a typo": (
        "",
        ["--resume", "autoo"],
        9,
        ["is no checkpoint", "did you mean auto?"],
    ),
    "a resume of a file": (
        "",
        ["--resume", "train.py"],
        9,
        ["train.py is no checkpoint: name a step-... folder"],
    ),
    "a resume of a step": (
        "",
        ["--resume", "77"],
        9,
        ["no run in runs/first has a step 77: see zrun ckpt ls"],
    ),
    "a run of nobody": (
        "",
        ["logs", "nothing"],
        2,
        ["no run and no job is called 'nothing'; zrun ps --all"],
    ),
    "checkpoints of nobody": ("", ["ckpt", "ls", "nothing"], 2, ["'nothing'"]),
    # The environment
    "a run below a file": (
        "",
        ["--run-dir", "train.py/run"],
        2,
        ["run directory", "choose another with --run-dir"],
    ),
    "a variable that is not set": ("env: {TOKEN: null}\n", [], 2, ["env.TOKEN", "export it first"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    appended, arguments, code, says = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB + appended)
    Path("train.py").write_text("")
    is_command = bool(arguments) and arguments[0] in cli.COMMANDS
    command = arguments if is_command else ["train", "job.yaml", *arguments]
    monkeypatch.setattr(sys, "argv", ["zrun", *command])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr().err
    assert ended.value.code == code, told
    for part in says:
        assert part in told
    assert "Traceback" not in told
    assert told.count("error: ") <= 1
