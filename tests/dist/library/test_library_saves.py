"""Checkpoints of a user's own loop go on bit for bit, on other ranks and at other stages too."""

from __future__ import annotations

import errno
import gc
import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loop import start
from test_gan import batch, discriminator, generator
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import zrun_core
from zrun_core.checkpoint import shard_file
from zrun_core.checkpoint.export import export
from zrun_core.checkpoint.folder import CheckpointFolder, read_step
from zrun_core.checkpoint.model_state import ModelState
from zrun_core.checkpoint.several_models import part_of
from zrun_core.checkpoint.step_index import open_index
from zrun_core.checkpoint.verify import verify
from zrun_core.errors import SaveError, ZrunError
from zrun_core.library.model import ModelHandle


class Duel:
    """A GAN, its optimizers, schedule and scaler."""

    def __init__(self, stage: int, precision: str, offload: dict[str, Any] | None = None) -> None:
        start()
        keys = {"zero": {"stage": stage, "bucket": 1 << 13}, "offload": offload}
        self.made = zrun_core.shard(generator, precision=precision, **keys)
        self.judge = zrun_core.shard(discriminator, precision=precision, **keys)
        self.for_made = zrun_core.optimizer(self.made, "adamw", lr=1e-3)
        self.for_judge = zrun_core.optimizer(self.judge, "sgd", lr=1e-2, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.for_made, 0.9)
        self.scaler = zrun_core.GradScaler(
            init_scale=1024.0, growth_interval=3, enabled=precision == "fp16"
        )

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

    def save(self, folder: str, step: int, **options: Any) -> bool:
        extra = {"schedule": self.schedule.state_dict(), "scaler": self.scaler.state_dict()}
        return zrun_core.save(folder, self.models, step=step, extra=extra, **options)

    def load(self, folder: str) -> int:
        saved = zrun_core.load(folder, self.models)
        assert saved is not None
        self.schedule.load_state_dict(saved.extra["schedule"])
        self.scaler.load_state_dict(saved.extra["scaler"])
        return saved.step


def whole(
    stage: int, precision: str, folder: str, offload: dict[str, Any] | None = None
) -> list[float]:
    duel = Duel(stage, precision, offload)
    duel.train(0, 4)
    duel.save(folder, 4, wait=offload is None)
    losses = duel.train(4, 8)
    zrun_core.finish()
    return losses


def resumed(
    stage: int, precision: str, folder: str, offload: dict[str, Any] | None = None
) -> list[float]:
    duel = Duel(stage, precision, offload)
    assert zrun_core.load(f"{folder}-none", duel.models) is None
    duel.train(0, 1)  # what it does before does not matter
    return duel.train(duel.load(folder), 8)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.at_most(1)
def test_two_models_go_on_bit_for_bit(ranks, tmp_path, stage, precision):
    folder = str(tmp_path / "duel")
    assert ranks(2).run(whole, stage, precision, folder) == ranks(2).run(
        resumed, stage, precision, folder
    )


def on_disk(stage: int, folder: Path) -> dict[str, Any]:
    """All states that a stage can have on a disk."""
    away = {"optimizer": "disk", "grad": "disk", "dir": str(folder)}
    return {**away, "param": "disk"} if stage == 3 else away


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.thorough
def test_two_models_with_states_on_disk_go_on_bit_for_bit(ranks, tmp_path, stage):
    away = on_disk(stage, tmp_path)
    for name, first, second in (("down", None, away), ("up", away, None)):
        folder = str(tmp_path / name)
        losses = ranks(2).run(whole, stage, "fp32", folder, first)
        assert ranks(2).run(resumed, stage, "fp32", folder, second) == losses


def roll_back(stage: int, folder: str, offload: dict[str, Any] | None = None) -> None:
    """Begin again in the process that has trained; nothing of that may be left."""
    duel = Duel(stage, "fp32", offload)
    duel.save(folder, 0)
    first = duel.train(0, 3)
    assert duel.load(folder) == 0
    assert duel.train(0, 3) == first


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.at_most(2)
def test_a_loop_goes_back_to_before_its_first_update(ranks, tmp_path, stage):
    ranks(2).run(roll_back, stage, str(tmp_path / "duel"))
    if stage in (0, 3):
        ranks(2).run(roll_back, stage, str(tmp_path / "there"), on_disk(stage, tmp_path))


def try_several(folder: str) -> list[int]:
    """Return how many threads of disks there are after each of some models that nobody has."""
    found = []
    for number in range(5):
        duel = Duel(0, "fp32", on_disk(0, Path(folder)))
        duel.train(0, 1)
        duel.save(f"{folder}/{number}", 0)
        del duel
        gc.collect()
        names = [thread.name for thread in threading.enumerate()]
        found.append(sum("zrun-disk" in name for name in names))
    return found


def test_a_script_may_try_one_model_after_the_other(ranks, tmp_path):
    """What it has saved, each in a folder of its own, ends with its memory, files and threads."""
    for found in ranks(2).run(try_several, str(tmp_path)):
        assert 0 < found[1] == found[2] == found[3] == found[4]


def weights(stage: int, folder: str) -> dict[str, Any]:
    duel = Duel(stage, "fp32")
    duel.load(folder)
    found: dict[str, Any] = {"lr": duel.for_made.param_groups[0]["lr"]}
    for title, model in duel.models.items():
        with zrun_core.gathered(model):
            found |= {
                f"{title}.{name}": param.numpy().copy() for name, param in model.named_parameters()
            }
    return found


@pytest.mark.thorough
def test_two_models_open_at_any_stage_on_any_number_of_ranks(ranks, tmp_path):
    folder = str(tmp_path / "duel")
    ranks(2).run(whole, 3, "fp32", folder)
    first = ranks(2).run(weights, 3, folder)[0]
    assert first["lr"] == pytest.approx(1e-3 * 0.9**4)
    for world_size, stage in ((1, 0), (3, 2), (2, 1)):
        for found in ranks(world_size).run(weights, stage, folder):
            assert all(
                (found[name] == value).all() for name, value in first.items() if name != "lr"
            )
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
    says("no optimizer", lambda: zrun_core.load(folder, bare))
    zrun_core.save(f"{folder}-bare", bare, step=1)
    says("an optimizer", lambda: zrun_core.load(f"{folder}-bare", duel.made))
    if run.is_main:
        says("alone", lambda: zrun_core.save(folder, duel.made, step=2))
    return told


def test_mistakes_are_told_in_one_line(ranks, tmp_path):
    expected = {
        "name": "'a/b' cannot name a model",
        "nothing": "give a sharded model, or a dict",
        "extra": "it must be JSON",
        "keep": "write 2 or more",
        "nowhere": "name another folder",
        "gradients": "call step() or zero_grad() first",
        "again": "holds that step already",
        "other": "in the model; it is another model: give load() the model that was saved",
        "several": "is of one model, and load() was given models called made, judge",
        "step": "does not hold step 7",
        "no optimizer": "the model has no optimizer, and had adamw when it was saved: call "
        "zrun_core.optimizer first",
        "an optimizer": "the model had no optimizer when it was saved, and has adamw here: load(",
        "alone": "HangError: save(): rank 1 has not called it within 3 s",
    }
    first, second = ranks(2).run(mistakes, str(tmp_path / "mistakes"))
    assert first.keys() == expected.keys()
    for key, text in expected.items():
        assert text in first[key], key
        assert "\n" not in first[key]
    assert second["nowhere"].startswith("PeerError")
    assert [path.name for path in sorted((tmp_path / "mistakes").glob("step-*"))] == [
        "step-00000001"
    ]


def lonely(folder: str) -> int:
    """A checkpoint of a library's model is one that every other tool reads."""
    duel = Duel(3, "fp32")
    duel.train(0, 1)
    zrun_core.save(folder, duel.made, step=1)
    manifest = read_step(Path(folder) / "step-00000001")
    assert [info.name for info in manifest.tensors] == [
        name for name, _ in duel.made.named_parameters()
    ]
    return manifest.step


def test_one_model_has_its_own_names(ranks, tmp_path):
    assert ranks(2).run(lonely, str(tmp_path / "lonely")) == [1, 1]


def damage(step: Path) -> None:
    """Flip a bit in the file of the first rank."""
    path = step / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def save_after_damage(folder: str) -> str:
    """Go on from step 1 as 2 is damaged; save another 2, then another model; then name 3 anew."""
    duel = Duel(0, "fp32")
    duel.train(0, 1)
    for step in (1, 2):
        zrun_core.save(folder, duel.made, step=step)
    if start().is_main:
        damage(Path(folder, "step-00000002"))
    with pytest.warns() if start().is_main else nullcontext():
        assert zrun_core.load(folder, duel.made).step == 1
    with pytest.raises(ZrunError) as caught:
        zrun_core.save(folder, duel.made, step=1)
    zrun_core.save(folder, duel.made, step=2)
    other = Duel(0, "fp32")
    zrun_core.save(folder, other.made, step=3)
    os.makedirs(f"{folder}-links", exist_ok=True)
    link = Path(f"{folder}-links", str(start().rank))
    link.symlink_to(folder)
    zrun_core.save(link, other.made, step=4)
    zrun_core.finish()
    return str(caught.value)


def test_a_folder_is_opened_once_whatever_is_saved_and_however_it_is_called(ranks, tmp_path):
    for said in ranks(2).run(save_after_damage, str(tmp_path / "made")):
        assert f"{tmp_path / 'made'} holds that step already" in said
    assert valid_steps(tmp_path / "made") == [4, 3, 2]
    assert len(list((tmp_path / "made").glob("step-00000002.aside-*"))) == 1


# Behind


def valid_steps(folder: str | Path) -> list[int]:
    """Those of which every byte is there."""
    found = CheckpointFolder(Path(folder)).scan()
    return [each.step for each in found if each.manifest and not verify(each.path, each.manifest)]


def behind_and_not(folder: str) -> tuple[list[list[str]], list[list[str]]]:
    """By step, the digests of a run that saves each step behind, and of one that waits for each."""
    found = []
    for name, wait in (("behind", False), ("waits", True)):
        duel = Duel(3, "fp32")
        torch.manual_seed(start().rank)  # what the runs before have drawn
        for step in range(4):
            duel.train(step, step + 1)
            assert duel.save(f"{folder}/{name}", step + 1, keep=9, wait=wait)
        zrun_core.finish()
        steps = [
            (each.path, each.manifest)
            for each in CheckpointFolder(Path(folder, name)).scan()
            if each.manifest is not None
        ]
        assert [manifest.step for _, manifest in steps] == [4, 3, 2, 1]
        indices = [open_index(*each) for each in steps]
        found.append([[each.digest for each in index.fragments()] for index in indices])
    return found[0], found[1]


@pytest.mark.thorough
def test_a_save_behind_is_of_its_own_step(ranks, tmp_path):
    for behind, waits in ranks(2).run(behind_and_not, str(tmp_path)):
        assert behind == waits
    assert valid_steps(tmp_path / "behind") == [4, 3, 2, 1]


def commit_by_steps(folder: str) -> int:
    """Return how many rounds of training it took until a save in the background was there."""
    duel = Duel(2, "fp16")
    duel.train(0, 1)
    duel.save(folder, 1, wait=False)
    for step in range(1, 10_000):
        duel.train(step, step + 1)
        if start()._background.step is None:
            return step
    return 0


def test_optimizer_steps_commit_a_save_behind(ranks, tmp_path):
    first, second = ranks(2).run(commit_by_steps, str(tmp_path))
    assert first == second > 0
    assert valid_steps(tmp_path) == [1]


@contextmanager
def writing(before: Any) -> Iterator[None]:
    """Inside, `before` is called before a file of this rank is written."""
    write = shard_file.write_file

    def write_file(*args: Any, **named: Any) -> Any:
        before()
        return write(*args, **named)

    shard_file.write_file = write_file
    try:
        yield
    finally:
        shard_file.write_file = write


def save_while_busy(folder: str) -> list[bool]:
    duel = Duel(0, "fp32")
    duel.train(0, 1)
    may_write = threading.Event()
    with writing(may_write.wait):
        saved = [duel.save(folder, 1, wait=False)]
        with pytest.warns() if start().is_main else nullcontext() as told:
            saved.append(duel.save(folder, 2, wait=False, busy="skip"))
        if start().is_main:
            assert str(told[0].message) == "step 2 is not saved: step 1 is still being written"
        may_write.set()
        saved.append(duel.save(folder, 3, wait=False))
        zrun_core.finish()
    return saved


def test_a_save_behind_waits_for_another_or_is_skipped(ranks, tmp_path):
    assert ranks(2).run(save_while_busy, str(tmp_path)) == [[True, False, True]] * 2
    assert valid_steps(tmp_path) == [3, 1]


def fail_behind(folder: str) -> list[str]:
    """What the calls after a failed save say; and then all is well."""

    def fail() -> None:
        if start().rank == 1:
            raise SaveError(f"cannot write: {os.strerror(errno.EIO)}")

    duel, told = Duel(1, "fp32"), []
    duel.train(0, 1)
    duel.save(folder, 1)

    def step() -> None:
        for number in range(10_000):
            duel.train(number, number + 1)

    calls = {
        "step": step,
        "save": lambda: duel.save(folder, 9),
        "load": lambda: duel.load(folder),
        "": zrun_core.finish,
    }
    for call in calls.values():
        with writing(fail):
            duel.save(folder, 2, wait=False)
            with pytest.raises(ZrunError) as caught:
                call()
        told.append(f"{type(caught.value).__name__}: {caught.value}")
        duel.for_made.zero_grad()
        duel.for_judge.zero_grad()
        duel.scaler._overflows.clear()
    duel.save(folder, 2)
    return told


def test_what_goes_wrong_behind_is_raised_by_the_next_call(ranks, tmp_path):
    first, second = ranks(2).run(fail_behind, str(tmp_path))
    assert first == ["PeerError: rank 1 could not save step 2"] * 4
    assert second == ["SaveError: step 2 is not saved: cannot write: Input/output error"] * 4
    assert valid_steps(tmp_path) == [2, 1]


def test_the_end_of_a_script_in_the_middle_of_a_save_is_told(ranks, tmp_path):
    assert ranks(1).run(end_early, str(tmp_path)) == [
        "zrun_core: step 1 is not saved: the script ended in the middle of it; "
        "call zrun_core.finish() at its end\n"
    ]


def end_early(folder: str) -> str:
    duel = Duel(0, "fp32")
    duel.train(0, 1)
    duel.save(folder, 1, wait=False)
    told = io.StringIO()
    with redirect_stderr(told):
        start()._background._tell_unfinished()
        zrun_core.finish()
        start()._background._tell_unfinished()
    return told.getvalue()


# Models without an optimizer


class Averaged(Duel):
    """A GAN, and an average of its generator that no optimizer updates."""

    def __init__(self, stage: int, offload: dict[str, Any] | None = None) -> None:
        super().__init__(stage, "fp32", offload)
        zero = {"stage": stage, "bucket": 1 << 12}
        self.average = zrun_core.shard(generator, zero=zero, offload=offload)
        assert zrun_core.load("nowhere", self.models) is None

    @property
    def models(self) -> dict[str, torch.nn.Module]:
        return {**super().models, "average": self.average}

    def train(self, first: int, stop: int) -> list[float]:
        losses = []
        for step in range(first, stop):
            losses += super().train(step, step + 1)
            with zrun_core.gathered(self.made), zrun_core.gathered(self.average):
                pairs = zip(self.average.parameters(), self.made.parameters(), strict=True)
                for mean, param in pairs:
                    mean.lerp_(param, 0.1)
                losses.append(sum(float(mean.double().sum()) for mean in self.average.parameters()))
        return losses


def save_average(stage: int, folder: str) -> list[float]:
    duel = Averaged(stage)
    duel.train(0, 2)
    duel.save(folder, 2)
    duel.save(folder, 3, wait=False)  # what follows must not be in it
    losses = duel.train(2, 4)
    zrun_core.finish()
    return losses


def load_average(stage: int, folder: str, offload: dict[str, Any] | None = None) -> list[float]:
    duel = Averaged(stage, offload)
    duel.train(0, 1)
    assert duel.load(folder) == 3
    return duel.train(2, 4)


def test_an_average_without_an_optimizer_is_saved_and_goes_on(ranks, tmp_path):
    folder = tmp_path / "average"
    first = ranks(2).run(save_average, 3, str(folder))
    assert ranks(2).run(load_average, 3, str(folder)) == first
    there = on_disk(3, tmp_path)
    assert ranks(2).run(load_average, 3, str(folder), there) == first
    for found in ranks(2).run(load_average, 1, str(folder)):
        assert found == pytest.approx(first[0], abs=1e-5)

    assert valid_steps(folder) == [3, 2]
    step = folder / "step-00000003"
    manifest = read_step(step)
    assert manifest.models["average"]["optimizer"] is None
    names = [name for name, _ in generator().named_parameters()]
    weights = export(step, part_of(manifest, "average"), tmp_path / "average.pt")
    values = torch.load(weights[0])
    assert list(values) == names
    total = sum(float(value.double().sum()) for value in values.values())
    assert ranks(2).run(sum_of_average, str(folder)) == [pytest.approx(total, abs=1e-12)] * 2


def sum_of_average(folder: str) -> float:
    start()
    average = zrun_core.shard(generator, zero=1)
    zrun_core.load(folder, {"average": average}, weights_only=True)
    with zrun_core.gathered(average):
        return sum(float(mean.double().sum()) for mean in average.parameters())


def save_what_differs(folder: str) -> str:
    run = start()
    average = zrun_core.shard(generator)
    with zrun_core.gathered(average):
        next(average.parameters()).add_(run.rank)
    with pytest.raises(ZrunError) as caught:
        zrun_core.save(folder, {"average": average}, step=1)
    return str(caught.value)


def test_an_average_that_ranks_have_written_differently_is_not_saved(ranks, tmp_path):
    for said in ranks(2).run(save_what_differs, str(tmp_path)):
        assert "step 1: replicas diverged: rank 1 has another parameter" in said


# Weights only


def load_weights(folder: str) -> dict[str, Any]:
    start()
    torch.manual_seed(5)
    bare = zrun_core.shard(generator, zero=2, precision="bf16")
    found = zrun_core.load(folder, {"made": bare}, weights_only=True)
    assert found is not None
    assert "scaler" in found.extra
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(5)))
    trained = Duel(1, "fp32")
    trained.train(0, 2)
    states = state_of(trained.made)._optimizer_states()
    before = [state["exp_avg"].clone() for _, _, state in states]
    zrun_core.load(folder, {"made": trained.made}, weights_only=True)
    after = [state["exp_avg"] for _, _, state in state_of(trained.made)._optimizer_states()]
    assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))
    assert trained.for_made.param_groups[0]["lr"] == pytest.approx(1e-3 * 0.9**2)
    with pytest.raises(
        ZrunError, match=r"models called made, judge, and load\(\) was given models called other"
    ):
        zrun_core.load(folder, {"other": bare}, weights_only=True)
    with zrun_core.gathered(bare), zrun_core.gathered(trained.made):
        both = (dict(model.named_parameters()) for model in (bare, trained.made))
        low, full = (
            {name: param.detach().float().numpy().copy() for name, param in each.items()}
            for each in both
        )
    assert all(
        (torch.from_numpy(value).bfloat16().float().numpy() == low[name]).all()
        for name, value in full.items()
    )
    return full


def state_of(model: torch.nn.Module) -> ModelState:
    return ModelState(ModelHandle.of(model, "test").sharded)


def test_weights_alone_need_no_optimizer(ranks, tmp_path):
    folder = str(tmp_path / "duel")
    ranks(2).run(whole, 3, "fp32", folder)
    expected = ranks(2).run(weights, 3, folder)[0]
    for found in ranks(3).run(load_weights, folder):
        assert all((expected[f"made.{name}"] == value).all() for name, value in found.items())


# Replicas


def diverge(folder: str) -> list[str]:
    start()
    model = zrun_core.shard(generator)
    optimizer = zrun_core.optimizer(model, "sgd", lr=0.1, replica_every=3)
    told, made = [], 0

    def step() -> None:
        nonlocal made
        model(batch(0)[1]).mean().backward()
        optimizer.step()
        made += 1

    def says(action: Any) -> None:
        with pytest.raises(ZrunError) as caught:
            action()
        told.append(f"{type(caught.value).__name__} {caught.value.exit_code:d}: {caught.value}")

    step()
    optimizer.check_replicas()
    name, param = next(iter(model.named_parameters()))
    if start().rank == 1:
        param.data.view(-1).view(torch.int32)[3] ^= 1
    step()
    says(step)  # the third
    optimizer.zero_grad()
    says(lambda: zrun_core.save(folder, model, step=2))
    says(optimizer.check_replicas)
    assert made == 2
    if start().rank == 1:
        param.data.view(-1).view(torch.int32)[3] ^= 1
        optimizer.param_groups[0]["lr"] = 0.2
    says(optimizer.check_replicas)
    return [text.replace(name, "NAME") for text in told]


def test_replicas_that_differ_stop_the_loop(ranks, tmp_path):
    first, second = ranks(2).run(diverge, str(tmp_path / "none"))
    assert first == second
    for text in first[:3]:
        assert (
            "replicas diverged: rank 1 has another parameter NAME than the other ranks; "
            "resume from the last" in text
        )
        assert text.startswith("DivergedError 10: step 3: ")
    assert "rank 1 has lr 0.20000000000000001, rank 0 has 0.10000000000000001" in first[3]
    assert not (tmp_path / "none").exists()
