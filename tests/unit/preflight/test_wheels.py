"""GPUs that torch cannot train on: the wheel, the driver, NCCL, devices of other kinds.

Each is named where it is asked for, with what to install or to write.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import versions

from zrun import cli
from zrun.job.load import load_job
from zrun.job.structure import inspect_structure
from zrun_core.errors import JobError, PreflightError
from zrun_core.hardware import accelerator
from zrun_core.library import run
from zrun_core.spine import device_names, visible_devices
from zrun_core.spine.releases import LOWEST, check_release
from zrun_core.spine.sections.guards import LimitsConfig
from zrun_core.train import rendezvous
from zrun_core.user_code import build

JOB = """
name: small
model: {call: torch.nn:Linear, args: {in_features: 2, out_features: 2}}
data: torch.utils.data:TensorDataset
loss: torch.nn.functional:mse_loss
steps: 1
batch: 2
"""
GPU = torch.device("cuda", 0)


class Torch:
    """Changes what torch says of itself."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.says("2.13.0+cpu", cuda=None)
        patch.setattr(accelerator, "_DEVICE_FILES", Path("/none"))
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
            patch.delenv(name, raising=False)

    def says(
        self, version: str, *, cuda: str | None, hip: str | None = None, devices: int = 0
    ) -> None:
        self._patch.setattr(torch, "__version__", version)
        self._patch.setattr(torch.version, "cuda", cuda)
        self._patch.setattr(torch.version, "hip", hip)
        self._patch.setattr(torch.cuda, "device_count", lambda: devices)
        if devices:
            self._patch.setattr(torch.cuda, "init", lambda: None)

    def has_nccl(self, there: bool) -> None:
        self._patch.setattr(dist, "is_nccl_available", lambda: there)

    def computes_on(self, kind: str) -> None:
        self._patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
        self._patch.setattr(torch.accelerator, "is_available", lambda: True)

    def cannot_begin(self, why: str) -> None:
        def fail() -> None:
            raise RuntimeError(why)

        self._patch.setattr(torch.cuda, "init", fail)


@pytest.fixture(name="fake")
def _fake(monkeypatch: pytest.MonkeyPatch) -> Torch:
    return Torch(monkeypatch)


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake: Torch) -> None:
    """A GPU that a driver shows."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(accelerator, "_DEVICE_FILES", tmp_path)


WHEEL = (
    "torch 2.13.0+cpu is a wheel for CPUs, without CUDA and ROCm: pip install --force-reinstall "
    "torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130 (cu126 for NVIDIA's drivers "
    "before 580; https://pytorch.org/get-started names others, and ROCm's)"
)


def test_a_wheel_for_cpus_is_named_with_the_one_to_install(fake: Torch) -> None:
    assert accelerator.why_not(GPU) == WHEEL


def test_a_cpu_needs_nothing_of_all_that(fake: Torch) -> None:
    fake.has_nccl(False)
    assert accelerator.why_not(torch.device("cpu"), 8) is None


def test_a_driver_that_is_too_old_is_quoted(fake: Torch) -> None:
    fake.says("2.13.0+cu130", cuda="13.0")
    fake.cannot_begin("The NVIDIA driver on your system is too old (found 11040).\nPlease update")
    assert accelerator.why_not(GPU) == (
        "torch 2.13.0+cu130 finds no GPU: The NVIDIA driver on your system is too old (found "
        "11040)."
    )


def test_a_driver_that_is_too_old_is_quoted_where_its_library_counts_the_boards(
    fake: Torch,
) -> None:
    fake.says("2.13.0", cuda="13.0", devices=8)
    fake.has_nccl(True)
    fake.cannot_begin("The NVIDIA driver on your system is too old (found 12040).\nPlease update")
    wrong = (
        "torch 2.13.0 cannot use the GPUs here: The NVIDIA driver on your system is too old (found "
        "12040)."
    )
    assert accelerator.why_not(GPU, 8) == wrong
    with pytest.raises(PreflightError, match=r"^device: cuda, but torch 2.13.0 cannot use the"):
        rendezvous.join(0, 1, GPU, LimitsConfig())
    for device in ("cuda", "auto"):
        with pytest.raises(PreflightError) as caught:
            run._find_device(device, 0)
        assert str(caught.value) == f'init(): {wrong}; init(device="cpu") trains without'


def test_a_rank_without_a_device_of_its_own_is_told_how_many_there_are(fake: Torch) -> None:
    fake.says("2.13.0+cu130", cuda="13.0", devices=2)
    fake.has_nccl(True)
    assert accelerator.why_not(torch.device("cuda", 1), 2) is None
    wrong = accelerator.why_not(torch.device("cuda", 2), 4)
    assert wrong == "cuda:2 is not there: torch 2.13.0+cu130 finds 2 here"


def test_rocm_is_cuda_by_another_version(fake: Torch) -> None:
    fake.says("2.13.0+rocm7.1", cuda=None, hip="7.1", devices=8)
    fake.has_nccl(True)  # as RCCL calls itself
    assert accelerator.why_not(torch.device("cuda", 7), 8) is None
    assert accelerator.backend_name(torch.device("cuda", 7)) == "nccl"


def test_rocm_without_a_device_is_no_matter_of_the_wheel(fake: Torch) -> None:
    fake.says("2.13.0+rocm7.1", cuda=None, hip="7.1")
    fake.cannot_begin("No HIP GPUs are available")
    assert accelerator.why_not(GPU) == (
        "torch 2.13.0+rocm7.1 finds no GPU: No HIP GPUs are available"
    )


@pytest.mark.parametrize(
    ("platform", "advice"),
    [("win32", "no wheel for Windows has; install the one for Linux, in WSL 2"), ("linux", "USE_")],
)
def test_several_ranks_need_nccl(
    fake: Torch, monkeypatch: pytest.MonkeyPatch, platform: str, advice: str
) -> None:
    fake.says("2.13.0+cu130", cuda="13.0", devices=2)
    fake.has_nccl(False)
    monkeypatch.setattr("sys.platform", platform)
    assert accelerator.why_not(GPU) is None  # one rank
    wrong = accelerator.why_not(GPU, 2)
    assert wrong is not None
    assert wrong.startswith("torch 2.13.0+cu130 has no NCCL, by which the GPUs of several ranks")
    assert advice in wrong
    assert wrong.endswith("or train on one rank")


@pytest.mark.parametrize("kind", ["xpu", "hpu", "mtia"])
def test_another_kind_of_device_is_refused_with_what_is_missing(fake: Torch, kind: str) -> None:
    wrong = accelerator.why_not(torch.device(kind, 0))
    assert wrong is not None
    assert f"not on {kind} (" in wrong
    assert "cannot pin the host's memory" in wrong


def test_a_wheel_for_another_kind_is_named(fake: Torch) -> None:
    fake.says("2.13.0+xpu", cuda=None)
    fake.computes_on("xpu")
    wrong = accelerator.why_not(GPU)
    assert wrong is not None
    assert wrong.startswith("torch 2.13.0+xpu is one for xpu, without CUDA and ROCm: pip install")


def test_a_rank_says_so_before_it_meets_the_others(fake: Torch) -> None:
    with pytest.raises(PreflightError) as caught:
        rendezvous.join(0, 2, GPU, LimitsConfig())
    assert str(caught.value) == f"device: cuda, but {WHEEL}; device: cpu trains without"
    assert caught.value.exit_code == 3


@pytest.mark.thorough
def test_check_asks_torch_for_the_gpus_of_this_host(tmp_path: Path) -> None:
    """In a process of its own, where torch is what it is: for CPUs, or without a GPU."""
    (tmp_path / "job.yaml").write_text(JOB)
    job = load_job(tmp_path / "job.yaml", [])
    if torch.cuda.is_available():
        pytest.skip("there are GPUs")
    with pytest.raises(PreflightError, match=r"^device: cuda, but torch .*; device: cpu trains"):
        inspect_structure(job, 100, gpu_ranks=2)


# The library


def test_a_script_may_ask_for_what_there_is(fake: Torch) -> None:
    assert run._find_device("cpu", 0) == torch.device("cpu")
    assert run._find_device("auto", 0) == torch.device("cpu")  # no GPU here


def test_a_script_that_asks_for_a_gpu_hears_why_there_is_none(fake: Torch) -> None:
    with pytest.raises(PreflightError) as caught:
        run._find_device("cuda", 0)
    assert str(caught.value) == f'init(): {WHEEL}; init(device="cpu") trains without'


@pytest.mark.usefixtures("board")
def test_a_script_does_not_miss_a_gpu_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PreflightError, match="is a wheel for CPUs"):
        run._find_device("auto", 0)
    assert run._find_device("cpu", 0).type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run._find_device("auto", 0).type == "cpu"


def test_a_script_on_devices_of_another_kind_is_told(fake: Torch) -> None:
    fake.says("2.13.0+xpu", cuda=None)
    fake.computes_on("xpu")
    with pytest.raises(PreflightError, match=r"computes on xpu, but zrun trains on CPUs and on"):
        run._find_device("auto", 0)
    fake.computes_on("mps")
    assert run._find_device("auto", 0).type == "cpu"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("xpu", r"init\(device='xpu'\): zrun trains on CPUs and on the GPUs of CUDA and ROCm, not"),
        ("hip", r"torch calls the GPUs of ROCm cuda: write cuda in place of hip"),
        ("gpu", r"init\(device='gpu'\): write auto, cpu or cuda"),
    ],
)
def test_names_of_other_devices_are_refused_by_the_library(name: str, said: str) -> None:
    with pytest.raises(JobError, match=said):
        run._find_device(name, 0)


def test_ranks_of_a_script_need_nccl(fake: Torch) -> None:
    fake.says("2.13.0+cu130", cuda="13.0", devices=2)
    fake.has_nccl(False)
    with pytest.raises(PreflightError, match=r"^init\(\): torch 2.13.0\+cu130 has no NCCL"):
        run._join(2, GPU, 1.0)


# A job


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("xpu", "zrun trains on CPUs and on the GPUs of CUDA and ROCm, not on xpu (Intel's GPUs)"),
        ("rocm", "torch calls the GPUs of ROCm cuda: write cuda in place of rocm"),
    ],
)
def test_a_job_that_asks_for_other_devices_is_wrong(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "job.yaml").write_text(JOB + f"device: {name}\n")
    with pytest.raises(JobError) as caught:
        load_job(tmp_path / "job.yaml", [])
    assert "job.yaml:8:9: device: " + said in str(caught.value)
    assert caught.value.exit_code == 2


def test_all_names_of_others_are_lower_case_kinds() -> None:
    assert device_names.why_refused("XPU:0") == device_names.why_refused("xpu")
    assert device_names.why_refused("cuda") is None
    assert device_names.why_refused(3) is None


# Variables


@pytest.mark.parametrize("value", ["", "-1", "-1,0", " ", "NoDevFiles", "none"])
@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_who_hides_gpus_wants_none(name: str, value: str) -> None:
    assert visible_devices.are_hidden({name: value})
    assert not visible_devices.are_hidden({name: "0"})
    assert not visible_devices.are_hidden({name: "0,-1"})
    assert not visible_devices.are_hidden({})


def test_what_traces_a_model_sees_no_gpu() -> None:
    assert visible_devices.are_hidden(visible_devices.NO_GPU)


# Releases


def test_what_is_promised_is_the_same_everywhere() -> None:
    """In pyproject.toml, in what is refused, in the README and on the page of tested releases."""
    readme = " ".join((versions.ROOT / "README.md").read_text(encoding="utf-8").split())
    page = (versions.ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    for package in versions.PACKAGES:
        lowest, pinned = versions.floor_of(package), versions.pin_of(package)
        assert LOWEST[package] == lowest
        assert f"{package} {lowest} or newer" in readme
        row = next(line for line in page.splitlines() if line.startswith(f"| `{package}`"))
        assert row.endswith(f"| {lowest} | {pinned} |")


@pytest.mark.parametrize("release", ["2.13.0+cpu", "2.11.0", "2.11.0a0+git12", "3.0"])
def test_newer_releases_are_taken(release: str) -> None:
    check_release("torch", release)


def test_an_old_torch_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: "2.9.1+cpu")
    monkeypatch.setattr(sys, "argv", ["zrun", "check", "nothing.yaml"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 3
    lowest = LOWEST["torch"]
    said = f"zrun is tested from {lowest} on: pip install 'torch>={lowest}'"
    assert capsys.readouterr().err == f"error: torch 2.9.1+cpu is too old: {said}\n"
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    monkeypatch.setattr(run, "_current", None)
    with pytest.raises(PreflightError, match="is too old"):
        run.init()


def test_an_old_transformers_is_refused_where_a_model_is_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Pretrained(torch.nn.Linear):
        config = SimpleNamespace()

        @classmethod
        def from_pretrained(cls) -> None: ...

    old = ModuleType("transformers")
    old.__version__ = "4.57.6"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", old)
    build.check(torch.nn.Linear(2, 2))
    model = Pretrained(2, 2)
    model.config = SimpleNamespace(model_type="small", to_json_string=str)
    with pytest.raises(PreflightError, match=r"^transformers 4\.57\.6 is too old: "):
        build.check(torch.nn.Sequential(model))
