"""The pass that runs: a forward, a backward or an evaluation, and of which micro-batch."""

from __future__ import annotations

from zrun_core.distributed.comm import Comm, CommPhase
from zrun_core.zero.unit.micro_pass import MicroPass, PassKind

PassKey = tuple[PassKind, int]  # and its chunk


class RunningPass:
    """The pass that runs, or the one that ran last.

    Attributes:
        micro: the micro-batch of which something runs, or ran last.
        kind: of the pass.
        active: something runs; only then may access to a parameter gather its unit.
    """

    def __init__(self, comm: Comm) -> None:
        """
        Args:
            comm: counts what passes send by what they are.
        """
        self._comm = comm
        self.micro = MicroPass()
        self.kind = PassKind.FORWARD
        self.active = False

    @property
    def key(self) -> PassKey:
        """Return by which passes of one order are known."""
        return self.kind, self.micro.chunk

    @property
    def in_backward(self) -> bool:
        return self.active and self.kind is PassKind.BACKWARD

    @property
    def in_forward(self) -> bool:
        """True while a training forward has begun, and nothing after it."""
        return self.active and self.kind is PassKind.FORWARD

    @property
    def in_words(self) -> str:
        """Return what a module that runs now does, for a profile."""
        return "recompute" if self.in_backward else self.kind.value

    def in_backward_of(self, micro: MicroPass) -> bool:
        """Return whether the backward of `micro` runs."""
        return self.in_backward and self.micro is micro

    def switch_to(self, micro: MicroPass, kind: PassKind) -> None:
        """Go on with `micro` in the pass that runs, which other micro-batches share with it."""
        self.micro = micro
        self.kind = kind
        if kind is PassKind.BACKWARD:
            self._comm.phase = CommPhase.BACKWARD
        else:
            self._comm.phase = CommPhase.FORWARD
