"""Facts about this host, before anything runs on it. What cannot be known is None.

The launcher runs `software` and `job_code` itself too: they must give the same everywhere.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import resource
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zrun.hosts.cluster import HostFacts, probe_host
from zrun.hosts.offload_disk import SwapFolder
from zrun.topology.boards import Health, Reading
from zrun.topology.machine import drivers_open, read_machine
from zrun_core.spine.releases import own_release

TOKEN_PREFIX = ".zrun-token-"
# Lines such as "cuda: Optional[str] = '13.0'", of which the first two numbers count, or None.
_VERSION_LINE = re.compile(
    r"^(cuda|hip|xpu)\b[^=\n]*=\s*(?:['\"](\d+(?:\.\d+)?)[^'\"\n]*['\"]|None)", re.MULTILINE
)
_TARGETS = {"cuda": "CUDA", "hip": "ROCm"}
_MAX_FILES = 500  # of a job's code that are compared
_MAX_FOLDERS = 2000  # that are searched for them
_NOT_CODE = {"node_modules", "runs", "site-packages", "venv"}


@dataclass(frozen=True)
class Software:
    python: str  # version
    executable: str
    zrun: str  # version
    zrun_code: str  # digest of every file of ours
    torch: str | None  # version, from its metadata: importing it would take two seconds
    torch_for: str | None = None  # what it computes on: see `torch_target`


@dataclass(frozen=True)
class GpuState:
    """A GPU now.

    Attributes:
        foreign: pids that compute on it.
        num_links: of its fast links that are up; None: not known.
    """

    uuid: str
    free_bytes: int
    total_bytes: int
    foreign: tuple[int, ...]
    health: Health = field(default_factory=Health)
    num_links: int | None = None


@dataclass(frozen=True)
class Driver:
    version: str
    cuda: tuple[int, int]  # the newest CUDA that it serves


@dataclass(frozen=True)
class Folder:
    path: str
    same: bool  # it holds the launcher's token: it is the launcher's folder
    free_bytes: int | None  # where it lies, or would
    trouble: str | None  # why nothing can be written there


@dataclass(frozen=True)
class Limits:
    """Of a process there; None: unlimited."""

    nofile: int | None
    nproc: int | None  # also None for root, whom it does not bind
    memlock_bytes: int | None
    shm_free_bytes: int | None  # /dev/shm; None: there is none


@dataclass(frozen=True)
class HostReport:
    """The state of a host.

    Attributes:
        code: digests of the job's Python files; None: the folder is not there.
        addresses: by interface, of those that are up.
        reached_at: by the launcher's ssh.
        skew_s: its clock less the launcher's.
        address, interface: by which the others reach it.
    """

    facts: HostFacts
    software: Software
    code: dict[str, str] | None
    folders: tuple[Folder, ...]
    limits: Limits
    driver: Driver | None
    gpus: tuple[GpuState, ...]
    infiniband: bool
    addresses: dict[str, tuple[str, ...]]
    reached_at: str | None
    user: str
    skew_s: float = 0.0
    skew_error_s: float = 0.0
    address: str | None = None
    interface: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, report: Mapping[str, Any]) -> HostReport:
        """Return what `to_json` gave.

        Raises:
            pydantic.ValidationError: it is something else.
        """
        from pydantic import TypeAdapter

        return TypeAdapter(HostReport).validate_python(report)


def facts(question: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a question of the launcher.

        {"ask": "facts", "job_dir": path or None, "folders": {path: token}, "swap": null}

    Args:
        question: "swap" has the fields of a `SwapFolder`.
    """
    heard = time.time()
    with drivers_open():  # stays open between the two: to open it may take seconds
        swap = question["swap"]
        facts = probe_host(None if swap is None else SwapFolder(**swap))
        driver, gpus = _gpu_states(read_machine(), {gpu.uuid for gpu in facts.gpus})
    job_dir = question["job_dir"]
    report = HostReport(
        facts=facts,
        software=software(),
        code=job_code(Path(job_dir)) if job_dir is not None else {},
        folders=tuple(_folder(path, token) for path, token in question["folders"].items()),
        limits=_limits(),
        driver=driver,
        gpus=gpus,
        infiniband=bool(_entries("/sys/class/infiniband")),
        addresses=addresses(),
        reached_at=_reached_at(os.environ),
        user=_user(),
    )
    return {"report": report.to_json(), "heard": heard, "said": time.time()}


def software() -> Software:
    """Return the versions that must be the same on all hosts."""
    return Software(
        python=platform.python_version(),
        executable=sys.executable,
        zrun=own_release(),
        zrun_code=own_code(),
        torch=version_of("torch"),
        torch_for=torch_target(),
    )


def version_of(package: str) -> str | None:
    """Return the installed version of a package, from its metadata; None where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def torch_target() -> str | None:
    """Return what the installed torch computes on; None where that is not known.

    "CUDA 13.0", "ROCm 7.1", "Intel's GPUs", or "CPUs", as its `version.py` says, which is read and
    not run. PyPI's wheels have no label such as "+cu130" in their version.
    """
    try:
        found = find_spec("torch")
        if found is None or found.origin is None:
            return None
        text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    values = dict(_VERSION_LINE.findall(text))
    if "cuda" not in values:
        return None  # another layout
    for name, target in _TARGETS.items():
        if values.get(name):
            return f"{target} {values[name]}"
    return "Intel's GPUs" if values.get("xpu") else "CPUs"


def own_code() -> str:
    """Return a digest of every file of ours."""
    import zrun
    import zrun_core

    digest = hashlib.sha256()
    for package in (zrun, zrun_core):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def job_code(job_dir: Path) -> dict[str, str] | None:
    """Return a digest for each Python file below a job's folder; None where that does not exist.

    A home folder may hold any number: the first ones in alphabetical order are compared.
    """
    if not job_dir.is_dir():
        return None
    found: dict[str, str] = {}
    for number, (folder, folders, files) in enumerate(os.walk(job_dir)):
        folders[:] = sorted(name for name in folders if not _is_no_code(folder, name))
        for name in sorted(files):
            if name.endswith(".py") and len(found) < _MAX_FILES:
                path = os.path.join(folder, name)
                relative = os.path.relpath(path, job_dir).encode(errors="surrogateescape")
                found[relative.decode(errors="replace")] = _digest(path)
        if number >= _MAX_FOLDERS or len(found) >= _MAX_FILES:
            break
    return found


def _digest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:12]
    except OSError as error:
        return f"({error.strerror})"


def _is_no_code(folder: str, name: str) -> bool:
    return (
        name.startswith((".", "__"))
        or name in _NOT_CODE
        or os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
    )


def _folder(path: str, token: str) -> Folder:
    same = os.path.isfile(os.path.join(path, TOKEN_PREFIX + token))
    there = Path(path)
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        stat = os.statvfs(there)
    except OSError as error:
        return Folder(path, same, None, error.strerror)
    return Folder(path, same, stat.f_bavail * stat.f_frsize, _trouble(there))


def _trouble(there: Path) -> str | None:
    """Return why no file can be made in a folder: permissions alone do not tell."""
    probe = there / f"{TOKEN_PREFIX}{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        os.close(os.open(probe, flags, 0o600))
        probe.unlink()
    except OSError as error:
        return error.strerror
    return None


def _limits() -> Limits:
    try:
        stat = os.statvfs("/dev/shm")
        shm: int | None = stat.f_bavail * stat.f_frsize
    except OSError:
        shm = None
    return Limits(
        _limit(resource.RLIMIT_NOFILE),
        None if os.geteuid() == 0 else _limit(resource.RLIMIT_NPROC),
        _limit(resource.RLIMIT_MEMLOCK),
        shm,
    )


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def addresses() -> dict[str, tuple[str, ...]]:
    """Return the addresses of each interface that is up, without link-local ones."""
    import psutil

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        own = [entry.address for entry in entries if entry.family in families]
        if name in up and own:
            found[name] = tuple(each for each in own if not each.startswith("fe80:"))
    return found


def _reached_at(environ: Mapping[str, str]) -> str | None:
    """Return the address of this host at which sshd took the launcher's connection."""
    parts = environ.get("SSH_CONNECTION", "").split()
    if len(parts) != 4:
        return None
    return parts[2].removeprefix("::ffff:")


def _gpu_states(reading: Reading, visible: set[str]) -> tuple[Driver | None, tuple[GpuState, ...]]:
    """Return the driver, and who uses the GPUs in `visible` whose memory is known."""
    driver = None
    if reading.driver is not None and reading.cuda is not None:
        driver = Driver(reading.driver, (reading.cuda // 1000, reading.cuda % 1000 // 10))
    states = tuple(
        GpuState(
            device.uuid,
            device.free_bytes,
            device.memory_bytes,
            device.processes or (),
            device.health,
            None if device.links is None else len(device.links),
        )
        for device in reading.devices
        if device.uuid in visible and device.free_bytes is not None and device.memory_bytes
    )
    return driver, states


def route_to(peer: str) -> str | None:
    """Return the address of this host from which packets to `peer` would leave; None for none.

    Nothing is sent.
    """
    try:
        family, kind, _, _, where = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def own_address(known: str | None, towards: Sequence[str]) -> str | None:
    """Return the address at which the others reach this host.

    Args:
        known: address at which the launcher reached this host; it is taken if it is its own. None:
            it is not known.
        towards: names or addresses of others, to one of which there is a route.
    """
    if known is not None:
        is_own = any(known in found for found in addresses().values())
        if is_own or known.startswith("127."):
            return known
    for peer in towards:
        address = route_to(peer)
        if address is not None:
            return address
    return None


def interface_of(address: str) -> str | None:
    """Return the interface that has this address."""
    return next((name for name, found in addresses().items() if address in found), None)
