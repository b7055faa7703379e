"""Compile the device with g++, once for each state of its sources and of torch.

    python -m simulated_gpu --build

The library lies in `.venv/simulated-gpu`, or where SIMULATED_GPU_BUILD says, under a name that is a
digest of what it was made of: processes that look for another one never meet it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "device"
NVML = SOURCES.parents[1] / "scenarios" / "fake_nvml.c"
MODULE = "simulated_gpu_device"
TORCH = "2.13."  # whose interfaces the sources implement
FLAGS = [
    *("-std=c++20", "-O2", "-DNDEBUG", "-fPIC"),  # NDEBUG: as torch, whose structures depend on it
    *("-Wall", "-Wno-unknown-pragmas", "-Wno-interference-size"),
]
KEPT_S = 7 * 24 * 3600.0  # libraries and objects of other states


@functools.cache
def _torch_folder() -> Path | None:
    """Where torch lies; it is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


@functools.cache
def torch_version() -> str:
    """The version of torch, as it says itself."""
    folder = _torch_folder()
    if folder is None:
        return ""
    names: dict[str, str] = {}
    for line in (folder / "version.py").read_text(encoding="utf-8").splitlines():
        if line.startswith("__version__"):
            exec(line, names)
    return names.get("__version__", "")


def why_not() -> str | None:
    """Why there can be no simulated GPU here; None if there can."""
    folder = _torch_folder()
    if sys.platform != "linux":
        return f"the simulated GPU needs Linux, this is {sys.platform}"
    if folder is None:
        return "the simulated GPU needs torch, which is not installed"
    if not torch_version().startswith(TORCH):
        return f"the simulated GPU knows torch {TORCH}x, this is {torch_version()}"
    if (folder / "lib" / "libtorch_cuda.so").exists():
        return "the simulated GPU needs torch's wheel for CPUs, this one has CUDA of its own"
    if not library().exists() and shutil.which("g++") is None:
        return "the simulated GPU needs g++ (apt-get install g++)"
    return None


def _digest(sources: Iterable[Path]) -> str:
    """What tells apart the results of compiling these files here."""
    found = hashlib.sha256()
    for part in (torch_version(), sys.version, sysconfig.get_path("include"), *FLAGS):
        found.update(part.encode())
    for path in sorted(sources):
        found.update(path.name.encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


@functools.cache
def library() -> Path:
    """Where the library is, or will be."""
    home = os.environ.get("SIMULATED_GPU_BUILD") or Path(sys.prefix) / "simulated-gpu"
    return Path(home) / _digest([*SOURCES.iterdir(), NVML]) / f"{MODULE}.so"


def nvml_library() -> Path:
    """Where NVML's stand-in is, or will be, in a folder of its own."""
    return library().parent / "nvml" / "libnvidia-ml.so.1"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build() -> Path:
    """Return the library, compiled if it is not there yet. One process compiles, others wait."""
    target = library()
    if target.exists():
        return target
    reason = why_not()
    if reason is not None:
        raise RuntimeError(reason)
    with _locked(target.parent.parent):
        if not target.exists():
            _compile(target)
            _forget_old(target.parent.parent)
    return target


def _compile(target: Path) -> None:
    folder = _torch_folder()
    assert folder is not None
    include = folder / "include"
    paths = [include, include / "torch" / "csrc" / "api" / "include", sysconfig.get_path("include")]
    flags = [
        *FLAGS,
        "-DAT_PER_OPERATOR_HEADERS",
        f"-DTORCH_EXTENSION_NAME={MODULE}",
        *(f"-isystem{path}" for path in paths),
    ]
    target.parent.mkdir(parents=True, exist_ok=True)
    headers = list(SOURCES.glob("*.h"))
    kept = target.parent.parent / "objects"  # of files that did not change since they were compiled
    kept.mkdir(exist_ok=True)

    def run(*command: object) -> None:
        done = subprocess.run(["g++", *map(str, command)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"g++ does not compile the simulated GPU:\n{done.stderr}")

    def compile_together(sources: Sequence[Path]) -> Path:
        made = kept / f"{_digest([*sources, *headers])}.o"
        if not made.exists():
            whole = made.with_suffix(".cpp")
            whole.write_text("".join(f'#include "{source}"\n' for source in sources))
            run(*flags, "-c", whole, "-o", made.with_suffix(".new"))
            whole.unlink()
            made.with_suffix(".new").rename(made)
        made.touch()
        return made

    num_cores = os.cpu_count() or 1
    with ThreadPoolExecutor(num_cores) as pool:
        objects = list(pool.map(compile_together, _shared_out(num_cores)))
    nvml_library().parent.mkdir(exist_ok=True)
    shared = ["-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"]
    run("-x", "c", *shared, NVML, "-o", nvml_library())
    made = target.with_suffix(".new")
    libraries = [f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    run("-shared", *objects, *libraries, f"-Wl,-rpath,{folder / 'lib'}", "-o", made)
    made.rename(target)  # whole, or not there


def _shared_out(num_cores: int) -> list[list[Path]]:
    """Return the sources in a group for each core: torch's headers take longer than most of them.

    One that many files read is read once in each group.
    """
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size)
    groups: list[list[Path]] = [[] for _ in range(min(num_cores, len(sources)))]
    for source in sources:
        smallest = min(groups, key=lambda group: sum(path.stat().st_size for path in group))
        smallest.append(source)
    return groups


def _forget_old(home: Path) -> None:
    """Remove what nobody has made or looked for in a while."""
    for each in [*home.glob("*/*.so"), *home.glob("objects/*.o")]:
        if time.time() - each.stat().st_mtime > KEPT_S:
            each.unlink()
            shutil.rmtree(each.parent / "nvml", ignore_errors=True)
            with contextlib.suppress(OSError):
                each.parent.rmdir()
