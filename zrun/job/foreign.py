"""Files of other tools that are given as a job: what they are, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zrun.job.scalars import write
from zrun_core.errors import JobError

_DEEPSPEED = {
    "zero_optimization",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_clipping",
    "steps_per_print",
}
_TIERS = {"cpu": "host", "nvme": "disk"}


def refuse_script(path: Path) -> None:
    """Refuse a file whose name says that it is no YAML.

    Raises:
        JobError: it is a script, or TOML.
    """
    if path.suffix == ".py":
        raise JobError(
            f"{path} is a script, and a job is a YAML file that names functions of it: a script "
            f"that trains by itself is launched by `zrun run {path}`; `zrun init -o job.yaml` "
            "writes a job"
        )
    if path.suffix == ".toml":
        raise JobError(
            f"{path} is TOML, as torchtitan reads, and a job is YAML: `zrun init -o job.yaml` "
            "writes one, with all keys by --full"
        )


def refuse_foreign(path: Path, value: Any) -> None:
    """Refuse the configuration of another tool, with what a job says in its place.

    Raises:
        JobError: it is one.
    """
    if not isinstance(value, dict) or "data" in value:
        return
    keys = value.keys()
    begin = f"{path} is"
    end = "; `zrun init -o job.yaml` writes a job to put that into"
    if "zero_optimization" in keys or len(_DEEPSPEED & keys) > 1:
        lines = "".join(f"\n  {line}" for line in _of_deepspeed(value))
        raise JobError(f"{begin} a configuration of DeepSpeed; as a job it is:{lines}\n{end[2:]}")
    if {"compute_environment", "distributed_type"} & keys:
        slots = value.get("num_processes", 1)
        precision = value.get("mixed_precision", "no")
        lines = f"\n  slots: {write(slots)}\n  precision: {write(precision)}\n"
        raise JobError(f"{begin} a configuration of accelerate; as a job it is:{lines}{end[2:]}")
    if "base_model" in keys:
        raise JobError(
            f"{begin} a configuration of axolotl, which names weights to tune; a job names "
            f"functions that build the model and the data{end}"
        )
    if {"architectures", "model_type"} & keys:
        raise JobError(
            f"{begin} the configuration of a model: zrun estimate {path} plans it; a job names "
            f"what builds it, such as AutoModelForCausalLM.from_config in a function{end}"
        )


def _of_deepspeed(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a job that say what a configuration of DeepSpeed says."""
    batch = {
        "global": _number(config.get("train_batch_size")),
        "micro": _number(config.get("train_micro_batch_size_per_gpu")),
    }
    batch = {key: value for key, value in batch.items() if value is not None}
    if batch:
        yield f"batch: {write({'global': 'auto', **batch})}"
    zero = _mapping(config, "zero_optimization")
    yield f"zero: {write(zero.get('stage', 0))}"
    for name in ("bf16", "fp16"):
        if _mapping(config, name).get("enabled") not in (None, False):
            yield f"precision: {name}"
    tiers = {
        "optimizer": _TIERS.get(_mapping(zero, "offload_optimizer").get("device", "")),
        "param": _TIERS.get(_mapping(zero, "offload_param").get("device", "")),
    }
    tiers = {key: value for key, value in tiers.items() if value is not None}
    if tiers:
        yield f"offload: {write(tiers)}"
    optim = dict(_of_optimizer(_mapping(config, "optimizer")))
    clip = _number(config.get("gradient_clipping"))
    if clip:
        optim["clip"] = clip
    if optim:
        yield f"optim: {write(optim)}"
    warmup = _number(_mapping(_mapping(config, "scheduler"), "params").get("warmup_num_steps"))
    if warmup:
        yield f"lr: {write({'warmup': warmup})}"
    if "activation_checkpointing" in config:
        yield "activations: full"


def _of_optimizer(optimizer: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(optimizer.get("type"), str):
        yield "name", optimizer["type"].lower()
    params = _mapping(optimizer, "params")
    for key in ("lr", "betas", "eps", "weight_decay"):
        value = params.get(key)
        if isinstance(value, list) or _number(value) is not None:
            yield key, value


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = config.get(key)
    return found if isinstance(found, dict) else {}


def _number(value: Any) -> int | float | None:
    """Return a number; None for what is none, such as "auto"."""
    return value if type(value) in (int, float) else None
