"""The arms of an experiment: one script trained in BF16, in FP8, in FP8 with a fallback list, or with FP8 tensors and BF16 GEMMs.

An arm is a value that both halves know: ``fp8debug verify`` writes it to a file, ``fp8debug.run`` reads it in the training
process and gives it to the model at its first training forward, after the script has converted the model, loaded its
weights and planted its faults. torch is loaded only by the functions that touch a model.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fp8debug.errors import NoMatchError, UnknownNameError, UsageError
from fp8debug.store.file_checks import read_json

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fp8debug.fallback import Fallback
    from fp8debug.linear import Fp8Linear
    from fp8debug.recipes import Cast
    from fp8debug.types import Gemm, TensorRole

#: Begins the last word of a training process that cannot give its model the arm.
REFUSED = "fp8debug: this arm cannot be trained: "

#: ``every`` of an arm that records its loss alone, which is what counts, unless ``--every`` asks for statistics.
NEVER = 2**62

#: Kinds of modules, as a manifest has them, whose casts an arm knows; None in a run that says no kind. Modules of other stacks
#: leave FP8 by what ``other_stacks`` does.
KNOWN_KINDS = ("Fp8Linear", "Float8Linear", "Linear", None)

#: What computes: nothing in FP8, what the script converts, or the same with every operand dequantized before its GEMM.
COMPUTES = ("bf16", "fp8", "fp8_tensors")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Difference of one training of an experiment from the unmodified script.

    Attributes:
        name: what it is called in folders and tables.
        compute: ``bf16`` takes every module out of FP8; ``fp8`` leaves the script's casts; ``fp8_tensors`` quantizes
            and dequantizes each operand as the script has it, and runs the GEMMs in the model's own dtype.
        fallbacks: entries of a fallback list, applied to an ``fp8`` arm.
        recipe: what a model without FP8 modules is converted to; None leaves such a model to be an error.
        held: steps after the window in which the weights stay as they were trained, for the loss of inference.
        inference: ``bf16`` or ``fp8`` in those steps; None is what it was trained in.
        further: names of modules of other stacks that the BF16 arm takes out of FP8: Linears, or such as attention.

    Raises:
        UnknownNameError: no such compute, or no such inference.
        UsageError: a negative number of held steps, or an inference without any.
    """

    name: str
    compute: str = "fp8"
    fallbacks: tuple[Mapping[str, Any], ...] = ()
    recipe: str | None = None
    held: int = 0
    inference: str | None = None
    further: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.compute not in COMPUTES:
            raise UnknownNameError("compute of an arm", self.compute, COMPUTES)
        if self.inference not in (None, "bf16", "fp8"):
            raise UnknownNameError("inference of an arm", self.inference, ("bf16", "fp8"))
        if self.held < 0 or (self.inference is not None and not self.held):
            raise UsageError(f"inference needs at least one step with the weights held, got {self.held}")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        entries = [dict(entry) for entry in self.fallbacks]
        values: dict[str, Any] = {"name": self.name, "compute": self.compute, "fallbacks": entries, "recipe": self.recipe}
        if self.further:
            values["further"] = list(self.further)
        return {**values, "held": self.held, "inference": self.inference} if self.held else values

    @classmethod
    def read(cls, text: str) -> Arm:
        """Return the arm of a compute's name, or of a JSON file of :meth:`to_dict`.

        Raises:
            UsageError: neither.
        """
        if text in COMPUTES:
            return cls(name=text, compute=text)
        try:
            values = read_json(Path(text))
            further = tuple(values.get("further", ()))
            return cls(**{**values, "fallbacks": tuple(values["fallbacks"]), "further": further})
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, UsageError):
                raise
            why = getattr(error, "strerror", None) or error
            raise UsageError(f"--arm is one of {', '.join(COMPUTES)} or a JSON file of an arm, got {text!r}: {why}") from None


def convert_plain(arm: Arm, roots: Sequence[nn.Module]) -> None:
    """Convert a model that has no FP8 module to the arm's recipe; a BF16 arm leaves it as it is.

    Modules of other stacks show whether they run in FP8 when they run: without a recipe they are taken to.

    Raises:
        UsageError: FP8 is wanted, and the arm has no recipe.
    """
    from fp8debug.adapters.watching.coverage import candidates_of
    from fp8debug.linear import convert
    from fp8debug.run.other_stacks import may_run_fp8

    candidates = candidates_of(roots)
    if any(c.fp8 for c in candidates) or arm.compute == "bf16":
        return
    if arm.recipe is None and any(may_run_fp8(c) for c in candidates):
        return
    if arm.recipe is None:
        raise UsageError("the script's model has no module in FP8; give --recipe NAME to convert every nn.Linear of it")
    for root in roots:
        convert(root, arm.recipe)


def apply_arm(
    arm: Arm, roots: Sequence[nn.Module], start_step: int = 0, refuse: Callable[[str], NoReturn] | None = None
) -> dict[str, int]:
    """Change a model as the arm says, in place.

    Args:
        arm: what to change.
        roots: the model, or the chunks of one.
        start_step: number of the step that begins, for fallbacks that hold in some steps only.
        refuse: takes the reason where the first training call of a module of another stack shows that the arm cannot change it;
            by default it raises a UsageError there.

    Returns:
        How many modules run in FP8 now, and how many Linears there are.

    Raises:
        NoMatchError: a fallback names no module; the message has the closest names.
        UsageError: the model has no FP8 module and the arm no recipe, or the arm asks for what its stack cannot do.
    """
    from fp8debug.adapters.watching.coverage import candidates_of
    from fp8debug.fallback import Fallback
    from fp8debug.linear import Fp8Linear
    from fp8debug.run.other_stacks import change_others, may_run_fp8, raise_usage_error

    convert_plain(arm, roots)
    candidates = candidates_of(roots)
    torchao = {c.fqn: c.module for c in candidates if c.adapter is not None and c.adapter.name == "torchao"}
    layers = [c.module for c in candidates if isinstance(c.module, Fp8Linear)]
    others = [c for c in candidates if may_run_fp8(c)]
    if arm.compute == "fp8_tensors" and others and not layers and not torchao:
        raise UsageError(
            f"{others[0].fqn} is a {type(others[0].module).__name__}, whose operands an arm cannot keep in FP8 while its GEMMs"
            " run in BF16; leave out the arm fp8_tensors"
        )
    if arm.compute == "bf16":
        for layer in layers:
            layer.set_recipe("bf16")
    elif arm.compute == "fp8_tensors":
        for layer in layers:
            _dequantize_operands(layer)
    entries = [Fallback.from_dict(entry) for entry in arm.fallbacks]
    if torchao:
        from fp8debug.run.torchao_arms import change_modules

        entries = change_modules(torchao, arm.compute, entries)
    entries = change_others(roots, candidates, arm.compute, entries, arm.further, refuse or raise_usage_error)
    if entries and not layers:
        raise NoMatchError("fallback module", entries[0].module, [c.fqn for c in candidates])
    _apply_fallbacks(entries, roots, start_step)
    return {"fp8": sum(c.fp8 for c in candidates_of(roots)), "linears": len(candidates)}


def _dequantize_operands(layer: Fp8Linear) -> None:
    """Let the layer's GEMMs read what quantization left of their operands, in the operands' own dtype."""
    from torch import Tensor

    from fp8debug.kernels.dispatch import dequantize

    inner = layer.distortion

    def distortion(which: Gemm, role: TensorRole, x: Tensor, cast: Cast | None, ordinary: Any) -> Tensor:
        operand = inner(which, role, x, cast, ordinary) if inner else ordinary(x, cast)
        if isinstance(operand, Tensor):
            return operand
        quantized, used = operand
        return dequantize(quantized, used, x.dtype)

    layer.distortion = distortion


def _apply_fallbacks(entries: Sequence[Fallback], roots: Sequence[nn.Module], start_step: int) -> None:
    """Apply a list whose names are those of a run: with the number of the root before them where there are several."""
    from fp8debug.fallback import apply

    if len(roots) == 1:
        apply(roots[0], entries, start_step=start_step)
        return
    for entry in entries:
        number, _, name = entry.module.partition(".")
        if not number.isdigit() or int(number) >= len(roots):
            raise NoMatchError("fallback module", entry.module, [f"{i}.*" for i in range(len(roots))])
        apply(roots[int(number)], [replace(entry, module=name)], start_step=start_step)


def end_with_parent() -> None:
    """Ask Linux to end this process when the one that started it dies: a killed ``verify`` leaves no training behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
