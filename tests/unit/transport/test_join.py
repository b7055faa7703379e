"""Processes of another launcher that come together.

Where they meet, who is let in, and who then runs what.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from zrun.agent.workers import isolated_gpus
from zrun.hosts.cluster import Cluster, Gpu, HostFacts
from zrun.hosts.cluster_env import NONE, Member, detect
from zrun.hosts.probe import route_to
from zrun.launch.rank_assignment import check_slots, group_by_host, merge_facts
from zrun.placement.plan import make_plan
from zrun.topology.cpus import NumaNode
from zrun.transport.frames import Unpacker
from zrun.transport.join import (
    JoinedAgent,
    JoiningProcess,
    JoinServer,
    Rendezvous,
    connect_to_leader,
    job_key,
)
from zrun_core.errors import JobError, PreflightError, RendezvousError
from zrun_core.spine.config import JobConfig

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29600",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
STEP = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "n[7-8]",
}
POD = {
    "KUBERNETES_SERVICE_HOST": "10.1.0.1",
    "JOB_COMPLETION_INDEX": "1",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "job-0.svc",
}


def rendezvous(environ: dict[str, str]) -> Rendezvous:
    return Rendezvous.of(detect(environ), environ)


@pytest.mark.parametrize(
    ("environ", "address", "port"),
    [
        (TORCHRUN, None, 29601),  # all on this host; torchrun's store has the port itself
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "n1", 29601),
        (
            TORCHRUN
            | {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"},
            "n1",
            29600,
        ),
        (STEP, "n7", 20000 + 1234 * 8 % 9000),
        (STEP | {"SLURM_STEP_ID": "3"}, "n7", 20000 + (1234 * 8 + 3) % 9000),
        (
            STEP | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n7"},
            None,
            20000 + 1234 * 8 % 9000,
        ),
        (STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000"}, "10.0.0.1", 5000),
        (POD, "job-0.svc", 29500),
    ],
)
def test_where_processes_meet(environ: dict[str, str], address: str | None, port: int) -> None:
    found = rendezvous(environ)
    assert found.member.address == address
    assert address is None or found.member.port == port


def test_a_pod_of_an_indexed_job_is_a_host() -> None:
    found = rendezvous(POD)
    assert (found.member.index, found.member.count, found.member.is_rank) == (1, 3, False)
    assert (
        detect({key: value for key, value in POD.items() if key != "WORLD_SIZE"}) == NONE
    )  # it is on its own


def test_ranks_of_a_start_have_one_mark_and_other_starts_have_others() -> None:
    mark = rendezvous(TORCHRUN).mark
    assert rendezvous(TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}).mark == mark
    assert rendezvous(TORCHRUN | {"MASTER_PORT": "29601"}).mark != mark
    assert rendezvous(TORCHRUN | {"TORCHELASTIC_RUN_ID": "b"}).mark != mark


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            },
            "MASTER_ADDR does not name the host of rank 0: .* mpirun -x MASTER_ADDR",
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            "nothing tells these processes from those of another start on this host: pass "
            "MASTER_PORT",
        ),
    ],
)
def test_too_little_is_said(environ: dict[str, str], says: str) -> None:
    with pytest.raises(JobError, match=says):
        rendezvous(environ)


def job(**keys: Any) -> JobConfig:
    given = {"name": "x", "model": "m:f", "data": "m:d", "steps": 1, "batch": 1, **keys}
    return JobConfig.model_validate(given)


def test_the_key_is_that_of_the_job_and_of_the_token() -> None:
    place = rendezvous(TORCHRUN)
    key = job_key(job(), "zrun_core", place, {})
    assert job_key(job(), "zrun_core", place, {}) == key
    assert job_key(job(steps=2), "zrun_core", place, {}) != key
    assert job_key(job(), "zrun_core", place, {"ZRUN_TOKEN": "a"}) != key


@pytest.fixture(params=["one host", "several"])
def start(request: pytest.FixtureRequest) -> Rendezvous:
    """Rank 0 of three, of a start that no other test is."""
    address = route_to("192.0.2.1") if request.param == "several" else None
    if request.param == "several" and address is None:
        pytest.skip("this machine has no interface but lo")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return Rendezvous(Member(0, 3, True, 0, None, address, port), secrets.token_hex(16))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


KEY = b"k" * 32


def rank(start: Rendezvous, index: int) -> Rendezvous:
    return replace(start, member=replace(start.member, index=index, local_index=index))


def close(agents: list[JoinedAgent], connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()
    for agent in agents:
        agent.close(5.0)


def test_ranks_join_in_any_order_and_hear_how_it_ended(
    start: Rendezvous, pool: ThreadPoolExecutor
) -> None:
    second = pool.submit(connect_to_leader, rank(start, 2), KEY, 10.0)  # before there is a server
    server = JoinServer(start, KEY)
    first = pool.submit(connect_to_leader, rank(start, 1), KEY, 10.0)
    agents = server.gather(10.0)
    connections = [first.result(), second.result()]
    assert [agent.process.index for agent in agents] == [1, 2]
    assert [agent.host for agent in agents] == [
        f"rank {index} ({socket.gethostname()})" for index in (1, 2)
    ]
    assert [agent.known_address for agent in agents] == [start.member.address] * 2
    connections[1].sendall(b'\n{"frame": "hello", "pid": 1}\n{"frame": "answer"}\n')
    assert agents[1].frames(5.0) == [{"frame": "answer"}]
    agents[0].send_exit_code(5)
    assert Unpacker().feed(connections[0].recv(100)) == [{"exit": 5}]
    connections[0].close()
    assert agents[0].frames(5.0) is None
    assert agents[0].end_reason().endswith("ended, or was killed")
    with pytest.raises(RendezvousError, match="Connection refused"):  # nothing listens any more
        connect_to_leader(rank(start, 1), KEY, 0.0)
    close(agents, connections)


def test_who_runs_another_job_is_told_so_and_the_first_says_who_is_missing(
    start: Rendezvous, pool: ThreadPoolExecutor
) -> None:
    server = JoinServer(start, KEY)
    led = pool.submit(server.gather, 1.0)
    with pytest.raises(
        PreflightError,
        match=r"rank 0 does not take rank 1 .*: it runs another job, or the same with",
    ):
        connect_to_leader(rank(start, 1), b"x" * 32, 10.0)
    with pytest.raises(
        RendezvousError, match=r"ranks 1, 2 of 3 did not reach .* 1 that came do not run this job"
    ):
        led.result()


def test_two_processes_cannot_be_one_rank(start: Rendezvous, pool: ThreadPoolExecutor) -> None:
    server = JoinServer(start, KEY)
    led = pool.submit(server.gather, 10.0)
    connections = [connect_to_leader(rank(start, 1), KEY, 10.0)]
    with pytest.raises(PreflightError, match="rank 1 has joined already"):
        connect_to_leader(rank(start, 1), KEY, 10.0)
    connections.append(connect_to_leader(rank(start, 2), KEY, 10.0))
    close(led.result(), connections)


def test_the_end_of_a_process_ends_the_wait_for_others(
    start: Rendezvous, pool: ThreadPoolExecutor
) -> None:
    server = JoinServer(start, KEY)
    led = pool.submit(server.gather, 30.0)
    connect_to_leader(rank(start, 2), KEY, 10.0).close()
    with pytest.raises(
        RendezvousError, match=r"rank 2 .*ended, or was killed while the others were awaited"
    ):
        led.result()


@pytest.mark.parametrize("start", ["several"], indirect=True)
def test_a_port_that_another_start_has_is_named(start: Rendezvous) -> None:
    theirs = JoinServer(replace(start, mark="another"), b"o" * 32)
    with (
        theirs._server,
        pytest.raises(
            PreflightError, match=r"port \d+ cannot be used \(.*\): set another MASTER_PORT"
        ),
    ):
        JoinServer(start, KEY)


@pytest.mark.parametrize(
    "noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000, b'{"caller": 3}\n', b"[]\n"]
)
def test_noise_at_the_port_changes_nothing(
    start: Rendezvous, pool: ThreadPoolExecutor, noise: bytes
) -> None:
    server = JoinServer(start, KEY)
    led = pool.submit(server.gather, 10.0)
    if server.address is not None:
        stranger = socket.create_connection((server.address, start.member.port or 0))
        stranger.sendall(noise)
        threading.Timer(0.1, stranger.close).start()
    connections = [connect_to_leader(rank(start, index), KEY, 10.0) for index in (1, 2)]
    close(led.result(), connections)


def test_nobody_leads(start: Rendezvous) -> None:
    with pytest.raises(
        RendezvousError, match=r"the process of rank 0 is not there.* after 0 s: Connection refused"
    ):
        connect_to_leader(rank(start, 1), KEY, 0.0)


def processes(*hosts: str, local: list[int] | None = None) -> list[JoiningProcess]:
    found = []
    for index, host in enumerate(hosts):
        local_index = hosts[:index].count(host) if local is None else local[index]
        found.append(JoiningProcess(index, local_index, host, 100 + index))
    return found


def test_ranks_are_on_the_hosts_that_their_launcher_chose() -> None:
    found = group_by_host(processes("b", "b", "a"), is_rank=True)
    assert [(host.name, host.members) for host in found] == [("b", (0, 1)), ("a", (2,))]
    found = group_by_host(processes("pod", "pod", "other"), is_rank=False)
    assert [(host.name, host.members) for host in found] == [
        ("pod-0", (0,)),
        ("pod-1", (1,)),
        ("other", (2,)),
    ]
    check_slots("auto", found)
    check_slots(1, found)
    with pytest.raises(
        JobError, match="slots: 2, and 1 ranks were started on pod-0: leave slots out"
    ):
        check_slots(2, found)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            processes("a", "b", "a", "b"),
            "a has the ranks 0, 2: those of a host must follow each other, as with mpirun",
        ),
        (
            processes("a", "a", local=[0, 0]),
            "a has 2 ranks, whose launcher numbers them 0, 0 on their host",
        ),
    ],
)
def test_other_orders_are_refused(given: list[JoiningProcess], says: str) -> None:
    with pytest.raises(PreflightError, match=says):
        group_by_host(given, is_rank=True)


def seen_by(cpus: tuple[int, ...], *gpus: str) -> HostFacts:
    nodes = (NumaNode(0, tuple((cpu,) for cpu in cpus)),)
    return HostFacts(
        "h",
        len(cpus),
        8 << 30,
        tuple(Gpu(uuid, "G", 1 << 30, 0, None) for uuid in gpus),
        nodes=nodes,
    )


def test_what_all_processes_of_a_host_see_is_the_host() -> None:
    found = merge_facts("h", [seen_by((0, 1, 2, 3), "A", "B")] * 2)
    assert (found.slots, found.cores, [gpu.uuid for gpu in found.gpus], found.apart) == (
        2,
        4,
        ["A", "B"],
        False,
    )
    assert found.unbound is None


def test_cores_and_gpus_of_each_process_stay_its_own() -> None:
    found = merge_facts("h", [seen_by((0, 1), "A"), seen_by((2, 3), "B")])
    assert (found.slots, found.cores, [gpu.uuid for gpu in found.gpus], found.apart) == (
        2,
        4,
        ["A", "B"],
        True,
    )
    assert found.unbound is not None
    plan = make_plan(job(batch={"micro": 1}, device="cuda"), Cluster((found,))).plan
    assert [(place.device, place.uuid, place.threads) for place in plan.ranks] == [
        ("cuda:0", "A", 2),
        ("cuda:0", "B", 2),
    ]
    assert isolated_gpus(plan.model_dump()["ranks"]) == {0: "A", 1: "B"}
    shared = merge_facts("h", [seen_by((0, 1, 2, 3), "A", "B")] * 2)
    plan = make_plan(job(batch={"micro": 1}, device="cuda"), Cluster((shared,))).plan
    assert [place.device for place in plan.ranks] == ["cuda:0", "cuda:1"]
    assert isolated_gpus(plan.model_dump()["ranks"]) == {}
    with pytest.raises(
        PreflightError,
        match=r"h: its ranks see different GPUs, and not each one of its own \(1, 2\)",
    ):
        merge_facts("h", [seen_by((0, 1), "A"), seen_by((0, 1), "A", "B")])
