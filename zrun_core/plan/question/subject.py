"""The model of a question: the whole of it, and what one of several tensor-parallel ranks has.

    subject = Subject(profile, divide=lambda tp, sequence: ...)
    subject.traced(2, sequence=True)  # a profile, of the first of two ranks

It is traced once more for each way to divide it, when that is first asked for, or ahead of that by
threads that wait for processes (`begin`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

from zrun_core.errors import JobError, ZrunError
from zrun_core.plan.trace.parameters_only import with_bounds
from zrun_core.plan.trace.profile import Profile

Divide = Callable[[int, bool], Profile]
_Way = tuple[int, bool]  # ranks that divide layers, and whether they have slices of the sequence


class Subject:
    """A model that is traced, with its parts.

    Attributes:
        whole: the model as one rank alone has it.
        num_blocks: repeated blocks of the model.
        num_params: of the model.
        tokens_per_sample: None where samples are no tokens.
        num_samples: of the training data; None where that is not known.
    """

    def __init__(
        self,
        whole: Profile,
        divide: Divide | None = None,
        at_once: int = 1,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            divide: traces what the first of `tp` ranks has of it, with slices of the sequence or
                without; None: nobody can.
            at_once: how many ways there is room to trace at the same time.
            end: ends the traces that other threads wait for.
        """
        self.whole = whole
        self.num_blocks = whole.num_blocks
        self.num_params = whole.num_params
        self.tokens_per_sample = whole.tokens_per_sample
        self.num_samples = whole.num_samples
        self._divide = divide
        self._at_once = at_once
        self._end = end
        self._parts: dict[_Way, Profile | JobError] = {}
        self._ahead: dict[_Way, Future[Profile | JobError]] = {}

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
        parts = self._parts.values()
        return [self.whole, *(each for each in parts if isinstance(each, Profile))]

    def traced(self, tp: int, *, sequence: bool) -> Profile:
        """Return what the first of `tp` ranks has.

        Args:
            sequence: whether they have slices of the sequence between divided layers.

        Raises:
            JobError: it cannot be divided so.
        """
        if tp == 1:
            return self.whole
        key = (tp, sequence)
        if self._divide is None:
            raise JobError(f"tp {tp}: how this model is divided is not known")
        if key not in self._parts:
            ahead = self._ahead.get(key)
            if ahead is None:
                self._parts[key] = self._part(self._divide, *key)
            else:
                self._parts[key] = ahead.result()
                del self._ahead[key]
        found = self._parts[key]
        if isinstance(found, JobError):
            raise found
        return found

    def begin(self, ways: Iterable[_Way]) -> None:
        """Have ways to divide it traced ahead, in this order, as many at a time as there is room.

        Whoever asks for one waits for it; answers are those of one trace after the other.
        """
        divide = self._divide
        if divide is None or self._at_once < 2:
            return
        found = [way for way in ways if way not in self._parts and way not in self._ahead]
        self._ahead |= {way: Future() for way in found}
        left = deque((way, self._ahead[way]) for way in found)

        def work() -> None:
            while left:
                try:
                    way, ahead = left.popleft()
                except IndexError:  # another thread has taken the last one
                    return
                if ahead.set_running_or_notify_cancel():
                    try:
                        ahead.set_result(self._part(divide, *way))
                    except BaseException as error:
                        ahead.set_exception(error)

        for _ in range(min(self._at_once, len(found))):
            threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        """End what is traced ahead and was not asked for."""
        if not self._ahead:
            return
        for ahead in self._ahead.values():
            ahead.cancel()
        self._end()
        self._ahead = {}

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
        try:
            found = divide(tp, sequence)
        except JobError as error:
            return error
        except ZrunError as error:
            return JobError(f"tp {tp}: {error}")
        if found.traces or not self.whole.traces:
            return with_bounds(found, [*self.whole.unknown])
        why = next(iter(found.untraced.values()), found.why)
        return JobError(f"tp {tp}: {why}")
