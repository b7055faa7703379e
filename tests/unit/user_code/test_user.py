"""Loading the user's code: what is found, what is refused, and what the errors say."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from zrun_core.data.batch import MicroBatch
from zrun_core.distributed.comm import Comm
from zrun_core.errors import ExitCode, JobError, PeerError, UserCodeError
from zrun_core.spine import tracebacks
from zrun_core.spine.sections.section import Ref
from zrun_core.user_code import user

TRAIN = """
import torch
from torch import nn

LIMIT = 3
net = nn.Linear(2, 2)
runs = []

class Small(nn.Module):
    class Inner:
        pass

def build_model(width=2, depth=1):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

def wrong():
    return [1]

def raises():
    return inner(torch.zeros(2, 3))

def inner(x):
    return torch.zeros(4, 5) @ x

def leaves():
    raise SystemExit(1)

def loss(model, batch, scale=1):
    return scale
"""


@pytest.fixture
def job_dir(tmp_path: Path) -> Iterator[Path]:
    """A folder with the user's `train.py`; modules imported from it are forgotten afterwards."""
    (tmp_path / "train.py").write_text(TRAIN)
    modules, path = set(sys.modules), list(sys.path)
    user.add_to_path(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def ref(call: str, **args: object) -> Ref:
    return Ref(call=call, args=args)


def test_job_dir_comes_first_once(job_dir: Path) -> None:
    user.add_to_path(job_dir)
    assert sys.path[0] == str(job_dir)
    assert sys.path.count(str(job_dir)) == 1


@pytest.mark.parametrize(
    "call", ["train.py:build_model", "train:build_model", "./train.py:build_model"]
)
def test_factory_is_called_with_its_arguments(job_dir: Path, call: str) -> None:
    model = user.build_model(ref(call, depth=3), job_dir)
    assert isinstance(model, nn.Sequential)
    assert len(model) == 3


def test_file_and_module_are_one(job_dir: Path) -> None:
    assert user.load(ref("train.py:runs"), job_dir) is user.load(ref("train:runs"), job_dir)


def test_dotted_attributes_and_pickles(job_dir: Path) -> None:
    inner = user.load(ref("train.py:Small.Inner"), job_dir)
    assert pickle.loads(pickle.dumps(inner)) is inner


def test_a_file_in_a_folder_finds_its_neighbours(job_dir: Path) -> None:
    (job_dir / "sub").mkdir()
    (job_dir / "sub" / "near_by.py").write_text("VALUE = 5")
    (job_dir / "sub" / "nested_job.py").write_text(
        "from near_by import VALUE\ndef get(): return VALUE"
    )
    assert user.call(ref("sub/nested_job.py:get"), job_dir) == 5
    assert sys.path[0] == str(job_dir)


def test_function_binds_arguments(job_dir: Path) -> None:
    assert user.function(ref("train.py:loss", scale=7), job_dir)(None, None) == 7
    assert user.call(ref("train.py:loss", scale=7), job_dir, model=None, batch=None, scale=1) == 7


FUNCTIONS = """
import functools
import torch

def pad(samples, to=0):
    return [to, *samples]

def make_pad(to=0, more=1):
    return lambda samples: samples

def make_nothing():
    return pad

class Pad:
    def __init__(self, to=0):
        self.to = to

    def __call__(self, samples):
        return [self.to, *samples]

class Settings:
    pass

loss_of = torch.nn.CrossEntropyLoss()
"""


def test_functions_of_a_job_are_bound_not_called_and_classes_made(job_dir: Path) -> None:
    (job_dir / "functions.py").write_text(FUNCTIONS)
    takes = user.TAKES["data.collate"]
    for call in ("functions.py:pad", "functions.py:Pad"):
        assert user.function(ref(call, to=7), job_dir, takes)([1]) == [7, 1]
    assert user.function(ref("functions.py:pad"), job_dir, takes)([1]) == [0, 1]
    user.function(
        ref("functions.py:loss_of"), job_dir, user.TAKES["loss"]
    )  # its signature takes anything
    user.function(ref("builtins:len"), job_dir, takes)
    with pytest.raises(JobError, match=r"data\.collate returned a function in place of a batch"):
        MicroBatch.of(user.function(ref("functions.py:make_pad", more=2), job_dir, takes)([1]), 1)


@pytest.mark.parametrize(
    ("call", "args", "message"),
    [
        (
            "make_pad",
            {"to": 7},
            "multiple values for argument 'to': it is called as (samples, to=7), and takes to",
        ),
        (
            "make_nothing",
            {},
            "too many positional arguments: it is called as (samples), and takes nothing; to make",
        ),
        ("pad", {"too": 7}, "got an unexpected keyword argument 'too'; did you mean to?"),
        (
            "Pad",
            {"too": 7},
            "got an unexpected keyword argument 'too'; did you mean to? (it takes to)",
        ),
        (
            "Settings",
            {},
            "is a class without __call__: zrun makes one object of it with args, and calls that "
            "with (samples)",
        ),
    ],
)
def test_functions_that_cannot_be_called_so_are_refused(
    job_dir: Path, call: str, args: dict[str, int], message: str
) -> None:
    (job_dir / "functions.py").write_text(FUNCTIONS)
    with pytest.raises(JobError) as error:
        user.function(ref(f"functions.py:{call}", **args), job_dir, user.TAKES["data.collate"])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("trian.py:build_model", "there is no file {dir}/trian.py; did you mean train.py?"),
        (
            "trian:build_model",
            "there is no module 'trian' in {dir} nor among the installed packages; did you mean "
            "train?",
        ),
        ("train.sub:x", "there is no module 'train.sub'"),
        ("train.py:build_modle", "train.py has no 'build_modle'; did you mean build_model?"),
        ("train.py:Small.Iner", "train.py has no 'Iner'; did you mean Inner?"),
        ("train.py:LIMIT", "train.py:LIMIT is not callable: it is int; write a function"),
        ("train.py:net", "train.py:net is a Linear that was built on import"),
        ("os:system", "os:system is refused"),
        ("os.path:join", "os.path:join is refused"),
        ("subprocess:run", "subprocess:run is refused"),
        ("alias.py:shell", "alias.py:shell is refused"),
        ("random.py:f", "the module name 'random' is taken by"),
    ],
)
def test_a_wrong_reference_is_one_line(job_dir: Path, call: str, message: str) -> None:
    (job_dir / "alias.py").write_text("from os import system as shell")
    (job_dir / "random.py").write_text("def f(): pass")
    with pytest.raises(JobError) as error:
        user.build_model(ref(call), job_dir)
    assert message.format(dir=job_dir) in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == ExitCode.USAGE


def test_wrong_arguments_name_the_nearest(job_dir: Path) -> None:
    with pytest.raises(JobError) as error:
        user.build_model(ref("train.py:build_model", dpeth=2), job_dir)
    assert str(error.value) == (
        "train.py:build_model: got an unexpected keyword argument 'dpeth'; did you mean depth? (it "
        "takes width, depth)"
    )
    with pytest.raises(
        JobError, match=r"missing a required argument: 'model' \(it takes model, batch, scale\)"
    ):
        user.call(ref("train.py:loss"), job_dir)


def test_a_factory_without_a_module_says_its_type(job_dir: Path) -> None:
    with pytest.raises(
        UserCodeError, match=r"^model must return an nn.Module, train.py:wrong returned list$"
    ):
        user.build_model(ref("train.py:wrong"), job_dir)


def test_only_the_users_frames_are_shown(job_dir: Path) -> None:
    with pytest.raises(UserCodeError) as error:
        user.build_model(ref("train.py:raises"), job_dir)
    lines = str(error.value).splitlines()
    assert lines[0] == "train.py:raises failed"
    frames = [line for line in lines if line.lstrip().startswith("File ")]
    assert [frame.rpartition(" ")[2] for frame in frames] == ["raises", "inner"]
    assert all(str(job_dir / "train.py") in frame for frame in frames)
    assert lines[-1].startswith("RuntimeError: ")


def test_leaving_the_process_is_an_error(job_dir: Path) -> None:
    with pytest.raises(UserCodeError, match="SystemExit: 1"):
        user.call(ref("train.py:leaves"), job_dir)


@pytest.mark.parametrize(
    "fails",
    [
        lambda x: nn.Linear(3, 3)(x),
        lambda x: nn.Conv1d(3, 3, 1)(x.t()[None]),
        lambda x: x @ torch.ones(3, 3, dtype=torch.bfloat16),
    ],
)
def test_what_meets_float64_is_told_what_to_do(fails: Any) -> None:
    with pytest.raises(UserCodeError, match=r'as by x.astype\("float32"\)'), user.user_code("f"):
        fails(torch.ones(2, 3, dtype=torch.float64))
    with pytest.raises(UserCodeError) as other, user.user_code("forward failed"):
        nn.Linear(3, 3)(torch.ones(2, 4))
    assert "as by x.astype" not in str(other.value)


@pytest.mark.parametrize("call", ["broken.py:f", "broken:f"])
def test_an_import_that_fails_shows_the_users_frames(job_dir: Path, call: str) -> None:
    (job_dir / "broken.py").write_text("import train\nimport not_installed_here\n")
    for _ in range(2):  # a failed import is not remembered as done
        with pytest.raises(UserCodeError) as error:
            user.load(ref(call), job_dir)
        text = str(error.value)
        assert "importing" in text
        assert "ModuleNotFoundError: No module named 'not_installed_here'" in text
        assert text.count("File ") == 1
        assert f'File "{job_dir}/broken.py", line 2' in text
    assert "broken" not in sys.modules


def test_a_syntax_error_names_its_line(job_dir: Path) -> None:
    (job_dir / "typo.py").write_text("x = 1\ndef f(:\n    pass\n")
    with pytest.raises(UserCodeError) as error:
        user.load(ref("typo.py:f"), job_dir)
    assert str(error.value).count("File ") == 1
    assert f'File "{job_dir}/typo.py", line 2' in str(error.value)


def test_causes_are_reduced_too(job_dir: Path) -> None:
    (job_dir / "chain.py").write_text(
        "import json\n"
        "def f():\n"
        "    try:\n"
        "        json.loads('{')\n"
        "    except ValueError as error:\n"
        "        raise KeyError('config') from error\n"
    )
    with pytest.raises(
        UserCodeError, match=r"JSONDecodeError(.|\n)*direct cause(.|\n)*KeyError: 'config'"
    ):
        user.call(ref("chain.py:f"), job_dir)


def test_a_traceback_inside_the_message_is_reduced_too(job_dir: Path) -> None:
    """As torch reports what a data-loading process raised."""
    (job_dir / "samples.py").write_text(
        "from torch.utils.data import DataLoader\n"
        "class Samples(list):\n"
        "    def __getitem__(self, index):\n"
        "        raise ValueError('sample 3 is broken')\n"
        "def f():\n"
        "    return list(DataLoader(Samples([1, 2]), num_workers=1))\n"
    )
    with pytest.raises(UserCodeError) as error:
        user.call(ref("samples.py:f"), job_dir)
    lines = str(error.value).splitlines()
    frames = [line for line in lines if line.lstrip().startswith("File ")]
    assert [frame.rpartition(" ")[2] for frame in frames] == ["f", "__getitem__"]
    assert lines[-1] == "ValueError: sample 3 is broken"


def test_groups_of_exceptions_are_reduced_too(job_dir: Path) -> None:
    (job_dir / "group.py").write_text(
        "import json\n"
        "def f():\n"
        "    try:\n"
        "        json.loads('{')\n"
        "    except ValueError as error:\n"
        "        raise ExceptionGroup('both', [error, KeyError('x')])\n"
    )
    with pytest.raises(
        UserCodeError, match=r"ExceptionGroup: both(.|\n)*JSONDecodeError(.|\n)*KeyError: 'x'"
    ) as error:
        user.call(ref("group.py:f"), job_dir)
    assert "zrun_core" not in str(error.value)


def test_the_innermost_frame_stays_where_all_are_hidden() -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("zrun_core.no_such_module")
    error = caught.value
    error.__traceback__ = (
        error.__traceback__.tb_next if error.__traceback__ else None
    )  # this test's own frame
    assert tracebacks.user_traceback(error).count("File ") == 1


def test_an_error_that_was_never_raised_has_no_frames() -> None:
    assert tracebacks.user_traceback(ValueError("x")) == "ValueError: x"


def _wait_in_backward(message: str) -> None:
    """A hook of ours waits for another rank while autograd runs."""
    weight = torch.ones(1, requires_grad=True)
    comm = Comm(torch.device("cpu"))
    work: torch.futures.Future[None] = torch.futures.Future()
    work.set_exception(RuntimeError(message))
    weight.register_hook(lambda grad: comm.wait_for([cast(Any, work)]))
    weight.sum().backward()


def test_what_our_own_hooks_raise_is_not_the_users():
    with (
        pytest.raises(PeerError, match="another rank has ended"),
        user.user_code("backward failed"),
    ):
        _wait_in_backward("Connection closed by peer [127.0.0.1]:33210")
    with pytest.raises(RuntimeError, match="no such buffer"), user.user_code("backward failed"):
        _wait_in_backward("no such buffer")


def test_the_runtimes_own_files_are_where_it_looks_for_them() -> None:
    for path in (*user._MECHANISMS, *user._PASS_ON):
        assert os.path.exists(path), path


def test_what_autograd_says_of_the_users_graph_is_theirs():
    with (
        pytest.raises(UserCodeError, match="does not require grad"),
        user.user_code("backward failed"),
    ):
        torch.ones(()).backward()

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise AssertionError("mine")

    with pytest.raises(UserCodeError, match="mine"), user.user_code("backward failed"):
        Broken.apply(torch.ones((), requires_grad=True)).backward()
