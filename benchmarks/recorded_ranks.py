"""What a run's record takes of what its ranks tell of their memory and times, and of its hosts.

    python benchmarks/recorded_ranks.py                  16 to 4096 ranks, 8 on a host: some seconds
    python benchmarks/recorded_ranks.py --ranks 4096

Nothing is trained: events as ranks on GPUs tell them go through the fold of each host's agent and
the windows of the launcher, as in a launch. Bytes are those of the encoded lines of some windows,
times the windows of 100,000 steps with `log.every: 10`. "Each rank" is one `memory` event of each
rank in the record, as it is up to 16 ranks; "sent" is what agents send to the launcher. The second
table is of what hosts and their GPUs say of themselves in a day, for these numbers of hosts.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # zrun without installing it

from zrun.agent.memory_fold import MemoryFold
from zrun.transport.memories import FEW_RANKS
from zrun.watch.rank_windows import RankWindows
from zrun_core.spine.events import Event, encode

GIB = 1 << 30
STEPS = 100_000
EVERY = 10
_ON_HOST = 8
_LOOK_S = 10.0  # between two looks of an agent at its host
_LOOKS_A_DAY = 8640
_SHARE_OF_DAY = 54  # is made
_PARTS = {"data": 0.002, "forward": 0.21, "backward": 0.45, "comm": 0.06, "optim": 0.02}


@dataclass(frozen=True)
class Simulated:
    """Ranks of a launch that tell of themselves, each a little otherwise at each step.

    Attributes:
        slow: by rank, how many times as long its forward takes.
        stages: of a pipeline.
    """

    num_ranks: int
    num_hosts: int
    on_gpu: bool = True
    stages: int = 1
    slow: dict[int, float] = field(default_factory=dict)

    @property
    def hosts(self) -> list[range]:
        """The ranks of each host."""
        size = self.num_ranks // self.num_hosts
        return [range(first, first + size) for first in range(0, self.num_ranks, size)]

    def start(self) -> Event:
        known = {"job": "gpt", "world_size": self.num_ranks, "params": 10**9, "stage": 2}
        planned = dict(zip(("params", "grads", "optim", "rings"), _kinds(), strict=False))
        more = {"device": "H100" if self.on_gpu else "cpu", "planned_bytes": planned}
        return _event("start", 0, 0, total_steps=1000) | known | more

    def told_of_stages(self) -> Iterator[Event]:
        """Yield the `stage` events of a pipeline."""
        if self.stages > 1:
            for stage in range(self.stages):
                about = {"stage": stage, "stages": self.stages, "virtual": 1, "schedule": "1f1b"}
                blocks = [f"blocks.{stage}"]
                yield _event("stage", stage, 0, **about, blocks=blocks, params=10**8, trainable=9)

    def step(self, number: int) -> Event:
        known = {"loss": 5.0 / number, "lr": 1e-3, "grad_norm": 1.0, "step_s": 0.74}
        told = {"tokens": 4096, "tokens_per_s": 5535.1, "samples": 8, "split": _PARTS}
        return _event("step", 0, number, **known, **told)

    def peak(self, rank: int) -> Event:
        """Return what a rank tells once, of its second step."""
        size = 41 * GIB + self._noise(rank, 2).randrange(GIB)
        return _event("peak", rank, 2, peak_bytes=size, reserved_bytes=size + GIB // 4)

    def memory(self, rank: int, number: int) -> Event:
        """Return what a rank tells of a step, with the fields of `Recorder`."""
        noise = self._noise(rank, number)
        kinds = dict(zip(("params", "grads", "optim", "rings", "buffers"), _kinds(), strict=True))
        resident = 3 * GIB + noise.randrange(GIB)
        allocated = 40 * GIB + noise.randrange(GIB)
        reserved = allocated + noise.randrange(GIB)
        gpu = {
            "device_allocated": allocated,
            "device_reserved": reserved,
            "device_fragmented": reserved - allocated,
            "alloc_retries": int(noise.random() < 0.05),
        }
        split = {part: took * (1 + 0.05 * noise.random()) for part, took in _PARTS.items()}
        split["forward"] *= self.slow.get(rank, 1.0)
        told: dict[str, Any] = {
            "planned_bytes": sum(_kinds()),
            **kinds,
            "rss_bytes": resident,
            "peak_rss_bytes": resident + noise.randrange(GIB),
            "process_bytes": None if self.on_gpu else resident - noise.randrange(GIB),
            **(gpu if self.on_gpu else dict.fromkeys(gpu)),
            "kept_bytes": {"host": noise.randrange(GIB)} if noise.random() < 0.5 else {},
            "split": split,
        }
        if self.stages > 1:
            stage = rank * self.stages // self.num_ranks
            use = {"span_s": 0.7 + 0.01 * noise.random(), "waited_s": 0.1 * (1 + noise.random())}
            told["pipeline"] = {"stage": stage, **use, "in_flight": self.stages - stage}
            sent = {"activations": number * 4096, "gradients": number * 2048}
            told["pipe_sent"] = {"stage": stage, **sent, "micro_batches": number}
        return _event("memory", rank, number, **told)

    def sensed(self, host: range, number: int) -> list[Event]:
        """Return what a host and its GPUs say, with the fields of `HostWatch` and `BoardWatch`."""
        noise = self._noise(host.start, number)
        gpus = [
            {
                "rank": rank,
                "uuid": f"GPU-{rank:08x}-1234-5678-9abc-def012345678",
                "utilisation": 80 + noise.randrange(20),
                "power_w": round(600 + 100 * noise.random(), 1),
                "power_limit_w": 700.0,
                "temperature_c": 60 + noise.randrange(10),
                "clock_mhz": 1980 - 15 * noise.randrange(10),
                "used_bytes": 70 * GIB + noise.randrange(GIB),
                "slowed": ["power cap"],
                "corrected": 0,
                "uncorrected": 0,
                "remap": None,
            }
            for rank in host
        ]
        rates = ("sent_bytes", "received_bytes", "disk_read_bytes", "disk_written_bytes")
        usage = {
            "cores": 128,
            "cores_busy": noise.random(),
            "load": 8 * noise.random(),
            "memory_bytes": 2048 * GIB,
            "memory_used_bytes": noise.randrange(1024 * GIB),
            "disk_bytes": 4096 * GIB,
            "disk_free_bytes": noise.randrange(4096 * GIB),
            **{f"{name}_per_s": 1e9 * noise.random() for name in rates},
        }
        at = {"time": 1.7e9 + 10 * number, "rank": host.start}
        return [{"type": "gpus", **at, "gpus": gpus}, {"type": "host", **at, **usage}]

    def _noise(self, rank: int, number: int) -> random.Random:
        return random.Random(rank * 1_000_003 + number)


def _kinds() -> tuple[int, ...]:
    return 2 * GIB, 4 * GIB, 12 * GIB, GIB, GIB // 64


def _event(kind: str, rank: int, number: int, **fields: Any) -> Event:
    about = {"type": kind, "time": 1.7e9 + number + rank / 10_000, "rank": rank}
    return about | ({"step": number} if number else {}) | fields


class Launcher:
    """Agents and the launcher of a launch, as far as events go through them.

    Attributes:
        sent: lines that came from agents.
        record: lines of `events.jsonl`.
        compared: `memory` events that are compared between ranks.
        now: seconds of the clock of both.
    """

    def __init__(self, ranks: Simulated) -> None:
        self.sent: list[bytes] = []
        self.record: list[bytes] = []
        self.compared: list[Event] = []
        self.now = 0.0
        self._folds: dict[int, MemoryFold] = {}  # by rank
        for host in ranks.hosts:
            fold = MemoryFold(host if ranks.num_ranks > FEW_RANKS else ())
            self._folds |= dict.fromkeys(host, fold)
        self._windows = RankWindows(
            ranks.num_ranks,
            self._follow,
            lambda event: None,
            lambda event, follow: self.compared.append(event),
            len(ranks.hosts),
            lambda: self.now,
        )

    def hear(self, event: Event) -> None:
        """Take in what a rank tells."""
        for line in self._folds[event["rank"]].take(encode(event), self.now):
            self._receive(line)

    def hear_of_host(self, event: Event) -> None:
        """Take in what an agent tells of its host."""
        self._receive(encode(event))

    def turn(self, seconds: float) -> None:
        """Let time pass in which nobody tells anything."""
        self.now += seconds
        for fold in set(self._folds.values()):
            for line in fold.due(self.now):
                self._receive(line)
        self._windows.turn()

    def end_of(self, rank: int) -> None:
        """Let a rank end."""
        for line in self._folds[rank].end_of(rank):
            self._receive(line)

    def close(self) -> None:
        """Let all ranks and the launcher end."""
        for rank in self._folds:
            self.end_of(rank)
        self._windows.close()

    def _receive(self, line: bytes) -> None:
        self.sent.append(line)
        self._windows.take(json.loads(line), line)

    def _follow(self, event: Event, line: bytes | None = None) -> None:
        self.record.append(encode(event) if line is None else line)


def sizes(num_ranks: int, windows: int) -> tuple[float, float, float]:
    """Return bytes of a window: each rank's lines, what agents send, and what is recorded."""
    ranks = Simulated(num_ranks, max(1, num_ranks // _ON_HOST), slow={num_ranks // 2: 1.6})
    launcher = Launcher(ranks)
    each = 0
    for number in range(EVERY, EVERY * windows + 1, EVERY):
        for rank in range(num_ranks):
            told = ranks.memory(rank, number)
            each += len(encode(told)) + 1
            launcher.hear(told)
    launcher.close()
    sent, recorded = (sum(len(line) + 1 for line in of) for of in (launcher.sent, launcher.record))
    return each / windows, sent / windows, recorded / windows


def sizes_of_hosts(num_hosts: int) -> tuple[float, float]:
    """Return bytes of a day: what agents send of their hosts, and what is recorded."""
    ranks = Simulated(num_hosts * _ON_HOST, num_hosts)
    launcher = Launcher(ranks)
    looks = _LOOKS_A_DAY // _SHARE_OF_DAY
    for number in range(looks):
        launcher.now += _LOOK_S
        for host in ranks.hosts:
            for event in ranks.sensed(host, number):
                launcher.hear_of_host(event)
    sent, recorded = (sum(len(line) + 1 for line in of) for of in (launcher.sent, launcher.record))
    return sent * _SHARE_OF_DAY, recorded * _SHARE_OF_DAY


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="16,64,512,4096", help="numbers of ranks")
    parser.add_argument("--windows", type=int, default=3, help="that are made")
    args = parser.parse_args()
    print(f"| ranks | each rank, {STEPS:,} steps | sent | recorded | of each rank |")
    print("|---|---|---|---|---|")
    for num_ranks in map(int, args.ranks.split(",")):
        found = sizes(num_ranks, args.windows)
        cells = [f"{STEPS / EVERY * size / 1e6:,.0f} MB" for size in found]
        print(f"| {num_ranks:,} | {' | '.join(cells)} | {found[2] / found[0]:.2%} |")
    print("\n| hosts | sent in a day | recorded |\n|---|---|---|")
    for num_ranks in map(int, args.ranks.split(",")):
        num_hosts = max(1, num_ranks // _ON_HOST)
        cells = [f"{size / 1e6:,.0f} MB" for size in sizes_of_hosts(num_hosts)]
        print(f"| {num_hosts:,} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
