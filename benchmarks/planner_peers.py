"""Other estimators on a case of `planner.py`: each is asked what it claims to answer.

    python planner_peers.py ask < questions    of DeepSpeed and accelerate, where they are installed
    python planner_peers.py follow '{...}'     of torch's MemTracker, for one case

An answer is bytes, or None where the peer has none:

- DeepSpeed's `estimate_zero2_model_states_mem_needs` and the one of ZeRO-3, through its own count
  of the live model's parameters: model states in half precision. It has none for stages 0 and 1 on
  several ranks.
- `accelerate estimate-memory`, "training using Adam": the largest of its figures for the model's
  bytes; one device.
- MemTracker under FakeTensorMode: two steps of plain training (AdamW, autocast, torch's
  checkpointing) on one device.
- The formulas: the ZeRO paper's 16 bytes per parameter, divided by the stage, and Korthikanti et
  al.'s activations.

The first part runs where zrun may not be installed: it needs torch, and the folder of zrun_core in
PYTHONPATH.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Answer = int | None
PACKAGES = ("deepspeed", "accelerate")  # those that need an interpreter that has them


# Asked by planner.py


def ask_packages(python: str, questions: Sequence[dict[str, Any]]) -> dict[str, list[Answer]]:
    """What DeepSpeed and accelerate say; neither is there if the interpreter `python` lacks it.

    Args:
        questions: `model` (a path, or a `call` with `args`), `stage`, `world` and `precision` of
            each case.
    """
    env = os.environ | {"PYTHONPATH": str(HERE.parent), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [python, __file__, "ask"],
        input=json.dumps(list(questions)),
        env=env,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{python} cannot ask the peers:\n{done.stderr[-2000:]}")
    found: dict[str, list[Answer]] = json.loads(done.stdout.splitlines()[-1])
    return found


@functools.cache
def follow(question: str) -> Answer:
    """What MemTracker sees of a case, in a process that may abort; None if it cannot run it."""
    command = [sys.executable, __file__, "follow", question]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(
            "MemTracker fails: "
            f"{(done.stderr.strip().splitlines() or ['no reason given'])[-1][:150]}",
            flush=True,
        )
        return None
    return int(done.stdout.splitlines()[-1])


def formulas(question: dict[str, Any]) -> Answer:
    """16 bytes per parameter by the stage, and activations by formula with the logits; only of a
    transformer.
    """
    from zrun_core.errors import JobError

    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "unit"))
    from formulas import TransformerShape

    call, args = _called(question["model"])
    try:
        shape = TransformerShape.from_model_args(call, args)
    except JobError:
        return None
    element = 4 if question["precision"] == "fp32" else 2
    micro, recompute = question["micro"], question["checkpoint"]
    block = shape.block_activations(micro, recompute=recompute, element=element)
    activations = shape.layers * block + shape.logit_bytes(micro, element=element)
    # Of each parameter: 12 bytes of Adam from stage 1, 2 of gradients from 2, 2 of itself from 3.
    parts = enumerate((12, 2, 2), 1)
    stage, world = question["stage"], question["world"]
    each = sum(size / (world if stage >= first else 1) for first, size in parts)
    return round(shape.num_params * each + activations)


def is_plain(question: dict[str, Any]) -> bool:
    """Whether one device's training is what is asked for: nothing is divided over ranks."""
    return bool(question["world"] == 1 or question["stage"] == 0)


def _called(model: str | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return (model, {}) if isinstance(model, str) else (model["call"], model.get("args", {}))


# In the peers' interpreter


def _build(model: str | dict[str, Any]) -> Any:
    call, args = _called(model)
    module, _, attribute = call.partition(":")
    return getattr(import_module(module.removesuffix(".py")), attribute)(**args)


def _of_deepspeed() -> Callable[[dict[str, Any]], Answer]:
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    def needs(question: dict[str, Any]) -> Answer:
        stage, world = question["stage"], question["world"]
        if stage < 2 and world > 1:
            return None
        model = _build(question["model"])
        if stage < 3:
            total = stage_1_and_2.model_to_params(model)
            needed = stage_1_and_2.estimate_zero2_model_states_mem_needs(
                total, world, cpu_offload=False
            )
        else:
            total, largest = stage3.model_to_params(model)
            needed = stage3.estimate_zero3_model_states_mem_needs(
                total, largest, world, cpu_offload=False, cpu_offload_params=False
            )
        return int(needed[1])

    return needs


def _of_accelerate() -> Callable[[dict[str, Any]], Answer]:
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    def needs(question: dict[str, Any]) -> Answer:
        if not is_plain(question):
            return None
        with init_empty_weights():
            model = _build(question["model"])
        num_bytes, _ = calculate_maximum_sizes(model)
        dtype = {"fp32": "float32", "bf16": "bfloat16"}[question["precision"]]
        return int(max(estimate_training_usage(num_bytes, dtype).values()))

    return needs


def answer(questions: Sequence[dict[str, Any]]) -> dict[str, list[Answer]]:
    """What each package that is here says to each question."""
    found = {}
    for name, load in zip(PACKAGES, (_of_deepspeed, _of_accelerate), strict=True):
        try:
            needs = load()
        except ImportError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        found[name] = [needs(question) for question in questions]
    return found


# MemTracker, in a process of zrun's interpreter


def tracked(question: dict[str, Any]) -> int:
    """The peak of two steps: the optimizer makes its states in the first one."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.utils._pytree import tree_leaves, tree_map_only
    from torch.utils.data import default_collate

    from zrun_core.activations.checkpoint import apply_checkpointing
    from zrun_core.spine.sections.activations import ActivationsConfig

    dataset = _build(question["data"])
    samples = default_collate([dataset[number] for number in range(question["micro"])])
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    batches = [
        tree_map_only(torch.Tensor, mode.from_tensor, samples)
        for _ in range(question["accumulation"])
    ]
    with mode:
        model = _build(question["model"]).train()
        apply_checkpointing(model, ActivationsConfig(checkpoint=question["checkpoint"]))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *tree_leaves(batches))
        with tracker:
            for _ in range(2):
                for batch in batches:
                    with torch.autocast(
                        "cpu", torch.bfloat16, enabled=question["precision"] == "bf16"
                    ):
                        loss = model(**batch) if isinstance(batch, dict) else model(*batch)
                    loss.backward()
                    del loss
                    tracker.reset_mod_stats()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def main() -> None:
    sys.path.insert(0, str(HERE))
    if sys.argv[1] == "ask":
        print(json.dumps(answer(json.load(sys.stdin))))
    else:
        print(tracked(json.loads(sys.argv[2])))
    sys.stdout.flush()
    os._exit(0)  # nothing that was imported may hold this up


if __name__ == "__main__":
    main()
