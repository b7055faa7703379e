"""The start of ranks, and their printed output."""

from __future__ import annotations

import shlex
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from zrun_core.spine.sections.section import MAX_RANKS, Section, Steps


class LaunchConfig(Section):
    """How ranks are started, on this host and on others."""

    short = ("backend", str)

    backend: Literal["auto", "local", "ssh", "slurm", "env"] = Field(
        default="auto",
        description="auto | local: this host | ssh | slurm: srun starts them | env: another "
        "launcher has done so",
        examples=["ssh"],
    )
    ssh: str = Field(
        default="ssh",
        description="the ssh client, with options as a shell reads them",
        examples=["ssh -F cluster.cfg"],
    )
    python: str | None = Field(
        default=None,
        description="a Python with zrun on the other hosts; null: the path of the one that runs "
        "zrun here",
        examples=["/opt/venv/bin/python"],
    )

    @field_validator("ssh")
    @classmethod
    def _require_a_command(cls, ssh: str) -> str:
        try:
            words = shlex.split(ssh)
        except ValueError as error:
            raise ValueError(f"{ssh!r}: {error}: close the quote") from None
        if not words or words[0].startswith("-") or not ssh.isprintable():
            raise ValueError(
                f"{ssh!r} names no command; write ssh, or ssh with its options: ssh -F cluster.cfg"
            )
        return ssh

    @field_validator("python")
    @classmethod
    def _require_a_path(cls, python: str | None) -> str | None:
        if python is None:
            return None
        if not python.strip() or python.startswith("-") or not python.isprintable():
            raise ValueError(
                f"{python!r} is not the path of a Python; write for example /opt/venv/bin/python"
            )
        return python


TrackerName = Literal["csv", "prometheus", "tensorboard", "wandb", "mlflow", "trackio"]


class LogConfig(Section):
    """What is printed. `events.jsonl` always has every step."""

    every: Steps = Field(default=10, description="optimizer steps between printed lines")
    ranks: list[Annotated[int, Field(ge=0, lt=MAX_RANKS)]] | Literal["all"] = Field(
        default=[0],
        description="ranks whose own output is shown while they train: a list, or all; zrun logs "
        "has that of every one",
        examples=[[0, 7]],
    )
    to: list[TrackerName] = Field(
        default=[],
        description="trackers that get every number: csv, prometheus, tensorboard, wandb, mlflow, "
        "trackio",
        examples=[["tensorboard"]],
    )
    args: dict[TrackerName, dict[str, Any]] = Field(
        default={},
        description="arguments of trackers, by name; those of one that is not in `to` do nothing",
        examples=[{"wandb": {"project": "llm"}}],
    )

    @field_validator("to")
    @classmethod
    def _name_each_once(cls, to: list[TrackerName]) -> list[TrackerName]:
        if len(set(to)) < len(to):
            raise ValueError("a tracker is named twice")
        return to
