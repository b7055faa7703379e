"""What hooks will ask of the model, and it does not do, is refused before anything trains."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zrun.job.structure import _inspect
from zrun_core.errors import JobError
from zrun_core.models.gpt import gpt
from zrun_core.spine.config import JobConfig
from zrun_core.train.hook_check import check_hooks

HERE = Path(__file__).parent
DIST = HERE.parents[1] / "dist"  # has models as users write them
SAMPLE = "zrun_core.models.generate:sample"


class Pair(nn.Module):
    """An encoder and a decoder, whose `generate` calls the encoder by itself."""

    def __init__(self, is_pair: bool = True) -> None:
        super().__init__()
        self.encoder = nn.Linear(2, 2)
        self.config = SimpleNamespace(is_encoder_decoder=is_pair)

    def get_encoder(self) -> nn.Module:
        return self.encoder

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        encoded: torch.Tensor = self.encoder(x)
        return encoded


def generates(context: Any) -> None:
    if not context.step % 2:
        with context.gathered() as model, torch.no_grad():
            model.eval()
            model.generate(torch.ones(1, 2))


def generates_at_once(run: Any, length: int = 2) -> None:
    with run.gathered():
        run.model.generate(torch.ones(1, length))


def has_another_generate(context: Any, writer: Any = None) -> None:
    with context.gathered() as model:
        model.eval()
    writer.generate(torch.ones(1, 2))


class Object:
    def __call__(self, context: Any) -> None:
        context.model.generate()


def job(hook: Any, pp: int = 1) -> JobConfig:
    keys = {"name": "t", "model": "m:m", "data": "d:d", "steps": 1, "batch": {"global": 4}}
    return JobConfig.model_validate({**keys, "parallel": {"pp": pp}, "hooks": {"on_eval": hook}})


@pytest.mark.parametrize(
    ("model", "args", "words"),
    [
        (
            nn.Linear(1, 1),
            {},
            "hooks.on_eval: sample continues text by a GPT of zrun's, not by a L",
        ),
        (gpt("llama", dim=32, depth=1, heads=2, seq_len=8), {"prompt": ""}, "no tokens to contin"),
        (
            gpt("llama", dim=32, depth=1, heads=2, seq_len=8, vocab_size=100),
            {"prompt": "def f"},
            "has token 102, read as bytes (no tokenizer is named), and the model knows 100 tokens",
        ),
    ],
)
def test_what_sample_cannot_continue(model: nn.Module, args: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as error:
        check_hooks(job({"call": SAMPLE, "args": args}), HERE, model)
    assert words in str(error.value)


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    args = {"tokenizer": str(tmp_path / "none.json")}
    model = gpt("llama", dim=32, depth=1, heads=2, seq_len=8)
    with pytest.raises(JobError, match="cannot read"):
        check_hooks(job({"call": SAMPLE, "args": args}), HERE, model)
    check_hooks(job(SAMPLE), HERE, model)


@pytest.mark.parametrize("name", ["generates", "generates_at_once"])
def test_a_pair_generates_by_no_pipeline(name: str) -> None:
    hook = f"{__file__}:{name}"
    with pytest.raises(JobError) as error:
        check_hooks(job(hook, pp=2), HERE, Pair())
    assert str(error.value).startswith(f"hooks.on_eval: {hook} calls generate of the model (line ")
    assert str(error.value).endswith("zrun ckpt export), or write pp: 1")
    lines = Path(__file__).read_text().splitlines()
    line = int(str(error.value).partition("(line ")[2].partition(")")[0])
    assert ".generate(torch" in lines[line - 1]


@pytest.mark.parametrize(
    ("name", "pp", "is_pair"),
    [
        ("generates", 1, True),
        ("generates", 2, False),
        ("has_another_generate", 2, True),
        ("Object", 2, True),
    ],
)
def test_other_hooks_are_left_alone(name: str, pp: int, is_pair: bool) -> None:
    check_hooks(job(f"{__file__}:{name}", pp), HERE, Pair(is_pair))


def test_check_refuses_it() -> None:
    """As `zrun check` calls it: with the model that the job builds."""
    keys = {
        "name": "t",
        "model": "zrun_core.models.mlp:mlp",
        "data": "runs.py:Plain",
        "steps": 1,
        "batch": {"global": 4, "micro": 2},
        "hooks": {"on_step": SAMPLE},
    }
    with pytest.raises(JobError, match=r"hooks\.on_step: sample continues text by a GPT"):
        _inspect(JobConfig.model_validate(keys), DIST, None)
