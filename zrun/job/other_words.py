"""What other launchers and trainers call the keys of a job, and what to write here.

accelerate, the Trainer of transformers, Lightning, axolotl, DeepSpeed, torchtitan and Megatron each
have words of their own. Those that mean one of our keys are told with its name; those that mean
something else, with a line to write or a place to read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zrun.job.problems import KeyPath
from zrun_core.spine.sections.optim import OptimConfig

if TYPE_CHECKING:
    from zrun.job.document import Document

RATE = ("optim", "lr")

# By another name: our key, which takes the same value.
KEYS = {
    "adam_epsilon": "optim.eps",
    "batch_size": "batch.global",
    "checkpoint_dir": "checkpoint.dir",
    "clip_grad": "optim.clip",
    "clip_grad_norm": "optim.clip",
    "collate_fn": "data.collate",
    "dataloader_num_workers": "data.workers",
    "dataset": "data",
    "devices": "slots",
    "dtype": "precision",
    "eval_every": "eval.every",
    "eval_interval": "eval.every",
    "eval_steps": "eval.every",
    "global_batch_size": "batch.global",
    "gpus": "slots",
    "grad_clip": "optim.clip",
    "gradient_clip_val": "optim.clip",
    "gradient_clipping": "optim.clip",
    "hostfile": "hosts",
    "learning_rate": "optim.lr",
    "local_batch_size": "batch.micro",
    "log_every": "log.every",
    "log_every_n_steps": "log.every",
    "log_interval": "log.every",
    "logging_steps": "log.every",
    "lr_scheduler": "lr",
    "lr_scheduler_type": "lr",
    "max_epochs": "epochs",
    "max_grad_norm": "optim.clip",
    "max_norm": "optim.clip",
    "max_restarts": "restarts",
    "max_steps": "steps",
    "micro_batch_size": "batch.micro",
    "num_epochs": "epochs",
    "num_gpus": "slots",
    "num_processes": "slots",
    "num_steps": "steps",
    "num_train_epochs": "epochs",
    "num_workers": "data.workers",
    "nproc_per_node": "slots",
    "optimizer": "optim",
    "per_device_train_batch_size": "batch.micro",
    "pipeline_model_parallel_size": "parallel.pp",
    "pipeline_parallel_degree": "parallel.pp",
    "resume_from_checkpoint": "resume",
    "save_every": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "scheduler": "lr",
    "sequence_parallel": "parallel.sequence",
    "tensor_model_parallel_size": "parallel.tp",
    "tensor_parallel_degree": "parallel.tp",
    "torch_compile": "compile",
    "train_batch_size": "batch.global",
    "train_dataset": "data",
    "train_micro_batch_size_per_gpu": "batch.micro",
    "train_steps": "steps",
    "training_steps": "steps",
    "val_check_interval": "eval.every",
    "warmup_steps": "lr.warmup",
    "num_warmup_steps": "lr.warmup",
    "zero_stage": "zero",
}

_RECOMPUTE = ("activations", "full")
_BETAS = ("optim.betas", [0.9, 0.95])
# By another name: a key of ours, and a value of it that does this.
VALUES: dict[str, tuple[str, Any]] = {
    "activation_checkpoint": _RECOMPUTE,
    "activation_checkpointing": _RECOMPUTE,
    "adam_beta1": _BETAS,
    "adam_beta2": _BETAS,
    "beta1": _BETAS,
    "beta2": _BETAS,
    "bf16": ("precision", "bf16"),
    "cpu_offload": ("offload", "host"),
    "deepspeed": ("zero", 3),
    "early_stopping": ("eval.stop", 3),
    "early_stopping_patience": ("eval.stop", 3),
    "fp16": ("precision", "fp16"),
    "fsdp": ("zero", 3),
    "fsdp_config": ("zero", 3),
    "gradient_checkpointing": _RECOMPUTE,
    "mixed_precision": ("precision", "bf16"),
    "offload_optimizer": ("offload", "host"),
    "offload_param": ("offload.param", "host"),
    "recompute": _RECOMPUTE,
    "strategy": ("zero", 3),
    "use_gradient_checkpointing": _RECOMPUTE,
    "zero_optimization": ("zero", 2),
}

# By another name: what to do instead.
ADVICE = {
    "accumulate_grad_batches": "micro",
    "adapter": "lora",
    "base_model": "model",
    "context_parallel_degree": "context",
    "context_parallel_size": "context",
    "ema": "ema",
    "ema_decay": "ema",
    "gradient_accumulation": "micro",
    "gradient_accumulation_steps": "micro",
    "load_in_4bit": "quantised",
    "load_in_8bit": "quantised",
    "lora": "lora",
    "lora_r": "lora",
    "logger": "tracker",
    "max_length": "length",
    "max_seq_length": "length",
    "model_name_or_path": "model",
    "nnodes": "nodes",
    "num_nodes": "nodes",
    "output_dir": "folder",
    "peft_config": "lora",
    "report_to": "tracker",
    "seq_len": "length",
    "seq_length": "length",
    "sequence_len": "length",
    "sequence_length": "length",
    "tensorboard": "tracker",
    "wandb": "tracker",
    "wandb_project": "tracker",
    "warmup_ratio": "ratio",
}
TEXTS = {
    "context": "context parallelism is parallel.sequence, with tp: write parallel: "
    "{tp: 2, sequence: true}",
    "ema": "keep averages in a hook: write hooks: {on_step: hooks.py:on_step}",
    "folder": "a run has a folder of its own below runs/: give --run-dir, or write checkpoint: "
    "{dir: ...} for checkpoints alone",
    "length": "lengths are your data's: write data: {call: ..., args: {...}}",
    "lora": "your factory adds the adapters, for example with peft: write model: "
    "train.py:build_model",
    "micro": "gradient accumulation follows from the batch sizes: write batch: "
    "{global: 64, micro: 4}",
    "model": "name what builds your model, such as AutoModelForCausalLM.from_config in a function: "
    "write model: train.py:build_model",
    "nodes": "hosts come from Slurm, from hosts: hosts.txt, or from --hosts and --nodes",
    "quantised": "weights are trained in fp32, bf16 or fp16: write precision: bf16",
    "ratio": "it is counted in steps: write lr: {warmup: 100}",
    "tracker": "send numbers to a tracker in a hook: write hooks: {on_step: hooks.py:on_step}; "
    "each run also keeps events.jsonl and report.html",
}


def key_called(name: str) -> KeyPath | None:
    """Return our key that others call `name`; None: there is none."""
    key = KEYS.get(_plain(name))
    return None if key is None else tuple(key.split("."))


def value_called(name: str) -> tuple[KeyPath, Any] | None:
    """Return our key, and a value of it, that do what others call `name`; None: there are none."""
    found = VALUES.get(_plain(name))
    return None if found is None else (tuple(found[0].split(".")), found[1])


def advice(name: str) -> str | None:
    """Return what to do in place of a key that others call `name`, if no key of ours does it."""
    word = ADVICE.get(_plain(name))
    return None if word is None else TEXTS[word]


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


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
