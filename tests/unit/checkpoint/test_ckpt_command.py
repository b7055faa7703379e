"""`zrun ckpt`: what is printed, with which exit code, and that it starts without torch."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_toys import toy_infos, toy_parts, toy_state, write_files, write_step
from safetensors.torch import load_file

from zrun import cli
from zrun.checkpoints.step_tables import summary
from zrun.watch.console import print_table
from zrun_core.checkpoint.best import Best
from zrun_core.checkpoint.folder import CheckpointFolder, SavedStep, read_step
from zrun_core.checkpoint.folder_lock import held
from zrun_core.checkpoint.manifest_parts import ModelInfo, TensorInfo, UnitInfo
from zrun_core.checkpoint.names import before_name

Ckpt = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with steps 10, 20 and 30; the newest is short of a byte."""
    path = tmp_path / "runs" / "toy" / "20261121-000000-abcd"
    folder = CheckpointFolder(path / "checkpoints")
    for step in (10, 20, 30):
        write_step(folder, step)
    shard = folder.step_path(30) / "rank-00001.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    return path


@pytest.fixture
def ckpt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ckpt:
    """Runs `zrun ckpt` in this process: exit code, stdout, stderr."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["zrun", "ckpt", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "160")
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


def test_ls(ckpt: Ckpt, run: Path) -> None:
    code, out, err = ckpt("ls", run)
    assert (code, err) == (0, "")
    rows = [
        line.split() for line in out.splitlines() if line.strip().startswith(("30", "20", "10"))
    ]
    assert [row[0] for row in rows] == ["30", "20", "10"]
    assert "rank-00001.safetensors has" in " ".join(rows[0])
    assert rows[1][3:] == ["9.4", "KiB", "2", "run-1", "complete"] or "complete" in rows[1]
    code, out, _ = ckpt("ls", run / "checkpoints", "--json")
    listed = json.loads(out)
    assert listed["latest"] == 30
    assert [step["problem"] is None for step in listed["steps"]] == [False, True, True]


def test_the_best_step_is_shown_and_may_be_named(ckpt: Ckpt, run: Path, tmp_path: Path) -> None:
    code, _, err = ckpt("export", run, tmp_path / "out.safetensors", "--step", "best")
    assert code == 9
    assert "has no best step: checkpoint.best keeps one" in err
    assert ckpt("inspect", run, "--step", "beast")[0] == 2
    CheckpointFolder(run / "checkpoints").point_best(Best(10, "loss", "min", 0.25))
    assert "complete, best" in ckpt("ls", run)[1]
    assert json.loads(ckpt("ls", run, "--json")[1])["best"] == 10
    code, out, _ = ckpt("export", run, tmp_path / "out.safetensors", "--step", "best")
    assert (code, out.startswith("wrote step 10 ")) == (0, True)
    (run / "checkpoints" / "best").write_text("nonsense\n")
    assert "best does not name a step" in ckpt("ls", run)[2]


def test_runs_have_names(ckpt: Ckpt, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "events.jsonl").touch()
    monkeypatch.chdir(run.parents[2])
    by_path = ckpt("ls", run)
    for name in ("toy", run.name, run.name[:10]):
        assert ckpt("ls", name) == by_path
    assert ckpt("inspect", "toy", "--step", "10")[0] == 0
    assert ckpt("verify", "toy", "--step", "20")[0] == 0
    assert ckpt("export", "toy", "out.safetensors", "--step", "20")[0] == 0
    assert ckpt("prune", "toy", "--keep", "2", "--dry-run")[0] == 0
    code, _, err = ckpt("ls", "tio")
    assert (
        code,
        err.startswith("error: no run and no job is called 'tio'; did you mean toy?"),
    ) == (2, True)


def test_a_run_may_save_elsewhere(ckpt: Ckpt, run: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (run / "checkpoints").rename(elsewhere)
    (run / "job.yaml").write_text(f"checkpoint: {{every: 10, dir: {elsewhere}}}\n")
    code, out, _ = ckpt("ls", run)
    assert (code, out.splitlines()[0]) == (0, str(elsewhere))


def test_ls_of_one_step(ckpt: Ckpt, run: Path) -> None:
    code, out, _ = ckpt("ls", run / "checkpoints" / "step-00000010", "--json")
    assert (code, [step["step"] for step in json.loads(out)["steps"]]) == (0, [10])
    code, _, err = ckpt("ls", run / "checkpoints" / "step-00000030")
    assert code == 9
    assert "no valid checkpoint" in err


def test_a_bad_latest_is_a_warning(ckpt: Ckpt, run: Path) -> None:
    (run / "checkpoints" / "latest").write_text("garbage")
    code, _, err = ckpt("ls", run)
    assert code == 0
    assert "does not name a step; this link is for convenience only" in err


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "prune", "export"])
def test_no_such_folder(ckpt: Ckpt, tmp_path: Path, command: str) -> None:
    more = {"prune": ["--keep", "2"], "export": [str(tmp_path / "out")]}.get(command, [])
    code, out, err = ckpt(command, tmp_path / "nothing", *more)
    assert (code, out) == (2, "")
    assert "no such folder; give a run directory" in err
    code, out, err = ckpt(command, tmp_path, *more)
    assert (code, out) == (9, "")
    assert "holds no checkpoints" in err


def test_the_runs_of_a_job_are_named(ckpt: Ckpt, run: Path) -> None:
    code, _, err = ckpt("ls", run.parent)
    assert code == 9
    assert f"name one of its runs, such as {run}" in err


def test_a_run_that_broke_off_names_one_that_has_saved(
    ckpt: Ckpt, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = run.parent / "20991231-000000-abcd"
    for path in (run, broken):
        path.mkdir(exist_ok=True)
        (path / "events.jsonl").touch()
    monkeypatch.chdir(run.parents[2])
    code, _, err = ckpt("ls", "toy")
    assert code == 9
    assert f"{broken} holds no checkpoints; another run of its job has some: {run}" in err


def test_inspect(ckpt: Ckpt, run: Path) -> None:
    code, out, _ = ckpt("inspect", run, "--tensors")
    assert code == 0
    assert "step-00000020" in out  # the newest that counts
    for text in (
        "stage 3",
        "samples 1280",
        "exp_avg_sq",
        "layer.weight",
        "= tied.weight",
        "48 x 33",
        "bfloat16",
    ):
        assert text in out, text
    assert [line for line in out.splitlines() if line != line.rstrip()] == []
    code, out, _ = ckpt("inspect", run, "--step", "10", "--json")
    facts = json.loads(out)
    assert (code, facts["step"], facts["job"], len(facts["tensors"])) == (0, 10, {"name": "toy"}, 5)
    code, _, err = ckpt("inspect", run, "--step", "30")
    assert (code, "rank-00001.safetensors has" in err) == (9, True)
    code, _, err = ckpt("inspect", run, "--step", "11")
    assert (code, "has no step 11; it has 30, 20, 10" in err) == (9, True)


def test_inspect_tells_a_person_what_is_of_use_to_one(run: Path) -> None:
    manifest = read_step(run / "checkpoints" / "step-00000010")
    progress = {"samples": 640, "helpless_skips": 0, "owes_evaluation": False, "scaler": None}
    manifest = replace(manifest, progress=progress)
    out = io.StringIO()
    print_table(out, summary(SavedStep(10, run, manifest, None), manifest))
    (line,) = [line for line in out.getvalue().splitlines() if line.startswith("progress")]
    assert line.split() == ["progress", "samples", "640"]


def test_inspect_tells_how_other_ranks_parts_were_cut(ckpt: Ckpt, run: Path) -> None:
    path = run / "checkpoints" / "step-00000020"
    first = {"stage": 1, "tensor": 2, "ranks": [0], "units": ["body"]}
    layout = {**first, "others": [{**first, "ranks": [1], "units": ["body", "tail"]}]}
    manifest = replace(read_step(path), layout=layout)
    (path / "manifest.json").write_bytes(manifest.to_json())
    code, out, _ = ckpt("inspect", run, "--step", "20")
    assert code == 0
    rows = dict(line.split("  ", 1) for line in out.splitlines() if "  " in line)
    assert rows["layout"].strip() == "stage 1, tensor 2, ranks [0], units ['body']"
    assert rows["other parts"].strip() == "ranks [1], units ['body', 'tail']"


def test_names_are_no_markup(ckpt: Ckpt, run: Path) -> None:
    path = run / "checkpoints" / "step-00000020"
    manifest = read_step(path)
    forged = replace(
        manifest,
        tensors=[
            _with_odd_names(each) if each.name == "layer.bias" else each
            for each in manifest.tensors
        ],
        divisions=[
            replace(each, units=[_renamed(unit, "layer.bias", "z[/b]") for unit in each.units])
            for each in manifest.divisions
        ],
    )
    (path / "manifest.json").write_bytes(forged.to_json())
    code, out, err = ckpt("inspect", run, "--tensors")
    assert (code, err) == (0, "")
    assert "z[/b]" in out
    assert "exp_avg[/i]" in out


def _with_odd_names(info: TensorInfo) -> TensorInfo:
    states = {key if key == "value" else f"{key}[/i]": each for key, each in info.states.items()}
    return replace(info, name="z[/b]", states=states)


def _renamed(unit: UnitInfo, old: str, new: str) -> UnitInfo:
    runs = [replace(run, tensor=new) if run.tensor == old else run for run in unit.runs]
    return replace(unit, runs=runs)


def test_verify(ckpt: Ckpt, run: Path) -> None:
    code, out, _ = ckpt("verify", run)
    assert code == 9
    assert out.count("every byte as saved") == 2
    assert ckpt("verify", run, "--step", "20")[0] == 0
    assert ckpt("verify", run, "--step", "99")[0] == 9
    with (run / "checkpoints" / "step-00000010" / "rank-00000.safetensors").open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([byte ^ 4]))
    code, out, _ = ckpt("verify", run / "checkpoints" / "step-00000010", "--json")
    assert code == 9
    assert "the checksum of" in json.loads(out)["10"][0]


def test_export(ckpt: Ckpt, run: Path, tmp_path: Path) -> None:
    code, out, _ = ckpt("export", run, tmp_path / "out.safetensors", "--dtype", "bf16")
    assert (code, out.startswith("wrote step 20 to ")) == (0, True)
    state = load_file(tmp_path / "out.safetensors")
    assert str(state["tied.weight"].dtype) == "torch.bfloat16"
    code, _, err = ckpt("export", run, tmp_path / "out.safetensors")
    assert (code, "exists" in err) == (2, True)
    code, _, err = ckpt("export", run, tmp_path / "other", "--max-shard-size", "lots")
    assert (code, "--max-shard-size: 'lots' is not a size" in err) == (2, True)
    assert ckpt("export", run, tmp_path / "other", "--step", "30")[0] == 9


def test_one_of_several_models_is_shown_and_exported(ckpt: Ckpt, tmp_path: Path) -> None:
    layouts = {"net": {"stage": 3, "optimizer": "adam"}, "mean": {"stage": 1, "optimizer": None}}
    state = toy_state(20)
    name_of = {
        name: f"mean.{name}" if name == "layer.bias" else f"net.{name}" for name in toy_state(20)
    }
    folder = CheckpointFolder(tmp_path / "several")
    tmp = folder.begin(20)
    several = write_files(
        tmp,
        20,
        [
            [
                replace(item, tensor=name_of.get(item.tensor, item.tensor))
                for item in toy_parts(state, rank, 2)
            ]
            for rank in range(2)
        ],
        [
            replace(
                info,
                name=name_of[info.name],
                aliases=tuple(f"net.{alias}" for alias in info.aliases),
            )
            for info in toy_infos(state)
        ],
        learnt={key: {"order": None, "late": []} for key in layouts},
        layout={"models": layouts},
    )
    folder.commit(tmp, several)
    path = folder.step_path(20)
    code, out, _ = ckpt("inspect", path)
    assert code == 0
    rows = dict(line.split("  ", 1) for line in out.splitlines() if "  " in line)
    assert rows["layout of mean"].strip() == "stage 1, optimizer None"
    code, _, err = ckpt("export", path, tmp_path / "mean", "--model", "mean")
    assert (code, err) == (0, "")
    assert list(load_file(tmp_path / "mean" / "model.safetensors")) == ["layer.bias"]
    code, out, _ = ckpt("export", path, tmp_path / "all")
    assert "without a config: it is of mean, net; --model NAME writes one alone" in out
    assert "mean.layer.bias" in load_file(tmp_path / "all" / "model.safetensors")
    code, _, err = ckpt("export", path, tmp_path / "none", "--model", "judge")
    assert (code, "--model judge: step 20 has mean, net" in err) == (2, True)


def test_export_says_what_a_folder_is(ckpt: Ckpt, run: Path, tmp_path: Path) -> None:
    step = run / "checkpoints" / "step-00000020"
    models = [
        (
            None,
            "weights only, by their state_dict names, without a config: the checkpoint does not "
            "record the class of its model",
        ),
        (
            ModelInfo("train.Net", None, "which is not it"),
            "without a config: its model is a train.Net, which is not it",
        ),
        (
            ModelInfo("lib.models.Net", None, None),
            " loads it; for its tokenizer, give the model or the dataset",
        ),
    ]
    for number, (model, words) in enumerate(models):
        (step / "manifest.json").write_bytes(replace(read_step(step), model=model).to_json())
        out = tmp_path / str(number)
        code, said, _ = ckpt("export", run, out)
        assert (code, words in said) == (0, True), said
    assert f'Net.from_pretrained("{out}") loads it' in said


def test_prune(ckpt: Ckpt, run: Path) -> None:
    folder = CheckpointFolder(run / "checkpoints")
    write_step(folder, 40)
    code, _, err = ckpt("prune", run, "--keep", "1")
    assert (code, "at least 2 steps stay" in err) == (2, True)
    assert ckpt("prune", run / "checkpoints" / "step-00000020", "--keep", "2")[0] == 2
    assert ckpt("prune", run, "--keep", "2", "--dry-run")[1] == "would remove step 10\n"
    assert len(folder.scan()) == 4
    assert ckpt("prune", run, "--keep", "2")[1] == "removed step 10\n"
    assert [found.step for found in folder.scan()] == [40, 30, 20]
    assert json.loads(ckpt("prune", run, "--keep", "2", "--json")[1]) == {
        "removed": [],
        "aside": [],
        "in_use_by": None,
    }


def test_prune_leaves_a_save_under_way(ckpt: Ckpt, run: Path) -> None:
    folder = CheckpointFolder(run / "checkpoints")
    half, aside = folder.begin(50), folder.set_aside(10)
    with held(
        folder.path
    ):  # as whoever saves there does: a launcher's ranks, torchrun's, a script with the library
        code, _, err = ckpt("prune", run, "--keep", "2", "--aside")
        assert (code, err) == (
            0,
            f"{folder.path} is in use by process {os.getpid()}: the step it is writing and those "
            "set aside are kept\n",
        )
        assert half.is_dir()
        assert aside.is_dir()
    assert ckpt("prune", run, "--keep", "2")[0] == 0
    assert not half.exists()


def test_folders_that_others_made_are_theirs(ckpt: Ckpt, run: Path) -> None:
    mine = run / "checkpoints" / "before-refactoring"
    mine.mkdir()
    assert ckpt("prune", run, "--keep", "2", "--aside")[1] == "nothing to remove\n"
    assert mine.is_dir()


def test_listing_needs_no_torch(run: Path) -> None:
    code = (
        "import sys; from zrun import cli; sys.argv = ['zrun', 'ckpt', *sys.argv[1:]]\n"
        "try: cli.main()\nfinally: print('torch' in sys.modules)"
    )
    for command in (["ls"], ["inspect"], ["verify"], ["prune", "--keep", "2"]):
        result = subprocess.run(
            [sys.executable, "-c", code, *command, str(run)], capture_output=True, text=True
        )
        assert result.stdout.endswith("False\n"), result.stderr


def test_what_was_set_aside_is_named_and_removed_on_request(ckpt: Ckpt, run: Path) -> None:
    folder = CheckpointFolder(run / "checkpoints")
    damaged = folder.set_aside(30).name
    before = before_name("old")
    write_step(CheckpointFolder(folder.path / before), 40)
    code, out, _ = ckpt("ls", run)
    assert (code, out.splitlines()[-2:]) == (0, [f"set aside: {before}", f"set aside: {damaged}"])
    assert ckpt("prune", run, "--keep", "2")[1] == "nothing to remove\n"
    assert (
        ckpt("prune", run, "--keep", "2", "--aside", "--dry-run")[1]
        == f"would remove {before}, {damaged}\n"
    )
    assert json.loads(ckpt("ls", run, "--json")[1])["aside"] == [
        str(folder.path / n) for n in (before, damaged)
    ]
    assert ckpt("prune", run, "--keep", "2", "--aside")[1] == f"removed {before}, {damaged}\n"
    assert folder.aside() == []
    assert [found.step for found in folder.scan()] == [20, 10]


def test_earlier_attempts_are_listed(ckpt: Ckpt, run: Path) -> None:
    earlier = {
        number: CheckpointFolder(run / "attempts" / str(number) / "checkpoints")
        for number in (2, 10)
    }
    for number, folder in earlier.items():
        write_step(folder, number + 100)
    (run / "attempts" / "11" / "logs").mkdir(parents=True)  # it ended before it saved
    code, out, _ = ckpt("ls", run)
    assert [line for line in out.splitlines() if line.startswith(("/", "attempt"))] == [
        str(run / "checkpoints"),
        f"attempt 10: {earlier[10].path}",
        f"attempt 2: {earlier[2].path}",
    ]
    code, out, _ = ckpt("ls", run, "--json")
    attempts = json.loads(out)["attempts"]
    assert {number: [step["step"] for step in steps] for number, steps in attempts.items()} == {
        "10": [110],
        "2": [102],
    }
    (run / "checkpoints").rename(run.parent / "elsewhere")
    code, out, err = ckpt("ls", run)
    assert (code, f"attempt 2: {earlier[2].path}" in out) == (9, True)
    assert f"an earlier attempt has some: {earlier[10].path}" in err
    assert "has no step 102; it has none" in ckpt("inspect", run, "--step", "102")[2]
    assert ckpt("inspect", run / "attempts" / "2")[0] == 0


def test_a_host_without_threads_is_said(
    ckpt: Ckpt, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    code, out, err = ckpt("verify", run, "--step", "10")
    assert (code, out) == (3, "")
    assert err.startswith("error: no thread could be started: ")
    assert "ulimit -u" in err
    assert err.count("\n") == 1
