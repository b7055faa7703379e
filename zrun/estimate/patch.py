"""From a candidate of a search to keys of a job: the keys alone, or the file with them in place.

changes = job_changes(config, batch, candidate)          # {"zero.stage": 3, "batch.micro": 2}
patched(text, changes)                                    # the file, comments and order kept
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from zrun.job import overrides
from zrun.job.document import Document
from zrun.job.hidden import without_secret_values
from zrun.job.load import load_job
from zrun.job.scalars import write
from zrun.job.schema import find_key
from zrun.job.validate import validate
from zrun_core.errors import JobError
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.data import DataConfig
from zrun_core.spine.sections.section import Ref, Section
from zrun_core.spine.spec import BatchPlan, resolve_batch

if TYPE_CHECKING:
    from zrun_core.hardware.hardware import Hardware
    from zrun_core.memory.buffers import Placement
    from zrun_core.plan.question.candidate import Candidate

Changes = dict[str, Any]  # dotted key -> value


def job_changes(
    config: JobConfig, batch: BatchPlan, candidate: Candidate, hardware: Hardware
) -> Changes:
    """Return the keys of a job that must differ for it to be a candidate. The global batch stays.

    Args:
        config: the job as it is written.
        batch: what `config` comes to where it is planned.
    """
    dims = candidate.dims
    wanted: Changes = {
        "zero.stage": candidate.stage,
        "batch.micro": candidate.micro,
        "activations.checkpoint": candidate.checkpoint,
        "activations.partition": candidate.partition,
        "precision.compute": candidate.precision,
        "parallel.tp": dims.tp,
        "parallel.sequence": candidate.sequence_parallel,
        "parallel.pp": dims.pp,
        "parallel.schedule": _schedule(config, candidate),
        "parallel.virtual": dims.virtual,
        "parallel.split": list(candidate.split) or "auto",
        "init": candidate.init,
    }
    has = {key: _value(config, key) for key in wanted} | {"batch.micro": batch.micro}
    changed = {key: value for key, value in wanted.items() if value != has[key]}
    group = config.zero.shard_group
    in_words = {"all": dims.dp, "node": dims.dp_per_host(hardware.devices_per_node)}
    if candidate.stage and dims.shard_size != in_words.get(str(group), group):
        changed["zero.shard_group"] = "all" if dims.shard_size == dims.dp else dims.shard_size
    after = config.model_copy(
        update={"batch": config.batch.model_copy(update={"micro": candidate.micro})}
    )
    whole = candidate.micro * candidate.accumulation * dims.dp
    if "batch.micro" in changed and _global(after, dims.dp) != whole:
        changed["batch.global"] = whole
    return changed | _offload_changes(config, candidate.placement, hardware.device.kind)


def _schedule(config: JobConfig, candidate: Candidate) -> str:
    """Return the schedule of a candidate; on one stage the job's own, if it is alike there."""
    alike = candidate.order.is_plain_on_one_stage and config.parallel.facts.is_plain_on_one_stage
    if candidate.dims.pp == 1 and alike:
        return config.parallel.schedule
    return candidate.schedule


def _offload_changes(config: JobConfig, wanted: Placement, device: str) -> Changes:
    """Return the keys that must differ for states and inputs to live where they are wanted.

    `device` is the type of what trains, "cpu" or "cuda".
    """
    from zrun_core.memory.buffers import placement_of

    offload = config.offload
    has = placement_of(offload, config.activations, device)
    changed: Changes = {}
    for name in ("optimizer", "param"):
        if getattr(wanted, name) is not getattr(has, name):
            changed[f"offload.{name}"] = getattr(wanted, name).value
    # Gradients are where the optimizer is, unless the job says otherwise.
    optimizer = changed.get("offload.optimizer", offload.optimizer)
    gradients = offload.grad or optimizer
    would_be = placement_of(
        offload.model_copy(update={"optimizer": optimizer, "grad": gradients}),
        config.activations,
        device,
    )
    is_stranded = optimizer == "device" and gradients != "device"
    if would_be.grad is not wanted.grad or is_stranded:
        changed["offload.grad"] = wanted.grad.value
    if wanted.activation is not has.activation:
        changed["activations.offload"] = wanted.activation.value
    param = changed.get("offload.param", offload.param)
    gradients = changed.get("offload.grad", gradients)
    if {optimizer, gradients, param} == {"device"}:
        unused = offload.of_states_elsewhere
        return changed | {f"offload.{name}": default for name, default in unused.items()}
    if not wanted.is_on_device and wanted.fraction != offload.fraction:
        changed["offload.fraction"] = wanted.fraction
    if offload.schedule == "delayed" and (optimizer, param) != ("host", "device"):
        changed["offload.schedule"] = "overlap"
    return changed


def as_yaml(changes: Changes, config: JobConfig) -> str:
    """Return the changed keys as a part of a job file, each with its value before."""
    lines: list[str] = []
    for section, keys in _by_section(changes).items():
        short = _short(section) if section else None
        margin = "  " if section else ""
        if short is not None and list(keys) == [short]:
            margin = ""
            keys = {section: keys[short]}
        elif section:
            lines.append(f"{section}:")
        for key, value in keys.items():
            path = f"{section}.{short}" if key == section else f"{section}.{key}".lstrip(".")
            lines.append(f"{margin}{key}: {write(value)}  # was {write(_value(config, path))}")
    return "\n".join(lines)


def as_overrides(changes: Changes) -> list[str]:
    """Return the changed keys as arguments of a command."""
    return [f"{key}={write(value)}" for key, value in changes.items()]


def write_job(source: Path, target: Path, changes: Changes, given: list[str]) -> None:
    """Write the job of `source` with `changes` to `target`.

    Args:
        given: overrides that were on the command line; they go into the file too, but for
            secrets, which it takes from the shell.

    Raises:
        JobError: `target` is there already, cannot be written, or lies where the job's code is not
            found.
    """
    given, _ = without_secret_values(given, os.environ)
    config = load_job(source, given).config
    elsewhere = target.absolute().parent != source.absolute().parent
    relative = [
        ref.call
        for ref in _references(config)
        if ref.where.endswith(".py") and ref.where[0] not in "/~"
    ]
    if elsewhere and relative:
        raise JobError(
            f"--write {target}: the job names {relative[0]}, which is looked for beside the job "
            "file: write to the "
            f"folder of {source}"
        )
    text = patched(source.read_text(encoding="utf-8").removeprefix("\ufeff"), changes, given)
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise JobError(
            f"--write {target}: the file is there already; choose another name"
        ) from None
    except OSError as error:
        raise JobError(f"--write {target}: {error.strerror}") from None


def patched(text: str, changes: Changes, given: list[str] | None = None) -> str:
    """Return the job file `text` with `changes` on top of the overrides `given`, edited in place.

    A file that cannot be edited without changing its meaning is written anew, without its comments.
    """
    arguments = [*(given or []), *as_overrides(changes)]
    wanted = _document(text)
    overrides.apply(wanted, arguments, os.environ)
    meant = validate(wanted)
    edited = text
    try:
        for argument in arguments:
            name, _, value = argument.partition("=")
            edited = _edited(edited, tuple(name.strip().split(".")), value.strip())
        if validate(_document(edited)) == meant:
            return edited
    except (JobError, yaml.YAMLError, ValueError):
        pass
    return "".join(f"{key}: {write(value)}\n" for key, value in wanted.value.items())


def _document(text: str) -> Document:
    return Document.parse(text, "job", os.environ)


def _edited(text: str, path: tuple[str, ...], value: str) -> str:
    """Return `text` with the value at `path` replaced, or put where it belongs.

    Raises:
        ValueError: there is no simple place for it.
    """
    node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    if node is None:
        raise ValueError("an empty file has no places")
    for depth, name in enumerate(path):
        if not isinstance(node, yaml.MappingNode):
            return _expanded(text, node, path[:depth], path[depth:], value)
        found: yaml.Node | None = next(
            (below for key, below in node.value if key.value == name), None
        )
        if found is None:
            return _with_key(text, node, path[depth:], value, is_top=not depth)
        node = found
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        raise ValueError("where a block ends is not told")
    return _replaced(text, node, value)


def _expanded(
    text: str, node: yaml.Node, path: tuple[str, ...], rest: tuple[str, ...], value: str
) -> str:
    """Return a section in its short form with another key, or with another value of its own key."""
    short = _short(".".join(path))
    old = text[node.start_mark.index : node.end_mark.index]
    if len(rest) != 1 or (short is None and old):
        raise ValueError("no such place")
    if rest[0] == short:
        return _replaced(text, node, value)
    before = f"{short}: {old}, " if old and old not in ("null", "~") else ""
    return _replaced(text, node, f"{{{before}{rest[0]}: {value}}}")


def _with_key(
    text: str, node: yaml.MappingNode, path: tuple[str, ...], value: str, is_top: bool
) -> str:
    if is_top and len(path) == 2 and _short(path[0]) == path[1]:
        path = path[:1]
    for name in reversed(path[1:]):
        value = f"{{{name}: {value}}}"
    line = f"{path[0]}: {value}"
    if node.flow_style:
        at = node.start_mark.index + 1
        return text[:at] + line + ", " * bool(node.value) + text[at:]
    if is_top:
        return text + "\n" * (not text.endswith("\n")) + line + "\n"
    first = node.value[0][0].start_mark
    return f"{text[: first.index]}{line}\n{' ' * first.column}{text[first.index :]}"


def _replaced(text: str, node: yaml.Node, value: str) -> str:
    start = node.start_mark.index
    end = node.end_mark.index
    gap = " " * (start == end and text[start - 1 : start] == ":")
    return text[:start] + gap + value + text[end:]


def _short(section: str) -> str | None:
    """Return the key of a section that its short form stands for."""
    key = find_key(tuple(section.split(".")))
    short = key.section.short if key is not None and key.section is not None else None
    return short[0] if short is not None else None


def _by_section(changes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        section, _, key = path.rpartition(".")
        found.setdefault(section, {})[key] = value
    return found


def _value(config: JobConfig, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, f"{name}_" if name in ("global", "async") else name)
    return value


def _global(config: JobConfig, dp: int) -> int | None:
    try:
        return resolve_batch(config, dp).global_size
    except JobError:
        return None


def _references(section: Section) -> list[Ref]:
    found: list[Ref] = []
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Ref):
            found.append(value)
        if isinstance(value, Section) and (
            not isinstance(value, Ref) or isinstance(value, DataConfig)
        ):
            found += _references(value)
    return found
