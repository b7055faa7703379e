"""Files of a step from which transformers builds a model and its tokenizer.

They are written with every step, so that it can be exported without the code that made it. A model
of the user's own
has none, but is described all the same: whoever exports it hears why.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from zrun_core.checkpoint.manifest_fields import is_name
from zrun_core.checkpoint.manifest_parts import ModelInfo
from zrun_core.user_code.pretrained import config_of, outermost
from zrun_core.zero.wrap.tiled_linear import TiledLinear

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
_PACKAGES = {"torch", "timm"}  # of modules that models of transformers are made of, beside its own


@dataclass(frozen=True)
class ModelFiles:
    """A model in words, and the content of files by name."""

    model: ModelInfo | None = None
    files: dict[str, bytes] = field(default_factory=dict)


def describe(model: nn.Module, tokenizer: dict[str, bytes]) -> ModelFiles:
    """Describe `model` as it is now.

    Args:
        model: the user's module, between two steps.
        tokenizer: files of the tokenizer, as `tokenizer_files` returns them.
    """
    found = outermost(model)
    if found is None:
        return ModelFiles(ModelInfo(_name_of(model), None, "which is not a model of transformers"))
    name, inner = found
    prefix = f"{name}." if name else None
    obstacle = _outside(model, prefix) or _foreign(inner)
    files = {}
    if obstacle is None:
        try:
            files = {**_configs(inner), **tokenizer}
        except Exception as error:  # of the library, or of what the user has put into the config
            obstacle = f"whose config cannot be written as JSON ({type(error).__name__})"
    return ModelFiles(ModelInfo(_name_of(inner), prefix, obstacle), files)


def tokenizer_files(holders: Iterable[object]) -> dict[str, bytes]:
    """Return the files of the first tokenizer that is an attribute `tokenizer` of `holders`."""
    for holder in holders:
        try:
            tokenizer = getattr(holder, "tokenizer", None)
            if not callable(getattr(tokenizer, "save_pretrained", None)):
                continue
            with tempfile.TemporaryDirectory() as folder:
                tokenizer.save_pretrained(folder)  # type: ignore[union-attr]
                paths = [path for path in sorted(Path(folder).iterdir()) if path.is_file()]
                return {path.name: path.read_bytes() for path in paths if is_name(path.name)}
        except Exception:  # a save of the model does not fail because of it
            continue
    return {}


def _configs(model: nn.Module) -> dict[str, bytes]:
    """Return the files that `save_pretrained` writes beside the tensors."""
    config = json.loads(config_of(model).to_json_string())  # type: ignore[union-attr]
    config["architectures"] = [type(model).__name__]
    files = {CONFIG: f"{json.dumps(config, indent=2, sort_keys=True)}\n".encode()}
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        files[GENERATION_CONFIG] = generation.to_json_string().encode()
    return files


def _outside(model: nn.Module, prefix: str | None) -> str | None:
    """Return why the model of transformers at `prefix` is not all of `model`; None: it is."""
    if prefix is None:
        return None
    for name in model.state_dict():
        if not name.startswith(prefix):
            return f"which does not contain {name}"
    return None


def _foreign(model: nn.Module) -> str | None:
    """Return which module keeps a config from describing `model`; None: none does.

    Adapters that were put into it have other names than the tensors that the library would look
    for.
    """
    known = _PACKAGES.union(kind.__module__.partition(".")[0] for kind in type(model).__mro__)
    for name, module in model.named_modules():
        package = type(module).__module__.partition(".")[0]
        is_known = package in known or isinstance(module, TiledLinear)
        if not is_known and any(True for _ in module.parameters()):
            return f"with {name} added to it ({type(module).__name__})"
    return None


def _name_of(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"
