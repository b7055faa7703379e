"""`key=value` on the command line: short forms, precedence, and messages that quote it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zrun.job.hidden import without_secret_values
from zrun.job.load import load_job
from zrun_core.errors import JobError
from zrun_core.spine.config import JobConfig

JOB = """\
name: tiny
model: a.py:f
data: a.py:g
steps: 10
batch: 4
precision: bf16
zero: 2
lr: cosine
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)
    return Path("job.yaml")


def _load(path: Path, *overrides: str) -> JobConfig:
    return load_job(path, overrides, {}).config


def _problem(path: Path, *overrides: str) -> str:
    with pytest.raises(JobError) as caught:
        load_job(path, overrides, {})
    return str(caught.value)


def test_values_are_yaml(path: Path) -> None:
    job = _load(
        path, "optim.lr=3e-4", "optim.betas=[0.9, 0.95]", "env={A: 'on'}", "compile=true", "name=on"
    )
    assert job.optim.lr == 3e-4
    assert job.optim.betas == (0.9, 0.95)
    assert job.env == {"A": "on"}
    assert job.compile is True
    assert job.name == "on"


def test_short_forms_are_expanded_on_the_way(path: Path) -> None:
    job = _load(
        path,
        "zero.bucket=32MiB",
        "model.args.dim=64",
        "precision.reduce=compute",
        "batch.micro=2",
        "lr.warmup=5",
    )
    assert (job.zero.stage, job.zero.bucket) == (2, 32 * 2**20)
    assert (job.model.call, job.model.args) == ("a.py:f", {"dim": 64})
    assert (job.precision.compute, job.precision.reduce) == ("bf16", "compute")
    assert (job.batch.global_, job.batch.micro) == (4, 2)
    assert (job.lr.schedule, job.lr.warmup) == ("cosine", 5)


def test_a_section_that_the_file_leaves_empty_or_out_can_be_filled(path: Path) -> None:
    path.write_text(f"{JOB}optim:\n")
    job = _load(path, "optim.clip=1", "log.every=1", "model.args.deep.er=[1]")
    assert job.optim.clip == 1.0
    assert job.log.every == 1
    assert job.model.args == {"deep": {"er": [1]}}


def test_the_last_one_wins_and_a_whole_section_replaces_its_parts(path: Path) -> None:
    assert _load(path, "zero.stage=1", "zero.stage=3").zero.stage == 3
    assert _load(path, "zero.prefetch=4", "zero=1").zero.prefetch == 1


def test_length_can_be_changed(path: Path) -> None:
    for overrides in (["steps=null", "epochs=2"], ["epochs=2"]):
        job = _load(path, *overrides)
        assert (job.steps, job.epochs) == (None, 2)


def test_arguments_of_the_users_own_leave_the_length_alone(path: Path) -> None:
    path.write_text(JOB.replace("data: a.py:g", "data: {call: a.py:g}"))
    for override in (
        "model.args.num_steps=50",
        "data.args.max_steps=50",
        "data.args.max_epochs=50",
        "env.train_steps='50'",
        "model.args.training.steps=50",
    ):
        assert _load(path, override).steps == 10, override
    assert _load(path, "model.args.num_steps=50").model.args == {"num_steps": 50}


@pytest.mark.parametrize("name", ["max_steps", "trainer.max_steps", "training.steps"])
def test_a_length_of_others_is_answered_alone(path: Path, name: str) -> None:
    """The file's own is not told beside it."""
    path.write_text(JOB.replace("steps: 10", "epochs: 1"))
    assert _problem(path, f"{name}=5") == (
        f'override {name}=5: {name}: unknown key; did you mean "steps"? write steps=5'
    )


def test_value_may_hold_equals_signs_and_colons(path: Path) -> None:
    assert _load(path, "env.X=a=b:c").env == {"X": "a=b:c"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "zero.stag=3",
            'override zero.stag=3: zero.stag: unknown key; did you mean "stage"? '
            "write zero.stage=3",
        ),
        (
            "optim.lr=fast",
            'override optim.lr=fast: optim.lr: expected number > 0, found "fast"; '
            "write for example optim.lr=0.001",
        ),
        ("zero.stage", "override zero.stage: expected key=value, such as zero.stage=3"),
        ("=3", "override =3: expected key=value, such as zero.stage=3"),
        ("zero..stage=3", "override zero..stage=3: expected key=value, such as zero.stage=3"),
        (
            "steps.x=3",
            "override steps.x=3: steps.x: steps is 10, which has no keys; write steps=value",
        ),
        (
            "name.x.y=3",
            'override name.x.y=3: name.x.y: name is "tiny", which has no keys; write name=value',
        ),
        (
            "optim.betas=[0.9",
            "override optim.betas=[0.9: optim.betas: value:1:5: not valid YAML: expected ',' or "
            "']', "
            "but got '<stream end>'; close the bracket, or put a comma between the items",
        ),
        (
            "env.A=*x",
            "override env.A=*x: env.A: aliases (*name) are not supported; write the value again",
        ),
        (
            "batch=",
            "override batch=: batch: expected whole number > 0 | {global, micro}, found nothing; "
            "write for example 'batch={global: 512, micro: 4}'",
        ),
    ],
)
def test_problem_names_the_override(path: Path, override: str, message: str) -> None:
    assert _problem(path, override) == message


def test_problems_of_file_and_overrides_are_told_together(path: Path) -> None:
    path.write_text(JOB + "sead: 1\n")
    assert _problem(path, "zero.stag=3").splitlines() == [
        "2 problems in job.yaml",
        'job.yaml:9:1: sead: unknown key; did you mean "seed"? write seed: 1',
        'override zero.stag=3: zero.stag: unknown key; did you mean "stage"? write zero.stage=3',
    ]


def test_control_characters_of_an_override_are_escaped(path: Path) -> None:
    assert "\x1b" not in _problem(path, "\x1b[31m=1")


SECRETS = {
    "env.API_TOKEN=[hunter2]": "env.API_TOKEN: expected text | null, found a list",
    "env.API_TOKEN=42424242": "found a number; put it in quotes",
    'env.API_TOKEN="hunter2': "not valid YAML: put the value in quotes",
    "env={API_TOKEN: 42424242}": "found a number",
    "env=hunter2": "expected mapping of names to text | null, found text",
    "envs=hunter2": 'did you mean "env"',
    "API_TOKEN=hunter2": "unknown key",
    "token=42424242": 'did you mean "tokens"',
    "env.API_TOKEN hunter2": "expected key=value",
    'env.API_TOKEN="hunter2\\0"': "the value of 'API_TOKEN' holds a NUL",
}


@pytest.mark.parametrize("override", SECRETS)
def test_a_mistake_is_told_without_the_secret(path: Path, override: str) -> None:
    problem = _problem(path, override)
    assert SECRETS[override] in problem
    assert "hunter2" not in problem
    assert "42424242" not in problem


def test_a_command_is_repeated_without_its_secrets() -> None:
    given = ["steps=5", "env.MODE=fast", "env.API_TOKEN=hunter2", "env={KEY: hunter2, MODE: fast}"]
    from_shell = ["env.API_TOKEN=null", "env.API_TOKEN=${env:OTHER}"]
    assert without_secret_values([*given, *from_shell], {"OTHER": "hunter2"}) == (
        [*given[:2], "env.API_TOKEN=null", "env={KEY: null, MODE: fast}", *from_shell],
        ["API_TOKEN", "KEY"],
    )


@pytest.mark.parametrize("env", ['{"A=B": x}', '{"": x}', '{"A\\0": x}', '{A: "x\\0"}'])
def test_env_has_what_an_environment_can_hold(path: Path, env: str) -> None:
    assert re.search(r"no name of a variable|holds a NUL", _problem(path, f"env={env}"))
    assert "Linux takes at most" in _problem(path, f"env.A={'x' * 131072}")
    assert _load(path, f"env={{A: '{'x' * 131069}'}}").env["A"] is not None
