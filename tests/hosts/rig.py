"""Three hosts in this machine.

Network namespaces on a bridge, each with a real sshd, its own name and shared memory.

    with build(folder) as rig:
        subprocess.run([*shlex.split(rig.ssh), "node1", "hostname"])

Where namespaces may not be made, the hosts are three sshd of this user on addresses of the loopback
(`isolated` is False): they share everything, but are reached by the same real ssh.

All that it makes has a random name, and is gone when it ends, also when it never ran to the end of
building: nothing but processes, namespaces and one bridge is made outside of its folder.
"""

from __future__ import annotations

import json
import os
import pwd
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("node1", "node2", "node3")


@dataclass
class Host:
    name: str
    namespace: str
    address: str
    sshd: subprocess.Popen[bytes]
    mark: str = ""  # in the environment of what sshd starts, where there is no namespace

    def run(self, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command there."""
        if self.mark:
            return subprocess.run(argv, capture_output=True, text=True, check=True, **options)
        enter = ["nsenter", "-t", str(self.sshd.pid), "-n", "-m", "-u"]
        return subprocess.run(
            [*enter, *argv], capture_output=True, text=True, check=True, **options
        )

    def pids(self) -> set[int]:
        """Every process there but sshd's listener."""
        if self.mark:
            return {
                pid
                for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
                if self._started(pid)
            }
        listed = sh("ip", "netns", "pids", self.namespace).split()
        return {int(pid) for pid in listed} - {self.sshd.pid}

    def _started(self, pid: int) -> bool:
        try:
            return f"ZRUN_RIG={self.mark}".encode() in Path(
                f"/proc/{pid}/environ"
            ).read_bytes().split(b"\0")
        except OSError:
            return False

    def commands(self) -> dict[int, str]:
        """The command lines of the processes there, by pid; ended ones are left out."""
        found = {}
        for pid in self.pids():
            with suppress(OSError):
                line = (
                    Path(f"/proc/{pid}/cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                )
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX":
                    found[pid] = line.strip()
        return found

    def link(self, state: str) -> None:
        """Cut the cable ("down"), or plug it in again ("up")."""
        sh("ip", "link", "set", f"{self.namespace}b", state)


@dataclass
class Rig:
    folder: Path
    address: str = ""  # of this machine, on the bridge
    hosts: dict[str, Host] = field(default_factory=dict)
    isolated: bool = True  # each in namespaces of its own
    mark: str = ""  # how the names of their interfaces begin

    @property
    def config(self) -> Path:
        return self.folder / "ssh_config"

    @property
    def ssh(self) -> str:
        """What `launch.ssh` says.

        A client that knows these hosts only, and waits for them on a busy machine.
        """
        return f"ssh -F {shlex.quote(str(self.config))} -oConnectTimeout=60"

    def part(self, one: str, other: str) -> None:
        """Let no packet pass between two hosts, in either direction; all else reaches both."""
        for here, there in ((one, other), (other, one)):
            address = self.hosts[there].address
            nowhere = "02:00:00:00:00:01"
            at = ["ip", "-n", self.hosts[here].namespace, "neigh"]
            sh(*at, "replace", address, "lladdr", nowhere, "dev", "eth0", "nud", "permanent")

    def join(self, one: str, other: str) -> None:
        """Undo `part`."""
        for here, there in ((one, other), (other, one)):
            at = ["ip", "-n", self.hosts[here].namespace, "neigh"]
            sh(*at, "del", self.hosts[there].address, "dev", "eth0")

    def leftovers(self) -> dict[str, list[str]]:
        """What still runs, listens or lies in shared memory on the hosts, beside sshd itself."""
        found: dict[str, list[str]] = {}
        for host in self.hosts.values():
            processes = list(host.commands().values())
            if not self.isolated:
                found |= {host.name: processes} if processes else {}
                continue
            listeners = host.run("ss", "-Hltnu").stdout.splitlines()
            shared = host.run("ls", "/dev/shm").stdout.split()
            if left := [*processes, *(line for line in listeners if ":22 " not in line), *shared]:
                found[host.name] = left
        return found


def missing() -> str | None:
    """Why there can be no hosts at all on this machine."""
    if not sys.platform.startswith("linux"):
        return "they need Linux"
    return _lacking(
        {"ssh": "openssh-client", "sshd": "openssh-server", "ssh-keygen": "openssh-client"}
    )


def not_isolated() -> str | None:
    """Why the hosts can have no namespaces of their own on this machine."""
    if os.environ.get("ZRUN_HOSTS") == "loopback":
        return "ZRUN_HOSTS=loopback"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if lacking := _lacking(
        {"ip": "iproute2", "ss": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
    ):
        return lacking
    name = f"zr{secrets.token_hex(3)}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "this container may not make network namespaces"
    sh("ip", "netns", "del", name)
    return None


def _lacking(packages: dict[str, str]) -> str | None:
    for program, package in packages.items():
        if shutil.which(program, path=_PATH) is None:
            return f"there is no {program} (package {package})"
    return None


_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def sh(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, env=os.environ | {"PATH": _PATH})
    if done.returncode:
        raise RuntimeError(f"{shlex.join(argv)}: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def build(folder: Path) -> Iterator[Rig]:
    """Make the hosts, and take them away."""
    with _on_loopback(folder) if not_isolated() else _in_namespaces(folder) as rig:
        yield rig


@contextmanager
def _on_loopback(folder: Path) -> Iterator[Rig]:
    mark, user = secrets.token_hex(4), pwd.getpwuid(os.geteuid()).pw_name
    rig = Rig(folder, "127.0.0.1", isolated=False)
    folder.mkdir(mode=0o700, exist_ok=True)
    _make_key(folder / "id")
    shutil.copy(folder / "id.pub", folder / "authorized_keys")
    ports = {}
    try:
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd insists
        for number, name in enumerate(NAMES, 1):
            address = f"127.0.{20 + secrets.randbelow(200)}.{number}"
            with socket.create_server((address, 0)) as probe:
                ports[name] = probe.getsockname()[1]
            config = _write_sshd_config(rig, name, address)
            with open(config, "a") as more:
                more.write(f"Port {ports[name]}\nSetEnv ZRUN_RIG={mark}{name}\n")
            sshd = _start_sshd(
                rig,
                name,
                [shutil.which("sshd", path=_PATH) or "sshd", "-D", "-e", "-f", str(config)],
            )
            rig.hosts[name] = Host(name, "", address, sshd, f"{mark}{name}")
            _await(rig.hosts[name], folder / name / "sshd.log", ports[name])
        _write_client_files(rig, ports, user)
        yield rig
    finally:
        for host in rig.hosts.values():
            host.sshd.kill()
            for pid in host.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            host.sshd.wait()


@contextmanager
def _in_namespaces(folder: Path) -> Iterator[Rig]:
    mark = f"zr{secrets.token_hex(3)}"
    rig = Rig(folder, mark=mark)
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        network = _free_network()
        rig.address = f"{network}.254"
        sh("ip", "link", "add", mark, "type", "bridge")
        sh("ip", "addr", "add", f"{rig.address}/24", "dev", mark)
        sh("ip", "link", "set", mark, "up")
        _make_key(folder / "id")
        shutil.copy(folder / "id.pub", folder / "authorized_keys")
        for number, name in enumerate(NAMES, 1):
            _add_host(rig, name, f"{mark}{number}", f"{network}.{number}", mark)
        for host in rig.hosts.values():
            _await(host, folder / host.name / "sshd.log")
        _write_client_files(rig, dict.fromkeys(NAMES, 22), "root")
        yield rig
    finally:
        for host in rig.hosts.values():
            host.sshd.kill()
            for pid in host.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            host.sshd.wait()
        for number in range(1, len(NAMES) + 1):
            subprocess.run(
                ["ip", "netns", "del", f"{mark}{number}"], capture_output=True
            )  # and its link
            subprocess.run(["ip", "link", "del", f"{mark}{number}b"], capture_output=True)
        subprocess.run(["ip", "link", "del", mark], capture_output=True)


def _free_network() -> str:
    """Three numbers of an address range for tests (RFC 2544) that nothing here uses."""
    while True:
        network = f"198.{18 + secrets.randbelow(2)}.{secrets.randbelow(256)}"
        if f'"{network}.' not in sh("ip", "-j", "addr"):
            return network


def _make_key(path: Path) -> None:
    sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path))


def _add_host(rig: Rig, name: str, namespace: str, address: str, bridge: str) -> None:
    here, there = f"{namespace}b", "eth0"
    sh("ip", "netns", "add", namespace)
    sh("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", namespace)
    sh("ip", "link", "set", here, "master", bridge, "up")
    sh("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", there)
    sh("ip", "-n", namespace, "link", "set", there, "up")
    sh("ip", "-n", namespace, "link", "set", "lo", "up")
    config = _write_sshd_config(rig, name, address)
    script = (
        f"hostname {name} && mount -t tmpfs tmpfs /run && mkdir -m 755 /run/sshd && mount -t "
        "tmpfs tmpfs /dev/shm && "
        f"exec {shutil.which('sshd', path=_PATH)} -D -e -f {shlex.quote(str(config))}"
    )
    argv = ["ip", "netns", "exec", namespace, "unshare", "--uts", "--mount", "sh", "-c", script]
    rig.hosts[name] = Host(name, namespace, address, _start_sshd(rig, name, argv))


def _write_sshd_config(rig: Rig, name: str, address: str) -> Path:
    folder = rig.folder / name
    folder.mkdir(mode=0o700)
    _make_key(folder / "host_key")
    (folder / "sshd_config").write_text(
        f"ListenAddress {address}\nHostKey {folder / 'host_key'}\nAuthorizedKeysFile "
        f"{rig.folder / 'authorized_keys'}\n"
        "PidFile none\nUsePAM no\nStrictModes no\nPermitRootLogin yes\nPasswordAuthentication no\n"
        "KbdInteractiveAuthentication no\nPrintMotd no\nMaxStartups 100\n"
    )
    return folder / "sshd_config"


def _start_sshd(rig: Rig, name: str, argv: list[str]) -> subprocess.Popen[bytes]:
    with open(rig.folder / name / "sshd.log", "wb") as log:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _await(host: Host, log: Path, port: int = 22) -> None:
    """Until its sshd answers."""
    deadline = time.monotonic() + 30
    while host.sshd.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((host.address, port), 1) as connection:
            if connection.recv(4) == b"SSH-":
                return
        time.sleep(0.02)
    raise RuntimeError(f"{host.name}: no sshd: {log.read_text()}")


def _write_client_files(rig: Rig, ports: dict[str, int], user: str) -> None:
    keys = {name: (rig.folder / name / "host_key.pub").read_text() for name in NAMES}
    known = [f"{name} {keys[name]}" for name in NAMES]
    known.append(f"changed {keys['node2']}")  # it is node1
    (rig.folder / "known_hosts").write_text("".join(known))
    common = (
        f"  IdentityFile {rig.folder / 'id'}\n  IdentitiesOnly yes\n  UserKnownHostsFile "
        f"{rig.folder / 'known_hosts'}\n"
        "  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n  CheckHostIP no\n"
    )
    aliases = {
        name: f"HostName {host.address}\n  Port {ports[name]}\n  HostKeyAlias {name}"
        for name, host in rig.hosts.items()
    }
    first = f"HostName {rig.hosts['node1'].address}\n  HostKeyAlias"
    at_first = f"Port {ports['node1']}\n  {first}"
    aliases |= {
        "again": aliases["node1"],
        "changed": f"{at_first} changed",
        "unseen": f"{at_first} unseen",
        "refusing": f"{first} node1\n  Port 9",
        "stranger": f"{at_first} node1\n  User {'nobody' if user != 'nobody' else 'daemon'}",
        "nowhere": "HostName nowhere.invalid",
    }
    text = "".join(f"Host {name}\n  {lines}\n" for name, lines in aliases.items())
    rig.config.write_text(f"{text}Host *\n{common}  User {user}\n")


@contextmanager
def silent_listener(address: str) -> Iterator[int]:
    """A port that accepts connections and never says anything."""
    with socket.create_server((address, 0)) as server:
        taken: list[socket.socket] = []

        def serve() -> None:
            with suppress(OSError):
                while True:
                    taken.append(server.accept()[0])

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        for each in taken:
            each.close()


def interfaces() -> list[str]:
    return [each["ifname"] for each in json.loads(sh("ip", "-j", "link"))]
