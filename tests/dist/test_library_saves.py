"""Checkpoints of a user's own loop go on bit for bit, on other ranks and at other stages too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_gan import batch, discriminator, generator
from test_library import start
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import zrun_core
from zrun_core.errors import ZrunError


class Duel:
    """A GAN, its optimizers, schedule and scaler."""

    def __init__(self, stage: int, precision: str) -> None:
        start()
        zero = {"stage": stage, "bucket": 1 << 13}
        self.made = zrun_core.shard(generator, zero=zero, precision=precision)
        self.judge = zrun_core.shard(discriminator, zero=zero, precision=precision)
        self.for_made = zrun_core.optimizer(self.made, "adamw", lr=1e-3)
        self.for_judge = zrun_core.optimizer(self.judge, "sgd", lr=1e-2, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.for_made, 0.9)
        self.scaler = zrun_core.GradScaler(init_scale=1024.0, growth_interval=3, enabled=precision == "fp16")

    @property
    def models(self) -> dict[str, torch.nn.Module]:
        return {"made": self.made, "judge": self.judge}

    def train(self, first: int, stop: int) -> list[float]:
        run, losses = start(), []
        for step in range(first, stop):
            real, noise = batch(step)
            fake = self.made(noise + 0.01 * torch.randn(noise.shape))  # from this rank's own stream
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            self.for_judge.zero_grad()
            judge_loss = bce(self.judge(real), ones) + bce(self.judge(fake.detach()), zeros)
            self.scaler.scale(judge_loss).backward()
            self.scaler.step(self.for_judge)
            made_loss = bce(self.judge(fake), ones)
            self.scaler.scale(made_loss).backward()
            self.scaler.step(self.for_made)
            self.scaler.update()
            self.schedule.step()
            losses += [run.mean(judge_loss), run.mean(made_loss), self.scaler.get_scale()]
        self.for_judge.zero_grad()
        return losses

    def save(self, folder: str, step: int) -> None:
        extra = {"schedule": self.schedule.state_dict(), "scaler": self.scaler.state_dict()}
        zrun_core.save(folder, self.models, step=step, extra=extra)

    def load(self, folder: str) -> int:
        saved = zrun_core.load(folder, self.models)
        assert saved is not None
        self.schedule.load_state_dict(saved.extra["schedule"])
        self.scaler.load_state_dict(saved.extra["scaler"])
        return saved.step


def whole(stage: int, precision: str, folder: str) -> list[float]:
    duel = Duel(stage, precision)
    duel.train(0, 4)
    duel.save(folder, 4)
    return duel.train(4, 8)


def resumed(stage: int, precision: str, folder: str) -> list[float]:
    duel = Duel(stage, precision)
    assert zrun_core.load(f"{folder}-none", duel.models) is None
    duel.train(0, 1)  # what it does before does not matter
    return duel.train(duel.load(folder), 8)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_two_models_go_on_bit_for_bit(ranks, tmp_path, stage, precision):
    folder = str(tmp_path / "duel")
    assert ranks(2).run(whole, stage, precision, folder) == ranks(2).run(resumed, stage, precision, folder)


def weights(stage: int, folder: str) -> dict[str, Any]:
    duel = Duel(stage, "fp32")
    duel.load(folder)
    found: dict[str, Any] = {"lr": duel.for_made.param_groups[0]["lr"]}
    for title, model in duel.models.items():
        with zrun_core.gathered(model):
            found |= {f"{title}.{name}": param.numpy().copy() for name, param in model.named_parameters()}
    return found


def test_two_models_open_at_any_stage_on_any_number_of_ranks(ranks, tmp_path):
    folder = str(tmp_path / "duel")
    ranks(2).run(whole, 3, "fp32", folder)
    first = ranks(2).run(weights, 3, folder)[0]
    assert first["lr"] == pytest.approx(1e-3 * 0.9**4)
    for world_size, stage in ((1, 0), (3, 2), (2, 1)):
        for found in ranks(world_size).run(weights, stage, folder):
            assert all((found[name] == value).all() for name, value in first.items() if name != "lr")
            assert found["lr"] == first["lr"]


def mistakes(folder: str) -> dict[str, str]:
    run = start()
    duel = Duel(2, "fp32")
    told: dict[str, str] = {}

    def says(key: str, action: Any) -> None:
        with pytest.raises(ZrunError) as caught:
            action()
        told[key] = f"{type(caught.value).__name__}: {caught.value}"

    bare = zrun_core.shard(generator)
    says("no optimizer", lambda: zrun_core.save(folder, bare, step=1))
    says("name", lambda: zrun_core.save(folder, {"a/b": duel.made}, step=1))
    says("nothing", lambda: zrun_core.save(folder, {}, step=1))
    says("extra", lambda: zrun_core.save(folder, duel.made, step=1, extra={"a": torch.ones(1)}))
    says("keep", lambda: zrun_core.save(folder, duel.made, step=1, keep=1))
    says("nowhere", lambda: zrun_core.save("/proc/nowhere", duel.made, step=1))
    duel.made(batch(0)[1]).mean().backward()
    says("gradients", lambda: zrun_core.save(folder, duel.made, step=1))
    duel.for_made.step()
    zrun_core.save(folder, duel.made, step=1)
    says("again", lambda: zrun_core.save(folder, duel.made, step=1))
    says("other", lambda: zrun_core.load(folder, duel.judge))
    says("several", lambda: zrun_core.load(folder, duel.models))
    says("step", lambda: zrun_core.load(folder, duel.made, step=7))
    if run.is_main:
        says("alone", lambda: zrun_core.save(folder, duel.made, step=2))
    return told


def test_mistakes_are_told_in_one_line(ranks, tmp_path):
    expected = {
        "no optimizer": "the model has no optimizer",
        "name": "'a/b' cannot name a model",
        "nothing": "give a sharded model, or a dict",
        "extra": "it must be JSON",
        "keep": "write 2 or more",
        "nowhere": "name another folder",
        "gradients": "call step() or zero_grad() first",
        "again": "holds that step already",
        "other": "in the checkpoint and",
        "several": "is of one model, and load() was given models called made, judge",
        "step": "does not hold step 7",
        "alone": "HangError: save(): rank 1 has not called it within 3 s",
    }
    first, second = ranks(2).run(mistakes, str(tmp_path / "mistakes"))
    assert first.keys() == expected.keys()
    for key, text in expected.items():
        assert text in first[key], key
        assert "\n" not in first[key]
    assert second["nowhere"].startswith("PeerError")
    assert [path.name for path in sorted((tmp_path / "mistakes").glob("step-*"))] == ["step-00000001"]


def lonely(folder: str) -> int:
    """A checkpoint of a library's model is one that every other tool reads."""
    from zrun_core.checkpoint.folder import read_step

    duel = Duel(3, "fp32")
    duel.train(0, 1)
    zrun_core.save(folder, duel.made, step=1)
    manifest = read_step(Path(folder) / "step-00000001")
    assert [info.name for info in manifest.tensors] == [name for name, _ in duel.made.named_parameters()]
    return manifest.step


def test_one_model_has_its_own_names(ranks, tmp_path):
    assert ranks(2).run(lonely, str(tmp_path / "lonely")) == [1, 1]
