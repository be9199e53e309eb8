"""``Watch``: a running recording, the one place where an Observer is joined to a RunWriter."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, SupportsFloat, cast

import torch
from torch import Tensor, nn

from fp8debug.adapters.deep_gemm import wrap_deep_gemm
from fp8debug.adapters.grouped.emulated import wrap_emulated_experts
from fp8debug.adapters.interception.gemm_flops import GemmCounter
from fp8debug.adapters.interception.listener import RootHooks, listener_of
from fp8debug.adapters.interception.matrices import OutsideGemms
from fp8debug.adapters.interception.regions import Regions
from fp8debug.adapters.interception.sublinears import TOKENS, SubLinear, kind_of_sublinear, was_called
from fp8debug.adapters.watching.compiled import NOT_RECORDED, is_compile_in_use, modules_in_compiled_code, run_samples_eagerly
from fp8debug.adapters.watching.coverage import Candidate, named_modules
from fp8debug.adapters.watching.dumps import Dumper
from fp8debug.adapters.watching.inference import MEASURES, as_called, compare_paths, round_to
from fp8debug.adapters.watching.inference_steps import InferenceSteps
from fp8debug.adapters.watching.optimizer_steps import UpdateRecorder, weights_of
from fp8debug.adapters.watching.parameter_census import ParameterCensus
from fp8debug.adapters.watching.pipeline import ignore_shape_inference, rank_entry
from fp8debug.adapters.watching.recipe_changes import RecipeChanges
from fp8debug.adapters.watching.recording_ranks import StandbyWriter
from fp8debug.adapters.watching.separate_losses import MAX_LOSSES, SeparateLosses, separate_models
from fp8debug.adapters.watching.step_writer import StepWriter
from fp8debug.adapters.watching.weight_updates import WeightUpdates, is_in_backward
from fp8debug.errors import Fp8DebugError, UsageError
from fp8debug.interruptions import is_ours
from fp8debug.kernels.reference import Operand
from fp8debug.kernels.torch_state import TorchState, is_capturing, is_transformed, ordinary_torch, outside_of_graphs
from fp8debug.observer.host_copy import HostCopy
from fp8debug.observer.observer import Observer, Settings
from fp8debug.observer.optimizer_hooks import after_any_optimizer, before_any_optimizer, optimizers_under_way
from fp8debug.store.schema import ENDED_BY, ENDED_CODE, OTHER_LOSS_CODE, RECORDING_STOPPED, STOPPED_CODE
from fp8debug.store.write.writer import RunWriter
from fp8debug.trackers.live import Live
from fp8debug.types import Gemm, TensorRole

_WATCHES: weakref.WeakSet[Watch] = weakref.WeakSet()
#: Backward passes without a step, after which that is told: more than anybody accumulates gradients over in a first step.
MANY_BACKWARDS = 256


class Watch:
    """A running recording; made by :func:`fp8debug.watch`.

    A process that was forked while it runs holds a watch that does nothing, and a model without hooks.

    Attributes:
        path: the run directory.
    """

    def __init__(
        self,
        candidates: list[Candidate],
        roots: list[nn.Module],
        settings: Settings,
        writer: RunWriter,
        optimizer: torch.optim.Optimizer | None,
        first_step: int,
        dumper: Dumper | None,
        changes: RecipeChanges,
        compiled: str = "auto",
        turns: int | None = None,
        stage: int = 0,
        matrices: Sequence[Candidate] = (),
        live: Live | None = None,
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
    ) -> None:
        self.path = writer.path
        self._candidates = candidates
        self._writer = writer
        self._live = live
        self._sink = StepWriter(writer, changes, dumper, live)
        self._sink.stages.update({stage} if stage else ())
        self._observer = Observer(settings, self._sink, self._report)
        if isinstance(writer, StandbyWriter):
            self._observer.is_asleep = True
            writer.on_activate = partial(setattr, self._observer, "is_asleep", False)
        TOKENS[self._observer] = self._record_tokens
        self._observer.has_fp8 = any(c.fp8 for c in candidates)
        self._observer.start_step(first_step)
        self._inference = settings.inference
        self._passes = InferenceSteps(roots, self._observer, self._end_pass) if settings.inference else None
        if self._passes is None:
            self._observer.before_forward = self._begin_forward
        else:
            self._observer.before_inference = self._passes.see
        self._changes = changes
        self._dumper = dumper
        if dumper is not None:
            self._observer.on_operand = self._dump
        self._explicit = False
        self._counted = False
        self._optimizer, self._is_told = optimizer, False  # told: an optimizer's step was seen; a compiled one never is
        self._noted: dict[str, Any] = {}
        self._unread: set[str] = set()
        self._uses: dict[str, dict[str, Any]] = {}  # by FQN: a GEMM of another module with its weight
        self._roots = roots
        self._params = {id(p) for root in roots for p in root.parameters()}
        self._losses, self._has_other_loss, self._num_looked_at = SeparateLosses(self._params), False, 0
        self._updates = WeightUpdates(roots)
        self._first_weights = self._updates.weights()
        self._compared: list[tuple[int, list[str], Tensor | HostCopy]] = []  # step, modules and MEASURES of each
        self._kept_weights: Mapping[str, Tensor] = {}  # elements of the last comparison's weights
        self._optimizer_steps = UpdateRecorder(weights_of(candidates))
        self._census = ParameterCensus(roots, candidates, include, exclude)
        self._weights: Any = None  # state after the last backward pass, or at the last forward pass where none is told
        self._num_backwards = self._num_ended = 0
        self._started = time.perf_counter()
        self._closed = self._is_over = False
        #: Of close(), in order, what is not done yet.
        self._ending = [self._end_steps, self._end_recording, self._end_files, self._end_live]
        self._pid = os.getpid()
        self._has_looked = self._has_told_compiled = False
        self._compiled, self._regions, self._turns = compiled, cast("Regions | None", None), settings.turns
        self._unseen: set[str] = set()
        self._before_next: Callable[[], None] | None = None
        self._counter = GemmCounter(named_modules(roots), kind_of_sublinear)
        self._observer.on_product = self._counter.add
        self._undo: list[Callable[[], None]] = []
        if writer.stopped is not None and not self._sink.decides:
            self._observer.turn_off()
        try:
            self._install_hooks(roots, matrices, turns)
        except BaseException:
            self.detach()
            raise
        if not self._inference:
            self._follow_optimizers(optimizer)
        atexit.register(self._close_at_exit)
        self._has_noted_end = False
        _WATCHES.add(self)

    def _install_hooks(self, roots: list[nn.Module], matrices: Sequence[Candidate], turns: int | None) -> None:
        """Attach the adapters to their modules, and the hooks that are those of the whole model."""
        for c in self._candidates:
            self._attach(c)
        watched = [c for c in self._candidates if c.reason is None]
        intercepts = any(c.is_intercepted and getattr(c.adapter, "intercepts_ops", True) for c in watched)
        is_reported = partial(getattr, self, "_has_told_compiled")
        self._outside = OutsideGemms(matrices, self._candidates, self._observer, self._counter, intercepts)
        if self._passes is not None:
            self._undo.append(self._passes.follow())
        self._undo.append(RootHooks(roots, self._observer, self._counter, intercepts, is_reported, self._outside).remove)
        if intercepts or matrices:
            self._undo.append(wrap_deep_gemm(listener_of(self._observer)))
        self._undo.append(wrap_emulated_experts(listener_of(self._observer)))
        self._undo.append(ignore_shape_inference(self._observer, self._see_stage))
        if self._compiled in ("auto", "repeat"):
            names: dict[int, set[str]] = {}
            for c in watched:
                names.setdefault(id(getattr(c.module, "owner", c.module)), set()).add(c.fqn)
            is_auto = self._compiled == "auto"
            turns = turns or (None if is_auto else 1)
            self._regions = Regions(roots, names, self._observer, self._outside, turns, only_whole=is_auto)
            self._undo.append(self._regions.remove)
        if self._compiled == "eager":
            self._before_next, undo = run_samples_eagerly(self._observer)
            self._undo.append(undo)

    def _follow_optimizers(self, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is not None:
            self._undo.append(optimizer.register_step_post_hook(self._after_optimizer).remove)
        else:
            self._undo.append(after_any_optimizer(self._after_any_optimizer))
        self._undo.append(before_any_optimizer(self._before_optimizer))
        self._undo.append(after_any_optimizer(self._record_update))

    def _attach(self, candidate: Candidate) -> None:
        """Have an adapter watch a module; one that it fails at is left out, and reported."""
        if candidate.reason is not None or candidate.adapter is None:
            return
        try:
            self._undo.append(candidate.adapter.attach(candidate.module, candidate.fqn, self._observer))
        except Fp8DebugError:
            raise
        except Exception as error:  # a library that is not as we know it; the other modules are
            if not is_ours(error):
                raise
            candidate.reason = f"it cannot be watched: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]
            say(self._writer, self._observer.step, f"{candidate.fqn} is not recorded: {candidate.reason}", candidate.fqn)

    @property
    def current_step(self) -> int:
        """Number of the step that is under way."""
        return self._observer.step

    def step(
        self,
        loss: Tensor | float | None = None,
        grad_norm: Tensor | float | None = None,
        lr: float | None = None,
        loss_scale: Tensor | float | None = None,
        tokens: int | None = None,
    ) -> None:
        """Close the step that is under way; call it once per optimizer step, after it. Of inference: once per batch.

        Without any call steps are counted from the optimizer, and only the learning rate is known of them; of inference each call
        of the root is one. Where a batch of inference takes several passes, call it before the first of all too, which closes
        nothing: else the first pass is a step of its own.

        Args:
            loss: number or scalar tensor; a tensor on a GPU is copied without synchronizing.
            grad_norm: the same.
            lr: learning rate; read from the optimizer when it is not given.
            loss_scale: of a gradient scaler.
            tokens: tokens of the step.

        Raises:
            UsageError: a value is no number, or the watch is closed.
        """
        if os.getpid() != self._pid:
            return
        if self._closed:
            raise UsageError(f"the watch of {self.path} is closed; no step can be recorded after close()")
        is_announced = self._passes is not None and not self._explicit and not self._passes.has_pass
        self._explicit = self._observer.is_told_steps = True
        if is_announced:
            return
        self.look_at_terms(loss)
        self._end({"loss": loss, "grad_norm": grad_norm, "lr": lr, "loss_scale": loss_scale, "tokens": tokens})

    def begin_step(self) -> None:
        """Say that a step begins: one that an optimizer ended is closed. A module that runs in BF16 does not say it."""
        self.close_counted_step()

    def skip_statistics(self) -> None:
        """Take none at the step under way; loss and learning rate are recorded all the same."""
        self._observer.sampling = False

    def begin_late(self) -> None:
        """Take no statistics of the step under way, whose forward pass is over, but of the one after it."""
        observer = self._observer
        if not observer.sampling:
            return
        observer.sampling = False
        if self._before_next is None:  # else compiled code is avoided where the clock wants a sample, and nowhere else

            def sample() -> None:
                observer.sampling = not observer.is_off and not observer.is_asleep

            observer.after_step.append(sample)

    def holds(self, parameter: Tensor) -> bool:
        """Return whether a parameter is one of the model's, as it was when the watch began."""
        return id(parameter) in self._params

    def is_copy_of(self, other: Watch) -> bool:
        """Return whether another watch's model has parameters of the same shapes: a copy, to compare both."""
        return self._shapes() == other._shapes()

    def _shapes(self) -> list[tuple[int, ...]]:
        return sorted(tuple(p.shape) for root in self._roots for p in root.parameters())

    def note_other_loss(self, text: str) -> None:
        """Note once that another model of the process trains by a loss of its own, so that this one's need not fall."""
        if not self._has_other_loss:
            self._has_other_loss = True
            self._writer.event(self._observer.step, "note", None, text, OTHER_LOSS_CODE)

    def look_at_terms(self, loss: Any, others: Iterable[Watch] = ()) -> None:
        """Note whether a loss, with its graph, is a sum of losses of separate models; of the first losses of the run alone.

        Args:
            loss: a loss; one without a graph tells nothing.
            others: watches whose models it may be of as well.
        """
        if self._num_looked_at >= MAX_LOSSES or not isinstance(loss, Tensor) or loss.grad_fn is None:
            return
        self._num_looked_at += 1
        try:
            groups = separate_models(loss, self._params.union(*(other._params for other in others)))
        except Exception as error:
            if not is_ours(error):
                raise
            self._give_up(error)
            return
        if len(groups) > 1 and any(not group.isdisjoint(self._params) for group in groups):
            self.note_other_loss("the loss is a sum of terms that reach no common parameter: losses of separate models")

    def gradients(self) -> tuple[Any, ...]:
        """Return a value that changes when a backward pass gives gradients to the model, or when they are cleared."""
        return self._updates.gradients()

    def begin_backward(self) -> None:
        """Say that a loss of the step under way is there: a step that was ended before is closed."""
        self.close_counted_step()  # compiled code does not tell that the next step has begun
        self._see_update()

    def end_backward(self) -> None:
        """Say that a backward pass is over: where no optimizer of torch's updates the weights, it is seen when they change."""
        if self._explicit or self._is_told:
            return
        self._num_backwards += 1
        self._weights = self._updates.weights()
        if self._num_backwards == MANY_BACKWARDS:
            self._say_no_steps()

    def note(self, **values: Any) -> None:
        """Give numbers (as for :meth:`step`) of the step under way when steps are counted from the optimizer."""
        self._noted.update(values)

    def compare_inference(self, *args: Any, inference: Callable[..., Any] | None = None, **kwargs: Any) -> None:
        """Note how far inference's logits of a batch lie from training's, which rule F122 judges, and which module parts first.

        Modules are compared where both passes call modules of the same names and nothing is compiled (see ``compare_paths``).

        Args:
            args: what the model's forward takes; one mapping whose keys are all names of its arguments is taken as keywords.
            inference: the path of inference; the model with its FP8 Linears in high precision by default.
            kwargs: as args.
        """
        found = compare_paths(self._roots[0], *as_called(self._roots[0], args, kwargs), inference, self._kept_weights)
        self._kept_weights = found.weights
        self.note(**found.columns)
        if found.problem is not None:
            self._observer.report("compare_inference", f"not told by module: {found.problem}", True)
        if found.values is not None:
            values = HostCopy(found.values) if found.values.is_cuda else found.values
            self._compared.append((self._observer.step, found.modules, values))

    def _tell_compared(self, *, wait: bool = False) -> None:
        """Write how modules of training and inference differ, as events, once the numbers have arrived."""
        while self._compared:
            step, modules, values = self._compared[0]
            if isinstance(values, HostCopy):
                if not (wait or values.is_done()):
                    return
                values = values.result()
            del self._compared[0]
            rows = [[round_to(number) for number in row] for row in values.tolist()]
            told = {"measures": MEASURES, "modules": dict(zip(modules, rows, strict=True))}
            self._writer.event(step, "inference", None, json.dumps(told))

    def coverage(self) -> list[dict[str, Any]]:
        """Return one entry per Linear-like module: FQN, kind, whether it runs in FP8, its effective casts, and why not.

        The keys are those of ``modules`` in the manifest (docs/schema.md).
        """
        return [c.describe(i) for i, c in enumerate(self._candidates)]

    def detach(self) -> None:
        """Take every hook off the model, which is then as it was before; what was recorded so far is kept."""
        while self._undo:
            undo = self._undo[-1]
            try:
                undo()
            except BaseException as error:
                if is_ours(error):
                    self._undo.pop()
                raise
            if self._undo and self._undo[-1] is undo:
                self._undo.pop()

    def close(self) -> None:
        """Detach, write what is under way, and end the run; calling it again does nothing.

        After an exception of the program that came between, it goes on where it was: when called again, or when the process ends.
        """
        if self._is_over:
            return
        self._closed = True
        while self._ending:
            end = self._ending[0]
            end()
            if self._ending and self._ending[0] is end:  # else a signal handler has called close() meanwhile
                del self._ending[0]
        self._is_over = True
        atexit.unregister(self._close_at_exit)

    def _end_steps(self) -> None:
        self.close_counted_step()
        self._see_update()
        if self._passes is not None and not self._explicit and self._passes.has_pass:
            self._end_pass()
        elif self._observer.has_rows:  # a step that was cut short, by an exception say
            if self._has_other_loss and not self._has_noted_end:
                self._noted.pop("loss", None)  # the other model's, which reached this one after its last step
            self._end({}, counted=True)
        elif not self._num_ended and is_compile_in_use() and self._updates.weights() != self._first_weights:
            self._end({}, counted=True)  # all of the training ran in one compiled function, which coverage and stderr name
        if self._num_backwards > 1:
            self._say_no_steps()

    def _end_recording(self) -> None:
        try:
            self._changes.flush()
            self.detach()
            with ordinary_torch():
                self._observer.hand_over(wait=True)
            self._tell_compared(wait=True)
            self._report_never_called()
        except Exception as error:  # the device may be what failed; the user's own error is the one to be seen
            if not is_ours(error):
                raise
            self._give_up(error)

    def _end_files(self) -> None:
        if self._dumper is not None:
            self._dumper.close()
        self._writer.close()
        TOKENS.pop(self._observer, None)  # which would keep the model alive

    def _end_live(self) -> None:
        if self._live is not None:
            try:
                self._live.close()
            except Exception as error:
                if not is_ours(error):
                    raise
                say(None, 0, f"trackers: {type(error).__name__}: {error}"[:300])

    def _leave(self) -> None:
        """Let go of the model in a forked child, and write nothing."""
        self._closed = self._is_over = True
        if self._live is not None:
            self._live.leave()
        self.detach()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.note_end(error)
        self.close()

    def note_end(self, error: BaseException | None) -> None:
        """Record the exception that ends the program, once; ``sys.exit()`` without an error status is none."""
        is_exit = isinstance(error, SystemExit) and error.code in (None, 0)
        if error is not None and not is_exit and not self._closed and not self._has_noted_end:
            self._has_noted_end = True
            text = f"{ENDED_BY} {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            self._writer.event(self._observer.step, "note", None, text[:300], ENDED_CODE)

    def _close_at_exit(self) -> None:
        self.note_end(uncaught_exception())
        self.close()

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """In a sampled step: keep a sample of the weights, for what the optimizer does to them."""
        if not self._observer.begins_round or is_capturing() or is_transformed():
            return
        try:
            with ordinary_torch():
                observer = self._observer
                self._optimizer_steps.begin(optimizer, observer.step, observer.step_count, observer.gradient_sums)
        except Exception as error:
            if not is_ours(error):
                raise
            self._leave_out_updates(error)
        self._take_census(lambda: self._census.see(optimizer, self._observer.step, self._observer.step_count))

    def _record_update(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """In a sampled step: record what the optimizer has done to the weights."""
        if is_capturing():
            return
        self._optimizer_steps.note(optimizer, self._observer.step)
        if self._losses.note(optimizer):
            self.note_other_loss("two optimizers without a common parameter step by turns, each after backward passes of its own")
        if not self._observer.begins_round:
            return
        try:
            with ordinary_torch():
                self._observer.updates += self._optimizer_steps.end(optimizer, self._observer.step_count)
        except Exception as error:
            if not is_ours(error):
                raise
            self._leave_out_updates(error)
        self._take_census(lambda: self._observer.parameters.extend(self._census.end(optimizer, self._observer.step_count)))

    def _take_census(self, take: Callable[[], None]) -> None:
        """Look at the parameters that are no watched weights; after an error of fp8debug they are not recorded any more."""
        try:
            with ordinary_torch():
                take()
        except Exception as error:
            if not is_ours(error):
                raise
            self._census = ParameterCensus()
            text = f"other parameters are not recorded: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]
            say(self._writer, self._observer.step, text, kind="note")

    def _leave_out_updates(self, error: Exception) -> None:
        """Record no more optimizer steps after an error of fp8debug; everything else is still recorded."""
        self._optimizer_steps = UpdateRecorder({})
        text = f"optimizer steps are not recorded: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]
        say(self._writer, self._observer.step, text, kind="note")

    @outside_of_graphs
    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if optimizer is self._optimizer and self._counted and not self._explicit:
            self._end({}, settle=False, counted=True)  # no watched module ran in FP8 since: a warm-up in BF16
        self._optimizer, self._is_told = optimizer, True
        self._counted = True
        try:
            if self._observer.has_rows and not is_capturing():
                with ordinary_torch():
                    self._observer.flush_many()
        except Exception as error:
            if not is_ours(error):
                raise
            self._give_up(error)
        if self._before_next is not None:
            self._before_next()

    def _after_any_optimizer(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if self._is_ours(optimizer):
            self._after_optimizer(optimizer, args, kwargs)

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(id(p) in self._params for group in optimizer.param_groups for p in group["params"])

    def count_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer of the model has ended the step, if that is not known yet."""
        if not self._counted:
            self._after_any_optimizer(optimizer, (), {})

    def close_counted_step(self) -> None:
        """Close a step that an optimizer ended; at the next forward pass, so that ``step()`` can come first."""
        if self._counted and not self._explicit:
            self._end({}, counted=True)

    def _begin_forward(self) -> None:
        """At a watched module's forward pass: close a step that an optimizer ended; recipes set since then hold in this one."""
        self.close_counted_step()
        self._see_update()
        try:
            self._changes.record_changes(self._observer.step)
        except Exception as error:
            if not is_ours(error):
                raise
            self._give_up(error)

    def _end_pass(self) -> None:
        """Close the step of a pass without gradients, unless ``step()`` closes them."""
        if self._explicit:
            return
        self._end({}, counted=True)
        if self._before_next is not None:
            self._before_next()

    def _see_update(self) -> None:
        """Close the step when the weights have changed since its backward pass without a word from an optimizer.

        Backward passes are told by :meth:`end_backward`. Where nobody does, weights are compared from one forward pass to the
        next, and the rows of a sampled step tell whether a backward pass ran.
        """
        if self._explicit or self._inference or self._is_told or is_in_backward():
            return
        if self._num_backwards and self._weights is None:  # this step has had none
            return
        if any(self._is_ours(optimizer) for optimizer in optimizers_under_way()):  # which says when its step is over
            return
        weights = self._updates.weights()
        has_changed = self._weights is not None and weights != self._weights
        if self._num_backwards:
            self._weights = None if has_changed else self._weights
        else:
            self._weights = weights
            has_changed = has_changed and (not self._observer.sampling or self._observer.has_gradients)
        if has_changed:
            self._end({}, counted=True)

    def _say_no_steps(self) -> None:
        """Say once that no step was counted, though gradients were computed."""
        if self._num_ended or self._explicit or self._counted:
            return
        self._num_ended = 1
        say(
            self._writer,
            self._observer.step,
            "no steps counted: no torch optimizer of this model stepped, and no change of its weights was seen; attach"
            " fp8debug.watch(model, ...) in the script and call watch.step(loss=loss) after each update",
            kind="note",
        )

    def _end(self, given: dict[str, Any], *, settle: bool = True, counted: bool = False) -> None:
        """Close the step; an error of fp8debug ends the recording, and only a wrong number given to ``step()`` is raised.

        An exception of the program passes through when the step is closed.

        Args:
            given: numbers of the step.
            settle: whether recipes may change now.
            counted: the step was counted from an optimizer, whose caller knows nothing of a wrong number in ``note()``.
        """
        scalars = {**self._noted, **{k: v for k, v in given.items() if v is not None}}
        try:
            scalars = {name: _number(name, value) for name, value in scalars.items()}
        except UsageError as error:
            self._noted, self._counted = {}, False
            if not counted:
                raise
            self._give_up(error)
            scalars = {}
        step, before = self._observer.step, TorchState()
        try:
            with ordinary_torch():
                self._close_step(scalars, settle)
        except BaseException as error:
            before.restore()
            if not is_ours(error):
                if self._observer.step == step:
                    with ordinary_torch():
                        self._observer.end_step(scalars)
                self._noted, self._counted = {}, False
                raise
            self._give_up(error)
        self._noted, self._counted = {}, False
        if self._writer.stopped is not None and not self._sink.decides:
            self._observer.turn_off()

    def _close_step(self, scalars: dict[str, Any], settle: bool) -> None:
        self._num_ended += 1
        self._tell_compared()
        now = time.perf_counter()
        if "lr" not in scalars and self._optimizer is not None:
            scalars["lr"] = self._optimizer.param_groups[0].get("lr")
        scalars["seconds"], self._started = now - self._started, now
        if self._observer.sampling:
            self._say_unread(self._changes.refresh_backends())
        if self._observer.sampling:
            self._note_what_ran()
            self._report_compiled(self._observer.modules_seen)
            self._write_turns()
        if self._observer.begins_round:
            self._take_census(lambda: self._observer.parameters.extend(self._census.finish(self._observer.step_count)))
        self._observer.end_step(scalars)
        if settle:
            self._changes.apply_pending(self._observer.step)

    def _give_up(self, error: BaseException) -> None:
        """Stop observing after an error of fp8debug: reported once and as an event; what waits is still written."""
        if not self._observer.is_off:
            self._observer.turn_off()
            text = f"{RECORDING_STOPPED}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]
            say(self._writer, self._observer.step, text, kind="recording", code=STOPPED_CODE)

    def _dump(self, module: str, actual: bool, gemm: Gemm, tensor: TensorRole, reference: Tensor, operand: Operand) -> None:
        assert self._dumper is not None
        self._dumper.observe(self._observer.step, module, actual, gemm, tensor, reference, operand)

    def _record_tokens(self, step: int, module: str, tokens: list[int]) -> None:
        self._writer.event(step, "tokens", module, json.dumps(tokens))

    def _report(self, module: str, text: str, aloud: bool, code: str | None = None) -> None:
        text = f"{module} is {text}"
        if aloud:
            say(self._writer, self._observer.step, text, module, code=code)
        else:
            self._writer.event(self._observer.step, "skipped", module, text, code)

    def _see_stage(self, number: int) -> None:
        """Note that a pipeline stage runs here; a rank other than 0 then says which modules it has."""
        if number in self._sink.stages:
            return
        self._sink.stages.add(number)
        try:
            if self._writer.rank:
                self._writer.update_manifest(rank_entry(self._roots, self.coverage()), add=True)
        except Exception as error:
            if not is_ours(error):
                raise
            self._give_up(error)

    def _say_unread(self, candidates: list[Candidate]) -> None:
        """Say once of each module that its recipe cannot be read; aloud of the first."""
        for c in candidates:
            if c.unread is not None and c.fqn not in self._unread:
                self._report(c.fqn, f"recorded, but not in coverage: {c.unread}", not self._unread)
                self._unread.add(c.fqn)

    def _note_what_ran(self) -> None:
        """At the end of a sampled step: note which modules were called, and the FLOPs of all GEMMs if it counted them."""
        counted = self._counter.take() if self._counter.is_wanted else None
        changed = False
        for found in self._outside.news():
            self._candidates.append(found)
            self._changes.add(found)
            changed = True
        if counted is not None:
            self._writer.update_manifest({"gemms": counted, "gemms_note": self._counter.note}, add=True)
            self._uses = {entry["weight"].rpartition(".")[0]: entry for entry in reversed(counted) if entry["weight"]}
            changed |= self._add_modules_in_fp8(counted)
        for c in self._candidates:
            if c.recomputed != (how := self._observer.modules_recomputed.get(c.fqn)):
                c.recomputed, changed = how, True
        called = self._observer.modules_called
        if called and not is_compile_in_use():
            for c in self._candidates:
                if c.reason is None and not (c.is_known_to_run and c.not_run is None):
                    not_run = None if c.fqn in called or was_called(c.module) else self._why_not_run(c)
                    changed |= (c.is_known_to_run, c.not_run) != (True, not_run)
                    c.is_known_to_run, c.not_run = True, not_run
        if changed:
            self._changes.write()

    def _add_modules_in_fp8(self, counted: list[dict[str, Any]]) -> bool:
        """List each module that no adapter takes and that ran FP8 GEMMs; return whether there is any."""
        known = {c.fqn for c in self._candidates} | {
            c.fqn.rpartition(".")[0] for c in self._candidates if isinstance(c.module, SubLinear)
        }
        modules = {fqn or type(module).__name__: module for module, fqn in reversed(named_modules(self._roots))}
        compiled = modules_in_compiled_code(self._roots, inference=self._inference)
        watched = {id(c.module) for c in self._candidates}
        for entry in counted:
            if entry["fp8"] and entry["fqn"] not in known and entry["fqn"] in modules:
                inside = modules[entry["fqn"]].modules()
                if id(modules[entry["fqn"]]) in compiled and any(id(m) in watched for m in inside):
                    continue  # its GEMMs are those of Linears that compiled code calls, which are named themselves
                known.add(entry["fqn"])
                why = self._outside.unassigned.get(entry["fqn"], "fp8debug cannot intercept them")
                reason = f"FP8 GEMMs run in it ({', '.join(entry['ops'])}) and are not recorded: {why}"
                found = Candidate(entry["fqn"], modules[entry["fqn"]], None, reason, is_known_to_run=True, ran_fp8=True)
                self._candidates.append(found)
                self._changes.add(found)
                self._report(found.fqn, f"in coverage alone: {reason}", True)
        return len(known) > 0 and any(c.ran_fp8 for c in self._candidates)

    def _why_not_run(self, candidate: Candidate) -> str | None:
        """Return why a module that is set to run in FP8 does not, having not been called; None for one that is not set to."""
        recipe = getattr(candidate.module, "recipe", None)
        if candidate.recipe() is None or (recipe is not None and recipe.is_high_precision):  # a schedule's BF16 steps
            return None
        if (use := self._uses.get(candidate.fqn)) is not None:
            return f"never called in a sampled step: {use['fqn']} multiplies by its weight itself, in {use['precision']}"
        if "forward" in vars(candidate.module):
            return "its forward was replaced on the instance after convert(), and the new one does not run in FP8"
        return "never called in a sampled step: what multiplies by its weight elsewhere, if anything, does not run in FP8"

    def _report_compiled(self, seen: set[str]) -> None:
        """Mark the modules that only compiled code calls, for coverage, and report them once on stderr."""
        self._has_looked = True
        accounted_for = seen | self._observer.modules_given_up
        waiting = [c for c in self._candidates if c.reason is None and c.fqn not in accounted_for]
        unseen = {c.fqn for c in waiting if not was_called(c.module)}
        if self._before_next is not None or unseen == self._unseen:
            return
        self._unseen = unseen
        compiled = modules_in_compiled_code(self._roots, inference=self._inference) if unseen else set()
        reasons = self._regions.reasons if self._regions is not None else {}
        before = [c.why_compiled for c in self._candidates]
        for c in self._candidates:
            key = id(getattr(c.module, "owner", c.module))
            is_hidden = c.fqn in unseen and key in compiled
            c.why_compiled = reasons.get(key, NOT_RECORDED[self._compiled]) if is_hidden else None
        if [c.why_compiled for c in self._candidates] != before:
            self._changes.write()
        hidden = [c.fqn for c in self._candidates if c.why_compiled == NOT_RECORDED[self._compiled]]
        if hidden and not self._has_told_compiled:
            self._has_told_compiled = True
            which = "is" if len(hidden) == 1 else "are"
            text = (
                f"{len(hidden)} of {len(self._candidates)} modules {which} not recorded at step {self._observer.step}"
                f" ({hidden[0]} is the first): {NOT_RECORDED[self._compiled]}"
            )
            say(self._writer, self._observer.step, text)

    def _write_turns(self) -> None:
        """Say in the manifest in how many sampled steps a module is recorded once, where compiled modules have it changed."""
        if self._regions is not None and self._regions.turns > self._turns:
            self._turns = self._regions.turns
            self._writer.update_manifest({"turns": self._turns})

    def _report_never_called(self) -> None:
        if self._observer.is_off or not self._has_looked:
            return
        accounted_for = self._observer.modules_seen | self._observer.modules_given_up
        silent = [c for c in self._candidates if c.reason is None and c.fqn not in accounted_for]
        missing = [c.fqn for c in silent if not was_called(c.module) and c.why_compiled is None]
        silent = [c for c in silent if c.why_compiled is None]
        if silent and not missing and not self._observer.modules_seen and not any(c.fp8 for c in silent):
            text = (
                f"no FP8 GEMM observed in any of {len(silent)}: they run in high precision, or in kernels that fp8debug cannot"
                " intercept"
            )
            say(self._writer, self._observer.step, text)
        for fqn in missing:
            self._writer.event(self._observer.step, "skipped", fqn, "never called in a sampled step")
        if missing:
            names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            say(None, 0, f"never called in a sampled step, no statistics: {names}; a direct call of forward() is not seen")


def _number(name: str, value: Any) -> Any:
    """Return a number or a scalar tensor as it is, and what can be turned into a number as one."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise UsageError(f"{name} must be a number or a scalar tensor, got {value.dtype}{list(value.shape)}")
    if isinstance(value, Tensor | int | float):
        return value
    if not isinstance(value, SupportsFloat):
        raise UsageError(f"{name} must be a number or a scalar tensor, got {value!r}")
    return float(value)


def _leave_all() -> None:
    for watch in list(_WATCHES):
        watch._leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all)


def uncaught_exception() -> BaseException | None:
    """Return the exception that ends this process, None where it ends by itself; at an interactive prompt none does."""
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return None
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def say(
    writer: RunWriter | None,
    step: int,
    text: str,
    module: str | None = None,
    kind: str = "skipped",
    code: str | None = None,
) -> None:
    """Report something skipped or dumped: once on stderr, and as an event."""
    print(f"fp8debug: {text}", file=sys.stderr)
    if writer is not None:
        writer.event(step, kind, module, text, code)
