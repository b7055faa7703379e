"""The configuration that `accelerate config` writes, as keys of a job."""

from __future__ import annotations

from typing import Final

from zrun.peers import deepspeed, fsdp
from zrun.peers.named_file import source_of_named_file
from zrun.peers.source import Source

_HOSTS = "zrun finds the hosts in hosts, --hosts or Slurm, and gives them their numbers and ports"
_TPU = "zrun trains on CUDA, ROCm and CPUs"
LEFT: Final = {
    "compute_environment": "hosts come from Slurm, from hosts, or are this one",
    "debug": "guards.check_values, and `zrun verify`",
    "enable_cpu_affinity": "each rank keeps to cores of its own: bind",
    "machine_rank": _HOSTS,
    "main_process_ip": _HOSTS,
    "main_process_port": _HOSTS,
    "rdzv_backend": _HOSTS,
    "same_network": _HOSTS,
    "mpirun_config": _HOSTS,
    "main_training_function": "zrun runs the loop itself; a script of yours runs by `zrun run`",
    "downcast_bf16": _TPU,
    "tpu_env": _TPU,
    "tpu_name": _TPU,
    "tpu_zone": _TPU,
    "tpu_vm": _TPU,
    "tpu_use_cluster": _TPU,
    "tpu_use_sudo": _TPU,
    "commands": _TPU,
    "command_file": _TPU,
    "fp8_config": "weights are trained in fp32, bf16 or fp16",
    "ipex_config": "torch's own kernels run on CPUs",
    "dynamo_config.dynamo_mode": "each repeated block is compiled in torch's default mode",
    "dynamo_config.dynamo_use_dynamic": "torch decides on dynamic shapes",
    "dynamo_config.dynamo_use_fullgraph": "graph breaks are allowed",
    "dynamo_config.dynamo_use_regional_compilation": "compile always goes block by block",
    "deepspeed_config.deepspeed_multinode_launcher": _HOSTS,
    "deepspeed_config.deepspeed_exclusion_filter": "write --exclude on the command line",
    "deepspeed_config.deepspeed_inclusion_filter": "write --include on the command line",
    "deepspeed_config.deepspeed_moe_layer_cls_names": "name such modules: zero.leaf",
    "deepspeed_config.zero3_init_flag": "a model is built once per host; init: meta builds its "
    "shards alone, where modules can reset themselves",
    "deepspeed_config.zero3_save_16bit_model": "`zrun ckpt export` writes whole tensors",
    **fsdp.left("fsdp_config"),
    "parallelism_config.parallelism_config_cp_size": "write parallel: {tp: N, sequence: true}",
    "parallelism_config.parallelism_config_cp_comm_strategy": "there is no context parallelism",
    "parallelism_config.parallelism_config_sp_size": "write parallel: {tp: N, sequence: true}",
    "megatron_lm_config.megatron_lm_num_micro_batches": "it follows from batch",
    "megatron_lm_config.megatron_lm_recompute_activations": "write activations: selective",
}
_TYPES: Final = (
    "NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED", "FSDP", "MEGATRON_LM",
)  # fmt: skip


def write(source: Source) -> None:
    """Write the keys of a job that a configuration of accelerate means.

    Raises:
        JobError: a value is of a wrong type, or two keys contradict each other.
    """
    kind = (source.word("distributed_type", "zero.stage") or "NO").upper()
    _put_ranks(source, kind)
    _put_parallelism(source)
    _put_precision(source)
    if kind not in _TYPES:
        source.leave("distributed_type", f"{kind}: {_TPU}")
    if kind == "DEEPSPEED":
        _put_deepspeed(source)
    elif kind == "FSDP":
        fsdp.write(source, "fsdp_config")
    for name, block in (("DEEPSPEED", "deepspeed_config"), ("FSDP", "fsdp_config")):
        if kind != name and source.section(block):
            source.leave(block, f"distributed_type is {kind}: it is ignored")
    backend = source.word("dynamo_config.dynamo_backend", "compile")
    if backend is not None and backend.upper() == "INDUCTOR":
        source.put("compile", True, "dynamo_config.dynamo_backend")
    elif backend is not None and backend.upper() != "NO":
        source.leave("dynamo_config.dynamo_backend", "compile: true uses inductor")
    source.leave_the_rest(LEFT)


def _put_ranks(source: Source, kind: str) -> None:
    ranks = source.whole("num_processes", "slots")
    hosts = source.whole("num_machines", "hosts") or 1
    if ranks is not None and ranks > 0:
        if ranks % hosts:
            raise source.error(
                f"num_processes {ranks} do not divide over num_machines {hosts}; write "
                f"num_processes: {ranks // hosts * hosts or hosts}"
            )
        source.draft.ranks = ranks
        source.put("slots", ranks // hosts, "num_processes", "ranks of one host")
    if hosts > 1:
        source.leave("num_machines", f"name the {hosts} hosts: write hosts: hosts.txt, or --hosts")
    if source.flag("use_cpu", "device") or kind == "MULTI_CPU":
        source.put("device", "cpu", "use_cpu")
    chosen = source.raw("gpu_ids")
    if chosen not in (None, "all"):
        source.leave("gpu_ids", f"write --include, or CUDA_VISIBLE_DEVICES={chosen} before zrun")


def _put_parallelism(source: Source) -> None:
    block = "parallelism_config.parallelism_config"
    source.copy(f"{block}_tp_size", "parallel.tp")
    replicas = source.whole(f"{block}_dp_replicate_size", "zero.shard_group") or 1
    shards = source.whole(f"{block}_dp_shard_size", "zero.shard_group") or 1
    if replicas > 1 and shards > 1:
        source.put("zero.shard_group", shards, f"{block}_dp_shard_size")
    block = "megatron_lm_config.megatron_lm"
    source.copy(f"{block}_tp_degree", "parallel.tp")
    source.copy(f"{block}_pp_degree", "parallel.pp")
    if source.flag(f"{block}_sequence_parallelism", "parallel.sequence"):
        source.put("parallel.sequence", True, f"{block}_sequence_parallelism")
    if source.flag(f"{block}_use_distributed_optimizer", "zero.stage"):
        source.put("zero.stage", 1, f"{block}_use_distributed_optimizer")
    source.copy(f"{block}_gradient_clipping", "optim.clip", "number")


def _put_precision(source: Source) -> None:
    name = source.word("mixed_precision", "precision")
    if name in ("bf16", "fp16"):
        source.put("precision.compute", name, "mixed_precision")
    elif name == "fp8":
        source.put("precision.compute", "bf16", "mixed_precision", "fp8 has no counterpart")
        source.leave("mixed_precision", "fp8: weights are trained in fp32, bf16 or fp16")
    elif name not in (None, "no"):
        raise source.error(
            f'mixed_precision: expected no, fp16, bf16 or fp8, found "{name}"; write bf16'
        )


def _put_deepspeed(source: Source) -> None:
    block = "deepspeed_config"
    source.copy(f"{block}.deepspeed_hostfile", "hosts", "word")
    file = source.word(f"{block}.deepspeed_config_file", "zero")
    if file is not None:
        other = source_of_named_file(source, f"{block}.deepspeed_config_file", file, "DeepSpeed")
        if other is not None:
            deepspeed.write(other)
        return
    source.copy(f"{block}.zero_stage", "zero.stage")
    source.copy(f"{block}.gradient_clipping", "optim.clip", "number")
    for name, to in (("optimizer", "offload.optimizer"), ("param", "offload.param")):
        key = f"{block}.offload_{name}_device"
        device = source.word(key, to)
        folder = source.word(f"{block}.offload_{name}_nvme_path", "offload.dir")
        if device is not None and device not in deepspeed.TIERS:
            raise source.error(f'{key}: expected cpu, nvme or none, found "{device}"; write cpu')
        tier = "device" if device is None else deepspeed.TIERS[device]
        if tier != "device":
            source.put(to, tier, key)
        if tier == "disk" and folder is not None:
            source.put("offload.dir", folder, f"{block}.offload_{name}_nvme_path")
    passes = source.whole(f"{block}.gradient_accumulation_steps", "batch.global")
    if passes is not None and passes > 1:
        ranks = source.draft.replicas
        factor = passes if ranks is None else passes * ranks
        source.leave(
            f"{block}.gradient_accumulation_steps",
            f"write batch.global: {factor} x batch.micro{'' if ranks else ' x your ranks'}",
        )
