"""The environment that another launcher, or Slurm, leaves to a process: `detect(os.environ)`.

    torchrun, mpirun, srun                  a process for each rank: a `Member` that is a rank
    a PyTorchJob, PET_*, SkyPilot, srun     a process for each host: a `Member` that is a host
    sbatch, salloc                          a shell that owns hosts: their `names`

Nothing is guessed: what is set by half, or contradicts itself, is an error. A process that took
itself for the only one would train a model of its own, as would each of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from zrun.hosts.nodelist import expand, natural
from zrun.job.problems import shown_text
from zrun_core.errors import JobError
from zrun_core.spine.hostname import MAX_SLOTS, check_name

Environ = Mapping[str, str]

# Slurm numbers the steps that no `srun` started downwards from 2**32: a batch script, a shell of
# salloc's.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_MAX_PROCESSES = 1 << 24


@dataclass(frozen=True)
class Member:
    """One of the processes that another launcher started, one for each rank or one for each host.

    Attributes:
        index, count: of ranks, or of hosts.
        is_rank: it is to be one rank; else it runs those of its host.
        local_index: of a rank, on its host.
        slots: ranks of its host; None: the launcher does not say.
        address: of the first process; None: the launcher does not name it.
        port: that the launcher names with it.
    """

    index: int
    count: int
    is_rank: bool
    local_index: int = 0
    slots: int | None = None
    address: str | None = None
    port: int | None = None


@dataclass(frozen=True)
class ClusterEnv:
    """The place of a process among others, as its environment says.

    Attributes:
        evidence: who started this process, and the variables that say so.
        member: which of the processes of another launcher it is; None: it is the only one.
        names: the hosts of a Slurm allocation, in the order of their ranks.
        slots: of each of them.
        source: the variable that names them.
    """

    evidence: str = ""
    member: Member | None = None
    names: tuple[str, ...] = ()
    slots: int | None = None
    source: str = ""


NONE = ClusterEnv()


@dataclass(frozen=True)
class _Variables:
    """The names under which a launcher tells a process which one it is.

    Attributes:
        launcher: as the evidence begins.
        local_index: "": it starts a process for each host.
    """

    launcher: str
    index: str
    count: str
    local_index: str = ""
    slots: str = ""
    address: str = "MASTER_ADDR"
    port: str = "MASTER_PORT"


def _mpi(launcher: str, prefix: str) -> _Variables:
    parts = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return _Variables(launcher, *(f"{prefix}_COMM_WORLD_{part}" for part in parts))


_TORCHRUN = _Variables("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_MPICH = _Variables("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SRUN = _Variables("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
_SKYPILOT = _Variables(
    "SkyPilot: host",
    "SKYPILOT_NODE_RANK",
    "SKYPILOT_NUM_NODES",
    slots="SKYPILOT_NUM_GPUS_PER_NODE",
    address="SKYPILOT_NODE_IPS",
)
_PET = _Variables(
    "host",
    "PET_NODE_RANK",
    "PET_NNODES",
    slots="PET_NPROC_PER_NODE",
    address="PET_MASTER_ADDR",
    port="PET_MASTER_PORT",
)
_INDEXED_JOB = _Variables("an indexed Job: pod", "JOB_COMPLETION_INDEX", "WORLD_SIZE")
_PYTORCH_JOB = _Variables("a PyTorchJob: pod", "RANK", "WORLD_SIZE")


def detect(environ: Environ) -> ClusterEnv:
    """Return what `environ` says. A world of one process is nothing to join.

    Raises:
        JobError: a variable makes no sense, or tells only half.
    """
    for variables in _launchers(environ):
        member = _member(environ, variables)
        if member is not None:
            return ClusterEnv(_evidence(environ, variables, member), member)
    return _slurm(environ)


def _launchers(environ: Environ) -> Iterator[_Variables]:
    """Yield the launchers that set `environ`, the innermost first."""
    is_torchrun = environ.keys() >= {"RANK", "WORLD_SIZE", "LOCAL_RANK"}
    if is_torchrun:
        yield _TORCHRUN
    for mpi in (_mpi("Open MPI", "OMPI"), _mpi("MVAPICH2", "MV2"), _MPICH):
        if mpi.index in environ and not (mpi is _MPICH and _srun_speaks_pmi(environ)):
            yield mpi
    if "SKYPILOT_NODE_RANK" in environ:
        yield _SKYPILOT
    elif "PET_NNODES" in environ:
        yield _PET
    elif environ.keys() >= {"RANK", "WORLD_SIZE"} and not is_torchrun:
        _check_pytorch_job(environ)
        yield _PYTORCH_JOB
    elif _in_pod(environ) and environ.keys() >= {"JOB_COMPLETION_INDEX", "WORLD_SIZE"}:
        yield _INDEXED_JOB


def _srun_speaks_pmi(environ: Environ) -> bool:
    """Return whether srun itself set the variables of MPICH: its own say more then."""
    pairs = ((_MPICH.index, _SRUN.index), (_MPICH.count, _SRUN.count))
    return all(environ.get(pmi) == environ.get(slurm) for pmi, slurm in pairs)


def _in_pod(environ: Environ) -> bool:
    return "KUBERNETES_PORT" in environ or "KUBERNETES_SERVICE_HOST" in environ


def _check_pytorch_job(environ: Environ) -> None:
    """Refuse a rank without LOCAL_RANK, but for a pod's.

    A PyTorchJob counts pods, not GPUs, as long as nothing in the pod starts a process per GPU.
    """
    is_pod = _in_pod(environ) and "MASTER_ADDR" in environ and "GROUP_RANK" not in environ
    if not is_pod and _number(environ, "WORLD_SIZE", least=1) > 1:
        raise JobError(
            "RANK and WORLD_SIZE are set without LOCAL_RANK: is this process one of several? Set "
            "LOCAL_RANK too if there is one per rank, or PET_NNODES and PET_NODE_RANK if there is "
            "one per host; if not, unset RANK and WORLD_SIZE"
        )


def _member(environ: Environ, names: _Variables) -> Member | None:
    """Read a process's place; None where it is the only one."""
    count = _number(environ, names.count, least=1)
    if count == 1:
        return None
    index = _number(environ, names.index)
    _check_below(names.index, index, names.count, count)
    address = _address(environ, names.address)
    if not names.local_index and address is None:
        raise JobError(
            f"{names.index}={index} of {names.count}={count} hosts, but {names.address} does not "
            "name the first one: set it too"
        )
    slots = None
    if environ.get(names.slots, "") not in ("", "auto", "gpu", "cpu"):  # words of torchrun
        slots = _number(environ, names.slots) or None
    port = _port(environ, names.port)
    if not names.local_index:
        return Member(index, count, False, 0, slots, address, port)
    local_index = _number(environ, names.local_index)
    if slots is not None:
        _check_below(names.local_index, local_index, names.slots, slots)
    return Member(index, count, True, local_index, slots, address, port)


def _evidence(environ: Environ, names: _Variables, member: Member) -> str:
    if not member.is_rank:
        return f"{names.launcher} {member.index} of {member.count} ({names.index}, {names.count})"
    launcher = names.launcher
    if names is _TORCHRUN and "TORCHELASTIC_RUN_ID" not in environ:
        launcher = "a launcher like torchrun"
    return (
        f"{launcher}: {names.index}={member.index}, {names.count}={member.count}, "
        f"{names.local_index}={member.local_index}"
    )


def _slurm(environ: Environ) -> ClusterEnv:
    """Read a task of `srun` if there are several, else a shell or script in an allocation."""
    if "SLURM_JOB_ID" not in environ:
        return NONE
    job = shown_text(environ["SLURM_JOB_ID"])
    if environ.get("SLURM_HET_SIZE", "1") not in ("0", "1"):
        raise JobError(
            f"SLURM_HET_SIZE={shown_text(environ['SLURM_HET_SIZE'])}: the parts of a heterogeneous "
            "Slurm job cannot be used together: ask for one allocation, or write launch.backend: "
            "local to use this host only"
        )
    # A batch script and a shell of salloc's have SLURM_PROCID too; only a step of srun's has tasks.
    step = environ.get("SLURM_STEP_ID", "")
    is_srun = step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP
    if is_srun and environ.get(_SRUN.count, "1") != "1":
        return _slurm_task(environ)
    source = "SLURM_JOB_NODELIST"
    if source not in environ:
        source = "SLURM_NODELIST"
    if source not in environ:
        raise JobError(
            f"SLURM_JOB_ID={job}, but SLURM_JOB_NODELIST does not name its hosts: pass it on, or "
            "write launch.backend: local to use this host only"
        )
    names = tuple(sorted(_nodes(environ, source), key=natural))
    if names == (environ.get("SLURMD_NODENAME"),):
        return NONE  # the whole allocation is this host
    hosts = names[0] if len(names) == 1 else f"{len(names)} hosts"
    evidence = f"Slurm job {job}: {hosts} ({source})"
    return ClusterEnv(evidence, None, names, _slurm_slots(environ), source)


def _slurm_task(environ: Environ) -> ClusterEnv:
    """A task is a rank; where it is alone on its host and has several GPUs, it is a host."""
    if not environ.get("MASTER_ADDR") and "SLURM_STEP_NODELIST" in environ:
        first = _nodes(environ, "SLURM_STEP_NODELIST")[0]  # task 0 is there
        environ = {**environ, "MASTER_ADDR": first}
    num_hosts = environ.get("SLURM_STEP_NUM_NODES")
    slots = _slurm_slots(environ)
    variables = _SRUN
    if num_hosts == environ[_SRUN.count] and slots is not None and slots > 1:
        variables = replace(_SRUN, launcher="srun: host", local_index="")
    member = _member(environ, variables)
    if member is None:
        return NONE
    if member.is_rank:
        slots = member.count if num_hosts == "1" else None
    return ClusterEnv(_evidence(environ, variables, member), replace(member, slots=slots))


def _slurm_slots(environ: Environ) -> int | None:
    """Return the GPUs, or else tasks, that every host was asked for.

    SLURM_TASKS_PER_NODE is no help: it may count CPUs.
    """
    parts = environ.get("SLURM_GPUS_PER_NODE", "").split(",")
    gpus = [part.rpartition(":")[2] for part in parts]  # a100:6,v100:2
    if all(part.isdecimal() for part in gpus) and 1 <= sum(map(int, gpus)) <= MAX_SLOTS:
        return sum(map(int, gpus))
    tasks = environ.get("SLURM_NTASKS_PER_NODE", "")
    if tasks.isdecimal() and 2 <= int(tasks) <= MAX_SLOTS:
        return int(tasks)
    return None


def _nodes(environ: Environ, variable: str) -> list[str]:
    try:
        names = expand(environ[variable])
    except ValueError as error:
        raise JobError(f"{variable}: {error}; it is read as in node[001-004,7],gpu-[1-2]") from None
    for name in names:
        _check_host(variable, name)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise JobError(f"{variable} names {twice} twice")
    return names


def _address(environ: Environ, variable: str) -> str | None:
    names = environ.get(variable, "").split()  # SkyPilot's names all hosts
    if not names:
        return None
    _check_host(variable, names[0])
    return names[0]


def _check_host(variable: str, name: str) -> None:
    try:
        check_name(name)
    except ValueError as error:
        raise JobError(f"{variable}: {error}") from None


def _check_below(name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        raise JobError(
            f"{name}={value} is not below {limit_name}={limit}: unset what an earlier launcher "
            "left behind"
        )


def _number(environ: Environ, name: str, least: int = 0) -> int:
    text = environ.get(name)
    if text is None:
        raise JobError(
            f"{name} is not set, although variables that belong to it are: pass on all of the "
            "launcher's environment"
        )
    is_number = text.isascii() and text.isdigit() and len(text) <= 9
    if not is_number or not least <= int(text) < _MAX_PROCESSES:
        raise JobError(
            f'{name}="{shown_text(text)}" is not a whole number >= {least}: unset it, or set it '
            "right"
        )
    return int(text)


def _port(environ: Environ, name: str) -> int | None:
    if name not in environ:
        return None
    port = _number(environ, name, least=1)
    if port > 65535:
        raise JobError(f"{name}={port} is not a port: write a number from 1 to 65535")
    return port
