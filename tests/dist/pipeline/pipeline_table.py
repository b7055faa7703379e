"""Pipelines change no bit: models, schedules, ZeRO stages and ranks, as a table.

    make test-pipelines                                                        prints the table
    python tests/dist/pipeline/pipeline_table.py --models bert --dp 1 --pp 2   a part of it

Each cell trains a small model of 8 blocks with Adam and clipping for 20 steps, with a pipeline and
without, and compares all losses, parameters and moments: `equal` to the last bit, or `close` where
stages share a parameter: two of them add up its gradient apart, and all that follows is equal to
rounding. Those train with SGD, whose updates do not blow up a difference in the last bit.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what tests of ranks share
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # zrun without installing it

import numpy as np
from distances import Found, whole
from pool import RankPool
from pool import end as end_pools
from runs import job, losses, run
from small_jobs import BERT, NO_DROPOUT, transformer

DEPTH = 8
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble")
STAGES = (0, 1, 2, 3)
SGD = {"name": "sgd", "lr": 0.05, "clip": 1.0, "args": {"momentum": 0.9}}


class Model(NamedTuple):
    """A model of the table.

    Attributes:
        keys: of its job.
        tied: stages share parameters of it.
        refused: schedules with which chunks of one stage would share them.
    """

    keys: dict[str, Any]
    tied: bool = False
    refused: tuple[str, ...] = ()


def _of_zrun(call: str, data: str, **args: Any) -> dict[str, Any]:
    sizes = {"dim": 16, "depth": DEPTH, "heads": 2}
    return {"model": {"call": f"zrun_core.models.{call}", "args": {**sizes, **args}}, "data": data}


GPT = {"vocab_size": 13, "seq_len": 6}
MODELS: dict[str, Model] = {
    "gpt": Model(_of_zrun("gpt:gpt", "runs.py:Plain", tied=False, **GPT)),
    "gpt, tied": Model(_of_zrun("gpt:gpt", "runs.py:Plain", tied=True, **GPT), tied=True),
    "llama": Model(_of_zrun("gpt:gpt", "runs.py:Plain", flavour="llama", tied=False, **GPT)),
    "bert": Model(
        _of_zrun("bert:bert", "pretrained.py:Texts", vocab_size=96, seq_len=12, dropout=0.0),
        tied=True,
    ),
    "transformers llama": Model(transformer("LlamaForCausalLM", num_hidden_layers=DEPTH)),
    "transformers qwen2": Model(transformer("Qwen2ForCausalLM", num_hidden_layers=DEPTH)),
    "transformers qwen3": Model(transformer("Qwen3ForCausalLM", num_hidden_layers=DEPTH)),
    "transformers gpt2": Model(
        transformer("GPT2LMHeadModel", n_layer=DEPTH, **NO_DROPOUT), tied=True
    ),
    "transformers bert": Model(
        transformer("BertForMaskedLM", num_hidden_layers=DEPTH, **BERT), tied=True
    ),
    "transformers t5": Model(
        transformer("T5ForConditionalGeneration", num_layers=4, dropout_rate=0.0),
        tied=True,
        refused=("interleaved",),
    ),
}


def keys_of(model: Model, steps: int, **keys: Any) -> dict[str, Any]:
    """Return the keys of a job of the table."""
    optim = SGD if model.tied else {"lr": 1e-2, "clip": 1.0, "weight_decay": 0.1}
    return job(
        **{
            "steps": steps,
            "batch": {"global": 8, "micro": 1},
            "optim": optim,
            "hooks": {},
            "checkpoint": None,
            **model.keys,
            **keys,
        }
    )


def compared(one: Found, many: Found) -> str:
    """Return how two runs compare: equal | close: losses to 1e-6 | how far apart they are."""
    ours, theirs = losses(many[0]), losses(one[0])
    here, there = whole(many), whole(one)
    if ours.keys() != theirs.keys() or here.keys() != there.keys():
        return "OTHERS"
    if ours == theirs and all(np.array_equal(here[key], there[key]) for key in there):
        return "equal"
    apart = max(abs(ours[step] / loss - 1) for step, loss in theirs.items())
    if apart < 1e-6 and all(np.allclose(here[key], there[key], 1e-5, 1e-5) for key in there):
        return "close"
    return f"{apart:.0e}"


def row(model: Model, steps: int, stage: int, alone: RankPool, together: RankPool) -> list[str]:
    """Return the cells of a row.

    Args:
        stage: of ZeRO.
        alone: the data-parallel ranks without a pipeline.
        together: the ranks with a pipeline.
    """
    dims = {"dp": alone.world_size, "pp": together.world_size // alone.world_size}
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        one = alone.run(run, keys_of(model, steps, zero=stage), f"{folder}/one")
        for schedule in SCHEDULES:
            parallel = {"pp": dims["pp"], "schedule": schedule}
            keys = keys_of(model, steps, zero=stage, parallel=parallel)
            many = together.run(run, keys, f"{folder}/{schedule}", None, None, None, dims)
            is_refused = many[0]["error"].startswith("JobError: parallel.virtual")
            cells.append("refused" if is_refused else compared(one, many))
    return cells


def is_expected(model: Model, schedule: str, cell: str) -> bool:
    """Return whether a cell says what it should."""
    if schedule in model.refused:
        return cell == "refused"
    return cell == "equal" or (model.tied and cell == "close")


def main() -> int:
    """Print the table; return 0 if nothing differs that should not."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pp", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    heads = " ".join(f"{schedule:>11}" for schedule in SCHEDULES)
    print(f"{'model':19} {'pp':>2} {'dp':>2} {'zero':>4} {heads}")
    is_good = True
    for dp, pp in itertools.product(options.dp, options.pp):
        alone, together = RankPool(dp), RankPool(dp * pp)
        for name, stage in itertools.product(options.models, STAGES):
            model = MODELS[name]
            cells = row(model, options.steps, stage, alone, together)
            is_good = is_good and all(map(partial(is_expected, model), SCHEDULES, cells))
            shown = " ".join(f"{cell:>11}" for cell in cells)
            print(f"{name:19} {pp:2} {dp:2} {stage:4} {shown}", flush=True)
        alone.close()
        together.close()
    end_pools()
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
