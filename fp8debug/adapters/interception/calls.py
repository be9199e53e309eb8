"""Observation of a module's forward calls without a hook on the module: nothing in its state, nothing in what Dynamo traces.

``nn.Module.__call__`` asks ``self._compiled_call_impl`` for a replacement of the call, which ``Module.compile()`` sets on the
instance. While a module is observed, its class (the last one before ``nn.Module``, which stays when a lazy module changes its
class) has a descriptor of that name. It answers for observed instances alone, and only when ``__call__`` asks. It follows:

- The state of a module stays as it was, so a pickle, a deep copy, a checkpoint or an exported program has no trace of a watch.
- Dynamo inlines ``forward`` or ``_call_impl`` and guards on hook dictionaries. Neither differs between a watched and an
  unwatched model, so compiled code stays valid, and modules inside it are not observed.
- What ``Module.compile()`` sets is called as before; observers of regions are asked at each call of a compiled module.

Observers run directly around ``forward``, inside the hooks of others: FSDP2, pruning and spectral norm fetch or make the
weight in a pre-hook. For a module with hooks two more are registered while one call lasts.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from fp8debug.kernels.torch_state import is_traced, is_under_dynamo, skipped_by_dynamo, untraced

_NAME = "_compiled_call_impl"
_ASKS = nn.Module.__call__.__code__
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)


class CallObserver(Protocol):
    """Observer of one module's forward calls."""

    def before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call, with the arguments that ``forward`` gets."""
        ...

    def after_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """End a call, with what ``forward`` returned; None after an exception, such as an early-stopped recomputation's."""
        ...


class _ObservedModule:
    """An observed module and its observers, the outermost first."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module  # a strong reference: an id stays its own
        self.observers: tuple[CallObserver, ...] = ()
        self.eager_passes: set[bool] = set()  # by whether with gradients: those that eager code began


_ENTRIES: dict[int, _ObservedModule] = {}


@skipped_by_dynamo
def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` wraps a module, its call, or its ``forward`` on itself or in its class."""
    own, kind = module.__dict__, type(module)
    if own.get(_NAME) is not None or kind.__name__ == "OptimizedModule":
        return True
    forward = own.get("forward") or getattr(kind, "forward", None)
    return hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")


@skipped_by_dynamo
def runs_eagerly() -> bool:
    """Return whether what ``torch.compile`` wraps runs as it is (``torch.compiler.set_stance("force_eager")``)."""
    stance = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)
    return getattr(stance, "stance", None) == "force_eager"


#: Returns what calls a compiled module in place of the function that it is given; None for that function itself.
RegionObserver = Callable[[nn.Module, Callable[..., Any]], "Callable[..., Any] | None"]
_REGION_OBSERVERS: list[RegionObserver] = []


class _Redirection:
    """Data descriptor ``_compiled_call_impl`` of a class some of whose instances are observed.

    What ``Module.compile()`` sets is kept in the instance's dictionary, as without the descriptor.
    """

    def __init__(self, owner: type) -> None:
        self.num_entries = 0
        self.replaces = _NAME in vars(owner)
        self.before = vars(owner).get(_NAME)

    @skipped_by_dynamo
    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Callable[..., Any] | None:
        """Return to ``Module.__call__`` the observed call of an observed or compiled module, and what is set to all others."""
        if torch.compiler.is_compiling() or module is None:
            return None
        call: Callable[..., Any] | None = module.__dict__.get(_NAME)
        if sys._getframe(1).f_code is not _ASKS or is_traced():
            return call
        is_region = bool(_REGION_OBSERVERS) and (call is not None or is_compiled(module))
        if (call is None or runs_eagerly()) and (entry := _ENTRIES.get(id(module))) is not None:
            call = partial(_observed_call, entry)
        if is_region:
            run = module._call_impl if call is None else call
            for take in _REGION_OBSERVERS:
                if (found := take(module, run)) is not None:
                    return partial(_region_call, found)
        return call

    def __set__(self, module: nn.Module, value: Callable[..., Any] | None) -> None:
        """Keep what ``Module.compile()`` sets."""
        module.__dict__[_NAME] = value

    def __delete__(self, module: nn.Module) -> None:
        """Delete what was set."""
        if _NAME not in module.__dict__:
            raise AttributeError(_NAME)
        del module.__dict__[_NAME]


@skipped_by_dynamo
def _region_call(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)


_REDIRECTIONS: dict[type, _Redirection] = {}
_LOCK = threading.Lock()


def _redirect(kind: type[nn.Module]) -> type:
    """Give a class, or what it has in common with others before ``nn.Module``, a redirection; return that class."""
    classes = [c for c in kind.__mro__ if issubclass(c, nn.Module)]
    owner = classes[-2] if len(classes) > 1 else classes[0]
    if owner not in _REDIRECTIONS:
        _REDIRECTIONS[owner] = _Redirection(owner)
        setattr(owner, _NAME, _REDIRECTIONS[owner])
    _REDIRECTIONS[owner].num_entries += 1
    return owner


def _undirect(owner: type) -> None:
    redirection = _REDIRECTIONS[owner]
    redirection.num_entries -= 1
    if not redirection.num_entries:
        del _REDIRECTIONS[owner]
        if redirection.replaces:
            setattr(owner, _NAME, redirection.before)
        else:
            delattr(owner, _NAME)


def observe_regions(kinds: Iterable[type[nn.Module]], observer: RegionObserver) -> Callable[[], None]:
    """Ask an observer at each call of a compiled module, whether it was compiled before or is later.

    Args:
        kinds: classes of the modules; wrappers of ``torch.compile`` and DistributedDataParallel are observed without it.
        observer: gets the module and what calls it.

    Returns:
        A function that ends it; calling it again does nothing.
    """
    from torch._dynamo.eval_frame import OptimizedModule

    with _LOCK:
        owners = [_redirect(kind) for kind in {*kinds, OptimizedModule, nn.parallel.DistributedDataParallel}]
        _REGION_OBSERVERS.append(observer)

    def end() -> None:
        with _LOCK:
            if observer in _REGION_OBSERVERS:
                _REGION_OBSERVERS.remove(observer)
                for owner in owners:
                    _undirect(owner)

    return end


def observe_calls(module: nn.Module, observer: CallObserver) -> Callable[[], None]:
    """Tell an observer of a module's eager forward calls; one that was added before another runs outside it.

    Returns:
        A function that ends it; calling it again does nothing.
    """
    with _LOCK:
        entry = _ENTRIES.get(id(module))
        if entry is None:
            entry = _ENTRIES[id(module)] = _ObservedModule(module)
        entry.observers = (*entry.observers, observer)
        owner = _redirect(type(module))
    is_over = False

    def end() -> None:
        nonlocal is_over
        with _LOCK:
            if is_over:
                return
            is_over = True
            entry.observers = tuple(one for one in entry.observers if one is not observer)
            if not entry.observers:
                _ENTRIES.pop(id(module), None)
            _undirect(owner)

    return end


def was_called_eagerly(module: nn.Module, *, gradients: bool) -> bool:
    """Return whether code that torch.compile does not run called an observed module, with gradients or without."""
    entry = _ENTRIES.get(id(module))
    return entry is not None and gradients in entry.eager_passes


class _ObservedCall:
    """One forward call under observation; a module with hooks gets two more for as long as it lasts."""

    @untraced
    def __init__(self, entry: _ObservedModule) -> None:
        module = self._module = entry.module
        self._observers = entry.observers
        self._thread = threading.get_ident()
        self._begun: list[CallObserver] = []
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self._handles: list[RemovableHandle] = []
        self.is_hooked = _has_hooks(module)
        if self.is_hooked:
            self._handles = [
                module.register_forward_pre_hook(self.before, with_kwargs=True),
                module.register_forward_hook(self.after, prepend=True, with_kwargs=True),
            ]

    @untraced
    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin the call of every observer; a hook of another thread's call of the module is not for this one."""
        if self._begun or threading.get_ident() != self._thread:
            return
        self._arguments = args, kwargs
        for observer in self._observers:
            self._begun.append(observer)
            observer.before_call(module, args, kwargs)

    @untraced
    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """End the call of those that began, the innermost first."""
        if threading.get_ident() != self._thread:
            return
        while self._begun:
            self._begun.pop().after_call(module, args, kwargs, output)

    @untraced
    def end(self) -> None:
        """End the call of those that began and were not told of a result, and remove the hooks."""
        for handle in self._handles:
            handle.remove()
        if self._begun:
            self.after(self._module, *self._arguments, None)


@skipped_by_dynamo
def _observed_call(entry: _ObservedModule, *args: Any, **kwargs: Any) -> Any:
    """Call a module as ``Module.__call__`` does, with its observers around ``forward``."""
    if not is_under_dynamo():
        entry.eager_passes.add(torch.is_grad_enabled())
    module, call = entry.module, _ObservedCall(entry)
    try:
        if not call.is_hooked:
            call.before(module, args, kwargs)
        output = module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch's
        if not call.is_hooked:
            call.after(module, args, kwargs, output)
        return output
    finally:
        call.end()


def call_eagerly(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module, compiled or not, as eager code with its observers around ``forward``."""
    entry = _ENTRIES.get(id(module))
    if entry is not None:
        return _observed_call(entry, *args, **kwargs)
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch's


def _has_hooks(module: nn.Module) -> bool:
    """Return whether anything runs around ``forward`` in ``Module.__call__``."""
    own = vars(module)
    return any(own.get(name) for name in _HOOKS) or any(getattr(torch_module, name, None) for name in _GLOBAL_HOOKS)
