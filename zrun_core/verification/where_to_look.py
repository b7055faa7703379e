"""Where the cause of a difference usually is."""

from __future__ import annotations

# Of what differs, and of what it looks like: the first row that fits. "" fits everything.
WHERE: tuple[tuple[str, str, str], ...] = (
    ("gradient", "on rank", "what ranks draw, read or write for themselves: copies must be equal"),
    (
        "gradient",
        "as large",
        "a loss that is scaled by hand by the number of ranks or micro-batches",
    ),
    ("gradient", "micro-batch", "code that depends on the rank, or drops a batch"),
    ("gradient", "no gradient", "a hook, a `detach()` or `no_grad()`, the plan of slices"),
    (
        "gradient",
        "another order",
        "features that are reordered between layers that parallel.plan divides",
    ),
    (
        "gradient",
        "",
        "an autograd function of your own, a hook on a gradient, an operation that looks at all "
        "features between divided layers",
    ),
    ("update", "weight decay", "optim.no_decay and optim.groups: which parameters decay"),
    ("update", "not updated", "a parameter that is replaced or frozen after the run has begun"),
    ("update", "", "optim.groups, and an optimizer of your own that looks at whole tensors"),
    ("loss", "", "random numbers, values of an earlier step, or what the model computes"),
    ("batch", "", "the data set, its order and `data.collate`: equal for an index on every rank"),
    ("norm", "", "weights of the loss, the loss scale, optim.clip"),
    ("skip", "", "the loss scale, and numbers that are not finite on some ranks alone"),
    ("rate", "", "lr, its warm-up, and an lr of your own that counts its calls"),
    ("buffer", "", "a buffer that the forward writes from what one rank or one stage has"),
    ("start", "", "the model's factory: what it draws must come from torch's own generator"),
    ("save", "", "state that is neither a parameter nor a buffer, and so is not saved"),
)


def where_to_look(what: str, looks_like: str) -> str:
    """Return where to look first, in words.

    Args:
        what: of the two differs: see `Difference`.
        looks_like: what is likely, in words.
    """
    return next(where for of, fragment, where in WHERE if what == of and fragment in looks_like)
