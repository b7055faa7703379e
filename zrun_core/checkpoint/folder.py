"""The folder of a run's checkpoints: how a step becomes complete, and when it is removed.

A step is written as `step-00000050.tmp-<nonce>`. It becomes `step-00000050` by one rename, after
every byte of it and of its manifest has reached the disk. So at any instant, a step is there whole
or not at all. `latest` is written after that, and nothing depends on it.
"""

from __future__ import annotations

import math
import os
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zrun_core.checkpoint.best import Best
from zrun_core.checkpoint.block_writer import save_error
from zrun_core.checkpoint.digest import opened
from zrun_core.checkpoint.manifest import Manifest
from zrun_core.checkpoint.manifest_fields import MANIFEST, MAX_BYTES
from zrun_core.checkpoint.names import (
    BEST,
    LATEST,
    aside_name,
    is_aside,
    is_stale,
    step_name,
    step_of,
    steps_in,
    tmp_name,
)
from zrun_core.checkpoint.verify import check_size, read_back, verify
from zrun_core.errors import CheckpointError, SaveError
from zrun_core.spine.direct_io import reserve, write_all
from zrun_core.spine.folders import make_private

LEAST_KEPT = 2


@dataclass(frozen=True)
class SavedStep:
    """A step in the folder: its manifest, or why it does not count."""

    step: int
    path: Path
    manifest: Manifest | None
    problem: str | None


class CheckpointFolder:
    """The checkpoints below `path`.

    Writing is for one process at a time: rank 0 of the run that holds the folder.

    Attributes:
        damaged: steps whose bytes `prune` has read and found wrong, and how.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged: dict[int, str] = {}
        self._verified: set[int] = set()  # steps whose bytes it has read and found right
        self._is_anchored = False  # its name, and those of the folders above, are on the disk

    def step_path(self, step: int) -> Path:
        return self.path / step_name(step)

    def begin(self, step: int) -> Path:
        """Make the folder (0700) in which the ranks write their files of `step`.

        Raises:
            SaveError: the step is there already, or the folder cannot be made.
        """
        target = self.step_path(step)
        if os.path.lexists(target):
            raise SaveError(
                f"cannot save step {step}: {target} exists, and no checkpoint is ever overwritten"
            )
        tmp = target.with_name(tmp_name(target.name))
        try:
            make_private(self.path)
            tmp.mkdir(mode=0o700)
        except OSError as error:
            raise save_error(tmp, error) from error
        return tmp

    def commit(self, tmp: Path, manifest: Manifest) -> str:
        """Make what lies in `tmp` the step of `manifest`. All its files must be on the disk.

        Returns:
            Why the step, which is there, may not be after a loss of power: its name may not be on
                the disk. Else "".

        Raises:
            SaveError: a file is missing or short, the step is there already, or the disk is full or
                fails.
        """
        target = self.step_path(manifest.step)
        text = manifest.to_json()
        try:
            Manifest.from_json(text)  # nothing is committed that would not be read
            for file in manifest.files:
                check_size(tmp, file)
        except CheckpointError as error:
            raise SaveError(f"cannot save step {manifest.step}: {error}") from error
        self._verified.discard(manifest.step)
        self.damaged.pop(manifest.step, None)
        try:
            _write_new(tmp / MANIFEST, text)
            _sync(tmp)
            if os.path.lexists(target):
                reason = f"{target} exists; no checkpoint is overwritten"
                raise SaveError(f"cannot save step {manifest.step}: {reason}")
            os.rename(tmp, target)
        except OSError as error:
            raise save_error(tmp / MANIFEST, error, len(text)) from error
        try:
            _sync(self.path)
            self._anchor()
        except OSError as error:
            problem = f"{self.path} cannot be synced: {error.strerror}; see the disk"
            return f"step {manifest.step} is saved, but {problem}"
        return ""

    def _anchor(self) -> None:
        """Wait until the names of the folder and of those above it are on the disk, once."""
        if self._is_anchored:
            return
        path = Path(os.path.realpath(self.path))
        device = path.stat().st_dev
        for above in path.parents:
            if above.stat().st_dev != device:
                break
            try:
                _sync(above)
            except PermissionError:  # it is somebody else's, and older than the run
                break
        self._is_anchored = True

    def discard(self, tmp: Path) -> None:
        """Remove what a save that failed has left. What cannot be removed stays for `sweep`."""
        shutil.rmtree(tmp, ignore_errors=True)

    def set_aside(self, step: int) -> Path:
        """Give a step that does not count another name, so that its number is free again.

        Raises:
            SaveError: it cannot be renamed.
        """
        path = self.step_path(step)
        aside = path.with_name(aside_name(path.name))
        try:
            os.rename(path, aside)
            _sync(self.path)
        except OSError as error:
            raise save_error(path, error) from error
        return aside

    def aside(self) -> list[Path]:
        """Return damaged steps that were set aside, and the steps of runs that started over."""
        try:
            names = sorted(name for name in os.listdir(self.path) if is_aside(name))
        except OSError:
            return []
        return [self.path / name for name in names if (self.path / name).is_dir()]

    def remove_aside(self) -> list[Path]:
        """Remove what `aside` returns; return what is gone.

        Raises:
            SaveError: a folder cannot be removed.
        """
        found = self.aside()
        for path in found:
            self._remove(path)
        return found

    def point_latest(self, step: int) -> None:
        """Write the hint for people and scripts: the name of the newest step.

        Raises:
            SaveError: it cannot be written.
        """
        self._write_line(LATEST, step_name(step))

    def point_best(self, best: Best) -> None:
        """Write which step is the best, so that `prune` leaves it alone.

        Raises:
            SaveError: it cannot be written.
        """
        self._write_line(BEST, f"{step_name(best.step)} {best.metric} {best.mode} {best.value!r}")

    def latest(self) -> tuple[int | None, str | None]:
        """Return the step that `latest` names, and what is wrong with the file, if it exists."""
        return self._named_in(LATEST)[:2]

    def best(self) -> tuple[int | None, str | None]:
        """Return the step that `best` names, and what is wrong with the file, if it exists."""
        return self._named_in(BEST)[:2]

    def best_so_far(self) -> Best | None:
        """Return what `best` says of a step that exists; None where it cannot be read as that."""
        step, problem, words = self._named_in(BEST)
        if step is None or problem is not None or len(words) != 3:
            return None
        metric, mode, text = words
        try:
            value = float(text)
        except ValueError:
            return None
        if not math.isfinite(value):
            return None
        if mode == "min":
            return Best(step, metric, "min", value)
        if mode == "max":
            return Best(step, metric, "max", value)
        return None

    def _write_line(self, name: str, line: str) -> None:
        tmp = self.path / tmp_name(name)
        try:
            _write_new(tmp, f"{line}\n".encode())
            os.replace(tmp, self.path / name)
            _sync(self.path)
        except OSError as error:
            tmp.unlink(missing_ok=True)
            raise save_error(self.path / name, error) from error

    def _named_in(self, name: str) -> tuple[int | None, str | None, list[str]]:
        """Return the step that a file names, what is wrong with it, and its other words."""
        path = self.path / name
        if not os.path.lexists(path):
            return None, None, []
        try:
            with opened(self.path, name) as file:
                text = os.pread(file, 256, 0).decode("ascii", "replace")
        except (CheckpointError, OSError) as error:
            return None, str(error), []
        first, *words = text.removesuffix("\n").split(" ")
        step = step_of(first)
        if step is None:
            return None, f"{path} does not name a step", []
        if not self.step_path(step).is_dir():
            return step, f"{path} names step {step}, which is not there", words
        return step, None, words

    def scan(self) -> list[SavedStep]:
        """Return every step, newest first.

        Manifests are read and the sizes of files compared, their content is not.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        return [_look_at(step, self.step_path(step)) for step in reversed(steps_in(self.path))]

    def prune(self, keep: int, *, thorough: bool = False, dry_run: bool = False) -> list[int]:
        """Remove all steps before the newest `keep` valid ones, but for the best one.

        With fewer than these, nothing is removed. A damaged step does not count, and one that is
        newer than those kept stays: somebody may want to see it. No removal rests on manifests
        alone: beside the newest step, which was just written, one more of those that stay is read
        whole, once. With keep=2:

            step 50   40                 30                  20   10
            newest    not what it was    as it was written   --   the best
            stays     stays, damaged     stays               goes stays

        Args:
            keep: at least LEAST_KEPT.
            thorough: read all steps that count whole, and the newest too.

        Returns:
            The steps that are gone, or would be.

        Raises:
            SaveError: a folder cannot be removed.
        """
        if keep < LEAST_KEPT:
            raise ValueError(f"keep={keep}: fewer than {LEAST_KEPT} are never kept")
        steps = self.scan()
        valid = [place for place, found in enumerate(steps) if found.manifest is not None]
        if len(valid) < keep or valid[keep - 1] == len(steps) - 1:
            return []  # there are too few, or nothing is older than those that stay
        num_kept = 0
        num_sure = 0  # of those kept: the newest, and those that were read whole
        removed = []
        best = self._best_of(steps)
        for found in steps:
            if num_kept >= keep and num_sure >= LEAST_KEPT:
                is_best = found.step in best and found.manifest is not None
                if not is_best:
                    if not dry_run:
                        self._remove(found.path)
                    removed.append(found.step)
                continue
            if found.manifest is None:
                continue
            must_read = thorough or 0 < num_sure < LEAST_KEPT
            if must_read and not self._is_whole(found.path, found.manifest, thorough=thorough):
                continue
            num_kept += 1
            if must_read or num_sure == 0:
                num_sure += 1
        return removed

    def _best_of(self, steps: Sequence[SavedStep]) -> set[int]:
        """Return the best step as the file `best` has it, and as the newest valid step has it.

        They differ where a process died between the save of a better one and the file.
        """
        steps_named = set()
        named, _ = self.best()
        if named is not None:
            steps_named.add(named)
        for found in steps:
            if found.manifest is not None:
                best = found.manifest.progress.get("best")
                if best is not None:
                    steps_named.add(best["step"])
                break
        return steps_named

    def _is_whole(self, path: Path, manifest: Manifest, *, thorough: bool) -> bool:
        """Return whether every byte of a step is right; it is read once."""
        step = manifest.step
        if step not in self._verified and step not in self.damaged:
            problems = verify(path, manifest) if thorough else read_back(path, manifest)
            if problems:
                self.damaged[step] = problems[0]
            else:
                self._verified.add(step)
        return step in self._verified

    def _remove(self, path: Path) -> None:
        # Under another name first: half of it is never taken for a step.
        tmp = path.with_name(tmp_name(path.name))
        try:
            os.rename(path, tmp)
            _sync(self.path)
            if tmp.is_symlink():
                tmp.unlink()
            else:
                shutil.rmtree(tmp)
        except FileNotFoundError:  # somebody else removed it
            return
        except OSError as error:
            raise SaveError(f"cannot remove {path}: {error.strerror}") from error

    def sweep(self) -> list[str]:
        """Remove what processes that died have left; return the names. No save may be under way."""
        if not self.path.is_dir():
            return []
        names = [name for name in os.listdir(self.path) if is_stale(name)]
        for name in names:
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        return sorted(names)


def read_step(path: Path, sizes: slice = slice(None)) -> Manifest:
    """Return the manifest of the step folder `path`; its files exist, as long as it says.

    Args:
        sizes: the files whose sizes are compared, where others look at the others.

    Raises:
        CheckpointError: it is not one, or not complete.
    """
    try:
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise CheckpointError(f"{path} is not a folder")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    try:
        with opened(path, MANIFEST) as file:
            num_bytes = os.fstat(file).st_size
            if num_bytes > MAX_BYTES:
                raise CheckpointError(f"{path}: {MANIFEST} is larger than {MAX_BYTES >> 20} MiB")
            text = os.pread(file, num_bytes + 1, 0)
    except OSError as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error.strerror}") from None
    try:
        manifest = Manifest.from_json(text)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    for info in manifest.files[sizes]:
        check_size(path, info)
    return manifest


def _look_at(step: int, path: Path) -> SavedStep:
    try:
        manifest = read_step(path)
        if manifest.step != step:
            raise CheckpointError(f"{path}: its manifest is of step {manifest.step}")
    except CheckpointError as error:
        return SavedStep(step, path, None, str(error))
    return SavedStep(step, path, manifest, None)


def _write_new(path: Path, content: bytes) -> None:
    """Create a file (0600) and wait until it is on the disk."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        reserve(file, len(content))
        write_all(file, memoryview(content), 0)
        os.fsync(file)
    finally:
        os.close(file)


def _sync(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
