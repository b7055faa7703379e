"""The configuration of DeepSpeed, `ds_config.json`, as keys of a job."""

from __future__ import annotations

from typing import Final

from zrun.peers.batches import put_batch
from zrun.peers.source import Source
from zrun_core.spine.sections.optimizer_args import why_not_sharded

TIERS: Final = {"cpu": "host", "nvme": "disk", "none": "device"}
_ZERO = "zero_optimization"
_PINNED = "host memory of copies is pinned wherever the driver allows it"
_SHOWN = "the panel, `zrun top` and report.html always show it"
_UNITS = "a unit is gathered and reduced whole: zero.bucket bounds its bytes"
_AHEAD = "zero.prefetch says how many units are gathered ahead, and each is freed after its use"
_QUANTIZED = "zrun sends no quantised parameters or gradients"
_DISK = "reads and writes of a disk choose their own sizes and depth"
_EXPORT = "a save has whole tensors at every stage, and `zrun ckpt export` writes them"
_RECOMPUTE = "recomputed inputs lie in memory of their own at any rate"

# Keys without a counterpart, each with why.
LEFT: Final = {
    f"{_ZERO}.allgather_partitions": "parameters are always gathered unit by unit",
    f"{_ZERO}.allgather_bucket_size": _UNITS,
    f"{_ZERO}.reduce_scatter": "gradients are always reduced and scattered unit by unit",
    f"{_ZERO}.reduce_bucket_size": _UNITS,
    f"{_ZERO}.overlap_comm": "collectives always overlap computation",
    f"{_ZERO}.contiguous_gradients": "gradients of a unit always lie in one flat buffer",
    f"{_ZERO}.round_robin_gradients": "each rank has an equal part of every unit",
    f"{_ZERO}.sub_group_size": "updates go unit by unit: zero.bucket bounds a unit",
    f"{_ZERO}.stage3_max_live_parameters": _AHEAD,
    f"{_ZERO}.stage3_max_reuse_distance": _AHEAD,
    f"{_ZERO}.stage3_prefetch_bucket_size": _AHEAD,
    f"{_ZERO}.prefetch_bucket_size": _AHEAD,
    f"{_ZERO}.max_live_parameters": _AHEAD,
    f"{_ZERO}.max_reuse_distance": _AHEAD,
    f"{_ZERO}.stage3_model_persistence_threshold": "zero.persist_below counts each parameter alone",
    f"{_ZERO}.stage3_module_granularity_threshold": "name such modules: zero.leaf",
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": _EXPORT,
    f"{_ZERO}.stage3_gather_fp16_weights_on_model_save": _EXPORT,
    f"{_ZERO}.gather_16bit_weights_on_model_save": _EXPORT,
    f"{_ZERO}.ignore_unused_parameters": "parameters without a gradient are always allowed",
    f"{_ZERO}.legacy_stage1": "there is one mechanism for all stages",
    f"{_ZERO}.elastic_checkpoint": "a save resumes on any number of ranks",
    f"{_ZERO}.load_from_fp32_weights": "a resume always reads the fp32 masters",
    f"{_ZERO}.memory_efficient_linear": "torch's own linear is used",
    f"{_ZERO}.cpu_offload_use_pin_memory": _PINNED,
    f"{_ZERO}.zero_quantized_weights": _QUANTIZED,
    f"{_ZERO}.zero_quantized_nontrainable_weights": _QUANTIZED,
    f"{_ZERO}.zero_quantized_gradients": _QUANTIZED,
    f"{_ZERO}.zeropp_loco_param": _QUANTIZED,
    f"{_ZERO}.mics_hierarchical_params_gather": "a group is gathered in one collective",
    f"{_ZERO}.log_trace_cache_warnings": "no order of modules is traced",
    f"{_ZERO}.offload_param.pin_memory": _PINNED,
    f"{_ZERO}.offload_param.buffer_count": "offload.host_memory bounds what waits on the host",
    f"{_ZERO}.offload_param.buffer_size": "offload.host_memory bounds what waits on the host",
    f"{_ZERO}.offload_param.max_in_cpu": "offload.fraction says which part leaves the device",
    f"{_ZERO}.offload_optimizer.pin_memory": _PINNED,
    f"{_ZERO}.offload_optimizer.buffer_count": _DISK,
    f"{_ZERO}.offload_optimizer.fast_init": _DISK,
    f"{_ZERO}.offload_optimizer.pipeline": _DISK,
    f"{_ZERO}.offload_optimizer.pipeline_read": _DISK,
    f"{_ZERO}.offload_optimizer.pipeline_write": _DISK,
    "aio": _DISK,
    "fp16.auto_cast": "inputs stay as your data makes them: cast them in the model",
    "fp16.fp16_master_weights_and_grads": "masters are fp32",
    "fp16.consecutive_hysteresis": "hysteresis always counts overflows in a row",
    "bf16.immediate_grad_update": "gradients are always summed as backward makes them",
    "bf16.check_grad_overflow": "steps that are not finite are always skipped: guards.max_skips",
    "amp": "apex is not used: write precision: fp16, or bf16",
    "prescale_gradients": "losses are weighted before backward: sums never grow with the ranks",
    "gradient_predivide_factor": "losses are weighted before backward: sums never grow with ranks",
    "sparse_gradients": "gradients are reduced in dense buffers",
    "disable_allgather": "parameters are always gathered",
    "fp32_allreduce": "it is the default: precision.reduce: fp32",
    "seq_parallel_communication_data_type": "slices of a sequence have the format of computation",
    "sequence_parallel_size": "with tp, write parallel.sequence: true",
    "zero_allow_untested_optimizer": "any elementwise optimizer is taken",
    "zero_force_ds_cpu_optimizer": "an update on the host runs there by itself",
    "wall_clock_breakdown": _SHOWN,
    "memory_breakdown": _SHOWN,
    "dump_state": "`zrun check --all` prints every value",
    "flops_profiler": _SHOWN,
    "comms_logger": "every run counts bytes of each collective, and compares them with theory",
    "csv_monitor": "write log.to: [csv]",
    "comet": "write a hook: hooks.on_step",
    "checkpoint": "saves are said by checkpoint: {every: ..., dir: ...}",
    "nebula": "write checkpoint: {every: ..., async: true}",
    "elasticity": "write restarts and min_hosts; a save resumes on any number of ranks",
    "autotuning": "`zrun estimate --best` finds the fastest configuration",
    "compression_training": "models are not compressed",
    "data_efficiency": "the order of samples is that of your data",
    "curriculum_learning": "the order of samples is that of your data",
    "data_types.grad_comm_dtype": "write precision.reduce",
    "sparse_attention": "attention is your model's",
    "progressive_layer_drop": "layers are your model's",
    "eigenvalue": "it is for quantised training only",
    "quantize_training": "weights are trained in fp32, bf16 or fp16",
    "weight_quantization": "weights are trained in fp32, bf16 or fp16",
    "hybrid_engine": "generation is your code's",
    "pipeline": "stages of a pipeline: parallel.pp",
    "activation_checkpointing.contiguous_memory_optimization": _RECOMPUTE,
    "activation_checkpointing.synchronize_checkpoint_boundary": "nothing waits at borders",
    "activation_checkpointing.profile": "zrun profile",
    "use_data_before_expert_parallelism": "experts are divided by parallel.tp",
    "graph_harvesting": "CUDA graphs are not recorded",
    "optimizer.params.torch_adam": "the update of adamw is one",
    "optimizer.params.fused": "the update of a unit is always fused",
    "optimizer.params.freeze_step": "gradients are not compressed",
    "optimizer.params.cuda_aware": "gradients are not compressed",
    "optimizer.params.comm_backend_name": "gradients are not compressed",
    "optimizer.params.max_grad_norm": "write optim.clip",
    "optimizer.legacy_fusion": "the update of a unit is always fused",
    "scheduler.params.last_batch_iteration": "a run continues with --resume",
}

# Types of `optimizer`; those that compress gradients or update elsewhere have the update of these.
_OPTIMIZERS: Final = {
    "adam": "adamw",  # DeepSpeed's Adam decays like AdamW unless adam_w_mode is false
    "adamw": "adamw",
    "fusedadam": "adamw",
    "deepspeedcpuadam": "adamw",
    "cpuadam": "adamw",
    "onebitadam": "adamw",
    "zerooneadam": "adamw",
    "lamb": "lamb",
    "fusedlamb": "lamb",
    "onebitlamb": "lamb",
    "lion": "lion",
    "fusedlion": "lion",
    "deepspeedcpulion": "lion",
    "sgd": "sgd",
    "adagrad": "Adagrad",
    "deepspeedcpuadagrad": "Adagrad",
    "rmsprop": "RMSprop",
}
_COMPRESSED: Final = ("onebitadam", "zerooneadam", "onebitlamb")
_FORMATS: Final = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "bfp16": "bf16"}
_RATIO_CLAMP: Final = (0.01, 10.0)  # DeepSpeed's Lamb clamps, whether or not the file says so
_WARMUP_STEPS: Final = 1000  # of DeepSpeed's schedulers, unless the file says otherwise
_COSINE_END: Final = 0.0001


def write(source: Source) -> None:
    """Write the keys of a job that a configuration of DeepSpeed means.

    Raises:
        JobError: a value is of a wrong type, or two keys contradict each other.
    """
    source.copy("tensor_parallel.autotp_size", "parallel.tp")
    put_batch(
        source,
        total="train_batch_size",
        micro="train_micro_batch_size_per_gpu",
        accumulation="gradient_accumulation_steps",
    )
    _put_precision(source)
    _put_zero(source)
    _put_optimizer(source)
    clip = source.number("gradient_clipping", "optim.clip")
    if clip:
        source.put("optim.clip", clip, "gradient_clipping")
    _put_scheduler(source)
    _put_activations(source)
    source.copy("steps_per_print", "log.every")
    if source.flag("compile.enabled", "compile"):
        source.put("compile", True, "compile.enabled")
    _put_trackers(source)
    source.leave_the_rest(LEFT)


def _put_precision(source: Source) -> None:
    names = ("bf16", "bfloat16", "fp16")
    enabled = [name for name in names if source.flag(f"{name}.enabled", "precision")]
    if len(enabled) > 1:
        both = " and ".join(f"{source.named(name)}.enabled" for name in enabled)
        raise source.error(f"{both} are both true; write false for one of them")
    if not enabled:
        name = "fp32"
    else:
        name = "fp16" if enabled[0] == "fp16" else "bf16"
        source.put("precision.compute", name, f"{enabled[0]}.enabled")
    _put_loss_scale(source, is_used=name == "fp16")
    _put_reduction(source, name)


def _put_loss_scale(source: Source, *, is_used: bool) -> None:
    """Write the loss scale of fp16; where that is off its keys say nothing."""
    init = "precision.loss_scale.init"
    static = source.number("fp16.loss_scale", init)
    power = source.whole("fp16.initial_scale_power", init)
    rest = {
        "fp16.loss_scale_window": ("precision.loss_scale.window", "whole"),
        "fp16.hysteresis": ("precision.loss_scale.hysteresis", "whole"),
        "fp16.min_loss_scale": ("precision.loss_scale.min", "number"),
    }
    for key, (to, kind) in rest.items():
        value = getattr(source, kind)(key, to)
        if is_used and value is not None:
            source.put(to, value, key)
        elif value is not None and source.raw("fp16.enabled") == "auto":
            source.leave(key, f"with precision: fp16, write {to}")
    if not is_used:
        if power is not None and source.raw("fp16.enabled") == "auto":
            source.leave(
                "fp16.initial_scale_power", f"with precision: fp16, write {init}: 2^{power}"
            )
        return
    if static:
        source.put(init, static, "fp16.loss_scale", "the first scale; it is dynamic afterwards")
        source.leave("fp16.initial_scale_power", "fp16.loss_scale says the first scale")
    elif power is not None:
        if not 0 <= power <= 127:
            raise source.error(
                f"fp16.initial_scale_power: expected 0 to 127, found {power}; write "
                "initial_scale_power: 16"
            )
        source.put(init, 2**power, "fp16.initial_scale_power", f"2^{power}")


def _put_reduction(source: Source, compute: str) -> None:
    for key in ("communication_data_type", "data_types.grad_accum_dtype"):
        found = source.word(key, "precision.reduce")
        if found is None:
            continue
        name = _FORMATS.get(found)
        if name == "fp32":
            source.put("precision.reduce", "fp32", key)
        elif name == compute:
            source.put("precision.reduce", "compute", key)
        else:
            source.leave(key, f"gradients are reduced in fp32, or in {compute}: precision.reduce")


def _put_zero(source: Source) -> None:
    stage = source.whole(f"{_ZERO}.stage", "zero.stage")
    if stage is not None:
        source.put("zero.stage", stage, f"{_ZERO}.stage")
    elif source.section(_ZERO):
        source.put("zero.stage", 0, _ZERO, "DeepSpeed's own")
    _put_tier(source, "offload_optimizer", "offload.optimizer", "cpu_offload")
    _put_tier(source, "offload_param", "offload.param", "cpu_offload_params")
    source.copy(f"{_ZERO}.offload_optimizer.ratio", "offload.fraction", "number")
    _put_persistence(source)
    group = source.whole(f"{_ZERO}.mics_shard_size", "zero.shard_group")
    if group is not None and group > 0:
        source.put("zero.shard_group", group, f"{_ZERO}.mics_shard_size")
    secondary = source.whole(f"{_ZERO}.zero_hpz_partition_size", "zero.shard_group")
    if secondary is not None and secondary > 1:
        source.leave(
            f"{_ZERO}.zero_hpz_partition_size",
            "no second copy of the parameters is kept within a node; zero.shard_group: "
            f"{secondary} gathers there too, and divides the optimizer over {secondary} ranks only",
        )


def _put_tier(source: Source, name: str, to: str, old: str) -> None:
    """Write where a state lives. A tier whose folder is said twice must be in one place."""
    key = f"{_ZERO}.{name}.device"
    device = source.word(key, to)
    if source.flag(f"{_ZERO}.{old}", to) and device is None:
        key, device = f"{_ZERO}.{old}", "cpu"
    folder = source.word(f"{_ZERO}.{name}.nvme_path", "offload.dir")
    if device is None:
        return
    if device not in TIERS:
        raise source.error(f'{key}: expected cpu, nvme or none, found "{device}"; write cpu')
    if TIERS[device] == "device":
        return
    source.put(to, TIERS[device], key)
    if TIERS[device] == "disk" and folder is not None:
        source.put("offload.dir", folder, f"{_ZERO}.{name}.nvme_path")


def _put_persistence(source: Source) -> None:
    keys = ("stage3_param_persistence_threshold", "param_persistence_threshold")
    size = 4 if source.draft.value("precision.compute") in (None, "fp32") else 2
    for name in keys:
        elements = source.whole(f"{_ZERO}.{name}", "zero.persist_below")
        if elements:
            note = f"{elements} x {size} bytes"
            source.put("zero.persist_below", elements * size, f"{_ZERO}.{name}", note)


def _put_optimizer(source: Source) -> None:
    kind = source.word("optimizer.type", "optim.name")
    plain = (kind or "").lower().replace("_", "")
    name = _OPTIMIZERS.get(plain)
    decays = source.flag("optimizer.params.adam_w_mode", "optim.name")
    if name == "adamw" and plain != "adamw" and decays is False:
        name = "adam"
    note = ""
    if plain == "adam" and name == "adamw":
        note = "it decays like AdamW"
    if plain in _COMPRESSED:
        source.leave("optimizer.type", f"{kind}: gradients are not compressed; the rest is taken")
    if name is not None:
        source.put("optim.name", name, "optimizer.type", note)
    elif kind is not None:
        why = why_not_sharded(plain) or "no optimizer here is called so: write optim.name"
        source.leave("optimizer.type", why)
    source.copy("optimizer.params.lr", "optim.lr", "number")
    source.copy("optimizer.params.betas", "optim.betas", "pair")
    source.copy("optimizer.params.weight_decay", "optim.weight_decay", "number")
    _put_own_arguments(source, name)


def _put_own_arguments(source: Source, name: str | None) -> None:
    params = "optimizer.params"
    eps = source.number(f"{params}.eps", "optim.eps")
    if name == "lion" and eps is not None:
        source.leave(f"{params}.eps", "lion has none")
    elif eps is not None:
        source.put("optim.eps", eps, f"{params}.eps")
    for argument, kind in (("momentum", "number"), ("nesterov", "flag"), ("amsgrad", "flag")):
        value = getattr(source, kind)(f"{params}.{argument}", f"optim.args.{argument}")
        if value:
            source.put(f"optim.args.{argument}", value, f"{params}.{argument}")
    corrects = source.flag(f"{params}.bias_correction", "optim.args.bias_correction")
    low = source.number(f"{params}.min_coeff", "optim.args.ratio_clamp")
    high = source.number(f"{params}.max_coeff", "optim.args.ratio_clamp")
    if name != "lamb":
        if corrects is False:
            source.leave(f"{params}.bias_correction", "moments of adam are always corrected")
        return
    if corrects is not None:
        source.put("optim.args.bias_correction", corrects, f"{params}.bias_correction")
    clamp = [
        _RATIO_CLAMP[0] if low is None else low,
        _RATIO_CLAMP[1] if high is None else high,
    ]
    source.put("optim.args.ratio_clamp", clamp, f"{params}.min_coeff, max_coeff")


def _put_scheduler(source: Source) -> None:
    kind = source.word("scheduler.type", "lr.schedule")
    params = "scheduler.params"
    warmup = source.whole(f"{params}.warmup_num_steps", "lr.warmup")
    steps = source.whole(f"{params}.total_num_steps", "steps")
    peak = source.number(f"{params}.warmup_max_lr", "optim.lr")
    first = source.number(f"{params}.warmup_min_lr", "lr.warmup")
    shape = source.word(f"{params}.warmup_type", "lr.warmup")
    ratio = source.number(f"{params}.warmup_min_ratio", "lr.warmup")
    end = source.number(f"{params}.cos_min_ratio", "lr.min_factor")
    schedules = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if kind is None:
        return
    if kind not in schedules:
        source.leave("scheduler", f"{kind} has no counterpart: write lr.schedule: train.py:factor")
        return
    note = "" if kind == "WarmupLR" else "to the end of the run"
    source.put("lr.schedule", schedules[kind], "scheduler.type", note)
    is_log = kind != "WarmupCosineLR" and shape != "linear"
    note = "linear; DeepSpeed's is logarithmic" if is_log else ""
    if source.raw(f"{params}.warmup_num_steps") is None:
        source.put("lr.warmup", _WARMUP_STEPS, "scheduler.type", "DeepSpeed's own warmup_num_steps")
    elif warmup is not None:
        source.put("lr.warmup", warmup, f"{params}.warmup_num_steps", note)
    for key, value in (("warmup_min_lr", first), ("warmup_min_ratio", ratio)):
        if value:
            source.leave(f"{params}.{key}", "a warm-up begins at optim.lr / lr.warmup")
    if kind == "WarmupCosineLR":
        end = _COSINE_END if end is None else end
        source.put("lr.min_factor", end, f"{params}.cos_min_ratio")
    if steps is not None:
        source.put("steps", steps, f"{params}.total_num_steps")
    if peak is not None and kind != "WarmupCosineLR":
        source.draft.keys.pop("optim.lr", None)  # the scheduler's counts in DeepSpeed too
        source.put("optim.lr", peak, f"{params}.warmup_max_lr")


def _put_activations(source: Source) -> None:
    block = "activation_checkpointing"
    names = ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")
    wanted = [name for name in names if source.flag(f"{block}.{name}", "activations")]
    number = source.whole(f"{block}.number_checkpoints", "activations.n")
    if not source.section(block):
        return
    if not wanted and number is None:
        source.leave(
            block,
            "your model's code says what is recomputed: write activations: full to do it here",
        )
        return
    note = "every block; DeepSpeed asks the model's code"
    source.put("activations.checkpoint", "full", block, note)
    if "cpu_checkpointing" in wanted:
        source.put("activations.offload", "host", f"{block}.cpu_checkpointing")
    if "partition_activations" in wanted and (source.draft.value("parallel.tp") or 1) > 1:
        source.put("activations.partition", True, f"{block}.partition_activations")
    elif "partition_activations" in wanted:
        why = (
            "it divides inputs over tp ranks: write activations.partition: true beside parallel.tp"
        )
        source.leave(f"{block}.partition_activations", why)
    if number is not None:
        source.leave(f"{block}.number_checkpoints", "each block is recomputed by itself")


def _put_trackers(source: Source) -> None:
    trackers = [
        name for name in ("tensorboard", "wandb") if source.flag(f"{name}.enabled", "log.to")
    ]
    if trackers:
        source.put("log.to", trackers, ", ".join(f"{name}.enabled" for name in trackers))
    for key, argument in (("project", "project"), ("team", "entity"), ("group", "group")):
        value = source.word(f"wandb.{key}", f"log.args.wandb.{argument}")
        if value is not None and "wandb" in trackers:
            source.put(f"log.args.wandb.{argument}", value, f"wandb.{key}")
    for key in ("output_path", "job_name"):
        if source.word(f"tensorboard.{key}", "log.args.tensorboard") and "tensorboard" in trackers:
            source.leave(f"tensorboard.{key}", "it is written into the run directory")
