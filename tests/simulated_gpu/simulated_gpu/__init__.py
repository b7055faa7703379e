"""A simulated GPU for torch's wheel for CPUs. See the README beside.

    environment = simulated_gpu.environment(devices=2, delay_us=300, seed=7)
    subprocess.run([sys.executable, "script.py"], env=environment)

In a process of that environment `torch.device("cuda")` computes, and `init_process_group("nccl")`
makes groups. Importing this package imports no torch.
"""

from __future__ import annotations

import sys
from typing import Any

from simulated_gpu.build import why_not
from simulated_gpu.settings import environment

__all__ = ["configure", "count", "environment", "is_installed", "why_not"]


def is_installed() -> bool:
    """Whether the GPUs of this process are simulated."""
    return "simulated_gpu.cuda" in sys.modules


def _extension() -> Any:
    from simulated_gpu import install

    if not is_installed():
        raise RuntimeError("this process has no simulated GPUs: start it in `environment()`")
    return install.extension()


def configure(**settings: Any) -> None:
    """Change settings of this process: see `settings.py`."""
    _extension().configure(**settings)


def count() -> dict[str, Any]:
    """How often what happened: kernels, waits of the host, operators that made it wait."""
    found: dict[str, Any] = _extension().count()
    return found
