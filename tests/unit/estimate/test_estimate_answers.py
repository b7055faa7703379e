"""Estimates as a person reads them: tables, bars, the sentence, the picture; and the command that
prints them.
"""

from __future__ import annotations

import io
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import plan_models
import pytest
from rich.console import Console
from rich.table import Table
from warm import WarmPopen

from zrun import cli
from zrun.estimate import answer_cache, plan_tables, question
from zrun.estimate.answer import Answer, answer, as_data, forecast_of
from zrun.estimate.bars import bars, parts_of
from zrun.estimate.html import page
from zrun.estimate.on_simulated import memory_view
from zrun.estimate.progress import Progress
from zrun.estimate.question import Question, of_model
from zrun_core.hardware.simulated import parse_simulate
from zrun_core.plan.answer.planner import Planner
from zrun_core.plan.answer.search import SearchGoal, SearchState
from zrun_core.sizes import format_size
from zrun_core.spine.cache import cache_folder, digest_of_file
from zrun_core.spine.config import JobConfig
from zrun_core.spine.spec import BatchPlan

GIB = 1 << 30
FULL = "activations.checkpoint=full"


def asked(size: str, hardware: str, *overrides: str, goal: SearchGoal | None = None) -> Answer:
    return answer(of_model(size, parse_simulate(hardware), overrides), goal)


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Answers and traces are kept, and not in the home of who runs this; traces begin at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(subprocess, "Popen", WarmPopen)
        patch.setattr(question, "_MOST_TRACES", 1)  # no thread forks while another one holds a lock
        yield


@pytest.fixture(scope="module")
def small() -> Answer:
    """7.5 billion parameters on 64 GPUs, the example of the ZeRO paper's figure 1."""
    return asked("7.5B", "8x8xA100-80G", "zero=2", FULL)


@pytest.fixture(scope="module")
def too_big() -> Answer:
    return asked("7.5B", "4xA100-40G", "zero=0")


@pytest.fixture(scope="module")
def searched() -> Answer:
    return asked("3.5B", "2xA100-40G", "zero=1", goal="best")


def rendered(table: Table, width: int) -> list[str]:
    console = Console(width=width, highlight=False, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines()


def test_a_check_says_what_the_fullest_rank_takes(small: Answer, too_big: Answer) -> None:
    (line,) = memory_view(small, 100)
    taken = "each rank takes 21.2 GiB of the 79.2 GiB of A100-80G, 73% free"
    assert line == f"memory: {taken}; activations: traced"
    over, verdict = memory_view(too_big, 100)
    assert "free" not in over
    assert verdict.startswith("does not fit: ")


def test_states_are_counted_in_both_ways(small: Answer) -> None:
    paper = [plan_tables.paper_bytes(each) / 1e9 for each in small.stages]
    assert paper == pytest.approx(
        [120, 31.4, 16.6, 1.9], abs=0.05
    )  # Rajbhandari et al. 2020, figure 1
    ours = [plan_tables.state_bytes(plan_tables.fullest(each)) for each in small.stages]
    assert ours == sorted(ours, reverse=True)
    assert ours[0] > 18 * 7.5e9  # gradients are summed in fp32, and updated from scratch


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
@pytest.mark.at_most(1)
def test_no_line_is_wider_than_the_screen(small: Answer, searched: Answer, width: int) -> None:
    found = searched
    assert found.found is not None
    lines = rendered(plan_tables.stage_table(small.stages, small.chosen.candidate, width), width)
    assert any(line.startswith(">") for line in lines)
    lines += rendered(plan_tables.choice_table(found.found.best, width), width)
    assert not any("…" in line for line in lines), "columns go, values are not cut"
    assert {"states", "fits", "offloaded", "free"} <= {
        word for line in lines for word in line.split()
    }
    lines += [bar.plain for bar in bars(small.chosen, width)]
    assert max(map(len, lines)) <= width


def test_stage_table_marks_the_job_and_says_what_is_free(small: Answer) -> None:
    head, units, *rows = rendered(
        plan_tables.stage_table(small.stages, small.chosen.candidate, 120), 120
    )
    assert head.split() == [
        "stage",
        "paper",
        "K=12",
        "states",
        "activations",
        "peak",
        "reserved",
        "device",
        "fits",
        "step",
        "tok/s",
        "MFU",
    ]
    assert units.split() == ["GiB"] * 6
    assert [row[0] for row in rows] == [" ", " ", ">", " "]
    assert "no, +" in rows[0]
    assert re.search(r"yes, \d+% free", rows[2])


def test_a_bar_is_the_memory_to_scale(small: Answer, too_big: Answer) -> None:
    for found in (small, too_big):
        rank = plan_tables.fullest(found.chosen)
        assert sum(parts_of(rank).values()) == rank.device_used
        line = bars(found.chosen, 100, ascii_only=True)[0].plain
        bar, _, rest = line.rpartition("| ") if found is small else (line, "", line)
        assert bar.count("|") == (0 if found is small else 1)
        assert rest.endswith(f" of {found.chosen.capacity / GIB:.1f} GiB")
        letters = re.sub(r"[^PGORBAsc]", "", line.partition("  ")[0])
        share = min(1.0, rank.device_used / max(rank.device_used, found.chosen.capacity))
        assert len(letters) >= 0.9 * share * (100 - 24)


def test_why_it_does_not_fit_is_one_sentence_with_a_way_out(too_big: Answer) -> None:
    rank = plan_tables.fullest(too_big.chosen)
    over = rank.device_used - too_big.chosen.capacity
    assert re.fullmatch(
        rf"each A100-40G would hold {rank.device_used / GIB:.1f} GiB in \w+( of \S+)?, "
        rf"{over / GIB:.1f} GiB more than "
        r"its 39\.4 GiB: (\d+\.\d GiB [a-z0-9 .*,]+?, ){2}\d+\.\d GiB [a-z ]+; the cheapest change "
        r"that fits: [^;]+\)",
        too_big.sentence,
    )
    assert too_big.fix is not None
    assert too_big.fix.fits


@pytest.mark.thorough
def test_states_elsewhere_are_told_by_tier() -> None:
    found = asked("13B", "1xH200", "zero=3", FULL, "offload=disk", "batch.micro=8")
    rank = plan_tables.fullest(found.chosen)
    hardware = found.question.hardware
    host, disk, update = plan_tables.tier_lines(found.chosen, hardware, 1024)
    assert re.fullmatch(
        r"host: \d+\.\d GiB in the memory of each host, of 2\.0 TiB; a step of a rank reads "
        r"\d+\.\d GiB \(params\) and writes \d+\.\d GiB \(grads\)",
        host,
    )
    assert disk.startswith(f"disk: {rank.disk / GIB:.1f} GiB on the disk of each host, of 27.9 TiB")
    moved = sum(found.chosen.moved["disk"]["read"].values())
    assert f"reads {moved / GIB:.1f} GiB (grads, optim)" in disk
    time = found.chosen.time
    assert time.update_behind > time.first_forward
    enough = 1.024 * 8 * time.update_behind / time.first_forward
    assert float(re.search(r"micro-batch of (\S+)k tokens hides it", update)[1]) == pytest.approx(  # type: ignore[index]
        enough, rel=0.1
    )
    here = asked("13B", "8xH200", "zero=3", FULL)
    assert plan_tables.tier_lines(here.chosen, here.question.hardware, 1024) == []
    many = asked("13B", "8xH200", "zero=3", FULL, "offload=host", "batch.micro=32")
    host, update = plan_tables.tier_lines(many.chosen, many.question.hardware, 1024)
    assert " of 8 ranks in the memory of each host" in host
    assert update.endswith("which hides it")


@pytest.mark.thorough
def test_nothing_that_fits_is_said_too() -> None:
    found = asked("1T", "1x4090")
    assert found.fix is None
    assert found.sentence.endswith("no change of the job makes it fit here")


def test_the_best_is_told_with_its_axes(searched: Answer) -> None:
    found = searched.found
    assert found is not None
    assert found.best[0].time.seconds <= 1.04 * min(each.time.seconds for each in found.best)
    assert all(each.headroom > 0.07 * each.capacity for each in found.best)
    text = "\n".join(rendered(plan_tables.choice_table(found.best, 120), 120))
    assert " (sequence)" in text
    headroom = [each.headroom for each in found.pareto]
    assert headroom == sorted(headroom)


def test_every_stage_of_a_pipeline_has_a_row() -> None:
    answered = asked("1.3B", "4xA100-80G", "zero=1", "parallel={pp: 4}", "batch.global=32")
    found = answered.chosen
    forecast = forecast_of(answered)
    assert forecast.sent == {"pipe": {"activations": 32 * forecast.stages_sent[0]["activations"]}}
    assert [bool(stage["activations"]) for stage in forecast.stages_sent] == [True] * 3 + [False]
    assert [bool(stage["gradients"]) for stage in forecast.stages_sent] == [False] + [True] * 3
    assert type(forecast).from_json(json.dumps(forecast.to_json())) == forecast
    lines = rendered(plan_tables.pipeline_table(found, 100), 100)
    rows = [line.split() for line in lines[2:]]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    lengths = [stop - first for ((first, stop),) in (stage.blocks for stage in found.stages)]
    assert rows[0][1] == f"0-{lengths[0] - 1}"
    assert lengths[-1] == min(lengths), "the head is beside its blocks"
    assert [stage.in_flight for stage in found.stages] == [4, 3, 2, 1]
    told = plan_tables.pipeline_line(found)
    assert "1f1b of 32 micro-batches on 4 stages, bubble" in told
    assert "the layers after the last block cost as much as 1" in told, "a vocabulary of 50k"
    assert not asked("1.3B", "4xA100-80G", "zero=1").chosen.stages
    picture = page("t", [], [found], found, "fits")
    row = "<td>stage 0</td><td>stage 1</td><td>activations</td>"
    num_bytes = found.stages[0].sent["activations"]
    assert f"{row}<td>{format_size(num_bytes)}</td>" in picture
    assert "<td>stage 0</td><td>stage 3</td>" not in picture, "nothing goes around"
    whole = format_size(32 * num_bytes)
    assert f"<td>pipe</td><td>activations</td><td>{whole}</td>" in picture
    many = replace(found, stages=(*found.stages[:1] * 20, *found.stages[-1:] * 20))
    rows = [line.split() for line in rendered(plan_tables.pipeline_table(many, 100), 100)[2:]]
    assert [row[0] for row in rows] == ["0", "...", "19", "20", "...", "39"]


def test_a_budget_in_days_and_money(small: Answer) -> None:
    time = small.chosen.time
    assert time.tokens_per_s is not None
    days = 300e9 / time.tokens_per_s / 86400
    line = plan_tables.cost_of_tokens(time, 300_000_000_000, 64, 2.0)
    assert line.startswith(f"300.0B tokens: {days:.1f} days (")
    assert f"; {64 * 24 * 2.0 * days:,.0f} (" in line


def test_a_forecast_is_the_answer_in_plain_numbers(too_big: Answer) -> None:
    forecast = forecast_of(too_big)
    assert not forecast.fits
    assert forecast.device_bytes == plan_tables.fullest(too_big.chosen).device_used
    assert type(forecast).from_json(json.dumps(forecast.to_json())) == forecast
    assert type(forecast).from_json("{}") is None


def test_the_picture_needs_nothing_and_believes_nothing(small: Answer) -> None:
    text = page("<script>alert(1)</script>", ["a & b"], small.stages, small.chosen, "fits")
    assert "<script" not in text
    assert "a &amp; b" in text
    assert not re.search(r"(src|href|url\()\s*=?", text)
    assert text.count("<rect") >= 4 * 4


def test_json_takes_all_of_it(small: Answer) -> None:
    data = json.loads(json.dumps(as_data(small.chosen)))
    assert data["candidate"]["stage"] == 2
    assert {buffer["kind"] for buffer in data["ranks"][0]["buffers"]} >= {
        "params",
        "grads",
        "optim",
        "rings",
    }


class Zrun:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["zrun", "estimate", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        streams = self._capsys.readouterr()
        return int(ended.value.code or 0), streams.out, streams.err


@pytest.fixture
def zrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Zrun:
    monkeypatch.chdir(tmp_path)
    return Zrun(monkeypatch, capsys)


def test_a_size_alone(zrun: Zrun) -> None:
    code, out, _ = zrun("7.5B", "--world", "64", "--tokens", "300B", "--price", "2")
    assert code == 0
    assert out.startswith(
        "GPT of 7.5B: 7.5B parameters, 64 ranks on 64xA100-80G (A100-80G: 79.2 GiB)\n"
    )
    assert "300.0B tokens: " in out
    code, out, _ = zrun("7.5B", "--gpu", "H100", "--json")
    assert code == 3
    assert json.loads(out)["sentence"].startswith("the H100-80G would hold ")


@pytest.mark.thorough
def test_nothing_is_promised_on_a_bound(
    zrun: Zrun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its blocks cannot be recomputed, which is what the job asks for."""
    code = Path(plan_models.__file__)
    (tmp_path / "job.yaml").write_text(
        f"name: once\nmodel: {{call: '{code}:Deep', args: {{style: once}}}}\n"
        f"data: {code}:Vectors\nsteps: 1\nbatch: {{micro: 4}}\nactivations: {{checkpoint: full}}\n"
    )
    status, out, _ = zrun("job.yaml", "--gpu", "A100-40G")
    assert status == 3
    assert "cannot say whether it fits: the A100-40G of 39.4 GiB would hold" in out
    assert re.search(r"^> .* >\S+ +cannot say +>\S+", out, re.MULTILINE)
    assert "what is known to fit: activations.checkpoint=none" in out
    assert "checkpoint full are not known: the model does not run: RuntimeError: this layer" in out
    status, out, _ = zrun("job.yaml", "--gpu", "A100-40G", "--json")
    assert (status, json.loads(out)["fits"]) == (3, None)
    status, _, err = zrun("job.yaml", "--gpu", "A100-40G", "--fit", "--write", "fits.yaml")
    assert (status, err) == (0, "wrote fits.yaml\n")
    status, out, _ = zrun("fits.yaml", "--gpu", "A100-40G")
    assert (status, "activations: traced" in out) == (0, True)


def test_fit_answers_first_and_shows_few_rows(zrun: Zrun) -> None:
    status, out, _ = zrun("124M", "--gpu", "A100-40G", "--fit")
    lines = out.splitlines()
    assert status == 0
    assert re.fullmatch(r"it fits as it is: \S+ GiB of 39\.4 GiB, \d+% free", lines[0])
    assert len(lines) < 12, "no tables where nothing has to change"
    status, out, _ = zrun("7.5B", "--gpu", "A100-40G", "--fit")
    assert out.startswith("does not fit: ")
    table = out.partition("cheapest change first:\n")[2].partition("note: ")[0]
    assert re.findall(r"^\d+", table, re.MULTILINE) == ["1", "2", "3", "4", "5"]
    whole = zrun("7.5B", "--gpu", "A100-40G", "--fit", "--all")[1]
    assert len(whole.splitlines()) > len(out.splitlines()) + 5
    assert "configurations, " in whole


@pytest.mark.thorough
def test_a_job_that_is_too_big_for_a_cpu_moves_to_its_disk(
    zrun: Zrun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = Path(plan_models.__file__)
    (tmp_path / "job.yaml").write_text(
        f"name: deep\nmodel: {{call: '{code}:Deep', args: {{dim: 512}}}}\n"
        f"data: {{call: '{code}:Vectors', args: {{dim: 512}}}}\n"
        "steps: 1\nbatch: {micro: 4}\ndevice: cpu\ninit: meta\nprecision: bf16\n"
    )

    def estimate(*arguments: str) -> tuple[int, dict[str, Any]]:
        status, out, _ = zrun(*arguments, "--json")
        return status, json.loads(out)["estimate"]

    _, here = estimate("job.yaml")
    used = max(rank["device_used"] for rank in here["ranks"])
    (_, built), (_, made) = (
        estimate("job.yaml", "offload=disk", f"init={init}") for init in ("factory", "meta")
    )
    assert built["ranks"][0]["reserved"] > made["ranks"][0]["reserved"], "all values at once"
    limit = f"limits.memory={used - (100 << 20)}"
    status, out, _ = zrun("job.yaml", limit, "--emit", "patch")
    assert status == 3
    assert re.search(r"^offload:( disk|\n  optimizer: disk)  # was device$", out, re.MULTILINE)
    assert zrun("job.yaml", limit, "--fit", "--write", "fits.yaml")[0] == 0
    status, found = estimate("fits.yaml")
    assert status == 0
    _, searched = estimate_of_fix(zrun, limit)
    assert found == searched
    assert "optim" in found["moved"]["disk"]["read"]
    status, least = estimate("fits.yaml", "offload.fraction=auto")
    assert status == 0
    share = least["candidate"]["placement"]["fraction"]
    assert 0 < share <= found["candidate"]["placement"]["fraction"]
    assert estimate("fits.yaml", f"offload.fraction={share}")[1] == least


def estimate_of_fix(zrun: Zrun, limit: str) -> tuple[int, dict[str, Any]]:
    """Return the estimate to which the cheapest change of a job leads."""
    status, out, _ = zrun("job.yaml", limit, "--json")
    return status, json.loads(out)["fix"]


def _no_planner() -> Planner:
    raise AssertionError("it was worked out again")


def test_an_answer_is_kept_until_the_question_changes(searched: Answer) -> None:
    def asking(size: str, *overrides: str) -> Question:
        return replace(of_model(size, parse_simulate("2xA100-40G"), overrides), plan=_no_planner)

    again = answer(asking("3.5B", "zero=1"), "best")
    assert replace(again, question=searched.question) == searched
    for other in (asking("3.6B", "zero=1"), asking("3.5B", "zero=2"), asking("3.5B")):
        with pytest.raises(AssertionError, match="worked out again"):
            answer(other, "best")
    with pytest.raises(AssertionError, match="worked out again"):
        answer(asking("3.5B", "zero=1"), "fit")


@pytest.mark.parametrize(
    ("length", "num_steps"),
    [({"steps": 7}, 7), ({"epochs": 3}, 24), ({"tokens": 1001 * 128}, 126)],
)
def test_the_steps_of_a_job_are_counted(
    small: Answer, length: dict[str, int], num_steps: int
) -> None:
    config = JobConfig.model_validate(
        {"name": "t", "model": "m:f", "data": "m:d", "batch": 8, **length}
    )
    batch = BatchPlan(global_size=8, micro=8, accumulation=1, ranks=1)
    question = replace(small.question, config=config, batch=batch)
    found = replace(small, question=question, tokens_per_sample=128, num_samples=62)
    assert found.num_steps == num_steps
    unknown = replace(found, tokens_per_sample=None, num_samples=None)
    assert unknown.num_steps == (num_steps if "steps" in length else None)
    assert small.num_steps is None
    line = plan_tables.whole_run(small.chosen.time, num_steps)
    assert line.startswith(f"run: {num_steps} steps in ")


def test_files_of_the_job_that_change_end_it(tmp_path: Path, searched: Answer) -> None:
    code = tmp_path / "model.py"
    code.write_text("width = 1\n")
    parts = as_data((searched.chosen, searched.stages, None, None, "", 1, None, None))
    answer_cache.write("a", parts, {str(code): digest_of_file(code)})
    assert answer_cache.read("a") == (
        searched.chosen,
        searched.stages,
        None,
        None,
        "",
        1,
        None,
        None,
    )
    code.write_text("width = 2\n")
    assert answer_cache.read("a") is None
    (cache_folder("answers") / "a.json").write_text('{"files": {}, "parts": [], "buffers": []}')
    assert answer_cache.read("a") is None


def test_what_was_asked_before_needs_no_torch(zrun: Zrun, tmp_path: Path) -> None:
    arguments = ["7.5B", "--simulate", "8x8xA100-80G", "zero=2"]
    code, out, _ = zrun(*arguments)
    script = (
        "import sys\nfrom zrun import cli\ntry:\n    cli.main()\nfinally:\n"
        "    print(sorted({'torch', 'numpy', 'zrun_core.plan.answer.search'} & "
        "sys.modules.keys()), file=sys.stderr)\n"
    )
    again = subprocess.run(
        [sys.executable, "-c", script, "estimate", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (again.returncode, again.stdout) == (code, out)
    assert again.stderr == "['numpy']\n"


def test_a_config_of_transformers(zrun: Zrun) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "vocab_size": 1000,
        "intermediate_size": 512,
        "max_position_embeddings": 128,
    }
    Path("config.json").write_text(json.dumps(config))
    code, out, _ = zrun("config.json", "--simulate", "2x4xA100-40G", "zero=1", "--micro", "2")
    assert code == 0
    assert "8 ranks on 2x4xA100-40G" in out
    code, out, _ = zrun("config.json", "--gpu", "4090", "--sweep", "batch.micro=1,2,x")
    assert code == 0
    assert "expected whole number" in out
    code, out, _ = zrun("config.json", "--gpu", "4090", "zero=2", "--explain", "rings")
    assert "reduce ring" in out


BAD = [
    ([], "name a job file"),
    (["7.5B", "--gpu", "A100-40GB", "--simulate", "4xH100"], "leave one out"),
    (["7.5B", "--gpu", "H10"], "did you mean H100"),
    (["7.5B", "--gpu", "4xH100"], "--simulate takes hosts"),
    (["7.5B", "--simulate", "4xH100", "-H", "h1:4"], "leave out -H"),
    (
        ["7.5B", "--simulate", "4xH100", "--slots", "2"],
        "--simulate and --gpu use one rank per device",
    ),
    (["7.5B", "--simulate", "0x8xH100"], "devices"),
    (["7.5B", "--simulate", "8xH100@fast"], "unknown link or drive"),
    (["7.5B", "--simulate", "8xH100", "--world", "8"], "--simulate says how many"),
    (["big"], "the size of a model"),
    (["-3B", "--gpu", "H100"], ""),
    (["none.yaml"], "no such file"),
    (["none.json"], "No such file"),
    (["7.5B", "--gpu", "H100", "--fit", "--best"], "leave one out"),
    (["7.5B", "--gpu", "H100", "--emit", "json"], "write --emit patch"),
    (["7.5B", "--gpu", "H100", "--emit", "patch"], "no job to change"),
    (["7.5B", "--gpu", "H100", "--write", "x.yaml"], "no job to write"),
    (["7.5B", "--gpu", "H100", "--tokens", "many"], "many"),
    (["7.5B", "--gpu", "H100", "--sweep", "micro"], "a key and its values"),
    (["7.5B", "--gpu", "H100", "--sweep", "zero.stag=1,2"], "did you mean"),
    (["7.5B", "--gpu", "H100", "--explain", "nothing such"], "no buffer"),
    (["7.5B", "--at-peak", "--explain", "rings"], "--at-peak and --explain"),
    (["7.5B", "--at-peak", "--json"], "--at-peak and --json"),
    (["7.5B", "--simulate", "8xH100", "batch.global=7"], "do not divide"),
    (["7.5B", "--simulate", "8xH100", "parallel.tp=3"], "do not divide"),
    (["7.5B", "--simulate", "8xH100", "zero={stage: 2, shard_group: 3}"], "do not divide"),
    (["7.5B", "--simulate", "64x8xH100", "parallel.pp=512"], "repeated blocks"),
    (["--check", "nowhere"], "no run"),
    (["7.5B", "--check", "nowhere"], "leave the job out"),
    (["7.5B", "--measure"], "there is none: name a job file"),
    (["job.yaml", "--measure", "--gpu", "H100"], "leave out --gpu"),
    (["job.yaml", "--measure", "--simulate", "8xH100"], "leave out --simulate"),
    (["job.yaml", "--measure", "--sweep", "zero=1,2"], "leave one out"),
]


@pytest.mark.parametrize(
    ("arguments", "message"),
    BAD,
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.at_most(6)
def test_bad_questions_are_one_line_and_exit_code_2(
    zrun: Zrun, arguments: list[str], message: str
) -> None:
    code, out, err = zrun(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err + out


def test_a_config_that_is_none(zrun: Zrun) -> None:
    nothing = {
        "num_hidden_layers": -1,
        "hidden_size": 0,
        "num_attention_heads": 0,
        "vocab_size": 1,
        "intermediate_size": 1,
        "max_position_embeddings": 1,
    }
    contents = [
        "",
        "[]",
        "{",
        "{}",
        '{"model_type": "none such"}',
        '{"model_type": "gpt2", "n_layer": "x"}',
        "null",
    ]
    contents += ["\x00", json.dumps(nothing)]
    for content in contents:
        Path("config.json").write_text(content)
        code, _, err = zrun("config.json", "--gpu", "H100")
        assert code == 2, content
        assert err.startswith("error: config.json"), content
        assert len(err.splitlines()) == 1


@pytest.mark.thorough
def test_no_question_gives_a_traceback(zrun: Zrun) -> None:
    chance = random.Random(4)
    models = ["7B", "0", "1e9", "-1", "1T", "70M", "x", ""]
    keys = [
        "zero=3",
        "zero=9",
        "batch.micro=0",
        "batch.global=12",
        "parallel={tp: 2, pp: 2}",
        "precision=fp16",
        "activations.checkpoint=full",
        "activations.checkpoint=selective",
        "optim.name=sgd",
        "zero.bucket=1",
        "a=b",
        "=",
    ]
    values = [
        "1",
        "8",
        "zero=0,3",
        "H100",
        "8xH100",
        "2x8xA100-40G",
        "100000x100000xB200",
        "cpu",
        "∞",
        *models,
        *keys,
    ]
    flags = [
        "--gpu",
        "--simulate",
        "--world",
        "--tokens",
        "--sweep",
        "--explain",
        "--micro",
        "--seq",
        "--price",
    ]
    for _ in range(10):
        arguments = [chance.choice(models)]
        arguments += chance.sample(keys, chance.randrange(3))
        for flag in chance.sample(flags, chance.randrange(3)):
            arguments += [flag, chance.choice(values)]
        code, out, err = zrun(*arguments)
        assert code in (0, 2, 3), arguments
        assert "Traceback" not in out + err, arguments


@pytest.mark.thorough
def test_a_job_that_nothing_beats_is_not_written_anew(zrun: Zrun, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "name: small\nmodel: {call: 'zrun_core.models.gpt:gpt', args: {vocab_size: 64, dim: 16, "
        "depth: 2, heads: 2, seq_len: 16}}\ndata: m:data\nsteps: 1\nbatch: {global: 2, micro: 1}\n"
    )
    (tmp_path / "m.py").write_text(
        "import torch\n\n\ndef data():\n    text = torch.zeros(16, dtype=torch.long)\n"
        "    return [{'input_ids': text, 'labels': text}] * 8\n"
    )
    keys = ["activations.checkpoint=none", "parallel.pp=2", "batch.micro=2"]
    job = [str(tmp_path / "job.yaml"), "--simulate", "2xA100-80G", *keys]
    code, out, err = zrun(*job, "--best", "--write", "best.yaml")
    assert code == 0, err
    assert "your job is as fast as anything found: a gain counts above the error" in out
    assert "5% of a step where dp, tp and pp are the same, 12% where they differ" in out
    assert not (tmp_path / "best.yaml").exists()
    assert "wrote" not in err
    code, out, _ = zrun(*job, "--fit")
    assert code == 0
    assert "it fits as it is: 1.1 GiB of 79.2 GiB, 99% free" in out
    assert "the fastest for each amount" not in out
    code, _, err = zrun(*job, "--headroom", "7%")
    assert (code, err) == (2, "error: --headroom is for a search: add --best or --fit\n")


def test_who_waits_is_told_how_far_it_is(searched: Answer) -> None:
    now = 0.0
    out = io.StringIO()
    progress = Progress("estimating job.yaml", out, lambda: now)
    assert progress.line() == "estimating job.yaml, 0.0s"
    progress.watch(SearchState(3, 0, None, tp=4, way=2, ways=3))
    now = 14.0
    progress.tell()
    assert out.getvalue() == ""
    now = 16.0
    progress.tell()
    assert out.getvalue() == ("estimating job.yaml, 16s: tracing one of 4 ranks (2 of 3 ways)\n")
    assert searched.found is not None
    progress.watch(SearchState(12, 2000, searched.found.best[0]))
    found = searched.found.best[0]
    assert progress.line() == (
        "estimating job.yaml, 16s: 12 of 2,000 configurations estimated; "
        f"best so far {found.time.seconds:.2f}s: {found.candidate}; Ctrl-C keeps it"
    )


def test_an_interrupted_search_is_answered_and_not_kept(
    zrun: Zrun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: Progress, state: SearchState) -> None:
        if state.best is not None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "watch", interrupt)
        code, out, _ = zrun("1.3B", "--simulate", "2xA100-80G", "--best")
    assert code == 130
    assert "interrupted: the best of the configurations tried so far" in out
    code, out, _ = zrun("1.3B", "--simulate", "2xA100-80G", "--best")
    assert code == 0
    assert "interrupted" not in out
