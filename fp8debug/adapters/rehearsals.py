"""Forward passes that are not training: torch's pipeline stages first run on tensors without values, to learn their shapes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from fp8debug.observer import Observer
from fp8debug.trainers.base import replace, undoing

_METHODS = ("_prepare_forward_infra", "_prepare_backward_infra")


def ignore_rehearsals(observer: Observer, tell: Callable[[int], None]) -> Callable[[], None]:
    """Record nothing of what pipeline stages run before their first step; return what ends it.

    Args:
        observer: of the watch.
        tell: called with the number of each stage that is seen.
    """
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    if stages is None:
        return lambda: None

    def make(own: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(own)
        def rehearse(*args: Any, **kwargs: Any) -> Any:
            if isinstance(number := getattr(args[0] if args else None, "stage_index", None), int):
                tell(number)
            before, observer.is_rehearsing = observer.is_rehearsing, True
            try:
                return own(*args, **kwargs)
            finally:
                observer.is_rehearsing = before

        return rehearse

    owners = [c for c in vars(stages).values() if isinstance(c, type)]
    undo = [replace(c, name, make) for c in owners for name in _METHODS if name in vars(c)]
    return undoing(undo)
