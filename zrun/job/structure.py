"""Follow a job's references in a process of its own: `inspect_structure(loaded, timeout_s=120)`.

The user's code needs torch, may print, hang or crash, and must do none of that to the command that
asks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zrun.job.environment import worker_environment
from zrun.job.load import LoadedJob
from zrun_core.errors import ExitCode, JobError, PreflightError, UserCodeError, ZrunError
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.section import Ref

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Structure:
    """The model, as its factory builds it.

    Attributes:
        class_name: of the model.
        num_parameters: elements; a parameter that two modules share counts once.
        num_trainable: of these, those that are trained.
        num_tensors: number of parameters.
        parameter_bytes: bytes of them.
        notes: settings of the model's own that do not count in training.
        layers: `LayeredKind`s, as data: what lies around the forwards of its modules; None: that
            was not asked for.
    """

    class_name: str
    num_parameters: int
    num_trainable: int
    num_tensors: int
    parameter_bytes: int
    notes: list[str]
    layers: list[dict[str, Any]] | None = None


def inspect_structure(
    job: LoadedJob, timeout_s: float, gpu_ranks: int = 0, *, layers_on: str | None = None
) -> Structure:
    """Import everything that `job` refers to, and build its model on torch's meta device.

    Args:
        timeout_s: seconds for all of it.
        gpu_ranks: number of ranks that are to train on the GPUs of this host.
        layers_on: "cpu" or "cuda": look what ranks on such devices put around the forwards of its
            modules, too.

    Raises:
        PreflightError: torch cannot train on these.
        JobError: a reference leads nowhere, or the optimizer, checkpointing, compiling, the
            pipeline or tensor parallelism does not suit the model.
        UserCodeError: the user's code raised, returned something else, crashed, or took longer.
    """
    job_dir = job.path.absolute().parent
    request = json.dumps(
        {
            "job": job.config.model_dump(by_alias=True, exclude_unset=True),
            "job_dir": str(job_dir),
            "gpu_ranks": gpu_ranks,
            "layers_on": layers_on,
        }
    )
    env = os.environ | worker_environment(job.config, os.environ)
    with subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
        text=True,
        start_new_session=True,  # so that what the user's code starts can be ended with it
    ) as process:
        try:
            answer, _ = process.communicate(request, timeout_s)
        except subprocess.TimeoutExpired:
            _end(process)
            call = job.config.model.call
            raise UserCodeError(
                f"model: {call} was not built within {timeout_s:g} s; "
                "`zrun check --no-import` skips this"
            ) from None
        except BaseException:
            _end(process)
            raise
    if process.returncode != 0:
        how = f"exit code {process.returncode}"
        if process.returncode < 0:
            how = f"signal {-process.returncode}"
        raise UserCodeError(
            f"model: the process that built {job.config.model.call} ended with {how}"
        )
    return _result(json.loads(answer))


def _end(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _result(answer: dict[str, Any]) -> Structure:
    if "error" not in answer:
        return Structure(**answer)
    if answer["exit_code"] == ExitCode.USAGE:
        raise JobError(answer["error"])
    if answer["exit_code"] == ExitCode.PREFLIGHT:
        raise PreflightError(answer["error"])
    raise UserCodeError(answer["error"])


def _references(job: JobConfig) -> dict[str, Ref]:
    """Return the references that must exist besides the model, by key."""
    found = {
        "data": job.data,
        "data.collate": job.data.collate,
        "loss": job.loss,
        "lr.schedule": job.lr.schedule,
        "eval.metrics": job.eval and job.eval.metrics,
    }
    if job.eval is not None:
        found |= {f"eval.data.{name}".rstrip("."): ref for name, ref in job.eval.sets.items()}
    found |= {f"hooks.{name}": ref for name, ref in job.hooks}
    return {key: ref for key, ref in found.items() if isinstance(ref, Ref)}


def _inspect(job: JobConfig, job_dir: Path, layers_on: str | None) -> Structure:
    from zrun_core.optim.resolve import resolve_optimizer
    from zrun_core.pipeline.split import check_blocks
    from zrun_core.plan.trace.layers_check import layered_kinds
    from zrun_core.plan.trace.parts_check import check_parts
    from zrun_core.train import parallelize
    from zrun_core.train.hook_check import check_hooks
    from zrun_core.train.tensor_building import planned
    from zrun_core.user_code import build, user
    from zrun_core.zero.wrap.auto_wrap import repeated_blocks

    user.add_to_path(job_dir)
    mistakes = []
    for key, ref in _references(job).items():
        kind = "hooks" if key.startswith("hooks.") else key
        takes = user.TAKES.get(kind)
        try:
            if takes is None:
                user.check_call(Ref(call=ref.call, args=ref.args), job_dir)
            else:
                user.function(ref, job_dir, takes)
        except JobError as error:
            mistakes.append(f"{key}: {error}")
    try:
        resolve_optimizer(job.optim, lambda name: user.load(Ref(call=name), job_dir))
    except JobError as error:
        mistakes.append(str(error))
    if mistakes:
        raise JobError("\n".join(mistakes))
    model = _build(job, job_dir)
    build.check(model)
    check_hooks(job, job_dir, model)
    if job.parallel.pp > 1:
        names = [] if job.parallel.split == "auto" else job.parallel.split
        blocks = [name for name, _ in repeated_blocks(model)]
        check_blocks(names, blocks, job.parallel.pp, job.parallel.virtual)
    planned(model, job.parallel)
    parameters = list(model.parameters())
    notes = check_parts(job, job_dir)
    notes += parallelize.transform(
        model, job.zero, job.precision, job.activations, compile=job.compile
    )
    layers = None
    if layers_on is not None:
        layers = [asdict(kind) for kind in layered_kinds(job, job_dir, layers_on)]
    return Structure(
        class_name=type(model).__name__,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        num_tensors=len(parameters),
        parameter_bytes=sum(parameter.nbytes for parameter in parameters),
        notes=notes,
        layers=layers,
    )


def _check_gpus(num_ranks: int) -> None:
    """Look whether so many ranks can train on the GPUs of this host, as each of them would."""
    from zrun_core.hardware import accelerator
    from zrun_core.train.rendezvous import check_device

    check_device(accelerator.device_at(0), num_ranks)


def _build(job: JobConfig, job_dir: Path) -> nn.Module:
    from zrun_core.user_code import user
    from zrun_core.user_code.meta_init import build_on_meta
    from zrun_core.user_code.on_meta import on_meta

    if job.init == "meta":  # what it refuses to make values of, is refused here too
        return build_on_meta(lambda: user.build_model(job.model, job_dir), job.seed).module
    try:
        with on_meta():
            return user.build_model(job.model, job_dir)
    except UserCodeError as error:
        if "meta" not in str(error):
            raise
    # A factory that looks at values, which `init: factory` allows.
    return user.build_model(job.model, job_dir)


def _main() -> None:
    request = json.load(sys.stdin)
    answer_fd = os.dup(1)
    os.dup2(2, 1)  # what the user's code prints is chatter
    try:
        if request["gpu_ranks"]:
            _check_gpus(request["gpu_ranks"])
        job = JobConfig.model_validate(request["job"])
        job_dir = Path(request["job_dir"])
        answer = asdict(_inspect(job, job_dir, request["layers_on"]))
    except ZrunError as error:
        answer = {"error": str(error), "exit_code": error.exit_code}
    with open(answer_fd, "w") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    _main()
