"""Configurations of others as jobs: what they mean, what is left out, and each mistake."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peer_configs import (
    ACCELERATE_DEEPSPEED,
    ACCELERATE_FSDP,
    AXOLOTL,
    STAGE_0_FP16,
    STAGE_1_BF16,
    STAGE_2_AUTO,
    STAGE_3_BOTH_ON_CPU,
    STAGE_3_ON_NVME,
    TORCHTITAN,
)
from typer.testing import CliRunner

from zrun.cli import app
from zrun.job.document import Document
from zrun.job.load import load_job
from zrun.job.schema import find_key
from zrun.peers import accelerate, axolotl, deepspeed, torchtitan
from zrun.peers.importing import Imported, import_file
from zrun_core.errors import JobError

YOURS = {"model": "train.py:build_model", "data": "train.py:build_data"}
AUTO = "auto: the Trainer fills it in from its arguments; write "

KEYS = [
    (
        STAGE_0_FP16,
        {
            "steps": 1000,
            "batch": 16,
            "precision": {
                "compute": "fp16",
                "loss_scale": {"init": 32768, "window": 500, "hysteresis": 2, "min": 1},
            },
            "zero": 0,
            "optim": {
                "name": "adamw",
                "lr": 0.001,
                "betas": [0.8, 0.999],
                "eps": 1e-08,
                "weight_decay": 3e-07,
                "clip": 1.0,
            },
            "lr": {"schedule": "constant", "warmup": 1000},
            "log": {"every": 2000},
        },
        {
            "zero_optimization.allgather_partitions",
            "zero_optimization.reduce_scatter",
            "zero_optimization.allgather_bucket_size",
            "zero_optimization.reduce_bucket_size",
            "zero_optimization.overlap_comm",
            "zero_optimization.contiguous_gradients",
        },
    ),
    (
        STAGE_1_BF16,
        {
            "steps": 10000,
            "batch": {"global": 4096, "micro": 32},
            "precision": {"compute": "bf16", "reduce": "compute"},
            "zero": 1,
            "optim": {
                "name": "lamb",
                "lr": 0.002,
                "weight_decay": 0.01,
                "args": {"bias_correction": False, "ratio_clamp": [0.01, 0.3]},
            },
            "lr": {"schedule": "linear", "warmup": 500},
            "log": {"every": 100, "to": ["tensorboard"]},
        },
        {"tensorboard.output_path", "tensorboard.job_name", "flops_profiler"},
    ),
    (
        STAGE_2_AUTO,
        {
            "steps": 1000,
            "batch": {"micro": 1},
            "zero": 2,
            "optim": "adamw",
            "lr": "constant",
            "offload": "host",
        },
        {
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "gradient_clipping",
            "fp16.enabled",
            "fp16.loss_scale_window",
            "fp16.initial_scale_power",
            "fp16.hysteresis",
            "fp16.min_loss_scale",
            "optimizer.params.lr",
            "optimizer.params.betas",
            "optimizer.params.eps",
            "optimizer.params.weight_decay",
            "scheduler.params.warmup_min_lr",
            "scheduler.params.warmup_max_lr",
            "scheduler.params.warmup_num_steps",
            "zero_optimization.offload_optimizer.pin_memory",
            "zero_optimization.allgather_partitions",
            "zero_optimization.allgather_bucket_size",
            "zero_optimization.overlap_comm",
            "zero_optimization.reduce_scatter",
            "zero_optimization.reduce_bucket_size",
            "zero_optimization.contiguous_gradients",
        },
    ),
    (
        STAGE_3_BOTH_ON_CPU,
        {
            "steps": 2000,
            "batch": {"global": 64, "micro": 2},
            "precision": "bf16",
            "zero": {"stage": 3, "persist_below": 200000},
            "optim": {"name": "adamw", "lr": 0.0003, "betas": [0.9, 0.95], "clip": 1.0},
            "lr": {"schedule": "cosine", "warmup": 1000, "min_factor": 0.0001},
            "activations": {"checkpoint": "full", "offload": "host"},
            "offload": {"optimizer": "host", "param": "host", "fraction": 0.5},
        },
        {
            "zero_optimization.offload_optimizer.pin_memory",
            "zero_optimization.offload_param.pin_memory",
            "zero_optimization.sub_group_size",
            "zero_optimization.stage3_prefetch_bucket_size",
            "zero_optimization.stage3_max_live_parameters",
            "zero_optimization.stage3_max_reuse_distance",
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            "zero_optimization.zero_hpz_partition_size",
            "zero_optimization.zero_quantized_weights",
            "activation_checkpointing.partition_activations",
        },
    ),
    (
        STAGE_3_ON_NVME,
        {
            "steps": 1000,
            "batch": {"global": 32, "micro": 8},
            "precision": {"compute": "fp16", "loss_scale": {"init": 1024}},
            "zero": {"stage": 3, "shard_group": 8},
            "offload": {"optimizer": "disk", "param": "disk", "dir": "/local_nvme"},
            "log": {"every": 10},
        },
        {
            "fp16.initial_scale_power",
            "zero_optimization.offload_optimizer.buffer_count",
            "zero_optimization.offload_param.max_in_cpu",
            "aio",
            "wall_clock_breakdown",
        },
    ),
]


def imported(path: Path, text: str | dict[str, Any], **options: Any) -> Imported:
    """Import a file with this text, and load the job that comes of it."""
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    found = import_file(path, **options)
    job = path.with_name("job.yaml")
    job.write_text(found.text)
    load_job(job)
    return found


def keys_of(found: Imported) -> dict[str, Any]:
    """The keys of a job that are not yours to write, nor its name."""
    document = Document.parse(found.text, "job.yaml", {})
    value = dict(document.value)
    assert {key: value.pop(key) for key in YOURS} == YOURS
    assert value.pop("name")
    return value


@pytest.mark.parametrize(("config", "keys", "left"), KEYS, ids=["0", "1", "2", "3 cpu", "3 nvme"])
def test_deepspeed(
    tmp_path: Path, config: dict[str, Any], keys: dict[str, Any], left: set[str]
) -> None:
    found = imported(tmp_path / "ds_config.json", config)
    assert keys_of(found) == keys
    assert found.left.keys() == left


def test_each_value_names_the_key_that_means_it(tmp_path: Path) -> None:
    text = imported(tmp_path / "ds_config.json", STAGE_3_BOTH_ON_CPU).text
    head = "# Made by zrun import from ds_config.json, a configuration of DeepSpeed."
    assert text.startswith(f"{head}\nname: ds_config\n")
    assert "\n  stage: 3                      # zero_optimization.stage\n" in text
    persisted = "zero_optimization.stage3_param_persistence_threshold: 100000 x 2 bytes"
    assert f"\n  persist_below: 200000         # {persisted}\n" in text


def test_auto_is_told_with_the_key_to_write(tmp_path: Path) -> None:
    left = imported(tmp_path / "ds_config.json", STAGE_2_AUTO).left
    assert left["optimizer.params.lr"] == f"{AUTO}optim.lr"
    assert left["fp16.enabled"] == f"{AUTO}precision"


def test_accelerate_with_fsdp(tmp_path: Path) -> None:
    found = imported(tmp_path / "fsdp.yaml", ACCELERATE_FSDP)
    assert keys_of(found) == {
        "steps": 1000,
        "batch": {"micro": 1},
        "precision": "bf16",
        "zero": 3,
        "activations": "full",
        "offload": {"optimizer": "host", "param": "host"},
        "slots": 8,
    }
    assert found.left.keys() == {
        "compute_environment",
        "fsdp_config.fsdp_auto_wrap_policy",
        "fsdp_config.fsdp_cpu_ram_efficient_loading",
        "fsdp_config.fsdp_state_dict_type",
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
        "main_training_function",
        "rdzv_backend",
        "same_network",
    }


@pytest.mark.parametrize(
    ("lines", "zero"),
    [
        ("fsdp_sharding_strategy: FULL_SHARD", 3),
        ("fsdp_sharding_strategy: 2", 2),
        ("fsdp_sharding_strategy: NO_SHARD", 0),
        ("fsdp_sharding_strategy: HYBRID_SHARD", {"stage": 3, "shard_group": "node"}),
        ("fsdp_reshard_after_forward: SHARD_GRAD_OP", 2),
        ("fsdp_version: 2\n  fsdp_reshard_after_forward: false", 2),
        ("fsdp_version: 1", 3),
    ],
)
def test_strategies_of_fsdp(tmp_path: Path, lines: str, zero: Any) -> None:
    text = f"distributed_type: FSDP\nfsdp_config:\n  {lines}\n"
    assert keys_of(imported(tmp_path / "fsdp.yaml", text))["zero"] == zero


def test_accelerate_with_a_file_of_deepspeed(tmp_path: Path) -> None:
    ds = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "my_key": 1}
    (tmp_path / "ds.json").write_text(json.dumps({**ds, "train_micro_batch_size_per_gpu": 4}))
    found = imported(tmp_path / "default_config.yaml", ACCELERATE_DEEPSPEED)
    assert keys_of(found) == {
        "steps": 1000,
        "batch": {"micro": 4},
        "precision": "bf16",
        "zero": 3,
        "slots": 8,
    }
    assert "ds.json: zero_optimization.stage" in found.text
    assert found.left.keys() == {
        "compute_environment",
        "num_machines",
        "main_process_ip",
        "main_process_port",
        "deepspeed_config.zero3_init_flag",
        "ds.json: my_key",
    }


def test_a_file_that_is_not_here_is_left_out(tmp_path: Path) -> None:
    found = imported(tmp_path / "default_config.yaml", ACCELERATE_DEEPSPEED)
    assert "ds.json is not here" in found.left["deepspeed_config.deepspeed_config_file"]


def test_torchtitan(tmp_path: Path) -> None:
    found = imported(tmp_path / "llama3_8b.toml", TORCHTITAN)
    assert keys_of(found) == {
        "steps": 1000,
        "batch": {"global": 16, "micro": 1},
        "precision": "bf16",
        "zero": 2,
        "optim": {
            "name": "adamw",
            "lr": 0.0003,
            "betas": [0.9, 0.95],
            "eps": 1e-08,
            "weight_decay": 0.1,
            "clip": 1.0,
        },
        "lr": {"schedule": "linear", "warmup": 200},
        "activations": "selective",
        "checkpoint": {"every": 500, "async": True},
        "parallel": {"tp": 2, "pp": 2, "schedule": "interleaved", "sequence": True},
        "log": {"every": 10, "to": ["tensorboard"]},
    }
    assert found.left.keys() == {
        "job",
        "metrics.save_tb_folder",
        "model",
        "training.seq_len",
        "training.dataset",
        "checkpoint.folder",
        "compile.components",
    }


def test_axolotl_with_a_file_of_deepspeed(tmp_path: Path) -> None:
    folder = tmp_path / "deepspeed_configs"
    folder.mkdir()
    zero1 = {
        "zero_optimization": {"stage": 1, "overlap_comm": True},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    (folder / "zero1.json").write_text(json.dumps(zero1))
    found = imported(tmp_path / "lora.yml", AXOLOTL, ranks=4)
    assert keys_of(found) == {
        "epochs": 3,
        "batch": {"global": 16, "micro": 2},
        "precision": "bf16",
        "zero": 1,
        "optim": {
            "name": "adamw",
            "lr": 0.0002,
            "weight_decay": 0.0,
            "moments": "bf16",
            "clip": 1.0,
        },
        "lr": {"schedule": "cosine", "warmup": 10},
        "activations": "full",
        "log": {
            "every": 1,
            "to": ["wandb"],
            "args": {"wandb": {"project": "llama", "name": "first"}},
        },
    }
    assert found.left.keys() == {
        "base_model",
        "datasets",
        "val_set_size",
        "output_dir",
        "adapter",
        "sequence_len",
        "sample_packing",
        "lora_r",
        "optimizer",
        "flash_attention",
        "saves_per_epoch",
        "special_tokens",
        "zero1.json: zero_optimization.overlap_comm",
        "zero1.json: gradient_clipping",
    }


@pytest.mark.parametrize(
    ("words", "zero"),
    [
        ("[full_shard, auto_wrap, offload]", 3),
        ("shard_grad_op auto_wrap", 2),
        ("[hybrid_shard]", {"stage": 3, "shard_group": "node"}),
    ],
)
def test_fsdp_of_axolotl(tmp_path: Path, words: str, zero: Any) -> None:
    text = f"base_model: a/b\nfsdp: {words}\nfsdp_config:\n  fsdp_use_orig_params: false\n"
    keys = keys_of(imported(tmp_path / "full.yml", text))
    assert keys["zero"] == zero
    assert ("offload" in keys) is ("offload" in words)


@pytest.mark.parametrize(
    ("batch", "ranks", "expected"),
    [
        ({"train_batch_size": 64}, None, 64),
        ({"train_micro_batch_size_per_gpu": 4}, None, {"micro": 4}),
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            None,
            {"global": 8, "micro": 4},
        ),
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            8,
            {"global": 64, "micro": 4},
        ),
        (
            {"train_batch_size": 64, "gradient_accumulation_steps": 2},
            8,
            {"global": 64, "micro": 4},
        ),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, None, 64),
    ],
)
def test_samples_of_a_step(
    tmp_path: Path, batch: dict[str, int], ranks: int | None, expected: Any
) -> None:
    config = {"zero_optimization": {"stage": 1}, **batch}
    assert keys_of(imported(tmp_path / "ds.json", config, ranks=ranks))["batch"] == expected


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"type": "Adam", "params": {"adam_w_mode": False}}, "adam"),
        ({"type": "OneBitAdam", "params": {"freeze_step": 100}}, "adamw"),
        ({"type": "Lion", "params": {"eps": 1e-8}}, "lion"),
        ({"type": "SGD", "params": {"momentum": 0.9}}, {"name": "sgd", "args": {"momentum": 0.9}}),
        ({"type": "Muon"}, None),
    ],
)
def test_optimizers_of_deepspeed(tmp_path: Path, optimizer: Any, expected: Any) -> None:
    config = {"zero_optimization": {"stage": 1}, "optimizer": optimizer}
    found = imported(tmp_path / "ds.json", config)
    assert keys_of(found).get("optim") == expected
    if expected is None:
        assert "cannot update slices of parameters" in found.left["optimizer.type"]


def test_each_unknown_key_is_told_once(tmp_path: Path) -> None:
    config = {
        "zero_optimization": {"stage": 2, "overlap_com": True, "mine": {"a": 1, "b": 2}},
        "gradient_cliping": 1.0,
        "mine": [1, 2],
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    found = CliRunner().invoke(app, ["import", str(path)])
    assert found.exit_code == 0
    unknown = [line for line in found.stderr.splitlines() if "not a key of DeepSpeed" in line]
    assert [line.split()[0] for line in unknown] == [
        "zero_optimization.overlap_com",
        "zero_optimization.mine",
        "gradient_cliping",
        "mine",
    ]
    assert unknown[0].endswith("that is known here; did you mean zero_optimization.overlap_comm?")
    assert unknown[2].endswith("did you mean gradient_clipping?")


STAGE = {"stage": 1}
MISTAKES: list[tuple[str, Any, str]] = [
    ("ds.json", '{"a": 1,}', "ds.json:1:9: not valid JSON:"),
    ("ds.json", '{"bf16": {"a": 1, "a": 2}}', "a is there twice; keep one of them"),
    ("job.toml", "[training\n", "not valid TOML:"),
    ("a.yaml", "a: [1\n", "a.yaml:2:1: not valid YAML:"),
    ("train.py", "import torch", "is a script, and a configuration is JSON, YAML or TOML; a"),
    ("a.yaml", "- 1\n", "holds no mapping of keys"),
    ("a.yaml", "hello: 1\n", "say whose: --from deepspeed | accelerate | torchtitan | axolotl"),
    ("job.yaml", "model: a:b\ndata: a:c\n", "job.yaml is a job already: zrun check "),
    (
        "ds.json",
        {"zero_optimization": {"stage": "two"}},
        'zero_optimization.stage: expected a whole number, found "two"; write for example stage: 2',
    ),
    ("ds.json", {"zero_optimization": True}, "zero_optimization: expected a mapping with stage"),
    (
        "ds.json",
        {"zero_optimization": STAGE, "bf16": {"enabled": 3}},
        "bf16.enabled: expected true or false, found 3; write for example enabled: true",
    ),
    (
        "ds.json",
        {"zero_optimization": STAGE, "bf16": {"enabled": True}, "fp16": {"enabled": True}},
        "bf16.enabled and fp16.enabled are both true; write false for one of them",
    ),
    (
        "ds.json",
        {
            "train_batch_size": 100,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 8,
        },
        "train_batch_size 100 is no multiple of train_micro_batch_size_per_gpu 4 x "
        "gradient_accumulation_steps 8 = 32; write train_batch_size: 96, or other factors",
    ),
    (
        "ds.json",
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        "zero_optimization.offload_param.device",
    ),
    ("ds.json", {"zero_optimization": {"stage": 5}}, "here zero.stage is zero_optimization.stage"),
    (
        "ds.json",
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "gpu"}}},
        'expected cpu, nvme or none, found "gpu"; write cpu',
    ),
    (
        "ds.json",
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
                "offload_param": {"device": "nvme", "nvme_path": "/b"},
            }
        },
        'contradict each other: offload.dir would be both "/a" and "/b"',
    ),
    (
        "a.yaml",
        "distributed_type: MULTI_GPU\nnum_processes: 7\nnum_machines: 2\n",
        "num_processes 7 do not divide over num_machines 2; write num_processes: 6",
    ),
    ("a.yaml", "distributed_type: FSDP\nmixed_precision: int8\n", "expected no, fp16, bf16 or fp8"),
    ("a.yml", "base_model: a/b\nbf16: true\nfp16: true\n", "bf16 and fp16 are both true"),
    ("a.yml", "base_model: a/b\ndeepspeed: x.json\nfsdp: [full_shard]\n", "keep one of them"),
    ("a.yml", "base_model: a/b\nmicro_batch_size: many\n", "expected a whole number"),
    (
        "t.toml",
        "[training]\nlocal_batch_size = 8\nglobal_batch_size = 12\n[optimizer]\nlr = 1e-3\n",
        "global_batch_size 12 is no multiple of training.local_batch_size 8",
    ),
    ("t.toml", "[training]\nsteps = 'ten'\n[optimizer]\nlr = 1e-3\n", "training.steps: expected"),
]


@pytest.mark.parametrize(("name", "text", "message"), MISTAKES)
def test_mistakes_are_one_line_each(tmp_path: Path, name: str, text: Any, message: str) -> None:
    path = tmp_path / name
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    with pytest.raises(JobError) as caught:
        import_file(path)
    told = str(caught.value)
    assert message in told
    assert told.startswith(str(path))
    assert len(told.splitlines()) == 1


def test_all_that_is_wrong_is_told_in_the_words_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 5}, "gradient_clipping": -1}')
    with pytest.raises(JobError) as caught:
        import_file(path)
    head, stage, clip = str(caught.value).splitlines()
    assert head == f"{path}: 2 problems as a job"
    assert stage.endswith("; here zero.stage is zero_optimization.stage")
    assert clip.startswith("optim.clip: expected number > 0 | null, found -1; write for example")
    assert clip.endswith("; here optim.clip is gradient_clipping")


def test_a_scheduler_that_is_left_out_is_told_once(tmp_path: Path) -> None:
    scheduler = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3}}
    config = {"zero_optimization": {"stage": 1}, "scheduler": scheduler}
    left = imported(tmp_path / "ds.json", config).left
    assert left == {"scheduler": "OneCycle has no counterpart: write lr.schedule: train.py:factor"}


def leaves(value: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of each value of a configuration, sections included."""
    for key, item in value.items():
        yield (*above, key)
        if isinstance(item, dict):
            yield from leaves(item, (*above, key))


ODD: list[Any] = [None, "auto", "odd: 1\n", True, -1, 0, 2.5, 10**400, 1e999, [1], [], {"a": 1}]
WHOLE = [STAGE_0_FP16, STAGE_3_BOTH_ON_CPU, tomllib.loads(TORCHTITAN)]
WHOLE += [Document.parse(text, "a.yaml", {}).value for text in (ACCELERATE_FSDP, AXOLOTL)]


@pytest.mark.parametrize("config", WHOLE, ids=range(len(WHOLE)))
def test_no_value_ends_in_a_traceback(tmp_path: Path, config: dict[str, Any]) -> None:
    """Each value in turn is an odd one: what comes is a job, or a message."""
    path = tmp_path / "config.json"
    ends = set()
    for place in leaves(config):
        changed = copy.deepcopy(config)
        section = changed
        for name in place[:-1]:
            section = section[name]
        for odd in ODD:
            section[place[-1]] = odd
            path.write_text(json.dumps(changed))
            try:
                ends.add(import_file(path).text.partition(" ")[0])
            except JobError as error:
                ends.add(str(error).partition(":")[0])
    assert ends == {"#", str(path)}


def test_two_files_that_contradict_each_other(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"fp16": {"enabled": True}}))
    path = tmp_path / "a.yaml"
    path.write_text(ACCELERATE_DEEPSPEED + "mixed_precision: bf16\n")
    with pytest.raises(
        JobError, match=r"mixed_precision and ds.json: fp16.enabled contradict each"
    ):
        import_file(path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"no.json: no such file; give a configuration of DeepSpeed"):
        import_file(tmp_path / "no.json")
    with pytest.raises(JobError, match="is a directory; name the configuration in it"):
        import_file(tmp_path)


def test_more_ranks_than_the_factors_say(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    factors = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    path.write_text(json.dumps({"train_batch_size": 64, **factors}))
    assert import_file(path, ranks=8).num_keys == 2
    with pytest.raises(JobError, match=r"is not .* x ranks 4 = 32; write train_batch_size: 32"):
        import_file(path, ranks=4)


def test_the_tool_may_be_named(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    path.write_text('{"gradient_clipping": 0.5}')
    assert "clip: 0.5" in import_file(path, "deepspeed").text
    with pytest.raises(JobError, match="--from megatron: write one of deepspeed, accelerate"):
        import_file(path, "megatron")


def test_a_job_is_not_replaced(tmp_path: Path) -> None:
    path, job = tmp_path / "ds.json", tmp_path / "job.yaml"
    path.write_text(json.dumps(STAGE_0_FP16))
    words = ["import", str(path), "-o", str(job)]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    assert found.stdout == ""
    assert "left out:\n  zero_optimization.allgather_partitions " in found.stderr
    assert f"next: name your model and data in {job}, then zrun check {job}" in found.stderr
    again = CliRunner().invoke(app, words)
    assert f"{job} exists; choose another name with -o, or replace" in str(again.exception)
    job.write_text("")
    assert CliRunner().invoke(app, [*words, "--force"]).exit_code == 0
    assert load_job(job).config.zero.stage == 0


@pytest.mark.parametrize("table", [deepspeed.LEFT, accelerate.LEFT, torchtitan.LEFT, axolotl.LEFT])
def test_advice_names_keys_of_a_job(table: dict[str, str]) -> None:
    """What a reason tells to write exists."""
    for key, why in table.items():
        for word in why.replace(":", " ").replace(",", " ").split():
            section, dot, _ = word.partition(".")
            known = find_key((section,))
            if dot and known is not None and known.section is not None:
                assert find_key(tuple(word.split("."))) is not None, (key, word)
