"""The configuration of torchtitan, a TOML file, as keys of a job."""

from __future__ import annotations

from typing import Final

from zrun.peers.source import Source

_YOURS = "what it names is built by your function: model"
_DATA = "samples and their lengths are your data's: data"
_EXPERIMENTAL = "it is one of torchtitan's own"
_RUN_FOLDER = "each run has a folder of its own below runs/; --run-dir names another"
_PROFILE = "write profile: [10, 12]"
_FP8 = "weights are trained in fp32, bf16 or fp16"
_NO_CONTEXT = "write parallel: {tp: N, sequence: true}"
LEFT: Final = {
    "job": _RUN_FOLDER,
    "profiling": _PROFILE,
    "metrics.save_tb_folder": _RUN_FOLDER,
    "metrics.enable_color_printing": "colour follows the terminal",
    "metrics.disable_color_printing": "colour follows the terminal",
    "metrics.save_for_all_ranks": "events.jsonl tells of all ranks",
    "metrics.rank_0_only": "events.jsonl tells of all ranks",
    "model": _YOURS,
    "model_converters": _FP8,
    "float8": _FP8,
    "mx": _FP8,
    "quantize": _FP8,
    "optimizer.implementation": "the update of a unit is always fused",
    "optimizer.fused": "the update of a unit is always fused",
    "optimizer.early_step_in_backward": "updates come at the end of a step",
    "optimizer_in_bwd": "updates come at the end of a step",
    "training.dataset": _DATA,
    "training.dataset_path": _DATA,
    "training.seq_len": _DATA,
    "training.dataloader": _DATA,
    "training.gc_freq": "Python's collector is left as it is",
    "training.deterministic": "a run repeats bit by bit on the same layout where kernels do",
    "training.debug_moe_force_load_balance": _YOURS,
    "debug.deterministic": "a run repeats bit by bit on the same layout where kernels do",
    "debug.moe_force_load_balance": _YOURS,
    "parallelism.context_parallel_rotate_method": _NO_CONTEXT,
    "parallelism.enable_compiled_autograd": "compile goes block by block, backward included",
    "parallelism.disable_loss_parallel": "with tp the loss is computed on slices where it can be",
    "parallelism.pipeline_parallel_layers_per_stage": "stages are cut by cost: parallel.split",
    "parallelism.pipeline_parallel_first_stage_less_layers": "stages are cut by cost: "
    "parallel.split",
    "parallelism.pipeline_parallel_last_stage_less_layers": "stages are cut by cost: "
    "parallel.split",
    "parallelism.pipeline_parallel_schedule_csv": "schedules have names: parallel.schedule",
    "parallelism.module_fqns_per_model_part": "write the first block of each: parallel.split",
    "parallelism.expert_tensor_parallel_degree": "experts are divided by parallel.tp",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": "selective keeps the "
    "results of all matrix products",
    "activation_checkpoint.early_stop": "recomputation runs whole blocks",
    "checkpoint.folder": _RUN_FOLDER,
    "checkpoint.interval_type": "write checkpoint.every in steps, or checkpoint.minutes",
    "checkpoint.model_weights_only": "`zrun ckpt export` writes weights alone",
    "checkpoint.last_save_model_only": "`zrun ckpt export` writes weights alone",
    "checkpoint.last_save_model_weights_only": "`zrun ckpt export` writes weights alone",
    "checkpoint.last_save_in_hf": "`zrun ckpt export` writes what from_pretrained loads",
    "checkpoint.export_dtype": "`zrun ckpt export` takes a format",
    "checkpoint.create_seed_checkpoint": "a model is the same at any number of ranks without one",
    "checkpoint.initial_load_path": "write init_from, with safetensors or a state_dict",
    "checkpoint.initial_load_model_only": "init_from loads weights alone",
    "checkpoint.initial_load_model_weights_only": "init_from loads weights alone",
    "checkpoint.initial_load_in_hf": "write init_from, with the folder of safetensors",
    "checkpoint.exclude_from_loading": "init_from.map and init_from.strict",
    "checkpoint.load_step": "write --resume N",
    "checkpoint.enable_first_step_checkpoint": "saves come every checkpoint.every steps",
    "compile.components": "each repeated block is compiled",
    "comm.trace_buf_size": "a hang shows each rank's stack and collectives by itself",
    "comm.mode": "collectives are NCCL's or gloo's",
    "validation": "write eval: {data: train.py:build_val_data, every: ...}",
    "experimental": _EXPERIMENTAL,
    "memory_estimation": "`zrun estimate` says what a rank needs",
    "fault_tolerance": "write restarts and min_hosts",
}
_SCHEDULES: Final = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "zero_bubble",
    "zbvzerobubble": "zero_bubble",
    "dualpipev": "zero_bubble",
    "loopedbfs": "interleaved",
}
_NEAR: Final = ("interleavedzerobubble", "zbvzerobubble", "dualpipev", "loopedbfs")
_OTHERS_DEFAULT = "torchtitan's own"


def write(source: Source) -> None:
    """Write the keys of a job that a configuration of torchtitan means.

    Where the file is silent and torchtitan's own value is not a job's, the job has torchtitan's.

    Raises:
        JobError: a value is of a wrong type, or two keys contradict each other.
    """
    _put_parallelism(source)
    _put_training(source)
    _put_update(source)
    _put_checkpoint(source)
    mode = source.word("activation_checkpoint.mode", "activations")
    if mode is not None:
        _put_activations(source, mode)
    compiles = "compile.enable" if source.section("compile") else "training.compile"
    if source.flag(compiles, "compile"):
        source.put("compile", True, compiles)
    source.copy("metrics.log_freq", "log.every")
    wanted = {"enable_tensorboard": "tensorboard", "enable_wandb": "wandb"}
    trackers = [name for key, name in wanted.items() if source.flag(f"metrics.{key}", "log.to")]
    if trackers:
        source.put("log.to", trackers, "metrics.enable_tensorboard, enable_wandb")
    source.copy("comm.init_timeout_seconds", "limits.start_s", "number")
    source.copy("comm.train_timeout_seconds", "limits.collective_s", "number")
    source.leave_the_rest(LEFT)


def _put_parallelism(source: Source) -> None:
    block = "parallelism"
    old = "training" if source.raw("training.tensor_parallel_degree") is not None else block
    tp = source.whole(f"{old}.tensor_parallel_degree", "parallel.tp") or 1
    pp = source.whole(f"{block}.pipeline_parallel_degree", "parallel.pp") or 1
    if tp > 1:
        source.put("parallel.tp", tp, f"{old}.tensor_parallel_degree")
        note = "sequences go with it"
        source.put("parallel.sequence", True, f"{old}.tensor_parallel_degree", note)
    if source.flag(f"{block}.enable_async_tensor_parallel", "parallel.tp"):
        source.leave(f"{block}.enable_async_tensor_parallel", "tp's collectives wait for layers")
    for name, why in (
        ("context_parallel", _NO_CONTEXT),
        ("expert_parallel", "experts: parallel.tp"),
    ):
        degree = source.whole(f"{block}.{name}_degree", "parallel.tp")
        if degree is not None and degree > 1:
            source.leave(f"{block}.{name}_degree", why)
    _put_pipeline(source, pp)
    _put_shards(source, pp)


def _put_pipeline(source: Source, pp: int) -> None:
    key = "parallelism.pipeline_parallel_schedule"
    name = source.word(key, "parallel.schedule")
    points = source.words("parallelism.pipeline_parallel_split_points", "parallel.split")
    if pp == 1:
        return
    source.put("parallel.pp", pp, "parallelism.pipeline_parallel_degree")
    if points:
        source.put("parallel.split", points, "parallelism.pipeline_parallel_split_points")
    if name is None:
        return
    plain = name.lower().replace("_", "")
    if plain not in _SCHEDULES:
        source.leave(key, f"{name}: write parallel.schedule; `zrun explain parallel.schedule`")
        return
    note = f"the nearest to {name}" if plain in _NEAR else ""
    source.put("parallel.schedule", _SCHEDULES[plain], key, note)
    if plain in _NEAR:
        source.leave(key, f"{name} has no exact counterpart: the job has {_SCHEDULES[plain]}")


def _put_shards(source: Source, pp: int) -> None:
    """Write the stage: FSDP frees parameters after forward, unless a pipeline needs them again."""
    block = "parallelism"
    replicas = source.whole(f"{block}.data_parallel_replicate_degree", "zero.shard_group") or 1
    shards = source.whole(f"{block}.data_parallel_shard_degree", "zero.stage")
    reshard_key = f"{block}.fsdp_reshard_after_forward"
    reshard = source.word(reshard_key, "zero.stage") or "default"
    if reshard not in ("default", "always", "never"):
        raise source.error(
            f'{reshard_key}: expected default, always or never, found "{reshard}"; write default'
        )
    key = f"{block}.data_parallel_shard_degree"
    if shards == 1:
        source.put("zero.stage", 0, key)
        return
    frees = reshard == "always" or (reshard == "default" and pp == 1)
    stage = 3 if frees else 2
    note = "" if frees else "kept after forward"
    if reshard != "default":
        source.put("zero.stage", stage, reshard_key, note)
    else:
        source.put("zero.stage", stage, key, note or ("" if shards else _OTHERS_DEFAULT))
    if replicas > 1 and shards is not None and shards > 1:
        source.put("zero.shard_group", shards, key)
    elif replicas > 1:
        source.leave(
            f"{block}.data_parallel_replicate_degree",
            f"write zero.shard_group: data-parallel ranks / {replicas}, or node",
        )
    if shards is not None and shards > 1:
        tp = source.draft.value("parallel.tp") or 1
        source.draft.ranks = shards * replicas * tp * pp


def _put_training(source: Source) -> None:
    block = "training"
    source.copy(f"{block}.steps", "steps")
    key = f"{block}.local_batch_size"
    if source.raw(key) is None and source.raw(f"{block}.batch_size") is not None:
        key = f"{block}.batch_size"
    local = source.whole(key, "batch.micro")
    whole = source.whole(f"{block}.global_batch_size", "batch.global")
    passes = source.whole("parallelism.pipeline_parallel_microbatch_size", "batch.micro") or 1
    ranks = source.draft.replicas
    is_cut = (source.draft.value("parallel.pp") or 1) > 1
    if whole is not None and whole > 0:
        each = (local or 1) * (ranks or 1)
        if whole % each:
            of = f" x {ranks} data-parallel ranks" if ranks else ""
            raise source.error(
                f"{block}.global_batch_size {whole} is no multiple of {key} {local or 1}{of}; "
                f"write global_batch_size = {max(1, round(whole / each)) * each}"
            )
        source.put("batch.global", whole, f"{block}.global_batch_size")
    elif local is not None and is_cut:
        note = "times your data-parallel ranks" if ranks is None else ""
        source.put("batch.global", local * (ranks or 1), key, note)
    if is_cut:
        key = "parallelism.pipeline_parallel_microbatch_size"
        source.put("batch.micro", passes, key)
    elif local is not None:
        source.put("batch.micro", local, key)
    _put_formats(source)
    if source.flag(f"{block}.enable_cpu_offload", "offload"):
        source.put("offload.optimizer", "host", f"{block}.enable_cpu_offload")
        if source.draft.value("zero.stage") == 3:
            source.put("offload.param", "host", f"{block}.enable_cpu_offload")
    for seed in ("training.seed", "debug.seed"):
        source.copy(seed, "seed")
    _put_or_own(source, f"{block}.max_norm", "optim.clip", 1.0)


def _put_formats(source: Source) -> None:
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    key = "training.mixed_precision_param"
    found = source.word(key, "precision.compute")
    if found is not None and found not in names:
        raise source.error(f'{key}: expected bfloat16 or float32, found "{found}"; write bfloat16')
    compute = names.get(found or "", "bf16")
    _put_found(source, "precision.compute", key, names.get(found or ""), compute)
    reduce = source.word("training.mixed_precision_reduce", "precision.reduce")
    if reduce is not None and names.get(reduce) == compute != "fp32":
        source.put("precision.reduce", "compute", "training.mixed_precision_reduce")
    elif reduce is not None:
        source.put("precision.reduce", "fp32", "training.mixed_precision_reduce")
    dtype = source.word("training.dtype", "precision")
    if dtype is not None and dtype != "float32":
        source.leave("training.dtype", "masters are fp32; optim.moments: bf16 halves the moments")


def _put_update(source: Source) -> None:
    name = source.word("optimizer.name", "optim.name") or "AdamW"
    if name.lower() in ("adam", "adamw"):
        source.put("optim.name", name.lower(), "optimizer.name")
    else:
        source.leave("optimizer.name", f"{name}: write optim.name")
    _put_or_own(source, "optimizer.lr", "optim.lr", 8e-4)
    betas = [source.number(f"optimizer.beta{n}", "optim.betas") for n in (1, 2)]
    own = (0.9, 0.95)
    note = _OTHERS_DEFAULT if betas == [None, None] else ""
    pair = [own[n] if beta is None else beta for n, beta in enumerate(betas)]
    source.put("optim.betas", pair, "optimizer.beta1, beta2", note)
    source.copy("optimizer.eps", "optim.eps", "number")
    _put_or_own(source, "optimizer.weight_decay", "optim.weight_decay", 0.1)
    key = "lr_scheduler.warmup_steps"
    _put_found(source, "lr.warmup", key, source.whole(key, "lr.warmup"), 200)
    _put_decay(source)


def _put_decay(source: Source) -> None:
    block = "lr_scheduler"
    kind = source.word(f"{block}.decay_type", "lr.schedule") or "linear"
    ratio = source.number(f"{block}.decay_ratio", "lr.decay_steps")
    least = "min_lr_factor" if source.raw(f"{block}.min_lr_factor") is not None else "lr_min"
    factor = source.number(f"{block}.{least}", "lr.min_factor")
    steps = source.draft.value("steps")
    if factor:
        source.put("lr.min_factor", factor, f"{block}.{least}")
    if ratio is not None and ratio < 1:
        if kind != "linear":
            source.leave(f"{block}.decay_type", f"{kind}: wsd decays linearly")
        source.put("lr.schedule", "wsd", f"{block}.decay_ratio")
        if steps is not None and int(steps * ratio) > 0:
            source.put("lr.decay_steps", int(steps * ratio), f"{block}.decay_ratio", "x steps")
        return
    if kind not in ("linear", "cosine"):
        source.leave(f"{block}.decay_type", f"{kind}: write lr.schedule: train.py:factor")
        return
    note = "" if source.raw(f"{block}.decay_type") else _OTHERS_DEFAULT
    source.put("lr.schedule", kind, f"{block}.decay_type", note)


def _put_checkpoint(source: Source) -> None:
    block = "checkpoint"
    key = (
        f"{block}.enable"
        if source.raw(f"{block}.enable") is not None
        else (f"{block}.enable_checkpoint")
    )
    every = source.whole(f"{block}.interval", "checkpoint.every")
    mode = source.word(f"{block}.async_mode", "checkpoint.async")
    keep = source.whole(f"{block}.keep_latest_k", "checkpoint.keep")
    if not source.flag(key, "checkpoint"):
        return
    _put_found(source, "checkpoint.every", f"{block}.interval", every, 500)
    if mode not in (None, "disabled"):
        source.put("checkpoint.async", True, f"{block}.async_mode")
    if keep is not None and keep >= 2:
        source.put("checkpoint.keep", keep, f"{block}.keep_latest_k")
    elif keep is not None:
        source.leave(f"{block}.keep_latest_k", "2 or more are kept: checkpoint.keep")


def _put_activations(source: Source, mode: str) -> None:
    block = "activation_checkpoint"
    option = source.raw(f"{block}.selective_ac_option")
    if mode == "none":
        return
    if mode == "full":
        source.put("activations.checkpoint", "full", f"{block}.mode")
    elif mode == "selective" and str(option).isdigit():
        source.put("activations.checkpoint", "every_n", f"{block}.mode")
        source.put("activations.n", int(option), f"{block}.selective_ac_option")
    elif mode == "selective":
        source.put("activations.checkpoint", "selective", f"{block}.mode")
    else:
        source.leave(f"{block}.mode", f"{mode}: write activations: full, or selective")


def _put_or_own(source: Source, key: str, to: str, own: float) -> None:
    """Write the number that the file says, or else torchtitan's own value."""
    _put_found(source, to, key, source.number(key, to), own)


def _put_found(source: Source, to: str, key: str, found: object, own: object) -> None:
    """Write what the file says, or else torchtitan's own value, with a note."""
    if found is None:
        source.put(to, own, key, _OTHERS_DEFAULT)
    else:
        source.put(to, found, key)
