"""The model of a question: the whole of it, and what one of several tensor-parallel ranks has.

    subject = Subject(profile, divide=lambda tp, sequence: ...)
    subject.traced(2, sequence=True)  # a profile, of the first of two ranks

A traced model is traced once more for each way to divide it, when that is first asked for. Of a
shape alone, such as "7B", formulas tell all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from zrun_core.errors import JobError, ZrunError
from zrun_core.plan.question.transformer import TransformerShape
from zrun_core.plan.trace.parameters_only import with_guesses
from zrun_core.plan.trace.profile import Profile

Divide = Callable[[int, bool], Profile]


class Subject:
    """A model that is traced, or a shape, with its parts.

    Attributes:
        whole: the model as one rank alone has it.
        formula: the shape of it, if it is one.
        num_blocks: repeated blocks of the model.
        num_params: of the model.
        tokens_per_sample: None where samples are no tokens.
        num_samples: of the training data; None where that is not known.
    """

    def __init__(
        self,
        whole: Profile | TransformerShape,
        divide: Divide | None = None,
    ) -> None:
        """
        Args:
            divide: traces what the first of `tp` ranks has of it, with slices of the sequence or
                without; None: nobody can.
        """
        self.whole = whole
        self.formula = whole if isinstance(whole, TransformerShape) else None
        self.num_blocks: int
        self.num_params: int
        self.tokens_per_sample: int | None
        self.num_samples: int | None
        if isinstance(whole, TransformerShape):
            self.num_blocks = whole.layers
            self.num_params = whole.params
            self.tokens_per_sample = whole.seq
            self.num_samples = None
        else:
            self.num_blocks = whole.num_blocks
            self.num_params = whole.num_params
            self.tokens_per_sample = whole.tokens_per_sample
            self.num_samples = whole.num_samples
        self._divide = divide
        self._parts: dict[tuple[int, bool], Profile | JobError] = {}

    @property
    def files(self) -> Mapping[str, str]:
        """Return digests of the files of code that it came from, by path."""
        found: dict[str, str] = {}
        for profile in self._profiles():
            found.update(profile.files)
        return found

    @property
    def is_partial(self) -> bool:
        """Return True if time was over before all that was asked for was traced."""
        return any(profile.is_partial for profile in self._profiles())

    def _profiles(self) -> Sequence[Profile]:
        parts = [self.whole, *self._parts.values()]
        return [each for each in parts if isinstance(each, Profile)]

    def traced(self, tp: int, *, sequence: bool) -> Profile | None:
        """Return what the first of `tp` ranks has; None: of a shape, formulas tell.

        Args:
            sequence: whether they have slices of the sequence between divided layers.

        Raises:
            JobError: it cannot be divided so.
        """
        if isinstance(self.whole, TransformerShape):
            return None
        if tp == 1:
            return self.whole
        key = (tp, sequence)
        if self._divide is None:
            raise JobError(f"tp {tp}: how this model is divided is not known")
        if key not in self._parts:
            self._parts[key] = self._part(self._divide, *key)
        found = self._parts[key]
        if isinstance(found, JobError):
            raise found
        return found

    def why_not_divided(self, tp: int, *, sequence: bool) -> str:
        """Return why ranks cannot have parts of it so; "" if they can.

        Args:
            sequence: as of `traced`.
        """
        try:
            self.traced(tp, sequence=sequence)
        except JobError as error:
            return str(error)
        return ""

    def _part(self, divide: Divide, tp: int, sequence: bool) -> Profile | JobError:
        assert isinstance(self.whole, Profile)
        try:
            found = divide(tp, sequence)
        except JobError as error:
            return error
        except ZrunError as error:
            return JobError(f"tp {tp}: {error}")
        if found.traces or not self.whole.traces:
            return with_guesses(found, [*self.whole.guessed])
        why = next(iter(found.untraced.values()), found.why)
        return JobError(f"tp {tp}: {why}")
