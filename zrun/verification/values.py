"""Start a job's ranks on this host, up to where its parts are compared with the whole model.

That comparison is made by each run whose ranks have parts of a model, before its first step: see
`zrun_core/train/value_check.py`. Here the run ends behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zrun.job.load import load_job
from zrun.runs.listing import parse_events
from zrun.topology.machine import read_machine
from zrun.verification.passes import Runner, trial_folder
from zrun.verification.trial import trial_of
from zrun.watch.checks_left_out import NOT_COMPARED, TRUSTED, checks_left_out
from zrun_core.errors import JobError

WORKER = "zrun_core.verification.check_worker"


def compare_values(path: Path, overrides: Sequence[str]) -> str:
    """Return what comparing values came to, in words.

    Args:
        overrides: "key=value", on top of the job's file.

    Raises:
        JobError: the job is wrong.
        TrialFailedError: parts of the model compute something else than the whole one, or the
            ranks fail before that; what it was has been said.
    """
    job = load_job(path, overrides).config
    parallel = job.parallel
    ranks = parallel.model_ranks
    if ranks == 1:
        return "each rank has the whole model: there are no parts to compare with it"
    if not job.guards.check_values:
        raise JobError("guards.check_values: false compares no values: leave out --values")
    trial = trial_of(job, 2, ranks, len(read_machine().devices))
    with trial_folder() as folder:
        run_dir = Runner(path, [*overrides, *trial.overrides], folder, WORKER).train([])
        with (run_dir / "events.jsonl").open("rb") as lines:
            notes = [
                note
                for event in parse_events(lines)
                if event.get("type") == "start"
                for note in checks_left_out(event)
            ]
    why_not = next(iter(notes), "")
    if why_not.startswith((NOT_COMPARED, TRUSTED)):
        return why_not
    answer = (
        f"the {ranks} ranks (tp {parallel.tp}, pp {parallel.pp}) match the whole model on the "
        "first micro-batch"
    )
    if why_not:  # of gradients alone
        return f"{answer}; {why_not}"
    return f"{answer}, gradients included"
