"""Rules over checkpoints: what one judges, what it finds, and their registry; one file and one class each, codes F2NN."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from fp8debug.checkpoints.comparison import Comparison
from fp8debug.checkpoints.files import Checkpoint, Tensor
from fp8debug.checkpoints.layouts import Weight
from fp8debug.checkpoints.scan import PlainFacts, WeightFacts
from fp8debug.registry import Registry
from fp8debug.rules.base import Documented, Severity, finite


@dataclass(frozen=True, kw_only=True)
class TensorFinding:
    """One cause, at the tensor that shows it first.

    Attributes:
        code: of the rule, ``F203``.
        name: of the rule; it names the fault.
        severity: info, warning or error.
        tensor: name of the tensor; None when a file or the whole checkpoint is meant.
        file: name of the file that holds it.
        layout: naming convention of the weight.
        value: the measured number.
        threshold: the limit it crossed.
        unit: of value and threshold.
        message: one sentence with the numbers.
        cure: what helps, cheapest first.
        also: further tensors, or files, with the same cause.
    """

    code: str
    name: str
    severity: Severity
    tensor: str | None = None
    file: str | None = None
    layout: str | None = None
    value: float | None = None
    threshold: float | None = None
    unit: str = "1"
    message: str
    cure: str
    also: tuple[str, ...] = ()

    @property
    def module(self) -> str | None:
        """FQN of the module that the tensor belongs to."""
        return None if self.tensor is None else self.tensor.rpartition(".")[0] or self.tensor

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as documented JSON values; a number that is not finite is None."""
        return {
            "code": self.code,
            "name": self.name,
            "severity": str(self.severity),
            "tensor": self.tensor,
            "module": self.module,
            "file": self.file,
            "layout": self.layout,
            "value": finite(self.value),
            "threshold": finite(self.threshold),
            "unit": self.unit,
            "message": self.message,
            "cure": self.cure,
            "also": list(self.also),
        }


class JudgedWeight(NamedTuple):
    """A quantized weight and the facts about it."""

    weight: Weight
    facts: WeightFacts

    @property
    def comparison(self) -> Comparison | None:
        """Its comparison with the reference, where both can be dequantized."""
        return self.facts.comparison


class JudgedTensor(NamedTuple):
    """A tensor in 16 bits or more and the facts about it."""

    tensor: Tensor
    facts: PlainFacts


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A checkpoint with the facts about its tensors.

    Attributes:
        checkpoint: the files and tensors.
        weights: quantized weights, in file order.
        plains: tensors in 16 bits or more, and scales of activations.
        unread: scales that no layout reads, each with the reason.
        reference: the checkpoint that it was compared with.
        unmatched: tensors that only one of the two has, or whose shapes differ, each with the reason.
    """

    checkpoint: Checkpoint
    weights: Sequence[JudgedWeight] = ()
    plains: Sequence[JudgedTensor] = ()
    unread: Sequence[tuple[Tensor, str]] = ()
    reference: Checkpoint | None = None
    unmatched: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class FileRule(Documented):
    """Base of every rule over a checkpoint.

    Attributes:
        needs_reference: True for a rule that compares with ``--against``.
        only_unexplained: True for a rule that leaves tensors to the rules that name a cause.
    """

    needs_reference: ClassVar[bool] = False
    only_unexplained: ClassVar[bool] = False

    @abstractmethod
    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return one finding per tensor or file that shows the fault; ``check_checkpoint()`` joins them."""

    def of_weight(self, weight: Weight, severity: Severity, message: str, **more: Any) -> TensorFinding:
        """Return a finding about a quantized weight."""
        return self.found(severity, message, tensor=weight.name, file=weight.data.file.name, layout=weight.layout, **more)

    def of_tensor(self, tensor: Tensor, severity: Severity, message: str, **more: Any) -> TensorFinding:
        """Return a finding about a tensor as the file names it."""
        return self.found(severity, message, tensor=tensor.name, file=tensor.file.name, **more)

    def found(self, severity: Severity, message: str, **more: Any) -> TensorFinding:
        """Return a finding; ``more`` are further fields of it."""
        return TensorFinding(
            **{"code": self.code, "name": self.name, "cure": self.cure, **more}, severity=severity, message=message
        )


CHECKS: Registry[FileRule] = Registry("rule")


def db(value: float | None) -> str:
    """Return a value in dB for a message."""
    return "no signal" if value is None else f"{value:.1f} dB"


def options(mapping: Mapping[str, Any] | None, *names: str) -> list[str]:
    """Return the texts that a configuration lists under any of these names."""
    found: list[str] = []
    for name in names:
        entry = (mapping or {}).get(name)
        if isinstance(entry, list):
            found += [text for text in entry if isinstance(text, str)]
    return found


def excluded(checkpoint: Checkpoint) -> list[str]:
    """Return the modules that the configuration leaves in high precision, by the names that stacks give to that list."""
    names = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules", "modules_to_not_quantize", "exclude")
    return options(checkpoint.quantization, *names)
