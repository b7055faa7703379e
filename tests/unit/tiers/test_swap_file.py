"""States on a disk: what was written comes back, in the order of the calls, or an error does."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from zrun_core.errors import ExitCode, OffloadError, PreflightError
from zrun_core.memory.arena import PagePool, PageWindow, Region, can_move_pages
from zrun_core.spine.direct_io import file_system
from zrun_core.tiers.probe import probe_disk
from zrun_core.tiers.swap_file import Extent, SwapFile

PAGE = 4096
BLOCK = 4 * PAGE  # of most files here


def memory(num_bytes: int, seed: int | None = None) -> torch.Tensor:
    """Whole pages, of zeros or of what `seed` says."""
    tensor = Region(num_bytes, huge=False).tensor()
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        tensor.random_(0, 256, generator=generator)
    return tensor


@pytest.fixture
def swap(tmp_path: Path) -> Iterator[SwapFile]:
    file = SwapFile(tmp_path, 64 * PAGE, num_threads=3, block_bytes=BLOCK)
    yield file
    file.close()


def roundtrip(swap: SwapFile, extent: Extent, seed: int = 1) -> None:
    source, target = memory(extent.num_bytes, seed), memory(extent.num_bytes)
    swap.write(extent, source).wait()
    swap.read(extent, target).wait()
    assert torch.equal(target, source)


def test_what_was_written_comes_back(swap: SwapFile) -> None:
    extents = [swap.reserve(size, name=f"state {size}") for size in (1, BLOCK, 5 * BLOCK + 1)]
    assert [extent.num_bytes for extent in extents] == [PAGE, BLOCK, 5 * BLOCK + PAGE]
    for seed, extent in enumerate(extents):
        swap.write(extent, memory(extent.num_bytes, seed)).wait()
    for seed, extent in enumerate(extents):
        target = memory(extent.num_bytes)
        reading = swap.read(extent, target)
        reading.wait_on_host()
        assert reading.is_completed()
        assert torch.equal(target, memory(extent.num_bytes, seed))
    total = sum(extent.num_bytes for extent in extents)
    assert (swap.read_bytes, swap.written_bytes) == (total, total)


def test_nothing_has_a_name(swap: SwapFile, tmp_path: Path) -> None:
    roundtrip(swap, swap.reserve(BLOCK, name="state"))
    assert list(tmp_path.iterdir()) == []


def test_all_space_is_taken_at_once(swap: SwapFile, tmp_path: Path) -> None:
    status = os.fstat(swap._file)
    assert status.st_size == 64 * PAGE
    assert status.st_blocks * 512 >= 64 * PAGE


def test_what_was_never_written_reads_as_zeros(swap: SwapFile) -> None:
    extent = swap.reserve(3 * BLOCK, name="state")
    swap.write(extent, memory(BLOCK, 1), start=BLOCK).wait()
    target = memory(3 * BLOCK, 2)
    swap.read(extent, target).wait()
    assert torch.equal(target[BLOCK : 2 * BLOCK], memory(BLOCK, 1))
    assert not target[:BLOCK].any()
    assert not target[2 * BLOCK :].any()
    assert swap.read_bytes == BLOCK  # zeros cost the disk nothing


def test_the_file_grows_where_the_plan_was_short(tmp_path: Path) -> None:
    swap = SwapFile(tmp_path, PAGE, block_bytes=BLOCK)
    roundtrip(swap, swap.reserve(PAGE, name="planned"))
    roundtrip(swap, swap.reserve(3 * BLOCK, name="not planned"))
    assert swap.num_bytes == PAGE + 3 * BLOCK
    assert os.fstat(swap._file).st_size == swap.num_bytes
    swap.close()


def test_an_empty_state_is_over_at_once(swap: SwapFile) -> None:
    extent = swap.reserve(0, name="nothing")
    empty = memory(PAGE)[:0]
    assert swap.write(extent, empty).is_completed()
    swap.read(extent, empty).wait()


def test_transfers_of_an_extent_take_effect_in_order(
    swap: SwapFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against memory that plays the same calls at once, with writes and reads that dawdle."""
    chance = random.Random(7)
    pause = threading.Event()

    def dawdling(call: Callable[..., int]) -> Callable[..., int]:
        def called(*arguments: object) -> int:
            pause.wait(chance.random() * 2e-3)
            return call(*arguments)

        return called

    monkeypatch.setattr(os, "pwritev", dawdling(os.pwritev))
    monkeypatch.setattr(os, "preadv", dawdling(os.preadv))
    extents = [swap.reserve(4 * BLOCK, name=f"state {number}") for number in range(2)]
    played = [memory(4 * BLOCK) for _ in extents]
    transfers, expected = [], []
    for seed in range(150):
        number = chance.randrange(2)
        first = chance.randrange(4)
        start, stop = first * BLOCK, chance.randrange(first + 1, 5) * BLOCK
        if chance.random() < 0.5:
            source = memory(stop - start, seed)
            played[number][start:stop] = source
            transfers.append(swap.write(extents[number], source, start=start))
        else:
            target = memory(stop - start)
            expected.append((target, played[number][start:stop].clone()))
            transfers.append(swap.read(extents[number], target, start=start))
    for transfer in transfers:
        transfer.wait()
    assert expected
    assert all(torch.equal(target, right) for target, right in expected)


def test_blocks_of_one_extent_overlap(swap: SwapFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that is stuck holds up neither another block nor another extent."""
    released, stuck = threading.Event(), threading.Event()
    write = os.pwritev
    first = swap.reserve(2 * BLOCK, name="first")

    def slow(file: int, buffers: list[memoryview], offset: int) -> int:
        if offset == 0:
            stuck.set()
            released.wait(60)
        return write(file, buffers, offset)

    monkeypatch.setattr(os, "pwritev", slow)
    writing = swap.write(first, memory(BLOCK, 1))
    target = memory(BLOCK)
    reading = swap.read(first, target)
    assert stuck.wait(60)
    swap.write(first, memory(BLOCK, 2), start=BLOCK).wait()
    roundtrip(swap, swap.reserve(BLOCK, name="second"))
    assert not writing.is_completed()
    assert not reading.is_completed()
    released.set()
    reading.wait()
    assert torch.equal(target, memory(BLOCK, 1))


def test_short_transfers_go_on(swap: SwapFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one ends within a page, at which a direct transfer cannot go on."""
    chance = random.Random(3)

    def short(call: Callable[..., int]) -> Callable[..., int]:
        def called(file: int, buffers: list[memoryview], offset: int) -> int:
            assert offset % PAGE == 0
            cut = chance.choice((PAGE, 3 * PAGE, len(buffers[0])))
            count = call(file, [buffers[0][:cut]], offset)
            return count - chance.choice((0, 0, 100)) if count > PAGE else count

        return called

    monkeypatch.setattr(os, "pwritev", short(os.pwritev))
    monkeypatch.setattr(os, "preadv", short(os.preadv))
    roundtrip(swap, swap.reserve(10 * BLOCK, name="state"))


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, r"No space left on device \(.* free\); free some space, or name another"),
        (errno.EDQUOT, r"Disk quota exceeded \(.* free\); free some space"),
        (errno.EIO, r"Input/output error; the disk fails: look at it"),
        (errno.EROFS, r"Read-only file system; name another disk with offload\.dir"),
    ],
)
def test_a_disk_that_fails_is_told(
    swap: SwapFile, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    def failing(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    extent = swap.reserve(2 * BLOCK, name="record of blocks.0")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing)
        writing = swap.write(extent, memory(2 * BLOCK, 1))
        reading = swap.read(extent, memory(2 * BLOCK))  # in line behind it
        where = rf"cannot write record of blocks\.0 in {swap.folder}: {said}"
        for transfer in (writing, reading, writing):
            with pytest.raises(OffloadError, match=where) as caught:
                transfer.wait()
            assert transfer.is_completed()
    assert caught.value.exit_code == ExitCode.WORKER
    later = swap.write(swap.reserve(BLOCK, name="other"), memory(BLOCK, 1))
    with pytest.raises(OffloadError, match=where):  # although the disk is well again
        later.wait()
    swap.close()


def test_a_bug_of_a_thread_is_told(swap: SwapFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> int:
        raise KeyError("oops")

    monkeypatch.setattr(os, "pwritev", failing)
    writing = swap.write(swap.reserve(BLOCK, name="state"), memory(BLOCK))
    with pytest.raises(OffloadError, match=r"cannot write state in .*: KeyError: 'oops'"):
        writing.wait()


def test_a_disk_that_takes_nothing_is_an_error(
    swap: SwapFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OffloadError, match="the disk takes no more bytes"):
        swap.write(swap.reserve(BLOCK, name="state"), memory(BLOCK)).wait()


def test_a_file_that_ends_too_soon_is_an_error(swap: SwapFile) -> None:
    extent = swap.reserve(2 * BLOCK, name="state")
    swap.write(extent, memory(2 * BLOCK, 1)).wait()
    os.ftruncate(swap._file, BLOCK)
    with pytest.raises(OffloadError, match=r"cannot read state in .*: the file ends too soon"):
        swap.read(extent, memory(2 * BLOCK)).wait()


def test_a_flipped_byte_is_found(swap: SwapFile) -> None:
    swap.reserve(3 * BLOCK, name="other")
    extent = swap.reserve(3 * BLOCK, name="record of blocks.1")
    swap.write(extent, memory(3 * BLOCK, 1)).wait()
    other = os.open(f"/proc/self/fd/{swap._file}", os.O_RDWR)
    at = 3 * BLOCK + BLOCK + 77  # in the middle block
    os.pwrite(other, bytes([os.pread(other, 1, at)[0] ^ 4]), at)
    os.fsync(other)
    os.close(other)
    swap.read(extent, memory(BLOCK)).wait()
    said = rf"record of blocks\.1, 16.0 KiB at byte {4 * BLOCK} of .* in {swap.folder}"
    with pytest.raises(OffloadError, match=f"returned other bytes than were written: {said}"):
        swap.read(extent, memory(3 * BLOCK)).wait()


def test_only_whole_pages_and_blocks_are_moved(swap: SwapFile) -> None:
    extent = swap.reserve(2 * BLOCK + PAGE, name="state")
    pages = memory(4 * BLOCK)
    for tensor in (pages[1 : 1 + BLOCK], pages[: BLOCK - 1]):
        with pytest.raises(ValueError, match="not whole pages"):
            swap.write(extent, tensor)
    for tensor in (pages[:BLOCK].view(torch.int8), pages.view(-1, 2), pages.to("meta")):
        with pytest.raises(ValueError, match="uint8 of the host's memory"):
            swap.read(extent, tensor)
    for start, stop in ((PAGE, BLOCK), (0, PAGE), (0, 3 * BLOCK), (-BLOCK, BLOCK)):
        with pytest.raises(ValueError, match="not whole blocks"):
            swap.read(extent, pages[: stop - start], start=start)
    roundtrip(swap, extent)  # none of these did any harm


@pytest.mark.skipif(not can_move_pages(), reason="pages of this system cannot be moved")
def test_reads_go_straight_into_moved_pages(tmp_path: Path) -> None:
    numel = 3 << 20
    swap = SwapFile(tmp_path, 4 * numel)
    window = PageWindow(numel, (0, 0), torch.float32, PagePool(4 * numel))
    values = torch.arange(numel, dtype=torch.float32)
    source = memory(4 * numel)
    source.view(torch.float32).copy_(values)
    extent = swap.reserve(4 * numel, name="parameters of blocks.0")
    swap.write(extent, source).wait()
    for _ in range(2):  # also after the pages were given back
        window.acquire()
        swap.read(extent, window.full.view(torch.uint8)).wait()
        assert torch.equal(window.full, values)
        window.full += 1
        swap.write(extent, window.full.view(torch.uint8)).wait()
        values += 1
        window.release()
    swap.close()


def test_writes_do_not_hold_up_reads(swap: SwapFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other states. What reads the blocks that are written comes after, as always."""
    extents = [swap.reserve(4 * BLOCK, name=f"state {number}") for number in range(2)]
    for number, extent in enumerate(extents):
        swap.write(extent, memory(4 * BLOCK, number)).wait()
    write, may_write = os.pwritev, threading.Event()

    def late(*arguments: Any) -> int:
        assert may_write.wait(60)
        return write(*arguments)

    monkeypatch.setattr(os, "pwritev", late)
    writing = swap.write(extents[0], memory(4 * BLOCK, 2))
    found = memory(4 * BLOCK)
    swap.read(extents[1], found).wait()
    assert torch.equal(found, memory(4 * BLOCK, 1))
    reading = swap.read(extents[0], found)
    assert not writing.is_completed()
    assert not reading.is_completed()
    may_write.set()
    reading.wait()
    assert torch.equal(found, memory(4 * BLOCK, 2))


def disk_threads(besides: Container[threading.Thread] = ()) -> list[threading.Thread]:
    """Threads of files, but those that tests before this one have left to the collector."""
    threads = [each for each in threading.enumerate() if each.name.startswith("zrun-disk")]
    return [each for each in threads if each not in besides]


def test_closing_waits_and_ends_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = disk_threads()
    swap = SwapFile(tmp_path, 8 * BLOCK, block_bytes=BLOCK)
    extent = swap.reserve(8 * BLOCK, name="state")
    writing = swap.write(extent, memory(8 * BLOCK, 1))
    file = swap._file
    assert len(disk_threads(others)) == 8
    swap.close()
    swap.close()
    assert writing.is_completed()
    writing.wait()
    assert not disk_threads(others)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
    with pytest.raises(ValueError, match="closed"):
        swap.read(extent, memory(BLOCK))
    with pytest.raises(ValueError, match="closed"):
        swap.reserve(BLOCK, name="more")


def test_a_file_that_nobody_closes_ends_too(tmp_path: Path) -> None:
    others = disk_threads()
    swap = SwapFile(tmp_path, 8 * BLOCK, block_bytes=BLOCK)
    extent = swap.reserve(8 * BLOCK, name="state")
    writing = swap.write(extent, memory(8 * BLOCK, 1))
    gone = weakref.ref(swap)
    del swap
    writing.wait()
    deadline = time.monotonic() + 60
    while disk_threads(others):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    gc.collect()
    assert gone() is None


LEAVES = """
import atexit, os, sys, threading, time

def threads():
    return [each.name for each in threading.enumerate() if each.name.startswith("zrun-disk")]

atexit.register(lambda: print(threads()))  # the first one is called last
from pathlib import Path
from zrun_core.memory.arena import Region
from zrun_core.tiers.swap_file import SwapFile

write = os.pwritev
swap = SwapFile(Path(sys.argv[1]), 8 << 20, block_bytes=4096)
extent = swap.reserve(8 << 20, name="state")
print(len(threads()))
os.pwritev = lambda *arguments: time.sleep(0.2) or write(*arguments)
swap.write(extent, Region(8 << 20).tensor())
"""


@pytest.mark.thorough
def test_a_process_ends_without_closing(tmp_path: Path) -> None:
    """No thread outlives the interpreter, which may abort then; what is in line is left."""
    done = subprocess.run(
        [sys.executable, "-c", LEAVES, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,  # to write all takes 100 s
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "8\n[]\n", "")


def test_threads_are_traced_on_request(swap: SwapFile) -> None:
    extent = swap.reserve(2 * BLOCK, name="state")
    swap.write(extent, memory(2 * BLOCK, 1)).wait()
    swap.trace = []
    swap.read(extent, memory(2 * BLOCK)).wait()
    assert [span.what for span in swap.trace] == ["read state"] * 2
    assert all(span.begin < span.end for span in swap.trace)
    assert all(span.thread.startswith("zrun-disk-") for span in swap.trace)


def test_a_disk_without_direct_transfers_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = fcntl.fcntl

    def refusing(file: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return control(file, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refusing)
    swap = SwapFile(tmp_path, 8 * BLOCK, block_bytes=BLOCK)
    assert not swap.direct
    assert "has no direct reads and writes" in swap.note
    roundtrip(swap, swap.reserve(3 * BLOCK, name="state"))
    swap.close()


def test_a_disk_that_refuses_direct_transfers_late_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwritev

    def refusing(file: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(file, buffers, offset)

    monkeypatch.setattr(os, "pwritev", refusing)
    swap = SwapFile(tmp_path, 8 * BLOCK, block_bytes=BLOCK)
    assert not swap.direct
    roundtrip(swap, swap.reserve(3 * BLOCK, name="state"))
    swap.close()


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EISDIR])
def test_a_file_system_without_nameless_files_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    opened = os.open

    def refusing(path: Path, flags: int, *rest: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(number, os.strerror(number))
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)
    swap = SwapFile(tmp_path, 8 * BLOCK, block_bytes=BLOCK)
    assert list(tmp_path.iterdir()) == []
    roundtrip(swap, swap.reserve(3 * BLOCK, name="state"))
    swap.close()


def test_memory_is_no_disk() -> None:
    if file_system(Path("/dev/shm")) != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    swap = SwapFile(Path("/dev/shm"), 8 * BLOCK, block_bytes=BLOCK)
    assert "/dev/shm is tmpfs, which is memory" in swap.note
    roundtrip(swap, swap.reserve(3 * BLOCK, name="state"))
    swap.close()
    assert probe_disk("/dev/shm").is_memory


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, said in (("none", "No such file or directory"), ("file", "Not a directory")):
        with pytest.raises(PreflightError, match=rf"make room for states in .*{name}: {said}"):
            SwapFile(tmp_path / name, PAGE)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PreflightError, match=r"(File too large|No space left)"):
        SwapFile(tmp_path, 1 << 60)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_full_disk_is_refused_at_the_start_and_when_the_file_grows(
    swap: SwapFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    said = r"No space left on device \(4.0 TiB needed, .* free\); free some space, or name"
    with pytest.raises(PreflightError, match=said):
        SwapFile(tmp_path, 4 << 40)
    with pytest.raises(OffloadError, match=r"make room for more .* \(1.0 TiB needed, "):
        swap.reserve((1 << 40) + 64 * PAGE, name="more")
    roundtrip(swap, swap.reserve(BLOCK, name="less"))  # what is there can be used


def _io_counters() -> tuple[int, int]:
    """Bytes that this process had the disks read and write, by the kernel."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    counts = {name: int(count) for name, count in (line.split(": ") for line in lines)}
    return counts["read_bytes"], counts["write_bytes"]


def test_counted_bytes_are_those_of_the_kernel(tmp_path: Path) -> None:
    num_bytes = 64 << 20
    swap = SwapFile(tmp_path, num_bytes)
    if swap.note:
        pytest.skip(f"the kernel counts direct transfers to disks only: {swap.note}")
    extent = swap.reserve(num_bytes, name="state")
    source, target = memory(num_bytes, 1), memory(num_bytes)
    swap.write(extent, source).wait()  # metadata of the file system are counted with the first
    before = _io_counters()
    counted = swap.read_bytes, swap.written_bytes
    for _ in range(2):
        swap.write(extent, source).wait()
    swap.read(extent, target).wait()
    after = _io_counters()
    moved = swap.read_bytes - counted[0], swap.written_bytes - counted[1]
    swap.close()
    assert moved == (num_bytes, 2 * num_bytes)
    assert after[0] - before[0] == pytest.approx(moved[0], rel=0.01)
    assert after[1] - before[1] == pytest.approx(moved[1], rel=0.01)


def test_the_page_cache_is_passed(tmp_path: Path) -> None:
    """By mincore(2), which says which pages of a mapped file the kernel holds."""
    num_bytes = 8 << 20
    swap = SwapFile(tmp_path, num_bytes)
    if swap.note:
        pytest.skip(swap.note)
    roundtrip(swap, swap.reserve(num_bytes, name="state"))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, ctypes.c_size_t(num_bytes), 1, 1, swap._file, ctypes.c_long(0))
    held = (ctypes.c_ubyte * (num_bytes // PAGE))()
    failed = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), held)
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes))
    swap.close()
    assert not failed
    assert sum(page & 1 for page in held) == 0


def test_a_disk_is_probed_and_left_as_it_was(tmp_path: Path) -> None:
    facts = probe_disk(str(tmp_path), num_bytes=16 << 20)
    assert facts.error is None
    assert facts.filesystem == file_system(tmp_path) != ""
    assert facts.free_bytes > 0
    assert facts.read_rate > 0
    assert facts.write_rate > 0
    assert list(tmp_path.iterdir()) == []
    assert probe_disk(str(tmp_path / "none")).error == "No such file or directory"
