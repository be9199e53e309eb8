"""Transformer Engine's modules: which Linears each runs, in which order, and what their operands are before the cast.

A fused module shows neither the normalized input nor what lies between its two Linears. Both follow from what is seen: the norm
is worked out once more from the module's input, the activation and its derivative from fc1's result, which its GEMM shows. In
one kernel with the cast the library keeps these in FP32, so they are not rounded here either; where it writes them first, they
are rounded as it does. The two differ from the kernel's by the last bits of FP32 (a mean over a row is summed in another order).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8debug.adapters.interception.sublinears import SubLinear, chosen
from fp8debug.adapters.transformer_engine.tensors import is_hybrid, is_of_debug_tools, names_of
from fp8debug.observer.attributes import is_computed, stored

_PACKAGE = "transformer_engine.pytorch.module."
#: Modules that are read, by class.
NAMES = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")


def kind_of(module: nn.Module) -> str | None:
    """Return which of the library's modules it is, subclasses of the user's or of Megatron's too; it is not imported for that."""
    return next((c.__name__ for c in type(module).__mro__ if c.__module__.startswith(_PACKAGE) and c.__name__ in NAMES), None)


def sublinears_of_module(module: Any) -> dict[str, SubLinear]:
    """Return the Linears of one of these modules by the suffix that the library itself gives them."""
    kind = kind_of(module)
    if kind == "LayerNormMLP":
        return {
            f".{fc}": SubLinear(module, i, [f"{fc}_weight"], has_bias=_has(module, f"{fc}_bias")) for i, fc in enumerate(_FCS)
        }
    if kind == "GroupedLinear":
        return _experts(module)
    names = list(getattr(module, "weight_names", ["weight"]))
    return {"": SubLinear(module, 0, names, has_bias=bool(getattr(module, "use_bias", False)))}


_FCS = ("fc1", "fc2")


def _has(module: Any, name: str) -> bool:
    bias = stored(module, name)
    return is_computed(module, name) or (bias is not None and bias.numel() > 0)


def _experts(module: Any) -> dict[str, SubLinear]:
    if getattr(module, "single_grouped_weight", False):
        return {}
    count, has_bias = module.num_gemms, bool(getattr(module, "use_bias", False))
    watched = chosen(count)
    reason = f"one of {count} experts, of which {len(watched)} are watched"
    return {
        f".gemm_{i}": SubLinear(module, i, [f"weight{i}"], has_bias=has_bias, reason=None if i in watched else reason)
        for i in range(count)
    }


def normalized(module: Any, x: Tensor) -> Tensor:
    """Return the norm of a fused module's input ``[M, K]``, FP32."""
    gamma: Tensor = module.layer_norm_weight.detach().float()
    if module.zero_centered_gamma:
        gamma = gamma + 1
    x = x.float()
    if module.normalization == "RMSNorm":
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + float(module.eps)) * gamma
    beta = module.layer_norm_bias
    return functional.layer_norm(x, x.shape[-1:], gamma, None if beta is None else beta.detach().float(), module.eps)


class Curve(NamedTuple):
    """A function of one number and its derivative."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


def _gelu_slope(x: Tensor) -> Tensor:
    slope: Tensor = torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate="tanh")
    return slope


def _sigmoid_slope(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s)


def _qgelu_slope(x: Tensor) -> Tensor:
    return torch.sigmoid(1.702 * x) + 1.702 * x * _sigmoid_slope(1.702 * x)


_GELU = Curve(lambda x: functional.gelu(x, approximate="tanh"), _gelu_slope)
_QGELU = Curve(lambda x: x * torch.sigmoid(1.702 * x), _qgelu_slope)
_RELU = Curve(functional.relu, lambda x: (x > 0).float())
_SRELU = Curve(lambda x: functional.relu(x).square(), lambda x: 2 * functional.relu(x))
_SILU = Curve(functional.silu, lambda x: torch.sigmoid(x) + x * _sigmoid_slope(x))
#: What lies between the two Linears of a LayerNormMLP, by its ``activation``; others are not read.
PLAIN = {"gelu": _GELU, "qgelu": _QGELU, "relu": _RELU, "srelu": _SRELU, "silu": _SILU}
#: The same of the first half of the columns, times the second half.
GATED = {
    "geglu": _GELU,
    "qgeglu": _QGELU,
    "reglu": _RELU,
    "sreglu": _SRELU,
    "swiglu": _SILU,
    "glu": Curve(torch.sigmoid, _sigmoid_slope),
}


def activated(module: Any, fc1_out: Tensor) -> Tensor:
    """Return fc2's input from fc1's result ``[M, hidden]``, FP32.

    Raises:
        ValueError: the activation is of a kind that is not read.
    """
    x = fc1_out.detach().float()
    if module.activation in PLAIN:
        return PLAIN[module.activation].value(x)
    first, second = x.chunk(2, -1)
    return _gated(module).value(first) * second


def activation_gradient(module: Any, fc1_out: Tensor, grad: Tensor) -> Tensor:
    """Return fc1's grad_output ``[M, hidden]`` from the gradient of fc2's input, FP32.

    Raises:
        ValueError: the activation is of a kind that is not read.
    """
    x, grad = fc1_out.detach().float(), grad.detach().float()
    if module.activation in PLAIN:
        return grad * PLAIN[module.activation].slope(x)
    first, second = x.chunk(2, -1)
    curve = _gated(module)
    return torch.cat((grad * second * curve.slope(first), grad * curve.value(first)), -1)


def _gated(module: Any) -> Curve:
    if module.activation not in GATED:
        raise ValueError(f"what the activation {module.activation!r} gives is not worked out")
    return GATED[module.activation]


def is_fused(storage: Any, by: str, module: Any) -> bool:
    """Return whether the library casts such an operand in the kernel that makes it, before it is rounded to BF16.

    Its debug tools and hybrid tensors see operands before they are cast, for which these kernels are apart; so they are, but for
    the norm's, under a ``CustomRecipe``, whatever its quantizers are.

    Args:
        storage: the operand as its GEMM was given it, or another under the same recipe.
        by: which kernel: ``norm``, ``activation`` or ``gradient`` (the activation's derivative).
        module: the module.
    """
    if is_of_debug_tools(storage) or is_hybrid(storage):
        return False
    names = names_of(getattr(storage, "_quantizer", None))
    if by == "norm":
        return "Float8Quantizer" in names
    if "CustomRecipe" in names_of(module.fp8_meta.get("recipe")):
        return False
    return bool(names & {"Float8Quantizer", "MXFP8Quantizer"}) and (by == "activation" or module.activation in PLAIN)
