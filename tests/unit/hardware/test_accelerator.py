"""One module asks torch for a GPU's streams, events and memory. Read from the source, and run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from zrun_core.hardware import accelerator

ROOT = Path(__file__).resolve().parents[3]
OWNER = "zrun_core/hardware/accelerator.py"
OTHERS = sorted(
    str(path.relative_to(ROOT))
    for package in ("zrun", "zrun_core")
    for path in (ROOT / package).rglob("*.py")
    if str(path.relative_to(ROOT)) != OWNER
)
# What waits, of a stream or an event; `wait` and `synchronize` of others are words of their own.
WAITS = {"wait_stream", "wait_event", "record_stream"}


def names_of_torch(source: str) -> list[str]:
    """Return `line: expression` of each place that asks torch for what the module has."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom | ast.Import):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            if any(re.match(r"torch\.(cuda|accelerator|Stream|Event)\b", name) for name in names):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            is_torch = re.fullmatch(r"torch\.(cuda|accelerator|Stream|Event)", text)
            is_wait = node.attr in WAITS and not text.startswith("accelerator.")
            if is_torch or is_wait or node.attr == "is_cuda":
                found.append(f"{node.lineno}: {text}")
    return found


def questions_of_type(source: str) -> list[str]:
    """Return `line: expression` of each comparison of a device's type with "cuda"."""
    return [
        f"{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Compare) and re.search(r"\.type\b.*'cuda'", ast.unparse(node))
    ]


@pytest.mark.parametrize(
    "source",
    [
        "event = torch.cuda.Event()",
        "import torch.cuda",
        "from torch import cuda",
        "from torch.cuda import Stream",
        "torch.accelerator.synchronize()",
        "side = torch.Stream(device)",
        "side.wait_stream(other)",
        "tensor.record_stream(side)",
        "if tensor.is_cuda: pass",
    ],
)
def test_the_scan_sees_a_use(source: str) -> None:
    assert len(names_of_torch(source)) == 1


def test_the_scan_knows_what_is_no_use() -> None:
    assert not names_of_torch("accelerator.wait_stream(a, b); work.wait(); event.synchronize()")
    assert questions_of_type("device.type != 'cuda'")
    assert not questions_of_type("job.device == 'cuda'; device.type == 'cpu'")


def test_one_module_asks_torch_for_an_accelerator() -> None:
    for path in OTHERS:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert "torch.cuda" not in source, path  # in words neither
        assert not names_of_torch(source), path
        assert not questions_of_type(source), path


def test_that_module_binds_nothing_of_torch_at_import() -> None:
    """Tests and other devices put their own functions there, before or after it is imported."""
    tree = ast.parse((ROOT / OWNER).read_text(encoding="utf-8"))
    outside = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    values = [node.value if isinstance(node, ast.AnnAssign) else node for node in outside]
    texts = [ast.unparse(value) for value in values if value is not None]
    assert not [text for text in texts if "torch.cuda." in text]


@pytest.mark.thorough
def test_importing_it_leaves_a_process_that_may_fork() -> None:
    code = """
import torch

def called(*arguments, **options):
    raise AssertionError("a device was asked for")

torch.cuda._lazy_init = torch.cuda.init = torch._C._cuda_init = called
torch.cuda.device_count = torch.cuda.current_device = called
import zrun_core.hardware.accelerator
import zrun_core.train.worker
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_device_is_what_its_type_says() -> None:
    assert not accelerator.is_accelerator(torch.device("cpu"))
    assert not accelerator.is_accelerator(torch.device("meta"))
    assert accelerator.is_accelerator(torch.device("cuda", 1))
    assert accelerator.device_at(1) == torch.device("cuda", 1)


def test_backends_are_those_that_torch_names() -> None:
    assert accelerator.backend_name(torch.device("cpu")) == "gloo"
    assert accelerator.backend_name(accelerator.device_at(0)) == "nccl"


class MadeEvent:
    """As torch's, of which `asked` has the options, and what became of it."""

    asked: ClassVar[list[dict[str, bool]]] = []
    waited: ClassVar[list[int]] = []

    def __init__(self, **options: bool) -> None:
        self.number = len(MadeEvent.asked)
        MadeEvent.asked.append(options)

    def record(self, stream: object) -> None:
        pass

    def synchronize(self) -> None:
        MadeEvent.waited.append(self.number)


def test_a_host_that_waits_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of CUDA spin unless they are asked not to: a thread would hold a core all the time."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(MadeEvent, "asked", [])
    monkeypatch.setattr(MadeEvent, "waited", [])
    monkeypatch.setattr(accelerator, "_spare_events", defaultdict(list))
    monkeypatch.setattr(torch.cuda, "Event", MadeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(device=gpu))
    accelerator.Event(gpu).wait_on_host()
    accelerator.TimingEvent(gpu).wait_on_host()
    accelerator.synchronize_stream(gpu)
    numbers = Fetched(torch.tensor([1.0, 2.0]))
    monkeypatch.setattr(accelerator, "is_accelerator", lambda device: True)
    assert accelerator.fetch(numbers).tolist() == [1.0, 2.0]  # type: ignore[arg-type]
    assert MadeEvent.waited == [0, 1, 2, 3]
    assert all(options.get("blocking") is True for options in MadeEvent.asked)


class Fetched:
    """Numbers on a device, which come down when the host does not wait for them."""

    device = torch.device("cuda", 0)

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def to(self, device: str, *, non_blocking: bool) -> torch.Tensor:
        assert device == "cpu"
        assert non_blocking
        return self._values
