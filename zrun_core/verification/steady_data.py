"""Whether data are the same each time they are read, by which a run is compared with a plain loop.

    the same data set, read again    a generator of its own, the clock, values that it changes
    one that is made anew            what its factory draws
    one that another process makes   the order of a set of strings

Where they are not, nothing can be said of the configuration.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zrun_core.data.batch import digest
from zrun_core.distributed import rng
from zrun_core.guards.batches import fields_of
from zrun_core.spine.spec import RunSpec
from zrun_core.user_code import user
from zrun_core.verification.plain_loop import PlainData, split_samples
from zrun_core.verification.verdict import Unverifiable

_READS = 4  # more, of what has differed already: what is drawn may be the same by chance
_PAUSE_S = 1.1  # before the last of them: a clock may be read in seconds
_OTHER_SEED = 0x5EED
_UNKNOWN = "the configuration cannot be judged, and a resumed run reads other data"

Parts = Sequence[Sequence[Sequence[int]]]


def check_read_again(
    data: PlainData, parts: Parts, rank: int, micro: int, batch: Any, pause_s: float = 0.0
) -> None:
    """Read a micro-batch once more.

    Args:
        parts: as of `PlainData.batches`, of which `micro` of `rank` is looked at.
        batch: what it was.
        pause_s: how long to wait before.

    Raises:
        Unverifiable: it is another.
    """
    time.sleep(pause_s)
    again = data.batches(parts)[rank][micro][0]
    if digest(again) == digest(batch):
        return
    raise Unverifiable(
        f"the data are not the same each time they are read: {_where(data, parts[rank][micro])}, "
        f"read twice with the same seeds, differs{_field(batch, again)}: draw from the generators "
        "of Python, numpy or torch, which zrun seeds for each sample, not from one that the data "
        "set makes for itself; look neither at the clock nor at what was read before, and do not "
        f"write to what the data set holds; until then {_UNKNOWN}"
    )


def check_data(
    run_dir: Path, data: PlainData, step: int, place: tuple[int, int], batch: Any
) -> None:
    """Look for why the plain loop reads something else than a run does.

    Args:
        run_dir: of the run.
        data: of the plain loop.
        place: the data-parallel rank and its micro-batch in `step` that differ.
        batch: that the plain loop has read there.

    Raises:
        Unverifiable: the data differ from themselves.
    """
    spec = RunSpec.read(run_dir / "spec.json")
    rank, micro = place
    parts = split_samples(data.positions(step), spec.batch.ranks, spec.batch.micro)
    for number in range(_READS):
        pause_s = _PAUSE_S if number == _READS - 1 else 0.0
        check_read_again(data, parts, rank, micro, batch, pause_s)
    with rng.kept_position(rng.CPU):
        rng.seed(_OTHER_SEED)
        made_anew = PlainData(spec)
    again = made_anew.batches(parts)[rank][micro][0]
    where = _batch_in_words(parts[rank][micro])
    if digest(again) != digest(batch):
        raise Unverifiable(
            f"the data set is not the same each time it is made: {where} differs"
            f"{_field(batch, again)}: have {spec.job.data.call} draw from a generator with a seed, "
            f"such as torch.Generator().manual_seed(0); until then {_UNKNOWN}"
        )
    if _digest_elsewhere(run_dir, step, place) not in ("", digest(batch)):
        raise Unverifiable(
            f"the data set is not the same in each process: {where} differs: the order of a set, "
            "or what hash() says of a string, is another in each; sort what is listed; until then "
            f"{_UNKNOWN}"
        )


def _where(data: PlainData, positions: Sequence[int]) -> str:
    """Return which sample is another when it is read twice, in words, or else the batch of them."""
    for position in positions:
        first, again = data.sample(position), data.sample(position)
        if first is not None and again is not None and _are_others(first[1], again[1]):
            return f"sample {first[0]} of the data set"
    return _batch_in_words(positions)


def _batch_in_words(positions: Sequence[int]) -> str:
    if len(positions) == 1:
        return f"the batch of position {positions[0]} of the stream"
    return f"the batch of positions {positions[0]} to {positions[-1]} of the stream"


def _are_others(first: Any, again: Any) -> bool:
    if list(fields_of(first, 0)) != list(fields_of(again, 0)):
        return True
    pairs = zip(_opaque(first), _opaque(again), strict=False)
    return any(one != other for one, other in pairs)


def _opaque(value: Any) -> Iterator[object]:
    """Yield what a sample holds beside tensors and numbers: strings, bytes of arrays and images."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _opaque(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _opaque(each)
    elif isinstance(value, str | bytes):
        yield value
    elif callable(getattr(value, "tobytes", None)):  # of numpy, of PIL
        yield value.tobytes()


def _field(batch: Any, again: Any) -> str:
    """Return where two batches differ first, in words; "" where that has no name."""
    for one, other in zip(fields_of(batch, 0), fields_of(again, 0), strict=False):
        if one != other:
            return f" in {one.path}" if one.shape == other.shape else f" in the shape of {one.path}"
    return ""


def _digest_elsewhere(run_dir: Path, step: int, place: tuple[int, int]) -> str:
    """Return the digest of a micro-batch that a process of its own reads; "": it reads none."""
    words = [sys.executable, "-P", "-m", __name__, str(run_dir), *map(str, (step, *place))]
    ran = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    lines = ran.stdout.splitlines()
    return str(json.loads(lines[-1])) if ran.returncode == 0 and lines else ""


def _main() -> None:
    """Print the digest of a micro-batch of a run: RUN STEP RANK MICRO."""
    spec = RunSpec.read(Path(sys.argv[1]) / "spec.json")
    step, rank, micro = map(int, sys.argv[2:])
    user.add_to_path(Path(spec.job_dir))
    data = PlainData(spec)
    parts = split_samples(data.positions(step), spec.batch.ranks, spec.batch.micro)
    print(json.dumps(digest(data.batches(parts)[rank][micro][0])), flush=True)


if __name__ == "__main__":
    _main()
