"""Intercepting Transformer Engine's GEMMs, which are no torch ops: two functions that its modules import by name.

``general_gemm(A, B, layout=...)`` and ``general_grouped_gemm(A, B, out, ..., layout=..., m_splits=...)`` are replaced in the four
modules that call them, from the first watched forward pass of a sampled step to the end of that step. Operands are named as BLAS
does, by columns; in rows, with ``row`` and ``col`` for the direction of quantization:

    TN  fprop  out[M, N] = B_row[M, K] @ A_row[N, K].T        A weight, B input
    NN  dgrad  out[M, K] = B_row[M, N] @ A_col[N, K]          A weight, B grad_output
    NT  wgrad  out[N, K] = B_col[M, N].T @ A_col[M, K]        A input,  B grad_output
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, Protocol

from fp8debug.types import Gemm

#: Where the functions are imported by name.
_NAMESPACES = tuple(
    f"transformer_engine.pytorch.module.{name}" for name in ("linear", "layernorm_linear", "layernorm_mlp", "grouped_linear")
)
#: Functions by whether they are read.
_FUNCTIONS = {"general_gemm": True, "general_grouped_gemm": True, "general_grouped_gemm_for_grouped_tensor": False}
_LAYOUTS = {"TN": Gemm.FPROP, "NN": Gemm.DGRAD, "NT": Gemm.WGRAD}


class SeenTeGemm(NamedTuple):
    """One GEMM, or those of all experts.

    Attributes:
        which: by its layout.
        first: one operand an expert: input or grad_output.
        second: one an expert: weight, for wgrad input.
        results: one an expert; None where it was added to what was there, or lies in FP8.
        bias: what fprop added to its results, one an expert.
        before_activation: fprop's result where the activation is part of the GEMM.
        is_fast: whether it leaves its sums in the tensor core.
        splits: rows of each expert; None for a single GEMM.
        odd: why it cannot be recorded; empty when it can.
    """

    which: Gemm
    first: list[Any]
    second: list[Any]
    results: list[Any]
    bias: list[Any] | None = None
    before_activation: Any = None
    is_fast: bool = False
    splits: list[int] | None = None
    odd: str = ""


class TeGemmObserver(Protocol):
    """One call of a module, in its forward or its backward pass."""

    def on_gemm(self, function: str, bound: Callable[[], dict[str, Any]], result: Any) -> None:
        """Take note of a GEMM that ran; it may not raise."""


class Gemms:
    """The wrapped functions, shared by all watches of the process."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._stacks: list[list[TeGemmObserver | None]] = []
        self._users: set[int] = set()
        self._undo: list[Callable[[], None]] = []

    @property
    def calls(self) -> list[TeGemmObserver | None]:
        """Calls that run on this thread, the innermost last; None for one that is not observed."""
        if not hasattr(self._local, "calls"):
            self._local.calls = []
            self._stacks.append(self._local.calls)
        found: list[TeGemmObserver | None] = self._local.calls
        return found

    def install(self, user: object) -> None:
        """Wrap the functions until every user of them is done."""
        if not self._users:
            for namespace in _NAMESPACES:
                self._wrap(sys.modules.get(namespace))
        self._users.add(id(user))

    def _wrap(self, namespace: Any) -> None:
        for name in _FUNCTIONS:
            original = getattr(namespace, name, None)
            if original is not None:
                setattr(namespace, name, self._wrapped(name, original))
                self._undo.append(lambda original=original, name=name: setattr(namespace, name, original))  # type: ignore[misc]  # its defaults

    def done(self, user: object) -> None:
        """End what :meth:`install` began, at the end of a step; calls that an exception left open are forgotten."""
        self._users.discard(id(user))
        if not self._users:
            while self._undo:
                self._undo.pop()()
            for calls in self._stacks:
                calls.clear()

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        names = by_name(original)

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            calls = self.calls
            if calls and calls[-1] is not None:
                calls[-1].on_gemm(name, lambda: names(args, kwargs), result)
            return result

        return call


def by_name(function: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """Return what names the arguments of a call that went well, its defaults among them, at less cost than ``bind``."""
    parameters = inspect.signature(function).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return lambda args, kwargs: {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


GEMMS = Gemms()


def read_gemm(function: str, args: dict[str, Any], result: Any) -> SeenTeGemm:
    """Return a GEMM from its arguments by name and what it returned.

    Raises:
        ValueError: nothing is known of the function.
    """
    if not _FUNCTIONS[function]:
        raise ValueError("its GEMM runs on one grouped tensor (use_grouped_tensor), which is not read")
    which = _LAYOUTS[args["layout"]]
    is_fast = not args["use_split_accumulator"]
    if function == "general_grouped_gemm":
        outputs, splits = list(args["out"]), list(args["m_splits"])
        if args["single_output"]:
            outputs = list(outputs[0][: sum(splits)].split(splits))
        bias = list(args["bias"]) if args["use_bias"] and not args["grad"] else None
        found = SeenTeGemm(which, list(args["B"]), list(args["A"]), outputs, bias, is_fast=is_fast, splits=splits)
    else:
        output, gelu_in = result[0], result[2]
        if args["gelu"] and not args["grad"]:
            output = gelu_in  # the result is the activation's
        bias = None if args["bias"] is None or which is not Gemm.FPROP else [args["bias"]]
        before = gelu_in if args["gelu"] else None
        found = SeenTeGemm(which, [args["B"]], [args["A"]], [output], bias, before, is_fast)
        if args["ub"] is not None or args["ub_type"] is not None:
            found = found._replace(odd="Userbuffers overlap it with communication")
    if args["accumulate"]:
        found = found._replace(results=[None] * len(found.results))
    return found
