"""A call that stops on its way and goes on later, in a thread of its own. One runs at a time.

caller     go_on()            go_on()            go_on()
call             ... park()         ... park()         ... return
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class GivenUp(BaseException):
    """Ends a call that nobody goes on with. No user's code should take it for an error."""


class ParkedCall(Generic[T]):
    """One call and its thread, which ends with it.

    Attributes:
        is_over: it has returned or raised, or was given up.
        result: what it returned.
    """

    result: T

    def __init__(self, call: Callable[[], T], name: str) -> None:
        """
        Args:
            call: begins with the first `go_on`. Context variables are those of this moment.
        """
        self.is_over = False
        self._call: Callable[[], T] | None = call
        self._context = contextvars.copy_context()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._may_run = threading.Semaphore(0)
        self._has_stopped = threading.Semaphore(0)
        self._is_given_up = False
        self._error: BaseException | None = None

    def go_on(self) -> None:
        """Let it run until it parks or ends. It must not be over.

        Raises:
            BaseException: what the call raised, with its traceback.
        """
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._may_run.release()
        self._has_stopped.acquire()
        if self.is_over:
            self._thread.join()
        error = self._error
        if error is None:
            return
        self._error = None
        try:
            raise error
        finally:
            del error  # its traceback has this frame, which would hold it

    def park(self) -> None:
        """Stop here until `go_on`. To be called by the call itself.

        Raises:
            GivenUp: nobody goes on with it.
        """
        if not self._is_given_up:
            self._has_stopped.release()
            self._may_run.acquire()
        if self._is_given_up:
            raise GivenUp

    def give_up(self) -> None:
        """End it where it is parked."""
        if self._thread.ident is None or self.is_over:
            return
        self._is_given_up = True
        self._may_run.release()
        self._thread.join()

    def _run(self) -> None:
        call = self._call
        self._call = None
        assert call is not None
        try:
            self.result = self._context.run(call)
        except GivenUp:
            pass
        except BaseException as error:
            self._error = error
        finally:
            del call
            self.is_over = True
            self._has_stopped.release()
