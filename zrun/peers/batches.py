"""Samples of a step, which others say as samples of a rank x accumulation x ranks."""

from __future__ import annotations

from zrun.peers.source import Source


def put_batch(source: Source, *, total: str | None, micro: str, accumulation: str) -> None:
    """Write `batch` from the keys that say its factors.

    Args:
        total, micro, accumulation: names of the keys of samples in a step, samples of a rank in a
            pass, and passes in a step. `total` is None where the tool has no such key.

    Raises:
        JobError: the factors contradict each other.
    """
    ranks = source.draft.replicas
    samples = None if total is None else source.whole(total, "batch.global")
    each = source.whole(micro, "batch.micro")
    passes = source.whole(accumulation, "batch.global")
    for key, number in ((total, samples), (micro, each), (accumulation, passes)):
        if number is not None and number < 1:
            raise source.error(f"{key}: expected 1 or more, found {number}; write {key}: 1")
    if samples is not None and total is not None:
        _refuse_other_factors(source, total, micro, accumulation)
        source.put("batch.global", samples, total)
        if each is None and passes is not None and ranks is not None:
            each = samples // (passes * ranks)
            micro = f"{total} / ({accumulation} x ranks)"
        elif each is None and passes is not None and passes > 1:
            formula = f"{samples} / ({passes} x ranks)"
            source.leave(accumulation, f"it follows from the others: write batch.micro: {formula}")
    elif each is not None and passes is not None and passes > 1:
        note = f"x {micro} x {ranks} ranks"
        if ranks is None:
            note = "times your data-parallel ranks: --ranks"
        source.put("batch.global", each * passes * (ranks or 1), accumulation, note)
    elif passes is not None and each is None:
        source.leave(accumulation, "it follows from batch: write {global: ..., micro: ...}")
    if each is not None:
        source.put("batch.micro", each, micro)


def _refuse_other_factors(source: Source, total: str, micro: str, accumulation: str) -> None:
    """Refuse a number of samples that is not the product of the factors that are given."""
    samples = source.whole(total, "batch.global")
    assert samples is not None
    ranks = source.draft.replicas
    factors = {
        micro: source.whole(micro, "batch.micro"),
        accumulation: source.whole(accumulation, "batch.global"),
        "ranks": ranks,
    }
    given = {key: number for key, number in factors.items() if number is not None}
    product = 1
    for number in given.values():
        product *= number
    if len(given) == 3:
        is_right = samples == product
    else:
        is_right = samples % product == 0
    if is_right:
        return
    named = " x ".join(f"{key} {number}" for key, number in given.items())
    what = "is not" if len(given) == 3 else "is no multiple of"
    near = max(1, round(samples / product)) * product if len(given) < 3 else product
    raise source.error(
        f"{total} {samples} {what} {named} = {product}; write {total}: {near}, or other factors"
    )
