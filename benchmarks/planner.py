"""Predict the peak of training steps, run them, and compare.

    python benchmarks/planner.py                        every case: 20 minutes on 2 quiet cores
    python benchmarks/planner.py --only gpt,moe         some; --json keeps the results of the others
    python benchmarks/planner.py --world 1              those on one rank
    python benchmarks/planner.py --show FILE            the tables of earlier results
    python benchmarks/planner.py --peer-python PATH     other estimators too, where installed

The peak is that of tracked allocations: torch's profiler sees every allocation on the CPU from the
first one on, and what zrun maps outside of torch's allocator (parameters, gradients, master copies,
rings) is added as it is allocated. Each run is a process per rank that trains three steps by zrun's
own loop; the highest moment of the last two counts, on the rank that has most. What others predict
for the same cases, and what they claim, is in `planner_peers.py`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import planner_peers
import torch
from planner_table import is_good, peer_table, summary

from zrun_core.memory.buffers import Kind
from zrun_core.plan.memory.states import plan_model, rank_buffers, settings_of
from zrun_core.plan.trace.module_tree import skeleton_of
from zrun_core.plan.trace.peak import peak_of
from zrun_core.plan.trace.profile import Profile
from zrun_core.plan.trace.rows import TracePhase
from zrun_core.plan.trace.trace_process import trace_in_subprocess
from zrun_core.spine.config import JobConfig
from zrun_core.spine.parallel_dims import ParallelDims
from zrun_core.spine.spec import LaunchPlan, RankPlace, RunSpec, resolve_batch

HERE = Path(__file__).parent
_MARK = 777_767  # bytes of an allocation that no model makes: it tells steps apart
_TEXT = {"call": "planner_models.py:Samples", "args": {"kind": "text"}}
_GPT = {"vocab_size": 1024, "dim": 256, "depth": 4, "heads": 4, "seq_len": 128}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {
        "model": {"call": "zrun_core.models.gpt:gpt", "args": {**_GPT, "dropout": 0.1}},
        "data": _TEXT,
    },
    "llama": {
        "model": {
            "call": "zrun_core.models.gpt:gpt",
            "args": {**_GPT, "flavour": "llama", "kv_heads": 2},
        },
        "data": _TEXT,
    },
    "bert": {
        "model": {"call": "zrun_core.models.bert:bert", "args": _GPT},
        "data": _TEXT,
    },
    "encdec": {
        "model": "planner_models.py:EncoderDecoder",
        "data": {"call": "planner_models.py:Samples", "args": {"kind": "pairs", "length": 96}},
    },
    "conv": {
        "model": "planner_models.py:ConvNet",
        "data": {"call": "planner_models.py:Samples", "args": {"kind": "images", "length": 48}},
    },
    "moe": {"model": "planner_models.py:Mixture", "data": _TEXT},
}
# What other kinds of models do: kernels that allocate inside, sizes that follow values, backward in
# forward.
OTHERS: dict[str, dict[str, Any]] = {
    "lstm": {"model": "planner_models.py:Recurrent", "data": _TEXT},
    "dropping": {"model": "planner_models.py:Dropping", "data": _TEXT},
    "bags": {"model": "planner_models.py:Bags", "data": _TEXT},
    "critic": {"model": "planner_models.py:Critic", "data": _TEXT},
    "vae": {
        "model": "planner_models.py:Autoencoder",
        "data": {"call": "planner_models.py:Samples", "args": {"kind": "images", "length": 48}},
    },
}
# Models of transformers as their configs make them, but small.
_CLASSES = {
    "GPT2": "GPT2LMHeadModel",
    "Llama": "LlamaForCausalLM",
    "Qwen2": "Qwen2ForCausalLM",
    "Mistral": "MistralForCausalLM",
    "Gemma2": "Gemma2ForCausalLM",
    "Mixtral": "MixtralForCausalLM",
    "BERT": "BertForMaskedLM",
    "T5": "T5ForConditionalGeneration",
}
PRETRAINED: dict[str, dict[str, Any]] = {
    name: {"model": {"call": "planner_models.py:pretrained", "args": {"name": each}}, "data": _TEXT}
    for name, each in _CLASSES.items()
}
_ALL = MODELS | OTHERS | PRETRAINED


@dataclass(frozen=True)
class Case:
    """A model, and how it is trained."""

    model: str
    precision: str = "fp32"
    checkpoint: str = "none"
    stage: int = 0
    world: int = 1
    micro: int = 4
    accumulation: int = 1

    def question(self) -> dict[str, Any]:
        """It, and its model and data, as peers are asked."""
        return {**asdict(self), **_ALL[self.model]}

    def job(self) -> dict[str, Any]:
        return {
            "name": self.model,
            "steps": 3,
            "device": "cpu",
            "zero": self.stage,
            "precision": self.precision,
            "activations": {"checkpoint": self.checkpoint},
            "batch": {"global": self.micro * self.accumulation * self.world, "micro": self.micro},
            "optim": {"lr": 1e-4, "clip": 1.0},
            **_ALL[self.model],
        }

    def __str__(self) -> str:
        return (
            f"{self.model:7}{self.precision:5}{self.checkpoint:10}stage {self.stage} x{self.world} "
            f"{self.micro}x{self.accumulation}"
        )


def cases() -> list[Case]:
    """All that is compared."""
    alone = [
        Case(model, precision, checkpoint)
        for model in MODELS
        for precision in ("fp32", "bf16")
        for checkpoint in ("none", "full")
    ]
    more = [Case(model, checkpoint="selective") for model in ("gpt", "llama", "bert")]
    more += [Case("gpt", checkpoint="every_n"), Case("gpt", "bf16", accumulation=2, micro=2)]
    # Each stage, each precision and with and without recomputation, of each model; all of them of
    # one.
    some = (("fp32", "none", 0), ("bf16", "full", 1), ("fp32", "full", 2), ("bf16", "none", 3))
    together = [Case(model, *each, world=2) for model in MODELS for each in some]
    together += [
        Case("llama", precision, "full", stage, 2)
        for precision in ("fp32", "bf16")
        for stage in range(4)
    ]
    together += [Case(model, "fp32", stage=3, world=2) for model in ("gpt", "conv", "moe")]
    alone += [Case(model, stage=1 + number % 3) for number, model in enumerate(MODELS)]
    larger = [
        Case("gpt", "bf16", "full", 1, 3),
        Case("conv", stage=3, world=3),
        Case("bert", "bf16", stage=2, world=3),
    ]
    larger += [
        Case("gpt", stage=2, world=4),
        Case("llama", "bf16", stage=3, world=4),
        Case("bert", stage=1, world=4),
    ]
    larger += [
        Case(model, "bf16", "full", 3, 4) for model in ("gpt", "encdec")
    ]  # little else than activations
    larger += [
        Case("conv", "bf16", stage=1, world=4),
        Case("moe", "bf16", "full", 2, 4),
        Case("llama", world=4),
    ]
    alone += [Case(model, precision) for model in OTHERS for precision in ("fp32", "bf16")]
    together += [Case(model, "bf16", stage=2, world=2) for model in OTHERS]
    alone += [
        Case(model, precision, checkpoint)
        for model in PRETRAINED
        for precision in ("fp32", "bf16")
        for checkpoint in ("none", "full")
    ]
    together += [Case(model, "bf16", "full", 2, 2) for model in PRETRAINED]
    return list(dict.fromkeys([*alone, *more, *together, *larger]))


# Predicted


def predict(case: Case, *, use_cache: bool = False) -> tuple[int, Profile]:
    """The peak of rank 0 in bytes, without running it."""
    job = JobConfig.model_validate(case.job())
    profile = trace_in_subprocess(
        job, HERE, micros=(case.micro,), checkpoints=(case.checkpoint,), use_cache=use_cache
    )
    return predicted_peak(case, profile), profile


def predicted_peak(case: Case, profile: Profile) -> int:
    """States as `layout` lists them, the batches, and the timeline on top."""
    job = JobConfig.model_validate(case.job())
    settings = settings_of(job, lambda name: None, "cpu")
    cut = plan_model(skeleton_of(profile), settings, profile.buffer_bytes)
    buffers = rank_buffers(cut, settings, ParallelDims(dp=case.world), device="cpu")
    batches = round(case.accumulation * profile.batch_bytes.at(case.micro))
    steps = {
        phase: batches + sum(b.num_bytes for b in buffers if b.phases is None or phase in b.phases)
        for phase in TracePhase
    }
    found = peak_of(
        profile.traces[case.checkpoint],
        case.micro,
        steady=steps,
        accumulating=case.accumulation > 1,
    )
    return found.num_bytes


# Measured


def measure(case: Case) -> dict[str, Any]:
    """The peak of each rank's tracked allocations, from real processes."""
    with tempfile.TemporaryDirectory(prefix="zrun-planner-") as folder:
        ranks = []
        for rank in range(case.world):
            env = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(case.world),
                "LOCAL_RANK": str(rank),
                "GLOO_SOCKET_IFNAME": "lo",
                "ZRUN_STORE": f"{folder}/store",
            }
            command = [
                sys.executable,
                __file__,
                "--run",
                json.dumps(asdict(case)),
                "--folder",
                folder,
            ]
            ranks.append(
                subprocess.Popen(
                    command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        answers = [process.communicate() for process in ranks]
    for process, (_, said) in zip(ranks, answers, strict=True):
        if process.returncode:
            raise SystemExit(f"{case}: a rank ended with {process.returncode}\n{said}")
    found = [json.loads(answer.splitlines()[-1]) for answer, _ in answers]
    return {
        "peak": max(each["peak"] for each in found),
        "of_ranks": [each["peak"] for each in found],
    }


def run(case: Case, folder: str) -> None:
    """One rank: train, and print what was in use at most."""
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )
    profiler.start()
    from zrun_core.train.worker import Worker
    from zrun_core.zero.account import allocated_memory
    from zrun_core.zero.sharded_model import ShardedModel

    job = JobConfig.model_validate(case.job())
    places = [
        RankPlace(rank=rank, host="host", local_rank=rank, device="cpu", dp=rank)
        for rank in range(case.world)
    ]
    rank = int(os.environ["RANK"])
    spec = RunSpec(
        job=job,
        plan=LaunchPlan(ranks=places),
        batch=resolve_batch(job, case.world),
        job_dir=str(HERE),
        run_dir=folder,
        run_id="planner",
    )
    trainer = Worker(spec, rank).prepare()
    step = trainer.step

    def marked(micro_batches: Any) -> None:
        del micro_batches[case.accumulation :]
        step(micro_batches)
        torch.empty(_MARK, dtype=torch.uint8)

    trainer.step = marked  # type: ignore[method-assign]
    gc.collect()
    trainer.run()
    profiler.stop()
    (sharded,) = (each for each in gc.get_objects() if type(each) is ShardedModel)
    kinds = allocated_memory(sharded).by_kind
    outside = sum(kinds[kind] for kind in (Kind.PARAM, Kind.GRAD, Kind.OPTIM, Kind.RING))
    print(json.dumps({"peak": outside + peak_between_marks(profiler), "outside": outside}))
    sys.stdout.flush()
    os._exit(0)


def peak_between_marks(profiler: Any) -> int:
    """The most bytes of torch's allocator that were in use after the first mark and before the
    last.
    """
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    events.sort(key=lambda event: event.start_ns())
    in_use = peak = marks = 0
    for event in events:
        in_use += event.nbytes()
        if event.nbytes() == _MARK:
            marks += 1
        elif 0 < marks < 3:
            peak = max(peak, in_use)
    return peak


def main() -> int:
    """Compare; the exit code says whether every case is within its bound."""
    options = parse()
    if options.run:
        run(Case(**json.loads(options.run)), options.folder)
    if options.show:
        shown = {row["case"]: row for path in options.show for row in json.loads(path.read_text())}
        print(report([*shown.values()]))
        return 0
    chosen = [
        case
        for case in cases()
        if (not options.only or case.model in options.only.split(","))
        and options.world in (None, case.world)
    ]
    saved = json.loads(options.json.read_text()) if options.json.exists() else []
    earlier = {row["case"]: row for row in saved}
    peers = ask_peers(chosen, options.peer_python)
    rows = []
    for number, case in enumerate(chosen):
        predicted, profile = predict(case, use_cache=True)
        found = measure(case)
        said = {name: answers[number] for name, answers in peers.items()}
        said["memtracker"] = (
            planner_peers.follow(**_plain(case))
            if planner_peers.is_plain(case.question())
            else None
        )
        said["formulas"] = planner_peers.formulas(case.question())
        row = {
            "case": str(case),
            **asdict(case),
            "predicted": predicted,
            "source": profile.source,
            **found,
        }
        rows.append(row | {"peers": said})
        print(
            f"{case!s:48} {predicted / 2**20:9.2f} MiB predicted {found['peak'] / 2**20:9.2f} "
            "measured "
            f"{100 * (predicted / found['peak'] - 1):+6.2f} % "
            f"{'' if is_good(rows[-1]) else 'BAD'} {profile.source}",
            flush=True,
        )
        earlier[str(case)] = rows[-1]
        options.json.write_text(json.dumps([*earlier.values()], indent=1))
    print(report(rows))
    return int(not all(map(is_good, rows)))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help=f"models, of {', '.join(_ALL)}")
    parser.add_argument("--world", type=int, help="cases with so many ranks")
    parser.add_argument(
        "--peer-python",
        default=sys.executable,
        help="interpreter that has DeepSpeed and accelerate",
    )
    parser.add_argument(
        "--json", type=Path, default=Path("bench-planner.json"), help="where the results go"
    )
    parser.add_argument("--show", type=Path, nargs="+", help="print the tables of earlier results")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.only.split(",") if name and name not in _ALL]:
        parser.error(f"no model {unknown[0]!r}: write some of {', '.join(_ALL)}")
    return options


def ask_peers(chosen: list[Case], python: str) -> dict[str, list[int | None]]:
    """What the packages say of each case; it is said which of them are not there."""
    found = planner_peers.ask_packages(python, [case.question() for case in chosen])
    if missing := [name for name in planner_peers.PACKAGES if name not in found]:
        print(
            f"without {' and '.join(missing)}: {python} has none; see benchmarks/requirements.txt",
            flush=True,
        )
    return found


def _plain(case: Case) -> dict[str, str]:
    """What MemTracker is asked: the same for all stages and ranks."""
    return {"question": json.dumps(replace(case, stage=0, world=1).question())}


def report(rows: list[dict[str, Any]]) -> str:
    """The tables of all that was compared."""
    good = sum(map(is_good, rows))
    said = f"{good} of {len(rows)} cases are at most 1 % below and 1 % above (2 % on several ranks)"
    return f"\n{peer_table(rows)}\n\n{summary(rows)}\n\n{said}"


if __name__ == "__main__":
    sys.exit(main())
