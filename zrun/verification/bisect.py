"""Features that `zrun verify --bisect` switches off; the one without which a job agrees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.schedules import PLAIN


class Feature(NamedTuple):
    """Something that a job asks for.

    Attributes:
        name: as in the job file.
        keys: that turn it off.
    """

    name: str
    keys: tuple[str, ...]


def features_of(job: JobConfig) -> list[Feature]:
    """Return what can be turned off in a job, what is likeliest first."""
    return [*_of_each_rank(job), *_of_axes(job), *_of_updates(job)]


def _of_each_rank(job: JobConfig) -> Iterator[Feature]:
    if job.compile:
        yield Feature("compile", ("compile=false",))
    if job.activations.checkpoint != "none":
        yield Feature(f"activations.checkpoint {job.activations.checkpoint}", ("activations={}",))
    if {job.offload.optimizer, job.offload.grad, job.offload.param} - {"device", None}:
        yield Feature("offload", ("offload=device",))
    if job.zero.tile is not None:
        yield Feature("zero.tile", ("zero.tile=null",))


def _of_axes(job: JobConfig) -> Iterator[Feature]:
    parallel = job.parallel
    one_chunk = (f"parallel.schedule={PLAIN}", "parallel.virtual=1", "parallel.split=auto")
    whole_layers = ("parallel.tp=1", "parallel.sequence=false", "parallel.plan=auto")
    if parallel.sequence:
        yield Feature("parallel.sequence", ("parallel.sequence=false",))
    if parallel.schedule != PLAIN:
        yield Feature(f"parallel.schedule {parallel.schedule}", one_chunk)
    if parallel.pp > 1:
        yield Feature(f"parallel.pp {parallel.pp}", ("parallel.pp=1", *one_chunk))
    if parallel.tp > 1:
        yield Feature(f"parallel.tp {parallel.tp}", whole_layers)
    if isinstance(parallel.dp, int) and parallel.dp > 1:
        yield Feature(f"{parallel.dp} data-parallel ranks", ("parallel.dp=1",))


def _of_updates(job: JobConfig) -> Iterator[Feature]:
    if job.sync != "ring":
        yield Feature(f"sync {job.sync}", ("sync=ring",))
    if job.zero.stage:
        yield Feature(f"zero {job.zero.stage}", ("zero=0",))
    if job.precision.compute != "fp32":
        yield Feature(f"precision {job.precision.compute}", ("precision=fp32",))
    if job.optim.clip is not None:
        yield Feature("optim.clip", ("optim.clip=null",))
    if job.optim.name.lower() != "sgd":
        yield Feature(f"optim {job.optim.name}", (f"optim={{name: sgd, lr: {job.optim.lr}}}",))


def with_slots(keys: Sequence[str], job: JobConfig) -> list[str]:
    """Return keys with the number of ranks that they leave of a job's.

    Args:
        keys: that turn features off.
        job: with its axes as numbers.
    """
    parallel = job.parallel
    sizes = {"tp": parallel.tp, "pp": parallel.pp, "dp": parallel.dp}
    ranks = 1
    for axis, size in sizes.items():
        if f"parallel.{axis}=1" not in keys:
            assert isinstance(size, int)
            ranks *= size
    return [*keys, f"slots={ranks}"]


def bisect(
    features: Sequence[Feature],
    agrees: Callable[[Sequence[str]], bool],
    tell: Callable[[str], None],
) -> str:
    """Return in words which features it takes.

    Args:
        agrees: runs a trial with these keys on top, and says whether it agrees.
        tell: is told of each trial.
    """
    guilty = []
    for feature in features:
        is_it = agrees(feature.keys)
        tell(f"without {feature.name}: {'agrees' if is_it else 'differs'}")
        if is_it:
            guilty.append(feature.name)
    if guilty:
        culprit = "it" if len(guilty) == 1 else "one of them"
        return f"the cause is {' and '.join(guilty)}: without {culprit}, results agree"
    off: list[str] = []
    for number, feature in enumerate(features):
        off += feature.keys
        if number and agrees(off):
            names = ", ".join(each.name for each in features[: number + 1])
            return f"no single feature is the cause: without {names}, results agree"
    return "results differ without all of these too: look at the model, its loss and its data"
