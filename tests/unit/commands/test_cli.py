"""The command line: exit codes, what goes to which stream, and what is not imported."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from warm import WarmPopen

from zrun import cli
from zrun.job.load import load_job
from zrun.job.structure import inspect_structure
from zrun_core.errors import ExitCode, JobError, UserCodeError
from zrun_core.spine.sections.tensor_roles import Role, read_entry

JOB = """\
name: tiny
model: {call: user.py:build_model, args: {dim: 3}}
data: user.py:build_data
steps: 10
batch: {global: 8, micro: 2}
device: cpu
zero: 2
"""
USER = """\
import sys
import torch
print("chatter")
def build_model(dim=2):
    return torch.nn.Linear(dim, dim)
class Config:
    use_cache, model_type = True, "mine"
    def to_json_string(self):
        return "{}"
class Caching(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.config = Config()
        blocks = (torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(2))
        self.blocks = torch.nn.ModuleList(blocks)
        self.gradient_checkpointing = True
    def forward(self, x, use_cache=None):
        return x
class Heads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.n_head = 4
        self.qkv = torch.nn.Linear(32, 96)
        self.out = torch.nn.Linear(32, 32)
    def forward(self, x):
        q, k, v = (y.view(*y.shape[:2], self.n_head, -1) for y in self.qkv(x).chunk(3, -1))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()
class Judging(Heads):
    def forward(self, x):
        loss = super().forward(x)
        return loss * (1 if loss > 0 else 2)
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(2, 2)
    def forward(self, x):
        return x + self.up(x)
class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))
        self.blocks[3].forward = self.blocks[3].up.forward
    def forward(self, x):
        return self.blocks(x).mean()
def vectors():
    return torch.zeros(8, 6, 32)
def no_model():
    return 3
def looks_at_values():
    layer = torch.nn.Linear(2, 2)
    layer.weight.sum().item()
    return layer
def broken():
    raise KeyError("mine")
def dies():
    import os; os._exit(9)
def hangs():
    import time; time.sleep(600)
def build_data():
    return [1]
"""


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


class Zrun:
    """Runs `zrun ...` in this process, in a folder with a job."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Result:
        self._monkeypatch.setattr(sys, "argv", ["zrun", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        streams = self._capsys.readouterr()
        return Result(int(ended.value.code or 0), streams.out, streams.err)


@pytest.fixture
def zrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Zrun:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)
    Path("user.py").write_text(USER)
    return Zrun(monkeypatch, capsys)


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that builds the model needs not import torch: `test_check_prints_the_plan` has it
    do so.
    """
    monkeypatch.setattr(subprocess, "Popen", WarmPopen)


def test_help_lists_every_command(zrun: Zrun) -> None:
    result = zrun("--help")
    assert result.code == 0
    for command in cli.COMMANDS:
        assert command in result.out


def test_version(zrun: Zrun) -> None:
    assert zrun("--version").out.startswith("zrun 0.")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["train", "--help"],
        ["init", "--full"],
        ["explain", "zero.stage"],
        ["config", "show", "job.yaml"],
        ["check", "job.yaml", "--no-import"],
        ["topo", "--json"],
    ],
    ids=" ".join,
)
@pytest.mark.at_most(2)
def test_torch_is_not_imported(zrun: Zrun, arguments: list[str]) -> None:
    script = (
        "import sys\nfrom zrun.cli import main\ntry: main()\n"
        "except SystemExit as end: code = end.code\n"
        "print(code, *sorted({'torch', 'pydantic', 'yaml'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
    )
    code, *loaded = done.stderr.splitlines()[-1].split()
    assert code == "0", done.stderr
    assert "torch" not in loaded
    if arguments[0] in ("--help", "--version"):
        assert loaded == []


def test_wrong_command_suggests_the_right_one(zrun: Zrun) -> None:
    result = zrun("chekc")
    assert result.code == ExitCode.USAGE
    assert "'check'" in result.err


def test_a_mistake_in_the_job_is_one_line_without_traceback(zrun: Zrun) -> None:
    result = zrun("check", "job.yaml", "zero.stag=3")
    assert result.code == ExitCode.USAGE
    assert result.out == ""
    assert result.err == (
        'error: override zero.stag=3: zero.stag: unknown key; did you mean "stage"? write '
        "zero.stage=3\n"
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "train job.yaml --resume --ui plain",
            "option --ui follows: write --resume auto --ui plain",
        ),
        ("train job.yaml --resume", "none follows: write --resume auto"),
        ("train job.yaml --resume zero.stage=3", "write --resume auto zero.stage=3"),
        ("check job.yaml -H --json", "-H takes a value, and the option --json follows"),
        ("estimate 7.5B --write --fit", "write --write FILE --fit"),
        ("ckpt verify runs --step --json", "--step takes a value"),
    ],
)
def test_no_option_is_the_value_of_another(zrun: Zrun, line: str, words: str) -> None:
    result = zrun(*line.split())
    assert result.code == ExitCode.USAGE
    assert words in result.err


def test_check_prints_the_plan(zrun: Zrun) -> None:
    result = zrun("check", "job.yaml", "--slots", "2")
    assert result.code == 0, result.err
    assert "batch: global 8 = micro 2 x accumulation 2 x 2 data-parallel ranks\n" in result.out
    assert "all other keys have their defaults: --all prints them too\n" in result.out
    assert "zero.bucket " in result.out
    assert "zero: stage 2," not in result.out
    assert "structure: Linear, 12 parameters in 2 tensors, 48 B\n" in result.out
    assert "chatter" not in result.out
    everything = zrun("check", "job.yaml", "--slots", "2", "--all").out
    assert "zero: stage 2," in everything
    assert "auto: zero.bucket = " in everything


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([], ""),
        (
            ["parallel.tp=2"],
            "values: not compared: --values starts the 2 ranks of one model here a",
        ),
        (["parallel.tp=2", "guards.check_values=false"], "values: not compared, here or in the r"),
        (["parallel.tp=512"], "values: not compared: the 512 ranks of one model are too many for"),
    ],
)
@pytest.mark.at_most(1)
def test_check_says_that_values_were_not_compared(zrun: Zrun, keys: list[str], words: str) -> None:
    result = zrun("check", "job.yaml", "--no-import", "--slots", "512", "batch.global=1024", *keys)
    assert result.code == 0, result.err
    assert (words in result.out) if words else ("values:" not in result.out)


@pytest.mark.usefixtures("warm")
def test_check_says_which_settings_of_the_model_do_not_count(zrun: Zrun) -> None:
    keys = ["model={call: user.py:Caching}", "activations.checkpoint=full"]
    result = zrun("check", "job.yaml", *keys)
    assert result.code == 0, result.err
    notes = [line for line in result.out.splitlines() if line.startswith("note: ")]
    assert notes == [
        "note: activations.checkpoint: full replaces the model's own gradient checkpointing",
        "note: config.use_cache is off in training; model.generate still uses it",
    ]
    assert json.loads(zrun("check", "job.yaml", "--json", *keys).out)["structure"]["notes"]


def test_check_lists_the_layers_of_modules(zrun: Zrun, warm: None) -> None:
    keys = ["model=user.py:Stack", "activations={checkpoint: every_n, n: 2}", "--layers"]
    shown = zrun("check", "job.yaml", "parallel={draws: block}", *keys).out
    node = "draws from a stream of its own; a pipeline is cut between such calls"
    assert shown.partition("structure: ")[2].partition("\n")[2] == (
        "layers: how ranks wrap the forwards of modules, outermost first\n"
        "  blocks.*: Block, 2 of 4: blocks.0, blocks.2\n"
        f"    call_of_node  {node}\n"
        "    recomputed    is recomputed in backward\n"
        "    Block.forward\n"
        "  blocks.*: Block, 1 of 4: blocks.1\n"
        f"    call_of_node  {node}\n"
        "    Block.forward\n"
        "  blocks.*: Block, 1 of 4: blocks.3\n"
        f"    call_of_node  {node}\n"
        "    the forward that the model's code has put on this Block\n"
    )
    assert (
        "layers: none: no module's forward is wrapped" in zrun("check", "job.yaml", "--layers").out
    )
    report = zrun("check", "job.yaml", *keys, "--json").out
    (kind,) = json.loads(report)["structure"]["layers"]
    assert kind["names"] == ["blocks.0", "blocks.2"]
    assert kind["layers"] == [["recomputed", "is recomputed in backward"]]
    assert json.loads(zrun("check", "job.yaml", "--json").out)["structure"]["layers"] is None


def test_layers_of_slices_and_stages(zrun: Zrun, warm: None) -> None:
    keys = [*HEADS, DIVIDED, "--slots", "2", "--layers"]
    shown = zrun("check", "job.yaml", *keys).out
    assert (
        "  out: Linear\n    rows_summed  ends a region: sums over ranks what slices make\n"
        "    (in place of Linear.forward)\n" in shown
    )
    unread = zrun("check", "job.yaml", *keys, "data=user.py:broken")
    assert unread.code != ExitCode.OK
    assert "by a forward of a first batch, and the data was not read: " in unread.err
    refused = zrun("check", "job.yaml", "--layers", "--no-import")
    assert refused.code == ExitCode.USAGE
    assert "--layers and --no-import: --layers builds the model of the job" in refused.err


def test_check_without_the_users_code(zrun: Zrun) -> None:
    Path("user.py").unlink()
    assert zrun("check", "job.yaml", "--no-import").code == 0


@pytest.mark.usefixtures("warm")
def test_check_as_json(zrun: Zrun) -> None:
    report = json.loads(zrun("check", "job.yaml", "--json", "optim.lr=3e-4").out)
    assert report["batch"] == {"global_size": 8, "micro": 2, "accumulation": 4, "ranks": 1}
    assert report["structure"]["num_parameters"] == 12
    assert report["config"]["optim"]["lr"] == 3e-4
    assert {"threads", "slots"} <= {reason["key"] for reason in report["auto"]}


def test_check_tells_a_batch_that_does_not_divide(zrun: Zrun) -> None:
    result = zrun("check", "job.yaml", "--no-import", "--slots", "3")
    assert result.code == ExitCode.USAGE
    assert "8 samples do not divide over 3 data-parallel ranks: write 6 or 12" in result.err


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("override", "code", "message"),
    [
        (
            "model=user.py:build_modle",
            ExitCode.USAGE,
            "user.py has no 'build_modle'; did you mean build_model?",
        ),
        ("loss=user.py:nope", ExitCode.USAGE, "loss: user.py:nope: user.py has no 'nope'"),
        ("data=other.py:f", ExitCode.USAGE, "data: other.py:f: there is no file"),
        ("model.args.dmi=2", ExitCode.USAGE, "did you mean dim?"),
        ("model=user.py:no_model", ExitCode.WORKER, "model must return an nn.Module"),
        ("model=user.py:broken", ExitCode.WORKER, "KeyError: 'mine'"),
        ("model=user.py:dies", ExitCode.WORKER, "ended with exit code 9"),
    ],
)
def test_check_finds_what_is_wrong_with_the_users_code(
    zrun: Zrun, override: str, code: int, message: str
) -> None:
    arguments = [override] if override.startswith("model.args") else ["model.args={}", override]
    result = zrun("check", "job.yaml", *arguments)
    assert (result.code, result.out) == (code, "")
    assert message in result.err


@pytest.mark.usefixtures("warm")
def test_check_tells_every_reference_that_leads_nowhere(zrun: Zrun) -> None:
    result = zrun(
        "check", "job.yaml", "data=user.py:a", "loss=user.py:b", "hooks.on_eval=user.py:c"
    )
    assert [line.split(": ")[-3] for line in result.err.splitlines()] == [
        "data",
        "loss",
        "hooks.on_eval",
    ]


@pytest.mark.usefixtures("warm")
def test_a_model_that_looks_at_values_is_built_for_real(zrun: Zrun) -> None:
    overrides = ["model=user.py:looks_at_values"]
    assert inspect_structure(load_job(Path("job.yaml"), overrides), 100).num_parameters == 6
    with pytest.raises(JobError, match="cannot run on the meta device; write init: factory"):
        inspect_structure(load_job(Path("job.yaml"), [*overrides, "init=meta"]), 100)


def test_functions_are_compared_with_how_they_are_called(zrun: Zrun) -> None:
    overrides = [
        "data.collate=user.py:build_data",
        "loss={call: user.py:build_model, args: {dim: 2}}",
        "data.args={n: 3}",
    ]
    with pytest.raises(JobError) as error:
        inspect_structure(load_job(Path("job.yaml"), overrides), 100)
    data, collate, loss = str(error.value).splitlines()
    assert data.startswith("data: user.py:build_data: got an unexpected keyword argument 'n'")
    assert collate.startswith(
        "data.collate: user.py:build_data: too many positional arguments: it is called as (samples)"
    )
    assert loss.startswith("loss: user.py:build_model: ")


@pytest.mark.usefixtures("warm")
def test_a_pipeline_has_blocks_for_its_stages_when_it_is_checked(zrun: Zrun) -> None:
    args = "{vocab_size: 8, dim: 8, depth: 3, heads: 2, seq_len: 4}"
    model = f"model={{call: 'zrun_core.models.gpt:gpt', args: {args}}}"
    for parallel, problem in (
        ("{pp: 4}", r"4 stages = 4 > 3 blocks; write pp: 3 or less"),
        ("{pp: 2, split: [block.2]}", r"'block\.2' is no block: did you mean blocks\.2"),
    ):
        with pytest.raises(JobError, match=problem):
            inspect_structure(load_job(Path("job.yaml"), [model, f"parallel={parallel}"]), 100)


def test_a_model_that_hangs_is_ended(zrun: Zrun) -> None:
    job = load_job(Path("job.yaml"), ["model=user.py:hangs"])
    with pytest.raises(UserCodeError, match=r"user.py:hangs was not built within 0.5 s"):
        inspect_structure(job, 0.5)


@pytest.mark.parametrize("preset", ["torch", "hf", "stdlib-gpt", "bert", "llama"])
@pytest.mark.parametrize("full", [[], ["--full"]], ids=["short", "full"])
def test_init_writes_a_job(zrun: Zrun, preset: str, full: list[str]) -> None:
    short = zrun("init", "--preset", preset)
    assert short.err == ""
    Path("short.yaml").write_text(short.out)
    written = zrun("init", "--preset", preset, *full, "-o", "new.yaml")
    assert (written.code, written.out) == (0, "")
    code = "wrote train.py\n" if preset in ("torch", "hf") else ""
    next_line = "next: zrun check new.yaml, then zrun train new.yaml"
    assert written.err == f"wrote new.yaml\n{code}{next_line}\n"
    assert load_job(Path("new.yaml")).config == load_job(Path("short.yaml")).config


def test_init_writes_the_job_and_the_code_of_the_readme(zrun: Zrun) -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    Path("job.yaml").unlink()
    assert zrun("init").err.startswith("wrote job.yaml\nwrote train.py\n")
    assert len(Path("job.yaml").read_text().splitlines()) == 8
    assert f"```yaml\n{Path('job.yaml').read_text()}```" in readme
    assert f"```python\n{Path('train.py').read_text()}```" in readme
    assert zrun("init", "-o", "-").out == Path("job.yaml").read_text()


def test_init_replaces_nothing_unless_told(zrun: Zrun) -> None:
    result = zrun("init", "-o", "job.yaml")
    assert result.code == ExitCode.USAGE
    assert (
        result.err
        == "error: job.yaml exists; choose another name with -o, or replace it with --force\n"
    )
    assert Path("job.yaml").read_text() == JOB
    assert not Path("train.py").exists()
    Path("train.py").write_text("mine")
    assert "kept the existing train.py" in zrun("init", "-o", "job.yaml", "--force").err
    assert Path("train.py").read_text() == "mine"
    assert zrun("init", "--for", "hf", "--preset", "bert").code == ExitCode.USAGE


def test_init_unknown_preset(zrun: Zrun) -> None:
    message = "error: there is no preset 'gpt5'; choose one of bert, hf, llama, stdlib-gpt, torch\n"
    assert zrun("init", "--preset", "gpt5").err == message


def test_explain_a_key(zrun: Zrun) -> None:
    assert zrun("explain", "limits.start_s").out == (
        "limits.start_s: seconds for all ranks to arrive\n"
        "  takes    number > 0\n  unit     seconds\n  default  300.0\n  example  start_s: 300.0\n"
    )


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.name=muon", "muon cannot"),
        ("optim.args.nestrov=true", "optim.args.nestrov: adamw has no such argument"),
        ("activations.checkpoint=full", "the model has no repeated blocks"),
        ("compile=true", "compile: the model has no repeated blocks"),
        ("parallel={tp: 2, plan: {'*.q': colwise}}", "parallel.plan: no module matches '*.q'"),
    ],
)
def test_check_refuses_what_training_would(zrun: Zrun, override: str, message: str) -> None:
    result = zrun("check", "job.yaml", override, "--slots", "2")
    assert result.code == ExitCode.USAGE
    assert message in result.err


WHOLE, DIVIDED = (
    f"parallel={{tp: 2, plan: {{qkv: fused 3, out: rowwise, n_head: {role}}}}}"
    for role in ("whole", "divide")
)
HEADS = ["model=user.py:Heads", "data=user.py:vectors"]


def test_slices_that_would_compute_something_else_are_refused(zrun: Zrun, warm: None) -> None:
    result = zrun("estimate", "job.yaml", *HEADS, WHOLE, "--slots", "2")
    assert result.code == ExitCode.USAGE
    assert (
        "parallel.tp: with the slices of qkv, scaled_dot_product_flash_attention_for_cpu in the "
        "model goes over 4 values in place of 8, which makes something else than the whole model; "
        'if it counts heads by an attribute ("n_head" is 4), write that one with divide in '
        "parallel.plan; " in result.err
    )
    result = zrun("estimate", "job.yaml", *HEADS, DIVIDED, "--slots", "2")
    assert result.code == 0
    assert "not checked" not in result.out


def test_what_looks_at_values_is_said_not_to_be_checked(zrun: Zrun, warm: None) -> None:
    judging = ["model=user.py:Judging", HEADS[1], DIVIDED]
    result = zrun("estimate", "job.yaml", *judging, "--slots", "2")
    assert result.code == 0, result.err
    said = " ".join(result.out.split())
    assert said.count("parallel.tp: not checked") == 1
    assert (
        "parallel.tp: not checked before training that ranks with slices compute what the whole "
        "model does: without values its forward fails at user.py:" in said
    )


def test_explain_a_section_lists_its_keys(zrun: Zrun) -> None:
    assert "  keys     batch.global, batch.micro\n" in zrun("explain", "batch").out


def test_explain_has_a_line_for_each_role(zrun: Zrun) -> None:
    shown = zrun("explain", "parallel.plan").out.partition("  values\n")[2].splitlines()
    assert [line.split()[0] for line in shown] == list(Role)
    for line in shown:
        meaning, _, example = line.rpartition("; ")
        (role,) = yaml.safe_load(example).values()
        assert meaning.split()[0] == read_entry(role).role


def test_explain_all(zrun: Zrun) -> None:
    lines = zrun("explain").out.splitlines()
    assert len(lines) > 60
    assert json.loads(zrun("explain", "zero.stage", "--json").out)[0]["default"] == 0


@pytest.mark.parametrize(
    ("key", "near"),
    [("zero.stag", "zero.stage"), ("bucket", "zero.bucket"), ("learning_rate", "optim.lr")],
)
def test_explain_an_unknown_key(zrun: Zrun, key: str, near: str) -> None:
    result = zrun("explain", key)
    assert (result.code, result.err) == (
        ExitCode.USAGE,
        f"error: a job has no key {key!r}; did you mean {near}?\n",
    )


def test_config_show(zrun: Zrun) -> None:
    result = zrun("config", "show", "job.yaml", "zero.stage=3")
    assert "  stage: 3                      # override\n" in result.out
    assert "steps: 10                       # job.yaml:4:8\n" in result.out
    shown = json.loads(zrun("config", "show", "job.yaml", "--json").out)
    assert (shown["config"]["steps"], shown["origins"]["seed"]) == (10, "default")


def test_config_schema(zrun: Zrun) -> None:
    assert json.loads(zrun("config", "schema").out)["required"] == [
        "name",
        "model",
        "data",
        "batch",
    ]


def test_check_lists_the_hosts(zrun: Zrun) -> None:
    Path("hf").write_text("node1 slots=8\nme@node2:2222 slots=8\n")
    result = zrun(
        "check", "job.yaml", "--hosts", "hf", "-i", "node2:3,1@node1", "--no-import", "--offline"
    )
    assert (result.code, result.err) == (0, "")
    assert result.out == (
        "hosts: 2 hosts, 10 slots, by ssh (hf names them)\n  node1  slots=8  (hf:1:1)\n"
        "  me@node2:2222  slots 1,3 of 8  (hf:2:1)\n"
        "plan: none: the hosts were not checked (--offline)\n"
        "structure: not checked\n"
    )
    report = json.loads(
        zrun("check", "job.yaml", "--hosts", "hf", "--no-import", "--json", "--offline").out
    )
    assert (report["backend"]["kind"], [host["name"] for host in report["hosts"]]) == (
        "ssh",
        ["node1", "node2"],
    )
    assert report["plan"] is None


@pytest.mark.parametrize(
    "arguments", [["-i", "localhost:0,1"], ["-H", "localhost:2"], ["--slots", "2"]], ids=" ".join
)
def test_check_counts_slots_of_this_host(zrun: Zrun, arguments: list[str]) -> None:
    report = json.loads(zrun("check", "job.yaml", *arguments, "--no-import", "--json").out)
    assert (report["batch"]["ranks"], report["backend"]["kind"]) == (2, "local")
    assert "launch.backend" in {reason["key"] for reason in report["auto"]}


@pytest.mark.parametrize("command", ["check", "train", "estimate"])
def test_gpus_are_refused_where_the_job_has_none(zrun: Zrun, command: str) -> None:
    told = "error: --gpus 2 asks for GPUs, and the job has device: cpu: write --slots 2"
    result = zrun(command, "job.yaml", "--gpus", "2")
    assert (result.code, result.out) == (ExitCode.USAGE, "")
    assert result.err.splitlines()[-1].startswith(told)


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "job.yaml", "--gpus"],
        ["check", "job.yaml", "--slots"],
        ["train", "job.yaml", "--dry-run", "--slots"],
        ["estimate", "job.yaml", "--micro"],
        ["estimate", "7.5B", "--seq"],
        ["estimate", "7.5B", "--world"],
        ["estimate", "7.5B", "--price"],
        ["topo", "--tp"],
        ["logs", "t", "-n"],
        ["stop", "t", "--timeout"],
        ["save", "t", "--timeout"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("number", [str(2**63), "1e300", "nan"])
def test_numbers_of_options_have_bounds(zrun: Zrun, arguments: list[str], number: str) -> None:
    assert zrun(*arguments, number).code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--hosts", "none"],
            "none: there is no such host file; write a line for each host, such as: node1 slots=8",
        ),
        (["-H", "-x"], '-H:1:1: "-x" begins with "-", which no host name does'),
        (
            ["hosts=[a, $b]"],
            'override hosts=[a, $b]: hosts[1]: "$b" is not a host name: letters, digits, dots, - '
            "and "
            "_, no other character",
        ),
        (
            ["hosts=[]"],
            "override hosts=[]: hosts: expected text | [text, ...] | null, found []; write for "
            "example "
            "'hosts=[node1:8, node2:8]'",
        ),
        (["hosts=[1]"], 'override hosts=[1]: hosts[0]: expected text, found 1; write "1"'),
        (
            ["launch.backend=slrm"],
            "override launch.backend=slrm: launch.backend: expected auto | local | ssh | slurm | "
            'env, found "slrm"; did you mean "slurm"? write launch.backend=slurm',
        ),
        (
            ["launch.ssh=-F x"],
            "override launch.ssh=-F x: launch.ssh: '-F x' names no command; write ssh, or ssh with "
            "its options: ssh -F cluster.cfg",
        ),
        (
            ["launch.python=-c"],
            "override launch.python=-c: launch.python: '-c' is not the path of a Python; write for "
            "example /opt/venv/bin/python",
        ),
    ],
)
def test_hosts_that_are_wrong(zrun: Zrun, arguments: list[str], message: str) -> None:
    for command in ("check", "train"):
        assert zrun(command, "job.yaml", *arguments) == Result(
            ExitCode.USAGE, "", f"error: {message}\n"
        )


def test_hosts_in_the_job_have_a_place(zrun: Zrun) -> None:
    Path("job.yaml").write_text(f"{JOB}hosts:\n  - node1:8\n  - node1 slot=8\n")
    line = JOB.count("\n") + 3
    assert zrun("check", "job.yaml").err == (
        f'error: job.yaml:{line}:5: hosts[1]: "slot=8" means nothing here: a line is '
        "[user@]name[:port] slots=N\n"
    )


def test_check_names_hosts_that_are_not_there_and_says_the_rest(zrun: Zrun) -> None:
    result = zrun("check", "job.yaml", "-H", "h1.invalid:8,h2.invalid:8", "--no-import")
    assert result.code == ExitCode.PREFLIGHT
    assert "plan: none: 2 of 2 hosts cannot be used:\n" in result.out
    assert "h1.invalid, h2.invalid: no such host is known here" in result.out
    assert result.out.endswith("structure: not checked\n")


def test_hosts_that_are_not_there_are_all_named(zrun: Zrun) -> None:
    for more in ([], ["--dry-run"]):
        result = zrun("train", "job.yaml", "-H", "h1.invalid:8,h2.invalid:8", *more)
        assert result.code == ExitCode.PREFLIGHT
        assert result.err.startswith("hosts: 2 hosts, 16 slots, by ssh (-H names them)\n")
        assert "h1.invalid, h2.invalid: no such host is known here" in result.err
    assert not Path("runs").exists()


def test_what_the_launcher_of_the_ranks_has_to_do_is_refused(
    zrun: Zrun, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    told = zrun("train", "job.yaml", "restarts=2")
    assert told.code == ExitCode.USAGE
    assert (
        "restarts: another launcher started this process (a launcher like torchrun: RANK=1, "
        "WORLD_SIZE=2" in told.err
    )
    assert (
        "--dry-run: another launcher started this process"
        in zrun("train", "job.yaml", "--dry-run").err
    )
    assert "MASTER_ADDR does not name the host of rank 0" in zrun("train", "job.yaml").err
    assert zrun("train", "job.yaml", "--dry-run", "launch=local").code == 0


def test_interrupt(zrun: Zrun, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("zrun.job.load.load_job", interrupted)
    assert zrun("config", "show", "job.yaml").code == ExitCode.INTERRUPTED


def test_check_and_dry_run_show_where_ranks_sit(zrun: Zrun) -> None:
    arguments = ["job.yaml", "parallel.tp=2", "parallel.pp=2", "--slots", "8"]
    for result in (
        zrun("check", *arguments, "--no-import", "--all"),
        zrun("train", *arguments, "--dry-run"),
    ):
        assert result.code == 0, result.err
        shown = result.out + result.err
        assert "parallel: tp 2, pp 2, dp 2, order [tp, dp, pp], allow_cross_node_tp false" in shown
        rows = [line.split() for line in shown.splitlines()]
        header = rows.index(["rank", "host", "GPU", "pp", "dp", "tp", "node", "CPUs"])
        assert [(row[0], *row[3:6]) for row in rows[header + 1 : header + 9]] == [
            (str(rank), str(rank // 4), str(rank // 2 % 2), str(rank % 2)) for rank in range(8)
        ]
        assert ["tensor", "4", "2", "1", "host", "each", "0,", "1"] in rows
        assert ["data", "4", "2", "1", "host", "each", "0,", "2"] in rows
        assert ["pipe", "4", "2", "1", "host", "each", "0,", "4"] in rows


ON_FOUR = """\
name: deep
model:
  call: zrun_core.models.gpt:gpt
  args: {vocab_size: 64, dim: 32, depth: 4, heads: 4, seq_len: 16}
data: {call: "zrun_core.data.text:text", args: {paths: user.py, seq_len: 16}}
steps: 10
batch: {global: 8, micro: 2}
device: cpu
slots: 2
hosts: hostfile
parallel: {pp: 2}
"""


@pytest.mark.thorough
def test_check_of_a_cluster_that_is_not_there(zrun: Zrun, warm: None) -> None:
    """It has GPUs and slots of its own, whatever the job says of the hosts that it will have."""
    Path("deep.yaml").write_text(ON_FOUR)
    result = zrun("check", "deep.yaml", "--simulate", "2x4xV100-32G", "--grid")
    assert result.code == 0, result.err
    rows = [line.split() for line in result.out.splitlines()]
    assert ["data", "2", "4", "1", "host", "each", "0,", "1,", "2,", "3"] in rows
    assert ["pipe", "4", "2", "2", "hosts", "each", "0,", "4"] in rows
    assert ["0", "0-1"] in [row[:2] for row in rows]
    assert ["1", "2-3"] in [row[:2] for row in rows]
    assert "memory: the fullest rank (" in result.out
    assert "% free; activations: traced\n" in result.out
    assert "not checked: the hosts of --simulate 2x4xV100-32G: their software" in result.out
    assert "stage 1  .. F0 B0 -- .. ..\n" in result.out

    report = json.loads(zrun("check", "deep.yaml", "--json", "--simulate", "2x4xV100-32G").out)
    assert report["backend"]["kind"] == "simulated"
    assert report["memory"]["fits"]
    assert [stage["blocks"] for stage in report["memory"]["stages"]] == [[[0, 2]], [[2, 4]]]


@pytest.mark.thorough
def test_estimate_of_divided_inputs(zrun: Zrun, warm: None) -> None:
    Path("deep.yaml").write_text(ON_FOUR.replace("hosts: hostfile\n", ""))
    given = ["estimate", "deep.yaml", "parallel={tp: 2}", "activations.checkpoint=full", "--json"]
    whole, divided, sliced = (
        json.loads(zrun(*given, *more).out)["estimate"]
        for more in (
            [],
            ["activations.partition=true"],
            ["activations.partition=true", "parallel.sequence=true"],
        )
    )
    one_input = 4 * 2 * 16 * 32
    gone = [each["ranks"][0]["peak"]["num_bytes"] for each in (whole, divided)]
    # Slices of four blocks, and the whole input of the one that runs, in place of four inputs.
    assert gone[0] - gone[1] == 4 * one_input // 2 - one_input
    assert not any("activations.partition" in note for note in divided["notes"])
    assert any("activations.partition changes nothing" in note for note in sliced["notes"])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["parallel.tp=8"], 3, "tp group would sit on several hosts (host0 has 4 ranks, "),
        (["parallel.tp=3"], 2, "tp 3 x pp 1 = 3 ranks do not divide the 8 ranks of the hosts"),
        (["-H", "h1:8"], 2, "--simulate says which hosts and devices there are: leave out -H"),
        (["--slots", "2"], 2, "leave out --slots"),
        (["--simulate", "2x4xV10"], 2, "did you mean V100"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_simulated_cluster_refuses_what_hosts_do(
    zrun: Zrun, arguments: list[str], code: int, words: str
) -> None:
    result = zrun("check", "job.yaml", "--no-import", "--simulate", "2x4xV100-32G", *arguments)
    assert result.code == code
    assert words in result.err


def test_check_draws_the_schedule(zrun: Zrun, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["job.yaml", "parallel.pp=2", "--slots", "2", "batch.micro=1", "--no-import"]
    plain = zrun("check", *asked, "batch.global=3", "--grid")
    assert plain.code == 0, plain.err
    assert (
        "schedule: 1f1b, 2 stages, 3 micro-batches per step\n"
        "stage 0  F0 F1 .. .. B0 -- F2 B1 -- .. B2 --\n"
        "stage 1  .. F0 B0 -- F1 B1 -- F2 B2 -- .. ..\n"
    ) in plain.out
    assert "note: parallel.pp" not in plain.out
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = zrun("check", *asked, "batch.global=1", "--grid", "parallel.schedule=gpipe")
    assert "schedule: gpipe, 2 stages, 1 micro-batch per step\n" in coloured.out
    assert "\x1b[36mF0\x1b[0m" in coloured.out
    note = "note: parallel.pp: 1 micro-batch per step for 2 stages: each waits 50% of the time"
    assert note in coloured.out
    both = zrun("check", *asked, "--grid", "--json")
    assert both.code == ExitCode.USAGE
    assert "leave one of them out" in both.err
