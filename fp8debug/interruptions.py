"""Exceptions that reach fp8debug's code from outside it, and must reach the program.

A signal handler of the program (a time limit, a scheduler's SIGTERM) runs between any two bytecodes, hence also inside a hook of
fp8debug, and may raise an exception of any class. Another thread may inject one. ``except`` cannot tell these from an error of
fp8debug; the traceback can.
"""

from __future__ import annotations

import functools
import opcode
import signal
import sys
from collections.abc import Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any

#: Top-level packages whose exceptions fp8debug's own calls may raise without a Python frame of theirs.
_CALLED = {
    *("fp8debug", "builtins", "torch", "numpy", "pyarrow", "pandas", "triton", "torchao", "deep_gemm", "transformer_engine"),
    *("transformer_engine_torch", "torch_xla", "safetensors"),
    *sys.stdlib_module_names,
}
#: Builtin exceptions that C code raises without arguments.
_BARE = (MemoryError, StopIteration, StopAsyncIteration)
_RAISE = {opcode.opmap[name] for name in ("RAISE_VARARGS", "RERAISE") if name in opcode.opmap}
_VARARGS, _VARKEYWORDS = 0x04, 0x08


def is_ours(error: BaseException) -> bool:
    """Return whether an exception arose in what fp8debug itself ran, so that it may be handled and not raised again.

    Call it in the function that caught the exception. It is False for

    - ``KeyboardInterrupt``, ``SystemExit`` and all else that is no ``Exception``;
    - an exception that a signal handler or a trace function raised, by a frame of it in the traceback;
    - an exception that another thread injected (``PyThreadState_SetAsyncExc``): nothing in the traceback can have raised it;
    - an exception that followed from one of these: its cause, or its context if that was raised inside the caught call.

    An error of the program's code that fp8debug itself called (a property, a parametrization, a ``__torch_dispatch__``) is
    fp8debug's: without it, nobody would have called.
    """
    catching = sys._getframe(1)
    return not any(_is_foreign(one) for one in _chain(error, catching))


def _chain(error: BaseException, catching: FrameType) -> Iterator[BaseException]:
    """Yield an exception and those that it followed from, as far as they were raised below the frame that caught it."""
    callers: set[int] = set()
    frame = catching.f_back
    while frame is not None:
        callers.add(id(frame))
        frame = frame.f_back
    todo, seen = [error], set[int]()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        trace = one.__traceback__
        if one is not error and (trace is None or id(trace.tb_frame) in callers):
            continue  # the program was handling it when it called us
        yield one
        todo += [other for other in (one.__cause__, one.__context__) if other is not None]


def _is_foreign(error: BaseException) -> bool:
    if isinstance(error, GeneratorExit):  # closes a generator that nobody reads any more
        return False
    if not isinstance(error, Exception):
        return True
    trace = error.__traceback__
    if trace is None:
        return False
    handlers = _handlers()
    entries = list(_entries(trace))
    if any(_is_handler(entry.tb_frame) or entry.tb_frame.f_code in handlers for entry in entries):
        return True
    return _is_injected(error, entries)


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_handler(frame: FrameType) -> bool:
    """Return whether the interpreter itself called a function: it is given the frame that it interrupted, which called it not."""
    interrupted, code = frame.f_back, frame.f_code
    if interrupted is None:
        return False
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & _VARARGS) + bool(code.co_flags & _VARKEYWORDS)
    values = frame.f_locals
    for name in code.co_varnames[:count]:
        value = values.get(name)
        if value is interrupted or (isinstance(value, tuple) and any(one is interrupted for one in value)):
            return True
    return False


def _handlers() -> set[CodeType]:
    """Return the code of the signal handlers that are installed now."""
    found: set[CodeType] = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        function = getattr(handler, "__func__", handler)
        if not hasattr(function, "__code__") and callable(handler):
            function = type(handler).__call__  # of an object
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            found.add(code)
    return found


def _is_injected(error: Exception, entries: list[TracebackType]) -> bool:
    """Return whether nothing that ran can have raised an exception."""
    if any(_root(entry.tb_frame.f_globals.get("__name__")) not in _CALLED for entry in entries):
        return False  # code of somebody else, which fp8debug called
    if _root(type(error).__module__) not in _CALLED:
        return True
    if type(error).__module__ != "builtins" or error.args or isinstance(error, _BARE):
        return False
    last = entries[-1]
    return last.tb_frame.f_code.co_code[last.tb_lasti] not in _RAISE  # C code gives a builtin exception its message


def _root(module: Any) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""
