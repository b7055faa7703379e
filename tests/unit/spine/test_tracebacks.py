"""What a person sees of an exception, and what a log keeps of it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from zrun_core.errors import OutOfMemoryError, UserCodeError
from zrun_core.spine.tracebacks import first_line, full_traceback, message_of, user_traceback
from zrun_core.user_code import user

DEEP = """
def descend(depth, visit):
    if depth == 0:
        return visit()
    return descend_again(depth - 1, visit)

def descend_again(depth, visit):
    return descend(depth, visit)

def refuse():
    raise IndexError("index out of range in self")
"""


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Path]:
    """An installed package `deeplib` whose functions call each other."""
    folder = tmp_path / "site-packages"
    (folder / "deeplib").mkdir(parents=True)
    (folder / "deeplib" / "__init__.py").write_text(DEEP)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield folder
    sys.path.remove(str(folder))
    del sys.modules["deeplib"]


def raised(code: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011  # whatever it is
        code()
    return caught.value


def frames(text: str) -> list[str]:
    """The functions of the frames in a traceback, and the lines that count others."""
    lines = [line.strip() for line in text.splitlines()]
    return [
        line.rpartition(" in ")[2] if line.startswith("File") else line
        for line in lines
        if line.startswith(("File", "..."))
    ]


def test_a_library_is_followed_from_the_users_last_frame_down(library: Path) -> None:
    deeplib = importlib.import_module("deeplib")

    def forward() -> None:
        deeplib.descend(1, deeplib.refuse)

    error = raised(forward)
    told = frames(user_traceback(error))
    assert told[-5:] == ["forward", "descend", "descend_again", "descend", "refuse"]
    assert user_traceback(error).endswith("IndexError: index out of range in self")


def test_many_frames_of_a_library_are_folded_and_the_whole_has_them(library: Path) -> None:
    deeplib = importlib.import_module("deeplib")
    error = raised(lambda: deeplib.descend(10, deeplib.refuse))
    told = frames(user_traceback(error))
    assert "... 14 frames in deeplib ..." in told
    assert told[-1] == "refuse"
    assert told[-9] == "descend"
    assert len(told) < 14
    assert full_traceback(error).count("deeplib/__init__.py") == 22
    assert "frames in" not in full_traceback(error)


def test_frames_above_the_users_last_one_are_the_users_only(library: Path) -> None:
    deeplib = importlib.import_module("deeplib")

    def mine() -> None:
        deeplib.refuse()

    told = frames(user_traceback(raised(lambda: deeplib.descend(10, mine))))
    assert told[-2:] == ["mine", "refuse"]
    assert "descend" not in told


def test_a_recursion_without_end_is_short_on_the_screen() -> None:
    def even(number: int) -> int:
        return odd(number + 1)

    def odd(number: int) -> int:
        return even(number + 1)

    error = raised(lambda: even(0))
    assert isinstance(error, RecursionError)
    text = user_traceback(error)
    assert len(text.splitlines()) < 130
    assert "frames in test_tracebacks.py ..." in text
    assert text.splitlines()[-1].startswith("RecursionError: maximum recursion depth exceeded")
    assert full_traceback(error).count(" in even") > 300


def test_a_message_without_end_is_cut_where_it_is_shown() -> None:
    text = user_traceback(ValueError("x" * 1_000_000))
    assert len(text) < 1200
    assert "(999012 characters more)" in text
    many = user_traceback(ValueError("\n".join(f"line {number}" for number in range(5000))))
    assert len(many.splitlines()) < 50
    assert "line 4999" in many
    assert len(full_traceback(ValueError("x" * 1_000_000), 1000)) < 1100
    wide = ValueError("\n".join("é" * 900 for _ in range(5000)))
    assert (
        len(json.dumps([user_traceback(wide), full_traceback(wide, 24_000)])) < 1 << 18
    )  # what an agent reads


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_exception_that_cannot_say_anything_is_told_all_the_same() -> None:
    assert "SpeechlessError: <exception str() failed>" in user_traceback(SpeechlessError())
    assert message_of(SpeechlessError()) == "<its message cannot be read: RuntimeError>"
    assert first_line(SpeechlessError())
    with (
        pytest.raises(UserCodeError, match=r"forward failed\n(.|\n)*Speechless"),
        user.user_code("forward failed"),
    ):
        raise SpeechlessError


def test_nothing_that_acts_on_a_terminal_is_left() -> None:
    text = user_traceback(ValueError("\x1b]0;title\x07 \x1b[2J \x1b[31mred\x1b[0m"))
    assert text == "ValueError: ^[]0;title^G  red"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: torch.Tensor, need: int = 0) -> torch.Tensor:
        if need:
            x = torch.empty(need)
        try:
            return self.blocks[0](x)
        except RuntimeError as error:
            raise ValueError("a block failed") from error


def test_the_module_in_which_it_was_raised_is_named() -> None:
    with pytest.raises(UserCodeError) as caught, user.user_code("forward failed"):
        Block()(torch.zeros(2, 4))
    first, *rest = str(caught.value).splitlines()
    assert first == "forward failed in net.2 (Linear)"
    assert frames("\n".join(rest)) == [
        "test_the_module_in_which_it_was_raised_is_named",
        "forward",
        "forward",
    ]
    assert rest[-1].startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")


def test_the_module_is_that_of_the_first_cause() -> None:
    with pytest.raises(UserCodeError) as caught, user.user_code("forward failed"):
        Model()(torch.zeros(2, 4))
    assert str(caught.value).splitlines()[0] == "forward failed in blocks.0.net.2 (Linear)"
    assert "ValueError: a block failed" in str(caught.value)


def test_a_module_that_is_only_being_made_has_a_class() -> None:
    class Hasty(nn.Module):
        def __init__(self) -> None:
            self.net = nn.Linear(2, 2)

    with pytest.raises(UserCodeError) as caught, user.user_code("train.py:build failed"):
        Hasty()
    assert str(caught.value).splitlines()[0] == "train.py:build failed in Hasty"
    assert "cannot assign module before Module.__init__() call" in str(caught.value)


def test_an_error_of_a_gpu_says_how_to_find_its_line() -> None:
    with pytest.raises(UserCodeError) as caught, user.user_code("backward failed"):
        raise RuntimeError("CUDA error: device-side assert triggered")
    assert "with env: {CUDA_LAUNCH_BLOCKING: 1} in the job" in str(caught.value).splitlines()[0]


def test_memory_of_a_gpu_that_runs_out_names_the_users_line() -> None:
    with pytest.raises(OutOfMemoryError) as caught, user.user_code("forward failed"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert ", raise torch.OutOfMemoryError(" in str(caught.value)
    assert str(caught.value).endswith(
        "out of memory: CUDA out of memory. Tried to allocate 2.00 GiB."
    )


def test_memory_that_runs_out_names_the_users_line() -> None:
    with pytest.raises(OutOfMemoryError) as caught, user.user_code("forward failed"):
        Model()(torch.zeros(2, 4), need=1 << 50)
    text = str(caught.value)
    assert text.startswith("forward failed in Model at ")
    assert "test_tracebacks.py:" in text
    assert ", x = torch.empty(need): out of memory: " in text
