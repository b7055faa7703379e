"""The configuration of axolotl as keys of a job."""

from __future__ import annotations

from typing import Final

from zrun.peers import deepspeed, fsdp
from zrun.peers.batches import put_batch
from zrun.peers.named_file import source_of_named_file
from zrun.peers.source import Source
from zrun_core.spine.sections.optimizer_args import why_not_sharded

_MODEL = "your function builds the model, with from_pretrained or from_config: model"
_DATA = "your function returns the Dataset, tokenised: data"
_LORA = "your function adds the adapters, with peft's get_peft_model: model"
_QUANTIZED = "weights are trained in fp32, bf16 or fp16"
_ATTENTION = "your function chooses it: from_config(..., attn_implementation=...)"
_EVALUATION = "write eval: {data: train.py:build_val_data, every: ...}"
_RUN_FOLDER = "each run has a folder of its own below runs/; --run-dir names another"
_PER_EPOCH = "write it in steps: checkpoint.every"
_WANDB = "write it in log.args.wandb"
_RL = "the loss is your function's: loss"
LEFT: Final = {
    **dict.fromkeys(
        ("base_model", "base_model_config", "model_type", "is_llama_derived_model",
         "is_mistral_derived_model", "is_falcon_derived_model", "is_qwen_derived_model",
         "trust_remote_code", "revision_of_model", "model_config", "overrides_of_model_config",
         "gptq", "rope_scaling", "torch_dtype"),
        _MODEL,
    ),
    **dict.fromkeys(
        ("datasets", "pretraining_dataset", "test_datasets", "dataset_prepared_path",
         "dataset_processes", "dataset_keep_in_memory", "shuffle_merged_datasets", "sequence_len",
         "sample_packing", "sample_packing_eff_est", "pad_to_sequence_len", "train_on_inputs",
         "group_by_length", "chat_template", "default_system_message", "special_tokens", "tokens",
         "tokenizer_type", "tokenizer_config", "tokenizer_use_fast", "tokenizer_legacy",
         "tokenizer_save_jinja_files", "excess_length_strategy", "max_packed_sequence_len",
         "push_dataset_to_hub", "streaming"),
        _DATA,
    ),
    **dict.fromkeys(
        ("adapter", "lora_model_dir", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules",
         "lora_target_linear", "lora_fan_in_fan_out", "lora_modules_to_save", "peft_use_dora",
         "peft_use_rslora", "peft_layers_to_transform", "peft", "lora_mlp_kernel",
         "lora_qkv_kernel", "lora_o_kernel", "relora_steps", "loraplus_lr_ratio",
         "unfrozen_parameters", "merge_lora"),
        _LORA,
    ),
    **dict.fromkeys(("load_in_8bit", "load_in_4bit", "bnb_config_kwargs", "fp8"), _QUANTIZED),
    **dict.fromkeys(
        ("flash_attention", "xformers_attention", "sdp_attention", "flex_attention",
         "eager_attention", "s2_attention", "flash_attn_cross_entropy", "flash_attn_rms_norm",
         "flash_attn_fuse_qkv", "flash_attn_fuse_mlp", "attn_implementation",
         "flash_optimum"),
        _ATTENTION,
    ),
    **dict.fromkeys(
        ("val_set_size", "eval_sample_packing", "evals_per_epoch", "eval_steps", "eval_batch_size",
         "eval_strategy", "evaluation_strategy", "eval_table_size", "eval_max_new_tokens",
         "eval_causal_lm_metrics", "do_causal_lm_eval", "early_stopping_patience"),
        _EVALUATION,
    ),
    **dict.fromkeys(("output_dir", "hub_model_id", "hub_strategy"), _RUN_FOLDER),
    **dict.fromkeys(("saves_per_epoch", "save_strategy"), _PER_EPOCH),
    **dict.fromkeys(("wandb_watch", "wandb_log_model", "wandb_mode"), _WANDB),
    **dict.fromkeys(("rl", "reward_model", "dpo_beta", "rl_beta", "kd_alpha"), _RL),
    **fsdp.left("fsdp_config"),
    "plugins": "kernels and losses of plugins are your model's",
    "tf32": "write torch.backends.cuda.matmul.allow_tf32 = True in your model's file",
    "bfloat16": "write bf16",
    "float16": "write fp16",
    "gradient_checkpointing_kwargs": "blocks are recomputed without reentry",
    "resume_from_checkpoint": "write --resume auto: a run continues from its own saves",
    "local_rank": "ranks get their numbers from zrun",
    "loss_watchdog_threshold": "write hooks.on_step, which may end the run",
    "loss_watchdog_patience": "write hooks.on_step, which may end the run",
    "dataloader_num_workers": "write data.workers",
    "dataloader_pin_memory": "batches are always copied from pinned memory",
    "dataloader_prefetch_factor": "write data.workers",
    "debug": "`zrun check`",
    "strict": "keys of a job are always checked",
    "save_safetensors": "saves are safetensors",
    "save_only_model": "`zrun ckpt export` writes weights alone",
    "sequence_parallel_degree": "write parallel: {tp: N, sequence: true}",
    "context_parallel_size": "write parallel: {tp: N, sequence: true}",
    "heads_k_stride": "write parallel: {tp: N, sequence: true}",
    "optim_args": "write optim.args",
    "optim_target_modules": "all parameters have one optimizer",
    "lr_scheduler_kwargs": "write lr.schedule: train.py:factor",
    "neftune_noise_alpha": "your model adds noise to its embeddings",
    "ddp_timeout": "write limits.collective_s",
    "ddp_find_unused_parameters": "parameters without a gradient are always allowed",
    "ddp_bucket_cap_mb": "a unit is reduced whole: zero.bucket",
    "torch_compile_backend": "compile: true uses inductor",
}  # fmt: skip
# Names of the optimizers of transformers, and of bitsandbytes, which have the update of these.
_OPTIMIZERS: Final = {
    "adamw": "adamw",
    "adamw_hf": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_torch_8bit": "adamw",
    "adamw_apex_fused": "adamw",
    "adamw_bnb_8bit": "adamw",
    "adamw_8bit": "adamw",
    "paged_adamw_8bit": "adamw",
    "paged_adamw_32bit": "adamw",
    "paged_adamw": "adamw",
    "lion": "lion",
    "lion_pytorch": "lion",
    "lion_8bit": "lion",
    "lion_32bit": "lion",
    "paged_lion_8bit": "lion",
    "paged_lion_32bit": "lion",
    "sgd": "sgd",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
}
_SCHEDULES: Final = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "polynomial": "polynomial",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "wsd",
}


def write(source: Source) -> None:
    """Write the keys of a job that a configuration of axolotl means.

    Raises:
        JobError: a value is of a wrong type, or two keys contradict each other.
    """
    _put_length(source)
    put_batch(
        source,
        total=None,
        micro="micro_batch_size",
        accumulation="gradient_accumulation_steps",
    )
    _put_precision(source)
    _put_update(source)
    _put_saves(source)
    _put_recomputation(source)
    if source.flag("torch_compile", "compile"):
        source.put("compile", True, "torch_compile")
    source.copy("seed", "seed")
    source.copy("logging_steps", "log.every")
    source.copy("tensor_parallel_size", "parallel.tp")
    _put_wandb(source)
    _put_sharding(source)
    _put_own_defaults(source)
    source.leave_the_rest(LEFT)


def _put_length(source: Source) -> None:
    steps = source.whole("max_steps", "steps")
    epochs = source.number("num_epochs", "epochs")
    if steps is not None and steps > 0:
        source.put("steps", steps, "max_steps")
        if epochs is not None:
            source.leave("num_epochs", "max_steps counts where both are given")
    elif epochs is not None and float(epochs).is_integer():
        source.put("epochs", int(epochs), "num_epochs")
    elif epochs is not None:
        source.leave("num_epochs", f"{epochs:g} is no whole number of epochs: write steps")


def _put_precision(source: Source) -> None:
    enabled = [
        name for name in ("bf16", "fp16") if source.raw(name) == "auto" or source.flag(name, "")
    ]
    if enabled == ["bf16", "fp16"] and "auto" not in (source.raw("bf16"), source.raw("fp16")):
        raise source.error("bf16 and fp16 are both true; write false for one of them")
    if enabled:
        note = "auto is bf16 where the device has it" if source.raw(enabled[0]) == "auto" else ""
        source.put("precision.compute", enabled[0], enabled[0], note)


def _put_update(source: Source) -> None:
    name = source.word("optimizer", "optim.name")
    if name is not None and name.lower() in _OPTIMIZERS:
        ours = _OPTIMIZERS[name.lower()]
        is_small = "8bit" in name.lower()
        source.put("optim.name", ours, "optimizer")
        if is_small:
            source.put("optim.moments", "bf16", "optimizer", "8 bits have no counterpart")
            source.leave("optimizer", f"{name}: moments have 32 or 16 bits, the job has 16")
    elif name is not None:
        why = why_not_sharded(name.partition("_")[0]) or "no optimizer here is called so"
        source.leave("optimizer", f"{why}: optim.name")
    source.copy("learning_rate", "optim.lr", "number")
    source.copy("weight_decay", "optim.weight_decay", "number")
    source.copy("adam_epsilon", "optim.eps", "number")
    betas = [source.number(f"adam_beta{n}", "optim.betas") for n in (1, 2)]
    if betas != [None, None]:
        own = (0.9, 0.999)
        pair = [own[n] if beta is None else beta for n, beta in enumerate(betas)]
        source.put("optim.betas", pair, "adam_beta1, adam_beta2")
    clip = source.number("max_grad_norm", "optim.clip")
    if clip is not None and clip > 0:
        source.put("optim.clip", clip, "max_grad_norm")
    _put_schedule(source)


def _put_schedule(source: Source) -> None:
    kind = source.word("lr_scheduler", "lr.schedule")
    if kind in _SCHEDULES:
        source.put("lr.schedule", _SCHEDULES[kind], "lr_scheduler")
    elif kind is not None:
        source.leave("lr_scheduler", f"{kind}: write lr.schedule: train.py:factor")
    source.copy("warmup_steps", "lr.warmup")
    ratio = source.number("warmup_ratio", "lr.warmup")
    steps = source.draft.value("steps")
    if ratio and steps is not None and source.draft.value("lr.warmup") is None:
        source.put("lr.warmup", int(ratio * steps), "warmup_ratio", "x steps")
    elif ratio:
        source.leave("warmup_ratio", f"write lr.warmup: {ratio:g} x the steps of the run")
    source.copy("cosine_min_lr_ratio", "lr.min_factor", "number")


def _put_own_defaults(source: Source) -> None:
    """Write what axolotl and the Trainer do where neither this file nor one that it names says."""
    if source.raw("max_grad_norm") is None and not source.draft.says("optim.clip"):
        source.put("optim.clip", 1.0, "max_grad_norm", "the Trainer's own")
    if source.raw("lr_scheduler") is None and not source.draft.says("lr.schedule"):
        source.put("lr.schedule", "cosine", "lr_scheduler", "axolotl's own")


def _put_saves(source: Source) -> None:
    source.copy("save_steps", "checkpoint.every")
    keep = source.whole("save_total_limit", "checkpoint.keep")
    if keep is not None and keep < 2:
        source.leave("save_total_limit", "2 or more are kept: checkpoint.keep")
    elif keep is not None and source.draft.value("checkpoint.every") is not None:
        source.put("checkpoint.keep", keep, "save_total_limit")
    elif keep is not None:
        source.leave("save_total_limit", f"write checkpoint: {{every: ..., keep: {keep}}}")
    if source.flag("auto_resume_from_checkpoints", "resume"):
        source.put("resume", "auto", "auto_resume_from_checkpoints")


def _put_recomputation(source: Source) -> None:
    asked = source.raw("gradient_checkpointing")
    if asked in (None, False):
        return
    if asked not in (True, "true", "unsloth", "offload", "offload_disk"):
        source.flag("gradient_checkpointing", "activations")  # refuses what is neither
    source.put("activations.checkpoint", "full", "gradient_checkpointing")
    if asked in ("offload", "unsloth"):
        source.put("activations.offload", "host", "gradient_checkpointing", str(asked))
    if asked == "offload_disk":
        source.put("activations.offload", "disk", "gradient_checkpointing", asked)


def _put_wandb(source: Source) -> None:
    project = source.word("wandb_project", "log.to")
    names = {"wandb_entity": "entity", "wandb_name": "name", "wandb_run_id": "id"}
    rest = {key: source.word(key, "log.args") for key in names}
    if not project:
        return
    source.put("log.to", ["wandb"], "wandb_project")
    source.put("log.args.wandb.project", project, "wandb_project")
    for key, value in rest.items():
        if value:
            source.put(f"log.args.wandb.{names[key]}", value, key)


def _put_sharding(source: Source) -> None:
    file = source.raw("deepspeed")
    words = source.words("fsdp", "zero")
    if file and words:
        raise source.error("deepspeed and fsdp are both given; keep one of them")
    if file:
        name = source.word("deepspeed", "zero") or ""
        other = source_of_named_file(source, "deepspeed", name, "DeepSpeed")
        if other is not None:
            deepspeed.write(other)
    block = source.section("fsdp_config")
    version = source.whole("fsdp_version", "zero.stage")
    if words:
        _put_fsdp_words(source, words)
    elif block and version is not None:
        fsdp.write(source, "fsdp_config")
    elif block:
        source.leave("fsdp_config", "fsdp is not given: it is ignored")


def _put_fsdp_words(source: Source, words: list[str]) -> None:
    stages = {"full_shard": 3, "shard_grad_op": 2, "no_shard": 0, "hybrid_shard": 3}
    for word in words:
        if word in stages:
            source.put("zero.stage", stages[word], "fsdp", word)
        elif word not in ("auto_wrap", "offload"):
            source.leave("fsdp", f"{word} has no counterpart")
    if "hybrid_shard" in words:
        source.put("zero.shard_group", "node", "fsdp", "hybrid_shard")
    fsdp.write(source, "fsdp_config")
    if "offload" in words:
        fsdp.put_offload(source, "fsdp")
