"""The kinds of memory of a rank: their names, letters, colours and meanings, on every screen."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("params", "grads", "optim", "rings", "buffers")  # that are allocated by plan


@dataclass(frozen=True)
class BarSegment:
    """A part of a bar. Letters carry the meaning where there is no colour.

    Attributes:
        color: in a terminal: Okabe and Ito's, told apart by any eye.
        number: of its colour on a page.
    """

    name: str
    letter: str
    color: str
    number: int


PARTS = (
    BarSegment("params", "P", "#0072B2", 0),
    BarSegment("grads", "G", "#56B4E9", 5),
    BarSegment("optim", "O", "#009E73", 2),
    BarSegment("rings", "R", "#F0E442", 4),
    BarSegment("buffers", "B", "#CC79A7", 3),
    BarSegment("activations", "A", "#E69F00", 1),
    BarSegment("allocator", "s", "#999999", 7),
    BarSegment("context", "c", "#D55E00", 6),
    BarSegment("communicators", "n", "#882255", 8),
)
MEANINGS = {
    "params": "parameters",
    "grads": "gradients",
    "optim": "optimizer states and fp32 masters",
    "rings": "scratch of gathers and reductions",
    "buffers": "buffers of modules",
    "activations": "activations, temporaries and the batch",
    "allocator": "held by the allocator, and not in use at the peak",
    "context": "driver and libraries",
    "communicators": "communicators between ranks",
}
