"""FSDP as accelerate and axolotl configure it, versions 1 and 2, as keys of a job."""

from __future__ import annotations

from typing import Final

from zrun.peers.source import Source

# What version 1 calls a strategy, by name or by number: the stage, and whether hosts replicate.
_STRATEGIES: Final = {
    "FULL_SHARD": (3, False),
    "SHARD_GRAD_OP": (2, False),
    "NO_SHARD": (0, False),
    "HYBRID_SHARD": (3, True),
    "HYBRID_SHARD_ZERO2": (2, True),
    "1": (3, False),
    "2": (2, False),
    "3": (0, False),
    "4": (3, True),
    "5": (2, True),
}
_BLOCKS = "repeated blocks become units by themselves; zero.units takes names of modules"
_AHEAD = "zero.prefetch says how many units are gathered ahead"
_ONE_COPY = "a model is built once per host, and rank 0's values are those of all"
_LEFT: Final = {
    "auto_wrap_policy": _BLOCKS,
    "transformer_layer_cls_to_wrap": _BLOCKS,
    "min_num_params": "zero.bucket bounds the bytes of a unit",
    "backward_prefetch": _AHEAD,
    "backward_prefetch_policy": _AHEAD,
    "forward_prefetch": _AHEAD,
    "limit_all_gathers": _AHEAD,
    "cpu_ram_efficient_loading": _ONE_COPY,
    "sync_module_states": _ONE_COPY,
    "use_orig_params": "the optimizer always sees the model's own parameters",
    "state_dict_type": "a save has whole tensors; `zrun ckpt export` writes them for others",
    "final_state_dict_type": "a save has whole tensors; `zrun ckpt export` writes them for others",
    "ignored_modules": "all parameters of the model are divided",
    "use_cpu_memory_efficient_loading": _ONE_COPY,
}


def left(block: str) -> dict[str, str]:
    """Return the keys of FSDP without a counterpart, with and without their prefix."""
    names = [(f"{prefix}{name}", why) for name, why in _LEFT.items() for prefix in ("", "fsdp_")]
    return {f"{block}.{name}": why for name, why in names}


def write(source: Source, block: str) -> None:
    """Write the keys of a job that a section of FSDP means."""
    version = source.whole(_named(source, block, "version"), "zero.stage")
    strategy = _named(source, block, "sharding_strategy")
    reshard = _named(source, block, "reshard_after_forward")
    chosen = source.raw(strategy)
    # Version 1 has a word in each of the two keys, version 2 true or false in the second.
    if chosen is None and isinstance(source.raw(reshard), str):
        chosen, strategy = source.raw(reshard), reshard
    frees = None if strategy == reshard else source.flag(reshard, "zero.stage")
    if frees is not None:
        what = "freed after forward" if frees else "kept after forward"
        source.put("zero.stage", 3 if frees else 2, reshard, what)
        if chosen is not None:
            source.leave(strategy, f"{reshard} says it in version 2")
    elif chosen is not None:
        stage, is_hybrid = _of_strategy(source, strategy, chosen)
        source.put("zero.stage", stage, strategy)
        if is_hybrid:
            source.put("zero.shard_group", "node", strategy)
    elif not source.draft.says("zero.stage"):
        origin = _named(source, block, "version") if version is not None else block
        source.put("zero.stage", 3, origin, "full shards are FSDP's own")
    _put_offload(source, _named(source, block, "offload_params"))
    key = _named(source, block, "activation_checkpointing")
    if source.flag(key, "activations"):
        source.put("activations.checkpoint", "full", key)


def put_offload(source: Source, key: str) -> None:
    """Write where FSDP's states live between uses: all of them on the host.

    Args:
        key: of the configuration that says so.
    """
    source.put("offload.optimizer", "host", key)
    if source.draft.value("zero.stage") == 3:
        source.put("offload.param", "host", key)


def _put_offload(source: Source, key: str) -> None:
    if source.flag(key, "offload"):
        put_offload(source, key)


def _of_strategy(source: Source, key: str, chosen: object) -> tuple[int, bool]:
    found = _STRATEGIES.get(str(chosen).upper())
    if found is None:
        raise source.error(
            f"{source.named(key)}: expected FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or "
            f"HYBRID_SHARD_ZERO2, found {chosen}; write FULL_SHARD"
        )
    return found


def _named(source: Source, block: str, name: str) -> str:
    """Return the key of a setting, which may have a prefix."""
    prefixed = f"{block}.fsdp_{name}"
    bare = f"{block}.{name}"
    return bare if source.raw(prefixed) is None and source.raw(bare) is not None else prefixed
