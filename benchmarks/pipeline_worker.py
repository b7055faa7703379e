"""One rank of a pipeline, started by `pipelines.py`: how each system makes a stage, and its times.

Stages are made of the same layers and cut at the same block: embeddings and the first half of the
blocks, the other half and the head. A system is called `zrun-1f1b/8`: its schedule, and the
micro-batches of a step. `plain/8` is one process with the whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import model
import torch
import torch.nn.functional as F
import worker
from cases import SHAPES, VOCAB, Request, zrun_job
from systems import Make, Seat, Training, adamw, plain_training
from torch import Tensor, nn

STAGES = 2


class Embed(nn.Module):
    """Tokens to hidden states."""

    def __init__(self, gpt: model.GPT) -> None:
        super().__init__()
        self.tokens, self.positions = gpt.tokens, gpt.positions

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden: Tensor = self.tokens(tokens) + self.positions(places)
        return hidden


class Head(nn.Module):
    """Hidden states to logits."""

    def __init__(self, gpt: model.GPT) -> None:
        super().__init__()
        self.norm, self.head = gpt.norm, gpt.head

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def layers(gpt: model.GPT) -> list[nn.Module]:
    """Return the model as layers that run one after the other; stages have equally many."""
    return [Embed(gpt), *gpt.blocks, Head(gpt)]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().view(-1, VOCAB), targets.reshape(-1))


def plain(micro_batches: int) -> Make:
    return lambda gpt, seat: plain_training(gpt, seat, micro_batches=micro_batches)


def torchs(schedule: str, micro_batches: int) -> Make:
    """Return torch's own pipelining, told the shapes and given nothing to do that is not needed."""
    from torch.distributed import pipelining

    kinds: dict[str, Any] = {
        "1f1b": pipelining.Schedule1F1B,
        "gpipe": pipelining.ScheduleGPipe,
    }

    def make(gpt: nn.Module, seat: Seat) -> Training:
        assert isinstance(gpt, model.GPT)
        own = layers(gpt)
        half = len(own) // STAGES
        module = nn.Sequential(*own[seat.rank * half : (seat.rank + 1) * half])
        optimizer = adamw(module.parameters())
        tokens = torch.zeros(seat.shape.batch, seat.shape.seq, dtype=torch.long)
        hidden = torch.zeros(*tokens.shape, seat.shape.dim)
        logits = torch.zeros(*tokens.shape, VOCAB)
        is_first = seat.rank == 0
        stage = pipelining.PipelineStage(
            module,
            seat.rank,
            STAGES,
            torch.device("cpu"),
            input_args=tokens if is_first else hidden.requires_grad_(),
            output_args=(hidden if is_first else logits).requires_grad_(),
        )
        run = kinds[schedule](
            stage,
            micro_batches,
            loss_fn=lambda out, wanted: loss_of(out, wanted) / micro_batches,
            scale_grads=False,
        )

        def step(tokens: Tensor, targets: Tensor) -> float:
            losses: list[Tensor] = []
            if is_first:
                run.step(tokens, return_outputs=False)
            else:
                run.step(target=targets, losses=losses, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
            return float(sum(loss.item() for loss in losses))

        return Training(step, runner=run)

    return make


def deepspeeds(micro_batches: int) -> Make:
    """Return DeepSpeed's engine with the settings that it has of itself."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.logger.setLevel("ERROR")

    def make(gpt: nn.Module, seat: Seat) -> Training:
        assert isinstance(gpt, model.GPT)
        deepspeed.init_distributed("gloo")
        module = PipelineModule(
            layers(gpt), num_stages=STAGES, loss_fn=loss_of, partition_method="uniform"
        )
        config = {
            "train_micro_batch_size_per_gpu": seat.shape.batch,
            "gradient_accumulation_steps": micro_batches,
            "gradient_clipping": 0.0,  # 0.19 clips at 1.0 unless told otherwise
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        params = [param for param in module.parameters() if param.requires_grad]
        engine, *_ = deepspeed.initialize(
            model=module, model_parameters=params, optimizer=adamw(params), config=config
        )

        def step(tokens: Tensor, targets: Tensor) -> float:
            parts = zip(tokens.chunk(micro_batches), targets.chunk(micro_batches), strict=True)
            return float(engine.train_batch(iter(parts)))

        return Training(step)

    return make


def zruns(schedule: str, micro_batches: int) -> Make:
    """Return a worker of `zrun train`, which builds its stage and is given its batches."""
    import joined

    from zrun_core.data.batch import MicroBatch
    from zrun_core.telemetry.stage_fields import action_fields

    def make(gpt: nn.Module, seat: Seat) -> Training:
        del gpt  # the worker builds it from the job
        size = next(name for name, shape in SHAPES.items() if shape == seat.shape)
        data = {"size": size, "ranks": micro_batches, "steps": 1}
        keys = zrun_job(1, seat.bf16) | {
            "model": {"call": "model.py:job_model", "args": {"size": size}},
            "data": {"call": "model.py:JobData", "args": data},
            "steps": 1,
            "batch": {"micro": seat.shape.batch, "global": micro_batches * seat.shape.batch},
            "checkpoint": None,
            "parallel": {
                "pp": STAGES,
                "schedule": schedule,
                "split": [f"blocks.{seat.shape.depth // STAGES}"],
            },
        }
        trainer = joined.prepare(keys, "pp", STAGES, seat.rank)

        def step(tokens: Tensor, targets: Tensor) -> float:
            parts = zip(tokens.chunk(micro_batches), targets.chunk(micro_batches), strict=True)
            trainer.step([MicroBatch.of(part, len(part[0])) for part in parts])
            return trainer.recorder.progress.loss

        passes = trainer._micro_batches
        return Training(
            step,
            sharded=trainer.sharded,
            actions=lambda: action_fields(passes.times),
            runner=passes,
        )

    return make


_LOADERS: dict[str, Callable[[int], Make]] = {
    "plain": plain,
    "torch-1f1b": partial(torchs, "1f1b"),
    "torch-gpipe": partial(torchs, "gpipe"),
    "ds": deepspeeds,
    "zrun-1f1b": partial(zruns, "1f1b"),
    "zrun-gpipe": partial(zruns, "gpipe"),
    "zrun-zero_bubble": partial(zruns, "zero_bubble"),
}


def load(name: str) -> Make:
    """Import the system called `name`."""
    system, _, micro_batches = name.partition("/")
    return _LOADERS[system](int(micro_batches))


def measure(make: Make, request: Request, rank: int) -> dict[str, Any]:
    """Train as one stage."""
    shape = SHAPES[request.size]
    micro_batches = int(request.system.partition("/")[2])
    model.corpus()
    training = make(model.build(shape), Seat(rank, request.ranks, shape, request.bf16))
    return worker.measure_steps(
        training,
        request.steps,
        lambda number: model.global_batch(shape, number, micro_batches),
    )


if __name__ == "__main__":
    worker.main(measure, load)
