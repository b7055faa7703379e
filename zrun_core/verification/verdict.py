"""The verdict of a comparison: what was compared, and the first thing that differs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from zrun_core.verification.where_to_look import where_to_look


@dataclass(frozen=True)
class Difference:
    """The first thing in which a run differs from a plain loop.

    Attributes:
        step: in which.
        what: of the two differs: "batch", "loss", "gradient", "norm", "skip", "rate", "update",
            "buffer", "start", "save".
        name: of the parameter or buffer; "" for a number of the whole step.
        apart: by how much, relative.
        allowed: by how much it may differ.
        looks_like: what is likely, in words; "" where nothing is known.
        others: parameters or buffers of this step that differ too.
    """

    step: int
    what: str
    name: str
    apart: float
    allowed: float
    looks_like: str = ""
    others: int = 0

    @property
    def in_words(self) -> str:
        """The difference as one sentence."""
        subject = {
            "batch": "what was read",
            "loss": "the loss",
            "gradient": f"the gradient of {self.name}",
            "norm": "the norm of the gradient",
            "skip": "whether the step is skipped",
            "rate": "the learning rate",
            "update": f"the update of {self.name}",
            "buffer": f"the buffer {self.name}",
            "start": f"the initial value of {self.name}",
            "save": f"the resumed value of {self.name}",
        }[self.what]
        text = f"step {self.step}: {subject} differs"
        if self.allowed:
            text += f" by {self.apart:.2g} (relative), where {self.allowed:.1g} would be rounding"
        if self.others:
            text += f" (and {self.others} more)"
        return f"{text}: {self.looks_like}" if self.looks_like else text

    @property
    def look_at(self) -> str:
        """Where its cause usually is."""
        return where_to_look(self.what, self.looks_like)


@dataclass
class Worst:
    """The largest relative differences that were seen, all of them within what is allowed."""

    loss: float = 0.0
    gradient: float = 0.0
    update: float = 0.0
    buffer: float = 0.0

    @property
    def of_all(self) -> float:
        return max(self.loss, self.gradient, self.update, self.buffer)


@dataclass
class Verdict:
    """What a comparison has come to.

    Attributes:
        steps: that were compared.
        tensors: of the model, that train.
        precision: of the run.
        worst: of what agrees.
        difference: the first one; None: there is none.
        why_not: why nothing can be said; "" where something can.
        notes: what else the user should know.
    """

    steps: int = 0
    tensors: int = 0
    precision: str = "fp32"
    worst: Worst = field(default_factory=Worst)
    difference: Difference | None = None
    why_not: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return self.difference is None and not self.why_not

    def to_json(self) -> dict[str, Any]:
        found = asdict(self) | {"agrees": self.agrees}
        if self.difference is not None:
            found["difference"]["text"] = self.difference.in_words
            found["difference"]["look_at"] = self.difference.look_at
        return found


class Unverifiable(Exception):  # noqa: N818 - no error of the run
    """Nothing can be said of this job; the message says why, and what to write."""
