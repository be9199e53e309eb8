"""Recorder of one path for ``fp8debug parity``: every module's input, output and weight on a batch of fixed tokens.

This file stands alone: it needs torch and safetensors, nothing of fp8debug, so that it can be copied beside an engine.
In vLLM (eager mode, one process; docs/parity.md has the whole example)::

    from hook import PathRecorder
    llm.apply_model(lambda model: PathRecorder(model, "rollout").start())

One file is written per module and call while the forward pass runs, and nothing is kept in memory. Files have the numbers of the
calls in execution order; docs/parity.md defines their tensors.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

#: Version of the files; a reader of fp8debug knows this one and those before.
VERSION = 1
#: Names under which engines give the tokens and their positions to a model.
TOKENS, POSITIONS, MASKS = ("input_ids", "tokens", "token_ids"), ("positions", "position_ids"), ("attention_mask",)
#: Attributes that hold what a norm adds to the variance.
EPSILONS = ("variance_epsilon", "eps", "epsilon", "rms_norm_eps")
#: Names of the module that gives the logits.
HEADS = ("lm_head", "output", "output_layer", "head", "embed_out")
#: Rows by which the orientation of a square weight is told.
ROWS_TRIED = 64
_LEFT_OUT = (nn.Dropout, nn.Identity)


class PathRecorder:
    """Hooks on the modules of a model that write what each reads and gives.

    Args:
        model: whose forward passes are recorded; it has to run eagerly, as hooks are no part of compiled code or CUDA graphs.
        out: folder, which is made; it must be empty.
        weights: whether to write the weights, once, as they are stored (FP8 codes with their scales).
        include: beginnings of the names to record; all modules by default.

    Raises:
        ValueError: the folder holds files.
    """

    def __init__(self, model: nn.Module, out: str | Path, *, weights: bool = True, include: Iterable[str] = ("",)) -> None:
        self._model, self._out = model, Path(out)
        self._weights, self._include = weights, tuple(include)
        self._handles: list[Any] = []
        self._inputs: dict[int, Tensor] = {}
        self._written: set[str] = set()
        self._calls: dict[str, int] = {}
        self._num_passes, self._num_calls = -1, 0
        self._is_inside = False
        self._of_head: Tensor | None = None  # of this pass, until the model has given its logits
        self._out.mkdir(parents=True, exist_ok=True)
        if any(self._out.iterdir()):
            raise ValueError(f"{out} holds files already; give an empty folder")

    def start(self) -> PathRecorder:
        """Begin."""
        self._handles.append(self._model.register_forward_pre_hook(self._begin_pass, with_kwargs=True))
        for name, module in self._model.named_modules():
            if name and self._is_recorded(module) and name.startswith(self._include):
                self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
                self._handles.append(module.register_forward_hook(self._after(name)))
        self._handles.append(self._model.register_forward_hook(self._end_pass))
        return self

    def stop(self) -> None:
        """Take every hook off the model."""
        while self._handles:
            self._handles.pop().remove()
        self._inputs.clear()

    def __enter__(self) -> PathRecorder:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @staticmethod
    def _is_recorded(module: nn.Module) -> bool:
        has_own = any(True for _ in module.parameters(recurse=False))
        is_whole = has_own or hasattr(module, "base_layer") or not any(True for _ in module.children())
        return is_whole and not isinstance(module, _LEFT_OUT)

    def _begin_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._num_passes += 1
        self._is_inside = True
        self._calls.clear()
        self._inputs.clear()
        tokens = _named(kwargs, TOKENS)
        if tokens is None:
            tokens = next((a for a in args if isinstance(a, Tensor) and not a.is_floating_point() and a.dim()), None)
        found: dict[str, Tensor] = {} if tokens is None else {"tokens": tokens.long()}
        for key, names in (("positions", POSITIONS), ("mask", MASKS)):
            if (value := _named(kwargs, names)) is not None and tokens is not None and value.numel() == tokens.numel():
                found[key] = value.long()
        if found:
            self._write("", "tokens", found)

    def _end_pass(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._is_inside = False
        of_head = self._of_head
        self._of_head = None
        logits = getattr(output, "logits", output)
        if not _is_activation(logits):
            return
        compute = getattr(module, "compute_logits", None)
        if callable(compute):  # vLLM's models give the last hidden state, and the engine asks for logits of some rows later
            self._write_head(compute, logits)
        elif of_head is None or not _is_equal(logits, of_head):  # capped, or scaled, after the head
            self._write("", "logits", {"logits": logits.reshape(-1, logits.shape[-1])})

    def _write_head(self, compute: Callable[..., Any], hidden: Tensor) -> None:
        """Write the head on all rows of the last hidden state; a model without compute_logits calls its head itself."""
        heads = ((name, head) for name, head in self._model.named_modules() if name.rpartition(".")[2] in HEADS)
        name, head = next(heads, ("lm_head", getattr(self._model, "lm_head", None)))  # the second where it is tied
        hidden = hidden.reshape(-1, hidden.shape[-1])
        also = (None,) * (len(inspect.signature(compute).parameters) - 1)  # sampling metadata, in earlier versions
        logits = compute(hidden, *also)
        if not _is_activation(logits) or not name.startswith(self._include):  # ranks that get no logits
            return
        found = {"input": hidden, "output": logits}
        if self._weights and isinstance(head, nn.Module) and name not in self._written:
            found |= {  # without the rows that pad the vocabulary
                key: value[: logits.shape[1]] if value.dim() == 2 else value for key, value in self._stored(head, found).items()
            }
        self._written.add(name)
        self._write(name, type(head).__name__, {f"{name}.{key}": value for key, value in found.items()})

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        x = next((a for a in (*args, *kwargs.values()) if _is_activation(a)), None)
        if x is not None and self._is_recording:
            self._inputs[id(module)] = x.detach().clone()  # which the module may overwrite

    @property
    def _is_recording(self) -> bool:
        """Return whether the model calls a module; engines call some afterwards, on other rows."""
        return self._is_inside or self._num_passes < 0

    def _after(self, name: str) -> Callable[..., None]:
        def write(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            outputs = output if isinstance(output, tuple | list) else (output,)
            y = next((o for o in outputs if _is_activation(o)), None)
            x = self._inputs.pop(id(module), None)
            if y is None or not self._is_recording:
                return
            if name.rpartition(".")[2] in HEADS:
                self._of_head = y.detach()
            if len(outputs) > 1 and "norm" in type(module).__name__.lower() and _is_alike(outputs[1], y):
                x = outputs[1].detach()  # of a norm that adds the residual first: what it normalized
            found = {"output": y.detach().reshape(-1, y.shape[-1])}
            if x is not None:
                found["input"] = x.reshape(-1, x.shape[-1])
            chosen = next((o for o in outputs if isinstance(o, Tensor) and not o.is_floating_point() and o.dim() > 1), None)
            if chosen is not None:
                found["indices"] = chosen.detach().reshape(-1, chosen.shape[-1])
            number = self._calls[name] = self._calls.get(name, 0) + 1
            full = name if number == 1 else f"{name}#{number}"
            if self._weights and name not in self._written:
                found |= self._stored(module, found)
            self._written.add(name)
            self._write(full, type(module).__name__, {f"{full}.{key}": value for key, value in found.items()})

        return write

    def _stored(self, module: nn.Module, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters and scales as they are stored, a weight as [outputs, inputs], and the epsilon of a norm."""
        stored: dict[str, Tensor] = {}
        for key, value in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            full = getattr(value, "full_tensor", None)
            value = full() if callable(full) else value
            if type(value) in (Tensor, nn.Parameter) and value.numel() and key not in found:
                stored[key] = value.detach()
        weight = stored.get("weight")
        if weight is not None and weight.dim() == 2 and "input" in found:
            turned = (found["input"].shape[1], found["output"].shape[1])
            is_view = weight.shape[0] == weight.shape[1] and weight.t().is_contiguous() and not weight.is_contiguous()
            is_turned = turned[0] != turned[1] or is_view or _is_turned(weight, found, stored.get("bias"))
            if tuple(weight.shape) == turned and is_turned:
                stored["weight"] = weight.t()
        for key, value in stored.items() if "input" in found else ():  # of all experts, as [experts, outputs, inputs]
            place = 2 if key.startswith(("w2", "down")) else 1
            if value.dim() == 3 and value.shape[place] == found["input"].shape[1] != value.shape[3 - place]:
                stored[key] = value.transpose(1, 2)
        epsilon = next((v for n in EPSILONS if isinstance(v := getattr(module, n, None), float)), None)
        if epsilon is not None:
            stored["eps"] = torch.tensor([epsilon], dtype=torch.float64, device="cpu")
        factors = getattr(module, "scaling", None)  # of adapters, by their names
        if isinstance(factors, Mapping) and len(factors) == 1 and not getattr(module, "merged", False):
            stored["scaling"] = torch.tensor([float(next(iter(factors.values())))], dtype=torch.float64, device="cpu")
        return stored

    def _write(self, name: str, kind: str, tensors: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save_file

        told = {"format": "fp8debug-parity", "version": VERSION, "module": name, "kind": kind, "pass": self._num_passes}
        path = self._out / f"pass{self._num_passes:05d}-call{self._num_calls:06d}.safetensors"
        self._num_calls += 1
        metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in told.items()}
        save_file({key: value.detach().cpu().clone().contiguous() for key, value in tensors.items()}, path, metadata)


def record_path(model: nn.Module, batch: Any, out: str | Path, *, weights: bool = True, include: Iterable[str] = ("",)) -> None:
    """Write what every module of a model reads and gives on one batch; training mode, gradients and weights stay as they are.

    Args:
        model: the model.
        batch: what its forward takes: a tensor, a tuple of arguments, or a mapping of keywords.
        out: folder of the dump, empty or not there.
        weights: whether to write the weights too, which a cause needs.
        include: beginnings of the names of the modules to record.

    Raises:
        ValueError: the folder holds files.
    """
    was = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad(), PathRecorder(model, out, weights=weights, include=include):
            if isinstance(batch, Mapping):
                model(**batch)
            else:
                model(*(batch if isinstance(batch, tuple) else (batch,)))
    finally:
        for module, training in was.items():
            module.training = training


def _is_turned(weight: Tensor, found: Mapping[str, Tensor], bias: Tensor | None) -> bool:
    """Return whether a square weight is [inputs, outputs], as GPT-2's Conv1D has it: by the product that fits the output."""
    if not weight.is_floating_point() or weight.element_size() < 2:
        return False
    x, y = (found[key][:ROWS_TRIED].detach().to(weight.dtype) for key in ("input", "output"))
    y = (y if bias is None or bias.shape != y.shape[1:] else y - bias).double()
    fits = [
        float(torch.nn.functional.cosine_similarity((x @ w).double().flatten(), y.flatten(), dim=0)) for w in (weight.t(), weight)
    ]
    return fits[1] > max(fits[0], 0.5)


def _named(kwargs: Mapping[str, Any], names: Iterable[str]) -> Tensor | None:
    return next((v for name in names if isinstance(v := kwargs.get(name), Tensor)), None)


def _is_equal(logits: Tensor, of_head: Tensor) -> bool:
    """Return whether a model gives its head's output, as it is or in another precision."""
    return logits.numel() == of_head.numel() and torch.equal(logits.detach().to(of_head.dtype).view_as(of_head), of_head)


def _is_alike(x: Any, y: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == y.shape and x.is_floating_point()


def _is_activation(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 1 and x.is_floating_point() and x.numel() > 0
