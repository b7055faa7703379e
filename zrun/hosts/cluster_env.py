"""Who started this process, by its environment: nobody, a launcher with a process per rank or per host, or Slurm.

Nothing is guessed: what is set by half, or contradicts itself, is an error. To take such a process for one that stands
alone would train as many separate models as there are processes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from zrun.hosts.nodelist import expand, natural
from zrun.job.problems import shown_text
from zrun_core.errors import JobError
from zrun_core.spine.hostname import MAX_SLOTS, check_name

Environ = Mapping[str, str]
_Kind = Literal["none", "joined", "slurm", "kubernetes", "skypilot", "pet"]

# rank, world, rank on the host, ranks on the host. The first is set only where the launcher has set it.
_MPI = (
    (
        "Open MPI",
        *(f"OMPI_COMM_WORLD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ),
    (
        "MVAPICH2",
        *(f"MV2_COMM_WORLD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ),
    ("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# Slurm numbers the steps that no `srun` started downwards from 2**32: a batch script, a shell of salloc's.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_MAX_PROCESSES = 1 << 24
_ENDPOINT = re.compile(r"(?:\[([^\[\]]+)\]|([^\[\]:]+))(?::([0-9]+))?")


@dataclass(frozen=True)
class Seat:
    """The one rank that this process is to be."""

    rank: int
    world: int
    local_rank: int
    local_world: int | None = None  # None: the launcher does not say
    address: str | None = None  # of the host of rank 0, where the launcher names it
    port: int | None = None


@dataclass(frozen=True)
class HostSeat:
    """The one host that this process is to run the ranks of."""

    index: int
    count: int
    slots: int | None = None
    address: str | None = None  # of the first host
    port: int | None = None


@dataclass(frozen=True)
class ClusterEnv:
    """What the environment says. Of `seat`, `host_seat` and `names` those are set that it tells of."""

    kind: _Kind
    evidence: str = ""  # who started this process, and the variables that say so
    seat: Seat | None = None
    host_seat: HostSeat | None = None
    names: tuple[str, ...] = ()  # hosts, in the order of their ranks
    slots: int | None = None  # of each of them
    source: str = ""  # the variable that names the hosts
    here: str | None = None  # which of them this process runs on


NONE = ClusterEnv("none")


def detect(environ: Environ) -> ClusterEnv:
    """The convention of `environ`. A world of one process is no convention: there is nothing to join.

    Raises:
        JobError: a variable has no sense, or tells only half.
    """
    return _torchrun(environ) or _mpi(environ) or _pods(environ) or _slurm(environ) or NONE


def _torchrun(environ: Environ) -> ClusterEnv | None:
    if not environ.keys() >= {"RANK", "WORLD_SIZE", "LOCAL_RANK"}:
        return None
    by = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "a launcher like torchrun"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return _joined(environ, by, names, "MASTER_ADDR", "MASTER_PORT")


def _mpi(environ: Environ) -> ClusterEnv | None:
    for by, *names in _MPI:
        if names[0] not in environ or (by == "MPICH" and _is_step_rank(environ)):
            continue
        found = _joined(
            environ, by, (names[0], names[1], names[2], names[3]), "MASTER_ADDR", "MASTER_PORT"
        )
        if found is not None:
            return found
    return None


def _is_step_rank(environ: Environ) -> bool:
    """Whether `srun` itself speaks PMI to this process: its own variables say more then."""
    pairs = (("PMI_RANK", "SLURM_PROCID"), ("PMI_SIZE", "SLURM_STEP_NUM_TASKS"))
    return all(environ.get(pmi) == environ.get(slurm) for pmi, slurm in pairs)


def _joined(
    environ: Environ, by: str, names: tuple[str, str, str, str], address: str, port: str
) -> ClusterEnv | None:
    rank_name, world_name, local_name, local_world_name = names
    world = _number(environ, world_name, least=1)
    if world == 1:
        return None
    rank, local_rank = _number(environ, rank_name), _number(environ, local_name)
    local_world = (
        _number(environ, local_world_name, least=1) if local_world_name in environ else None
    )
    _check_below(rank_name, rank, world_name, world)
    if local_world is not None:
        _check_below(local_name, local_rank, local_world_name, local_world)
    evidence = f"{by}: {rank_name}={rank}, {world_name}={world}, {local_name}={local_rank}"
    seat = Seat(
        rank, world, local_rank, local_world, _address(environ, address), _port(environ, port)
    )
    return ClusterEnv("joined", evidence, seat)


def _pods(environ: Environ) -> ClusterEnv | None:
    """One process per host: the variables of SkyPilot, of torchrun's options (PET_*), of a PyTorchJob."""
    if "SKYPILOT_NODE_RANK" in environ:
        return _skypilot(environ)
    if "PET_NNODES" in environ:
        return _pet(environ)
    in_pod = "KUBERNETES_PORT" in environ or "KUBERNETES_SERVICE_HOST" in environ
    index = "JOB_COMPLETION_INDEX" if in_pod and "RANK" not in environ else "RANK"
    if not environ.keys() >= {index, "WORLD_SIZE"} or _number(environ, "WORLD_SIZE", least=1) == 1:
        return None
    if index != "RANK":
        seat = _host_seat(environ, index, "WORLD_SIZE", None, "MASTER_ADDR", "MASTER_PORT")
        evidence = f"an indexed Job: pod {seat.index} of {seat.count} ({index}, WORLD_SIZE)"
        return ClusterEnv("kubernetes", evidence, None, seat)
    if not in_pod or "MASTER_ADDR" not in environ or "GROUP_RANK" in environ:
        raise JobError(
            "RANK and WORLD_SIZE are set without LOCAL_RANK: is this process one of several? Set LOCAL_RANK too if "
            "there is one per rank, or PET_NNODES and PET_NODE_RANK if there is one per host; if not, unset RANK and "
            "WORLD_SIZE"
        )
    # A PyTorchJob counts pods, not GPUs, as long as nothing in the pod starts a process per GPU.
    seat = _host_seat(environ, "RANK", "WORLD_SIZE", None, "MASTER_ADDR", "MASTER_PORT")
    return ClusterEnv(
        "kubernetes",
        f"a PyTorchJob: pod {seat.index} of {seat.count} (RANK, WORLD_SIZE)",
        None,
        seat,
    )


def _skypilot(environ: Environ) -> ClusterEnv | None:
    variable = "SKYPILOT_NODE_IPS"
    names = tuple(environ.get(variable, "").split())
    if len(names) == 1:
        return None
    for name in names:
        _check_host(variable, name)
    index = _number(environ, "SKYPILOT_NODE_RANK")
    if not names:
        raise JobError(
            f"SKYPILOT_NODE_RANK={index}, but {variable} names no host: unset both, or set both"
        )
    _check_below("SKYPILOT_NODE_RANK", index, f"the number of hosts in {variable}", len(names))
    slots = (
        _number(environ, "SKYPILOT_NUM_GPUS_PER_NODE")
        if "SKYPILOT_NUM_GPUS_PER_NODE" in environ
        else None
    )
    seat = HostSeat(index, len(names), slots or None, names[0])
    evidence = f"SkyPilot: host {index} of {len(names)} (SKYPILOT_NODE_RANK, {variable})"
    return ClusterEnv(
        "skypilot", evidence, None, seat, names, slots or None, variable, names[index]
    )


def _pet(environ: Environ) -> ClusterEnv | None:
    count = environ["PET_NNODES"]
    if count == "1" or count == "1:1":
        return None
    if ":" in count:
        low, _, high = count.partition(":")
        if low != high:
            fixed = shown_text(high)
            raise JobError(
                f"PET_NNODES={shown_text(count)}: the number must be fixed: write PET_NNODES={fixed}"
            )
        environ = {**environ, "PET_NNODES": low}
    if "PET_NODE_RANK" not in environ:
        raise JobError(
            f"PET_NNODES={shown_text(count)}, but PET_NODE_RANK does not say which of them this host is: set it too"
        )
    address, port = "PET_MASTER_ADDR", "PET_MASTER_PORT"
    if address not in environ and "PET_RDZV_ENDPOINT" in environ:
        match = _ENDPOINT.fullmatch(environ["PET_RDZV_ENDPOINT"])
        if match is None:
            raise JobError("PET_RDZV_ENDPOINT: write host:port, with an IPv6 address in brackets")
        environ = {**environ, address: match[1] or match[2]} | (
            {port: match[3]} if match[3] else {}
        )
    elif address not in environ and "MASTER_ADDR" in environ:
        address, port = "MASTER_ADDR", "MASTER_PORT"
    seat = _host_seat(environ, "PET_NODE_RANK", "PET_NNODES", "PET_NPROC_PER_NODE", address, port)
    return ClusterEnv(
        "pet", f"host {seat.index} of {seat.count} (PET_NODE_RANK, PET_NNODES)", None, seat
    )


def _host_seat(
    environ: Environ, index: str, count: str, slots: str | None, address: str, port: str
) -> HostSeat:
    total, own = _number(environ, count, least=1), _number(environ, index)
    _check_below(index, own, count, total)
    first = _address(environ, address)
    if first is None:
        raise JobError(
            f"{index}={own} of {count}={total} hosts, but {address} does not name the first one: set it too"
        )
    # "auto", "gpu" and "cpu" leave the number to the host.
    per_host = environ.get(slots, "") if slots is not None else ""
    given = _number(environ, slots or "", least=1) if per_host.isdigit() else None
    return HostSeat(own, total, given, first, _port(environ, port))


def _slurm(environ: Environ) -> ClusterEnv | None:
    """A task of `srun` if there are several, else a shell or script in an allocation."""
    if "SLURM_JOB_ID" not in environ:
        return None
    if environ.get("SLURM_HET_SIZE", "1") not in ("0", "1"):
        raise JobError(
            f"SLURM_HET_SIZE={shown_text(environ['SLURM_HET_SIZE'])}: the parts of a heterogeneous Slurm job cannot be "
            "used together: ask for one allocation, or write launch.backend: local to use this host only"
        )
    # A batch script and a shell of salloc's have SLURM_PROCID too; only a step of srun's has tasks to join.
    step = environ.get("SLURM_STEP_ID", "")
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if step.isdigit() and int(step) < _FIRST_SPECIAL_STEP and tasks != "1":
        return _slurm_task(environ)
    source = "SLURM_JOB_NODELIST" if "SLURM_JOB_NODELIST" in environ else "SLURM_NODELIST"
    if source not in environ:
        raise JobError(
            f"SLURM_JOB_ID={shown_text(environ['SLURM_JOB_ID'])}, but SLURM_JOB_NODELIST does not name its hosts: pass "
            "it on, or write launch.backend: local to use this host only"
        )
    names = tuple(sorted(_nodes(source, environ[source]), key=natural))
    here = environ.get("SLURMD_NODENAME")
    if names == (here,):
        return None  # the whole allocation is this host
    several = f"{len(names)} hosts" if len(names) > 1 else names[0]
    evidence = f"Slurm job {shown_text(environ['SLURM_JOB_ID'])}: {several} ({source})"
    return ClusterEnv("slurm", evidence, None, None, names, _slurm_slots(environ), source, here)


def _slurm_task(environ: Environ) -> ClusterEnv:
    world, rank = (
        _number(environ, "SLURM_STEP_NUM_TASKS", least=1),
        _number(environ, "SLURM_PROCID"),
    )
    _check_below("SLURM_PROCID", rank, "SLURM_STEP_NUM_TASKS", world)
    hosts = (
        _number(environ, "SLURM_STEP_NUM_NODES", least=1)
        if "SLURM_STEP_NUM_NODES" in environ
        else None
    )
    slots = _slurm_slots(environ)
    if (
        hosts == world and slots is not None and slots > 1
    ):  # a task per host, and each has several GPUs to run
        source = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_JOB_NODELIST"
        names = tuple(sorted(_nodes(source, environ.get(source, "")), key=natural))
        here = environ.get("SLURMD_NODENAME")
        if len(names) != hosts or here not in names:
            raise JobError(
                f"{source}: {len(names)} hosts, where SLURM_STEP_NUM_NODES={hosts} and SLURMD_NODENAME count"
            )
        seat = HostSeat(names.index(here), hosts, slots, names[0])
        evidence = (
            f"srun: a task for each of {hosts} hosts (SLURM_STEP_NUM_TASKS={world}, {source})"
        )
        return ClusterEnv("slurm", evidence, None, seat, names, slots, source, here)
    local_rank = _number(environ, "SLURM_LOCALID")
    evidence = (
        f"srun: SLURM_PROCID={rank}, SLURM_STEP_NUM_TASKS={world}, SLURM_LOCALID={local_rank}"
    )
    address, port = _address(environ, "MASTER_ADDR"), _port(environ, "MASTER_PORT")
    if address is None and "SLURM_STEP_NODELIST" in environ:  # task 0 is on the first of them
        address = _nodes("SLURM_STEP_NODELIST", environ["SLURM_STEP_NODELIST"])[0]
    return ClusterEnv(
        "joined",
        evidence,
        Seat(rank, world, local_rank, world if hosts == 1 else None, address, port),
    )


def _slurm_slots(environ: Environ) -> int | None:
    """GPUs, or else tasks, that every host was asked for; SLURM_TASKS_PER_NODE may count CPUs."""
    gpus = [part.rpartition(":")[2] for part in environ.get("SLURM_GPUS_PER_NODE", "").split(",")]
    if all(part.isdigit() for part in gpus) and 1 <= sum(map(int, gpus)) <= MAX_SLOTS:
        return sum(map(int, gpus))
    tasks = environ.get("SLURM_NTASKS_PER_NODE", "")
    return int(tasks) if tasks.isdigit() and 2 <= int(tasks) <= MAX_SLOTS else None


def _nodes(variable: str, text: str) -> list[str]:
    try:
        names = expand(text)
    except ValueError as error:
        raise JobError(f"{variable}: {error}; it is read as in node[001-004,7],gpu-[1-2]") from None
    for name in names:
        _check_host(variable, name)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise JobError(f"{variable} names {twice} twice")
    return names


def _address(environ: Environ, name: str) -> str | None:
    if environ.get(name):
        _check_host(name, environ[name])
    return environ.get(name) or None


def _check_host(variable: str, name: str) -> None:
    try:
        check_name(name)
    except ValueError as error:
        raise JobError(f"{variable}: {error}") from None


def _check_below(name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        raise JobError(
            f"{name}={value} is not below {limit_name}={limit}: unset what an earlier launcher left behind"
        )


def _number(environ: Environ, name: str, least: int = 0) -> int:
    text = environ.get(name)
    if text is None:
        raise JobError(
            f"{name} is not set, as the variables beside it let expect: pass the launcher's environment on"
        )
    if not (
        text.isascii() and text.isdigit() and len(text) <= 9 and least <= int(text) < _MAX_PROCESSES
    ):
        raise JobError(
            f'{name}="{shown_text(text)}" is not a whole number >= {least}: unset it, or set it right'
        )
    return int(text)


def _port(environ: Environ, name: str) -> int | None:
    if name not in environ:
        return None
    port = _number(environ, name, least=1)
    if port > 65535:
        raise JobError(f"{name}={port} is not a port: write a number from 1 to 65535")
    return port
