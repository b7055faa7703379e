"""Files of other tools that are given as a job: what they are, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zrun_core.errors import JobError

_DEEPSPEED = {
    "zero_optimization",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_clipping",
    "steps_per_print",
}
_BESIDE_DEEPSPEED = {"optimizer", "scheduler", "fp16", "bf16", "gradient_accumulation_steps"}
_TORCHTITAN = {
    "job",
    "training",
    "parallelism",
    "optimizer",
    "lr_scheduler",
    "activation_checkpoint",
    "metrics",
    "model",
}


def tool_of(value: Mapping[str, Any]) -> str | None:
    """Return DeepSpeed, accelerate, torchtitan or axolotl: whose configuration has such keys.

    None: that of none of them.
    """
    keys = value.keys()
    if "base_model" in keys:
        return "axolotl"
    if {"compute_environment", "distributed_type"} & keys:
        return "accelerate"
    sections = {key for key in _TORCHTITAN & keys if isinstance(value[key], dict)}
    if "training" in sections and len(sections) > 1:
        return "torchtitan"
    own = _DEEPSPEED & keys
    if "zero_optimization" in keys or (own and len(own | (_BESIDE_DEEPSPEED & keys)) > 1):
        return "DeepSpeed"
    return None


def refuse_script(path: Path) -> None:
    """Refuse a file whose name says that it is no YAML.

    Raises:
        JobError: it is a script, or TOML.
    """
    if path.suffix == ".py":
        raise JobError(
            f"{path} is a script, and a job is a YAML file that names functions of it: `zrun run "
            f"{path}` launches a script with its own loop; `zrun init -o job.yaml` writes a job"
        )
    if path.suffix == ".toml":
        raise JobError(
            f"{path} is TOML, as torchtitan reads, and a job is YAML: zrun import {path} -o "
            "job.yaml converts a configuration of torchtitan"
        )


def refuse_foreign(path: Path, value: Any) -> None:
    """Refuse the configuration of another tool, with what a job says in its place.

    Raises:
        JobError: it is one.
    """
    if not isinstance(value, dict) or isinstance(value.get("model"), str):
        return
    if isinstance(value.get("trainer"), dict):
        raise JobError(
            f"{path} is a configuration of Lightning, whose model and loop are classes of yours: "
            "`zrun init -o job.yaml` writes a job, whose keys replace those of trainer"
        )
    if "data" in value:
        return
    tool = tool_of(value)
    if tool is not None:
        raise JobError(
            f"{path} is a configuration of {tool}: zrun import {path} -o job.yaml converts it to a "
            "job, and lists what has no counterpart"
        )
    if {"architectures", "model_type"} & value.keys():
        raise JobError(
            f"{path} is the configuration of a model: zrun estimate {path} plans it; a job names "
            "what builds it, such as AutoModelForCausalLM.from_config in a function; `zrun init "
            "-o job.yaml` writes a job to put that into"
        )
