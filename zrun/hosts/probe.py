"""What an agent finds out about its host, before anything runs there. What cannot be known is None.

The launcher runs `software` and `job_code` itself too: they must come to the same everywhere.
"""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from zrun.hosts.cluster import HostFacts, probe_host
from zrun.topology import nvml

TOKEN_PREFIX = ".zrun-token-"
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


@dataclass(frozen=True)
class GpuState:
    uuid: str
    free_bytes: int
    total_bytes: int
    foreign: tuple[int, ...]  # pids that compute on it


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
    """What is known of a host. `address` and `interface` are those by which the others reach it."""

    facts: HostFacts
    software: Software
    code: dict[str, str] | None  # digests of the job's Python files; None: the folder is not there
    folders: tuple[Folder, ...]
    limits: Limits
    driver: Driver | None
    gpus: tuple[GpuState, ...]
    infiniband: bool
    addresses: dict[str, tuple[str, ...]]  # interface -> addresses, of those that are up
    reached_at: str | None  # by the launcher's ssh
    user: str
    skew_s: float = 0.0  # its clock less the launcher's
    skew_error_s: float = 0.0
    address: str | None = None
    interface: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, report: Mapping[str, Any]) -> HostReport:
        """What `to_json` gave.

        Raises:
            pydantic.ValidationError: it is something else.
        """
        from pydantic import TypeAdapter

        return TypeAdapter(HostReport).validate_python(report)


def facts(question: Mapping[str, Any]) -> dict[str, Any]:
    """Answer `{"ask": "facts", "job_dir": path or None, "folders": {path: token}}`."""
    heard = time.time()
    with nvml.library():  # stays open between the two: to open it may take seconds
        facts = probe_host()
        driver, gpus = _gpu_states(nvml.read_machine(), {gpu.uuid for gpu in facts.gpus})
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
    """The versions that must be the same on all hosts."""
    return Software(
        python=platform.python_version(),
        executable=sys.executable,
        zrun=metadata.version("zrun"),
        zrun_code=own_code(),
        torch=version_of("torch"),
    )


def version_of(package: str) -> str | None:
    """The installed version of a package, from its metadata; None where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def own_code() -> str:
    """A digest of every file of ours."""
    import zrun
    import zrun_core

    digest = hashlib.sha256()
    for package in (zrun, zrun_core):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def job_code(job_dir: Path) -> dict[str, str] | None:
    """A digest for each Python file of a job's folder, and of the folders in it; None where there is no such folder.

    A folder that is somebody's home may hold any number: the first ones in alphabetical order are compared.
    """
    if not job_dir.is_dir():
        return None
    found: dict[str, str] = {}
    for number, (folder, folders, files) in enumerate(os.walk(job_dir)):
        folders[:] = sorted(name for name in folders if not _is_no_code(folder, name))
        for name in sorted(files):
            if name.endswith(".py") and len(found) < _MAX_FILES:
                path = os.path.join(folder, name)
                try:
                    with open(path, "rb") as file:
                        digest = hashlib.sha256(file.read()).hexdigest()[:12]
                except OSError as error:
                    digest = f"({error.strerror})"
                found[
                    os.path.relpath(path, job_dir)
                    .encode(errors="surrogateescape")
                    .decode(errors="replace")
                ] = digest
        if number >= _MAX_FOLDERS or len(found) >= _MAX_FILES:
            break
    return found


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
    """Why no file can be made in a folder: permissions alone do not tell."""
    probe = there / f"{TOKEN_PREFIX}{secrets.token_hex(8)}"
    try:
        os.close(
            os.open(
                probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
        )
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
    """The addresses of each interface that is up, without link-local ones."""
    import psutil

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: tuple(
            each.address
            for each in found
            if each.family in families and not each.address.startswith("fe80:")
        )
        for name, found in psutil.net_if_addrs().items()
        if name in up and any(each.family in families for each in found)
    }


def _reached_at(environ: Mapping[str, str]) -> str | None:
    """The address of this host at which sshd took the launcher's connection."""
    parts = environ.get("SSH_CONNECTION", "").split()
    return parts[2].removeprefix("::ffff:") if len(parts) == 4 else None


def _gpu_states(
    reading: nvml.Reading, visible: set[str]
) -> tuple[Driver | None, tuple[GpuState, ...]]:
    """The driver, and who uses the GPUs in `visible`. Of a GPU whose memory is not known nothing is said."""
    driver = None
    if reading.driver is not None and reading.cuda is not None:
        driver = Driver(reading.driver, (reading.cuda // 1000, reading.cuda % 1000 // 10))
    states = tuple(
        GpuState(device.uuid, device.free_bytes, device.memory_bytes, device.processes or ())
        for device in reading.devices
        if device.uuid in visible and device.free_bytes is not None and device.memory_bytes
    )
    return driver, states


def route_to(peer: str) -> str | None:
    """The address of this host from which packets to `peer` leave; None where none would. Nothing is sent."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def own_address(known: str | None, towards: Sequence[str]) -> str | None:
    """The address at which the others reach this host: a known one, else that of the route to one of them."""
    if known is not None and (
        known.startswith("127.") or any(known in found for found in addresses().values())
    ):
        return known
    return next((address for peer in towards if (address := route_to(peer)) is not None), None)


def interface_of(address: str) -> str | None:
    return next((name for name, found in addresses().items() if address in found), None)
