"""Torch's profiler on a rank: what it leaves, what fails, what a GPU's memory adds."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from zrun_core.distributed.comm import Comm
from zrun_core.hardware import accelerator
from zrun_core.telemetry.profiler import Profiler, is_profiled

CPU = torch.device("cpu")


@pytest.fixture
def profiler() -> Profiler:
    return Profiler(Comm(CPU), 0, "rank 0 (node, cpu)", all_threads=False)


def trained(profiler: Profiler) -> None:
    with profiler._comm.spans.named("step", 1):
        torch.ones(3).add(1)


def test_names_are_recorded_while_a_profile_is_on(profiler: Profiler, tmp_path: Path) -> None:
    spans = profiler._comm.spans
    trained(profiler)
    profiler.begin()
    assert (spans.is_on, is_profiled()) == (True, True)
    trained(profiler)
    found = profiler.end(tmp_path / "steps-1-1")
    assert (spans.is_on, is_profiled()) == (False, False)
    assert found.parts.by_name["step"].calls == 1
    assert [path.name for path in (tmp_path / "steps-1-1").iterdir()] == ["rank-0.json.gz"]
    assert (found.memory, found.note) == (None, "")
    assert found.num_bytes == found.path.stat().st_size


def test_of_two_profilers_there_is_one(profiler: Profiler) -> None:
    with (
        torch.autograd.profiler.profile(),
        pytest.raises(RuntimeError, match="the job's own code has torch's profiler on"),
    ):
        profiler.begin()
    assert not profiler._comm.spans.is_on


def test_one_that_was_ended_by_others_is_told(profiler: Profiler, tmp_path: Path) -> None:
    profiler.begin()
    torch.autograd._disable_profiler()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="the job's own code has ended torch's profiler"):
        profiler.end(tmp_path)


def test_a_folder_that_cannot_be_made_costs_the_trace(profiler: Profiler, tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file")
    profiler.begin()
    with pytest.raises(OSError, match=r"."):
        profiler.end(tmp_path / "profile" / "steps-1-1")
    assert not is_profiled()


def test_memory_is_asked_for_as_torch_has_it(
    profiler: Profiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, whose parts of torch have no public names."""
    asked: list[Any] = []
    memory = torch.cuda.memory
    signature = inspect.signature(memory._record_memory_history_impl)  # type: ignore[attr-defined]

    def record(*args: Any, **options: Any) -> None:
        asked.append(signature.bind(*args, **options).arguments["enabled"])

    def dump(path: str) -> None:
        Path(path).write_bytes(b"memory")

    monkeypatch.setattr(memory, "_record_memory_history", record)
    monkeypatch.setattr(memory, "_dump_snapshot", dump)
    profiler._on_gpu = True
    profiler.begin()
    trained(profiler)
    found = profiler.end(tmp_path)
    assert (found.memory, found.note) == (tmp_path / "rank-0.memory.pickle", "")
    assert asked == ["all", None]


@pytest.mark.parametrize("at", ["begin_memory_history", "save_memory_history"])
def test_memory_that_cannot_be_told_costs_no_trace(
    profiler: Profiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def fail(*_: Any) -> None:
        raise AttributeError("no such part")

    monkeypatch.setattr(accelerator, "begin_memory_history", lambda device: None)
    monkeypatch.setattr(accelerator, at, fail)
    profiler._on_gpu = True
    profiler.begin()
    trained(profiler)
    found = profiler.end(tmp_path)
    assert found.path.exists()
    assert found.memory is None
    assert found.note.startswith("the history of memory is left out: torch ")
    assert found.note.endswith("AttributeError: no such part")


def test_a_trace_may_fill_the_memory(profiler: Profiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has grown by 3 bytes, and to write it takes 12."""
    limits = "zrun_core.telemetry.profiler.memory_limits"
    monkeypatch.setattr(f"{limits}.resident_bytes", lambda pids: 10)
    monkeypatch.setattr(f"{limits}.process_available", lambda: None)
    profiler._resident_bytes = 7
    for left, fills in ((11, True), (12, False)):
        monkeypatch.setattr(f"{limits}.host_available", lambda left=left: left)
        assert profiler.fills_memory() == fills
    monkeypatch.setattr(f"{limits}.process_available", lambda: 5)
    assert profiler.fills_memory()
