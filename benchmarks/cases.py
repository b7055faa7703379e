"""What can be run, by name, without importing torch.

`zrun3-bf16@4` is ZeRO-3 of zrun in bf16 on 4 ranks.

`zrun3-other` is ZeRO-3 of another checkout of zrun, run by that one's interpreter and benchmarks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

SYSTEMS = (
    "single",  # one process walks through the whole global batch: the numerical reference
    "nocomm",  # every rank trains alone: no training system, but the floor of the step time
    "ddp",
    *(f"zrun{stage}" for stage in range(4)),
    *(
        f"zrun{stage}-sockets" for stage in range(4)
    ),  # as between hosts: not through the memory of the ranks
    "fsdp2-z2",
    "fsdp2-z3",
    *(f"ds{stage}" for stage in (1, 2, 3)),
)
LR, BETAS, WEIGHT_DECAY = 3e-4, (0.9, 0.95), 0.1  # of AdamW
VOCAB = 512  # 256 byte values, padded
TRAIN = "train"  # the real command line: `zrun train` with a job file
_NAME = re.compile(
    r"(?P<system>.+?)(?P<other>-other)?(?P<bf16>-bf16)?(?:@(?P<ranks>[1-9]\d*))?", re.DOTALL
)


@dataclass(frozen=True)
class Shape:
    """A model, and its share of the data."""

    dim: int
    depth: int
    heads: int
    seq: int
    batch: int  # sequences per rank and step

    @property
    def flops_per_token(self) -> int:
        """FLOPs of forward and backward: 6 per weight of a matrix product, and causal attention."""
        return (
            6 * (12 * self.dim**2 * self.depth + VOCAB * self.dim)
            + 6 * self.depth * self.dim * self.seq
        )


SHAPES = {
    "tiny": Shape(128, 2, 4, 128, 2),
    "10m": Shape(384, 6, 6, 256, 4),
    "50m": Shape(768, 7, 12, 256, 2),
    "50m-short": Shape(768, 7, 12, 16, 1),  # little but what a step costs whatever its batch
    # For pipelines: a batch is a micro-batch.
    "10m-micro": Shape(384, 6, 6, 256, 1),
    "10m-micro-short": Shape(384, 6, 6, 16, 1),
    "actions": Shape(64, 6, 2, 8, 1),  # blocks too small to matter
}


@dataclass(frozen=True)
class Case:
    """One system on a number of ranks."""

    system: str
    bf16: bool
    ranks: int
    other: bool = False  # of the other checkout

    @classmethod
    def parse(cls, text: str, ranks: int) -> Case:
        """Read `system[-other][-bf16][@ranks]`; `ranks` where it says nothing.

        Raises:
            ValueError: there is no such system.
        """
        match = _NAME.fullmatch(text)
        if match is None or match["system"] not in (*SYSTEMS, TRAIN):
            names = ", ".join((*SYSTEMS, TRAIN))
            raise ValueError(f"no system {text!r}: write one of {names}, with -bf16 and @ranks")
        found = cls(match["system"], bool(match["bf16"]), int(match["ranks"] or ranks))
        if not match["other"]:
            return found
        if not found.is_ours:
            raise ValueError(f"no system {text!r}: another checkout has only zrun's to offer")
        return found.twin

    @property
    def is_ours(self) -> bool:
        """Whether it is zrun, of which there may be another checkout."""
        return self.system.startswith("zrun") or self.system == TRAIN

    @property
    def twin(self) -> Case:
        """The same of the other checkout."""
        return replace(self, other=not self.other)

    @property
    def base(self) -> Case:
        """What its step time is divided by: DDP, or one plain process."""
        return Case("single" if self.ranks == 1 else "ddp", self.bf16, self.ranks)

    def once(self, ranks: int) -> bool:
        """Whether one round is enough, because the case shows losses or memory, not time."""
        return self.ranks > ranks or (self.system == "single" and self.ranks > 1)

    @property
    def processes(self) -> int:
        return 1 if self.system == "single" else self.ranks

    def label(self, ranks: int) -> str:
        """As `parse` reads it."""
        other, bf16 = "-other" * self.other, "-bf16" * self.bf16
        return f"{self.system}{other}{bf16}{f'@{self.ranks}' * (self.ranks != ranks)}"


@dataclass(frozen=True)
class Request:
    """What a worker is asked to do; crosses to it as JSON."""

    system: str
    bf16: bool
    ranks: int
    size: str
    steps: int
    warmup: int  # steps that are not timed
    threads: int
    launched: float  # unix seconds at which the launcher was started


# What `--only` chooses from. The first name of a part is what the others are compared with.
PARTS = {
    "fp32": "ddp zrun0 zrun1 zrun2 zrun3 zrun1-sockets zrun2-sockets zrun3-sockets "
    "fsdp2-z2 fsdp2-z3 ds1 ds2 ds3",
    "bf16": "ddp-bf16 zrun3-bf16 fsdp2-z3-bf16 ds3-bf16",
    "loss": "single ddp zrun0 zrun1 zrun2 zrun3",
    "one-rank": "single@1 zrun2@1",
    "memory": "zrun3 fsdp2-z3 ds3 ddp@4 zrun3@4 fsdp2-z3@4 ds3@4",
    "launch": "ddp train",
}


def cases_of(parts: list[str], ranks: int) -> list[Case]:
    """The cases of some parts, each once, in order.

    Raises:
        ValueError: there is no such part.
    """
    if unknown := [part for part in parts if part not in PARTS]:
        raise ValueError(f"no part {unknown[0]!r}: write some of {', '.join(PARTS)}")
    names = [name for part in parts for name in PARTS[part].split()]
    return list(dict.fromkeys(Case.parse(name, ranks) for name in names))


def zrun_job(stage: int, bf16: bool) -> dict[str, object]:
    """Return the keys of a job file that do not depend on where the model comes from."""
    return {
        "name": "bench",
        "model": "model.py:job_model",
        "data": "model.py:JobData",
        "precision": {"compute": "bf16", "reduce": "compute"} if bf16 else "fp32",
        "zero": stage,
        "optim": {"name": "adamw", "lr": LR, "betas": list(BETAS), "weight_decay": WEIGHT_DECAY},
    }
