"""`job.yaml` of a run, read again: each key, its value, where it came from."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrun.job.load import LoadedJob, load_job
from zrun.job.problems import ValueOrigin
from zrun.job.recorded import recorded_keys
from zrun.job.render import with_origins
from zrun.job.scalars import write
from zrun.pages.run_job import job_keys
from zrun_core.errors import JobError

JOB = """name: gpt
model: {call: m.py:build, args: {width: 4, text: "a # b", api_key: hidden}}
data: d.py:data
steps: 5
batch: 4
optim: {name: adamw, lr: 0.1, betas: [0.9, 0.95]}
hosts: [n1, n2]
env: {HOME: hidden, NAME: hidden}
"""


def load(folder: Path, *overrides: str) -> LoadedJob:
    (folder / "own.yaml").write_text(JOB)
    loaded = load_job(folder / "own.yaml", list(overrides), environ={})
    autos = {"threads": ValueOrigin("auto", "2 cores # of 4")}
    return LoadedJob(loaded.config, loaded.path, loaded.origins | autos)


def test_each_key_comes_back_with_its_origin(tmp_path: Path) -> None:
    keys = {key.name: key for key in recorded_keys(with_origins(load(tmp_path, "optim.lr=0.5")))}
    assert keys["name"][1:] == ("gpt", "file", f"{tmp_path / 'own.yaml'}:1:7")
    assert keys["optim.lr"][1:] == (0.5, "override", "override")
    assert keys["optim.betas"].value == [0.9, 0.95]
    assert keys["optim.betas"].kind == "file"
    assert keys["model.args"].value == {"width": 4, "text": "a # b", "api_key": "hidden"}
    assert keys["model.args"].kind == "file"
    assert keys["seed"][1:] == (0, "default", "default")
    assert keys["threads"].origin == "auto: 2 cores # of 4"
    assert keys["threads"].kind == "auto"
    assert "optim" not in keys, "a section has no value of its own"


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"])))
def test_any_text_comes_back(text: str) -> None:
    (key,) = recorded_keys(f"a: {write(text)} # auto: x # y\n")
    assert (key.value, key.origin) == (text, "auto: x # y")


def test_a_page_shows_who_chose_what_and_no_secret(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(with_origins(load(tmp_path, "optim.lr=0.5")))
    text = job_keys(tmp_path)
    chosen, _, rest = text.partition("From the command line")
    given, _, rest = rest.partition("Chosen by zrun")
    auto, _, defaults = rest.partition("<details>")
    assert "<td>name</td><td>gpt</td>" in chosen
    assert "<td>optim.lr</td><td>0.5</td><td>override</td>" in given
    assert "<td>threads</td><td>auto</td><td>auto: 2 cores # of 4</td>" in auto
    assert "<td>seed</td><td>0</td><td>default</td>" in defaults
    assert "hidden" not in text
    assert "api_key: &quot;***&quot;" in text or "api_key: ***" in text


@pytest.mark.parametrize("text", ["a: [", "\tx: 1", "", "- 1\n- 2", "a", "{a: 1}", "a: {b: *c}"])
def test_a_job_that_is_damaged_or_of_another_version_is_no_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    assert isinstance(job_keys(tmp_path), str)
    if text == "a: [":
        with pytest.raises(JobError):
            recorded_keys(text)
        assert "job.yaml cannot be read" in job_keys(tmp_path)


def test_a_run_without_a_job_says_so(tmp_path: Path) -> None:
    assert "job.yaml cannot be read: No such file or directory." in job_keys(tmp_path)
