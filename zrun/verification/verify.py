"""Whether a job trains what a plain loop trains: `verify(request)`.

fp32     the job in fp32: rounding is small there, and hides nothing
         goes on from a save, in another layout
format   the job in its own format, where that is another
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from zrun.job.load import load_job
from zrun.job.structure import inspect_structure
from zrun.system.output import say
from zrun.topology.machine import read_machine
from zrun.verification.bisect import bisect, features_of, with_slots
from zrun.verification.moved_and_held import MovedAndHeld, moved_and_held
from zrun.verification.passes import Found, Runner, TrialFailedError, recorded_until, trial_folder
from zrun.verification.room import Place, PlainNeeds, why_too_large
from zrun.verification.trial import check_method, other_layout, save_at, trial_of
from zrun_core.checkpoint.names import step_name
from zrun_core.errors import ExitCode, JobError, StoppedError, ZrunError
from zrun_core.spine import memory_limits

STEPS = 6
_BUILD_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class VerifyRequest:
    """What is asked.

    Attributes:
        path: of the job file.
        overrides: "key=value", on top of it.
        steps: of a trial.
        slots: ranks; None: of the trial's own choice.
        whole: the model stays as large as it is.
        bisects: what differs is traced to a feature.
        as_json: print JSON.
    """

    path: Path
    overrides: Sequence[str]
    steps: int = STEPS
    slots: int | None = None
    whole: bool = False
    bisects: bool = False
    as_json: bool = False


class Verification:
    """Runs the trials of a request, and tells what they come to."""

    def __init__(self, request: VerifyRequest) -> None:
        self._request = request
        self._job = load_job(request.path, request.overrides).config
        check_method(self._job)
        gpus = read_machine().devices
        self._gpu_memory = None
        if gpus and gpus[0].memory_bytes is not None:
            self._gpu_memory = Place(gpus[0].memory_bytes, "of a GPU")
        self._steps = min(request.steps, self._job.steps or request.steps)
        self._trial = trial_of(self._job, self._steps, request.slots, len(gpus))
        # Weights of a file fit the model as it is.
        self._stays = self._trial.stays
        if request.whole:
            self._stays = "--whole"
        elif self._job.init_from is not None:
            self._stays = "init_from loads weights of this size"
        self._shrinks = () if self._stays else self._trial.shrinks
        self._results: dict[str, Found] = {}
        self._bytes: dict[str, MovedAndHeld | None] = {}  # of the same passes

    def run(self) -> int:
        """Run all trials. Returns the exit code."""
        with trial_folder() as folder:
            self._tell_model()
            self._check_room(folder)
            found = self._run_passes(folder)
            culprit = ""
            if not found.agrees and self._request.bisects:
                culprit = self._bisect(folder)
        self._conclude(found, culprit)
        return ExitCode.OK if found.agrees else ExitCode.DIFFERS

    def _tell_model(self) -> None:
        self._say(f"verify {self._job.name}: {self._trial.told}")
        if self._shrinks:
            names = ", ".join(each.removeprefix("model.args.") for each in self._shrinks)
            self._say(f"the model shrinks to {names}; --whole keeps it")
        elif self._stays and not self._request.whole:
            self._say(f"the model stays as large as it is: {self._stays}")

    def _check_room(self, folder: Path) -> None:
        """Refuse a model that this host has no memory for, before a trial runs.

        Raises:
            JobError: it is too large.
        """
        loaded = self._runner(folder).load([])
        try:
            structure = inspect_structure(loaded, _BUILD_TIMEOUT_S)
        except ZrunError:
            return  # the trial says why
        parallel = self._trial.parallel
        refusal = why_too_large(
            PlainNeeds.of(loaded.config, structure.num_parameters, structure.num_trainable),
            parallel.dp,
            parallel.model_ranks,
            _memory(self._job.limits.memory),
            self._gpu_memory if loaded.config.device == "cuda" else None,
            self._ways_to_shrink(),
        )
        if refusal:
            raise JobError(refusal)

    def _ways_to_shrink(self) -> list[str]:
        """Return what makes the model smaller, in words."""
        if self._request.whole and self._trial.shrinks:
            return ["leave out --whole"]
        if self._job.init_from is not None and self._trial.shrinks:
            return ["write init_from=null, so that the model shrinks"]
        args = [f"model.args.{name}" for name in self._job.model.args]
        if not args:
            return [f"give {self._job.model.call} arguments that make it smaller"]
        return [f"give it smaller arguments, as {args[0]}=... ({', '.join(args[:6])})"]

    def _run_passes(self, folder: Path) -> Found:
        """Run the trials, up to one that differs, and return the last."""
        narrow = self._job.precision.compute != "fp32"
        wide = ("precision=fp32",) if narrow else ()
        half = self._steps // 2
        try:
            found = self._pass(folder, "as fp32", wide, half)
        except TrialFailedError:
            if not self._shrinks:
                raise
            self._say("the smaller model does not run: verifying the full size instead")
            self._shrinks = ()
            found = self._pass(folder, "as fp32", wide, half)
        if found.agrees and narrow:
            # What a format does shows in one step; fewer are enough where it is slow, as on CPUs.
            steps = f"steps={max(1, half)}"
            found = self._pass(folder, f"as {self._job.precision.compute}", [steps], None)
        return found

    def _runner(self, folder: Path) -> Runner:
        given = [*self._request.overrides, *self._trial.overrides, *self._shrinks]
        return Runner(self._request.path, given, folder)

    def _pass(self, folder: Path, name: str, keys: Sequence[str], save: int | None) -> Found:
        """Run one trial, and from its save another one in another layout, and compare.

        `keys` come on top of the trial's. `save` is the step after which it saves; None: it does
        not.
        """
        folder = Path(mkdtemp(prefix=f"{name.replace(' ', '-')}-", dir=folder))
        runner = self._runner(folder)
        run_dirs = [runner.train([*keys, *save_at(save)] if save else keys)]
        # Data may have ended before, or there: then nothing goes on.
        if save and recorded_until(run_dirs[0]) > save:
            step = run_dirs[0] / "checkpoints" / step_name(save)
            layout, told = other_layout(runner.load(keys).config, str(step))
            run_dirs.append(runner.train([*keys, *layout]))
            name += f", and resumed on {told}"
        found = runner.compare(run_dirs)
        self._results[name] = found
        self._bytes[name] = moved_and_held(run_dirs[0])
        if found.agrees:
            steps = found.fields["steps"]
            self._say(f"  {name}: {steps} steps agree, worst {found.worst:.1g}")
        return found

    def _bisect(self, folder: Path) -> str:
        """Return what feature it takes, in words."""
        folder = folder / "bisect"
        folder.mkdir()
        runner = self._runner(folder)
        # In fp32 the trial differs already, or only its own format does.
        keys: tuple[str, ...] = ()
        if self._job.precision.compute != "fp32" and len(self._results) == 1:
            keys = ("precision=fp32",)

        def agrees(off: Sequence[str]) -> bool:
            """A trial that cannot run without a feature proves nothing."""
            try:
                run_dir = runner.train([*keys, *with_slots(off, job)])
                return runner.compare([run_dir]).agrees
            except StoppedError:
                raise
            except ZrunError:
                return False

        job = runner.load(keys).config
        if agrees(()):
            return "it differs only after a resume in another layout"
        return bisect(features_of(job), agrees, self._say_trial)

    def _say_trial(self, text: str) -> None:
        self._say(f"  {text}")

    def _conclude(self, found: Found, culprit: str) -> None:
        if self._request.as_json:
            answer: dict[str, Any] = {
                "agrees": found.agrees,
                "trial": self._trial.told,
                "passes": {name: dict(each.fields) for name, each in self._results.items()},
                "bytes": {name: each and each.to_json() for name, each in self._bytes.items()},
                "bisected": culprit or None,
            }
            print(json.dumps(answer, indent=1))
            return
        notes = {note for each in self._results.values() for note in each.fields["notes"]}
        notes |= set(self._trial.notes)
        for note in sorted(notes):
            print(f"note: {note}")
        if found.agrees:
            steps = sum(each.fields["steps"] for each in self._results.values())
            worst = max(each.worst for each in self._results.values())
            print(
                f"your configuration trains what a plain loop trains: {steps} steps, "
                f"{found.fields['tensors']} parameters, worst {worst:.1g}"
            )
            for name, told in self._bytes.items():
                for line in told.in_words if told is not None else ():
                    print(f"{name.partition(',')[0]}, {line}")
            return
        name = list(self._results)[-1]
        print(
            f"your configuration does not train what a plain loop trains, {name}: "
            f"{found.difference}"
        )
        print(f"where to look: {found.fields['difference']['look_at']}")
        if culprit:
            print(culprit)
        else:
            print("to find the feature that causes it: zrun verify JOB --bisect")

    def _say(self, text: str) -> None:
        say(text, sys.stderr)


def _memory(most: int | None) -> Place:
    """Return what a process may take here; `most` is limits.memory."""
    places = [Place(memory_limits.host_available(), "that this host has free")]
    process = memory_limits.process_available()
    if process is not None:
        places.append(Place(process, "that a process may take (ulimit -d)"))
    if most is not None:
        places.append(Place(most, "of limits.memory"))
    return min(places, key=lambda place: place.num_bytes)


def verify(request: VerifyRequest) -> int:
    """Compare a job with a plain loop. Returns the exit code, that of a trial which failed too.

    Raises:
        JobError: the job is wrong, another method, or nothing can be said of it.
    """
    try:
        return Verification(request).run()
    except TrialFailedError as error:  # what it was has been said
        return error.exit_code
