"""Why ranks that share layers have computed different losses: what is known, and what to write.

Once the message of a step has said that they have, all ranks tell what they know of it:

    their losses               one rank alone, or each another one
    their random streams       what some have drawn and others have not
    generators of the user's   that modules and the loss keep, and the files of their code
    what they hold alike       parameters that are whole on each: see `replicas.py`

Together with what the comparison before the first step came to that decides what is advised.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
import xxhash
from torch import nn

from zrun_core.distributed import rng
from zrun_core.errors import DivergedError
from zrun_core.guards.replicas import ReplicaGuard
from zrun_core.spine.spec import LaunchPlan
from zrun_core.zero.sharded_model import ShardedModel

_WHOLE_MODEL = "what the whole model computes"


class RankTold(NamedTuple):
    """What a rank tells.

    Attributes:
        losses: of its micro-batches in the step; empty: it computes none.
        streams: digests of the generators that zrun seeds.
        own: digests of the user's that have been drawn from, by name.
    """

    losses: Sequence[float]
    streams: Mapping[str, str]
    own: Mapping[str, str]


@dataclass(frozen=True)
class Known:
    """What is known beside what ranks tell.

    Attributes:
        is_first: no step has ended before in this run.
        why_not_compared: with the whole model, before the first step, in words; "" if it was.
        alike: what the comparison of what ranks hold alike has found; "" where it is equal.
    """

    is_first: bool
    why_not_compared: str
    alike: str


class LossCauses:
    """Asks all ranks, and says why.

    Attributes:
        why_not_compared: as of `Known`.
    """

    def __init__(
        self, sharded: ShardedModel, loss: object, replicas: ReplicaGuard, plan: LaunchPlan
    ) -> None:
        """
        Args:
            loss: the user's loss function; None: the model returns its loss.
        """
        self._sharded = sharded
        self._loss = loss
        self._replicas = replicas
        self._plan = plan
        self.why_not_compared = ""
        self._begun: Mapping[str, str] = {}  # where generators of the user's stood
        if sharded.mesh.tensor.size > 1:
            self._begun = self._own_generators()

    def _own_generators(self) -> dict[str, str]:
        found = _generators(self._sharded.module, self._loss)
        return {name: _digest(generator) for name, generator in found}

    def say(self, step: int, losses: Sequence[torch.Tensor], *, is_first: bool) -> str:
        """Return why losses of `step` differ, and what to write. Collective over all ranks.

        Args:
            losses: of this rank's micro-batches.
            is_first: as of `Known`.
        """
        device = self._sharded.comm.device
        streams = dict(_streams(device))
        own = {n: d for n, d in self._own_generators().items() if d != self._begun.get(n)}
        told = json.dumps([[float(loss) for loss in losses], streams, own]).encode()
        world = self._sharded.mesh.world
        rows = self._sharded.comm.all_gather_bytes(told, world, name="losses that differ")
        ranks = [RankTold(*json.loads(row)) for row in rows]
        alike = ""
        try:
            self._replicas.check(step, {})
        except DivergedError as error:
            alike = str(error)
        places: dict[tuple[int, int], dict[int, RankTold]] = {}
        for number, each in enumerate(ranks):
            place = self._plan.ranks[number]
            places.setdefault((place.dp, place.pp), {})[number] = each
        known = Known(is_first, self.why_not_compared, alike)
        return in_words(list(places.values()), known, self._plan)


def in_words(
    groups: Sequence[Mapping[int, RankTold]], known: Known, plan: LaunchPlan | None = None
) -> str:
    """Return who differs, why as far as that is known, and what to write.

    Args:
        groups: what ranks tell, by number, for each group that shares layers.
    """

    def named(rank: int) -> str:
        return str(rank) if plan is None else plan.named(rank)

    return f"{_who(groups, named)}{_why(groups, known)}"


def _who(groups: Sequence[Mapping[int, RankTold]], named: Any) -> str:
    """Return which ranks of the first group that differs have which losses, in words."""
    for group in groups:
        totals = {rank: math.fsum(each.losses) for rank, each in group.items() if each.losses}
        odd = _odd({rank: repr(total) for rank, total in totals.items()})  # a NaN is like others
        if odd:
            other = next(rank for rank in totals if rank not in odd)
            off = abs(totals[odd[0]] - totals[other]) / max(abs(totals[other]), 1e-30)
            who = f"rank {named(odd[0])}"
            if len(odd) > 1:
                who += f" and {len(odd) - 1} more"
            return f"that of {who} is {off:.2g} (relative) off that of rank {named(other)}; "
    return ""


def _why(groups: Sequence[Mapping[int, RankTold]], known: Known) -> str:
    for group in groups:
        for name in {name: None for each in group.values() for name in each.own}:
            if _odd({rank: each.own.get(name, "") for rank, each in group.items()}):
                return (
                    f"{name}, a random generator of your own, stands elsewhere on each of them: "
                    "seed it with the same number on every rank, draw from it alike, or draw from "
                    "torch's own generators, which zrun seeds"
                )
        for name in next(iter(group.values())).streams:
            if _odd({rank: each.streams.get(name, "") for rank, each in group.items()}):
                return (
                    f"the generator of {name} stands elsewhere on each of them: something draws "
                    "on some ranks alone, or as many numbers as a slice has elements: outside of "
                    "divided layers draw on all ranks alike, by the shapes of whole tensors"
                )
    return f"their random streams are alike; {_without_draws(groups, known)}"


def _without_draws(groups: Sequence[Mapping[int, RankTold]], known: Known) -> str:
    """Return what to say where all ranks have drawn the same."""
    if _one_alone(groups):
        return (
            "one rank alone differs, though each has another slice: look for code that asks for "
            "the rank, for another version or file on its host, and for its device (zrun doctor)"
        )
    if known.why_not_compared:
        return (
            f"parts of the model were not compared with {_WHOLE_MODEL} before training, as "
            f"{known.why_not_compared}: with guards.check_values: true, or by zrun check JOB "
            "--values, an operation between divided layers that sees all features is named; what "
            "is left is a penalty or a norm of slices: compute with what modules return, or write "
            "tp: 1"
        )
    if known.is_first:
        when = (
            "before training the first micro-batch matched the whole model, in evaluation mode: so "
            "look at what is computed in training alone (`if self.training`), or for some batches"
        )
    else:
        when = (
            "the first micro-batch matched the whole model, and losses were equal until now: so "
            "look at what changes over steps: a penalty that begins late, a counter, weights that "
            "a hook has written"
        )
    if not known.alike:
        when += (
            "; parameters that they hold whole are equal still, so it is a term made of slices "
            "alone, as a penalty or a norm of divided weights: compute with what modules return"
        )
    elif not known.is_first:
        found = known.alike.partition(": replicas diverged: ")[2].partition("; ")[0]
        when += f"; {found or 'parameters that they hold whole differ'}, by this step or before it"
    return f"{when}; or write tp: 1"


def _one_alone(groups: Sequence[Mapping[int, RankTold]]) -> bool:
    """Return whether of three ranks or more all but one have the same losses."""
    for group in groups:
        counts = Counter(tuple(each.losses) for each in group.values() if each.losses)
        if len(counts) > 1:
            return sum(counts.values()) > 2 and sorted(counts.values())[:-1] == [1]
    return False


def _odd(values: Mapping[int, object]) -> list[int]:
    """Return the ranks whose value is not the most frequent one; of two, the later."""
    if not values:
        return []
    common = Counter(values.values()).most_common(1)[0][0]
    return [rank for rank, value in values.items() if value != common]


def _streams(device: torch.device) -> Iterator[tuple[str, str]]:
    """Yield where the generators stand that zrun seeds."""
    tensors, _ = rng.capture(device)
    for name, state in sorted(tensors.items()):
        yield {"python": "Python"}.get(name, name), _digest_bytes(state.cpu().numpy().tobytes())


def _generators(model: nn.Module, loss: object) -> Iterator[tuple[str, object]]:
    """Yield the random generators that the user's code keeps, by name."""
    seen: set[int] = set()

    def of(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, object]]:
        for name, value in list(values.items()):
            if id(value) not in seen and _is_generator(value):
                seen.add(id(value))
                yield f"{prefix}{name}", value

    for name, module in model.named_modules():
        yield from of(vars(module), f"{name}." if name else "model.")
    yield from of(getattr(loss, "__dict__", {}), "loss.")
    functions: list[object] = [type(module).forward for module in model.modules()]
    functions += [loss, vars(type(loss)).get("__call__")]
    for function in functions:
        plain = function.__func__ if isinstance(function, MethodType) else function
        if isinstance(plain, FunctionType):
            file = Path(plain.__code__.co_filename).name
            yield from of(plain.__globals__, f"{file}:")


def _is_generator(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def _digest(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return _digest_bytes(generator.get_state().numpy().tobytes())
    if isinstance(generator, random.Random):
        return _digest_bytes(repr(generator.getstate()).encode())
    if hasattr(generator, "bit_generator"):
        return _digest_bytes(repr(generator.bit_generator.state).encode())
    return _digest_bytes(repr(generator.get_state(legacy=False)).encode())


def _digest_bytes(raw: bytes) -> str:
    return xxhash.xxh3_64(raw).hexdigest()
