"""What a step leaves behind, let go of a little at a time: all at once would hold the training up, longer with every module."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

import torch

#: Probes and facts about tensors that one call lets go of; a forward pass calls once a module, which leaves fewer.
AT_ONCE = 10
#: Steps whose leftovers wait at most; only a watch whose modules are not called any more comes near.
MAX_STEPS = 4


class Forgetful(Protocol):
    """What holds something of a step."""

    @property
    def is_over(self) -> bool:
        """Whether the step that it holds something of has ended."""
        ...

    def forget(self) -> None:
        """Let go of it."""


class Leftovers:
    """Of steps that have ended: probes that hold something, and what was known of tensors."""

    def __init__(self) -> None:
        self._steps: list[tuple[list[Forgetful], dict[Hashable, Any]]] = []

    def take(self, probes: list[Forgetful], known: dict[Hashable, Any]) -> None:
        """Take what one step leaves.

        Args:
            probes: those that it touched.
            known: facts by where a tensor lies; under an integer a weak reference to the storage at that address.
        """
        if probes or known:
            self._steps.append((probes, known))
        if len(self._steps) > MAX_STEPS:
            self.let_go_of_all()

    def let_go(self) -> None:
        """Let go of some."""
        try:
            probes, known = self._steps.pop()  # no other thread has it meanwhile
        except IndexError:
            return
        for _ in range(min(AT_ONCE, len(probes))):
            probe = probes.pop()
            if probe.is_over:
                probe.forget()
        for _ in range(min(AT_ONCE, len(known))):
            key, value = known.popitem()
            if type(key) is int:
                torch.UntypedStorage._free_weak_ref(value)  # type: ignore[no-untyped-call]  # torch's
        if probes or known:
            self._steps.append((probes, known))

    def let_go_of_all(self) -> None:
        """Let go of everything, when training is over."""
        while self._steps:
            self.let_go()
