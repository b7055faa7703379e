"""Layers over ranks come to what one process comes to: models, degrees and sequences, as a table.

    make test-tensors                                                 prints the table
    python tests/dist/tensor_parallel/tensor_table.py --models bert   a part of it

Each cell trains a small model for 30 steps in fp32. It says how far losses are from those of one
process, and how far the gradients of the first step are, as a share of the largest of each
parameter. `dropout` is where activations are whole, after embeddings and at the end of what blocks
add to them: there ranks of a tensor group drop what one process drops. Slices of a sequence have
other dropouts than the whole, and are not compared with it: `apart`. The column `DTensor` compares
2 ranks with as many that torch's own `parallelize_module` has divided the layers among, and
parameters after the last step too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what tests of ranks share
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # zrun without installing it

import numpy as np
from distances import Found, values
from dtensor_oracle import STYLES, by_dtensors
from pool import RankPool
from pool import end as end_pools
from runs import job, losses, run
from small_jobs import BERT, NO_DROPOUT, gpt, transformer

from zrun_core.checkpoint.manifest_fields import VALUE

STEPS = 30
CLOSE = 1e-6  # losses
CLOSE_GRAD = 1e-5
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
PLAIN = {"call": "runs.py:Plain", "args": {"seq_len": 12}}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"model": gpt(heads=4, seq_len=12), "data": PLAIN},
    "gpt, tied": {"model": gpt(heads=4, seq_len=12, tied=True), "data": PLAIN},
    "llama": {"model": gpt(heads=4, seq_len=12, flavour="llama"), "data": PLAIN},
    "bert": {
        "model": {
            "call": "zrun_core.models.bert:bert",
            "args": {
                **{"dim": 16, "depth": 4, "heads": 4, "vocab_size": 97, "seq_len": 12},
                "dropout": 0.0,
            },
        },
        "data": "pretrained.py:Texts",
    },
    "transformers llama": transformer("LlamaForCausalLM", **HEADS),
    "transformers qwen2": transformer("Qwen2ForCausalLM", **HEADS),
    "transformers qwen3": transformer("Qwen3ForCausalLM", **HEADS),
    "transformers mistral": transformer("MistralForCausalLM", **HEADS),
    "transformers gpt2": transformer("GPT2LMHeadModel", **NO_DROPOUT),
    "gpt2, dropout": transformer("GPT2LMHeadModel", attn_pdrop=0.0),
    "transformers bert": transformer("BertForMaskedLM", **BERT),
    "bert, dropout": transformer("BertForMaskedLM", **{**BERT, "hidden_dropout_prob": 0.1}),
}
CASES: dict[str, dict[str, Any]] = {
    "tp 2": {"tp": 2},
    "tp 2, sequence": {"tp": 2, "sequence": True},
    "tp 4": {"tp": 4},
    "tp 4, sequence": {"tp": 4, "sequence": True},
}


def keys_of(model: str, steps: int, parallel: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a job of the table."""
    keys = {
        "steps": steps,
        "batch": {"global": 8, "micro": 2},
        "optim": {"name": "sgd", "lr": 0.05, "args": {"momentum": 0.9}},
        "lr": "constant",
        "hooks": {},
        "checkpoint": None,
        "parallel": parallel,
    }
    return job(**keys, **MODELS[model])


def alone(model: str, steps: int, pool: RankPool) -> Found:
    """Train a model in one process."""
    return on_ranks(keys_of(model, steps, {}), pool)


def trained(model: str, steps: int, parallel: dict[str, Any], pool: RankPool) -> Found:
    """Train a model on the ranks of a tensor group."""
    return on_ranks(keys_of(model, steps, parallel), pool)


def on_ranks(keys: dict[str, Any], pool: RankPool) -> Found:
    """Run a job on the ranks of a pool, which are a tensor group."""
    dims = {"tp": pool.world_size, "dp": 1}
    with tempfile.TemporaryDirectory() as folder:
        found: Found = pool.run(run, keys, f"{folder}/run", None, None, None, dims)
    return found


def gradients(found: Found) -> dict[str, Any]:
    """Return the gradients of a first step: then they are SGD's momentum."""
    return {name: value for (name, state), value in values(found).items() if "momentum" in state}


def furthest(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Return how far arrays are apart, as a share of the largest value of each."""
    assert ours.keys() == theirs.keys()
    return max(
        float(np.abs(ours[name] - value).max() / max(np.abs(value).max(), 1e-6))
        for name, value in theirs.items()
    )


def beside_dtensors(model: str, steps: int, pool: RankPool) -> tuple[float, float]:
    """Return how far losses are from those of torch's DTensors; and gradients or parameters."""
    keys = keys_of(model, steps, {"tp": pool.world_size})
    keys["data"] = {"call": keys["data"], "shuffle": False}
    many, first = on_ranks(keys, pool), on_ranks({**keys, "steps": 1}, pool)
    theirs = pool.run(by_dtensors, keys, model)[0]
    ours = {name: value for (name, state), value in values(many).items() if state == VALUE}
    apart = max(abs(losses(many[0])[step] / loss - 1) for step, loss in theirs.losses.items())
    of_grads = furthest(gradients(first), theirs.gradients)
    return apart, max(of_grads, furthest(ours, theirs.params))


def main() -> int:
    """Print the table; return 0 if all cells are close enough."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    pools = {size: RankPool(size) for size in (1, 2, 4)}
    heads = "".join(f"{case:>20}" for case in [*options.cases, "DTensor"])
    print(f"{'model':21}{heads}", flush=True)
    is_good = True
    for model in options.models:
        cells = []
        one = alone(model, options.steps, pools[1])
        first = gradients(alone(model, 1, pools[1]))
        for case in options.cases:
            parallel = CASES[case]
            if "dropout" in model and "sequence" in parallel:
                cells.append("apart")
                continue
            pool = pools[parallel["tp"]]
            many = losses(trained(model, options.steps, parallel, pool)[0])
            apart = max(abs(many[step] / loss - 1) for step, loss in losses(one[0]).items())
            ours = gradients(trained(model, 1, parallel, pool))
            of_grads = furthest(ours, first)
            is_good = is_good and apart <= CLOSE and of_grads <= CLOSE_GRAD
            cells.append(f"{apart:.1e}, {of_grads:.1e}")
        if model in STYLES:
            apart, of_grads = beside_dtensors(model, options.steps, pools[2])
            is_good = is_good and apart <= CLOSE and of_grads <= CLOSE_GRAD
            cells.append(f"{apart:.1e}, {of_grads:.1e}")
        print(f"{model:21}" + "".join(f"{cell:>20}" for cell in cells), flush=True)
    for pool in pools.values():
        pool.close()
    end_pools()
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
