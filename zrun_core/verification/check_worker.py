"""One rank's process of a run that ends before its first step, once its parts are compared."""

from __future__ import annotations

from typing import NoReturn

from zrun_core.train import worker
from zrun_core.train.worker import Worker, import_for

__all__ = ["import_for", "main"]  # what a fork server looks for


class CheckingWorker(Worker):
    """Does all that a worker does before it trains."""

    def run(self) -> None:
        self.prepare().recorder.end("checked")
        self.meet_others()


def main() -> NoReturn:
    """Run one rank and end the process with the contract's exit code."""
    worker.main(CheckingWorker)
