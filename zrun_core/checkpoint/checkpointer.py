"""The saves of a run: when one is due, and how all ranks make it a step together.

    the loop, on every rank              thread of each rank          thread of rank 0
    -------------------------------------------------------------------------------------------
    step 50: due
      rank 0 makes the folder
      snapshot, unless the loop waits
        |------------------------------> (rest of the snapshot)
    steps 51, 52                         rank-0000N.safetensors
        |   message of the step:           |
        |   written += 1  <----------------+ fsync
    step 53: all have written
      rank 0 has their reports  ----------------------------------> manifest.json, fsync
    step 54                                                         rename: step-50 is there
        |   message of the step:                                      |
        |   settled = 1   <-------------------------------------------+ latest, best
    step 55: all know that it is committed
      older steps removed, by the `Pruner` of rank 0; `save` event

Ranks agree on each turn through numbers that they add to the step's one message (`SaveConsensus`),
so no rank waits for another's disk unless it was asked to. Where it was, they ask each other again
and again whether all are ready: one may then take `limits.save_s`, and not only the time that one
message may. Where ranks meet once in many steps, the turn that finds all files written waits for
the manifest too: the next turn may be as far away as the next save.

The threads never talk to other ranks, and never look at the model: a look at a parameter in the
middle of a step unshards it, which other ranks have to take part in.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zrun_core.checkpoint.best import Best
from zrun_core.checkpoint.best_saves import BestSaves, find_best, point_best
from zrun_core.checkpoint.folder import CheckpointFolder
from zrun_core.checkpoint.manifest_fields import RANK, rank_file
from zrun_core.checkpoint.manifest_parts import SavedRank
from zrun_core.checkpoint.model_files import ModelFiles
from zrun_core.checkpoint.model_state import CheckpointState
from zrun_core.checkpoint.pruner import Pruner
from zrun_core.checkpoint.rank_save import (
    RankPart,
    RankSave,
    RunInfo,
    commit_step,
    describe_error,
    write_rank,
)
from zrun_core.checkpoint.resume import Resumed
from zrun_core.checkpoint.shard_file import WriteItem
from zrun_core.checkpoint.snapshot import LateCopies, Snapshot
from zrun_core.distributed import rng
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.transport import Group
from zrun_core.errors import HangError, PeerError, SaveError
from zrun_core.hardware.accelerator import is_accelerator
from zrun_core.spine.sections.checkpoint import CheckpointConfig
from zrun_core.spine.sections.guards import LimitsConfig

Tell = Callable[..., None]  # an event's fields
_POLL_S = 0.25  # between two messages of ranks that wait for a disk
_MAX_FAILURES = 2  # saves in a row that may fail where the job says to go on
_LAST_REASONS = ("stopped", "numeric", "end")  # of saves after which nothing goes on


class SaveConsensus(NamedTuple):
    """Numbers that ranks add to every step's message; each is summed over all ranks.

    Attributes:
        written: ranks that have written their file.
        settled: 1 committed, -1 not committed, says rank 0.
        due: 1: it is time to save, by rank 0's clock.
        asked: ranks that a signal has asked for a save.
    """

    written: float = 0.0
    settled: float = 0.0
    due: float = 0.0
    asked: float = 0.0


class _Opened(NamedTuple):
    """The beginning of a step that all ranks agree on.

    Attributes:
        tmp: the folder in which ranks write.
        buffers: the digests of all buffers as they are saved.
        beside: on rank 0, the files without tensors.
    """

    tmp: Path
    buffers: Mapping[str, str]
    beside: ModelFiles


class Checkpointer:
    """Saves of one model on one rank.

    Every method is called by all ranks at the same place between two steps.

    Attributes:
        last_step: the newest step that is committed, or under way.
        prunes: whether a save that begins now makes older steps go.
        has_rare_turns: many steps lie between two messages of all ranks.
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
        run: RunInfo,
        tell: Tell,
        patience_s: float = LimitsConfig().save_s,
        patience_key: str = "",
    ) -> None:
        """
        Args:
            state: of the model, or of several.
            tell: called on rank 0 with the fields of a `save` event, or with `warning`, a text.
            patience_s: that a disk may take for one turn of a save.
            patience_key: the job's name for it, if there is a job.
        """
        self.folder = folder
        self.state = state
        self.config = config
        self.last_step: int | None = None
        self.prunes = True
        self.has_rare_turns = False
        self.on_commit: Callable[[int], object] = lambda step: None
        self._streams = streams
        self._comm = comm
        self._world = world
        self._run = run
        self._tell = tell
        self._patience_s = patience_s
        self._patience_key = patience_key
        self._best = BestSaves()
        self._consensus = SaveConsensus()
        self._is_asked = False  # a signal has asked for a save that has not begun
        self._current: RankSave | None = None
        self._failures = 0  # in a row
        self._last_save = time.monotonic()
        self._snapshot = Snapshot(comm.device)
        self._has_warned = False  # of the snapshot's memory
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="zrun-save")
        self._pruner = Pruner(folder)

    @property
    def under_way(self) -> int | None:
        """The step that is being saved."""
        return None if self._current is None else self._current.step

    # Between steps

    def contribution(self, asked: bool = False) -> SaveConsensus:
        """Return what this rank adds to the step's message.

        Args:
            asked: whether a signal has asked this rank for a save since the step before.
        """
        written = settled = 0.0
        current = self._current
        if current is not None:
            written = float(current.writing.done())
            if current.committing is not None and current.committing.done():
                settled = -1.0 if current.committing.result().error else 1.0
        return SaveConsensus(written, settled, float(self._is_time()), float(asked))

    def _is_time(self) -> bool:
        """Return whether rank 0's clock says to save."""
        minutes = self.config.minutes
        if minutes is None or self._world.index != 0:
            return False
        return (time.monotonic() - self._last_save) / 60 >= minutes

    def update(self, consensus: SaveConsensus) -> None:
        """Take in the sums over all ranks that a step's message has brought."""
        self._consensus = consensus
        if consensus.asked:
            self._is_asked = True

    def needs_turn(self, step: int) -> bool:
        """Return whether `after_step` has anything to do after `step`; the same on every rank."""
        if self._is_due(step) or self.has_better:
            return True
        if self._current is None:
            return self._is_asked
        return any(self._consensus) or (self._is_asked and self.config.busy == "wait")

    def _is_due(self, step: int) -> bool:
        every = self.config.every
        if every is not None and step % every == 0:
            return True
        return self._consensus.due > 0

    @property
    def has_better(self) -> bool:
        """True if the newest evaluation was the best so far, and its step is not saved as that."""
        return self._best.candidate is not None

    def offer(self, step: int, values: Mapping[str, float]) -> None:
        """Take in an evaluation after `step`: the best so far makes a save of this step due.

        Raises:
            JobError: the metric of `checkpoint.best` is not among `values`.
        """
        if self.config.best is not None:
            self._best.offer(step, values, self.config.best)

    def after_step(self, step: int, progress: Callable[[], dict[str, Any]]) -> None:
        """Move the save under way on, and begin one if it is due, or if a signal has asked for it.

        Where a save that is due is skipped because another is under way, one that was asked for
        begins after that.

        Args:
            step: optimizer steps made.
            progress: what the manifest is to say of the run so far; asked only if there is a save.

        Raises:
            SaveError: this rank could not save, and the job says to stop then.
            PeerError: another rank could not.
        """
        is_due = self._is_due(step)
        self.advance(self._consensus)
        if self._current is not None and self.config.busy == "skip" and not self.has_better:
            if is_due:
                busy = f"step {self._current.step} is still being written"
                self._warn(f"step {step} is not saved: {busy}")
                self._last_save = time.monotonic()  # or `minutes` would ask again after every step
            return
        if self._is_asked:
            reason = "asked"
        elif is_due:
            reason = "due"
        elif self.has_better:
            reason = "best"
        else:
            return
        self.save(step, progress, reason, wait=not self.config.async_)

    def open(self, resumed: Resumed | None) -> None:
        """Prepare the folder for the first save.

        Rank 0 removes what dead processes have left, and frees the numbers of damaged steps.

        Raises:
            SaveError: a damaged step cannot be set aside.
        """
        damaged: list[int] = []
        if resumed is not None and _is_same(resumed.path.parent, self.folder.path):
            self.last_step = resumed.manifest.step
            damaged = [step for step in resumed.skipped if step > resumed.manifest.step]
        if self._world.index == 0:
            self._pruner.wait()
            self.folder.sweep()
            for step in damaged:
                self.folder.set_aside(step)
        if self.config.best is None or self.last_step is None:
            return
        assert resumed is not None
        own: dict[str, Any] | None = None
        if self._world.index == 0:
            best = find_best(self.folder, self.config.best, resumed, self._warn)
            own = None if best is None else asdict(best)
        found = json.loads(self._all_gather(json.dumps(own).encode())[0])
        self._best.restore(None if found is None else Best(**found))

    # Saves

    def save(
        self, step: int, progress: Callable[[], dict[str, Any]], reason: str, *, wait: bool = True
    ) -> None:
        """Save `step`, unless it is saved already.

        Where the job says to go on when a save fails, this may return without it, unless nothing
        goes on after it.

        Args:
            step: optimizer steps made.
            progress: as for `after_step`; asked when nothing else is under way.
            wait: return when the step is committed; else when the rest needs no waiting.

        Raises:
            SaveError: this rank could not save, and the job says to stop then, or stops anyway.
            PeerError: another rank could not.
            HangError: a rank's disk took longer than it may.
        """
        self.finish()
        if step != self.last_step:
            self._begin(
                step, progress(), reason, copy=not wait or is_accelerator(self._comm.device)
            )
            if wait:
                self.finish()
        elif self.has_better:  # it was evaluated after it was saved
            best = self._best.begin_save()
            self._best.commit()
            if self._world.index == 0 and best is not None:
                point_best(self.folder, best, self._warn)

    def advance(self, consensus: SaveConsensus) -> None:
        """Move the save under way on, as far as it takes no waiting, says the consensus of a step.

        With `has_rare_turns` it waits for the manifest, once the files are written.

        Raises:
            SaveError: this rank could not save, and the job says to stop then.
            PeerError: another rank could not.
            HangError: rank 0's disk took longer than it may.
        """
        self._consensus = SaveConsensus()
        current = self._current
        if current is None:
            return
        start = time.monotonic()
        if not current.is_written:
            if consensus.written == self._world.size:
                if self.has_rare_turns:
                    self.finish()
                    return
                self._gather_reports(current)
                current.stall_s += time.monotonic() - start
        elif consensus.settled > 0:
            self._end(current, "")
        elif consensus.settled < 0:
            self._end(current, self._gather_error(current))

    def finish(self) -> None:
        """Wait until no save is under way.

        Raises:
            SaveError, PeerError, HangError: as `save`.
        """
        current = self._current
        if current is None:
            return
        start = time.monotonic()
        if not current.is_written:
            self._wait_for_all(current.step, current.writing)
            self._gather_reports(current)
        if self._current is None:  # it failed, and the job goes on
            return
        self._wait_for_all(current.step, current.committing)
        error = self._gather_error(current)
        current.stall_s += time.monotonic() - start
        self._end(current, error)

    def finish_pruning(self) -> None:
        """Wait until older steps are gone, unless a disk takes too long for that.

        Collective; no save is under way.
        """
        with suppress(HangError):
            self._wait_for_all(self.last_step or 0, self._pruner.last)
        self._report_pruned()

    def close(self) -> None:
        """End the threads: no save comes after this."""
        self._pool.shutdown()
        self._pruner.close()

    # The turns of one save

    def _begin(self, step: int, progress: dict[str, Any], reason: str, *, copy: bool) -> None:
        start = time.monotonic()
        self._is_asked = False
        best = self._best.begin_save()
        if self.config.best is not None:
            newest = self._best.newest
            progress = progress | {"best": None if newest is None else asdict(newest)}
        opened = self._open_step(step, reason)
        self._last_save = time.monotonic()
        if opened is None:
            return
        late = LateCopies()
        rank = self._world.index
        try:
            part = self._collect(opened.buffers)
            if copy:
                items, late = self._snapshot.take(part.items)
                part = replace(part, items=items)
                self._warn_of_snapshot()
        except Exception as error:  # such as too little memory: the others learn of it by reports
            writing: Future[bytes] = Future()
            writing.set_result(describe_error(error).encode())
        else:
            writing = self._pool.submit(write_rank, opened.tmp / rank_file(rank), part, late)
        current = RankSave(
            step=step,
            reason=reason,
            tmp=opened.tmp,
            progress=progress,
            order=self.state.order,
            start=start,
            writing=writing,
            prunes=self.prunes,
            best=best,
            beside=opened.beside,
        )
        self._current = current
        self.last_step = step
        if late.pairs or late.reads_elsewhere:
            self.state.before_update(lambda: self._wait_for_copies(current, late.made))
        current.stall_s = time.monotonic() - start

    def _collect(self, buffers: Mapping[str, str]) -> RankPart:
        """Return what this rank writes, and what it reports of that.

        `buffers` has the digests of all buffers, as other ranks save them.
        """
        rank = self._world.index
        state = self.state
        items = [*state.write_items(), *state.own_buffers(buffers)]
        streams, numbers = self._streams.capture()
        for key, data in streams.items():
            items.append(WriteItem(f"rng/{rank}/{key}", RANK, 0, data.numel(), data))
        saved = SavedRank(rank, numbers, state.reducer_state())
        part = RankPart(items, saved, state.shares(), state.scalars())
        if state.describes_part:
            part = replace(part, layout=state.layout, tensors=state.tensors())
        return part

    def _open_step(self, step: int, reason: str) -> _Opened | None:
        """Make the folder of a step, with all ranks; None: one could not, and the job goes on."""
        making: Future[Path] | None = None
        if self._world.index == 0:
            making = self._pool.submit(self.folder.begin, step)
        self._wait_for_all(step, making)
        opening: dict[str, Any] = {}
        beside = ModelFiles()
        try:
            if making is not None:
                opening["tmp"] = str(making.result())
                beside = self.state.model_files()
            if self.state.describes_part:
                opening["buffers"] = self.state.buffer_digests()
        except Exception as error:
            opening["error"] = describe_error(error)
        told = self._comm.gather_bytes(json.dumps(opening).encode(), self._world, name="save")
        agreed = self._comm.share_bytes(_agreement(told), self._world, name="save")
        answer = json.loads(agreed)
        if "error" in answer:
            if making is not None and making.exception() is None:
                self.folder.discard(making.result())
            self._fail(step, reason, answer["rank"], answer["error"])
            return None
        return _Opened(Path(answer["tmp"]), answer["buffers"], beside)

    def _gather_reports(self, current: RankSave) -> None:
        """Tell rank 0 what was written; it begins to commit, if all have written."""
        report = current.writing.result()
        failed = torch.zeros(self._world.size, dtype=torch.float64)
        failed[self._world.index] = not report.startswith(b"{")  # in words: why there is no file
        reports = self._comm.gather_bytes(report, self._world, name="save")
        summed = self._comm.all_reduce_small(failed.to(self._comm.device), self._world, name="save")
        has_failed = self._comm.read(summed)
        if any(has_failed):
            rank = has_failed.index(1.0)
            problem = reports[rank] if reports else report  # others than the two only stop
            self._current = None
            self.last_step = None
            if self._world.index == 0:
                self.folder.discard(current.tmp)
            self._fail(current.step, current.reason, rank, problem.decode())
            return
        current.is_written = True
        if self._world.index == 0:
            current.committing = self._pool.submit(
                commit_step, current, reports, self.folder, self._run
            )

    def _gather_error(self, current: RankSave) -> str:
        """Return why the step could not be committed, from rank 0; "": it is committed."""
        error = ""
        if current.committing is not None:
            error = current.committing.result().error
        return self._all_gather(error.encode())[0].decode()

    def _end(self, current: RankSave, error: str) -> None:
        self._current = None
        if error:
            self.last_step = None
            self._fail(current.step, current.reason, 0, error)
            return
        self._failures = 0
        self._best.commit()
        self.on_commit(current.step)
        if current.committing is None:  # not rank 0
            return
        commit = current.committing.result()
        removed = self._report_pruned()
        if commit.warning:
            self._warn(commit.warning)
        elif current.prunes:
            self._pruner.start(self.config.keep)
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

    def _fail(self, step: int, reason: str, rank: int, problem: str) -> None:
        """Warn that `rank` could not save `step`, or raise. All ranks call this together."""
        self._failures += 1
        self._best.revert()
        if reason in _LAST_REASONS:
            may_go_on = False
        else:
            may_go_on = self.config.on_save_error == "warn" and self._failures <= _MAX_FAILURES
        if may_go_on:
            text = f"step {step} is not saved: {problem}"
            self._warn(f"{text}; training continues (checkpoint.on_save_error)", unsaved=step)
        elif rank == self._world.index:
            raise SaveError(f"step {step} is not saved: {problem}")
        else:
            raise PeerError(f"rank {rank} could not save step {step}")

    # Messages

    def _all_gather(self, payload: bytes) -> list[bytes]:
        return self._comm.all_gather_bytes(payload, self._world, name="save")

    def _wait_for_all(self, step: int, own: Future[Any] | None) -> None:
        """Wait until every rank's thread has done its part.

        `own` is this rank's part, if it has any.

        Raises:
            HangError: on all ranks, if one takes longer than it may.
        """
        size = self._world.size
        deadline = time.monotonic() + self._patience_s
        while True:
            if own is not None:
                wait([own], timeout=_POLL_S)
            message = torch.zeros(size + 1, dtype=torch.float64)  # busy ranks, and: it is too late
            message[self._world.index] = own is not None and not own.done()
            message[size] = self._world.index == 0 and time.monotonic() > deadline
            summed = self._comm.all_reduce_small(
                message.to(self._comm.device), self._world, name="save"
            )
            *is_busy, is_late = self._comm.read(summed)
            if not any(is_busy):
                return
            if is_late:
                key = f" ({self._patience_key})" if self._patience_key else ""
                raise HangError(
                    f"step {step} is not saved: the disk of rank {is_busy.index(1.0)} "
                    f"has not answered for {self._patience_s:g} s{key}"
                )

    def _wait_for_copies(self, current: RankSave, made: threading.Event) -> None:
        start = time.monotonic()
        with self._comm.wait_for_tier("the save of a step"):
            made.wait()
        current.stall_s += time.monotonic() - start

    def _report_pruned(self) -> list[int]:
        """Warn of older steps that could not be removed; return those that were."""
        pruned = self._pruner.take_results()
        for warning in pruned.warnings:
            self._warn(warning)
        return pruned.removed

    def _warn_of_snapshot(self) -> None:
        """Say once what is wrong with the copies' memory."""
        if self._snapshot.note and not self._has_warned:
            self._has_warned = True
            self._warn(self._snapshot.note)

    def _warn(self, text: str, **fields: Any) -> None:
        if self._world.index == 0:
            self._tell(warning=text, **fields)


def _agreement(openings: Sequence[bytes]) -> bytes:
    """Return what all ranks need of the beginning of a step, on rank 0: JSON.

    `openings` are those of all ranks; the other ranks have none.
    """
    buffers: dict[str, str] = {}
    told: dict[str, Any] = {}
    for rank, opening in enumerate(map(json.loads, openings)):
        if "error" in opening:
            return json.dumps({"rank": rank, "error": opening["error"]}).encode()
        buffers = opening.get("buffers", {}) | buffers  # the first one's
        told |= {"tmp": opening["tmp"]} if "tmp" in opening else {}
    return json.dumps(told | {"buffers": buffers}).encode()


def _is_same(folder: Path, other: Path) -> bool:
    """Return whether both paths lead to the same folder."""
    try:
        return folder.samefile(other)
    except OSError:
        return False


def versions() -> dict[str, str]:
    """Return the versions of what a run is made of."""
    found = {"torch": torch.__version__, "python": sys.version.split()[0]}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy"] = numpy.__version__
    return found
