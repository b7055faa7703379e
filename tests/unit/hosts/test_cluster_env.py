"""Who started this process: torchrun, mpirun, srun, a pod, Slurm's shell, or nobody.

No environment is guessed at.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrun.hosts.cluster_env import NONE, ClusterEnv, Member, detect
from zrun.hosts.nodelist import MAX_HOSTS, expand, natural
from zrun_core.errors import JobError

MPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[10,2]"}
BATCH = ALLOCATION | {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "n2",
    "SLURM_NTASKS": "2",
}
STEP = BATCH | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_PROCID": "3",
}
TASK_PER_HOST = STEP | {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_GPUS_PER_NODE": "h100:8",
    "SLURM_STEP_NODELIST": "n[10,2]",
}
PET = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
}
POD = {
    "KUBERNETES_SERVICE_HOST": "10.1.0.1",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "job-0",
    "MASTER_PORT": "23456",
}
SKY = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_IPS": "10.0.0.2\n10.0.0.1\n",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
}


@pytest.mark.parametrize(
    ("environ", "member"),
    [
        (TORCHRUN, Member(5, 8, True, 1, 4, "n1", 29500)),
        (
            TORCHRUN | MPI | STEP | PET | POD,
            Member(1, 2, True, 1, 4, "job-0", 23456),
        ),  # the innermost launcher
        (MPI, Member(5, 8, True, 1)),
        (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, Member(5, 8, True, 1, 4)),
        (MPI | STEP, Member(5, 8, True, 1)),  # mpirun starts its daemons with srun
        (HYDRA, Member(5, 8, True, 1, 4)),
        (HYDRA | STEP, Member(5, 8, True, 1, 4)),
        (
            {
                f"MV2_COMM_WORLD_{key}": value
                for key, value in {"RANK": "5", "SIZE": "8", "LOCAL_RANK": "1"}.items()
            },
            Member(5, 8, True, 1),
        ),
        (STEP, Member(3, 4, True, 0)),
        (STEP | {"PMI_RANK": "3", "PMI_SIZE": "4"}, Member(3, 4, True, 0)),  # srun --mpi=pmi2
        (STEP | {"SLURM_STEP_NUM_NODES": "4"}, Member(3, 4, True, 0)),
    ],
)
def test_a_process_per_rank(environ: dict[str, str], member: Member) -> None:
    found = detect(environ)
    assert (found.member, found.names) == (member, ())
    assert str(member.index) in found.evidence


def test_evidence_names_the_launcher() -> None:
    assert detect(TORCHRUN).evidence == "torchrun: RANK=5, WORLD_SIZE=8, LOCAL_RANK=1"
    assert detect(MPI).evidence.startswith("Open MPI: OMPI_COMM_WORLD_RANK=5")
    assert detect(STEP).evidence == "srun: SLURM_PROCID=3, SLURM_STEP_NUM_TASKS=4, SLURM_LOCALID=0"


@pytest.mark.parametrize(
    ("environ", "member"),
    [
        (PET, Member(1, 2, False, 0, None, "job-master-0", 23456)),
        (PET | POD | {"PET_NPROC_PER_NODE": "8"}, Member(1, 2, False, 0, 8, "job-master-0", 23456)),
        (PET | {"PET_NPROC_PER_NODE": "auto"}, Member(1, 2, False, 0, None, "job-master-0", 23456)),
        (POD, Member(1, 2, False, 0, None, "job-0", 23456)),
        (SKY, Member(1, 2, False, 0, 8, "10.0.0.2")),
        (SKY | {"SKYPILOT_NUM_GPUS_PER_NODE": "0"}, Member(1, 2, False, 0, None, "10.0.0.2")),
        (TASK_PER_HOST, Member(1, 2, False, 0, 8, "n10")),  # as Slurm lists them
    ],
)
def test_a_process_per_host(environ: dict[str, str], member: Member) -> None:
    found = detect(environ)
    assert (found.member, found.names) == (member, ())


@pytest.mark.parametrize(
    ("environ", "slots"),
    [
        (ALLOCATION, None),  # a shell of salloc's on the login node
        (BATCH, None),
        # An interactive step, and the batch script.
        (BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, None),
        (BATCH | {"SLURM_STEP_ID": "4294967291", "SLURM_STEP_NUM_TASKS": "2"}, None),
        (BATCH | STEP | {"SLURM_STEP_NUM_TASKS": "1", "PMI_RANK": "3", "PMI_SIZE": "1"}, None),
        (ALLOCATION | {"SLURM_GPUS_PER_NODE": "a100:6,v100:2"}, 8),
        (ALLOCATION | {"SLURM_GPUS_PER_NODE": "8", "SLURM_NTASKS_PER_NODE": "1"}, 8),
        (ALLOCATION | {"SLURM_NTASKS_PER_NODE": "4"}, 4),
        (ALLOCATION | {"SLURM_NTASKS_PER_NODE": "1"}, None),
        # CPUs, where nobody asked for tasks.
        (ALLOCATION | {"SLURM_TASKS_PER_NODE": "64(x2)"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NODELIST": "n[2,10]"}, None),
    ],
)
def test_a_shell_in_an_allocation(environ: dict[str, str], slots: int | None) -> None:
    found = detect(environ)
    assert (found.member, found.names, found.slots) == (None, ("n2", "n10"), slots)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MASTER_ADDR": "n1", "MASTER_PORT": "1", "KUBERNETES_PORT": "x"},
        TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
        {"PET_NNODES": "1"},
        SKY | {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n2", "SLURMD_NODENAME": "n2"},
        {"SLURM_CONF": "/etc/slurm.conf"},
    ],
)
def test_nothing_to_join(environ: dict[str, str]) -> None:
    assert detect(environ) == NONE


def test_one_host_of_an_allocation_that_is_not_this_one() -> None:
    found = detect({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n2"})
    assert found.names == ("n2",)
    assert found.evidence == "Slurm job 7: n2 (SLURM_JOB_NODELIST)"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            TORCHRUN | {"RANK": "8"},
            "RANK=8 is not below WORLD_SIZE=8: unset what an earlier launcher left behind",
        ),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK=4 is not below LOCAL_WORLD_SIZE=4"),
        (TORCHRUN | {"RANK": "two"}, 'RANK="two" is not a whole number >= 0'),
        (TORCHRUN | {"WORLD_SIZE": "0"}, 'WORLD_SIZE="0" is not a whole number >= 1'),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE are set without LOCAL_RANK"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1"},
            "RANK and WORLD_SIZE are set without LOCAL_RANK",
        ),
        (POD | {"RANK": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
        (TORCHRUN | {"MASTER_ADDR": "$(id)"}, 'MASTER_ADDR: "$(id)" is not a host name'),
        (POD | {"MASTER_ADDR": "-x"}, 'MASTER_ADDR: "-x" begins with "-"'),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
            "OMPI_COMM_WORLD_LOCAL_RANK is not set",
        ),
        (PET | {"PET_NNODES": "1:4"}, 'PET_NNODES="1:4" is not a whole number >= 1'),
        ({"PET_NNODES": "2"}, "PET_NODE_RANK is not set, although variables that belong to it are"),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "0"},
            "PET_MASTER_ADDR does not name the first one: set it too",
        ),
        (
            SKY | {"SKYPILOT_NODE_RANK": "2"},
            "SKYPILOT_NODE_RANK=2 is not below SKYPILOT_NUM_NODES=2",
        ),
        (SKY | {"SKYPILOT_NODE_IPS": ""}, "SKYPILOT_NODE_IPS does not name the first one"),
        (
            {"SLURM_JOB_ID": "7"},
            "SLURM_JOB_NODELIST does not name its hosts",
        ),  # no fallback to this host
        (
            ALLOCATION | {"SLURM_JOB_NODELIST": "n[3-1]"},
            "SLURM_JOB_NODELIST: column 3: 3-1 counts down",
        ),
        (ALLOCATION | {"SLURM_JOB_NODELIST": "n1,-x"}, 'SLURM_JOB_NODELIST: "-x" begins with "-"'),
        (ALLOCATION | {"SLURM_JOB_NODELIST": "n[1,1]"}, "SLURM_JOB_NODELIST names n1 twice"),
        (
            ALLOCATION | {"SLURM_HET_SIZE": "2"},
            "the parts of a heterogeneous Slurm job cannot be used together",
        ),
        (STEP | {"SLURM_PROCID": "4"}, "SLURM_PROCID=4 is not below SLURM_STEP_NUM_TASKS=4"),
    ],
)
def test_what_is_set_by_half_is_an_error(environ: dict[str, str], words: str) -> None:
    with pytest.raises(JobError) as caught:
        detect(environ)
    assert words in str(caught.value)


_NAMES = sorted(
    {*TORCHRUN, *MPI, *HYDRA, *STEP, *PET, *POD, *SKY, "SLURM_GPUS_PER_NODE", "SLURM_HET_SIZE"}
)
_VALUES = st.sampled_from(
    [
        "",
        "0",
        "1",
        "2",
        "8",
        "-1",
        "9" * 30,
        "٣",
        "1:2",
        "n[1-3]",
        "n1",
        "[::1]:29400",
        "$(id)",
        "\n",
    ]
)


@given(st.dictionaries(st.sampled_from(_NAMES), _VALUES | st.text(max_size=5), max_size=12))
@pytest.mark.thorough
def test_any_environment_is_a_convention_or_an_error(environ: dict[str, str]) -> None:
    found, message = NONE, ""
    try:
        found = detect(environ)
    except JobError as error:
        message = str(error)
    assert message == "" or message.isprintable()
    assert isinstance(found, ClusterEnv)
    assert not any(name.startswith("-") or "$" in name for name in found.names)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("node[001-004,7]", ["node001", "node002", "node003", "node004", "node7"]),
        ("a,b-1", ["a", "b-1"]),
        ("x-[1-2]-[a,b]", ["x-1-a", "x-1-b", "x-2-a", "x-2-b"]),
        ("n[9-11],m[08-10]x", ["n9", "n10", "n11", "m08x", "m09x", "m10x"]),
        ("[1-2]", ["1", "2"]),
        ("r1c[1-2]n[0-1].lab", ["r1c1n0.lab", "r1c1n1.lab", "r1c2n0.lab", "r1c2n1.lab"]),
    ],
)
def test_node_lists(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "column 1: a host name is missing"),
        ("a,,b", "column 3: a host name is missing"),
        ("a,", "column 3: a host name is missing"),
        ("n[1-3", "column 2: '[' does not belong here"),
        ("n1-3]", "column 5: ']' does not belong here"),
        ("n[]", "column 3: '' is neither a number, a range nor a word"),
        ("n[1,,2]", "column 5: '' is neither a number, a range nor a word"),
        ("n[1-]", "column 3: '1-' is neither a number, a range nor a word"),
        ("n[1-2-3]", "column 3: '1-2-3' is neither a number, a range nor a word"),
        ("n[5-3]", "column 3: 5-3 counts down"),
        ("n[0-999999999]", f"column 3: more than {MAX_HOSTS} hosts"),
        ("n[0-999][0-999]", f"column 1: more than {MAX_HOSTS} hosts"),
        (
            "n" + "[0-65535]" * 10_000,
            f"column 1: more than {MAX_HOSTS} hosts",
        ),  # none of which is written out
        (f"n[{'0-65535,' * 10_000}0]", f"column 11: more than {MAX_HOSTS} hosts"),
        ("n[0-65535],m", f"column 12: more than {MAX_HOSTS} hosts"),
        ("(null)", "column 1: '(null)' is not a part of a host name"),
        ("$(id)", "column 1: '$(id)' is not a part of a host name"),
    ],
)
def test_node_lists_that_are_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="column") as caught:
        expand(text)
    assert str(caught.value) == message


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=20))
def test_node_lists_give_back_what_they_were_made_of(numbers: list[int]) -> None:
    assert expand(f"n[{','.join(f'{number:04}' for number in numbers)}]") == [
        f"n{number:04}" for number in numbers
    ]


def test_natural_order() -> None:
    names = ["n10", "n2", "n1a", "m3", "n1", "n01", "a10b2", "a10b10"]
    assert sorted(names, key=natural) == ["a10b2", "a10b10", "m3", "n01", "n1", "n1a", "n2", "n10"]
