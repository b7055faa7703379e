"""What other launchers and trainers call the keys of a job, and what to write here.

accelerate, the Trainer of transformers, Lightning, axolotl, DeepSpeed, torchtitan and Megatron each
have words of their own. Those that mean one of our keys are told with its name; those that mean
something else, with a line to write or a place to read.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zrun.job.problems import KeyPath
from zrun_core.spine.sections.optim import OptimConfig

if TYPE_CHECKING:
    from zrun.job.document import Document

RATE = ("optim", "lr")

# By another name: our key, which takes the same value. A name with dots is one of a section, which
# others call otherwise; of all other sections the last name alone tells.
KEYS = {
    "adam_epsilon": "optim.eps",
    "batch_size": "batch.global",
    "betas": "optim.betas",
    "checkpoint.folder": "checkpoint.dir",
    "checkpoint.interval": "checkpoint.every",
    "checkpoint.keep_latest_k": "checkpoint.keep",
    "checkpoint_dir": "checkpoint.dir",
    "ckpt_path": "resume",
    "clip_grad": "optim.clip",
    "clip_grad_norm": "optim.clip",
    "collate_fn": "data.collate",
    "compile.enable": "compile",
    "dataloader_num_workers": "data.workers",
    "dataset": "data",
    "devices": "slots",
    "dtype": "precision",
    "early_stopping_patience": "eval.stop",
    "eval_every": "eval.every",
    "eval_interval": "eval.every",
    "eval_steps": "eval.every",
    "global_batch_size": "batch.global",
    "gpus": "slots",
    "gpus_per_node": "slots",
    "grad_clip": "optim.clip",
    "gradient_clip_val": "optim.clip",
    "gradient_clipping": "optim.clip",
    "hostfile": "hosts",
    "learning_rate": "optim.lr",
    "local_batch_size": "batch.micro",
    "log_every": "log.every",
    "log_every_n_steps": "log.every",
    "log_freq": "log.every",
    "log_interval": "log.every",
    "logging_steps": "log.every",
    "lr_decay_iters": "lr.decay_steps",
    "lr_decay_style": "lr",
    "lr_scheduler": "lr",
    "lr_scheduler.type": "lr",
    "lr_scheduler_type": "lr",
    "lr_warmup_iters": "lr.warmup",
    "max_epochs": "epochs",
    "max_grad_norm": "optim.clip",
    "max_iters": "steps",
    "max_norm": "optim.clip",
    "max_restarts": "restarts",
    "max_steps": "steps",
    "max_train_steps": "steps",
    "micro_batch_size": "batch.micro",
    "min_lr_factor": "lr.min_factor",
    "nproc_per_node": "slots",
    "num_epochs": "epochs",
    "num_gpus": "slots",
    "num_processes": "slots",
    "num_steps": "steps",
    "num_train_epochs": "epochs",
    "num_train_steps": "steps",
    "num_warmup_steps": "lr.warmup",
    "num_workers": "data.workers",
    "optimizer": "optim",
    "optimizer.eps": "optim.eps",
    "optimizer.lr": "optim.lr",
    "optimizer.name": "optim.name",
    "optimizer.params.betas": "optim.betas",
    "optimizer.params.eps": "optim.eps",
    "optimizer.params.lr": "optim.lr",
    "optimizer.params.weight_decay": "optim.weight_decay",
    "optimizer.type": "optim.name",
    "optimizer.weight_decay": "optim.weight_decay",
    "per_device_train_batch_size": "batch.micro",
    "pipeline_model_parallel_size": "parallel.pp",
    "pipeline_parallel_degree": "parallel.pp",
    "pp": "parallel.pp",
    "resume_from_checkpoint": "resume",
    "save_every": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "scheduler": "lr",
    "sequence_parallel": "parallel.sequence",
    "steps_per_print": "log.every",
    "tensor_model_parallel_size": "parallel.tp",
    "tensor_parallel_degree": "parallel.tp",
    "torch_compile": "compile",
    "tp": "parallel.tp",
    "train_batch_size": "batch.global",
    "train_dataset": "data",
    "train_iters": "steps",
    "train_micro_batch_size_per_gpu": "batch.micro",
    "train_steps": "steps",
    "trainer.precision": "precision",
    "training.seed": "seed",
    "training.steps": "steps",
    "training_steps": "steps",
    "val_check_interval": "eval.every",
    "warmup": "lr.warmup",
    "warmup_num_steps": "lr.warmup",
    "warmup_steps": "lr.warmup",
    "weight_decay": "optim.weight_decay",
    "zero_stage": "zero",
}

_TRACKERS = ("csv", "mlflow", "prometheus", "tensorboard", "trackio", "wandb")
# Of a key of ours: what others write for a value of it.
_WORDS: dict[str, dict[str, Any]] = {
    "activations": {"full": "full", "selective": "selective", "none": "none"},
    "compile": {"inductor": True},
    "device": {"auto": "auto", "cpu": "cpu", "cuda": "cuda", "gpu": "cuda"},
    "log.to": {name: [name] for name in _TRACKERS},
    "offload": {"cpu": "host", "nvme": "disk"},
    "offload.param": {"cpu": "host", "nvme": "disk"},
    "precision": {
        **dict.fromkeys(("bf16", "bfloat16", "bf16_mixed"), "bf16"),
        **dict.fromkeys(("fp16", "float16", "16", "16_mixed"), "fp16"),
        **dict.fromkeys(("fp32", "float32", "32", "32_true", "no"), "fp32"),
    },
    "zero": {
        **dict.fromkeys(("0", "ddp", "multi_gpu", "no", "no_shard", "deepspeed_stage_0"), 0),
        **dict.fromkeys(("1", "deepspeed_stage_1"), 1),
        **dict.fromkeys(("2", "shard_grad_op", "deepspeed_stage_2"), 2),
        **dict.fromkeys(("3", "fsdp", "fsdp2", "full_shard", "deepspeed_stage_3"), 3),
        "hybrid_shard": {"stage": 3, "shard_group": "node"},
    },
}
# Of sections of others: our keys and sections that those inside may mean; None: any.
_SECTIONS: dict[str, tuple[str, ...] | None] = {
    "activation_checkpoint": ("activations",),
    "bf16": ("precision",),
    "checkpoint": ("checkpoint",),
    "fp16": ("precision",),
    "fsdp_config": ("zero",),
    "lr_scheduler": ("lr",),
    "metrics": ("log",),
    "optimizer": ("optim",),
    "parallelism": ("parallel",),
    "scheduler": ("lr",),
    "trainer": None,
    "training": None,
    "zero_optimization": ("offload", "zero"),
}
_OFF = ("false", "none", "null", "no", "0")
# Inside a section of others: what says whether it is on, and how.
_CHOICES = ("enabled", "enable", "stage", "device", "mode")

_RECOMPUTE = ("activations", "full")
_BETAS = ("optim.betas", [0.9, 0.95])
_TRACKER = ("log.to", ["wandb"])
# By another name: a key of ours, and a value of it that does this.
VALUES: dict[str, tuple[str, Any]] = {
    "accelerator": ("device", "cuda"),
    "activation_checkpoint": _RECOMPUTE,
    "activation_checkpoint.mode": _RECOMPUTE,
    "activation_checkpointing": _RECOMPUTE,
    "adam_beta1": _BETAS,
    "adam_beta2": _BETAS,
    "beta1": _BETAS,
    "beta2": _BETAS,
    "bf16": ("precision", "bf16"),
    "bf16.enabled": ("precision", "bf16"),
    "checkpoint.enable": ("checkpoint.every", 500),
    "cpu_offload": ("offload", "host"),
    "distributed_type": ("zero", 3),
    "data_parallel_shard_degree": ("zero", 3),
    "dynamo_backend": ("compile", True),
    "early_stopping": ("eval.stop", 3),
    "enable_tensorboard": ("log.to", ["tensorboard"]),
    "enable_wandb": _TRACKER,
    "fp16": ("precision", "fp16"),
    "fp16.enabled": ("precision", "fp16"),
    "fsdp": ("zero", 3),
    "fsdp_activation_checkpointing": _RECOMPUTE,
    "fsdp_config": ("zero", 3),
    "fsdp_sharding_strategy": ("zero", 3),
    "gradient_checkpointing": _RECOMPUTE,
    "load_best_model_at_end": ("checkpoint.best", "loss"),
    "logger": _TRACKER,
    "mixed_precision": ("precision", "bf16"),
    "mixed_precision_param": ("precision", "bf16"),
    "offload_optimizer": ("offload", "host"),
    "offload_optimizer.device": ("offload", "host"),
    "offload_param": ("offload.param", "host"),
    "offload_param.device": ("offload.param", "host"),
    "recompute": _RECOMPUTE,
    "recompute_activations": ("activations", "selective"),
    "recompute_granularity": _RECOMPUTE,
    "report_to": _TRACKER,
    "strategy": ("zero", 3),
    "tensorboard": ("log.to", ["tensorboard"]),
    "torch_dtype": ("precision", "bf16"),
    "use_distributed_optimizer": ("zero", 1),
    "use_gradient_checkpointing": _RECOMPUTE,
    "use_wandb": _TRACKER,
    "wandb": _TRACKER,
    "zero_optimization": ("zero", 2),
    "zero_optimization.offload_optimizer.device": ("offload", "host"),
    "zero_optimization.offload_param.device": ("offload.param", "host"),
    "zero_optimization.stage": ("zero", 2),
}

# By another name: what to do instead.
ADVICE = {
    "accumulate_grad_batches": "micro",
    "adapter": "lora",
    "attn_implementation": "inside",
    "base_model": "model",
    "callbacks": "hooks",
    "config": "job",
    "config_file": "job",
    "context_parallel_degree": "context",
    "context_parallel_size": "context",
    "cuda_visible_devices": "visible",
    "data_path": "data",
    "dataset_name": "data",
    "datasets": "data",
    "deepspeed": "import",
    "deepspeed_config": "import",
    "do_eval": "plain",
    "do_train": "plain",
    "ema": "ema",
    "ema_decay": "ema",
    "enable_profiling": "profile",
    "eval_strategy": "evals",
    "evals_per_epoch": "evals",
    "evaluation_strategy": "evals",
    "expert_model_parallel_size": "experts",
    "expert_parallel_degree": "experts",
    "fast_dev_run": "trial",
    "flash_attention": "inside",
    "flavor": "inside",
    "gradient_accumulation": "micro",
    "gradient_accumulation_steps": "micro",
    "group_by_length": "data",
    "hidden_size": "inside",
    "limit_train_batches": "trial",
    "load": "resume",
    "load_in_4bit": "quantised",
    "load_in_8bit": "quantised",
    "lora": "lora",
    "lora_r": "lora",
    "machine_rank": "meeting",
    "main_process_ip": "meeting",
    "main_process_port": "meeting",
    "master_addr": "meeting",
    "master_port": "meeting",
    "max_length": "length",
    "max_seq_length": "length",
    "min_lr": "least",
    "model_name_or_path": "model",
    "nnodes": "nodes",
    "node_rank": "meeting",
    "num_attention_heads": "inside",
    "num_layers": "inside",
    "num_machines": "nodes",
    "num_nodes": "nodes",
    "output_dir": "folder",
    "overfit_batches": "trial",
    "peft_config": "lora",
    "profiler": "profile",
    "rdzv_backend": "meeting",
    "rdzv_conf": "meeting",
    "rdzv_endpoint": "meeting",
    "rdzv_id": "meeting",
    "sample_packing": "data",
    "save": "saves",
    "save_strategy": "saves",
    "saves_per_epoch": "saves",
    "seq_len": "length",
    "seq_length": "length",
    "sequence_len": "length",
    "sequence_length": "length",
    "standalone": "meeting",
    "train_file": "data",
    "use_flash_attn": "inside",
    "val_set_size": "evals",
    "wandb_entity": "tracker",
    "wandb_name": "tracker",
    "wandb_project": "tracker",
    "warmup_ratio": "ratio",
}
TEXTS = {
    "context": "context parallelism is parallel.sequence, with tp: write parallel: "
    "{tp: 2, sequence: true}",
    "data": "a function of yours returns the samples, tokenised and packed: write data: "
    "train.py:build_data",
    "ema": "keep averages in a hook: write hooks: {on_step: hooks.py:on_step}",
    "evals": "an evaluation has its own dataset, and runs every N steps: write eval: "
    "{data: train.py:build_eval, every: 500}",
    "experts": "tp divides experts with their layers: write parallel: {tp: 2}",
    "folder": "a run has a folder of its own below runs/: give --run-dir, or write checkpoint: "
    "{dir: ...} for checkpoints alone",
    "hooks": "calls of yours between steps are hooks: write hooks: {on_step: hooks.py:on_step}",
    "import": "zrun import FILE -o job.yaml converts such a configuration; for its stage alone "
    "write zero: 2",
    "inside": "pass it to the function that builds your model: write model: "
    "{call: train.py:build_model, args: {...}}",
    "job": "a job is named without an option: write zrun train job.yaml; zrun import FILE -o "
    "job.yaml makes one of a configuration of DeepSpeed, accelerate, torchtitan or axolotl",
    "least": "it is a fraction of optim.lr: write lr: {schedule: cosine, min_factor: 0.1}",
    "length": "pass it to your dataset: write data: {call: ..., args: {...}}",
    "lora": "your factory adds the adapters, for example with peft: write model: "
    "train.py:build_model",
    "meeting": "leave it out: ranks find each other; for several hosts, one command with "
    "--hosts hosts.txt starts them all",
    "micro": "gradient accumulation follows from the batch sizes: write batch: "
    "{global: 64, micro: 4}",
    "model": "name what builds your model, such as AutoModelForCausalLM.from_config in a function: "
    "write model: train.py:build_model",
    "nodes": "leave it out for one host; for more, name them with --hosts hosts.txt, or hosts: "
    "hosts.txt in a job; under Slurm they are those of the allocation",
    "plain": "leave it out: a job trains, and evaluates where it has eval: {data: "
    "train.py:build_eval, every: 500}",
    "profile": "write profile: [10, 12] for the trace of these steps, or zrun profile RUN while it "
    "trains",
    "quantised": "weights are trained in fp32, bf16 or fp16: write precision: bf16",
    "ratio": "warm-up is counted in steps: write lr: {warmup: 100}",
    "resume": "write --resume auto, or --resume PATH for a step of another run",
    "saves": "saves are counted in steps: write checkpoint: {every: 500}, and dir: ... for a "
    "folder of their own",
    "tracker": "pass it to the tracker: write log: {to: [wandb], args: {wandb: {project: NAME}}}",
    "trial": "a trial of few steps saves nothing: write zrun train job.yaml --smoke 20",
    "visible": "set it in the shell: write CUDA_VISIBLE_DEVICES=0,1 zrun train job.yaml",
}


_EVALUATES = (
    "evaluations are a part of training: write eval: {data: train.py:build_eval, every: 500}"
)
# Commands of others: what to write.
COMMANDS = {
    "convert": "write zrun import FILE -o job.yaml",
    "deepspeed": "write zrun run --slots 2 train.py for a script, or zrun train job.yaml",
    "env": "write zrun doctor",
    "eval": _EVALUATES,
    "evaluate": _EVALUATES,
    "estimate-memory": "write zrun estimate FILE, a job or the config.json of a model, or a size "
    "in its place, such as 8B",
    "export": "write zrun ckpt export RUN OUT",
    "fit": "write zrun train job.yaml; zrun init writes a job to start from",
    "help": "write zrun --help",
    "launch": "write zrun run --slots 2 train.py for a script, or zrun train job.yaml",
    "list": "write zrun ps",
    "plan": "write zrun estimate job.yaml",
    "resume": "write zrun train job.yaml --resume auto",
    "status": "write zrun ps",
    "test": f"write zrun check job.yaml to test a job and its hosts; {_EVALUATES}",
    "torchrun": "write zrun run --slots 2 train.py",
    "version": "write zrun --version",
    "validate": f"write zrun check job.yaml to validate a job; {_EVALUATES}",
}
# Short options of others, which mean one thing here and another there.
SHORT = {
    **dict.fromkeys(
        ("-n", "-np", "-N"),
        "write --slots N for ranks on each host, or --nodes N for the first N hosts",
    ),
    "-c": TEXTS["job"],
    "-f": TEXTS["job"],
}


def command_called(words: Sequence[str]) -> str | None:
    """Return what to write for a command line whose first word is no command; None: it is unclear.

    That is a command of others, or the script, the job or the options stand where it belongs.
    """
    first = words[0] if words else ""
    if first in COMMANDS:
        return f"{first}: there is no such command; {COMMANDS[first]}"
    named = first if not first.startswith("-") else words[-1]
    for command, suffixes in (("run", (".py",)), ("train", (".yaml", ".yml"))):
        if named.endswith(suffixes):
            return f"a command comes first: write zrun {command} {shlex.join(words)}"
    return None


def key_called(name: str) -> KeyPath | None:
    """Return our key that others probably call `name`, which may have dots; None: there is none.

    The last name alone may tell, whatever section it is of: good for a hint. `key_meant` is sure.
    """
    key = _found(KEYS, name)
    return None if key is None else tuple(key.split("."))


def key_meant(name: str) -> KeyPath | None:
    """Return our key that others mean by `name` beyond doubt; None: there is none.

    It is the whole name, or is in a section of theirs that is about this key: `model.dtype` and
    `scheduler.num_steps` are neither the job's precision nor its length.
    """
    section, dot, below = _plain(name).partition(".")
    key = KEYS.get(_plain(name))
    if key is None and dot and section in _SECTIONS:
        ours = _SECTIONS[section]
        key = KEYS.get(below.removeprefix("params."))  # DeepSpeed's: scheduler.params
        if key is not None and ours is not None and key.partition(".")[0] not in ours:
            key = None
    return None if key is None else tuple(key.split("."))


@dataclass(frozen=True)
class OurValue:
    """A key and a value of ours that do what others say by another key.

    Attributes:
        value: to be written; None: nothing, as it is off, here too.
        is_exact: whether it is what the other value means, and not one of several.
    """

    path: KeyPath
    value: Any
    is_exact: bool


def value_called(name: str, given: Any = True) -> OurValue | None:
    """Return our key, and a value of it, that do what others call `name`; None: there are none.

    Args:
        name: which may have dots.
        given: the value that others give it.
    """
    found = _found(VALUES, name)
    if found is None:
        return None
    key, example = found
    words = _WORDS.get(key, {})
    word = _word(given)
    if word in words:  # an offload beside it is a key of its own
        return OurValue(tuple(key.split(".")), words[word], "offload" not in str(given))
    if word in _OFF:
        return OurValue(tuple(key.split(".")), None, True)
    return OurValue(tuple(key.split(".")), example, key in _WORDS and word in ("true", "1"))


def advice(name: str) -> str | None:
    """Return what to do in place of a key that others call `name`, if no key of ours does it."""
    word = _found(ADVICE, name)
    return None if word is None else TEXTS[word]


def is_section(name: str) -> bool:
    """Return whether others have a section of this name, whose keys are to be told one by one."""
    return _plain(name) in _SECTIONS


def is_known(name: str) -> bool:
    """Return whether others have a key of this name, which may have dots."""
    return any(_found(table, name) is not None for table in (KEYS, VALUES, ADVICE))


def is_rate(path: KeyPath, value: Any) -> bool:
    """Return whether a value of `lr`, the schedule, is meant for `optim.lr`: a number is."""
    return path == ("lr",) and type(value) in (int, float)


def move_rate(document: Document) -> None:
    """Read `lr: 0.001` as `optim: {lr: 0.001}`, where nothing else gives the rate."""
    job = document.value
    if not isinstance(job, dict) or not is_rate(("lr",), job.get("lr")):
        return
    optim = OptimConfig.expand(job.get("optim", {}))
    if not isinstance(optim, dict) or "lr" in optim:
        return  # refused: it is no schedule
    origin = document.origin(("lr",))
    job["optim"] = {**optim, "lr": job.pop("lr")}
    document.keys.setdefault(("optim",), origin)
    document.values.setdefault(("optim",), origin)
    document.place(RATE, origin)


def _found(table: Mapping[str, Any], name: str) -> Any:
    parts = _plain(name).split(".")
    names = [".".join(parts[number:]) for number in range(len(parts))]
    return next((table[each] for each in names if each in table), None)


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _word(given: Any) -> str:
    """Return the one word of a value that says what is wanted; empty: it is a section without."""
    if isinstance(given, dict):
        given = next((given[name] for name in _CHOICES if name in given), "")
    if isinstance(given, list):
        given = given[0] if given else None
    words = _plain("null" if given is None else str(given)).removeprefix("torch.").split()
    return words[0].removesuffix("_offload") if words else ""
