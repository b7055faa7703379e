"""The loader: the contract of the order through real datasets, workers and collate functions."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from zrun_core.data.batch import MicroBatch, count_tokens, to_device
from zrun_core.data.loader import BatchLoader, eval_batches
from zrun_core.data.samples import in_words
from zrun_core.errors import JobError, UserCodeError
from zrun_core.spine.sections.data import DataConfig
from zrun_core.spine.spec import BatchPlan


class Numbers(Dataset[Tensor]):
    """Sample i is the number i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class Walk(IterableDataset[Tensor]):
    """The same numbers without indices; counts in tens of thousands which epoch it is in."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor(10_000 * self.epoch + index) for index in range(self.length))


def plan(ranks: int, micro: int, accumulation: int = 1) -> BatchPlan:
    return BatchPlan(
        global_size=ranks * micro * accumulation,
        micro=micro,
        accumulation=accumulation,
        ranks=ranks,
    )


def data(**keys: Any) -> DataConfig:
    return DataConfig(call="m:f", **keys)


def drawn(loader: BatchLoader, num_steps: int) -> list[list[list[int]]]:
    """The numbers by [step][micro-batch]."""
    steps = []
    for _ in range(num_steps):
        step = loader.next_step()
        assert step is not None
        steps.append([micro.batch.tolist() for micro in step])
    return steps


def whole_epochs(
    dataset: object, ranks: int, epochs: int, **keys: Any
) -> list[list[tuple[list[int], int]]]:
    """What all ranks draw until the data ends, by [rank][micro-batch] -> (numbers, num_samples)."""
    ends = []
    for rank in range(ranks):
        loader = BatchLoader(dataset, data(**keys), plan(ranks, 2), rank, seed=3, epochs=epochs)
        parts: list[tuple[list[int], int]] = []
        while (step := loader.next_step()) is not None:
            parts += [(micro.batch.tolist(), micro.num_samples) for micro in step]
        assert loader.next_step() is None
        ends.append(parts)
    return ends


def test_steps_in_order_across_epochs() -> None:
    loader = BatchLoader(Numbers(5), data(), plan(2, 1, 2), rank=1, seed=0)
    assert drawn(loader, 3) == [[[2], [3]], [[1], [2]], [[0], [1]]]
    assert loader.cursor == 12


@pytest.mark.parametrize("dataset", [Numbers(9), Walk(9)])
def test_short_last_step_ends_together_with_stand_ins(dataset: object) -> None:
    ranks = whole_epochs(dataset, ranks=4, epochs=1)
    assert ranks == [
        [([0, 1], 2), ([8], 1)],
        [([2, 3], 2), ([8], 0)],
        [([4, 5], 2), ([8], 0)],
        [([6, 7], 2), ([8], 0)],
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_iterable_and_map_style_agree(num_ranks: int) -> None:
    by_index = whole_epochs(Numbers(13), num_ranks, epochs=2)
    walked = whole_epochs(Walk(13), num_ranks, epochs=2)
    assert [
        [([n % 10_000 for n in numbers], count) for numbers, count in parts] for parts in walked
    ] == by_index


def test_iterable_is_told_its_epoch() -> None:
    loader = BatchLoader(Walk(3), data(), plan(1, 2), rank=0, seed=0)
    assert drawn(loader, 3) == [[[0, 1]], [[2, 10_000]], [[10_001, 10_002]]]


@pytest.mark.parametrize(
    ("dataset", "workers"), [(Numbers(11), 0), (Numbers(11), 2), (Walk(11), 0), (Walk(11), 1)]
)
def test_seek_equals_skipping(dataset: object, workers: int) -> None:
    whole = BatchLoader(dataset, data(workers=workers), plan(2, 3), rank=1, seed=0)
    expected = drawn(whole, 5)[2:]
    resumed = BatchLoader(dataset, data(workers=workers), plan(2, 3), rank=1, seed=0)
    resumed.seek(12)
    assert drawn(resumed, 3) == expected
    assert resumed.cursor == whole.cursor == 30


def test_workers_change_nothing() -> None:
    runs = [
        drawn(
            BatchLoader(
                Numbers(10), data(shuffle=True, workers=workers), plan(2, 2, 2), rank=0, seed=5
            ),
            4,
        )
        for workers in (0, 2)
    ]
    assert runs[0] == runs[1]


def noise() -> float:
    """Drawn as augmentation does it, from the process's own generators."""
    return float(torch.rand(())) + random.random() + float(np.random.random())


class Noise(Dataset[float]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return noise()


class NoisyWalk(IterableDataset[float]):
    """Its order is drawn, too."""

    def __iter__(self) -> Iterator[float]:
        order = list(range(8))
        random.shuffle(order)
        for number in order:
            yield number + noise()


NOISY = {"map": Noise(), "part": Subset(Noise(), range(8)), "walk": NoisyWalk()}


def by_position(dataset: object, workers: int, ranks: int, start: int = 0) -> list[float]:
    """What the samples of 24 positions, three passes, have drawn."""
    batch, keys = plan(ranks, 4 // ranks), data(workers=workers)
    loaders = [BatchLoader(dataset, keys, batch, rank, seed=5) for rank in range(ranks)]
    if start:
        for loader in loaders:
            loader.seek(start)
    steps = [[drawn(loader, 1)[0][0] for loader in loaders] for _ in range(start, 24, 4)]
    for loader in loaders:
        loader._steps.close()  # type: ignore[attr-defined]  # and its processes end
    return [number for step in steps for part in step for number in part]


@pytest.mark.parametrize("kind", NOISY)
@pytest.mark.at_most(1)
def test_what_a_sample_draws_follows_from_its_position_alone(kind: str) -> None:
    dataset = NOISY[kind]
    expected = by_position(dataset, workers=0, ranks=1)
    assert len(set(expected)) == 24
    for ranks in (2, 4):
        assert by_position(dataset, 0, ranks) == expected
    for workers in (0, 1) if kind == "walk" else (0, 1, 4):
        torch.manual_seed(workers)
        assert by_position(dataset, workers, ranks=1) == expected
        assert by_position(dataset, workers, ranks=2, start=12) == expected[12:]


def collate_with_noise(samples: list[float]) -> Tensor:
    return torch.tensor([noise() for _ in samples])


@pytest.mark.parametrize(("dataset", "workers"), [(Noise(), (0, 1, 4)), (NoisyWalk(), (0, 1))])
def test_what_a_batch_draws_follows_from_its_position_and_rank(
    dataset: object,
    workers: tuple[int, ...],
) -> None:
    def loaded(workers: int, rank: int, start: int = 0) -> list[list[list[float]]]:
        keys = data(workers=workers)
        loader = BatchLoader(dataset, keys, plan(2, 2, 2), rank, seed=5, collate=collate_with_noise)
        loader.seek(start)
        found = drawn(loader, 3 - start // 8)
        loader._steps.close()  # type: ignore[attr-defined]
        return found

    ranks = [loaded(0, rank) for rank in range(2)]
    numbers = [number for steps in ranks for step in steps for micro in step for number in micro]
    assert len(set(numbers)) == len(numbers) == 24
    for rank in range(2):
        for number in workers:
            assert loaded(number, rank) == ranks[rank]
            assert loaded(number, rank, start=8) == ranks[rank][1:]


def state_of_all() -> list[Any]:
    numpys = [str(part) for part in np.random.get_state()]
    return [random.getstate(), torch.get_rng_state().tolist(), numpys]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset", [Numbers(8), *NOISY.values()])
def test_reading_leaves_the_ranks_own_streams_alone(dataset: object, workers: int) -> None:
    torch.manual_seed(1)
    np.random.normal()  # the second of a pair is held back
    before = state_of_all()
    keys = data(workers=workers)
    loader = BatchLoader(dataset, keys, plan(1, 2), rank=0, seed=5, collate=collate_with_noise)
    drawn(loader, 3)
    loader.seek(4)
    drawn(loader, 1)
    loader._steps.close()  # type: ignore[attr-defined]
    evaluations = []
    for _ in range(2):
        batches = eval_batches(dataset, 2, 0, 1, 8, collate_with_noise, seed=3)
        evaluations.append([micro.batch.tolist() for micro in batches])
    assert evaluations[0] == evaluations[1]
    assert state_of_all() == before


def test_ragged_samples_with_a_collate_function() -> None:
    ragged = [torch.arange(length) for length in (1, 3, 2, 2)]

    def pad(samples: list[Tensor]) -> dict[str, Tensor]:
        return {"input_ids": torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)}

    loader = BatchLoader(ragged, data(), plan(1, 2, 2), rank=0, seed=0, collate=pad)
    step = loader.next_step()
    assert step is not None
    assert [micro.batch["input_ids"].tolist() for micro in step] == [
        [[0, 0, 0], [0, 1, 2]],
        [[0, 1], [0, 1]],
    ]
    assert [micro.num_tokens for micro in step] == [6, 4]


class Faulty:
    """Sample 5 cannot be read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise KeyError("no such file")
        return index


class FaultyWalk:
    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        raise KeyError("no such file")


class AllAtOnce(Faulty):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "where"),
    [
        (Faulty(), "at index 5"),
        (AllAtOnce(), "at one of the indices 4-7"),
        (FaultyWalk(), "after 5 samples of pass 1"),
    ],
)
def test_a_sample_that_cannot_be_read_is_named(dataset: object, where: str, workers: int) -> None:
    loader = BatchLoader(dataset, data(workers=workers), plan(1, 4), rank=0, seed=0)
    loader.next_step()
    with pytest.raises(UserCodeError) as caught:
        loader.next_step()
    first, *rest = str(caught.value).splitlines()
    assert first == f"reading the training data failed {where}"
    assert rest[-1] == "KeyError: 'no such file'"
    assert all("test_loader.py" in line for line in rest if line.lstrip().startswith("File "))
    assert "zrun: " not in str(caught.value)


@dataclass
class Boxed:
    value: int


@pytest.mark.parametrize("walks", [False, True])
@pytest.mark.parametrize(
    ("samples", "told"),
    [
        ([torch.zeros(1), torch.zeros(2)], "the sample has shape (1,) at {} 0 and (2,) at {} 1"),
        ([{"x": [1, 2]}, {"x": [1, 2, 3]}], "['x'] has length 2 at {} 0 and 3 at {} 1"),
        ([{"x": 1, "y": 2}, {"x": 1}], "the sample has 'y' at only one of {} 0 and {} 1"),
        ([(1, 2), (3, None)], "[1] is None at {} 1"),
        ([None, None], "the sample is None at {} 0"),
        ([Boxed(1), Boxed(2)], "the sample is Boxed at {} 0, which cannot become a tensor"),
        ([(1, 2.0), (1, "a")], "[1] has type float at {} 0 and str at {} 1"),
    ],
)
def test_samples_of_which_no_batch_is_made_are_named(
    samples: list[Any], told: str, walks: bool
) -> None:
    dataset = Listed(samples) if walks else samples
    loader = BatchLoader(dataset, data(), plan(1, 2), rank=0, seed=0)
    with pytest.raises(UserCodeError) as caught:
        loader.next_step()
    told = told.replace("{}", "sample" if walks else "index")
    advice = "; write a function that makes a batch of such samples, data.collate"
    if "None" in told:
        advice = ": does __getitem__ return it on every path?"
    assert str(caught.value).startswith(f"reading the training data failed: {told}{advice}\n")
    assert "collate.py" in str(caught.value)


class Listed(IterableDataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


def test_a_collate_function_that_raises_names_its_samples() -> None:
    def refuse(samples: list[Any]) -> Any:
        raise ValueError("not mine")

    loader = BatchLoader([7, 7, 7], data(), plan(1, 3), rank=0, seed=0, collate=refuse)
    with pytest.raises(
        UserCodeError, match=r"^reading the training data failed with a batch of indices 0-2\n"
    ):
        loader.next_step()


@pytest.mark.parametrize("walks", [False, True])
def test_what_a_rank_read_in_a_step_is_known_on_every_rank(walks: bool) -> None:
    dataset = Walk(12) if walks else Numbers(12)
    batch = plan(2, 2, accumulation=2)
    ranks = [BatchLoader(dataset, data(), batch, rank, 0, epochs=1) for rank in range(2)]
    for loader in ranks:
        own = [loader.next_step(), loader.next_step()][-1]
        assert own is not None
        assert loader.last_step == range(8, 12)
        noun = ("samples", "stream") if walks else ("indices", "dataset")
        assert loader.samples_of(range(8), 1) == f"{noun[0]} 4-7 of the {noun[1]}"
        assert loader.samples_of(range(8), 1, 1) == f"{noun[0]} 6-7 of the {noun[1]}"
    last = [loader.samples_of(loader.last_step, rank, 0) for rank, loader in enumerate(ranks)]
    assert [text.split()[1] for text in last] == ["8-9", "10-11"]


def test_samples_are_named_in_their_order() -> None:
    assert in_words([3, 4, 5, 9, 1, 0]) == "3-5, 9, 1, 0"
    assert in_words(range(0, 200, 2)).endswith("60, 62, ... (100 in all)")


@pytest.mark.parametrize(
    ("dataset", "keys", "message"),
    [
        ([], {}, "the dataset is empty: list has length 0"),
        (Walk(0), {}, "the dataset is empty: Walk yielded no sample"),
        (3, {}, "data must return a dataset: int has neither"),
        (None, {}, "data must return a dataset, and returned None: does it lack a return?"),
        (DataLoader([1, 2]), {}, "returned a DataLoader: zrun makes the batches"),
        (iter([1, 2]), {}, "in its second pass: it can be iterated only once"),
        (
            Walk(3),
            {"workers": 2},
            "data.workers: 2 processes would each yield the whole stream of Walk",
        ),
        (Walk(3), {"shuffle": True}, "data.shuffle: Walk is an iterable dataset"),
    ],
)
def test_unusable_datasets_are_named(dataset: object, keys: dict[str, Any], message: str) -> None:
    with pytest.raises((JobError, UserCodeError)) as error:
        BatchLoader(dataset, data(**keys), plan(1, 4), rank=0, seed=0).next_step()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dataset", [Numbers(11), Walk(11)])
@pytest.mark.parametrize("limit", [None, 7, 100])
def test_evaluation_sees_every_sample_once(dataset: object, limit: int | None) -> None:
    ranks = [list(eval_batches(dataset, 2, rank, 3, limit)) for rank in range(3)]
    assert len({len(batches) for batches in ranks}) == 1
    counted = [
        n
        for batches in ranks
        for micro in batches
        if micro.num_samples
        for n in micro.batch.tolist()
    ]
    assert sorted(counted) == list(range(min(limit or 11, 11)))
    assert sum(micro.num_samples for batches in ranks for micro in batches) == len(counted)


class Pair(NamedTuple):
    left: Tensor
    right: list[Tensor]


@dataclass
class Record:
    values: Tensor
    name: str


def test_to_device_keeps_every_container() -> None:
    meta = torch.device("meta")
    host = torch.zeros(2)
    batch = OrderedDict(pair=Pair(host, [host]), record=Record(host, "a"), plain=(host, 3, None))
    moved = to_device(batch, meta)
    assert type(moved) is OrderedDict
    assert isinstance(moved["pair"], Pair)
    assert moved["record"].name == "a"
    assert moved["plain"][1:] == (3, None)
    tensors = [
        moved["pair"].left,
        moved["pair"].right[0],
        moved["record"].values,
        moved["plain"][0],
    ]
    assert all(tensor.is_meta for tensor in tensors)
    assert not batch["pair"].left.is_meta  # the given batch is left as it was
    assert MicroBatch.of(batch, 1).to(meta).batch["pair"].left.is_meta


def test_tokens_are_the_input_ids_or_the_first_integer_matrix() -> None:
    ids, floats = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(4, 5)
    assert count_tokens({"mask": torch.zeros(9, 9, dtype=torch.int64), "input_ids": ids}) == 6
    assert count_tokens((floats, torch.zeros(7, dtype=torch.int64), ids)) == 6
    assert count_tokens((floats, torch.zeros(3, 3, dtype=torch.bool))) == 0
    graph = {"nodes": floats, "edge_index": ids, "attention_mask": ids, "labels": ids}
    assert count_tokens(graph) == 0
    assert count_tokens({**graph, "tokens": ids}) == 6
    assert MicroBatch.of(ids, 0).num_tokens == 0


class WalkWithLength(Walk):
    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize("dataset", [Numbers(10), WalkWithLength(10)])
def test_the_steps_of_epochs_are_known(dataset: Any) -> None:
    loader = BatchLoader(dataset, data(), plan(1, 4), 0, 0, epochs=3)
    assert loader.total_steps() == 8  # 30 samples; the last step has 2
    made = drawn(loader, 5)
    assert loader.total_steps(steps=5, cursor=loader.cursor) == 8
    while loader.next_step() is not None:
        made.append([])
    assert len(made) == 8
    larger = BatchLoader(dataset, data(), plan(1, 10), 0, 0, epochs=3)
    assert larger.total_steps(steps=5, cursor=20) == 6  # goes on with another global batch


def test_the_steps_of_other_runs_are_not_known() -> None:
    assert BatchLoader(Walk(10), data(), plan(1, 4), 0, 0, epochs=3).total_steps() is None
    assert BatchLoader(Numbers(10), data(), plan(1, 4), 0, 0).total_steps() is None
