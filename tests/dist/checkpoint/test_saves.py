"""Saves in the background, saves that fail, and where a run goes on in its data."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from runs import job, losses, run
from toys import world

from zrun_core.checkpoint import checkpointer, folder, shard_file
from zrun_core.checkpoint.checkpointer import Checkpointer
from zrun_core.checkpoint.folder import CheckpointFolder, read_step
from zrun_core.checkpoint.snapshot import LateCopies, Snapshot
from zrun_core.checkpoint.step_index import open_index
from zrun_core.checkpoint.verify import verify
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.errors import DivergedError, HangError, SaveError
from zrun_core.guards.numeric import NumericGuard
from zrun_core.guards.replicas import ReplicaGuard
from zrun_core.spine.stop_signals import SAVE, StopSignals
from zrun_core.train.ending import EndRequests
from zrun_core.train.trainer import Trainer
from zrun_core.zero.update.updates import Updates


def steps_of(run_dir: Path) -> list[int]:
    """The valid steps, every byte of them."""
    found = CheckpointFolder(run_dir / "checkpoints").scan()
    return [each.step for each in found if each.manifest and not verify(each.path, each.manifest)]


def contents_of(run_dir: Path, step: int) -> dict[tuple[str, str, int], str]:
    path = run_dir / "checkpoints" / f"step-{step:08d}"
    fragments = open_index(path, read_step(path)).fragments()
    return {(each.tensor, each.state, each.start): each.digest for each in fragments}


@pytest.mark.parametrize("busy", ["wait", "skip"])
@pytest.mark.thorough
def test_a_save_in_the_background_is_of_its_own_step(ranks, tmp_path, busy):
    """Every step is due while the one before is being written.

    No save has anything of another step in it.

    At stage 3 a writer that looked at the model in the middle of a step would gather it.
    """
    ranks(2).run(
        run, job(zero=3, steps=6, checkpoint={"every": 1, "keep": 9}), str(tmp_path / "sync")
    )
    keys = job(zero=3, steps=6, checkpoint={"every": 1, "keep": 9, "async": True, "busy": busy})
    found = ranks(2).run(run, keys, str(tmp_path / "async"))
    assert found[0]["error"] == ""
    saved = steps_of(tmp_path / "async")
    assert saved[0] == 6
    assert busy == "skip" or saved == [6, 5, 4, 3, 2, 1]
    for step in saved:
        assert contents_of(tmp_path / "async", step) == contents_of(tmp_path / "sync", step)
    told = [event["step"] for event in found[0]["events"] if event["type"] == "save"]
    skipped = [
        event
        for event in found[0]["events"]
        if event["type"] == "warning" and "is not saved" in event["message"]
    ]
    assert told == saved[::-1]
    assert {*told, *(int(event["message"].split()[1]) for event in skipped)} == {1, 2, 3, 4, 5, 6}


def run_with_late_copies(keys: dict[str, Any], run_dir: str) -> dict[str, Any]:
    """As `run`, where the thread copies once the next update has begun, and has had the time to end
    without it.
    """
    update, make, begun, ended = (
        Updates.make,
        LateCopies.make,
        threading.Event(),
        threading.Event(),
    )

    def tell_update(*args: Any) -> None:
        ended.clear()
        begun.set()
        update(*args)
        ended.set()

    def make_late(copies: Any) -> None:
        if copies.pairs:
            begun.wait()
            ended.wait(0.3)
        make(copies)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Updates, "make", tell_update)
        patch.setattr(LateCopies, "make", make_late)
        patch.setattr(Checkpointer, "after_step", forget(begun, Checkpointer.after_step))
        return run(keys, run_dir)


def forget(event: threading.Event, call: Any) -> Any:
    def wrapped(*args: Any) -> None:
        event.clear()
        call(*args)

    return wrapped


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.at_most(1)
def test_an_update_waits_for_the_copy_of_what_it_changes(ranks, tmp_path, stage):
    keys = job(
        zero=stage, steps=6, precision="bf16", lr="constant", checkpoint={"every": 2, "keep": 9}
    )
    ranks(2).run(run, keys, str(tmp_path / "sync"))
    keys = job(
        zero=stage,
        steps=7,
        precision="bf16",
        lr="constant",
        checkpoint={"every": 2, "keep": 9, "async": True},
    )
    assert ranks(2).run(run_with_late_copies, keys, str(tmp_path / "async"))[0]["error"] == ""
    for step in (2, 4, 6):
        assert contents_of(tmp_path / "async", step) == contents_of(tmp_path / "sync", step)


def run_asked(keys: dict[str, Any], run_dir: str, stop: bool) -> dict[str, Any]:
    """As `run`, where a signal asks the last rank for a save in step 3.

    With `stop` another asks for the end.
    """
    first_sums = Trainer._first_sums

    def asked(trainer: Trainer, read: Any) -> NamedVector:
        if trainer.progress.steps == 3 and trainer.world.index == trainer.world.size - 1:
            trainer.stop._note_save(SAVE, None)
            trainer.stop.first = signal.SIGTERM if stop else None
        return first_sums(trainer, read)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_first_sums", asked)
        return run(keys, run_dir)


@pytest.mark.parametrize(
    ("stop", "reasons"), [(False, {3: "asked", 5: "end"}), (True, {3: "stopped"})]
)
def test_a_save_on_request_is_made_by_all_ranks_after_the_same_step(ranks, tmp_path, stop, reasons):
    """Whichever of them is asked, and once. Where the end is asked for too, that one saves."""
    keys = job(zero=2, steps=5, checkpoint={"every": 100, "async": True})
    found = ranks(2).run(run_asked, keys, str(tmp_path), stop)
    assert {
        event["step"]: event["reason"] for event in found[0]["events"] if event["type"] == "save"
    } == reasons
    assert steps_of(tmp_path) == sorted(reasons, reverse=True)
    assert ("stopped after step 3, saved" in found[1]["error"]) == stop
    assert sorted(losses(found[0])) == list(range(1, max(reasons) + 1))


def test_every_rank_writes_its_share(ranks, tmp_path):
    for stage, keys in {0: {}, 2: {}, 3: {"zero": {"stage": 3, "shard_group": 2}}}.items():
        size = 4 if stage == 3 else 2
        model = {"call": "runs.py:Speaker", "args": {"dim": 256}}
        folder = tmp_path / str(stage)
        spec = job(**{"zero": stage, "steps": 1, "lr": "constant", "model": model, **keys})
        assert [each["error"] for each in ranks(size).run(run, spec, str(folder))] == [""] * size
        sizes = [
            file.num_bytes for file in read_step(folder / "checkpoints" / "step-00000001").files
        ]
        assert len(sizes) == size
        assert max(sizes) < 1.2 * sum(sizes) / size, (stage, sizes)


def test_old_steps_go(ranks, tmp_path):
    ranks(2).run(run, job(checkpoint={"every": 2, "keep": 3}), str(tmp_path))
    assert steps_of(tmp_path) == [8, 6, 4]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000008\n"


def run_with_failing_writes(
    keys: dict[str, Any], run_dir: str, rank: int, failing: list[int]
) -> dict[str, Any]:
    """As `run`, where the writes of `rank` fail in the saves numbered `failing`, from 1."""
    write, number = shard_file.write_file, 0

    def write_file(path: Path, num_bytes: int, pieces: Any, **named: Any) -> Any:
        nonlocal number
        number += 1
        if number in failing and world()[0] == rank:
            raise SaveError(f"cannot write {path}: {os.strerror(errno.EIO)}")
        return write(path, num_bytes, pieces, **named)

    shard_file.write_file = write_file
    try:
        return run(keys, run_dir)
    finally:
        shard_file.write_file = write


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.at_most(1)
def test_one_failing_rank_fails_the_save_of_all(ranks, tmp_path, rank, in_background):
    keys = job(checkpoint={"every": 3, "async": in_background})
    found = ranks(2).run(run_with_failing_writes, keys, str(tmp_path), rank, [2])
    assert found[rank]["error"].startswith("SaveError: step 6 is not saved: cannot write ")
    assert found[1 - rank]["error"] == f"PeerError: rank {rank} could not save step 6"
    assert steps_of(tmp_path) == [3]
    assert not [path for path in (tmp_path / "checkpoints").iterdir() if ".tmp-" in path.name]


@pytest.mark.thorough
def test_a_job_may_go_on_after_two_failed_saves(ranks, tmp_path):
    options = {"every": 1, "on_save_error": "warn"}
    found = ranks(2).run(
        run_with_failing_writes, job(checkpoint=options), str(tmp_path / "a"), 1, [2, 3, 5, 6]
    )
    assert found[0]["error"] == found[1]["error"] == ""
    warnings = [event["message"] for event in found[0]["events"] if event["type"] == "warning"]
    assert sum("training continues (checkpoint.on_save_error)" in text for text in warnings) == 4
    assert steps_of(tmp_path / "a") == [8, 7]
    found = ranks(2).run(
        run_with_failing_writes, job(checkpoint=options), str(tmp_path / "b"), 1, [2, 3, 4]
    )
    assert found[1]["error"].startswith("SaveError: step 4 is not saved")
    assert steps_of(tmp_path / "b") == [1]


def stop_after(patch: pytest.MonkeyPatch, reason: str, last: int) -> None:
    """Have runs end with step `last`: asked to, or because of its numbers; or as they would."""
    if reason == "stopped":
        patch.setattr(
            EndRequests, "asked_to_stop", lambda requests: requests.progress.steps >= last
        )
        patch.setattr(StopSignals, "ignore", lambda _: None)
    elif reason == "numeric":
        patch.setattr(
            NumericGuard,
            "see",
            lambda _, progress, step, *a, **k: "too many" if step == last else None,
        )


def run_that_cannot_save(keys: dict[str, Any], run_dir: str, reason: str) -> dict[str, Any]:
    """As `run`, where rank 1 cannot write, and the run ends because of `reason` with step 4 at the
    latest.
    """
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, reason, 4)
        return run_with_failing_writes(keys, run_dir, 1, [1, 2, 3])


@pytest.mark.parametrize(
    ("reason", "codes", "words"),
    [
        ("end", [5, 8], "SaveError: step 5 is not saved: cannot write "),
        ("stopped", [143, 143], "StoppedError: stopped after step 4, not saved"),
        (
            "numeric",
            [7, 7],
            "NumericError: too many; and the last good parameters could not be saved: step 4 is "
            "not",
        ),
    ],
)
@pytest.mark.at_most(2)
def test_the_last_save_is_there_or_is_not_said_to_be(ranks, tmp_path, reason, codes, words):
    """Also where the job may go on without one."""
    keys = job(steps=5, checkpoint={"every": 3, "on_save_error": "warn"})
    found = ranks(2).run(run_that_cannot_save, keys, str(tmp_path), reason)
    assert [each["code"] for each in found] == codes
    assert found[1]["error"].startswith(words)
    assert steps_of(tmp_path) == []
    warnings = [
        event["message"] for each in found for event in each["events"] if event["type"] == "warning"
    ]
    assert any("step 3 is not saved" in text and "training continues" in text for text in warnings)
    assert reason != "stopped" or any(
        text.startswith("step 4 is not saved: cannot write") for text in warnings
    )


def run_with_late_numbers(keys: dict[str, Any], run_dir: str, late: bool) -> dict[str, Any]:
    """As `run`, where the numbers end it with step 3, and are read in the middle of step 4 as on a
    GPU if `late`.
    """
    make = Trainer.__init__

    def init(trainer: Trainer, *args: Any) -> None:
        make(trainer, *args)
        trainer.steps.reads_late = late

    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, "numeric", 3)
        patch.setattr(Trainer, "__init__", init)
        return run(keys, run_dir)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.at_most(1)
def test_what_a_numeric_stop_saves_is_between_two_steps(ranks, tmp_path, late):
    keys = job(hooks={}, checkpoint={"every": 100})
    whole = ranks(2).run(run, keys, str(tmp_path / "whole"))
    found = ranks(2).run(run_with_late_numbers, keys, str(tmp_path / "cut"), late)
    assert (
        found[0]["error"]
        == f"NumericError: too many; the last good parameters are saved as step {3 + late}"
    )
    assert found[0]["phase"] == "update", "not that of the save"
    rest = ranks(2).run(run, keys, str(tmp_path / "cut"), {})
    assert {**losses(found[0]), **losses(rest[0])} == losses(whole[0])
    assert [each["digest"] for each in rest] == [each["digest"] for each in whole]


def run_that_diverges(keys: dict[str, Any], run_dir: str) -> dict[str, Any]:
    """As `run`, where ranks are found to differ after step 3, while the save of step 2 is still
    being written.
    """
    write, finish, may_write = shard_file.write_file, Checkpointer.finish, threading.Event()

    def write_file(*args: Any, **named: Any) -> Any:
        may_write.wait()
        return write(*args, **named)

    def let_write(saves: Checkpointer) -> None:
        if saves.under_way is not None:
            may_write.set()
        finish(saves)

    def check(_: ReplicaGuard, step: int, counters: Any) -> None:
        if step >= 4:
            may_write.set()
            raise DivergedError("they differ")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_file, "write_file", write_file)
        patch.setattr(Checkpointer, "finish", let_write)
        patch.setattr(ReplicaGuard, "check", check)
        return run(keys, run_dir)


@pytest.mark.parametrize(("replica_every", "phase"), [(2, "update"), (100, "save")])
@pytest.mark.at_most(1)
def test_a_step_that_was_right_is_committed_where_ranks_diverge_later(
    ranks, tmp_path, replica_every, phase
):
    """Found in the middle of step 4, or before the save after it."""
    keys = job(
        checkpoint={"every": 2, "async": True, "busy": "wait"},
        guards={"replica_every": replica_every},
    )
    found = ranks(2).run(run_that_diverges, keys, str(tmp_path))
    assert [each["error"] for each in found] == ["DivergedError: they differ"] * 2
    assert {each["phase"] for each in found} == {phase}, "not that of the save which ends meanwhile"
    assert steps_of(tmp_path) == [2]


def run_without_memory(
    keys: dict[str, Any], run_dir: str, owner: type, what: str
) -> dict[str, Any]:
    """As `run`, where rank 1 cannot make what it is to write, in the second save."""
    real, number = getattr(owner, what), 0

    def fails(*args: Any) -> Any:
        nonlocal number
        number += 1
        if number == 2 and world()[0] == 1:
            raise MemoryError("no room")
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, what, fails)
        return run(keys, run_dir)


@pytest.mark.thorough
def test_a_rank_without_memory_for_a_copy_fails_the_save_of_all(ranks, tmp_path):
    options = {"every": 2, "keep": 9, "async": True, "on_save_error": "warn"}
    found = ranks(2).run(
        run_without_memory, job(checkpoint=options), str(tmp_path), Snapshot, "take"
    )
    assert [each["error"] for each in found] == ["", ""]
    assert steps_of(tmp_path) == [8, 6, 2]
    assert any(
        "step 4 is not saved: MemoryError: no room" in event.get("message", "")
        for event in found[0]["events"]
    )
    assert not [path for path in (tmp_path / "checkpoints").iterdir() if ".tmp-" in path.name]


def run_with_a_bad_disk(keys: dict[str, Any], run_dir: str, what: str) -> dict[str, Any]:
    """As `run`, where something goes wrong right after step 6 got its name."""
    sync, prune, failed = folder._sync, CheckpointFolder.prune, []

    def has_step(path: Path) -> bool:
        return not failed and (path / "step-00000006").exists()

    def fail_sync(path: Path) -> None:
        if has_step(path):
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(path)

    def fail_prune(self: CheckpointFolder, keep: int) -> list[int]:
        if has_step(self.path):
            failed.append(self.path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return prune(self, keep)

    with pytest.MonkeyPatch.context() as patch:
        if what == "sync":
            patch.setattr(folder, "_sync", fail_sync)
        else:
            patch.setattr(CheckpointFolder, "prune", fail_prune)
        return run(keys, run_dir)


@pytest.mark.parametrize("what", ["sync", "prune"])
@pytest.mark.parametrize("last", [6, 8])
@pytest.mark.at_most(1)
def test_a_step_that_has_its_name_is_saved_whatever_fails_after_that(ranks, tmp_path, what, last):
    """Nothing older is removed for it, until the next one is there."""
    (found,) = ranks(1).run(
        run_with_a_bad_disk, job(steps=last, checkpoint={"every": 2}), str(tmp_path), what
    )
    assert found["error"] == ""
    assert [event["step"] for event in found["events"] if event["type"] == "save"] == [2, 4, 6, 8][
        : last // 2
    ]
    assert any(
        "Input/output error" in event["message"]
        for event in found["events"]
        if event["type"] == "warning"
    )
    assert steps_of(tmp_path) == ([6, 4, 2] if last == 6 else [8, 6])


def run_with_rot(keys: dict[str, Any], run_dir: str) -> dict[str, Any]:
    """As `run`, where step 4 rots before step 6 is saved, and steps are read back only when no
    other is to come.
    """
    commit, train, check, has_trained = (
        CheckpointFolder.commit,
        Trainer._train,
        folder.read_back,
        threading.Event(),
    )

    def rot_and_commit(self: CheckpointFolder, tmp: Path, manifest: Any) -> str:
        if manifest.step == 6:
            path = self.step_path(4) / "rank-00001.safetensors"
            os.truncate(path, path.stat().st_size - 1)
            with path.open("ab") as file:
                file.write(b"\x07")
        return commit(self, tmp, manifest)

    def train_and_tell(trainer: Trainer) -> str:
        reason = train(trainer)
        has_trained.set()
        return reason

    def check_late(*args: Any) -> list[str]:
        has_trained.wait()
        return check(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointFolder, "commit", rot_and_commit)
        patch.setattr(Trainer, "_train", train_and_tell)
        patch.setattr(folder, "read_back", check_late)
        return run(keys, run_dir)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.at_most(1)
def test_older_steps_go_behind_and_not_for_one_that_rotted(ranks, tmp_path, in_background):
    keys = job(steps=6, lr="constant", checkpoint={"every": 2, "async": in_background})
    found = ranks(2).run(run_with_rot, keys, str(tmp_path))
    assert [each["error"] for each in found] == ["", ""]
    assert steps_of(tmp_path) == [6, 2]
    (warning,) = [event["message"] for event in found[0]["events"] if event["type"] == "warning"]
    assert warning.startswith("step 4 is not valid, so an older one is kept in its place: ")
    assert "rank-00001.safetensors is damaged" in warning


def run_with_slow_disks(keys: dict[str, Any], run_dir: str, waits: bool) -> dict[str, Any]:
    """As `run`, where rank 1 writes and rank 0 commits while ranks ask eight times whether all are
    ready; or never.
    """
    write, commit, await_all = (
        shard_file.write_file,
        CheckpointFolder.commit,
        Checkpointer._wait_for_all,
    )
    asked, gave_up = threading.Semaphore(0), threading.Event()

    def be_slow() -> None:
        if not waits:
            gave_up.wait()
        for _ in range(8 * waits):
            if not asked.acquire(timeout=3):  # where nobody asks
                break

    def write_file(*args: Any, **named: Any) -> Any:
        if world()[0] == 1:
            be_slow()
        return write(*args, **named)

    def commit_slowly(*args: Any) -> str:
        be_slow()
        return commit(*args)

    def wait_a_turn(*args: Any, **options: Any) -> Any:
        asked.release()
        return futures_wait(*args, **options)

    def give_up(*args: Any) -> None:
        try:
            await_all(*args)
        except HangError:
            gave_up.set()
            raise

    futures_wait = checkpointer.wait
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_file, "write_file", write_file)
        patch.setattr(CheckpointFolder, "commit", commit_slowly)
        patch.setattr(checkpointer, "wait", wait_a_turn)
        patch.setattr(Checkpointer, "_wait_for_all", give_up)
        return run(keys, run_dir)


@pytest.mark.thorough
def test_ranks_wait_for_a_disk_for_longer_than_for_a_message(ranks, tmp_path):
    """A turn of asking takes a quarter of a second: rank 0 waits for 2 s, and then rank 1 does."""
    keys = job(steps=1, lr="constant", limits={"collective_s": 1.5})
    found = ranks(2).run(run_with_slow_disks, keys, str(tmp_path), True)
    assert [each["error"] for each in found] == ["", ""]
    assert steps_of(tmp_path) == [1]


def test_a_disk_that_does_not_answer_is_named_with_its_rank(ranks, tmp_path):
    keys = job(steps=1, lr="constant", limits={"save_s": 0.4})
    found = ranks(2).run(run_with_slow_disks, keys, str(tmp_path), False)
    text = (
        "HangError: step 1 is not saved: the disk of rank 1 has not answered for 0.4 s "
        "(limits.save_s)"
    )
    assert [each["error"] for each in found] == [text] * 2
    assert steps_of(tmp_path) == []


# Data


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.at_most(1)
def test_no_sample_is_lost_or_read_twice(ranks, tmp_path, workers):
    """Two epochs of 40 samples on 1, then 2, then 3 ranks, with an uneven end."""
    data = {"call": "runs.py:Tokens", "shuffle": True, "workers": workers}
    keys = job(
        steps=None,
        epochs=2,
        batch={"global": 6, "micro": 1},
        checkpoint={"every": 1},
        data=data,
        lr="constant",
    )
    by_step: dict[int, list[int]] = {}  # a step that is made again counts as it was made last
    for size, stop_after in ((1, 5), (2, 9), (3, None)):
        found = ranks(size).run(run, keys, str(tmp_path), {} if by_step else None, stop_after)
        for step in found[0]["seen"]:
            by_step[step] = [index for one in found for index in one["seen"][step]]
    assert sorted(by_step) == list(range(1, 15))
    assert (
        next(event["total_steps"] for event in found[0]["events"] if event["type"] == "start") == 14
    )
    in_order = [index for step in sorted(by_step) for index in by_step[step]]
    assert Counter(in_order[:40]) == Counter(in_order[40:]) == Counter(range(40))


@pytest.mark.thorough
def test_samples_draw_the_same_after_going_on_whoever_reads_them(ranks, tmp_path):
    keys = job(data={"call": "runs.py:Augmented", "shuffle": True, "workers": 0})
    whole = ranks(1).run(run, keys, str(tmp_path / "whole"))
    keys["data"]["workers"] = 2
    cut = ranks(1).run(run, keys, str(tmp_path / "cut"), None, 4)
    keys["data"]["workers"] = 0
    rest = ranks(1).run(run, keys, str(tmp_path / "cut"), {})
    assert {**losses(cut[0]), **losses(rest[0])} == losses(whole[0])
    assert [each["digest"] for each in rest] == [each["digest"] for each in whole]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.thorough
def test_parameters_that_broke_are_not_called_good_and_push_out_none_that_are(
    ranks, tmp_path, stage
):
    """Masters passed what fp16 can hold in the fourth update."""
    keys = job(
        zero=stage,
        steps=20,
        precision={"compute": "fp16", "loss_scale": {"init": 64.0}},
        optim={"name": "sgd", "lr": 3e6},
        lr="runs.py:sudden",
        checkpoint={"every": 1, "keep": 2},
    )
    found = ranks(2).run(run, keys, str(tmp_path))
    for each in found:
        assert each["error"].startswith(
            "NumericError: step 7: 3 steps in a row were skipped: the loss is nan on rank 0"
        )
        assert (
            " itself: step 6 is saved with it: resume from an earlier one, see zrun ckpt ls"
            in each["error"]
        )
        assert "good" not in each["error"]
    assert steps_of(tmp_path) == [6, 5, 4, 3]
    again = ranks(2).run(run, keys, str(tmp_path), {})
    assert again[0]["error"].startswith(
        "NumericError: step 9: 3 steps in a row were skipped: the loss is nan on rank 0"
    )
    assert steps_of(tmp_path) == [8, 7, 6, 5, 4, 3]
    fewer = {**keys, "steps": 5, "optim": {"name": "sgd", "lr": 3e-3}, "checkpoint": {"every": 1}}
    assert (
        ranks(2).run(
            run, fewer, str(tmp_path / "other"), {"folder": f"{tmp_path}/checkpoints", "step": 3}
        )[0]["error"]
        == ""
    )


def test_what_is_saved_already_is_not_saved_again_when_the_numbers_go_wrong(ranks, tmp_path):
    model = {"call": "runs.py:Faulty", "args": {"fault": 2}}
    keys = job(
        model=model, steps=20, batch={"global": 8, "micro": 4}, checkpoint={"every": 1, "keep": 2}
    )
    found = ranks(2).run(run, keys, str(tmp_path))
    assert found[0]["error"].startswith(
        "NumericError: step 5: 3 steps in a row were skipped: the loss is nan on rank 1"
    )
    assert found[0]["error"].endswith(
        "; the last good parameters are those of step 4, which is saved"
    )
    assert steps_of(tmp_path) == [4, 3, 2, 1]
    keys["model"] = {"call": "runs.py:Faulty", "args": {"fault": 0}}
    again = ranks(2).run(run, keys, str(tmp_path), {})
    assert again[0]["error"].startswith(
        "NumericError: step 7: 3 steps in a row were skipped: the loss is nan on rank 1"
    )
    assert [
        e["reason"] for each in (found, again) for e in each[0]["events"] if e["type"] == "save"
    ] == ["due"] * 6
