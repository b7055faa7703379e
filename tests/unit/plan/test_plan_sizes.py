"""What a size stands for: near what is asked, and near what was published."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zrun_core.errors import JobError
from zrun_core.models.gpt import gpt
from zrun_core.plan.question.size import gpt_of_size, parse_count


@pytest.mark.parametrize(
    ("size", "layers", "hidden"),
    [
        ("124M", 12, 768),
        ("1.7B", 24, 2304),
        ("7.5B", 36, 4096),
        ("175B", 96, 12288),
        ("1T", 128, 25600),
    ],
)
def test_a_size_alone_is_near_the_published_shape(size: str, layers: int, hidden: int) -> None:
    found = gpt_of_size(size)
    assert found.num_params == pytest.approx(parse_count(size), rel=0.003)
    assert layers / 1.6 <= found.layers <= layers * 1.6
    assert hidden / 1.35 <= found.hidden <= hidden * 1.35
    assert found.ffn == pytest.approx(4 * found.hidden, rel=0.05)


@pytest.mark.parametrize("size", ["100k", "5M", "124M", "7.5B", "1T"])
def test_the_model_has_as_many_parameters_as_are_counted(size: str) -> None:
    found = gpt_of_size(size)
    with torch.device("meta"):
        model = gpt(**found.args())
    assert sum(param.numel() for param in model.parameters()) == found.num_params


@hypothesis.settings(deadline=None, max_examples=50)
@given(exponent=st.floats(5.01, 14.99))
def test_any_size_has_a_model(exponent: float) -> None:
    text = f"{10 ** (exponent - 3):.0f}k" if exponent < 9 else f"{10 ** (exponent - 9):.3f}B"
    params, found = parse_count(text), gpt_of_size(text)
    assert found.num_params == pytest.approx(params, rel=0.005 if params >= 10**8 else 0.05)
    assert found.hidden % found.heads == 0


def test_samples_may_be_longer_than_usual_and_shorter() -> None:
    usual = gpt_of_size("1B")
    assert usual.args(512) == usual.args() == {**usual.args(4096), "seq_len": 2048}
    assert usual.args(4096)["seq_len"] == 4096


@pytest.mark.parametrize(
    "text", ["", "7.5", "B", "-7B", "7.5 GB", "1e9", "7,5B", "0B", "2000T", "9" * 30 + "B", "7.5BB"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(JobError, match="write "):
        parse_count(text)


def test_sizes_are_exact() -> None:
    assert [parse_count(text) for text in ("7.5B", "124M", "1t", " 350K ", "0.3b")] == [
        7_500_000_000,
        124_000_000,
        10**12,
        350_000,
        300_000_000,
    ]
