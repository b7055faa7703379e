"""What people type first who know another tool: 90 inputs, and what zrun makes of each.

A line is what follows `zrun`; a text with ": " in place of a command is a key of a job file, which
`zrun train` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TOOLS = (
    *("accelerate", "Lightning", "axolotl", "DeepSpeed", "torchtitan", "Megatron", "torchrun"),
    *("Trainer of transformers", "no tool"),
)
_TRAINER, _NO_TOOL = TOOLS[-2:]

# Taken: the keys of the launch, `script` with its arguments, or `options` and what they are.
TAKEN: list[tuple[str, str, Mapping[str, Any]]] = [
    ("accelerate", "train job.yaml --num_processes 4", {"slots": 4}),
    ("Lightning", "train job.yaml --trainer.devices 2", {"slots": 2}),
    ("Lightning", "train job.yaml --trainer.max_epochs=3", {"epochs": 3, "steps": None}),
    ("Lightning", "train job.yaml --ckpt_path last.ckpt", {"resume": "last.ckpt"}),
    ("Lightning", "precision: bf16-mixed", {"precision.compute": "bf16"}),
    ("DeepSpeed", "run --num_gpus 2 train.py", {"slots": 2, "script": []}),
    ("DeepSpeed", "run --hostfile hosts train.py", {"hosts": "hosts", "script": []}),
    ("DeepSpeed", "train job.yaml --include localhost:0,1", {"options": "--include localhost:0,1"}),
    ("torchtitan", "train job.yaml --training.steps 100", {"steps": 100}),
    ("torchtitan", "train job.yaml --training.local_batch_size=2", {"batch.micro": 2}),
    ("torchtitan", "train job.yaml --parallelism.tensor_parallel_degree 2", {"parallel.tp": 2}),
    ("torchtitan", "train job.yaml --optimizer.lr 3e-4", {"optim.lr": 3e-4}),
    ("torchtitan", "train job.yaml --compile.enable", {"compile": True}),
    ("Megatron", "train job.yaml --tensor-model-parallel-size 2", {"parallel.tp": 2}),
    ("Megatron", "train job.yaml --pipeline-model-parallel-size 2", {"parallel.pp": 2}),
    ("Megatron", "train job.yaml --micro-batch-size 2", {"batch.micro": 2}),
    ("Megatron", "train job.yaml --global-batch-size 64", {"batch.global": 64}),
    ("Megatron", "train job.yaml --train-iters 1000", {"steps": 1000}),
    ("Megatron", "train job.yaml --lr 1e-4", {"optim.lr": 1e-4, "lr.schedule": "constant"}),
    ("torchrun", "run --nproc_per_node=2 train.py", {"slots": 2, "script": []}),
    ("torchrun", "run -m pkg.train", {"script": []}),
    ("torchrun", "train job.yaml --nproc-per-node 2", {"slots": 2}),
    (
        _TRAINER,
        "train job.yaml --resume_from_checkpoint out/checkpoint-500",
        {"resume": "out/checkpoint-500"},
    ),
    (_TRAINER, "optim: adamw_torch", {"optim.name": "adamw"}),
    (_NO_TOOL, "train job.yaml lr=1e-2", {"optim.lr": 1e-2, "lr.schedule": "constant"}),
    (_NO_TOOL, "train job.yaml --steps 100", {"steps": 100}),
    (_NO_TOOL, "train job.yaml --gpus 2", {"options": "--gpus 2"}),
    (_NO_TOOL, "train job.yaml optim.name=torch.optim.AdamW", {"optim.name": "AdamW"}),
    (_NO_TOOL, "activations: full", {"activations.checkpoint": "full"}),
]

# Taken by commands that print: a part of it.
PRINTED = [
    (_NO_TOOL, "estimate job.yaml --gpu 3090", "1 rank on 1x3090"),
    (_NO_TOOL, "topo --simulate 8xH100-80G", "NV18"),
]

# Answered, with what to write.
ANSWERED = [
    ("accelerate", "launch train.py", "write zrun run --slots 2 train.py"),
    (
        "accelerate",
        "launch --config_file default_config.yaml train.py",
        "write zrun run --slots 2 train.py",
    ),
    ("accelerate", "train job.yaml --num_machines 2", "name them with --hosts hosts.txt"),
    ("accelerate", "train job.yaml --mixed_precision bf16", "write precision=bf16"),
    ("accelerate", "train default_config.yaml", "zrun import default_config.yaml -o job.yaml"),
    ("accelerate", "estimate-memory meta-llama/Llama-3.1-8B", "write zrun estimate FILE"),
    ("accelerate", "mixed_precision: fp16", "write precision: fp16"),
    ("accelerate", "gradient_accumulation_steps: 4", "write batch: {global: 64, micro: 4}"),
    ("accelerate", "fsdp_config: {fsdp_sharding_strategy: FULL_SHARD}", "write zero: 3"),
    ("Lightning", "fit --config config.yaml", "write zrun train job.yaml"),
    ("Lightning", "train job.yaml max_epochs=3", "write epochs=3"),
    ("Lightning", "train job.yaml epochs=0.5", "write steps: N"),
    ("Lightning", "train job.yaml fast_dev_run=true", "write zrun train job.yaml --smoke 20"),
    ("Lightning", "init --for lightning", "write torch, for a plain nn.Module"),
    ("Lightning", "accumulate_grad_batches: 4", "write batch: {global: 64, micro: 4}"),
    ("Lightning", "strategy: fsdp", "write zero: 3"),
    ("axolotl", "train axolotl.yml", "zrun import axolotl.yml -o job.yaml"),
    ("axolotl", "base_model: meta-llama/Llama-3.1-8B", "write model: train.py:build_model"),
    ("axolotl", "micro_batch_size: 2", "write batch: {micro: 2}"),
    ("axolotl", "num_epochs: 3", "write epochs: 3"),
    ("axolotl", "gradient_checkpointing: true", "write activations: full"),
    ("axolotl", "adapter: lora", "write model: train.py:build_model"),
    ("axolotl", "datasets: [{path: tatsu-lab/alpaca}]", "write data: train.py:build_data"),
    ("axolotl", "optimizer: adamw_torch_fused", "write optim: adamw_torch_fused"),
    ("axolotl", "wandb_project: first", "write log: {to: [wandb], args: {wandb: {project: NAME}}}"),
    ("axolotl", "sample_packing: true", "write data: train.py:build_data"),
    ("DeepSpeed", "train ds_config.json", "zrun import ds_config.json -o job.yaml"),
    ("DeepSpeed", "train job.yaml --deepspeed ds_config.json", "zrun import FILE -o job.yaml"),
    ("DeepSpeed", "train job.yaml zero_optimization.stage=3", "write zero=3"),
    ("DeepSpeed", "zero_optimization: {stage: 2}", "write zero: 2"),
    ("DeepSpeed", "train_micro_batch_size_per_gpu: 4", "write batch: {micro: 4}"),
    ("DeepSpeed", "gradient_clipping: 1.0", "write optim: {clip: 1.0}"),
    ("DeepSpeed", "fp16: {enabled: true}", "write precision: fp16"),
    ("DeepSpeed", "zero: {stage: 3, offload_optimizer: {device: cpu}}", "write offload: host"),
    ("torchtitan", "train llama3_8b.toml", "zrun import llama3_8b.toml -o job.yaml"),
    ("torchtitan", "train --job.config_file llama3_8b.toml", "write zrun train job.yaml"),
    ("torchtitan", "train job.yaml activation_checkpoint.mode=selective", "activations=selective"),
    ("torchtitan", "train job.yaml metrics.log_freq=10", "write log.every=10"),
    ("Megatron", "train job.yaml --bf16", "write precision=bf16"),
    ("Megatron", "train job.yaml --use-distributed-optimizer", "write zero=1"),
    ("Megatron", "train job.yaml --recompute-activations", "write activations=selective"),
    ("torchrun", "train.py", "write zrun run train.py"),
    ("torchrun", "train train.py", "`zrun run train.py` launches a script"),
    ("torchrun", "--nproc_per_node=2 train.py", "write zrun run --nproc_per_node=2 train.py"),
    ("torchrun", "run train.py --nproc-per-node 2", "write zrun run --nproc-per-node 2 train.py"),
    (
        "torchrun",
        "run --standalone --nnodes=1 --nproc-per-node=2 train.py",
        "--standalone: there is no such option; leave it out",
    ),
    (
        "torchrun",
        "run --rdzv-backend c10d --rdzv-endpoint node0:29500 train.py",
        "--rdzv-backend, --rdzv-endpoint: there is no such option; leave it out",
    ),
    ("torchrun", "run --master_port 29501 train.py", "leave it out"),
    (_TRAINER, "train job.yaml --output_dir out", "give --run-dir"),
    (_TRAINER, "train job.yaml --fp16", "write precision=fp16"),
    (_TRAINER, "per_device_train_batch_size: 8", "write batch: {micro: 8}"),
    (_TRAINER, "num_train_epochs: 3", "write epochs: 3"),
    (_TRAINER, "max_steps: 100", "write steps: 100"),
    (_TRAINER, "learning_rate: 5e-5", "write optim: {lr: 5e-05}"),
    (_TRAINER, "save_strategy: epoch", "write checkpoint: {every: 500}"),
    (_TRAINER, "report_to: wandb", "write log: {to: [wandb]}"),
    (_NO_TOOL, "train --config job.yaml", "write zrun train job.yaml"),
    (_NO_TOOL, "train job.yaml -n 2", "write --slots N"),
    (_NO_TOOL, "estimate meta-llama/Llama-3.1-8B", "give its config.json"),
]


def counts() -> dict[str, tuple[int, int]]:
    """Return, for each tool, how many inputs are taken, and how many are answered."""
    taken = [each[0] for each in [*TAKEN, *PRINTED]]
    answered = [each[0] for each in ANSWERED]
    return {tool: (taken.count(tool), answered.count(tool)) for tool in TOOLS}
