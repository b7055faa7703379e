"""The faults of `faults.py`, done to a plain DDP loop that torchrun starts on the same three hosts.

    python tests/hosts/torchrun.py

There is no launcher of the whole: an ssh client runs torchrun on each host, as its documentation
has it. "s" is from the fault until every one of them has ended, "exit" what they ended with; what
is still there after a minute is "left".
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import faults
import rig as rigs

LIMIT_S = 60.0
SCRIPT = Path(__file__).with_name("plain_ddp.py")


@dataclass
class Peers:
    """torchrun on three hosts."""

    rig: rigs.Rig
    folder: Path
    clients: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        try:
            return int((self.folder / "steps").read_text() or 0)
        except OSError:
            return 0

    def name_hosts(self) -> None:
        """Let the hosts know each other by name.

        torchrun ends at once where its own name does not resolve.
        """
        file = self.rig.folder / "hosts"
        lines = [f"{host.address} {name}" for name, host in self.rig.hosts.items()]
        file.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        for host in self.rig.hosts.values():
            host.run("mount", "--bind", str(file), "/etc/hosts")

    def start(self, steps: int = 100_000, python: str = sys.executable) -> None:
        endpoint = f"{self.rig.hosts['node1'].address}:29500"
        for number, (name, host) in enumerate(self.rig.hosts.items()):
            command = shlex.join(
                [
                    "env",
                    "OMP_NUM_THREADS=1",
                    "GLOO_SOCKET_IFNAME=eth0",
                    python,
                    "-m",
                    "torch.distributed.run",
                    "--nnodes=3",
                    f"--node-rank={number}",
                    "--nproc-per-node=1",
                    "--rdzv-backend=c10d",
                    "--rdzv-id=1",
                    f"--rdzv-endpoint={endpoint}",
                    f"--local-addr={host.address}",
                    str(SCRIPT),
                    str(self.folder / "steps"),
                    str(steps),
                ]
            )
            log = open(self.folder / f"{name}.log", "wb")  # noqa: SIM115  # of the client
            argv = [*shlex.split(self.rig.ssh), name, command]
            self.clients[name] = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def pid(self, host: str, text: str, *, without: str = "\0") -> int:
        found = self.rig.hosts[host].commands().items()
        return next(
            pid
            for pid, line in found
            if text in line and without not in line and not line.startswith("sshd")
        )

    def worker(self, host: str) -> int:
        return self.pid(host, SCRIPT.name, without="torch.distributed.run")

    def agent(self, host: str) -> int:
        return self.pid(host, "-m torch.distributed.run")

    def end(self) -> None:
        for host in self.rig.hosts.values():
            for pid in host.commands():
                os.kill(pid, signal.SIGKILL)
        for client in self.clients.values():
            client.kill()
            client.wait()


STRIKES: dict[str, Callable[[Peers], None]] = {
    "worker killed": lambda peers: os.kill(peers.worker("node2"), signal.SIGKILL),
    "worker stopped": lambda peers: os.kill(peers.worker("node2"), signal.SIGSTOP),
    "agent killed": lambda peers: os.kill(peers.agent("node2"), signal.SIGKILL),
    "ssh client killed": lambda peers: peers.clients["node3"].kill(),
    "link cut": lambda peers: peers.rig.hosts["node2"].link("down"),
    "clock of node2 -60 s": lambda peers: None,
}


def strike(name: str, rig: rigs.Rig, folder: Path) -> str:
    """A line of the table."""
    folder.mkdir()
    peers = Peers(rig, folder)
    is_clock = name.startswith("clock")
    try:
        if is_clock:
            peers.start(12, faults.slow_clock(rig)["launch"]["python"])
        else:
            peers.start()
        deadline = time.monotonic() + LIMIT_S
        while peers.steps < 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        if peers.steps < 5 and not is_clock:
            return f"{name:23} never began to train"
        begun = time.monotonic()
        STRIKES[name](peers)
        while (
            any(client.poll() is None for client in peers.clients.values())
            and time.monotonic() < begun + LIMIT_S
        ):
            time.sleep(0.05)
        seconds = time.monotonic() - begun
        codes = [
            str(client.poll()) if client.poll() is not None else "runs"
            for client in peers.clients.values()
        ]
        rig.hosts["node2"].link("up")
        while rig.leftovers() and time.monotonic() < begun + LIMIT_S:
            time.sleep(0.1)
        left = sum(map(len, rig.leftovers().values()))
        return f"{name:23} {', '.join(codes):18} {seconds:5.1f}  {left:4}"
    finally:
        rig.hosts["node2"].link("up")
        peers.end()


def main() -> int:
    """Strike with every fault, and print what came of it."""
    if reason := rigs.missing() or rigs.not_isolated():
        print(f"three hosts: {reason}")
        return 0
    print(f"{'fault':23} {'exit, by host':18} {'s':>5}  {'left':4}")
    with (
        tempfile.TemporaryDirectory(prefix="torchrun-faults-") as folder,
        rigs.build(Path(folder) / "rig") as rig,
    ):
        Peers(rig, Path(folder)).name_hosts()
        for number, name in enumerate(STRIKES):
            print(strike(name, rig, Path(folder) / str(number)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
