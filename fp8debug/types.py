"""The coordinate system: three GEMMs of a Linear, nine tensors, and the quantized value that crosses functions.

Legend of shape letters, used throughout: M tokens (rows of input), K in_features, N out_features.

    fprop   output[M, N]      = input[M, K]       @ weight[N, K].T        contracts K
    dgrad   grad_input[M, K]  = grad_output[M, N] @ weight[N, K]          contracts N
    wgrad   grad_weight[N, K] = grad_output[M, N].T @ input[M, K]         contracts M
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from fp8debug.errors import UsageError

if TYPE_CHECKING:
    import torch

#: Wrappers that put their own name into an FQN (torch.compile, activation checkpointing, FSDP); a run's names have none.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")

#: How an event of kind ``skipped`` tells that a module is not recorded from its step on.
NOT_WATCHED = "not watched any more"
#: Its ``code``.
NOT_WATCHED_CODE = "not-watched"
#: How one tells that the calls of a compiled module are not recorded.
NOT_REPEATED = "not recorded inside compiled code"
#: Its ``code``.
NOT_REPEATED_CODE = "not-repeated"


def plain_name(fqn: str) -> str:
    """Return an FQN without the names of wrappers."""
    return ".".join(part for part in fqn.split(".") if part not in WRAPPERS)


class Gemm(str, Enum):
    """One of the three matrix products of a Linear layer."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"

    def __str__(self) -> str:
        return self.value


class TensorRole(str, Enum):
    """Role of a tensor in its GEMM: one of three operands or three results."""

    INPUT = "input"
    WEIGHT = "weight"
    GRAD_OUTPUT = "grad_output"
    OUTPUT = "output"
    GRAD_INPUT = "grad_input"
    GRAD_WEIGHT = "grad_weight"

    def __str__(self) -> str:
        return self.value


class Reference(str, Enum):
    """Reference that the actual tensor of an observation is compared with.

    ``operand``: the high-precision tensor before its cast. ``shadow``: the same GEMM of the high-precision operands in
    BF16. ``exact``: the GEMM of the dequantized operands in FP32 or better.
    """

    OPERAND = "operand"
    SHADOW = "shadow"
    EXACT = "exact"

    def __str__(self) -> str:
        return self.value


OPERANDS: dict[Gemm, tuple[TensorRole, TensorRole]] = {
    Gemm.FPROP: (TensorRole.INPUT, TensorRole.WEIGHT),
    Gemm.DGRAD: (TensorRole.GRAD_OUTPUT, TensorRole.WEIGHT),
    Gemm.WGRAD: (TensorRole.GRAD_OUTPUT, TensorRole.INPUT),
}

RESULTS: dict[Gemm, TensorRole] = {
    Gemm.FPROP: TensorRole.OUTPUT,
    Gemm.DGRAD: TensorRole.GRAD_INPUT,
    Gemm.WGRAD: TensorRole.GRAD_WEIGHT,
}

#: Every (gemm, operand) in the order in which a training step meets them; the keys of a Recipe.
OPERAND_SITES: tuple[tuple[Gemm, TensorRole], ...] = tuple(
    (gemm, tensor) for gemm, tensors in OPERANDS.items() for tensor in tensors
)

#: Operands whose GEMM contracts their rows (dimension 0), not their columns: their blocks run down, not across.
CONTRACTS_ROWS: frozenset[tuple[Gemm, TensorRole]] = frozenset(
    {
        (Gemm.DGRAD, TensorRole.WEIGHT),
        (Gemm.WGRAD, TensorRole.GRAD_OUTPUT),
        (Gemm.WGRAD, TensorRole.INPUT),
    }
)


class Site(NamedTuple):
    """Site of a statistic: module FQN, GEMM and tensor."""

    module: str
    gemm: Gemm
    tensor: TensorRole

    def __str__(self) -> str:
        return f"{self.module} {self.gemm} {self.tensor}"


class Quantized(NamedTuple):
    """A tensor in FP8: ``x ~= data * scale_inv``, the scale repeated over its block.

    Attributes:
        data: FP8 values, the shape of the tensor they stand for.
        scale_inv: FP32 decode factors ``[block rows, block columns]`` over the tensor viewed as
            ``[rows, last dimension]``; a partial block at the edge is a block.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor


def match_fqn(names: Iterable[str], pattern: str) -> list[str]:
    """Return the names that a pattern stands for: one that is a name, brackets and all, for this alone; else a glob's."""
    names = list(names)
    return [name for name in names if name == pattern] or [name for name in names if fnmatchcase(name, pattern)]


def parse_share(text: str | float, what: str = "") -> float:
    """Return a share given as ``10%``, ``0.1`` or a number.

    Args:
        text: the share.
        what: it is a share of, for the message.

    Raises:
        UsageError: it is neither, or not between 0 and 1.
    """
    try:
        words = text.strip() if isinstance(text, str) else text
        share = float(words.removesuffix("%")) / 100 if isinstance(words, str) and words.endswith("%") else float(words)
    except (TypeError, ValueError):
        share = -1.0
    if not 0 <= share <= 1 or isinstance(text, bool):
        raise UsageError(f"{what or 'expected'} {'is ' if what else ''}a share such as 10% or 0.1, got {text!r}")
    return share


def not_observed(*gemms: Gemm) -> str:
    """Return how an event tells that a backward pass ran without GEMMs that its module needs.

    Runs of schema 4 and older have this text and no code, so that another one would leave them unread.
    """
    return f"no {', '.join(sorted(gemm.value for gemm in gemms))} was observed"


def not_observed_code(*gemms: Gemm, in_fp8: bool = False) -> str:
    """Return the ``code`` of such an event, as ``not-observed:dgrad,wgrad``.

    Args:
        gemms: those that the module needs.
        in_fp8: whether they may have run in high precision, or the module may need none.
    """
    return f"not-observed{'-in-fp8' if in_fp8 else ''}:{','.join(sorted(gemm.value for gemm in gemms))}"
