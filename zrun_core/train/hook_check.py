"""Check what hooks will ask of the model, before anything trains: what is known of them by then."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from zrun_core.errors import JobError
from zrun_core.models.generate import check_sample, sample
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.section import Ref
from zrun_core.user_code import user


def check_hooks(job: JobConfig, job_dir: Path, model: nn.Module) -> None:
    """Check that the model does what the hooks of a job will have it do.

    Nobody can call the user's own hooks ahead. Of these the one thing that is looked for is a plain
    `generate` of a model that no pipeline can run so.

    Args:
        model: the user's; values, and all of its parts, need not be there.

    Raises:
        JobError: it does not.
        UserCodeError: the code of a hook could not be imported.
    """
    for name, ref in job.hooks:
        if not isinstance(ref, Ref):
            continue
        hook = user.load(Ref(call=ref.call), job_dir)
        if hook is sample:
            check_sample(model, ref.args, f"hooks.{name}")
        elif job.parallel.pp > 1 and _encodes_apart(model):
            _refuse_generation(hook, ref, f"hooks.{name}", model)


def enters_gathered(hook: object) -> bool:
    """Return whether the code of a hook speaks of `gathered`, inside of which parameters are whole.

    The functions that it calls are not looked at.
    """
    if not inspect.isroutine(hook):
        hook = inspect.getattr_static(hook, "__call__", None)  # of a class: of its objects
    code = getattr(hook, "__code__", None)
    return code is not None and "gathered" in code.co_names


def _encodes_apart(model: nn.Module) -> bool:
    """Return whether the model's `generate`, of `transformers`, calls an encoder by itself."""
    config = getattr(model, "config", None)
    is_pair = getattr(config, "is_encoder_decoder", False) is True
    return is_pair and hasattr(model, "get_encoder") and hasattr(model, "generate")


def _refuse_generation(hook: object, ref: Ref, key: str, model: nn.Module) -> None:
    """Refuse a hook that has the job's model generate."""
    line = next(_generating_lines(hook), None)
    if line is not None:
        raise JobError(
            f"{key}: {ref.call} calls generate of the model (line {line}), which for "
            f"{type(model).__name__} calls the encoder by itself, and with parallel.pp a hook can "
            "call the whole model only: generate from an exported checkpoint (zrun ckpt export), "
            "or write pp: 1"
        )


def _generating_lines(hook: object) -> Iterator[int]:
    """Yield the lines in which a function calls `generate` of its context's model."""
    if not inspect.isfunction(hook):
        return
    try:
        lines, first = inspect.getsourcelines(hook)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError):
        return  # as of a function that was made at run time
    context = next(iter(inspect.signature(hook).parameters), "")
    models = {
        item.optional_vars.id
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        for item in node.items
        if isinstance(item.optional_vars, ast.Name)
        and isinstance(item.context_expr, ast.Call)
        and _is_of(item.context_expr.func, context, "gathered")
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        is_model = isinstance(owner, ast.Name) and owner.id in models
        if node.func.attr == "generate" and (is_model or _is_of(owner, context, "model")):
            yield first + node.lineno - 1


def _is_of(node: ast.expr, context: str, attribute: str) -> bool:
    """Return whether an expression is `context.attribute`."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == attribute
        and isinstance(node.value, ast.Name)
        and node.value.id == context
    )
