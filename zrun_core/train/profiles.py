"""Profiles of a run: those of its job's `profile`, and those that `zrun profile` asks for.

Ranks that are traced begin and end between the same two steps. What the job says, all of them know;
a request reaches rank 0 as a signal. It says so in its step's message, and when that has come all
ranks ask it for the words of the request.

Whatever fails on the way costs the profile, never the training.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from zrun_core.spine import profile_request
from zrun_core.spine.profile_request import ProfileRequest
from zrun_core.spine.sections.profile import ProfileConfig
from zrun_core.spine.spec import RunSpec
from zrun_core.telemetry.profiler import Profiled, Profiler
from zrun_core.zero.sharded_model import ShardedModel

_TOLD = 10  # parts in the event


@dataclass(frozen=True)
class _Planned:
    """Steps that are to be traced, on some ranks.

    Attributes:
        request: id of who asked; None: the job did.
    """

    first: int
    last: int
    ranks: tuple[int, ...]
    request: str | None = None

    def in_words(self) -> str:
        """Return the steps: "step 10", "steps 10 to 12"."""
        if self.first == self.last:
            return f"step {self.first}"
        return f"steps {self.first} to {self.last}"


@dataclass(frozen=True)
class ProfiledRun:
    """A run as its profiles know it, on one rank.

    Attributes:
        folder: the run directory.
        config: which steps are traced anyway; None: none are.
        total_steps: of the run; None: unknown.
        rank_name: this rank in words.
        host: of it; None: there is only one.
        has_threads: the runtime has others than the one that trains.
    """

    folder: Path
    config: ProfileConfig | None
    total_steps: int | None
    rank_name: str
    host: str | None
    has_threads: bool

    @classmethod
    def of_job(cls, spec: RunSpec, sharded: ShardedModel) -> ProfiledRun:
        """Return that of a job."""
        rank = sharded.mesh.world.index
        plan = spec.plan
        # Updates beside training have a thread, and each forward that goes through in slices.
        slices = spec.job.parallel.facts.goes_in_slices
        return cls(
            Path(spec.run_dir),
            spec.job.profile,
            spec.job.steps,
            f"rank {plan.named(rank)}",
            plan.ranks[rank].host if len(plan.hosts) > 1 else None,
            slices or sharded.tiers is not None,
        )


class Profiles:
    """The profiles of a run, on one rank.

    Attributes:
        is_on: this rank is traced now.
    """

    def __init__(
        self,
        run: ProfiledRun,
        sharded: ShardedModel,
        emit: Callable[..., None],
        *,
        take_request: Callable[[], bool],
        pauses: Callable[[], object] = lambda: None,
        goes_on: Callable[[], object] = lambda: None,
    ) -> None:
        """
        Args:
            emit: of events, with their type first.
            take_request: says whether this process was asked since the last call.
            pauses: called before a profile begins or ends, which is part of no step.
        """
        self._run = run
        self._comm = sharded.comm
        self._world = sharded.mesh.world
        self._emit = emit
        self._take_request = take_request
        self._pauses = pauses
        self._goes_on = goes_on
        self._is_asked = False  # rank 0 has a request
        self._planned: list[_Planned] = []
        self._current: _Planned | None = None  # on all ranks, traced or not
        self._profiler: Profiler | None = None
        config = run.config
        if config is not None:
            self._planned.append(_Planned(config.first, config.last, tuple(config.ranks)))

    @property
    def is_on(self) -> bool:
        return self._profiler is not None

    @property
    def is_under_way(self) -> bool:
        """Return whether a profile is on, on this rank or on others."""
        return self._current is not None

    @property
    def _rank(self) -> int:
        return self._world.index

    # In the middle of a step

    @property
    def contribution(self) -> float:
        """What this rank adds to the step's message: 1 if it was asked for a profile."""
        return float(self._take_request())

    def update(self, asked: float) -> None:
        """Learn from a step's message whether rank 0 was asked.

        Args:
            asked: the sum of what ranks have contributed.
        """
        self._is_asked |= asked > 0

    def step(self, number: int) -> AbstractContextManager[object]:
        """Return what names a step, or the first one of a window."""
        return self._comm.spans.named("step", number)

    # Between two steps, on all ranks alike

    def before_step(self, done: int, together: int = 1) -> None:
        """Hear of requests, and begin the profile whose turn it is.

        Args:
            done: steps made so far.
            together: steps that come before the next call: a window is traced whole.
        """
        if self._is_asked:
            self._is_asked = False
            self._hear(done)
        if self._current is not None:
            return
        self._planned = [each for each in self._planned if each.last > done]
        for planned in self._planned:
            if planned.first <= done + together:
                self._planned.remove(planned)
                self._begin(planned, done + 1)
                return

    def after_step(self, done: int) -> None:
        """End the profile whose last step is made.

        Args:
            done: steps made so far.
        """
        if self._current is None:
            return
        if done >= self._current.last:
            self._end(done)
        elif self._profiler is not None and self._profiler.fills_memory():
            what = f"the profile of {self._current.in_words()} ends after step {done}"
            self._warn(None, f"{what}: the host's memory would not hold the rest of the trace")
            self._write(self._current, done)

    def end_run(self, done: int) -> None:
        """End the profile that is on, as no step follows, and tell of those that never began.

        Args:
            done: steps made.
        """
        if self._current is not None:
            self._end(done)
        for planned in self._planned:
            if planned.first > done:
                self._refuse(planned.request, f"the run ended after step {done}", planned)
        self._planned = []

    def _hear(self, done: int) -> None:
        """Learn what rank 0 was asked for. Collective."""
        text = b""
        if self._rank == 0:
            try:
                text = profile_request.read(self._run.folder).to_text().encode()
            except (OSError, ValueError) as error:
                self._refuse(None, f"the request cannot be read: {error}")
        text = self._comm.all_gather_bytes(text, self._world, name="profile")[0]
        if text:
            self._plan(ProfileRequest.parse(text), done)

    def _plan(self, request: ProfileRequest, done: int) -> None:
        """Plan the profile of a request, or refuse it: on all ranks alike."""
        total = self._run.total_steps
        last = done + request.steps
        if self._current is not None:
            why = f"{self._current.in_words()} are being profiled: ask again afterwards"
        elif (meets := self._meeting(done + 1, last)) is not None:
            why = f"the job profiles {meets.in_words()} itself: ask again afterwards"
        elif total is not None and last > total:
            left = f"{total - done} steps"
            if total - done == 1:
                left = "1 step"
            why = f"the run has {left} left: ask for as many, or fewer"
        else:
            self._planned.append(_Planned(done + 1, last, request.ranks, request.id))
            return
        self._refuse(request.id, why)

    def _meeting(self, first: int, last: int) -> _Planned | None:
        """Return a profile that is planned for some of these steps."""
        for planned in self._planned:
            if planned.first <= last and first <= planned.last:
                return planned
        return None

    def _refuse(self, request: str | None, why: str, planned: _Planned | None = None) -> None:
        """Say on the main rank why there is no profile.

        `request` is the id of who asked; None: the job did. `planned` is the profile, if it was.
        """
        if self._rank == 0:
            what = "the profile" if planned is None else f"the profile of {planned.in_words()}"
            self._warn(request, f"{what} is not taken: {why}")

    def _warn(self, request: str | None, message: str) -> None:
        self._emit("warning", message=message, unprofiled=request or "profile")

    def _begin(self, planned: _Planned, first: int) -> None:
        """Begin a profile: it is on for all ranks, and traces some of them.

        `first` is the step that comes: after the one asked for, where the run goes on later.
        """
        self._current = _Planned(first, planned.last, planned.ranks, planned.request)
        if self._rank not in planned.ranks:
            return
        self._pauses()
        run = self._run
        profiler = Profiler(self._comm, self._rank, run.rank_name, all_threads=run.has_threads)
        failure = _tried(profiler.begin)
        if failure:
            self._comm.spans.is_on = False
            self._warn(planned.request, f"{planned.in_words()} are not profiled: {failure}")
        else:
            self._profiler = profiler
        self._goes_on()

    def _end(self, done: int) -> None:
        """End the profile that is on.

        `done` is the last step that was made.
        """
        current, self._current = self._current, None
        if current is not None:
            self._write(current, done)

    def _write(self, current: _Planned, done: int) -> None:
        """End the trace of this rank, if it is traced, and write it.

        `done` is the last step that was made.
        """
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self._pauses()
        found: list[Profiled] = []
        ended = _Planned(current.first, max(done, current.first), current.ranks, current.request)
        name = f"steps-{ended.first}-{ended.last}"
        folder = self._run.folder / profile_request.FOLDER / name
        failure = _tried(lambda: found.append(profiler.end(folder)))
        if failure:
            self._comm.spans.is_on = False
            what = f"the profile of {ended.in_words()} is not written, and training goes on"
            self._warn(current.request, f"{what}: {failure}")
        else:
            self._tell(ended, found[0])
        self._goes_on()

    def _tell(self, ended: _Planned, found: Profiled) -> None:
        """Emit what a profile has found on this rank."""
        if found.note:
            self._emit("warning", message=found.note)
        self._emit(
            "profile",
            steps=[ended.first, ended.last],
            path=str(found.path),
            host=self._run.host,
            bytes=found.num_bytes,
            memory=None if found.memory is None else str(found.memory),
            seconds=found.parts.steps_s,
            parts=[part.to_json() for part in found.parts.largest(_TOLD)],
            exposed_s=found.exposed_s,
            request=ended.request,
        )


def _tried(call: Callable[[], None]) -> str:
    """Call what may fail in any way, and must not end the training; return why it did."""
    try:
        call()
    except OSError as error:
        return error.strerror or str(error)
    except Exception as error:  # parts of torch that have no public names, and memory
        return f"{type(error).__name__}: {error}"
    return ""
