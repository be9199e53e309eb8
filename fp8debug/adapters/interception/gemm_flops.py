"""FLOPs of every GEMM in a model's forward pass, by the module that ran it: what coverage's share is a share of.

They are counted in one sampled step, by the dispatch mode of the watch. The module that runs an op is found in the interpreter's
frames, so that modules need no hooks. Only shapes are read. An Fp8Linear and Transformer Engine's modules, whose GEMMs are no ops
of torch's, report theirs themselves. Compiled code shows the GEMMs that it leaves to libraries, under the compiled module; where
it is repeated, those of the repetition count in their place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from fp8debug.adapters.watching.compiled import is_compile_in_use
from fp8debug.kernels import linear_ops
from fp8debug.linear import Fp8Linear

_FLOAT8 = {dtype for name in dir(torch) if name.startswith("float8_") and isinstance(dtype := getattr(torch, name), torch.dtype)}


def _product(first: str, second: str) -> Callable[[Mapping[str, Any]], int]:
    """Return the FLOPs of ``[..., M, K] @ [..., K, N]``; of experts' weights ``[E, K, N]`` each row meets one."""

    def flops(args: Mapping[str, Any]) -> int:
        return 2 * int(args[first].numel()) * int(args[second].shape[-1])

    return flops


def _by_vector(matrix: str) -> Callable[[Mapping[str, Any]], int]:
    def flops(args: Mapping[str, Any]) -> int:
        return 2 * int(args[matrix].numel())

    return flops


def _convolution(args: Mapping[str, Any]) -> int:
    """Each element of the weight meets each position of the output, or of the input of a transposed one, in each sample."""
    places: Tensor = args["input"] if args["transposed"] else args["result"]
    return 2 * int(args["weight"].numel()) * int(args["input"].shape[0]) * prod(places.shape[2:])


def _attention(heads_at: int) -> Callable[[Mapping[str, Any]], int]:
    """Return the FLOPs of ``[B, H, S, D]`` (heads_at 1) or ``[B, S, H, D]`` (2); a causal mask does not halve them."""

    def flops(args: Mapping[str, Any]) -> int:
        query, key, value = args["query"], args["key"], args["value"]
        keys = key.shape[3 - heads_at] if key.dim() == 4 else args.get("max_k", args.get("max_seqlen_k")) or 0
        return 2 * int(query.numel() + query.numel() // query.shape[-1] * value.shape[-1]) * int(keys)

    return flops


#: By the name of an op in ``torch.ops.aten``: the FLOPs of one call from its arguments by name and its ``result``.
_FORMULAS: dict[str, Callable[[Mapping[str, Any]], int]] = {
    **dict.fromkeys(("mm", "bmm", "_int_mm", "_scaled_mm", "_scaled_mm_v2"), _product("self", "mat2")),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), _product("self", "mat2")),
    **dict.fromkeys(("addmm", "_addmm_activation"), _product("mat1", "mat2")),
    **dict.fromkeys(("baddbmm", "addbmm"), _product("batch1", "batch2")),
    "mv": _by_vector("self"),
    "addmv": _by_vector("mat"),
    "dot": _by_vector("self"),
    "convolution": _convolution,
    **{
        f"_scaled_dot_product_{name}": _attention(1)
        for name in (
            "flash_attention",
            "flash_attention_for_cpu",
            "efficient_attention",
            "cudnn_attention",
            "fused_attention_overrideable",
        )
    },
    **dict.fromkeys(("_flash_attention_forward", "_efficient_attention_forward"), _attention(2)),
    "_cudnn_attention_forward": _attention(1),
}
FLOPS = {getattr(torch.ops.aten, name): formula for name, formula in _FORMULAS.items() if hasattr(torch.ops.aten, name)}


def _frames() -> Iterator[FrameType]:
    """Yield the interpreter's frames, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


#: Functions that run the GEMMs of an Fp8Linear, in eager code and inside compiled code.
_OF_FP8_LINEAR = Fp8Linear._multiply.__code__, linear_ops._product.__code__


def is_of_fp8_linear() -> bool:
    """Return whether the op that runs is one of the GEMMs of an :class:`Fp8Linear`, by the interpreter's frames."""
    return any(frame.f_code in _OF_FP8_LINEAR for frame in _frames())


@dataclass
class _Entry:
    flops: int = 0
    ops: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Place:
    """A module that ran GEMMs in one precision, and whose parameter they multiplied by; empty for its own, or for none."""

    fqn: str
    kind: str
    precision: str
    fp8: bool
    weight: str


class GemmCounter:
    """The FLOPs of the GEMMs in the forward passes of one step.

    Args:
        modules: every module of the model with its FQN, empty for the model itself.
        kinds: how coverage calls its class.

    Attributes:
        is_on: whether a forward pass of the model runs, in the step that is counted.
        is_wanted: whether no step was counted yet.
    """

    def __init__(self, modules: Sequence[tuple[nn.Module, str]], kinds: Callable[[nn.Module], str]) -> None:
        self._modules = {id(module): (module, fqn) for module, fqn in modules}  # whose hash may be of their own making
        self._kinds = kinds
        self._entries: dict[_Place, _Entry] = {}
        self._parameters: dict[int, tuple[str, nn.Module]] = {}
        self._last: tuple[_Place, int, str] | None = None
        self._is_recounting = False
        self.is_on = False
        self.is_wanted = True

    def running_module(self) -> nn.Module | None:
        """Return the innermost module of the model that runs; None where none does."""
        return self._running()

    def running(self) -> str | None:
        """Return the name of that module as :meth:`take` gives it."""
        module = self._running()
        return None if module is None else self._modules[id(module)][1] or type(module).__name__

    def assign(self, fqn: str) -> None:
        """Count the FP8 GEMM that ran last under another name than its module's: that of the weight it multiplied by."""
        if self._last is None or not self.is_on:
            return
        place, flops, op = self._last
        self._last = None
        entry = self._entries[place]
        entry.flops -= flops
        if not entry.flops:
            del self._entries[place]
        new = self._entries.setdefault(replace(place, fqn=fqn), _Entry())
        new.flops += flops
        new.ops.add(op)

    def begin(self) -> None:
        """Count from now on: a forward pass begins, outside any backward pass."""
        self.is_on = True
        if not self._parameters:
            for module, name in self._modules.values():
                for own, parameter in module._parameters.items():
                    if parameter is not None and type(parameter) is nn.Parameter:
                        address = parameter.untyped_storage().data_ptr()
                        self._parameters.setdefault(address, (f"{name}.{own}" if name else own, module))
        Fp8Linear.counters.append(self._see_ours)
        linear_ops.OBSERVED.resume()

    def end(self) -> None:
        """Count no more: the forward pass ended."""
        self.is_on = False
        if self._see_ours in Fp8Linear.counters:
            Fp8Linear.counters.remove(self._see_ours)

    def counted(self) -> dict[_Place, int]:
        """Return the FLOPs that were counted so far."""
        return {place: entry.flops for place, entry in self._entries.items()}

    @contextmanager
    def recounting(self, before: Mapping[_Place, int], after: Mapping[_Place, int]) -> Iterator[None]:
        """Count a forward pass that is repeated in a backward pass, in place of the pass itself, whose modules nobody saw.

        Args:
            before: :meth:`counted` before that pass.
            after: the same after it.
        """
        entries, was_on = self._entries, self.is_on
        self._entries, self._is_recounting = {}, True
        if not was_on:
            self.begin()
        try:
            yield
            for place, flops in after.items():
                if place in entries:
                    entries[place].flops -= flops - before.get(place, 0)
            for place, entry in self._entries.items():
                known = entries.setdefault(place, _Entry())
                known.flops += entry.flops
                known.ops |= entry.ops
            entries = {place: entry for place, entry in entries.items() if entry.flops > 0}
        finally:
            if not was_on:
                self.end()
            self._entries, self._is_recounting = entries, False

    def _takes_pass(self) -> bool:
        return self._is_recounting or torch._C._current_graph_task_id() == -1

    def see(self, packet: Any, args: Mapping[str, Any], result: Any) -> None:
        """Count an op if it is a GEMM.

        Args:
            packet: the op, of ``torch.ops.aten``.
            args: its arguments by name.
            result: what it returned.
        """
        formula = FLOPS.get(packet)
        if formula is None or not self._takes_pass():
            return
        module = self._running()
        if module is None:
            return
        tensors = [value for value in args.values() if isinstance(value, Tensor)]
        operands = [t for t in tensors if t.dim() >= 2] or tensors
        is_fp8 = "scaled" in str(packet) and "attention" not in str(packet)
        is_fp8 = is_fp8 or any(t.dtype in _FLOAT8 or type(t).__module__.startswith("torchao.") for t in operands)
        precision = "fp8" if is_fp8 else str(operands[0].dtype).removeprefix("torch.")
        flops = formula({**args, "result": result[0] if isinstance(result, tuple) else result})
        self._add(module, precision, is_fp8, flops, str(packet).removeprefix("aten."), self._weight(module, operands))

    def see_library(self, name: str, result: Any, first: Any) -> None:
        """Count a GEMM in FP8 of a library's function, ``result[M, N] = first[M, K] @ ...``."""
        module = self._running()
        if module is not None and isinstance(result, Tensor) and isinstance(first, Tensor):
            k = 2 * first.numel() * result.shape[-1]
            self._add(module, "fp8", True, k, name, "")

    def add(self, fqn: str, kind: str, is_fp8: bool, precision: str, flops: int) -> None:
        """Count a GEMM that is no op of torch's, of a module that reports it."""
        if self.is_on:
            entry = self._entries.setdefault(_Place(fqn, kind, precision, is_fp8, ""), _Entry())
            entry.flops += flops

    def give_up(self) -> None:
        """Count nothing any more: an op is not as it is known here, and a count without it would be wrong."""
        self.end()
        self.is_wanted, self._entries = False, {}

    def take(self) -> list[dict[str, Any]] | None:
        """Return what was counted, most first, and count no other step; None where no GEMM ran."""
        self.end()
        if not self._entries:
            return None
        self.is_wanted, self._parameters = False, {}
        places = sorted(self._entries.items(), key=lambda item: -item[1].flops)
        return [{**vars(place), "flops": entry.flops, "ops": sorted(entry.ops)} for place, entry in places]

    @property
    def note(self) -> str | None:
        """Reason why the counts are incomplete; None where nothing is known to be missing."""
        return "GEMMs inside code under torch.compile are counted in part" if is_compile_in_use() else None

    def _see_ours(self, module: Fp8Linear, flops: int) -> None:
        if id(module) in self._modules and self._takes_pass():
            self._add(module, "fp8", True, flops, "fp8", "")

    def _add(self, module: nn.Module, precision: str, is_fp8: bool, flops: int, op: str, weight: str) -> None:
        fqn = self._modules[id(module)][1] or type(module).__name__
        place = _Place(fqn, self._kinds(module), precision, is_fp8, weight)
        self._last = (place, flops, op) if is_fp8 else None
        entry = self._entries.setdefault(place, _Entry())
        entry.flops += flops
        entry.ops.add(op)

    def _running(self) -> nn.Module | None:
        """Return the innermost module of the model that runs; None where none does, or an Fp8Linear multiplies in FP8."""
        for frame in _frames():
            if frame.f_code in _OF_FP8_LINEAR:
                return None
            if frame.f_code.co_name == "_call_impl":  # whose locals are few, and held by it as long as it runs
                module = frame.f_locals.get("self")
                if isinstance(module, nn.Module) and id(module) in self._modules:
                    return module
        return None

    def _weight(self, module: nn.Module, operands: Sequence[Tensor]) -> str:
        """Return the name of another module's parameter that is multiplied by, an empty text where none is."""
        for operand in operands:
            if type(operand) in (Tensor, nn.Parameter):
                name, owner = self._parameters.get(operand.untyped_storage().data_ptr(), ("", module))
                held = [p for p in module._parameters.values() if type(p) is nn.Parameter]
                own = [p.untyped_storage().data_ptr() for p in held]
                if name and owner is not module and operand.untyped_storage().data_ptr() not in own:
                    return name
        return ""
