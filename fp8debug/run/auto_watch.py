"""Wait for the models that an unmodified script trains, and watch each of them.

A model is recognized in two ways. Until torch.compile compiles anything, a hook on every module's forward pass sees the outermost
module with a Linear that runs with gradients. From the first compilation on nothing of ours may lie in what Dynamo traces, and
no guard may depend on us: the hook is gone, and the parameters that the first ``backward()`` reaches tell which models train.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fp8debug import adapters
from fp8debug.adapters.base import ADAPTERS
from fp8debug.adapters.watching import attach
from fp8debug.adapters.watching.coverage import roots_of
from fp8debug.adapters.watching.environment import rank_and_world
from fp8debug.errors import Fp8DebugError
from fp8debug.imports import after_import
from fp8debug.kernels.torch_state import outside_of_graphs, untraced
from fp8debug.observer.autograd_nodes import leaf_of
from fp8debug.observer.optimizer_hooks import after_any_optimizer
from fp8debug.run.arms import NEVER, REFUSED, Arm, apply_arm, convert_plain
from fp8debug.run.held_weights import HeldWeights
from fp8debug.run.loss_meter import LossMeter
from fp8debug.trainers import loop_of
from fp8debug.trainers.base import replace

#: Steps of the first optimizer in which models are looked for at every forward pass; later ones are found by their optimizer.
LOOKOUT_STEPS = 2
#: Autograd nodes of a loss that are looked at for the parameters that it reaches.
MAX_NODES = 1 << 20

#: Printed where a program ends and no model was trained in its own process.
_NOTHING = (
    "fp8debug: nothing recorded: no module with a Linear ran forward with gradients on in this process; to record processes that"
    " a script starts, start them with torchrun, or call fp8debug.watch() in them"
)

_NO_INFERENCE = (
    "fp8debug: nothing recorded: no module with a Linear ran forward without gradients in this process; leave out --inference to"
    " record a training"
)


class AutoWatch:
    """Waits for a script's models, then watches them: the first into ``out``, each further one into ``out/NAME OF ITS CLASS``.

    Args:
        out: the run directory, absolute.
        options: keyword arguments of :func:`fp8debug.watch`.

    Attributes:
        watches: of the models found so far.
        found: whether a model that trains was found, or the script attaches itself.
    """

    def __init__(self, out: Path, options: dict[str, Any]) -> None:
        self.watches: list[attach.Watch] = []
        self.found = False
        self._out = out
        self._options = options
        self._is_of_inference = bool(options.get("inference"))
        self._undo: list[Callable[[], None]] = []
        self._unhook: Callable[[], None] = lambda: None
        self._has_linears: dict[int, tuple[weakref.ref[nn.Module], bool]] = {}
        self._known: dict[int, weakref.ref[nn.Module]] = {}  # modules of the models found
        self._idle: dict[int, weakref.ref[nn.Module]] = {}  # models that ran without gradients
        self._within_idle: set[int] = set()
        self._names: set[str] = set()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._first_optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._num_steps = 0
        self._is_attaching = False
        self._has_seen_backward = False

    def start(self) -> None:
        """Wait for a model that trains, for its loss, and for a script that attaches itself; or for one that runs inference."""
        self._unhook = register_module_forward_pre_hook(untraced(self._before_forward)).remove
        self._undo.append(after_import("torch._dynamo", self._meet_dynamo))
        if not self._is_of_inference:
            self._undo.append(LossMeter(lambda: self.watches, self._before_backward).start())
            self._undo.append(after_any_optimizer(self._after_optimizer))
        attach.on_watch.append(self._leave_to_script)

    def stop(self) -> None:
        """Stop waiting; watches go on."""
        self._end_lookout()
        while self._undo:
            self._undo.pop()()
        if self._leave_to_script in attach.on_watch:
            attach.on_watch.remove(self._leave_to_script)

    def close(self, error: BaseException | None = None) -> None:
        """Stop waiting and end the runs, by the exception that ended the program if there is one; say if no model was found."""
        self.stop()
        for watch in self.watches:
            watch.note_end(error)
            watch.close()
        if not self.found:
            print(_NO_INFERENCE if self._is_of_inference else _NOTHING, file=sys.stderr)

    def _leave_to_script(self) -> None:
        if not self._is_attaching:
            self.found = True
            self.stop()

    def _meet_dynamo(self) -> None:
        """Have the hook taken off before Dynamo looks at anything, and before a compiled module warns of it."""
        from torch._dynamo.callback import callback_handler
        from torch._dynamo.eval_frame import OptimizeContext, OptimizedModule

        def make(own: Callable[..., Any]) -> Callable[..., Any]:
            def begin(*args: Any, **kwargs: Any) -> Any:
                self._end_lookout()
                return own(*args, **kwargs)

            return begin

        def make_of_module(own: Callable[..., Any]) -> Callable[..., Any]:
            def compiled(context: Any, fn: Any) -> Any:
                if isinstance(getattr(fn, "__self__", None), nn.Module):  # Module.compile(): hooks run inside
                    self._end_lookout()
                return own(context, fn)

            return compiled

        self._undo.append(replace(OptimizeContext, "__call__", make_of_module))
        self._undo.append(replace(callback_handler, "run_start_callbacks", make))
        self._undo.append(replace(OptimizedModule, "__init__", make))
        if torch.compiler.is_compiling() or _has_compiled():
            self._end_lookout()

    def _end_lookout(self) -> None:
        """Take the hook off every module's forward pass, and name the models that ran without gradients."""
        unhook, self._unhook = self._unhook, lambda: None
        unhook()
        if self.watches:
            for ref in self._idle.values():
                model = ref()
                if model is not None and not any(self._is_known(m) for m in model.modules()):
                    _say(f"not recorded: {type(model).__name__}, whose forward pass runs without gradients")
            self._idle.clear()

    def _is_known(self, module: nn.Module) -> bool:
        ref = self._known.get(id(module))
        return ref is not None and ref() is module

    def _before_forward(self, module: nn.Module, args: object) -> None:
        if self._is_known(module) or not self._holds_linears(module):
            return
        if self._is_of_inference:
            if not torch.is_grad_enabled():
                self._begin(module)
        elif torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
            self._begin(module)
        elif id(module) not in self._within_idle and not torch.is_grad_enabled():
            self._idle[id(module)] = weakref.ref(module)
            self._within_idle.update(id(m) for m in module.modules())

    def _holds_linears(self, module: nn.Module) -> bool:
        """Return whether a module is one that can be watched; each is looked through once."""
        ref, found = self._has_linears.get(id(module), (None, False))
        if ref is None or ref() is not module:
            found = _holds_linears(module)
            self._has_linears[id(module)] = weakref.ref(module), found
        return found

    def _before_backward(self, loss: Tensor) -> None:
        """At the first one: watch the models that a loss trains and that no hook has seen."""
        if self._has_seen_backward:
            return
        self._has_seen_backward = True
        for model in owners([p for p in trained_by(loss) if not self._is_watched(p)]):
            self._begin(model, is_late=True)
        if not self.watches and not self.found:  # sharded parameters are others than those of the graph
            for optimizer in _live(torch.optim.Optimizer):
                for model in owners(_parameters(optimizer)):
                    self._begin(model, is_late=True)

    def _is_watched(self, parameter: Tensor) -> bool:
        return any(watch.holds(parameter) for watch in self.watches)

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if self._first_optimizer is None:
            self._first_optimizer = weakref.ref(optimizer)
        self._num_steps += self._first_optimizer() is optimizer
        if self._num_steps >= LOOKOUT_STEPS:
            self._end_lookout()
        if optimizer in self._optimizers:
            return
        self._optimizers.add(optimizer)
        for model in owners([p for p in _parameters(optimizer) if not self._is_watched(p)]):
            if not any(self._is_known(m) for m in model.modules()):
                self._begin(model)

    def _begin(self, model: nn.Module, is_late: bool = False) -> None:
        """Watch a model.

        Args:
            model: the outermost module.
            is_late: its first forward pass is over.
        """
        if self._is_known(model):
            return
        self._known.update((id(m), weakref.ref(m)) for m in model.modules())
        self.found = True
        inner = roots_of(model)[0]
        out = self._out
        if self._names:
            name = type(inner).__name__
            number = sum(other == name or other.startswith(f"{name}-") for other in self._names)
            out /= f"{name}-{number + 1}" if number else name
            self._names.add(out.name)
        else:
            self._names.add(type(inner).__name__)
        self._is_attaching = True
        try:
            watch = attach.watch(model, out, **self._options)
            if is_late:
                watch.begin_late()
            self.watches.append(watch)
            if rank_and_world()[0] == 0:
                _say(f"recording {type(inner).__name__} into {_shown(out)}")
        except Fp8DebugError as error:
            _say(f"not recorded: {type(inner).__name__}: {error}")
        finally:
            self._is_attaching = False


class ArmWatch:
    """Records one arm: gives the model its arm at the first training forward, and ends the script after some steps.

    A watch that the script begins by ``fp8debug.watch`` is recorded into the arm's folder instead of the script's.

    Args:
        out: the run directory, absolute.
        options: keyword arguments of :func:`fp8debug.watch` that override the script's.
        arm: what to change.
        steps: the script ends before the step after so many; None lets it run to its end.
    """

    def __init__(self, out: Path, options: dict[str, Any], arm: Arm, steps: int | None) -> None:
        self.watch: attach.Watch | None = None
        self.found = False
        self._out, self._options = out, options
        self._undo: list[Callable[[], None]] = []
        self._arm, self._steps = arm, steps
        self._root: nn.Module | None = None  # the module whose forward begins a step
        self._targets: list[nn.Module] = []
        self._first = self._num_watches = 0
        self._held: HeldWeights | None = None
        self._held_step = -1
        self._own_watch = attach.watch

    def start(self) -> None:
        """Wait for the model, and stand in for ``fp8debug.watch``."""
        self._undo.append(register_module_forward_pre_hook(self._before_forward).remove)
        self._undo.append(LossMeter(lambda: [self.watch] if self.watch else [], self._before_backward).start())
        for place in (attach, adapters, sys.modules["fp8debug"]):
            vars(place)["watch"] = self._redirected
            self._undo.append(partial(vars(place).__setitem__, "watch", self._own_watch))

    def stop(self) -> None:
        """Stop waiting; a watch goes on."""
        while self._undo:
            self._undo.pop()()

    def close(self, error: BaseException | None = None) -> None:
        """Stop waiting and end the run, by the exception that ended the program if there is one; say if no model was found."""
        self.stop()
        if self.watch is not None:
            self.watch.note_end(error)
            self.watch.close()
        elif not self.found:
            print(_NOTHING, file=sys.stderr)

    def _redirected(self, target: object, path: str | Path, **options: Any) -> Any:
        if loop_of(target) is not None:  # a trainer: its model comes here when it is ready
            return self._own_watch(target, self._out, **options)
        out = self._out if self._num_watches == 0 else self._out / f"watch-{self._num_watches}"
        self._num_watches += 1
        roots = roots_of(target)
        if not self._targets:
            self._targets = roots
            convert_plain(self._arm, roots)
        watch = self._begin_watch(target, out, options)
        if self.watch is None:
            self.watch, self._first = watch, watch.current_step
        return watch

    def _begin_watch(self, target: object, out: Path, options: dict[str, Any]) -> attach.Watch:
        watch = self._own_watch(target, out, **{**options, **self._options})
        if self._options["every"] == NEVER:
            watch.skip_statistics()  # not at step 0 either
        return watch

    @outside_of_graphs  # the hook stays, so that its guards hold
    def _before_forward(self, module: nn.Module, args: object) -> None:
        if self._root is not None:
            if module is self._root and torch.is_grad_enabled():
                self._begin_step()
        elif torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()) and _holds_linears(module):
            self._root, self.found = module, True
            try:
                self._begin(module)
            except Fp8DebugError as error:
                _refuse(str(error))  # another arm than the one asked for must not go on

    def _before_backward(self, loss: Tensor) -> None:
        if self._root is None and trained_by(loss):
            if _has_compiled():
                _refuse("the script's model runs in compiled code alone; run the script without torch.compile")
            _refuse("no call of the script's model was seen before its first backward pass; call model(x), not model.forward(x)")

    def _begin(self, module: nn.Module) -> None:
        roots = self._targets or roots_of(module)
        if self._arm.held:
            self._held = HeldWeights(self._arm, roots, _refuse)
        applied = apply_arm(self._arm, roots, self._first, _refuse)
        if self.watch is None:
            self._num_watches += 1
            self.watch = self._begin_watch(module, self._out, {})
            self._first = self.watch.current_step
        if rank_and_world()[0] == 0:
            (self._out / "arm.json").write_text(json.dumps({**self._arm.to_dict(), "applied": applied}), encoding="utf-8")

    def _begin_step(self) -> None:
        assert self.watch is not None
        self.watch.begin_step()
        done = self.watch.current_step - self._first
        if self._steps is None or done < self._steps:
            return
        if done >= self._steps + self._arm.held:
            raise SystemExit(0)
        if self._held is not None and done != self._held_step:  # once a step, whatever the number of its micro-batches
            self._held_step = done
            try:
                self._held.hold()
            except Fp8DebugError as error:
                _refuse(str(error))


def trained_by(loss: Tensor) -> list[Tensor]:
    """Return the leaves of autograd's graph that a loss sends gradients to, in the order in which they are met."""
    found: list[Tensor] = []
    seen: set[Any] = set()
    todo = [loss.grad_fn]
    while todo and len(seen) < MAX_NODES:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := leaf_of(node)) is not None:
            found.append(leaf)
        todo.extend(following for following, _ in node.next_functions)
    return found


def owners(parameters: Iterable[Tensor]) -> list[nn.Module]:
    """Return the models that some parameters belong to.

    The smallest module that has all of them, or the widest around it in which nothing else trains; where no module has all,
    the outermost modules that have some.
    """
    wanted = {id(p): place for place, p in enumerate(parameters)}
    if not wanted:
        return []
    held = {}
    for module in _live(nn.Module):
        if not hasattr(module, "_modules"):  # its constructor has not run
            continue
        own = {id(p) for p in module.parameters()}
        if own & wanted.keys():
            held[id(module)] = module, own
    whole = [(module, own) for module, own in held.values() if own >= wanted.keys()]
    if whole:
        smallest = min((own for _, own in whole), key=len)
        trained = smallest | wanted.keys()
        fitting = [m for m, own in whole if own == smallest or all(id(p) in trained for p in m.parameters() if p.requires_grad)]
        inner = {id(m) for module in fitting for m in module.modules() if m is not module}
        tops = [m for m in fitting if id(m) not in inner]
    else:
        inner = {id(m) for module, _ in held.values() for m in module.modules() if m is not module}
        tops = [m for m, _ in held.values() if id(m) not in inner]
    tops = [m for m in tops if _holds_linears(m)]
    tops.sort(key=lambda m: min(wanted[id(p)] for p in m.parameters() if id(p) in wanted))
    return tops[:1] if whole else tops


def _live(kind: type[Any]) -> list[Any]:
    """Return all objects of a class; ``type`` and not ``isinstance``, which would call code of proxies."""
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _holds_linears(module: nn.Module) -> bool:
    return any(isinstance(m, nn.Linear) or any(a.matches(m) for a in ADAPTERS) for m in module.modules())


def _has_compiled() -> bool:
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"].get("total"))


def _say(text: str) -> None:
    print(f"fp8debug: {text}", file=sys.stderr)


def _shown(path: Path) -> str:
    """Return a path relative to the current directory where it lies below it."""
    here = os.getcwd()  # noqa: PTH109  # a text, as os.path wants it
    return os.path.relpath(path, here) if path.is_relative_to(here) else str(path)


def _refuse(why: str) -> NoReturn:
    print(f"{REFUSED}{why}", file=sys.stderr)
    raise SystemExit(2) from None


def shift_seeds(offset: int) -> None:
    """Seed torch, NumPy and ``random`` alike in every arm, and add an offset to the seeds that the script sets.

    A ``torch.Generator`` that the script makes and seeds is out of reach: its data stay the same.
    """
    own_torch, own_random, own_numpy = torch.manual_seed, random.seed, np.random.seed
    own_torch(offset)
    own_random(offset)
    own_numpy(offset)
    if not offset:
        return

    def shifted(seed: Any) -> Any:
        return seed + offset if isinstance(seed, int) else seed

    def manual_seed(seed: int) -> torch.Generator:
        return own_torch(shifted(seed))

    torch.manual_seed = torch.random.manual_seed = manual_seed
    random.seed = lambda a=None, version=2: own_random(shifted(a), version)
    np.random.seed = lambda seed=None: own_numpy(shifted(seed))
