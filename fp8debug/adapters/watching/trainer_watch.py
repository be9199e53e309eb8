"""``TrainerWatch``: a watch that begins when a trainer does, and is told by it of steps, losses, norms and rates."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fp8debug.adapters.watching.handle import Watch, say, uncaught_exception
from fp8debug.errors import Fp8DebugError, UsageError
from fp8debug.interruptions import is_ours
from fp8debug.trainers import Loop


class TrainerWatch(Watch):
    """Made by :func:`fp8debug.watch` for a trainer; everything else is as with the watch of a model.

    The model is watched when training begins, after the trainer has converted, sharded and wrapped it. A trainer that trains
    again goes on in the same folder if its steps go on, else that is not recorded, and said.

    Args:
        loop: which kind of trainer.
        target: the trainer.
        path: the run directory.
        begin: makes a watch of (modules, first step or None for a folder without a run).

    Attributes:
        inner: the watch of the model, None before training begins and when it cannot be watched.
    """

    def __init__(
        self,
        loop: Loop,
        target: object,
        path: str | Path,
        begin: Callable[[list[nn.Module], int | None], Watch],
    ) -> None:
        self.path = Path(path)
        self.inner: Watch | None = None
        self._begin = begin
        self._steps = 0  # recorded by watches that ended
        self._failed = False
        self._is_attaching = True
        self._begun = False
        self._over = False
        self._detach = loop.attach(target, self)
        self._is_attaching = False
        atexit.register(self._close_at_exit)

    def begin(self, models: Sequence[nn.Module], first_step: int = 0) -> None:
        """Watch the prepared model; called by the trainer's loop."""
        if self._over:
            return
        try:
            if self.inner is not None:  # it began again without an end, after an exception
                self._end_inner(None)
            self._begun = True
            if self._steps and first_step < self._steps:
                self._say(
                    f"trains again from step {first_step}: {self.path} holds that already; give each training its own watch()"
                )
                return
            self.inner = self._begin(list(models), first_step or None)
        except Exception as error:
            if not is_ours(error):
                raise
            if self._is_attaching and isinstance(error, Fp8DebugError):
                raise
            self._say(f"{error}" if isinstance(error, Fp8DebugError) else f"{type(error).__name__}: {error}")

    def refuse(self, reason: str) -> None:
        """Say why this training cannot be recorded; called by the trainer's loop."""
        self._begun = True
        self._say(reason)

    def note(self, **values: Any) -> None:
        """Give numbers of the step under way that the trainer does not give; None is not known."""
        if self.inner is not None:
            self.inner.note(**{name: value for name, value in values.items() if value is not None})

    def tell(self, text: str) -> None:
        """Say something of the steps' numbers; called by the trainer's loop."""
        if self.inner is not None:
            say(self.inner._writer, self.inner.current_step, text, kind="note")

    def end_step(self) -> None:
        """End the step; called by the trainer's loop."""
        if self.inner is not None:
            try:
                Watch.step(self.inner)
            except Exception as error:
                if not is_ours(error):
                    raise
                self.inner._noted.clear()
                self._say(f"{type(error).__name__}: {error}")

    def finish(self, error: BaseException | None = None) -> None:
        """End the run; called by the trainer's loop."""
        try:
            self._end_inner(error)
        except Exception as own:
            if not is_ours(own):
                raise
            self._say(f"{type(own).__name__}: {own}")

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do not call it: the trainer does.

        Raises:
            UsageError: always.
        """
        raise UsageError("the trainer counts the steps of this watch; give further numbers by watch.note()")

    def begin_step(self) -> None:
        """Do nothing: the trainer says when a step ends."""

    def skip_statistics(self) -> None:
        """As with the watch of a model, once training has begun."""
        if self.inner is not None:
            self.inner.skip_statistics()

    @property
    def current_step(self) -> int:
        """Number of the step that is under way."""
        return self._steps if self.inner is None else self.inner.current_step

    def compare_inference(self, *args: Any, **kwargs: Any) -> None:
        """As with the watch of a model.

        Raises:
            UsageError: training has not begun.
        """
        self._running().compare_inference(*args, **kwargs)

    def coverage(self) -> list[dict[str, Any]]:
        """Return one entry per Linear-like module, once training has begun.

        Raises:
            UsageError: training has not begun.
        """
        return self._running().coverage()

    def detach(self) -> None:
        """Leave the trainer and its model as they were before."""
        self._detach()
        if self.inner is not None:
            self.inner.detach()

    def close(self) -> None:
        """Detach and end the run; calling it again does nothing."""
        if self._over:
            return
        self._detach()
        self._end_inner(None)
        self._over = True
        atexit.unregister(self._close_at_exit)
        if not self._begun:
            print(f"fp8debug: nothing recorded into {self.path}: the trainer did not train", file=sys.stderr)

    def _close_at_exit(self) -> None:
        self._end_inner(uncaught_exception())
        self.close()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.finish(error)
        self.close()

    def _end_inner(self, error: BaseException | None) -> None:
        inner = self.inner
        if inner is not None:
            inner.__exit__(None if error is None else type(error), error, None)
            self._steps = inner.current_step
            self.inner = None

    def _running(self) -> Watch:
        if self.inner is None:
            raise UsageError("the trainer has not begun to train, or has ended: the model is watched from its beginning on")
        return self.inner

    def _say(self, text: str) -> None:
        if not self._failed:
            self._failed = True
            print(f"fp8debug: not recorded: {text}"[:500], file=sys.stderr)
