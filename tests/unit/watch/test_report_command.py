"""`zrun report`: a run's page at any time, several runs on one, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from zrun.commands.report import report
from zrun.pages.comparison_page import page
from zrun.runs import listing
from zrun.runs.rundir import RunDir, write_exit
from zrun.watch.compared import read_compared
from zrun_core.errors import ExitCode, JobError

ROOT = Path(__file__).parents[3]
JOB = {"name": "gpt", "steps": 10, "optim": {"name": "adamw", "lr": 0.1}, "log": {"every": 1}}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own, on a machine where nobody else trains."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(listing, "held_here", list)


def make_run(
    name: str,
    steps: int = 10,
    *,
    code: int | None = 0,
    job: dict[str, Any] | None = None,
    **fields: Any,
) -> Path:
    """A run of some steps, each with these fields beside the usual ones."""
    folder = Path("runs", "gpt", name).absolute()
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB | (job or {})))
    events: list[dict[str, Any]] = [{"type": "start", "world_size": 1, "device": "cpu"}]
    for number in range(1, steps + 1):
        known = {"type": "step", "step": number, "loss": 10.0 / number, "grad_norm": 1.0}
        known |= {"step_s": 0.5, "tokens_per_s": 16.0, "total_tokens": 8 * number}
        events.append({key: each for key, each in (known | fields).items() if each is not None})
        events.append({"type": "memory", "step": number, "params": number << 20, "rss_bytes": 9})
    lines = [json.dumps({"time": 100.0, "rank": 0} | each) for each in events]
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    if code is not None:
        write_exit(folder, code)
    return folder


def said(error: pytest.ExceptionInfo[JobError]) -> str:
    assert error.value.exit_code == ExitCode.USAGE == 2
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_page_lies_beside_the_run_or_where_it_is_asked_for(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = make_run("20260101-a")
    report(["gpt"])
    assert capfd.readouterr().out == f"{run / 'report.html'}\n"
    text = (run / "report.html").read_text()
    assert "done</b>exit code 0" in text
    assert (run / "report.html").stat().st_mode & 0o777 == 0o600
    assert not list(run.glob(".report*"))
    report(["20260101"], out="own.html")
    assert capfd.readouterr().out == "own.html\n"
    report([str(run)], out="-")
    parts = [capfd.readouterr().out, Path("own.html").read_text(), text]
    assert len({re.sub(r"written [-\d: ]+", "", each) for each in parts}) == 1


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (5, "failed</b>exit code 5"),
        (75, "stopped</b>exit code 75"),
        (None, "vanished</b>its launcher was killed"),
    ],
)
def test_a_run_that_did_not_reach_its_end(
    code: int | None, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run("a", code=code)
    older = {"message": "no <memory>", "rank": 3, "kind": "user", "traceback": "Traceback: x"}
    if code is not None:
        (run / "failure.json").write_text(json.dumps(older | {"what_to_do": "buy more"}))
    report(["a"], out="-")
    text = capfd.readouterr().out
    assert told in text
    if code is not None:
        assert "<pre>Traceback: x\nrank 3: no &lt;memory&gt;\n  next: buy more</pre>" in text
        (run / "failure.json").write_text('{"message": ')
        report(["a"], out="-")
        assert told in capfd.readouterr().out


def test_a_run_that_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    path = Path("runs", "gpt", "a").absolute()
    lines = (make_run("other") / "events.jsonl").read_bytes().splitlines()
    with RunDir.claim("gpt", path) as rundir:
        rundir.append([*lines, b'{"type":"step","ti'])
        report(["a"])
        assert "running</b>" in (path / "report.html").read_text()
        assert "skipped of it, as no events: 1 line" in (path / "report.html").read_text()
        assert "<th>steps</th><td>10</td>" in (path / "report.html").read_text()


def test_what_there_is_no_page_of_is_one_line() -> None:
    run = make_run("a", code=None)
    (make_run("b") / "events.jsonl").write_text("")
    (make_run("c") / "events.jsonl").write_bytes(b"\xff\n{]\n")
    other = make_run("d")
    Path("folder").mkdir()
    for given, words in (
        ({"runs": ["nosuch"]}, "no run and no job is called 'nosuch'"),
        ({"runs": ["b"]}, "b/events.jsonl has no event: the run has not begun to train"),
        ({"runs": ["c"]}, "c/events.jsonl has no event"),
        ({"runs": ["a"], "compare": ["b"]}, "b/events.jsonl has no event"),
        ({"runs": ["a"], "compare": ["nosuch"]}, "no run and no job is called 'nosuch'"),
        ({"runs": ["a"], "compare": [str(run)]}, "a is named twice: name another run"),
        ({"runs": ["a", "d"], "compare": ["d"]}, "d is named twice"),
        ({"runs": ["a", "d"]}, "name one run; to compare: zrun report a --compare d"),
        ({"runs": ["a"], "out": "no/a.html"}, "-o no/a.html: there is no folder no"),
        ({"runs": ["a"], "out": "folder"}, "-o folder is a folder: name a file in it"),
        ({"runs": ["a"], "out": str(run / "job.yaml" / "x")}, "there is no folder"),
    ):
        with pytest.raises(JobError, match=re.escape(words)) as error:
            report(**given)
        assert said(error)
    assert not list(run.glob("*.html"))
    (run / "report.html").mkdir()
    with pytest.raises(JobError, match="Is a directory: name another file with -o") as error:
        report(["a"])
    assert said(error)
    assert not list(run.glob(".report*"))
    assert not list(other.glob("*.html"))


def test_too_many_runs_for_one_chart() -> None:
    names = [make_run(f"r{number}").name for number in range(10)]
    with pytest.raises(JobError, match="a chart tells 9 runs apart, not 10") as error:
        report(names[:1], compare=names[1:])
    assert said(error)
    report(names[:1], compare=names[1:9])
    assert Path("runs/gpt/r0/comparison.html").exists()
    assert not Path("runs/gpt/r0/report.html").exists()


def charts(text: str) -> dict[str, ElementTree.Element]:
    found = map(ElementTree.fromstring, re.findall(r"<svg.*?</svg>", text))
    return {each.attrib["aria-label"]: each for each in found}


def test_runs_are_in_one_chart_each_and_what_differs_is_on_top() -> None:
    make_run("a")
    make_run("b", 4, job={"optim": {"name": "adamw", "lr": 0.2, "api_key": "hidden"}})
    make_run("c", loss=None, tokens_per_s=0.0, samples_per_s=3.0)
    paths = [Path("runs", "gpt", name).absolute() for name in "abc"]
    text = page(read_compared(paths))
    keys = text[text.index("Keys that differ") : text.index("Curves</h2>")]
    assert "<td>optim.lr</td><td>0.1</td><td>0.2</td><td>0.1</td>" in keys
    assert "<td>optim.api_key</td><td>-</td><td>***</td><td>-</td>" in keys
    assert "hidden" not in text
    drawn = charts(text)
    lines = {title: len(each.findall("polyline")) for title, each in drawn.items()}
    assert lines["Loss"] == 2
    assert lines["Gradient norm"] == 3
    assert lines["Buffers of rank 0 on its device"] == 3
    assert {"Tokens per second", "Samples per second", "Whole process of rank 0"} <= lines.keys()
    one, other = (
        [float(point.split(",")[1]) for point in each.attrib["points"].split()]
        for each in drawn["Loss"].findall("polyline")
    )
    assert one[:4] == other, "they tell the same, to one scale"
    widths = [
        float(each.attrib["stroke-width"]) for each in drawn["Gradient norm"].iter("polyline")
    ]
    assert widths == sorted(set(widths), reverse=True), "none is hidden by one that tells the same"
    assert "The curves end where the runs do: a at step 10, b at step 4, c at step 10." in text
    assert "Without a loss: c." in text
    assert "<td>steps</td><td>10</td><td>4</td><td>10</td>" in text
    assert "<td>loss</td><td>1</td><td>2.5 (2.5x)</td><td>-</td>" in text


def test_runs_with_the_same_job_and_without_one() -> None:
    paths = [make_run("a"), make_run("b")]
    assert "None: but for names and logs, the jobs are the same." in page(read_compared(paths))
    for path in paths:
        (path / "job.yaml").write_bytes(b"\xff[[")
    assert "No job.yaml of them can be read." in page(read_compared(paths))


def test_text_of_others_stays_text(capfd: pytest.CaptureFixture[str]) -> None:
    bad = "<script>alert('1')</script>\"&"
    job = {"model": {"call": bad, "args": {bad: bad}}}
    values = {"metrics": {bad: 1.0}}
    runs = [make_run("a", job=job, **values), make_run("b")]
    told = {"type": "metrics", "time": 1.0, "rank": 0, "step": 10, "values": {bad: 1.0}}
    more = [told, {"type": "warning", "time": 1.0, "rank": 0, "message": bad}]
    with (runs[0] / "events.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(each)}\n" for each in more)
    (runs[0] / "launch.json").write_text(json.dumps({"command": bad, "time": bad}))
    report(["a"], out="-")
    alone = capfd.readouterr().out
    report(["a"], compare=["b"], out="-")
    both = capfd.readouterr().out
    for text in (alone, both):
        assert "<script" not in text
        assert "&lt;script&gt;alert(&#x27;1&#x27;)&lt;/script&gt;&quot;&amp;" in text
        charts(text)
    assert "cannot be drawn" not in alone


def test_the_command_line(tmp_path: Path) -> None:
    def called(*arguments: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "zrun", "report", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        return done.returncode, done.stdout, done.stderr

    runs = [make_run(name) for name in "abc"]
    assert called("a", "-o", "x.html") == (0, "x.html\n", "")
    assert called("a", "--compare", "b", "c") == (0, f"{runs[0] / 'comparison.html'}\n", "")
    assert "3 runs side by side" in (runs[0] / "comparison.html").read_text()
    code, out, error = called("a", "--compare", "a")
    assert (code, out) == (2, "")
    assert error == f"error: --compare: {runs[0]} is named twice: name another run\n"
