"""The environment that a job asks for. Its values may be secrets: they are not shown or stored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from zrun_core.errors import JobError

if TYPE_CHECKING:  # an agent is there sooner without pydantic
    from zrun_core.spine.config import JobConfig

# What workers get unless the shell or the job says otherwise.
WORKER_DEFAULTS = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order in which the plan counts them
    # One host: nothing listens to the network, and its name need not resolve.
    "GLOO_SOCKET_IFNAME": "lo",
    # Activations come and go in every step. By default glibc hands large blocks back to the kernel
    # each time and faults them in again: 30,000 page faults and 0.1 s of a 2 s step. The heap keeps
    # them instead, in huge pages.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:"
    "glibc.malloc.trim_threshold=4294967296",
    # oneDNN makes code for each shape of a product, in bf16 half a MiB of it, and by default it and
    # torch keep that of 1,024 shapes each. Where tokens are routed by value, each step has others.
    # ResNet-50 needs 166.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
    "LRU_CACHE_CAPACITY": "256",
    # Else torch's profiler, which measures one step's memory, writes to the log.
    "KINETO_LOG_LEVEL": "99",
    # On CUDA: reserved memory follows what is allocated.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}

# What ranks get of it that run a script of the user's own. They are as torchrun leaves them, but
# for the flight recorder of torch: it tells of a hang what each rank waits for.
SCRIPT_DEFAULTS = {
    **{key: WORKER_DEFAULTS[key] for key in ("CUDA_DEVICE_ORDER", "GLOO_SOCKET_IFNAME")},
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}

# Variables of the launcher's shell that other hosts get without a job asking for it: settings of
# libraries, which mean the same everywhere. Paths, and the numbers of this host's devices, do not.
_FORWARDED = re.compile(
    r"(NCCL|RCCL|MIOPEN|HSA|GLOO|UCX|FI|OMP|MKL|KMP|OPENBLAS|TORCH|PYTORCH|CUBLAS|CUDNN|NVIDIA|HF|TRANSFORMERS|WANDB|MLFLOW)_\w+"
    r"|CUDA_(LAUNCH_BLOCKING|DEVICE_MAX_CONNECTIONS|MODULE_LOADING)|GLIBC_TUNABLES|TOKENIZERS_PARALLELISM|TZ|LANG|LC_\w+"
)
_SECRET = re.compile(r"token(?!iz)|key|secret|pass(?!ive)|pwd|credential|auth", re.IGNORECASE)


def worker_environment(job: JobConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `job.env`; those that are null come from `environ`.

    Raises:
        JobError: one of those is not set.
    """
    missing = [name for name, value in job.env.items() if value is None and name not in environ]
    if missing:
        names = ", ".join(missing)
        raise JobError(
            f"env.{names}: null takes the value from the shell, where it is not set: "
            "export it first"
        )
    return {name: environ[name] if value is None else value for name, value in job.env.items()}


def forwarded_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environ` that other hosts get too.

    One that may be a secret has to be named in `job.env`.
    """
    return {
        name: value
        for name, value in environ.items()
        if _FORWARDED.fullmatch(name) and not is_secret(name)
    }


def is_secret(name: str) -> bool:
    """Return whether a variable may be a secret, by its name."""
    return _SECRET.search(name) is not None
