"""One rank's process of a run that is recorded, to be compared with a plain loop."""

from __future__ import annotations

from typing import NoReturn

from zrun_core.train import worker
from zrun_core.train.trainer import Trainer
from zrun_core.train.worker import Worker, import_for
from zrun_core.verification.no_dropout import without_dropout
from zrun_core.verification.witness import Witness

__all__ = ["import_for", "main"]  # what a fork server looks for


class RecordingWorker(Worker):
    """Trains as a worker does, and records it."""

    def prepare(self) -> Trainer:
        """Return the trainer, which a witness watches."""
        if self.spec.plan.dims.tp > 1:
            self._drops_nothing = without_dropout()  # for the life of the process
            self._drops_nothing.__enter__()
        trainer = super().prepare()
        Witness(trainer, self.builder.streams, self.run_dir, self.rank)
        return trainer


def main() -> NoReturn:
    """Run one rank and end the process with the contract's exit code."""
    worker.main(RecordingWorker)
