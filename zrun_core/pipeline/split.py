"""Divide the blocks of a model among the stages of a pipeline.

    split = equal(num_blocks=10, pp=2, virtual=2)
    split.starts            # (0, 3, 6, 8): the first block of each chunk
    split.chunks(1)         # range(1, 4, 2): chunks 1 and 3 are on stage 1
    split.segments(3)       # range(8, 11): blocks 8 and 9, and what follows the last block

A model of n blocks has n + 1 segments: segment k is what runs between the end of block k - 1 and
the end of block k, segment n what follows the last block. Pure: the runtime, the planner and `zrun
check` divide a model here.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fractions import Fraction
from itertools import accumulate, combinations_with_replacement, pairwise

from zrun_core.errors import JobError

_SHOWN_NAMES = 3


@dataclass(frozen=True)
class Split:
    """A model as chunks of consecutive blocks, dealt to the stages in turn.

    Attributes:
        starts: the first block of each chunk; the first of them is 0.
        num_blocks: of the model.
        pp: stages; stage s has every pp-th chunk from s on.
    """

    starts: tuple[int, ...]
    num_blocks: int
    pp: int

    @property
    def num_chunks(self) -> int:
        return len(self.starts)

    @property
    def virtual(self) -> int:
        """Return how many chunks a stage has."""
        return self.num_chunks // self.pp

    def blocks(self, chunk: int) -> range:
        """Return the numbers of a chunk's blocks."""
        is_last = chunk == self.num_chunks - 1
        return range(self.starts[chunk], self.num_blocks if is_last else self.starts[chunk + 1])

    def segments(self, chunk: int) -> range:
        """Return the numbers of a chunk's segments: its blocks', and in the last chunk n."""
        blocks = self.blocks(chunk)
        is_last = chunk == self.num_chunks - 1
        return range(blocks.start, blocks.stop + 1) if is_last else blocks

    def chunks(self, stage: int) -> range:
        """Return the numbers of a stage's chunks."""
        return range(stage, self.num_chunks, self.pp)

    def stage_of(self, chunk: int) -> int:
        return chunk % self.pp

    def chunk_of_segment(self, segment: int) -> int:
        return bisect_right(self.starts, segment) - 1

    def stage_blocks(self, stage: int) -> tuple[range, ...]:
        """Return the blocks of each chunk of a stage."""
        return tuple(self.blocks(chunk) for chunk in self.chunks(stage))

    def stage_costs(self, costs: Sequence[float]) -> tuple[float, ...]:
        """Return what each stage costs.

        Args:
            costs: of each segment.
        """
        return tuple(
            sum(costs[segment] for chunk in self.chunks(stage) for segment in self.segments(chunk))
            for stage in range(self.pp)
        )


def equal(num_blocks: int, pp: int, virtual: int = 1) -> Split:
    """Return chunks of equally many blocks; where they cannot be, the earlier have one more.

    Raises:
        JobError: there are fewer blocks than chunks.
    """
    _require_blocks(num_blocks, pp, virtual)
    short, longer = divmod(num_blocks, pp * virtual)
    starts = tuple(chunk * short + min(chunk, longer) for chunk in range(pp * virtual))
    return Split(starts, num_blocks, pp)


def check_blocks(names: Sequence[str], blocks: Sequence[str], pp: int, virtual: int) -> None:
    """Check what can be known of a split before it is known in which order the blocks are called.

    Args:
        blocks: names of all blocks, in any order.

    Raises:
        JobError: there are fewer blocks than chunks, or a name is no block.
    """
    _require_blocks(len(blocks), pp, virtual)
    for name in names:
        if name not in blocks:
            raise JobError(f"parallel.split: {name!r} is no block: {_known(name, blocks)}")


def at_names(names: Sequence[str], blocks: Sequence[str], pp: int, virtual: int = 1) -> Split:
    """Return the chunks that `parallel.split` names.

    Args:
        names: of the first block of each chunk but the first.
        blocks: names of all blocks, in the order in which the model calls them.

    Raises:
        JobError: a name is no block, the names are too many or too few, or not in order.
    """
    check_blocks(names, blocks, pp, virtual)
    wanted = pp * virtual - 1
    if len(names) != wanted:
        raise JobError(
            f"parallel.split: {_chunks_in_words(pp, virtual)} have {wanted} borders, and it names "
            f"{len(names)}: write the first block of each chunk but the first, for example "
            f"{_example(blocks, pp, virtual)}, or split: auto"
        )
    numbers = {name: number for number, name in enumerate(blocks)}
    starts = [0]
    for name in names:
        start = numbers[name]
        if start <= starts[-1]:
            raise JobError(
                f"parallel.split: {name} does not come after {blocks[starts[-1]]}, where the "
                "chunk before it begins: name the blocks in the order in which the model calls "
                f"them, each once, for example {_example(blocks, pp, virtual)}"
            )
        starts.append(start)
    return Split(tuple(starts), len(blocks), pp)


def balanced(costs: Sequence[float], num_blocks: int, pp: int, virtual: int = 1) -> Split:
    """Return the split whose most expensive stage is as cheap as can be.

    Of several such splits it is the one with the most even stages, then the one whose earlier
    stages have more blocks. With `virtual` above 1 this is so where all blocks cost the same;
    other models get a split from which no block can be moved to the good of the stages.

    Args:
        costs: of each segment: `num_blocks` + 1.

    Raises:
        JobError: there are fewer blocks than chunks.
    """
    if len(costs) != num_blocks + 1:
        raise ValueError(f"{num_blocks} blocks have {num_blocks + 1} segments, not {len(costs)}")
    _require_blocks(num_blocks, pp, virtual)
    whole = _whole(costs)
    split = Split(_even_starts(whole, num_blocks, pp * virtual), num_blocks, pp)
    return split if virtual == 1 else _with_even_stages(split, whole)


def balance_in_words(split: Split, costs: Sequence[float], blocks: Sequence[str]) -> str:
    """Return what the stages cost in per cent, beside the best split there is.

    Args:
        costs: of each segment.
    """
    best = balanced(costs, split.num_blocks, split.pp, split.virtual)
    total = sum(costs) or 1.0
    shares = [cost / total for cost in split.stage_costs(costs)]
    least = max(best.stage_costs(costs)) / total
    in_percent = " ".join(f"{share:.0%}" for share in shares)
    words = f"stage costs {in_percent}, best possible {least:.0%}"
    if max(shares) > least * (1 + 1e-6):
        names = ", ".join(blocks[start] for start in best.starts[1:])
        return f"{words}: write parallel.split: auto, or [{names}]"
    busiest = shares.index(max(shares))
    slower = max(shares) * split.pp - 1
    if slower < 0.005:
        return f"{words}: even"
    return f"{words}: stage {busiest} makes steps {slower:.0%} longer than even stages would"


# Words


def _chunks_in_words(pp: int, virtual: int) -> str:
    if virtual == 1:
        return f"{pp} stages"
    return f"{pp} stages x {virtual} chunks"


def _require_blocks(num_blocks: int, pp: int, virtual: int) -> None:
    chunks = pp * virtual
    if chunks <= max(num_blocks, 1):
        return
    raise JobError(
        f"parallel.pp: {pp}: each chunk of a pipeline has at least one of the repeated blocks of "
        f"the model: {_chunks_in_words(pp, virtual)} = {chunks} > {num_blocks} blocks; "
        f"write {_what_fits(num_blocks, pp, virtual)}"
    )


def _what_fits(num_blocks: int, pp: int, virtual: int) -> str:
    if num_blocks < 2:
        return "pp: 1"
    if virtual == 1:
        return f"pp: {num_blocks} or less"
    fitting = num_blocks // pp
    if fitting > 1:
        return f"virtual: {fitting}"
    return "schedule: 1f1b" if fitting == 1 else f"pp: {num_blocks} or less, schedule: 1f1b"


def _example(blocks: Sequence[str], pp: int, virtual: int) -> str:
    names = [blocks[start] for start in equal(len(blocks), pp, virtual).starts[1:]]
    return f"[{', '.join(names)}]"


def _known(name: str, blocks: Sequence[str]) -> str:
    """Return the blocks that `name` looks most like; without any, the first and the last one."""
    near = get_close_matches(name, blocks, n=_SHOWN_NAMES, cutoff=0.7)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"the model's blocks are {blocks[0]} to {blocks[-1]}"


# The best split


def _whole(costs: Sequence[float]) -> list[int]:
    """Return costs as whole numbers, exactly; where nothing costs anything, each block 1."""
    if not any(costs):
        return [*[1] * (len(costs) - 1), 0]
    exact = [Fraction(cost) for cost in costs]
    unit = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * unit) for cost in exact]


def _even_starts(costs: Sequence[int], num_blocks: int, chunks: int) -> tuple[int, ...]:
    """Return where chunks begin, so that the largest is least, and then the sum of squares.

    Both are found from the end of the model: for 1, 2, ... chunks that are left, and each block
    that they may begin with.
    """
    if chunks == 1:
        return (0,)
    before = [0, *accumulate(costs)]  # what all segments in front of one cost
    rest = [before[-1] - each for each in before]
    largest = rest[:num_blocks]
    for left in range(2, chunks + 1):
        for block in range(num_blocks - left + 1):
            borders = range(block + 1, num_blocks - left + 2)
            largest[block] = min(max(before[at] - before[block], largest[at]) for at in borders)

    too_much = rest[0] ** 2 + 1
    squares = [each**2 if each <= largest[0] else too_much for each in rest[:num_blocks]]
    choices: list[dict[int, int]] = []  # by the chunks after it: where a chunk from a block ends
    for left in range(2, chunks + 1):
        choices.append({})
        for block in range(num_blocks - left + 1):
            found = too_much, 0
            for at in range(block + 1, num_blocks - left + 2):
                cost = before[at] - before[block]
                if cost <= largest[0]:  # of equals the last border: more blocks in this chunk
                    found = min(found, (squares[at] + cost**2, -at))
            squares[block] = found[0]
            choices[-1][block] = -found[1]
    starts = [0]
    for choice in reversed(choices):
        starts.append(choice[starts[-1]])
    return tuple(starts)


def _with_even_stages(split: Split, costs: Sequence[int]) -> Split:
    """Return a split whose stages no block that goes from one chunk to another makes more even.

    A block of chunk j goes to an earlier chunk i where all chunks from i + 1 to j begin one block
    later, and to a later one where they begin one block earlier.
    """

    def unevenness(candidate: Split) -> list[float]:
        return sorted(candidate.stage_costs(costs), reverse=True)

    while True:
        found = min(_neighbours(split), key=unevenness, default=split)
        if unevenness(found) >= unevenness(split):
            return split
        split = found


def _neighbours(split: Split) -> Iterator[Split]:
    """Yield the splits in which one block has gone from a chunk to another."""
    for first, last in combinations_with_replacement(range(1, split.num_chunks), 2):
        for step in (1, -1):
            moved = (start + step for start in split.starts[first : last + 1])
            starts = (*split.starts[:first], *moved, *split.starts[last + 1 :])
            if all(low < high for low, high in pairwise((*starts, split.num_blocks))):
                yield replace(split, starts=starts)
