"""A whole machine of simulated GPUs: NVML tells of its boards, and CUDA has a device for each.

machine = Machine(tmp_path, "dgx1v")          # of tests/scenarios
subprocess.run(command, env=machine.gpu_environment(seed=7))
machine.say("xid 1 79")                       # while that runs
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from simulated_gpu import settings

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scenarios"))
import fake_nvml


class Machine(fake_nvml.Machine):
    """The machine of a scenario, which changes while processes run."""

    def __init__(self, folder: Path, name: str) -> None:
        """Begin with a scenario.

        Args:
            folder: for its description, and for the library that tells it.
            name: of a file of tests/scenarios.
        """
        super().__init__(folder, name)
        self._library = fake_nvml.build(folder)

    @property
    def num_gpus(self) -> int:
        """The boards, as the description's first line has them."""
        lines = (line.partition("#")[0].split() for line in self.path.read_text().splitlines())
        return next(int(words[1]) for words in lines if words[:1] == ["gpus"])

    def gpu_environment(self, **given: Any) -> dict[str, str]:
        """The environment of a process that shall find these GPUs, and of all that it starts.

        Args:
            given: settings of the simulated GPUs; `devices` is the number of boards.
        """
        found = settings.environment(**{"devices": self.num_gpus, **given})
        told = self.environment(self._library)
        added = {name: value for name, value in told.items() if value != os.environ.get(name)}
        found.pop("CUDA_VISIBLE_DEVICES", None)  # as of a shell without it
        return {**found, **added}
