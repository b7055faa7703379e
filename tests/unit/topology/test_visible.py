"""Which GPUs CUDA_VISIBLE_DEVICES leaves, and what is said where CUDA says nothing."""

from __future__ import annotations

import pytest

from zrun.topology.visible import NamedGpu, visible

GPUS = [NamedGpu(index, f"GPU-{index}abc") for index in range(3)]
WITH_MIG = [
    NamedGpu(0, "MIG-aa11"),
    NamedGpu(0, "MIG-aa22"),
    NamedGpu(1, "GPU-1abc"),
    NamedGpu(3, "GPU-3abc"),  # 2 is lost
]


@pytest.mark.parametrize(
    ("wanted", "places"),
    [
        (None, (0, 1, 2)),
        ("2,0", (2, 0)),
        ("2, 01", (2, 1)),
        ("GPU-1", (1,)),
        ("GPU-2abc,GPU-0", (2, 0)),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("1,-1,2", (1,)),
    ],
)
def test_gpus_are_named_by_number_or_by_uuid(wanted: str | None, places: tuple[int, ...]) -> None:
    environ = {} if wanted is None else {"CUDA_VISIBLE_DEVICES": wanted}
    found = visible(GPUS, environ)
    assert (found.places, found.trouble) == (places, None)


@pytest.mark.parametrize(
    ("wanted", "places", "trouble"),
    [
        ("0,9,1", (0,), "'9' is no GPU of this host, which has 0, 1, 2, so CUDA shows only the 1"),
        ("9", (), "'9' is no GPU of this host, which has 0, 1, 2, so CUDA shows no GPU"),
        ("GPU-9", (), "'GPU-9' is no GPU of this host, which has GPU-0abc, GPU-1abc, GPU-2abc, so"),
        ("GPU-", (), "GPU- is the start of 3 UUIDs"),
        ("0,GPU-1", (0,), "'GPU-1' stands among numbers"),
        ("GPU-1,0", (1,), "'0' stands among UUIDs"),
        ("1,1", (), "names 1 twice, and then CUDA shows no GPU"),
        ("cuda:0", (), "'cuda:0' is no GPU of this host"),
        ("0,", (0,), "'' is no GPU of this host"),
    ],
)
def test_what_cuda_leaves_out_is_named(wanted: str, places: tuple[int, ...], trouble: str) -> None:
    found = visible(GPUS, {"CUDA_VISIBLE_DEVICES": wanted})
    assert found.places == places
    assert found.trouble is not None
    assert found.trouble.startswith("CUDA_VISIBLE_DEVICES")
    assert trouble in found.trouble


@pytest.mark.parametrize(
    ("wanted", "places"),
    [("MIG-aa22", (1,)), ("MIG-aa22,MIG-aa11", (1, 0)), ("0", (0,)), ("1,3", (2, 3))],
)
def test_slices_are_named_by_uuid(wanted: str, places: tuple[int, ...]) -> None:
    """The number of a GPU in MIG mode is its first slice, as for CUDA."""
    assert visible(WITH_MIG, {"CUDA_VISIBLE_DEVICES": wanted}).places == places


def test_names_of_slices_that_are_none_are_explained() -> None:
    found = visible(WITH_MIG, {"CUDA_VISIBLE_DEVICES": "MIG-GPU-8a-1/7/0"})
    assert found.places == ()
    assert found.trouble is not None
    assert "is a name of drivers before 470; nvidia-smi -L has the slice's UUID" in found.trouble
    lost = visible(WITH_MIG, {"CUDA_VISIBLE_DEVICES": "2"})
    assert lost.trouble is not None
    assert "'2' is no GPU of this host, which has 0, 1, 3" in lost.trouble


@pytest.mark.parametrize(
    ("wanted", "hidden"),
    [
        ("", "CUDA_VISIBLE_DEVICES=''"),
        ("-1", "CUDA_VISIBLE_DEVICES=-1"),
        ("-1,0", "CUDA_VISIBLE_DEVICES=-1,0"),
        ("NoDevFiles", "CUDA_VISIBLE_DEVICES=NoDevFiles"),
        ("1,-1", None),
        ("9", None),
    ],
)
def test_what_hides_all_gpus_is_named(wanted: str, hidden: str | None) -> None:
    assert visible(GPUS, {"CUDA_VISIBLE_DEVICES": wanted}).hidden == hidden
    assert visible([], {"CUDA_VISIBLE_DEVICES": wanted}).hidden is None


def test_a_machine_without_gpus_may_have_the_variable() -> None:
    """Login scripts set it everywhere."""
    assert visible([], {"CUDA_VISIBLE_DEVICES": "0"}).trouble is None
