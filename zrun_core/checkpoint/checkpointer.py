"""The saves of a run: when one is due, what it holds, and how all ranks make it a step together.

    begin     rank 0 makes the folder; each rank has its parts, or a copy of them in host memory, and its streams
    write     each rank writes its file, in a thread; training goes on meanwhile if the save is asynchronous. On a CPU
              the thread copies the optimizer's state first, beside the next forward and backward, which leave it alone
              (Mohan et al. 2021, CheckFreq, section 4.2); the next update waits for that
    report    when every rank has written, each tells all others the digests of its file, or why there is none
    commit    rank 0 writes the manifest and renames the folder, in its thread
    prune     rank 0 removes older steps, in another thread, once it has read one that is to stay; nobody waits for it

Ranks agree on each turn through numbers that they add to the step's one message, so no rank ever waits for another's
disk unless it was asked to. Where it was, they ask each other again and again whether all are ready: how long one may
take is then `limits.save_s`, and not the time that one message may. The thread never talks to other ranks, and never
looks at the model: a look at a parameter in the middle of a step makes it whole, which other ranks have to take part
in.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import ChainMap, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zrun_core.checkpoint.best import Best, is_better, value_of
from zrun_core.checkpoint.folder import CheckpointFolder
from zrun_core.checkpoint.manifest import (
    OTHERS,
    FileInfo,
    Fragment,
    Manifest,
    SavedRank,
    TensorInfo,
    merge_tensors,
    tensors_from_json,
)
from zrun_core.checkpoint.manifest_fields import RANK, VALUE
from zrun_core.checkpoint.model_files import ModelFiles
from zrun_core.checkpoint.model_state import CheckpointState
from zrun_core.checkpoint.resume import Resumed
from zrun_core.checkpoint.shard_file import WriteItem, write_plain, write_shard
from zrun_core.distributed import rng
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.transport import Group
from zrun_core.errors import CheckpointError, HangError, PeerError, SaveError
from zrun_core.memory.arena import flat_buffer
from zrun_core.spine.config import BestConfig, CheckpointConfig, LimitsConfig

Tell = Callable[..., None]  # an event's fields
_ALIGN = 64  # bytes, in the snapshot
_TURN_S = 0.25  # between two messages of ranks that wait for a disk
_FAILURES = 2  # saves in a row that may fail where the job says to go on
_LAST = ("stopped", "numeric", "end")  # reasons of saves after which nothing goes on


class SaveConsensus(NamedTuple):
    """What ranks tell each other with every step; each number is summed over all ranks."""

    written: float = 0.0  # ranks that have written their file
    settled: float = 0.0  # 1 committed, -1 not committed, says rank 0
    due: float = 0.0  # 1: it is time to save, by rank 0's clock
    asked: float = 0.0  # ranks that a signal has asked for a save


@dataclass(frozen=True)
class RunInfo:
    """What a manifest says of the run."""

    run_id: str
    job: dict[str, Any]
    versions: dict[str, str]


class _Commit(NamedTuple):
    """What became of a step on rank 0."""

    error: str = ""  # why it is not there
    warning: str = ""  # what went wrong after it was there
    num_bytes: int = 0


class _Pruned(NamedTuple):
    """What became of older steps."""

    removed: list[int]
    warnings: list[str]


class _Copies(NamedTuple):
    """Parts of a snapshot that the thread fills."""

    pairs: list[tuple[torch.Tensor, torch.Tensor]]  # the copy, and what is copied
    made: threading.Event  # or given up

    def make(self) -> None:
        try:
            for copy, original in self.pairs:
                copy.copy_(original)
        finally:
            self.made.set()


@dataclass
class _Save:
    """A save under way."""

    step: int
    reason: str
    tmp: Path
    progress: dict[str, Any]
    layout: dict[str, Any]  # on rank 0, as are the tensors
    tensors: Sequence[TensorInfo]
    start: float
    writing: Future[bytes]
    prunes: bool
    best: Best | None = None  # if it is that of this step
    stall_s: float = 0.0
    reports: list[bytes] | None = None  # once every rank has written
    committing: Future[_Commit] | None = None  # on rank 0
    beside: ModelFiles = field(default_factory=ModelFiles)  # on rank 0


class Checkpointer:
    """Saves of one model on one rank. Every method is called by all ranks at the same place between two steps.

    Attributes:
        last_step: the newest step that is committed, or under way.
        prunes: whether a save that begins now makes older steps go.
        best: the best evaluation so far, of a step that is committed or under way.
        on_commit: called on every rank, in the middle of a turn, with a step that is committed.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        state: CheckpointState,
        streams: rng.Streams,
        config: CheckpointConfig,
        comm: Comm,
        world: Group,
        about: RunInfo,
        tell: Tell,
        patience_s: float = LimitsConfig().save_s,
        patience_key: str = "",
    ) -> None:
        """
        Args:
            tell: called on rank 0 with the fields of a `save` event, or with `warning`, a text.
            patience_s: that a disk may take for one turn of a save.
            patience_key: the job's name for it, if there is a job.
        """
        self.folder, self.state, self.config, self.about = folder, state, config, about
        self._streams = streams
        self.last_step: int | None = None
        self.prunes = True
        self.best: Best | None = None
        self._safe_best: Best | None = None  # of a step that is committed
        self._better: Best | None = None  # that of a step which is yet to be saved
        self.on_commit: Callable[[int], object] = lambda step: None
        self._comm, self._world, self._tell, self._patience_s = comm, world, tell, patience_s
        self._patience_key = patience_key
        self._consensus = SaveConsensus()
        self._is_asked = False  # a signal has asked for a save that has not begun
        self._current: _Save | None = None
        self._failures = 0
        self._last_save = time.monotonic()
        self._room: torch.Tensor | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="zrun-save")
        self._prune_pool = ThreadPoolExecutor(1, thread_name_prefix="zrun-prune")
        self._pruning: deque[Future[_Pruned]] = deque()  # on rank 0

    @property
    def under_way(self) -> int | None:
        """The step that is being saved."""
        return None if self._current is None else self._current.step

    # Between steps

    def contribution(self, asked: bool = False) -> SaveConsensus:
        """What this rank adds to the step's message.

        Args:
            asked: whether a signal has asked this rank for a save since the step before.
        """
        current, is_first = self._current, self._world.index == 0
        settled = 0.0
        if current is not None and current.committing is not None and current.committing.done():
            settled = -1.0 if current.committing.result().error else 1.0
        due = (
            is_first
            and self.config.minutes is not None
            and self._minutes_passed() >= self.config.minutes
        )
        return SaveConsensus(
            float(current is not None and current.writing.done()), settled, float(due), float(asked)
        )

    def update(self, consensus: SaveConsensus) -> None:
        """The sums that a step's message came to."""
        self._consensus = consensus
        self._is_asked |= consensus.asked > 0

    def _minutes_passed(self) -> float:
        return (time.monotonic() - self._last_save) / 60

    def needs_turn(self, step: int) -> bool:
        """Whether `after_step` has anything to do after this step; the same on every rank."""
        may_begin = self._current is None or self.config.busy == "wait"
        is_asked = self._is_asked and may_begin
        is_under_way = self._current is not None and any(self._consensus)
        return self._is_due(step) or self.has_better or is_asked or is_under_way

    @property
    def has_better(self) -> bool:
        """Whether the newest evaluation was the best so far, and its step is not saved as that."""
        return self._better is not None

    def offer(self, step: int, values: Mapping[str, float]) -> None:
        """Take in an evaluation after `step`: the best so far makes a save of this step due.

        Raises:
            JobError: the metric of `checkpoint.best` is not among `values`.
        """
        goal = self.config.best
        if goal is None:
            return
        value = value_of("checkpoint.best.metric", goal.metric, values)
        if is_better(value, self.best, goal.mode):
            self._better = Best(step, goal.metric, goal.mode, value)

    def _is_due(self, step: int) -> bool:
        every = self.config.every
        return (every is not None and step % every == 0) or self._consensus.due > 0

    def after_step(self, step: int, progress: Callable[[], dict[str, Any]]) -> None:
        """Move the save under way on, and begin one if it is due, or if a signal has asked for it.

        Where a save that is due is skipped because another is under way, one that was asked for begins after that.

        Args:
            progress: what the manifest is to say of the run so far; asked only if there is a save.

        Raises:
            SaveError: this rank could not save, and the job says to stop then.
            PeerError: another rank could not.
        """
        is_due = self._is_due(step)
        self.advance(self._consensus)
        if self._current is not None and self.config.busy == "skip" and not self.has_better:
            if is_due:
                self._warn(
                    f"step {step} is not saved: step {self._current.step} is still being written"
                )
                self._last_save = time.monotonic()  # or `minutes` would ask again after every step
        elif is_due or self._is_asked or self.has_better:
            reason = "asked" if self._is_asked else "due" if is_due else "best"
            self.save(step, progress, reason, wait=not self.config.async_)

    def open(self, resumed: Resumed | None) -> None:
        """Before the first save: rank 0 removes what dead processes left, and frees the numbers of damaged steps.

        Raises:
            SaveError: a damaged step cannot be set aside.
        """
        damaged: list[int] = []
        if resumed is not None and _is_same(resumed.path.parent, self.folder.path):
            self.last_step = resumed.manifest.step
            damaged = [step for step in resumed.skipped if step > resumed.manifest.step]
        if self._world.index == 0:
            wait(self._pruning)
            self.folder.sweep()
            for step in damaged:
                self.folder.set_aside(step)
        if self.config.best is not None and self.last_step is not None:
            assert resumed is not None
            own = self._find_best(self.config.best, resumed) if self._world.index == 0 else None
            told = json.dumps(None if own is None else asdict(own)).encode()
            found = json.loads(self._comm.all_gather_bytes(told, self._world, name="save")[0])
            self.best = self._safe_best = None if found is None else Best(**found)

    def _find_best(self, goal: BestConfig, resumed: Resumed) -> Best | None:
        """On rank 0: the best step of a run that goes on in its own folder.

        The step that it goes on from tells it. The file `best` does too where that step was
        evaluated after it was saved; and it is written anew where a process died before it was.
        """
        told = resumed.manifest.progress.get("best")
        known = None if told is None else Best(**told)
        named = self.folder.best_so_far()
        if any(best is not None and not best.is_of(goal) for best in (known, named)):
            self._warn("checkpoint.best names another metric or mode than before: it begins anew")
            return None
        if known is not None and not self.folder.step_path(known.step).is_dir():
            self._warn(f"step {known.step}, the best so far, is gone: the best begins anew")
            known = None
        if named is not None and named.step <= resumed.manifest.step:
            known = named if is_better(named.value, known, goal.mode) else known
        if known is not None and known != named:
            self._point_best(known)
        return known

    def _point_best(self, best: Best) -> None:
        """On rank 0."""
        try:
            self.folder.point_best(best)
        except SaveError as error:
            self._warn(str(error))

    def save(
        self, step: int, progress: Callable[[], dict[str, Any]], reason: str, *, wait: bool = True
    ) -> None:
        """Save `step`; with `wait` it is committed when this returns. A step that is saved already is not saved again.

        Where the job says to go on when a save fails, this may return without it, unless nothing goes on after it.

        Args:
            progress: as for `after_step`; asked when nothing else is under way.

        Raises:
            SaveError: this rank could not save, and the job says to stop then, or stops anyway.
            PeerError: another rank could not.
            HangError: a rank's disk took longer than it may.
        """
        self.finish()
        if step != self.last_step:
            self._begin(step, progress(), reason, copy=not wait or self._comm.device.type == "cuda")
            if wait:
                self.finish()
        elif self._better is not None:  # it was evaluated after it was saved
            self.best = self._safe_best = self._better
            self._better = None
            if self._world.index == 0:
                self._point_best(self.best)

    def finish(self) -> None:
        """Wait until no save is under way.

        Raises:
            SaveError, PeerError, HangError: as `save`.
        """
        current = self._current
        if current is None:
            return
        start = time.monotonic()
        if current.reports is None:
            self._await(current.step, current.writing)
            self._report(current)
        if self._current is None:  # it failed, and the job goes on
            return
        self._await(current.step, current.committing)
        error = current.committing.result().error if current.committing is not None else ""
        error = self._comm.all_gather_bytes(error.encode(), self._world, name="save")[0].decode()
        current.stall_s += time.monotonic() - start
        self._end(current, error)

    def finish_pruning(self) -> None:
        """Wait until older steps are gone, unless a disk takes too long for that. Collective; no save is under way."""
        with suppress(HangError):
            self._await(self.last_step or 0, self._pruning[-1] if self._pruning else None)
        self._report_pruned()

    def close(self) -> None:
        """No save comes after this."""
        self._pool.shutdown()
        self._prune_pool.shutdown()

    # The turns of one save

    def _begin(self, step: int, progress: dict[str, Any], reason: str, *, copy: bool) -> None:
        start = time.monotonic()
        self._is_asked = False
        better, self._better = self._better, None
        self.best = better or self.best
        if self.config.best is not None:
            progress = progress | {"best": None if self.best is None else asdict(self.best)}
        opened = self._open(step, reason)
        self._last_save = time.monotonic()
        if opened is None:
            return
        tmp, buffers, beside = opened
        later = _Copies([], threading.Event())
        layout: dict[str, Any] = {}
        tensors: Sequence[TensorInfo] = ()
        try:
            if self.state.describes_part:
                layout, tensors = self.state.layout, self.state.tensors()
            parts = [*self.state.write_items(), *self.state.own_buffers(buffers)]
            streams, numbers = self._streams.capture()
            rank = self._world.index
            parts += [
                WriteItem(f"rng/{rank}/{key}", RANK, 0, data.numel(), data)
                for key, data in streams.items()
            ]
            own = SavedRank(rank, numbers, self.state.reducer_state())
            said: dict[str, Any] = {"scalars": self.state.scalars(), "own": asdict(own)}
            if self.state.describes_part and rank:  # the first rank writes the manifest itself
                said |= {"layout": layout, "tensors": [asdict(info) for info in tensors]}
            if copy:
                parts, later = self._snapshot(parts)
        except Exception as error:  # such as too little memory for the copy: the others hear of it with the reports
            writing: Future[bytes] = Future()
            writing.set_result(_in_words(error).encode())
        else:
            path = tmp / f"rank-{rank:05d}.safetensors"
            writing = self._pool.submit(_write, path, parts, said, later)
        current = _Save(
            step,
            reason,
            tmp,
            progress,
            layout,
            tensors,
            start,
            writing,
            self.prunes,
            best=better,
            beside=beside,
        )
        self._current, self.last_step = current, step
        if later.pairs:
            self.state.before_update(lambda: self._await_copies(current, later))
        current.stall_s = time.monotonic() - start

    def _open(self, step: int, reason: str) -> tuple[Path, dict[str, str], ModelFiles] | None:
        """Make the folder of a step, with all ranks.

        Returns:
            The folder; the digests of all buffers, as they are saved; on rank 0 what goes beside
            the tensors. None if a rank could not, and the job goes on.
        """
        making = self._pool.submit(self.folder.begin, step) if self._world.index == 0 else None
        self._await(step, making)
        opening: dict[str, Any] = {}
        beside = ModelFiles()
        try:
            if making is not None:
                opening = {"tmp": str(making.result())}
                beside = self.state.model_files()
            if self.state.describes_part:
                opening["buffers"] = self.state.buffer_digests()
        except Exception as error:
            opening["error"] = _in_words(error)
        payload = json.dumps(opening).encode()
        told = self._comm.all_gather_bytes(payload, self._world, name="save")
        openings = [json.loads(each) for each in told]
        if failed := [rank for rank, each in enumerate(openings) if "error" in each]:
            if making is not None and making.exception() is None:
                self.folder.discard(making.result())
            self._fail(step, reason, failed[0], openings[failed[0]]["error"])
            return None
        buffers = ChainMap(*(each.get("buffers", {}) for each in openings))  # the first one's
        return Path(openings[0]["tmp"]), dict(buffers), beside

    def _await_copies(self, current: _Save, copies: _Copies) -> None:
        start = time.monotonic()
        copies.made.wait()
        current.stall_s += time.monotonic() - start

    def _snapshot(self, parts: Sequence[WriteItem]) -> tuple[list[WriteItem], _Copies]:
        """Copies in host memory that is kept from save to save, and those of them that are yet to be filled.

        Not later than now is copied what others than the update may change: parameters and buffers, by the user's code.
        """
        sizes = [-(-part.data.nbytes // _ALIGN) * _ALIGN for part in parts]
        if self._room is None or self._room.numel() < sum(sizes):
            self._room = None
            cuda = self._comm.device.type == "cuda"
            self._room = (
                torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
                if cuda
                else flat_buffer(sum(sizes), torch.uint8, torch.device("cpu"))
            )
        copies, offset = [], 0
        later = _Copies([], threading.Event())
        for part, size in zip(parts, sizes, strict=True):
            room = self._room[offset : offset + part.data.nbytes].view(part.data.dtype)
            copies.append(replace(part, data=room))
            if part.state in (VALUE, RANK) or part.data.is_cuda:
                room.copy_(part.data, non_blocking=True)
            else:
                later.pairs.append((room, part.data))
            offset += size
        if self._comm.device.type == "cuda":
            torch.cuda.current_stream(self._comm.device).synchronize()
        return copies, later

    def advance(self, consensus: SaveConsensus) -> None:
        """Move the save under way on, as far as the consensus of a step says that it takes no waiting.

        Raises:
            SaveError: this rank could not save, and the job says to stop then.
            PeerError: another rank could not.
        """
        self._consensus, current = SaveConsensus(), self._current
        if current is None:
            return
        start = time.monotonic()
        if current.reports is None:
            if consensus.written == self._world.size:
                self._report(current)
                current.stall_s += time.monotonic() - start
        elif consensus.settled:
            error = ""
            if consensus.settled < 0:
                assert current.committing is not None or self._world.index
                error = current.committing.result().error if current.committing is not None else ""
                error = self._comm.all_gather_bytes(error.encode(), self._world, name="save")[
                    0
                ].decode()
            self._end(current, error)

    def _await(self, step: int, own: Future[Any] | None) -> None:
        """Return when every rank has done what it does for `step` in its thread; `own` is this rank's part, if any.

        Raises:
            HangError: on all ranks, if one takes longer than it may.
        """
        late, size = time.monotonic() + self._patience_s, self._world.size
        while True:
            if own is not None:
                wait([own], timeout=_TURN_S)
            said = torch.zeros(size + 1, dtype=torch.float64)
            said[self._world.index] = own is not None and not own.done()
            said[size] = self._world.index == 0 and time.monotonic() > late
            *is_busy, is_late = self._comm.all_reduce_small(
                said.to(self._comm.device), self._world, name="save"
            ).tolist()
            if not any(is_busy):
                return
            if is_late:
                key = f" ({self._patience_key})" if self._patience_key else ""
                raise HangError(
                    f"step {step} is not saved: the disk of rank {is_busy.index(1.0)} "
                    f"has not answered for {self._patience_s:g} s{key}"
                )

    def _report(self, current: _Save) -> None:
        """All ranks hear of all files, and rank 0 commits them, or all know that one is missing."""
        current.reports = self._comm.all_gather_bytes(
            current.writing.result(), self._world, name="save"
        )
        failed = [
            (rank, text) for rank, text in enumerate(current.reports) if not text.startswith(b"{")
        ]
        if failed:
            self._current = self.last_step = None
            if self._world.index == 0:
                self.folder.discard(current.tmp)
            rank, text = failed[0]
            self._fail(current.step, current.reason, rank, text.decode())
        elif self._world.index == 0:
            current.committing = self._pool.submit(self._commit, current, current.reports)

    def _commit(self, current: _Save, reports: Sequence[bytes]) -> _Commit:
        """In rank 0's thread."""
        try:
            beside = [
                write_plain(current.tmp / name, content)
                for name, content in current.beside.files.items()
            ]
            manifest = self._manifest(current, [json.loads(text) for text in reports], beside)
            warning = self.folder.commit(current.tmp, manifest)
        except Exception as error:
            self.folder.discard(current.tmp)
            return _Commit(error=_in_words(error))
        if warning:  # nothing older is removed while it may not be on the disk
            return _Commit(warning=warning, num_bytes=manifest.num_bytes)
        try:
            self.folder.point_latest(current.step)
            if current.best is not None:
                self.folder.point_best(current.best)
        except (SaveError, OSError) as error:
            return _Commit(warning=str(error), num_bytes=manifest.num_bytes)
        return _Commit(num_bytes=manifest.num_bytes)

    def _prune(self, keep: int) -> _Pruned:
        """In rank 0's other thread."""
        known, removed, warnings = set(self.folder.damaged), [], []
        try:
            removed = self.folder.prune(keep)
        except (SaveError, CheckpointError, OSError) as error:
            warnings.append(str(error))
        for step, problem in self.folder.damaged.items():
            if step not in known:
                warnings.append(
                    f"step {step} does not count, and an older one stays in its place: {problem}"
                )
        return _Pruned(removed, warnings)

    def _report_pruned(self) -> list[int]:
        """Say what went wrong with older steps, if anything; returns those that are gone since this was asked last."""
        removed: list[int] = []
        while self._pruning and self._pruning[0].done():
            pruned = self._pruning.popleft().result()
            removed += pruned.removed
            for warning in pruned.warnings:
                self._warn(warning)
        return removed

    def _manifest(
        self, current: _Save, reports: Sequence[dict[str, Any]], beside: Sequence[FileInfo]
    ) -> Manifest:
        scalars: dict[str, dict[str, float]] = {}
        for report in reports:
            scalars |= report["scalars"]
        others = [report for report in reports if "layout" in report]
        layout = current.layout
        if others:
            layout = layout | {OTHERS: [report["layout"] for report in others]}
        told = [current.tensors, *(tensors_from_json(report["tensors"]) for report in others)]
        return Manifest(
            step=current.step,
            run_id=self.about.run_id,
            versions=self.about.versions,
            job=self.about.job,
            world_size=self._world.size,
            layout=layout,
            progress=current.progress,
            files=[*(FileInfo(**report["file"]) for report in reports), *beside],
            tensors=[
                replace(info, scalars=scalars.get(info.name, {})) for info in merge_tensors(told)
            ],
            fragments=[Fragment(**each) for report in reports for each in report["fragments"]],
            rank_states=[SavedRank(**report["own"]) for report in reports],
            model=current.beside.model,
        )

    def _end(self, current: _Save, error: str) -> None:
        self._current = None
        if error:
            self.last_step = None
            self._fail(current.step, current.reason, 0, error)
            return
        self._failures = 0
        self._safe_best = self.best
        self.on_commit(current.step)
        if current.committing is not None:
            commit = current.committing.result()
            removed = self._report_pruned()
            if commit.warning:
                self._warn(commit.warning)
            elif current.prunes:
                self._pruning.append(self._prune_pool.submit(self._prune, self.config.keep))
            self._tell(
                step=current.step,
                path=str(self.folder.step_path(current.step)),
                reason=current.reason,
                bytes=commit.num_bytes,
                seconds=time.monotonic() - current.start,
                stall_s=current.stall_s,
                removed=removed,
                best=None if current.best is None else asdict(current.best),
            )

    def _fail(self, step: int, reason: str, rank: int, text: str) -> None:
        """Step `step` was not saved, because of `rank`. All ranks come here together."""
        self._failures += 1
        self.best = self._safe_best
        if (
            self.config.on_save_error == "warn"
            and reason not in _LAST
            and self._failures <= _FAILURES
        ):
            self._warn(
                f"step {step} is not saved: {text}; training goes on (checkpoint.on_save_error)",
                unsaved=step,
            )
        elif rank == self._world.index:
            raise SaveError(f"step {step} is not saved: {text}")
        else:
            raise PeerError(f"rank {rank} could not save step {step}")

    def _warn(self, text: str, **fields: Any) -> None:
        if self._world.index == 0:
            self._tell(warning=text, **fields)


def _write(path: Path, parts: Sequence[WriteItem], said: dict[str, Any], later: _Copies) -> bytes:
    """In the thread: write a rank's file.

    Args:
        said: what the rank tells the others beside what is in its file.

    Returns:
        What it tells them, as JSON; or in words, why there is no file.
    """
    try:
        later.make()
        file, fragments = write_shard(path, parts)
    except Exception as error:
        return _in_words(error).encode()
    report = {"file": asdict(file), "fragments": [asdict(each) for each in fragments]}
    return json.dumps({**report, **said}).encode()


def _is_same(folder: Path, other: Path) -> bool:
    """Whether both paths lead to the same folder."""
    try:
        return folder.samefile(other)
    except OSError:
        return False


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, SaveError) else f"{type(error).__name__}: {error}"


def versions() -> dict[str, str]:
    """Of what a run is made of."""
    found = {"torch": torch.__version__, "python": sys.version.split()[0]}
    if (numpy := sys.modules.get("numpy")) is not None:
        found["numpy"] = numpy.__version__
    return found
