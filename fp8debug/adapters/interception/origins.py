"""High-precision tensors behind FP8 codes, found by following the arithmetic of a cast while it runs.

    codes = (x / scale).to(float8_e4m3fn)             origin x
    codes = (weight.t() * scale).to(float8_e4m3fn)    origin weight, transposed

A dispatch mode reports every op that runs without autograd: the inside of an ``autograd.Function`` or of a custom op. Copies,
views and products with a scale lead to the same origin. A scale is a constant, an amax, or what is computed from these. Any other
op makes a new origin: the result of a norm that is computed in the same function before the cast is the tensor that is cast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from fp8debug.kernels.reference import FORMAT_OF
from fp8debug.observer.autograd_nodes import leaf_of, name_of

_sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr
#: Nodes of a graph between a weight as it is read and its parameter.
_MAX_STEPS = 16
#: Ops whose result stands for their first argument; composite ops are those that a custom op runs inside.
_KEEPS = {
    *("view", "reshape", "_unsafe_view", "_reshape_alias", "flatten", "alias", "detach", "clone", "contiguous", "_to_copy", "to"),
    *("type_as", "lift_fresh", "squeeze", "unsqueeze", "expand", "slice", "constant_pad_nd", "pad", "clamp", "clamp_min"),
    *("clamp_max", "hardtanh", "round", "nan_to_num"),
}
_TURNS = {"t", "transpose", "permute", "numpy_T", "mT", "swapaxes", "swapdims"}
_SCALES = {"mul", "multiply", "div", "divide", "true_divide"}
#: Ops that make a scale of a tensor that is cast.
_MEASURES = {"abs", "amax", "max", "amin", "aminmax", "linalg_vector_norm"}
#: Ops that make a scale of scales and constants.
_COMPUTES = _SCALES | {
    *("reciprocal", "exp2", "log2", "ceil", "floor", "round", "sqrt", "neg", "pow", "add", "sub", "maximum", "minimum", "where"),
    *(
        "amax",
        "amin",
        "max",
        "repeat_interleave",
        "index_select",
        "index",
        "cat",
        "stack",
        "frexp",
        "ldexp",
        "eq",
        "ne",
        "gt",
        "lt",
    ),
    *("ge", "le", "isinf", "isnan", "logical_and", "logical_or", "bitwise_and", "bitwise_or", "bitwise_not"),
    *("bitwise_right_shift", "bitwise_left_shift", "full", "full_like", "zeros", "zeros_like", "ones", "ones_like"),
    *("scalar_tensor", "arange"),
}
#: Nodes of a graph that leave a matrix as it is, and that transpose it.
_KEPT_BY = {f"{name}Backward0" for name in ("ToCopy", "Clone", "View", "UnsafeView", "ReshapeAlias", "Alias")}
_TURNED_BY = {f"{name}Backward0" for name in ("T", "Transpose", "Permute", "NumpyT", "MT")}


class Origin(NamedTuple):
    """The tensor that codes were cast from, and whether they are its transpose; None where that is unknown."""

    x: Tensor
    is_turned: bool | None = False

    def turned(self) -> Origin:
        """Return the origin of the transposed codes."""
        return Origin(self.x, None if self.is_turned is None else not self.is_turned)


class _TracedTensor(NamedTuple):
    """A tensor that was computed without autograd: an image of its origin, a scale, or an origin of its own.

    ``sequence`` is autograd's count of nodes when it was made.
    """

    tensor: TensorWeakRef
    origin: Origin | None
    is_scale: bool
    sequence: int


class Origins:
    """The origins of tensors that were computed without autograd in the forward pass under way."""

    def __init__(self) -> None:
        self._known: dict[int, _TracedTensor] = {}
        self._weights: dict[int, _TracedTensor] = {}  # images of parameters, which may be cast long before their GEMM

    def __bool__(self) -> bool:
        """True if the inside of a function is known."""
        return bool(self._known)

    def leave_function(self) -> None:
        """Forget what is no image of a parameter: autograd records the next op, so that the function has returned."""
        self._known.clear()

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()
        self._weights.clear()

    def of(self, x: Tensor) -> Origin | None:
        """Return the origin of codes or of a tensor in high precision; None for codes that came from elsewhere."""
        known = self._of(x)
        if known is None and x.element_size() == 1 and (base := x._base) is not None and (known := self._of(base)) is not None:
            if known.origin is None or base.numel() != x.numel() or base.dim() != 2 or x.dim() != 2:
                return None
            is_turned = x.shape == base.shape[::-1] and x.stride() == base.stride()[::-1]
            return known.origin.turned() if is_turned else known.origin
        if known is None or known.origin is None:
            return None if x.element_size() == 1 else Origin(x)
        return known.origin

    def is_inside(self, x: Tensor) -> bool:
        """Return whether a tensor was made inside the function that runs, so that autograd knows nothing of it."""
        return self._of(x) is not None

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note what an op made.

        Args:
            func: the op.
            args: its arguments.
            kwargs: the same.
            result: what it returned.
        """
        name = getattr(func, "overloadpacket", func).__name__  # a higher-order op has no overloads
        name = name[:-1] if name.endswith("_") and not name.endswith("__") else name
        inputs = list(_tensors((*args, *kwargs.values())))
        made = list(_tensors((result,)))
        if not made:
            return
        if name == "copy":
            self._note(made[0], *self._state(inputs[1]))
        elif name in _KEEPS and inputs:
            origin, is_scale = self._state(inputs[0])
            self._note(made[0], origin, is_scale)
        elif name in _TURNS:
            origin, is_scale = self._state(inputs[0])
            if origin is not None:
                origin = origin.turned() if inputs[0].dim() == 2 else origin._replace(is_turned=None)
            self._note(made[0], origin, is_scale)
        elif name in _SCALES and (origin := self._scaled(inputs, made[0])) is not None:
            self._note(made[0], origin, False)
        elif name in _MEASURES and len(inputs) == 1:
            self._each(made, None, True)
        elif name in _COMPUTES and all(self._is_scale(x) for x in inputs):
            self._each(made, None, True)
        elif getattr(func, "namespace", "aten") != "aten":
            self._see_custom(inputs, made)
        else:
            self._each([x for x in made if not any(x is y for y in inputs)], None, False)

    def _see_custom(self, inputs: list[Tensor], made: list[Tensor]) -> None:
        """Note the results of an op whose inside was not seen: codes of its only operand, and their scales."""
        operands = [x for x in inputs if x.is_floating_point() and x.element_size() > 1 and x.numel() > 1]
        for x in made:
            if self._of(x) is not None and self._state(x)[0] is not None:
                continue  # its inside was seen
            whole = {id(o.x): o for y in operands if y.numel() == x.numel() and (o := self._state(y)[0]) is not None}
            if x.dtype in FORMAT_OF and len(whole) == 1:
                (origin,) = whole.values()
                self._note(x, origin._replace(is_turned=None), False)
            else:
                self._note(x, None, x.element_size() > 1 and len(made) > 1)

    def _scaled(self, inputs: list[Tensor], result: Tensor) -> Origin | None:
        """Return the origin of a product of a tensor and a scale; None where it is none."""
        images = [x for x in inputs if not self._is_scale(x)]
        if len(images) != 1 or images[0].numel() != result.numel():
            return None
        return self._state(images[0])[0]

    def _is_scale(self, x: Tensor) -> bool:
        """Return whether a product with a tensor leaves what the other factor stands for."""
        if x.numel() == 1 or not x.is_floating_point():
            return True
        if (known := self._of(x)) is not None:
            return known.is_scale
        return not x.requires_grad and not isinstance(x, torch.nn.Parameter) and x.dim() > 1 and 1 in x.shape

    def _state(self, x: Tensor) -> tuple[Origin | None, bool]:
        known = self._of(x)
        if known is None:
            return (None if x.element_size() == 1 else Origin(x)), False
        return (Origin(x) if known.origin is None and not known.is_scale else known.origin), known.is_scale

    def _each(self, made: list[Tensor], origin: Origin | None, is_scale: bool) -> None:
        for x in made:
            self._note(x, origin, is_scale)

    def _note(self, x: Tensor, origin: Origin | None, is_scale: bool) -> None:
        if origin is not None and origin.x is x:
            origin = None
        known = _TracedTensor(TensorWeakRef(x), origin, is_scale, _sequence())
        of_weight = origin is not None and isinstance(parameter_behind(origin.x).x, torch.nn.Parameter)
        (self._known, self._weights)[not of_weight].pop(id(x), None)
        (self._weights if of_weight else self._known)[id(x)] = known

    def _of(self, x: Tensor) -> _TracedTensor | None:
        """Return what is known of a tensor; None for one that an earlier function returned, which is an origin itself."""
        known = self._known.get(id(x)) or self._weights.get(id(x))
        if known is None or known.tensor() is not x or (x.grad_fn is not None and not x.is_leaf):
            return None
        source = known.origin
        is_inside = source is None or source.x.requires_grad or id(x) in self._weights
        return known if is_inside or known.sequence == _sequence() else None


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(tuple(value))


def parameter_behind(x: Tensor) -> Origin:
    """Return the leaf of the graph that a weight is a copy, a view or the transpose of; itself where it is none of these."""
    node, is_turned = _source(x)
    return Origin(x) if (variable := leaf_of(node)) is None else Origin(variable, is_turned)


def joined_at(x: Tensor) -> Any:
    """Return the node of the ``torch.cat`` behind a weight, which is a copy, a view or the transpose of it; None without one."""
    node, _ = _source(x)
    return node if node is not None and name_of(node) == "CatBackward0" else None


def _source(x: Tensor) -> tuple[Any, bool]:
    """Return the first node before a tensor that is no copy, view or transpose, and whether the tensor is its transpose."""
    node, is_turned = x.grad_fn, False
    for _ in range(_MAX_STEPS):
        if node is None or (name_of(node) not in _KEPT_BY and name_of(node) not in _TURNED_BY):
            break
        is_turned ^= name_of(node) in _TURNED_BY
        following = [after for after, _ in node.next_functions if after is not None]
        node = following[0] if len(following) == 1 else None
    return node, is_turned
