"""Host files, lists and picks.

What is read, the message for each usual mistake, and what `launch.backend` comes to.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zrun.hosts.backend import (
    HostOptions,
    choose_backend,
    find_backend,
    is_this_host,
    wanted_hosts,
    with_backend,
)
from zrun.hosts.cluster import HostFacts
from zrun.hosts.cluster_env import detect
from zrun.hosts.hostfile import HostEntry, parse_hostfile, read_hostfile
from zrun_core.errors import ExitCode, JobError
from zrun_core.spine.config import JobConfig
from zrun_core.spine.hostname import check_name

RACK = b"node1 slots=8\nnode2 slots=8\nnode10 slots=4\n"
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-3]"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}


def job(**keys: Any) -> JobConfig:
    base = {"name": "t", "model": "m:f", "data": "m:d", "steps": 1, "batch": 4}
    return JobConfig.model_validate(base | keys)


def wanted(
    options: HostOptions, config: JobConfig | None = None, **environ: str
) -> tuple[HostEntry, ...] | None:
    return wanted_hosts(config or job(), options, environ, Path())


def listed(text: str) -> list[HostEntry]:
    """The hosts of a `-H` option, without their places."""
    return [replace(each, where="") for each in wanted(HostOptions(host_list=text)) or ()]


def error(text: bytes, name: str = "hf") -> list[str]:
    with pytest.raises(JobError) as caught:
        parse_hostfile(text, name)
    assert caught.value.exit_code == ExitCode.USAGE
    return str(caught.value).splitlines()


def refused(options: HostOptions, config: JobConfig | None = None, **environ: str) -> str:
    with pytest.raises(JobError) as caught:
        wanted(options, config, **environ)
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "entry"),
    [
        ("node1", HostEntry("node1")),
        ("worker-1 slots=4", HostEntry("worker-1", slots=4)),  # DeepSpeed
        ("\tnode1\tslots=4 max_slots=8 # Open MPI", HostEntry("node1", slots=4)),
        ("node1 max-slots=4 slots=4", HostEntry("node1", slots=4)),
        ("me@node1.lab.example:2222 slots=1024", HostEntry("node1.lab.example", "me", 2222, 1024)),
        ("j.doe_2@gpu_box:65535", HostEntry("gpu_box", "j.doe_2", 65535)),
        ("10.0.0.7:22 slots=2", HostEntry("10.0.0.7", port=22, slots=2)),
        ("fd00:0:0::7 slots=2", HostEntry("fd00::7", slots=2)),
        ("me@[FD00::7]:2222", HostEntry("fd00::7", "me", 2222)),
        ("[fe80::1%eth0.100]", HostEntry("fe80::1%eth0.100")),
        ("::ffff:10.0.0.7", HostEntry("::ffff:a00:7")),
        ("gpu.1", HostEntry("gpu.1")),
        ("7up slots=1", HostEntry("7up", slots=1)),
    ],
)
def test_lines(line: str, entry: HostEntry) -> None:
    (found,) = parse_hostfile(line.encode(), "hf")
    assert replace(found, where="") == entry
    assert found.where == f"hf:1:{len(line) - len(line.lstrip()) + 1}"


def test_order_comments_and_line_ends() -> None:
    text = (
        "\ufeff# rack 1\r\n\r\nnode10 slots=8\r\n  node2 slots=8 # slow\r\n#node3 slots=8\r\nnode1"
    )
    assert [(each.name, each.where) for each in parse_hostfile(text.encode(), "hf")] == [
        ("node10", "hf:3:1"),
        ("node2", "hf:4:3"),
        ("node1", "hf:6:1"),
    ]


def test_ports_make_hosts_of_one_name_several() -> None:
    entries = parse_hostfile(b"localhost:2201\nlocalhost:2202\n", "hf")
    assert [str(each) for each in entries] == ["localhost:2201", "localhost:2202"]
    assert str(HostEntry("::1", port=2201)) == "[::1]:2201"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "-oProxyCommand=x slots=1",
            'hf:1:1: "-oProxyCommand=x" begins with "-", which no host name does',
        ),
        ("  me@-x", 'hf:1:3: "-x" begins with "-", which no host name does'),
        ("-l@x", 'hf:1:1: "-l@x" begins with "-", which no host name does'),
        (
            "$(id)",
            'hf:1:1: "$(id)" is not a host name: letters, digits, dots, - and _, no other '
            "character",
        ),
        (
            "a;b",
            'hf:1:1: "a;b" is not a host name: letters, digits, dots, - and _, no other character',
        ),
        ("a..b", 'hf:1:1: "a..b" is not a host name: two dots in a row'),
        ("nöde", 'hf:1:1: "nöde" is not ASCII; write the name as the network has it (xn--...)'),
        (
            "10.0.0.256",
            'hf:1:1: "10.0.0.256" is not an IPv4 address: write four numbers from 0 to 255',
        ),
        (
            "0x7f000001",
            'hf:1:1: "0x7f000001" is not an IPv4 address: write four numbers from 0 to 255',
        ),
        (
            "2130706433",
            'hf:1:1: "2130706433" is not an IPv4 address: write four numbers from 0 to 255',
        ),
        ("fe80::g", 'hf:1:1: "fe80::g" is not an IPv6 address, nor [user@]name:number'),
        ("[::1", 'hf:1:1: "[::1" is not an IPv6 address, nor [user@]name:number'),
        (
            "fe80::1%$(id)",
            'hf:1:1: "fe80::1%$(id)": after % comes the name of an interface, such as eth0',
        ),
        ("@node1", 'hf:1:1: "" is not the name of a user: write [user@]name[:port] slots=N'),
        ("a b@node1", 'hf:1:3: "b@node1" means nothing here: a line is [user@]name[:port] slots=N'),
        (
            "node1:",
            'hf:1:1: port "" is not a number from 22 to 65535: write [user@]name[:port] slots=N',
        ),
        (
            "node1:70000",
            'hf:1:1: port "70000" is not a number from 22 to 65535: write [user@]name[:port] '
            "slots=N",
        ),
        (
            "node1:8",
            "hf:1:1: 8 after the colon is a port, and ssh has none so low: write node1 slots=8",
        ),  # MPICH
        ("n slots=0", "hf:1:3: slots=0 is no place for a rank: leave the host out"),
        ("n slots=-1", 'hf:1:3: slots "-1" is not a whole number from 1 to 1024: write slots=8'),
        ("n slots=8x", 'hf:1:3: slots "8x" is not a whole number from 1 to 1024: write slots=8'),
        ("n slots=٣", 'hf:1:3: slots "٣" is not a whole number from 1 to 1024: write slots=8'),
        ("n slots=", 'hf:1:3: slots "" is not a whole number from 1 to 1024: write slots=8'),
        (
            "n slots=99999999999",
            'hf:1:3: slots "99999999999" is not a whole number from 1 to 1024: write slots=8',
        ),
        ("n slots = 4", 'hf:1:3: "slots": write slots=8, without blanks around ='),
        ("n 4", 'hf:1:3: "4": write slots=8, without blanks around ='),
        ("n gpus=4", 'hf:1:3: "gpus=4" means nothing here: a line is [user@]name[:port] slots=N'),
        ("n slots=4 slots=4", "hf:1:11: slots is given twice"),
        ("n slots=4 max_slots=2", "hf:1:3: max_slots says how far slots=N may go: write slots=2"),
        ("n max_slots=2", "hf:1:3: max_slots says how far slots=N may go: write slots=2 too"),
        (
            "n slots=\x1b[31m",
            'hf:1:3: slots "\\x1b[31m" is not a whole number from 1 to 1024: write slots=8',
        ),
    ],
)
def test_mistakes(line: str, message: str) -> None:
    assert error(line.encode()) == [message]


def test_all_mistakes_at_once() -> None:
    text = b"ok slots=8\n-x slots=0\n\nOK:22 slots=2\nnode1 # fine\nnode1\n"
    assert error(text) == [
        "4 problems in hf",
        'hf:2:1: "-x" begins with "-", which no host name does',
        "hf:2:4: slots=0 is no place for a rank: leave the host out",
        "hf:4:1: OK is named twice, first at hf:1:1: write it once, with all its slots",
        "hf:6:1: node1 is named twice, first at hf:5:1: write it once, with all its slots",
    ]


def test_long_files_of_mistakes_are_cut() -> None:
    assert len(error(b"-\n" * 5000)) == 101


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "hf names no host: write a line for each host, such as: node1 slots=8"),
        (b"# none\n\n", "hf names no host: write a line for each host, such as: node1 slots=8"),
        (
            b"\x7fELF\0\0",
            "hf is a binary file, not a host file; write a line for each host, such as: node1 "
            "slots=8",
        ),
        (b"a\nb\xff", "hf:2:2: not UTF-8 text; save the file as UTF-8"),
    ],
)
def test_no_host_file(text: bytes, message: str) -> None:
    assert error(text) == [message]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"#" * (2**20 + 1))
    for name, words in {
        "none": "there is no such host file; write a line for each host",
        "": "is a directory, not a host file; name the file in it",
        "pipe": "is not a regular file",  # and nobody waits for one to write to it
        "large": "is larger than 1 MiB",
        "none/deeper\0": "cannot be read",
    }.items():
        with pytest.raises(JobError, match=words):
            read_hostfile(tmp_path / name)


def test_a_pipe_of_the_shell_is_read(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from zrun.hosts.hostfile import read_hostfile;"
        "print(*map(str, read_hostfile(Path(sys.argv[1]))))"
    )
    command = f"'{sys.executable}' -c '{script}' <(echo node1; echo node2)"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "node1 node2\n"


@pytest.mark.parametrize(
    "name", ["", "-", "-a", "a b", "a\nb", "a'", "a/b", "~", "a$", "*", "a" * 64, "b." * 127, "a."]
)
def test_no_names(name: str) -> None:
    with pytest.raises(ValueError, match=r"no host name|is not a host name|begins with|too long"):
        check_name(name)


def test_lists() -> None:
    assert listed("h1:8,me@h2:4, [::1]:2 ,10.0.0.1") == [
        HostEntry("h1", slots=8),
        HostEntry("h2", "me", slots=4),
        HostEntry("::1", slots=2),
        HostEntry("10.0.0.1"),
    ]
    assert listed("me@h1:2222 slots=8,h2 slots=1") == [
        HostEntry("h1", "me", 2222, 8),
        HostEntry("h2", slots=1),
    ]
    assert refused(HostOptions(host_list="h1:8,h1:2,,-x:1")).splitlines() == [
        "3 problems in -H",
        "-H:1:6: h1 is named twice, first at -H:1:1: write it once, with all its slots",
        "-H:1:11: no host name; write [user@]name[:port] slots=N",
        '-H:1:12: "-x:1" begins with "-", which no host name does',
    ]


def test_a_file_given_as_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hostfile").write_bytes(RACK)
    message = "-H takes names of hosts, and hostfile is a file: write --hosts hostfile"
    assert refused(HostOptions(host_list="hostfile")) == message


def test_hosts_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "rack").write_bytes(RACK)
    found = wanted_hosts(job(hosts="rack"), HostOptions(), {}, tmp_path) or ()
    assert [(each.name, each.where) for each in found][2:] == [("node10", f"{tmp_path}/rack:3:1")]
    found = wanted(HostOptions(), job(hosts=["b:2", "a:2"])) or ()
    assert [(each.name, each.slots, each.where) for each in found] == [
        ("b", 2, "hosts[0]"),
        ("a", 2, "hosts[1]"),
    ]
    assert refused(HostOptions(), job(hosts=["b:2", "B"])).startswith(
        "hosts[1]: B is named twice, first at hosts[0]"
    )
    message = refused(HostOptions(), job(hosts="node1:8"))
    assert (
        "there is no host file node1:8; a list of names is written in brackets, as in hosts: "
        "[node1:8]" in message
    )
    assert "is not a path" in refused(HostOptions(), job(hosts="~nobody-at-all/x"))


def test_the_command_line_comes_first_and_the_job_before_the_environment() -> None:
    config = job(hosts=["a", "b"])
    assert [each.name for each in wanted(HostOptions(host_list="c"), config, **SLURM) or ()] == [
        "c"
    ]
    assert [each.name for each in wanted(HostOptions(), config, **SLURM) or ()] == ["a", "b"]
    assert [each.name for each in wanted(HostOptions(), **SLURM) or ()] == [
        "node1",
        "node2",
        "node3",
    ]
    assert wanted(HostOptions(), job(launch="local"), **SLURM) is None
    assert wanted(HostOptions()) is None


def picked(tmp_path: Path, **options: Any) -> list[tuple[str, tuple[int, ...] | None]]:
    (tmp_path / "hf").write_bytes(RACK)
    found = wanted(HostOptions(hosts=tmp_path / "hf", **options)) or ()
    return [(each.name, each.chosen) for each in found]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"include": "node10@node1:6,1"}, [("node1", (1, 6)), ("node10", None)]),
        ({"include": "NODE2:0"}, [("node2", (0,))]),
        ({"exclude": "node1"}, [("node2", None), ("node10", None)]),
        ({"exclude": "node2:0,1,2@node10:0,1,2,3"}, [("node1", None), ("node2", (3, 4, 5, 6, 7))]),
        ({"nodes": 1}, [("node1", None)]),
        ({"nodes": 2, "gpus": 2}, [("node1", (0, 1)), ("node2", (0, 1))]),
        ({"gpus": 4}, [("node1", (0, 1, 2, 3)), ("node2", (0, 1, 2, 3)), ("node10", (0, 1, 2, 3))]),
    ],
)
def test_picks(tmp_path: Path, options: dict[str, Any], left: list[tuple[str, Any]]) -> None:
    assert picked(tmp_path, **options) == left


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"include": "nod1"}, '--include:1:1: there is no host "nod1"; did you mean node1?'),
        (
            {"include": "node1@x"},
            '--include:1:7: there is no host "x"; there are node1, node2, node10',
        ),
        ({"include": "node1:8"}, "node1 has no slot 8:"),
        ({"include": "node1:1,1"}, "slot 1 of node1 is named twice: write it once"),
        ({"include": "node1:0-3"}, '"0-3" is not the number of a slot; write node1:0,1'),
        ({"include": "node1:"}, '"" is not the number of a slot; write node1:0,1'),
        (
            {"include": "node1:0@node1:1"},
            "--include:1:9: node1 is named twice: write it once, with all its slots",
        ),
        (
            {"include": "@node1"},
            '"" is not a host with its slots; write NAME[:SLOT,SLOT]@NAME, IPv6 in brackets',
        ),
        ({"include": "::1"}, '"::1" is not a host with its slots'),
        ({"exclude": "node1@node2@node10"}, "--exclude leaves no host: exclude fewer"),
        (
            {"include": "node1", "exclude": "node2"},
            "--include says which hosts remain and --exclude which do not",
        ),
        (
            {"include": "node1", "nodes": 1},
            "--include picks hosts and slots by name, --nodes the first ones: keep one",
        ),
        (
            {"exclude": "node1", "gpus": 1},
            "--exclude picks hosts and slots by name, --gpus the first ones: keep one",
        ),
        ({"host_list": "node1"}, "--hosts and -H both name the hosts: keep one of them"),
        ({"nodes": 4}, "--nodes 4, but there are 3 hosts"),
        ({"nodes": 0}, "--nodes 0: write a whole number > 0"),
        ({"gpus": 8}, "--gpus 8, but node10 has 4: write --gpus 4, or choose other hosts"),
    ],
)
def test_picks_that_are_wrong(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as caught:
        picked(tmp_path, **options)
    assert words in str(caught.value)


def test_picks_among_addresses_and_ports() -> None:
    options = HostOptions(host_list="[fd00::7]:4,me@h:2201 slots=2,h:2202 slots=2")
    found = wanted(replace(options, include="[fd00::7]:3@[h:2202]:0")) or ()
    assert [(str(each), each.chosen) for each in found] == [("fd00::7", (3,)), ("h:2202", (0,))]
    assert "h is 2 hosts; write the port too, as in [h:2201]:0" in refused(
        replace(options, include="h:0")
    )


def test_what_is_excluded_must_be_known() -> None:
    options = HostOptions(host_list="h1,h2", exclude="h1:0")
    assert refused(options) == (
        "--exclude: how many slots h1 has is not written at -H:1:1: write slots=N there, or "
        "--include with the slots "
        "to use, as in --include h1:0,1"
    )


def test_picks_without_a_list() -> None:
    for options in (
        HostOptions(include="node1"),
        HostOptions(exclude="localhost:0"),
        HostOptions(nodes=2),
    ):
        assert "picks from a list of hosts, and there is none" in refused(options)
    assert wanted(HostOptions(nodes=1)) is None
    found = wanted(HostOptions(include="localhost:0,2")) or ()
    assert [(each.name, each.chosen) for each in found] == [("localhost", (0, 2))]
    found = wanted(HostOptions(gpus=2)) or ()
    assert [(each.name, each.chosen) for each in found] == [("localhost", (0, 1))]


def test_options_as_arguments() -> None:
    options = HostOptions(Path("hf"), None, "a:0@b", None, None, None)
    assert options.as_arguments() == ["--hosts", "hf", "--include", "a:0@b"]


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("localhost", True),
        ("::1", True),
        ("Box", True),
        ("box.lab", True),
        ("box2", False),
        ("other.lab", False),
    ],
)
def test_this_host(name: str, same: bool) -> None:
    assert is_this_host(HostEntry(name), "box.lab") is same
    assert not is_this_host(HostEntry(name, port=2222), "box.lab")
    assert not is_this_host(HostEntry(name, user="me"), "box.lab")


def backend(options: HostOptions, config: JobConfig | None = None, **environ: str) -> str:
    found = find_backend(config or job(), options, environ, Path(), "box")
    return str(found)


@pytest.mark.parametrize(
    ("options", "keys", "environ", "outcome"),
    [
        ({}, {}, {}, "local (no other host is named)"),
        ({}, {"launch": "local"}, SLURM | TORCHRUN, "local (launch.backend)"),
        ({"host_list": "box:2"}, {}, {}, "1 host, 2 slots, by local (-H:1:1 names this host only)"),
        ({"gpus": 2}, {}, {}, "1 host, 2 slots, by local (no other host is named)"),
        ({"host_list": "box2:2"}, {}, {}, "1 host, 2 slots, by ssh (-H names it)"),
        ({"host_list": "me@box:2"}, {}, {}, "1 host, 2 slots, by ssh (-H names it)"),
        ({}, {"hosts": ["a:2", "b:3"]}, {}, "2 hosts, 5 slots, by ssh (hosts names them)"),
        ({}, {"hosts": ["a:2", "b"]}, {}, "2 hosts, by ssh (hosts names them)"),
        (
            {"include": "a:1"},
            {"hosts": ["a:2", "b"]},
            {},
            "1 host, 1 slot, by ssh (hosts names it)",
        ),
        ({}, {}, SLURM, "3 hosts, by slurm (Slurm job 7: 3 hosts (SLURM_JOB_NODELIST))"),
        ({"nodes": 2}, {"launch": "ssh"}, SLURM, "2 hosts, by ssh (launch.backend)"),
        (
            {"host_list": "node3,node1"},
            {},
            SLURM,
            "2 hosts, by slurm (Slurm job 7: 3 hosts (SLURM_JOB_NODELIST))",
        ),
        (
            {"host_list": "node1"},
            {},
            SLURM,
            "1 host, by slurm (Slurm job 7: 3 hosts (SLURM_JOB_NODELIST))",
        ),
        ({"host_list": "box"}, {}, SLURM, "1 host, by local (-H:1:1 names this host only)"),
        ({"host_list": "node1,other"}, {}, SLURM, "2 hosts, by ssh (-H names them)"),
        ({"host_list": "me@node1,node2"}, {}, SLURM, "2 hosts, by ssh (-H names them)"),
        ({}, {}, TORCHRUN, "env (a launcher like torchrun: RANK=3, WORLD_SIZE=8, LOCAL_RANK=1)"),
        (
            {},
            {},
            TORCHRUN | SLURM,
            "env (a launcher like torchrun: RANK=3, WORLD_SIZE=8, LOCAL_RANK=1)",
        ),
        (
            {},
            {"launch": "env", "hosts": ["a"]},
            TORCHRUN,
            "env (a launcher like torchrun: RANK=3, WORLD_SIZE=8, LOCAL_RANK=1)",
        ),
    ],
)
def test_backend(
    options: dict[str, Any], keys: dict[str, Any], environ: dict[str, str], outcome: str
) -> None:
    assert backend(HostOptions(**options), job(**keys), **environ) == outcome


@pytest.mark.parametrize(
    ("options", "keys", "environ", "words"),
    [
        (
            {"host_list": "a"},
            {},
            TORCHRUN,
            "one of several already (a launcher like torchrun: RANK=3, WORLD_SIZE=8, "
            "LOCAL_RANK=1), and hosts are named: run zrun train once",
        ),
        ({}, {"hosts": ["a"]}, TORCHRUN, "and hosts are named"),
        ({}, {"launch": "ssh"}, TORCHRUN, "and launch.backend is ssh"),
        (
            {},
            {"launch": "ssh"},
            {},
            "launch.backend: ssh needs hosts: name them with --hosts FILE, -H or",
        ),
        (
            {"host_list": "a,box"},
            {"launch": "local"},
            {},
            "starts ranks on box only, and a is named",
        ),
        ({}, {"launch": "slurm"}, {}, "salloc -N 2"),
        ({"host_list": "a"}, {"launch": "slurm"}, {}, "salloc -N 2"),
        (
            {"host_list": "node4,node1"},
            {"launch": "slurm"},
            SLURM,
            "node4: not a name of this Slurm job's hosts "
            "(SLURM_JOB_NODELIST), which srun takes without user and port; did you mean node",
        ),
        (
            {},
            {"launch": "env"},
            SLURM,
            "the environment tells of none: RANK, WORLD_SIZE and LOCAL_RANK (torchrun)",
        ),
    ],
)
def test_backends_that_contradict(
    options: dict[str, Any], keys: dict[str, Any], environ: dict[str, str], words: str
) -> None:
    with pytest.raises(JobError) as caught:
        backend(HostOptions(**options), job(**keys), **environ)
    assert words in str(caught.value)


def test_hosts_of_the_allocation_may_be_reached_by_ssh_too() -> None:
    hosts = wanted(HostOptions(nodes=2), **SLURM)
    found = choose_backend(job(launch={"backend": "ssh"}), hosts, detect(SLURM), "login")
    assert (found.kind, found.hosts) == ("ssh", hosts)


def test_slots_on_this_host() -> None:
    facts = HostFacts("box", cores=8, memory_bytes=1 << 30)

    def given(options: HostOptions) -> tuple[str, int | None, tuple[int, ...] | None]:
        found = find_backend(job(), options, {}, Path(), "box").on_this_host(facts)
        return found.hostname, found.slots, found.chosen

    assert given(HostOptions()) == ("box", None, None)
    assert given(HostOptions(gpus=2)) == ("box", None, (0, 1))
    assert given(HostOptions(host_list="localhost:4")) == ("box", 4, None)
    assert given(HostOptions(host_list="box:4", exclude="box:1")) == ("box", 4, (0, 2, 3))
    assert given(HostOptions(include="localhost:0,2")) == ("box", None, (0, 2))


def test_no_auto_is_left() -> None:
    for asked, reasons in (("auto", 1), ("local", 0)):
        config = job(launch=asked)
        resolved, why = with_backend(config, find_backend(config, HostOptions(), {}, Path(), "box"))
        assert (resolved.launch.backend, len(why)) == ("local", reasons)
