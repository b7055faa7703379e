"""Measure the launcher: CPU and memory with a thousand hosts, seconds before a start.

    python benchmarks/launcher.py [--hosts 1000] [--ranks 8] [--seconds 20] [--rig]

The hosts are simulated: another process holds the far ends of their pipes, takes what they are
told, and says what agents and workers say: a look at the board of each host every half second, an
event of each rank every second, each at a time of its own, which the agent of a host folds, and
every ten seconds what the host and its GPUs say of themselves.
Everything on this side is what `zrun train` runs: agents, supervision, sums over ranks, record,
state, the search for slow ranks, and the panel that it draws.

`--rig` also times the preflight of three real hosts in network namespaces, as root.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import heapq
import io
import json
import os
import random
import resource
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import recorded_ranks
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "hosts")]

from zrun.agent.memory_fold import MemoryFold  # noqa: E402
from zrun.launch.supervise import SupervisedRun, Supervisor, judge  # noqa: E402
from zrun.runs.rundir import RunDir  # noqa: E402
from zrun.system.signals import LauncherSignals  # noqa: E402
from zrun.topology.grouping import best_groups  # noqa: E402
from zrun.transport.agent_process import AgentLink  # noqa: E402
from zrun.transport.agents import AgentGroup  # noqa: E402
from zrun.transport.frames import PROGRESS_S, StartRequest  # noqa: E402
from zrun.watch.follow import Follower  # noqa: E402
from zrun.watch.live import Live  # noqa: E402
from zrun.watch.panel import Facts  # noqa: E402
from zrun.watch.rank_windows import RankWindows  # noqa: E402
from zrun.watch.screen import PERIOD_S  # noqa: E402
from zrun.watch.stragglers import Stragglers  # noqa: E402
from zrun_core.spine.config import JobConfig  # noqa: E402
from zrun_core.spine.events import encode  # noqa: E402
from zrun_core.spine.sections.guards import LimitsConfig  # noqa: E402
from zrun_core.spine.spec import LaunchPlan, RankPlace, RunSpec, resolve_batch  # noqa: E402

WARMUP_S = 3.0
SENSORS_S = 10.0
BOARD, SENSORS = -1, -2  # in place of a rank
SHARE, MEMORY_MB = 0.25, 500  # the targets


class Simulated(AgentLink):
    """An agent without a process."""

    def __init__(self, host: str, down: int, up: int) -> None:
        super().__init__(host, os.fdopen(down, "wb", 0), os.fdopen(up, "rb", 0))

    @property
    def pid(self) -> int:
        return 0

    def end_reason(self) -> str:
        return f"{self.host}: the simulation ended"

    def close(self, patience_s: float = 0.0) -> None:
        self.disconnect()
        self._output.close()


@dataclass
class Far:
    """The other end of a host's pipes."""

    ranks: range
    reads: int
    writes: int
    heard: bytes = b""
    num_heard: int = 0  # frames
    progress: int = 0

    def __post_init__(self) -> None:
        self._fold = MemoryFold(self.ranks)
        self._simulated = recorded_ranks.Simulated(len(self.ranks), 1)

    def hear(self, data: bytes) -> int:
        """Split a stream into frames without parsing them. Returns how many there were so far."""
        self.heard += data
        while len(self.heard) >= 4 and len(self.heard) >= (
            end := 4 + int.from_bytes(self.heard[:4], "big")
        ):
            self.heard = self.heard[end:]
            self.num_heard += 1
        return self.num_heard

    def turn_of(self, rank: int) -> tuple[bytes, float]:
        """Return what is said now of a rank, the board or the sensors, and when it is again."""
        if rank == BOARD:
            return self.board(), PROGRESS_S
        if rank == SENSORS:
            return self.sensors(), SENSORS_S
        return self.event(rank), 1.0

    def board(self) -> bytes:
        self.progress += 1
        state = f"[{self.progress // 2},false,{self.progress},{self.progress},2,4711,1]"
        states = ",".join(f'"{rank}":{state}' for rank in self.ranks)
        return f'{{"frame":"board","states":{{{states}}},"halted":[]}}\n'.encode()

    def event(self, rank: int) -> bytes:
        """Every rank tells of its memory and its times; rank 0 of the step, too."""
        step = self.progress // 2
        split = dict.fromkeys(("data", "forward", "backward", "comm", "optim"), 0.2)
        told: dict[str, Any] = {
            "type": "memory",
            "time": time.time(),
            "rank": rank,
            "step": step,
            "params": 2147483648,
            "grads": 1073741824,
            "optim": 6442450944,
            "rings": 268435456,
            "rss_bytes": 5368709120 + step,
            "peak_rss_bytes": 5368709120,
            "device_allocated": 12884901888 + step,
            "device_reserved": 17179869184,
            "split": split | {"forward": 0.2 + rank % 97 / 1e4},
        }
        lines = [told]
        if rank == 0:
            step_event = {
                "type": "step",
                "step": step,
                "loss": 2.5,
                "lr": 3e-4,
                "grad_norm": 1.0,
                "step_s": 1.0,
                "samples_per_s": 8192.0,
                "tokens_per_s": 8388608.0,
                "split": split,
            }
            lines.append(told | step_event)
        now = time.monotonic()
        sent = [*self._fold.due(now)]
        for line in lines:
            sent += self._fold.take(encode(line), now)
        return b"".join(b'{"frame":"event","event":' + line + b"}\n" for line in sent)

    def sensors(self) -> bytes:
        """What the host and its GPUs say of themselves."""
        told = self._simulated.sensed(self.ranks, self.progress)
        return b"".join(b'{"frame":"event","event":' + encode(each) + b"}\n" for each in told)

    def started(self) -> bytes:
        pids = ",".join(f'"{rank}":4711' for rank in self.ranks)
        return f'{{"frame":"started","pids":{{{pids}}}}}\n'.encode()

    def end(self) -> bytes:
        last = b""
        if 0 in self.ranks:
            event = b'{"type":"end","time":1.0,"rank":0,"step":1,"reason":"steps"}'
            last = b'{"frame":"event","event":' + event + b"}\n"
        exits = (
            f'{{"frame":"exit","rank":{rank},"status":0,"oom":false,"note":null,"log":[]}}\n'
            for rank in self.ranks
        )
        return last + "".join(exits).encode() + b'{"frame":"done"}\n'


def act(hosts: list[Far], seconds: float, events: bool) -> None:
    """Be all hosts: wait for the start of each, talk for some time, and end."""
    selector = selectors.DefaultSelector()
    for host in hosts:
        selector.register(host.reads, selectors.EVENT_READ, host)
    _hear_starts(hosts, selector)
    chance, begun = random.Random(1), time.monotonic()
    due: list[tuple[float, int, int]] = []  # when, which host, and which rank of it
    for number, host in enumerate(hosts):
        due.append((begun + chance.random() * PROGRESS_S, number, BOARD))
        due += [(begun + chance.random(), number, rank) for rank in host.ranks if events]
        if events:
            due.append((begun + chance.random() * SENSORS_S, number, SENSORS))
    heapq.heapify(due)
    while due[0][0] < begun + seconds:
        when, number, rank = due[0]
        if (early := when - time.monotonic()) > 0.001:
            for key, _ in selector.select(early):
                os.read(key.fd, 1 << 16)  # that the launcher is there
            continue
        says, pause_s = hosts[number].turn_of(rank)
        say(hosts[number], says)
        heapq.heapreplace(due, (when + pause_s, number, rank))
    for host in hosts:  # rank 0, which says that training has ended, is the first
        say(host, host.end())
    while selector.get_map():  # until the launcher has let go
        for key, _ in selector.select():
            if not os.read(key.fd, 1 << 16):
                selector.unregister(key.fd)


def _hear_starts(hosts: list[Far], selector: selectors.BaseSelector) -> None:
    """Return when all hosts were told what to run, and have said that they do."""
    started: set[int] = set()
    while len(started) < len(hosts):
        for key, _ in selector.select():
            if (
                key.data.hear(os.read(key.fd, 1 << 16)) > 1 and key.fd not in started
            ):  # the spec, and the start
                started.add(key.fd)
                say(key.data, key.data.started())


def say(host: Far, data: bytes) -> None:
    os.write(host.writes, data)


@dataclass
class Cost:
    """What one run came to."""

    cpu: float  # of one core, between warm-up and end
    rate: float  # events per second in that time
    num_events: int
    start_s: float  # CPU seconds until all hosts had their start
    peak_mb: float


def follow(num_hosts: int, ranks_per_host: int, seconds: float, events: bool) -> Cost:
    """Start simulated hosts, follow them to their end, and say what it took this process."""
    job = JobConfig.model_validate(
        {
            "name": "wide",
            "model": "m:f",
            "data": "m:d",
            "steps": 1000,
            "batch": num_hosts * ranks_per_host,
        }
    )
    places = [
        RankPlace(
            rank=h * ranks_per_host + r,
            host=f"node{h}",
            local_rank=r,
            device=f"cuda:{r}",
            cpus="0-15",
            uuid=f"GPU-{random.randbytes(16).hex()}",
        )
        for h in range(num_hosts)
        for r in range(ranks_per_host)
    ]
    plan = LaunchPlan(ranks=places)
    spec = RunSpec(
        job=job,
        plan=plan,
        batch=resolve_batch(job, len(places)),
        job_dir="/job",
        run_dir="/run",
        run_id="x",
    )
    members, far = [], []
    for number in range(num_hosts):
        lifeline, voice = os.pipe(), os.pipe()
        members.append(Simulated(f"node{number}", lifeline[1], voice[0]))
        ranks = range(number * ranks_per_host, (number + 1) * ranks_per_host)
        far.append(Far(ranks, lifeline[0], voice[1]))
    actor = os.fork()
    if actor == 0:
        for member in members:
            member.close()
        act(far, seconds, events)
        os._exit(0)
    for host in far:
        os.close(host.reads), os.close(host.writes)
    run, signals = SupervisedRun(len(places)), LauncherSignals()
    samples: list[tuple[float, float, int]] = []  # when, the CPU seconds and events until then
    heard = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        RunDir.claim("wide", Path(folder) / "run") as rundir,
    ):
        terminal = Console(file=io.StringIO(), force_terminal=True, width=120)
        facts = Facts("wide", "x", tuple(place.host for place in places))
        follower = Follower(Live(terminal, facts, PERIOD_S), rundir.append)

        def see(told: dict[str, Any]) -> None:
            nonlocal heard
            heard += 1

        windows = RankWindows(
            len(places), follower.event, see, Stragglers(facts).see, num_hosts=num_hosts
        )

        def turn() -> None:
            if len(run.started) == num_hosts and not run.exits:
                samples.append((time.monotonic(), time.process_time(), heard))
            windows.turn()
            follower.turn()

        before = time.process_time()
        agents = AgentGroup(members)
        agents.start(
            StartRequest(spec_json, f"node{n}", {}, "zrun_core.train.worker")
            for spec_json in [spec.to_json()]
            for n in range(num_hosts)
        )
        start_s = time.process_time() - before
        Supervisor(agents, run, signals, LimitsConfig(), time.monotonic).watch(windows.take, turn)
        code, failure = judge(run, plan, rundir, signals)
        assert code == 0, failure
    for member in members:
        member.close()
    os.waitpid(actor, 0)
    steady = [sample for sample in samples if sample[0] > samples[0][0] + WARMUP_S]
    elapsed, cpu, events_told = (
        last - first for first, last in zip(steady[0], steady[-1], strict=True)
    )
    return Cost(
        cpu / elapsed,
        int(events_told) / elapsed,
        heard,
        start_s,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def apart(function: Callable[..., Cost], *args: Any) -> Cost:
    """The same in a process of its own, whose memory is its own."""
    reads, writes = os.pipe()
    gc.collect()
    child = os.fork()
    if child == 0:
        found = function(*args)
        os.write(writes, json.dumps(vars(found)).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return Cost(**json.loads(text))


def supervision(args: argparse.Namespace) -> bool:
    """Print what following many hosts costs, and say whether it keeps to the targets."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    full = apart(follow, args.hosts, args.ranks, args.seconds, True)
    quiet = apart(follow, args.hosts, args.ranks, args.seconds, False)
    rate = args.hosts * args.ranks
    print(
        f"{args.hosts} hosts x {args.ranks} ranks, an event of each rank every second, "
        f"{args.seconds:g} s:"
    )
    print(f"  share of one core    {full.cpu:6.1%}   (target {SHARE:.0%})")
    print(f"  memory, at most      {full.peak_mb:6.0f} MB (target {MEMORY_MB} MB)")
    print(f"  CPU per event        {(full.cpu - quiet.cpu) / full.rate * 1e6:6.1f} us")
    print(
        f"  CPU per host         {quiet.cpu / args.hosts * 1e6:6.1f} us/s, without events: "
        f"{quiet.cpu:.1%} of a core"
    )
    print(f"  CPU until all have their start {full.start_s:.2f} s")
    print(f"  events               {full.num_events}, {full.rate:.0f} a second")
    if full.rate < 0.95 * rate:
        print(f"  NOT KEPT UP: this machine was too busy to tell of {rate} events a second")
    return full.rate > 0.95 * rate and full.cpu < SHARE and full.peak_mb < MEMORY_MB


def seconds_of(action: Callable[[], object], times: int = 5) -> str:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return f"{statistics.median(taken):6.3f} s  ({min(taken):.3f} to {max(taken):.3f})"


def commands() -> None:
    """Print how long the pure and local parts take."""

    def command(*argv: str) -> Callable[[], object]:
        return lambda: subprocess.run(
            [sys.executable, "-m", "zrun", *argv], check=True, capture_output=True
        )

    scenario = str(ROOT / "tests" / "scenarios" / "dgx1v.txt")
    print(f"  zrun --help                 {seconds_of(command('--help'))}")
    print(
        "  zrun topo, 8 GPUs           "
        f"{seconds_of(command('topo', '--simulate', scenario, '--tp', '2'))}"
    )
    chance = random.Random(1)
    weights = [[0.0] * 16 for _ in range(16)]
    for a in range(16):
        for b in range(a):
            weights[a][b] = weights[b][a] = chance.choice([12.0, 20.0, 24.0, 40.0, 48.0])
    for size in (2, 4, 8):
        print(
            f"  16 GPUs, groups of {size}        "
            f"{seconds_of(lambda size=size: best_groups(weights, size), 3)}"
        )


def preflights() -> None:
    """Print how long it takes to look at three hosts, and to find a bad one among them."""
    import rig as rigs

    from zrun.hosts.hostfile import HostEntry
    from zrun.preflight.host_checks import HostRequirements
    from zrun.preflight.inspection import check_hosts
    from zrun.transport.agent_process import close_all
    from zrun.transport.ssh import SshAgent
    from zrun_core.errors import PreflightError

    if reason := rigs.missing():
        print(f"  preflight: {reason}")
        return
    with tempfile.TemporaryDirectory() as folder, rigs.build(Path(folder) / "rig") as rig:

        def look(*names: str, port: int | None = None) -> None:
            more = [SshAgent(HostEntry(rig.address, port=port), rig.ssh)] if port else []
            agents = [*(SshAgent(HostEntry(name), rig.ssh) for name in names), *more]
            try:
                with contextlib.suppress(PreflightError):
                    check_hosts(agents, HostRequirements())
            finally:
                close_all(agents)

        names = tuple(rig.hosts)
        print(f"  preflight, three hosts      {seconds_of(lambda: look(*names), 3)}")
        for bad in ("nowhere", "refusing", "changed", "stranger"):
            print(f"    and {bad:23} {seconds_of(lambda bad=bad: look(*names, bad), 3)}")
        with rigs.silent_listener(rig.address) as port:
            print(
                f"    and one that is silent    {seconds_of(lambda: look(*names, port=port), 1)}  "
                "(client waits 2 s)"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument(
        "--rig", action="store_true", help="also the preflight of three real hosts, as root"
    )
    args = parser.parse_args()
    keeps = supervision(args)
    commands()
    if args.rig:
        preflights()
    return 0 if keeps else 1


if __name__ == "__main__":
    sys.exit(main())
