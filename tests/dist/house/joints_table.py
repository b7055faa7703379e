"""Mixtures, adapters and home-made models over tensor-parallel ranks and stages, with all else on.

    make test-joints                                                                  all cells
    python tests/dist/house/joints_table.py --models lora-llama --axes "pp 2, dp 2"   a part

In each cell a small model trains four steps in one format, is evaluated with a metric, generates
text in hooks, and saves; the run goes on once more from its middle. It is held to one process with
the same format: losses, evaluations, parameters and moments, the text and its logits; what goes on
must have the bits of what did not stop. Or the job is refused before the first step, by `zrun
check` in the words in which a run would end, with what to write instead.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what tests of ranks share
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # zrun without installing it

import numpy as np
from distances import Found, distance, same_bits, skipped
from pool import RankPool
from pool import end as end_pools
from runs import JOB_DIR, job, run

from zrun.job.structure import _inspect
from zrun_core.errors import ZrunError
from zrun_core.spine.config import JobConfig

STEPS, MIDDLE = 4, 2
AXES: dict[str, dict[str, int]] = {
    "tp 2, dp 2": {"tp": 2, "dp": 2},
    "pp 2, dp 2": {"pp": 2, "dp": 2},
    "tp 2, pp 2": {"tp": 2, "pp": 2, "dp": 1},
}
NUM_RANKS = 4
PROMPT_LENGTH = 3
STAGES = (1, 2, 3)
PRECISIONS: dict[str, Any] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": {"compute": "fp16", "loss_scale": {"init": 2.0**17}},
}

# How far losses may be from one process's, as a share; values and logits: ten times that, of the
# largest of their tensor. A layer of which a twentieth is wrong is further away in each format.
CLOSE = {"fp32": 2e-6, "bf16": 5e-3, "fp16": 2e-3}


class Model(NamedTuple):
    """A model of the table.

    Attributes:
        call: what builds it, of `joints_models.py`.
        args: of that.
        about: what it is, in a word of the docs' table.
        plan: how ranks divide its layers, where zrun does not know them.
        refused: words of the refusal that holds, by axis; none: it trains.
        experts: how many there are for a token to choose two of; 0: all are asked, or none is.
    """

    call: str
    args: dict[str, Any]
    about: str
    plan: dict[str, str] | None = None
    refused: dict[str, str] = {}  # noqa: RUF012 - nobody writes to it
    experts: int = 0

    @property
    def needs_peft(self) -> bool:
        """Return whether the model is made by peft."""
        return self.call == "lora"


_PLAN = {
    **{f"*.attention.{name}": "colwise" for name in "qkv"},
    "*.attention.out": "rowwise",
    "*.attention.heads": "divide",
    "*.up": "colwise",
    "*.down": "rowwise",
    "embed": "vocabulary",
    "head": "head",
}
_OF_PEFT = {"tp": "a linear of peft with its adapter, which tp does not divide"}
MODELS: dict[str, Model] = {
    "mixtral": Model("of_transformers", {"name": "MixtralForCausalLM"}, "Mixtral", experts=4),
    "qwen3-moe": Model("of_transformers", {"name": "Qwen3MoeForCausalLM"}, "Qwen3-MoE", experts=4),
    "mixtral-balanced": Model(
        "of_transformers",
        {"name": "MixtralForCausalLM", "output_router_logits": True},
        "Mixtral, balanced by a loss of its routers",
        refused={"pp": "write model.config.output_router_logits = False where the model is made"},
        experts=4,
    ),
    "lora-llama": Model("lora", {"name": "LlamaForCausalLM"}, "LoRA on Llama", None, _OF_PEFT),
    "lora-gpt2": Model("lora", {"name": "GPT2LMHeadModel"}, "LoRA on GPT-2", None, _OF_PEFT),
    "home-made": Model("Writer", {}, "home-made", _PLAN),
    "home-made-unplanned": Model(
        "Writer",
        {},
        "home-made, without `parallel.plan`",
        refused={"tp": "write their roles in parallel.plan"},
    ),
    "home-made-experts": Model("Writer", {"experts": True}, "home-made mixture", _PLAN),
}
HAS_PEFT = importlib.util.find_spec("peft") is not None


class Cell(NamedTuple):
    """A job.

    Attributes:
        model: one of `MODELS`.
        axes: one of `AXES`; empty: one process.
        stage: of ZeRO.
        precision: one of `PRECISIONS`.
        asks_all: a token goes to all experts. Where two of four are chosen, rounding of halves now
            and then chooses another one: gradients are then others, and nothing is wrong.
    """

    model: str
    axes: str
    stage: int
    precision: str
    asks_all: bool = False

    @property
    def alone(self) -> Cell:
        """Return what one process trains, to compare with."""
        return self._replace(axes="", stage=0)

    @property
    def dims(self) -> dict[str, int]:
        """Return the sizes of the axes."""
        return AXES.get(self.axes, {"dp": 1})

    @property
    def close(self) -> float:
        """Return how far losses may be from one process's, as a share.

        Stages compute what one process does, in any format; slices are added up in another order.
        """
        return CLOSE[self.precision if "tp" in self.dims else "fp32"]

    @property
    def why_not(self) -> str:
        """Return words of the refusal that holds; empty: the cell trains."""
        refused = MODELS[self.model].refused
        return next((why for axis, why in refused.items() if axis in self.dims), "")

    @property
    def keys(self) -> dict[str, Any]:
        """Return the keys of its job."""
        model = MODELS[self.model]
        args = dict(model.args)
        if self.asks_all:
            args["num_experts_per_tok"] = model.experts
        parallel: dict[str, Any] = {axis: size for axis, size in self.dims.items() if axis != "dp"}
        if "tp" in parallel and model.plan is not None:
            parallel["plan"] = model.plan
        return job(
            model={"call": f"house/joints_models.py:{model.call}", "args": args},
            data={"call": "pretrained.py:Texts", "shuffle": True},
            steps=STEPS,
            batch={"global": 8, "micro": 2},
            optim={"name": "adamw", "lr": 1e-2, "eps": 1e-3, "clip": 1.0},
            lr="constant",
            precision=PRECISIONS[self.precision],
            zero=self.stage,
            parallel=parallel,
            eval={
                "data": "house/joints_models.py:Held",
                "metrics": "house/joints_models.py:scores",
                "every": MIDDLE,
                "first": True,
            },
            hooks={
                f"on_{when}": {"call": "house/joints_models.py:write", "args": {"when": when}}
                for when in ("step", "eval")
            },
            checkpoint={"every": MIDDLE},
        )


def all_cells() -> Iterator[Cell]:
    """Yield every cell."""
    for model, axes, stage, precision in itertools.product(MODELS, AXES, STAGES, PRECISIONS):
        is_rounded = "tp" in AXES[axes] and precision != "fp32"
        asks_all = is_rounded and MODELS[model].experts > 0
        yield Cell(model, axes, stage, precision, asks_all)


class Trained(NamedTuple):
    """What a cell came to, as ranks found it.

    Attributes:
        found: of each rank, what `runs.run` returns.
        texts: by the place in the run, what was written and the logits of it; alike on all ranks.
    """

    found: Found
    texts: dict[str, tuple[list[list[int]], Any]]

    @property
    def evaluations(self) -> list[dict[str, float]]:
        """Return the numbers of each evaluation."""
        return [each["metrics"] for each in self.found[0]["events"] if each["type"] == "eval"]


class Outcome(NamedTuple):
    """How far a cell is from one process, as shares.

    Attributes:
        losses: of steps.
        values: of parameters and moments, of the largest of their tensor.
        evaluations: of losses and metrics.
        logits: of the text, of the largest.
        tokens: how many of those that were generated are the same, up to the first other one.
        of_tokens: how many there are.
        refusal: words in which it was refused; empty: it trained.
    """

    losses: float = 0.0
    values: float = 0.0
    evaluations: float = 0.0
    logits: float = 0.0
    tokens: int = 0
    of_tokens: int = 0
    refusal: str = ""

    def is_within(self, close: float) -> bool:
        """Return whether losses are so close, and values and logits within ten times that."""
        of_losses = max(self.losses, self.evaluations)
        return of_losses <= close and max(self.values, self.logits) <= 10 * close


# On the ranks


def check(keys: dict[str, Any]) -> tuple[str, str]:
    """Return what `zrun check` says against a job, and what its models print meanwhile."""
    with printed() as lines:
        try:
            _inspect(JobConfig.model_validate(keys), JOB_DIR, None)
        except ZrunError as error:
            return f"{type(error).__name__}: {error}", "".join(lines)
    return "", "".join(lines)


def train(
    keys: dict[str, Any], folder: str, resume: dict[str, Any] | None, dims: dict[str, int]
) -> dict[str, Any]:
    """Train a job on this rank; what it prints too."""
    with printed() as lines:
        found = run(keys, folder, resume, None, None, dims)
    return {**found, "printed": "".join(lines)}


@contextmanager
def printed() -> Iterator[list[str]]:
    """Keep what this process prints inside, on either stream and by any library."""
    lines: list[str] = []
    kept = [os.dup(number) for number in (1, 2)]
    with tempfile.TemporaryFile("w+") as file:
        sys.stdout.flush()
        sys.stderr.flush()
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield lines
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, stream in enumerate(kept, start=1):
                os.dup2(stream, number)
                os.close(stream)
            file.seek(0)
            lines += file.readlines()


# Their comparison


def on_ranks(pool: RankPool, cell: Cell) -> tuple[Trained, Trained]:
    """Train a cell; return that, and what went on from its middle."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        whole = _trained(pool, cell, f"{folder}/whole", None)
        resume = {"folder": f"{folder}/whole/checkpoints", "step": MIDDLE}
        return whole, _trained(pool, cell, f"{folder}/again", resume)


def _trained(pool: RankPool, cell: Cell, folder: str, resume: dict[str, Any] | None) -> Trained:
    found: Found = pool.run(train, cell.keys, folder, resume, cell.dims)
    for of_rank in found:
        assert not of_rank["error"], of_rank["error"]
        assert "Traceback" not in of_rank["printed"], of_rank["printed"]
    return Trained(found, _texts(Path(folder), cell))


def _texts(folder: Path, cell: Cell) -> dict[str, tuple[list[list[int]], Any]]:
    by_place: dict[str, list[Any]] = {}
    for file in sorted(folder.rglob("text-*.json")):
        by_place.setdefault(file.stem.rpartition("-")[0], []).append(json.loads(file.read_text()))
    parts = NUM_RANKS // cell.dims["dp"] if cell.axes else 1
    texts = {}
    for place, of_ranks in by_place.items():
        assert len(of_ranks) == parts, f"{place}: {len(of_ranks)} of {parts} ranks wrote"
        assert all(each == of_ranks[0] for each in of_ranks), f"{place}: ranks wrote other texts"
        texts[place] = of_ranks[0][0], np.array(of_ranks[0][1])
    return texts


def refused(pool: RankPool, cell: Cell) -> str:
    """Return the words in which the ranks of a cell end before their first step, all alike."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        found = pool.run(train, cell.keys, f"{folder}/run", None, cell.dims)
    errors = {of_rank["error"] for of_rank in found}
    assert len(errors) == 1, errors
    for of_rank in found:
        assert of_rank["code"] == 2, of_rank
        assert not [each for each in of_rank["events"] if each["type"] == "step"]
        assert "Traceback" not in of_rank["printed"], of_rank["printed"]
    return str(errors.pop())


def outcome(ranks: Callable[[int], RankPool], cell: Cell, alone: Trained | None) -> Outcome:
    """Train a cell, or have it refused.

    Args:
        alone: what one process comes to; None: the cell is refused.

    Raises:
        AssertionError: it neither trains nor is refused as it should be.
    """
    ((said, lines),) = ranks(1).run(check, cell.keys)
    assert "Traceback" not in lines, lines
    if said:
        assert refused(ranks(NUM_RANKS), cell) == said
        return Outcome(refusal=said)
    whole, again = on_ranks(ranks(NUM_RANKS), cell)
    _same_end(whole, again)
    assert alone is not None, "it trains"
    return compared(whole, alone, 10 * cell.close)


def _same_end(whole: Trained, again: Trained) -> None:
    """Check that what went on has the bits of what did not stop."""
    late = [{**of_rank} for of_rank in whole.found]
    for of_rank in late:
        events = of_rank["events"]
        of_rank["events"] = [each for each in events if each.get("step", 0) > MIDDLE]
    assert same_bits(again.found, late), "what went on from its middle came to something else"
    assert again.evaluations[-1] == whole.evaluations[-1]
    for place, (text, logits) in again.texts.items():
        assert text == whole.texts[place][0], place
        np.testing.assert_array_equal(logits, whole.texts[place][1])


def compared(many: Trained, one: Trained, close: float) -> Outcome:
    """Return how far a run is from one process.

    Args:
        close: how far logits may be, as a share of the largest: a token is in a tie with another
            one that is closer than twice that.

    Raises:
        AssertionError: another text was written, though there was no tie.
    """
    apart = distance(many.found, one.found)
    assert len(skipped(one.found)) < STEPS - 1, "nearly all steps overflowed"
    assert len(many.evaluations) == len(one.evaluations) == 1 + STEPS // MIDDLE
    of_evaluations = max(
        abs(ours[name] / value - 1)
        for ours, theirs in zip(many.evaluations, one.evaluations, strict=True)
        for name, value in theirs.items()
    )
    assert many.texts.keys() == one.texts.keys()
    tokens, of_tokens, of_logits = 0, 0, 0.0
    for place, (text, logits) in one.texts.items():
        texts, our_logits = many.texts[place]
        scale = float(np.abs(logits).max())
        for number, (ours, theirs) in enumerate(zip(texts, text, strict=True)):
            alike = _alike(ours, theirs)
            if alike < len(theirs):
                first, second = np.sort(logits[number, alike - 1])[-2:][::-1]
                has_tie = first - second <= 2 * close * scale
                assert has_tie, f"{place}: {ours} is written, where one process writes {theirs}"
            tokens += alike - PROMPT_LENGTH
            of_tokens += len(theirs) - PROMPT_LENGTH
            away = np.abs(our_logits[number, :alike] - logits[number, :alike])
            of_logits = max(of_logits, float(away.max()) / scale)
    return Outcome(*apart, of_evaluations, of_logits, tokens, of_tokens)


def _alike(ours: list[int], theirs: list[int]) -> int:
    """Return how many tokens two texts begin with alike."""
    pairs = zip(ours, theirs, strict=True)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(theirs))


# The table


def main() -> int:
    """Run cells and print what they come to; return 0 if none failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--stages", nargs="+", type=int, choices=STAGES, default=list(STAGES))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    options = parser.parse_args()
    if not HAS_PEFT:
        print("left out, as peft is not installed (pip install peft): the models with adapters")
    pools = {size: RankPool(size) for size in (1, NUM_RANKS)}
    alone: dict[Cell, Trained] = {}
    failed = 0
    for cell in all_cells():
        if not (
            cell.model in options.models
            and cell.axes in options.axes
            and cell.stage in options.stages
            and cell.precision in options.precisions
            and (HAS_PEFT or not MODELS[cell.model].needs_peft)
        ):
            continue
        try:
            if not cell.why_not and cell.alone not in alone:
                alone[cell.alone] = on_ranks(pools[1], cell.alone)[0]
            found = outcome(pools.__getitem__, cell, alone.get(cell.alone))
            is_good = found.is_within(cell.close)
            is_good = is_good and bool(found.refusal) == bool(cell.why_not)
            said = "" if is_good else "FAILED: "
            said += found.refusal or (
                f"losses {found.losses:.1e}, values {found.values:.1e}, "
                f"evaluations {found.evaluations:.1e}, logits {found.logits:.1e}, "
                f"{found.tokens} of {found.of_tokens} tokens"
            )
        except AssertionError as error:
            is_good, said = False, f"FAILED: {error}"
        failed += not is_good
        print(
            f"{cell.model:18} {cell.axes:11} zero {cell.stage} {cell.precision}  {said}", flush=True
        )
    for pool in pools.values():
        pool.close()
    end_pools()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
