"""What a person guesses first: accepted where it is plain, else answered with what to write."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from zrun.cli import COMMANDS as NAMES
from zrun.cli import app
from zrun.flags import with_keys
from zrun.job.load import load_job
from zrun.job.other_words import ADVICE, COMMANDS, KEYS, TEXTS, VALUES
from zrun.job.schema import find_key
from zrun_core.errors import JobError
from zrun_core.hardware.catalogue import NODES, device_named, peak_flops
from zrun_core.hardware.simulated import parse_simulate
from zrun_core.spine.config import JobConfig

JOB = """\
name: toy
model: train.py:build_model
data: train.py:build_data
steps: 10
batch: {global: 8, micro: 4}
eval: {data: train.py:build_data, every: 5}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


ACCEPTED = [
    ("lr=1e-3", "optim.lr", 1e-3),
    ("activations=full", "activations.checkpoint", "full"),
    ("activations=selective", "activations.checkpoint", "selective"),
    ("optim=lion", "optim.name", "lion"),
    ("optim.name=torch.optim.AdamW", "optim.name", "torch.optim.AdamW".rpartition(".")[2]),
    ("precision=bfloat16", "precision.compute", "bf16"),
    ("precision=torch.bfloat16", "precision.compute", "bf16"),
    ("precision=bf16-mixed", "precision.compute", "bf16"),
    ("precision=16", "precision.compute", "fp16"),
    ("precision=16-mixed", "precision.compute", "fp16"),
    ("precision=float32", "precision.compute", "fp32"),
    ("precision=32", "precision.compute", "fp32"),
    ("precision=no", "precision.compute", "fp32"),
    ("precision.compute=float16", "precision.compute", "fp16"),
    ("steps=1e4", "steps", 10_000),
    ("epochs=3", "epochs", 3),
    ("tokens=1000", "tokens", 1000),
]


def value_of(config: JobConfig, key: str) -> Any:
    found: Any = config
    for name in key.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize(("override", "key", "value"), ACCEPTED)
def test_what_is_plain_is_taken(job: Path, override: str, key: str, value: Any) -> None:
    assert value_of(load_job(job, [override]).config, key) == value


def test_a_rate_in_the_file_is_one_too(job: Path) -> None:
    job.write_text(JOB + "lr: 3e-4\noptim: adamw\n")
    loaded = load_job(job)
    assert loaded.config.optim.lr == 3e-4
    assert loaded.config.lr.schedule == "constant"
    assert str(loaded.origins["optim.lr"]) == f"{job}:7:5"
    job.write_text(JOB + "lr: 3e-4\noptim: {lr: 1e-3}\n")
    with pytest.raises(JobError, match="lr: expected constant"):
        load_job(job)


def test_a_schedule_stays_where_a_rate_is_given(job: Path) -> None:
    job.write_text(JOB + "lr: cosine\n")
    config = load_job(job, ["lr=1e-4"]).config
    assert (config.lr.schedule, config.optim.lr) == ("cosine", 1e-4)


def test_of_two_lengths_on_the_command_line_none_is_left_out(job: Path) -> None:
    with pytest.raises(JobError, match="exactly one of steps, tokens, epochs"):
        load_job(job, ["steps=5", "epochs=1"])


@pytest.mark.parametrize("name", sorted(set(KEYS) - {"compile.enable"}))  # compile is a key here
def test_each_key_of_others_is_one_of_ours(job: Path, name: str) -> None:
    key = find_key(tuple(KEYS[name].split(".")))
    assert key is not None
    with pytest.raises(JobError, match=f"{name}: unknown key; did you mean") as caught:
        load_job(job, [f"{name}=1"])
    written = shlex.split(str(caught.value).partition("? write ")[2].removeprefix("for example "))
    assert written[0].startswith(f"{key}=")
    problem = ""
    try:
        load_job(job, written)
    except JobError as error:
        problem = str(error)
    assert "expected" not in problem  # keys that need others may say so


@pytest.mark.parametrize("name", sorted(VALUES))
@pytest.mark.parametrize("below", ["", "optim."])
def test_what_is_to_be_written_is_right(job: Path, name: str, below: str) -> None:
    with pytest.raises(JobError, match="unknown key; write ") as caught:
        load_job(job, [f"{below}{name}=1"])
    (written,) = shlex.split(
        str(caught.value).partition("; write ")[2].removeprefix("for example ")
    )
    load_job(job, ["zero=3", written])
    job.write_text(JOB + f"{name}: 1\n")
    with pytest.raises(JobError, match="unknown key; write ") as caught:
        load_job(job)
    line = str(caught.value).partition("; write ")[2].removeprefix("for example ")
    kept = JOB if not line.startswith("eval:") else JOB[: JOB.index("eval:")]
    if line.startswith("eval:"):
        line = line.replace("eval: {", "eval: {data: train.py:build_data, every: 5, ")
    job.write_text(kept + line + "\n")
    load_job(job, ["zero=3"])


def test_each_word_has_one_answer() -> None:
    words = [*KEYS, *VALUES, *ADVICE]
    assert len(set(words)) == len(words)
    assert not [name for name in words if find_key(tuple(name.split(".")))]
    assert set(ADVICE.values()) == set(TEXTS)


@pytest.mark.parametrize(
    ("line", "written"),
    [
        ("mixed_precision: 'no'", "write precision: fp32"),
        ("mixed_precision: fp8", "write for example precision: bf16"),
        ("strategy: ddp", "write zero: 0"),
        ("strategy: deepspeed_stage_2_offload", "write for example zero: 2"),
        ("fsdp: hybrid_shard auto_wrap", "write zero: {stage: 3, shard_group: node}"),
        ("fsdp: [full_shard, auto_wrap]", "write zero: 3"),
        ("fp16: false", "leave it out: without precision it is off"),
        ("bf16: {enabled: false}", "leave it out: without precision it is off"),
        ("gradient_checkpointing: false", "leave it out: without activations it is off"),
        ("report_to: tensorboard", "write log: {to: [tensorboard]}"),
        ("report_to: none", "leave it out: without log.to it is off"),
        ("devices: -1", "write for example slots: 8"),
        ("val_check_interval: 0.25", "write for example eval: {every: 500}"),
        ("lr_scheduler_type: cosine_with_restarts", "write for example lr: {schedule: cosine"),
        ("optimizer: adamw_8bit", "adamw_8bit quantises or pages moments: write adamw or lion"),
        ("trainer: {max_steps: 5, odd: 1}", "trainer.max_steps: unknown key; did you mean"),
    ],
)
def test_the_answer_has_the_value_that_others_gave(job: Path, line: str, written: str) -> None:
    job.write_text(JOB + line + "\n")
    with pytest.raises(JobError) as caught:
        load_job(job)
    assert written in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_commands_of_others_are_answered(name: str) -> None:
    assert name not in NAMES
    found = CliRunner().invoke(app, [name, "x"])
    assert str(found.exception) == f"{name}: there is no such command; {COMMANDS[name]}"


@pytest.mark.parametrize("name", sorted(ADVICE))
def test_what_is_no_key_is_answered(job: Path, name: str) -> None:
    with pytest.raises(JobError) as caught:
        load_job(job, [f"{name}=1"])
    assert str(caught.value).endswith(f"unknown key; {TEXTS[ADVICE[name]]}")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--steps", "100"], ["steps=100"]),
        (["--steps=100"], ["steps=100"]),
        (["--optim.lr", "1e-3", "zero=3"], ["zero=3", "optim.lr=1e-3"]),
        (["--learning-rate", "1e-3"], ["optim.lr=1e-3"]),
        (["--nproc-per-node", "2"], ["slots=2"]),
        (["--nproc_per_node=2"], ["slots=2"]),
        (["--max-steps", "7"], ["steps=7"]),
        (["--compile", "zero=3"], ["zero=3", "compile=true"]),
        (["--compile=false"], ["compile=false"]),
        (["--", "--steps", "100"], ["--", "--steps", "100"]),
        (["--fooo", "100"], ["--fooo", "100"]),
        (["--training.warmup_steps", "5"], ["lr.warmup=5"]),
        (["--trainer.max-steps=5"], ["steps=5"]),
        (["--optimizer.learning_rate=1e-3"], ["optim.lr=1e-3"]),
        (["--scheduler.params.warmup_num_steps=5"], ["lr.warmup=5"]),
        (["--metrics.log_freq=5"], ["log.every=5"]),
        (["--optimizer.params.lr=1e-3"], ["optim.lr=1e-3"]),
    ],
)
def test_keys_may_be_written_like_options(job: Path, words: list[str], expected: list[str]) -> None:
    assert with_keys(words, {}) == expected


@pytest.mark.parametrize(
    ("words", "written"),
    [
        (["--eval.max_steps", "10"], "steps=10"),
        (["--sampler.num_steps=50"], "steps=50"),
        (["--val.batch_size", "4"], "batch.global=4"),
        (["--critic.weight_decay", "0.1"], "optim.weight_decay=0.1"),
        (["--teacher.learning_rate=1e-3"], "optim.lr=1e-3"),
        (["--model.dtype", "bf16"], "precision=bf16"),
        (["--model.torch_compile"], "compile=VALUE"),
        (["--trainer.model.dtype", "bf16"], "precision=bf16"),
        (["--my.training.steps", "5"], "steps=5"),
        (["--scheduler.num_steps", "50"], "steps=50"),
        (["--optimizer.dtype=bf16"], "precision=bf16"),
        (["--checkpoint.num_workers", "4"], "data.workers=4"),
    ],
)
def test_options_of_other_sections_are_told_and_not_taken(
    job: Path, words: list[str], written: str
) -> None:
    name = words[0].partition("=")[0]
    key = written.partition("=")[0]
    told = f"{name}: there is no such option; if the job's {key} is meant, write {written}"
    with pytest.raises(JobError) as caught:
        with_keys([str(job), *words], {})
    assert str(caught.value) == told
    found = CliRunner().invoke(app, ["run", "--dry-run", *words, "train.py"])
    assert str(found.exception) == told


def test_they_may_stand_anywhere_on_the_command_line(job: Path) -> None:
    found = CliRunner().invoke(app, ["config", "show", "--steps", "77", str(job), "--lr", "0.5"])
    assert found.exit_code == 0, found.output
    assert "steps: 77" in found.output
    assert "  lr: 0.5" in found.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps"], "--steps takes a value: write steps=VALUE"),
        (["--wandb", "x"], "--wandb: there is no such option; write for example 'log.to=[wandb]'"),
        (["--nnodes", "2"], "--nnodes: there is no such option; leave it out for one host"),
    ],
)
def test_options_that_are_none_are_answered(job: Path, words: list[str], message: str) -> None:
    found = CliRunner().invoke(app, ["config", "show", str(job), *words])
    assert isinstance(found.exception, JobError)
    assert message in str(found.exception)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["estimate", "meta-llama/Llama-3.1-8B"], "is not a file; for a model of the Hub give its"),
        (["estimate", "7B", "--gpu", "3080"], "did you mean 3090?"),
        (["estimate", "7B", "--gpu", "RTX 4080"], "did you mean 4090?"),
        (["estimate", "7B", "--gpu", "my-gpu"], "unknown device 'my-gpu': There are"),
        (["estimate", "7B", "--gpu", "gfx942"], "for another one write its numbers"),
        (["estimate", "7B", "--gpu", "4x4090"], "--simulate takes hosts and devices"),
        (["init", "--for", "lightning"], "--for lightning: write torch, for a plain nn.Module"),
        (["topo", "--simulate", "8xH10"], "did you mean H100-80G?"),
        (["topo", "--simulate", "8xCPU"], "CPUs have no links to show"),
        (["topo", "--simulate", "no/such.txt"], "a description of a machine is wanted"),
    ],
)
def test_what_commands_do_not_know_is_answered(words: list[str], message: str) -> None:
    found = CliRunner().invoke(app, words)
    assert isinstance(found.exception, JobError)
    assert message in str(found.exception)


@pytest.mark.parametrize("name", ["3090", "rtx-5090", "A10G", "RTX_A6000", "L4", "t4", "A40"])
def test_common_boards_are_known(name: str) -> None:
    device = device_named(name)
    assert device.name in NODES
    assert peak_flops(f"NVIDIA {device.name}", "fp16") == device.peak["fp16"]


def test_what_is_told_of_other_boards_is_taken() -> None:
    with pytest.raises(JobError, match="such as") as caught:
        device_named("4080")
    own = parse_simulate(str(caught.value).rpartition("such as ")[2])
    assert own.device.bandwidth == 717e9


@pytest.mark.parametrize("words", [["-h"], ["train", "-h"], ["ckpt", "ls", "-h"]])
def test_help_has_a_short_option(words: list[str]) -> None:
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0
    assert "Usage" in found.output


def test_what_follows_a_script_stays_its_own_where_it_is_said(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    line = ["run", "--dry-run", "--", str(script), "--nproc-per-node", "2"]
    found = CliRunner().invoke(app, line)
    assert found.exit_code == 0, found.output
    assert "--nproc-per-node 2" in found.output


def test_topo_takes_clusters_in_the_words_of_the_others() -> None:
    found = CliRunner().invoke(app, ["topo", "--simulate", "2x8xH100-80G", "--json"])
    assert found.exit_code == 0, found.output
    hosts = json.loads(found.output)["hosts"]
    assert len(hosts) == 2
    assert {len(host["gpus"]) for host in hosts} == {8}
    found = CliRunner().invoke(app, ["topo", "--simulate", "8xH100-80G"])
    assert "NV18" in found.output
    found = CliRunner().invoke(app, ["topo", "--simulate", "4x4090"])
    assert "SYS" in found.output


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("train.py", "import torch\n", "is a script, and a job is a YAML file"),
        (
            "job.toml",
            "[training]\nsteps = 10\n",
            "job.toml -o job.yaml converts a configuration of torchtitan",
        ),
        (
            "default_config.yaml",
            "compute_environment: LOCAL_MACHINE\nnum_processes: 8\nmixed_precision: bf16\n",
            "default_config.yaml -o job.yaml converts it to a job, and lists what has no",
        ),
        (
            "lora.yaml",
            "base_model: x/y\nsequence_len: 2048\n",
            "is a configuration of axolotl: zrun import",
        ),
        ("config.json", '{"model_type": "llama"}', "is the configuration of a model: zrun est"),
        (
            "odd.json",
            '{"zero_optimization": 3, "optimizer": []}',
            "is a configuration of DeepSpeed: zrun import",
        ),
        ("ds.json", '{"train_batch_size": 8, "fp16": {}}', "is a configuration of DeepSpeed"),
    ],
)
def test_files_of_others_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(JobError) as caught:
        load_job(path)
    assert message in str(caught.value)
