"""Run Python with simulated GPUs: `python -m simulated_gpu devices=2,seed=7 script.py arguments`.

Also `python -m simulated_gpu -m pytest tests/gpu`. Settings are those of SIMULATED_GPU. NVML tells
of a board for each device, so that `zrun train` finds them. With `--build` it only compiles the
device. Where there can be none, it says why in one line and exits with 0: its tests are skipped.
"""

from __future__ import annotations

import os
import sys

from simulated_gpu import boards, build, settings


def main(arguments: list[str]) -> None:
    """Become that process, or say why it cannot be."""
    reason = build.why_not()
    if reason is not None:
        print(f"skipped: {reason}")
        return
    library = build.build()
    if arguments == ["--build"]:
        print(library)
        return
    chosen = {}
    if arguments and not arguments[0].startswith("-") and "=" in arguments[0]:
        chosen = settings.read(arguments.pop(0))
    environment = boards.added_to(settings.environment(**chosen), **chosen)
    os.execve(sys.executable, [sys.executable, *arguments], environment)


main(sys.argv[1:])
