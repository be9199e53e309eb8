"""From what the user hands to ``watch()`` to named modules, and what coverage says of each."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fp8debug.adapters.base import ADAPTERS, Adapter, num_dims, require_floor
from fp8debug.adapters.interception.sublinears import WHAT_IF_MODULES, SubLinear, kind_of_sublinear, stacks_of, sublinears_of
from fp8debug.adapters.watching.pipeline import layers_before, name_in_model
from fp8debug.errors import AttachError
from fp8debug.interruptions import is_ours
from fp8debug.linear import why_not_converted
from fp8debug.observer.attributes import has, stored
from fp8debug.recipes import Recipe
from fp8debug.types import OPERAND_SITES, match_fqn, plain_name

#: Wrappers around a whole model, and where they keep it.
_AROUND = {"DistributedDataParallel": "module", "DeepSpeedEngine": "module", "OptimizedModule": "_orig_mod"}


@dataclass
class Candidate:
    """One Linear-like module of the target.

    Attributes:
        fqn: its name.
        module: itself, or a SubLinear of it.
        adapter: what watches it; None where nothing does.
        reason: why it is not watched; None where it is.
        shared_with: the module that has the same weight.
        selects: number of experts that it may choose among.
        unread: why its recipe cannot be read.
        not_run: why it did not run in FP8 although it is set to: no sampled step called it.
        is_known_to_run: whether a sampled step has shown if it is called.
        ran_fp8: whether FP8 GEMMs ran in it that no adapter takes.
        recomputed: ``again`` where a backward pass recomputed a forward pass that was recorded, ``alone`` where the recomputation
            is all that was recorded; None where none was seen.
    """

    fqn: str
    module: nn.Module
    adapter: Adapter | None
    reason: str | None
    shared_with: str | None = None
    selects: int | None = None
    unread: str | None = None
    not_run: str | None = None
    is_known_to_run: bool = False
    ran_fp8: bool = False
    recomputed: str | None = None
    weight_dtype: str | None = None  #: of the stored weight, when it was first described
    why_compiled: str | None = None  #: why it is not recorded, where compiled code alone called it in a sampled step

    @property
    def fp8(self) -> bool:
        """True if the module runs in FP8 now, as far as is known; one that no sampled step called does not."""
        return self.ran_fp8 or (self.not_run is None and self.recipe() is not None)

    def recipe(self) -> Recipe | None:
        """Return the recipe in force; None where there is none, or where it cannot be read, which ``unread`` then says."""
        try:
            return None if self.adapter is None else self.adapter.recipe(self.module)
        except Exception as error:  # a library's configuration that is not as we know it; the other modules are
            if not is_ours(error):
                raise
            self.unread = f"its recipe cannot be read: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]
            return None

    @property
    def state(self) -> tuple[bool, tuple[int | None, int | None]]:
        """True if the module runs in FP8 now, and its (out_features, in_features), which a lazy one has after its first call."""
        return self.fp8, _features(self.module)

    @property
    def is_intercepted(self) -> bool:
        """True if only its GEMMs tell if it runs in FP8."""
        return self.adapter is not None and self.adapter.is_intercepted

    @property
    def why_not_recorded(self) -> str | None:
        """Reason why nothing of the module is recorded; None where something is, as far as that is known."""
        return self.reason or self.why_compiled

    def describe(self, index: int) -> dict[str, Any]:
        """Return the module's entry of the manifest."""
        recipe, casts = self.recipe(), None
        if recipe is not None:
            casts = {f"{g}.{t}": c.to_dict() if (c := recipe.casts[g, t]) else None for g, t in OPERAND_SITES}
        out_features, in_features = _features(self.module)
        if self.weight_dtype is None:  # FSDP shows another one during a forward pass
            self.weight_dtype = _dtype_of(stored(self.module, "weight"))
        return {
            "fqn": self.fqn,
            "kind": (self.adapter.kind if self.adapter else "") or kind_of_sublinear(self.module),
            "in_features": in_features,
            "out_features": out_features,
            "bias": has(self.module, "bias"),
            "index": index,
            "fp8": self.ran_fp8 or (recipe is not None and self.not_run is None),
            "called": None if not self.is_known_to_run else self.not_run is None,
            "observed": self.adapter is not None and self.why_not_recorded is None and self._is_observed(recipe is not None),
            "casts": casts,
            "recipe": recipe.name if recipe else None,
            "fast_accum": [g.value for g in recipe.fast_accum] if recipe else [],
            "reason": self.why_not_recorded or self.not_run or (None if recipe else self.unread or self._why_not()),
            "requested": getattr(self.module, "fp8debug_request", None),
            "shared_with": self.shared_with,
            "selects": self.selects,
            "weight_dtype": self.weight_dtype,
            "recomputed": self.recomputed,
            "params": sum(p.numel() for p in _parameters(self.module) if not is_lazy(p)),
        }

    def _is_observed(self, in_fp8: bool) -> bool:
        return in_fp8 or not self.is_intercepted or self.module in WHAT_IF_MODULES

    def _why_not(self) -> str:
        if getattr(self.module, "fp8debug_request", None) == "bf16":
            return "left in high precision on request"
        refused = why_not_converted(self.module) if isinstance(self.module, nn.Linear) else None
        if refused is not None and getattr(self.module, "fp8debug_request", None) == "fp8":
            return f"not converted: {refused}"
        if self.is_intercepted:
            return "no FP8 GEMM observed: the module runs in high precision, or in a kernel that fp8debug cannot intercept"
        odd = [str(n) for n in _features(self.module) if n is not None and n % 16]
        return f"not converted ({odd[0]} is not a multiple of 16, as most FP8 GEMMs want it)" if odd else "not converted"


def _dtype_of(weight: object) -> str | None:
    """Return the dtype of a weight, with its class where a library stores it in one of its own (``Float8Tensor``)."""
    if not isinstance(weight, Tensor):
        return None
    dtype, name = str(weight.dtype).removeprefix("torch."), type(weight).__name__
    return dtype if name in ("Tensor", "Parameter", "DTensor", "UninitializedParameter") else f"{name} ({dtype})"


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return a module's own parameters, those that its parametrizations compute others from among them."""
    made_from = module._modules.get("parametrizations")
    return [*module.parameters(recurse=False), *(made_from.parameters() if made_from is not None else ())]


def _features(module: nn.Module) -> tuple[int | None, int | None]:
    weight = stored(module, "weight")
    if weight is not None and not is_lazy(weight):
        return (weight.shape[0], weight.shape[1]) if weight.dim() == 2 else (None, None)
    if not isinstance(module, nn.Linear):
        return None, None
    return stored(module, "out_features") or None, stored(module, "in_features") or None  # 0 before a lazy module's first call


def _selects(root: nn.Module, name: str, module: nn.Module) -> int | None:
    """Return the number of experts held beside a Linear in 3-D weights, where it is its out_features: it may choose."""
    out_features, in_features = _features(module)
    for _ in range(2):  # a router may sit in a module of its own
        name = name.rpartition(".")[0]
        holder = root.get_submodule(name)
        weights = [m._parameters[stack] for m in (holder, *holder.children()) for stack in stacks_of(m)]
        if any(p is not None and p.shape[0] == out_features and in_features in p.shape[1:] for p in weights):
            return out_features
    return None


def parameter_counts(
    roots: Sequence[nn.Module], candidates: Sequence[Candidate], modules: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return how many parameters the model has by role: ``watched``, whose casts or updates are recorded, and the others.

    A parameter that several modules hold counts once, as watched where one of them is. Under FSDP2 it counts whole, and under
    tensor parallelism of a library's own as the rank holds it.

    Args:
        roots: the models.
        candidates: modules of the watch.
        modules: their entries in the manifest.

    Returns:
        by role ``first`` (FQN of the first parameter), ``num_tensors`` and ``num_params``.
    """
    observed = [c for c, entry in zip(candidates, modules, strict=True) if entry["observed"] and entry["called"] is not False]
    watched = {id(p) for c in observed for p in _parameters(c.module) if num_dims(p) >= 2}
    linears = {id(p) for c in candidates for p in _parameters(c.module)}
    counted: set[int] = set()
    found: dict[str, dict[str, Any]] = {}
    for module, fqn in named_modules(roots):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in counted or is_lazy(parameter):
                continue
            counted.add(id(parameter))
            role = "watched" if id(parameter) in watched else role_of(module, name, parameter, linears)
            first = {"role": role, "first": f"{fqn}.{name}".lstrip("."), "num_tensors": 0, "num_params": 0}
            entry = found.setdefault(role, first)
            entry["num_tensors"] += 1
            entry["num_params"] += parameter.numel()
    return list(found.values())


def role_of(module: nn.Module, name: str, parameter: nn.Parameter, linears: Container[int]) -> str:
    """Return what a parameter is that is not watched, by its module's class and its own name."""
    words = f"{type(module).__name__} {name}".lower()
    if "norm" in words:
        return "norm"
    if "bias" in name.lower() and num_dims(parameter) < 2:
        return "bias"
    if id(parameter) in linears or isinstance(module, nn.Linear):
        return "linear"
    return "embedding" if "embed" in words else "other"


def roots_of(target: object) -> list[nn.Module]:
    """Return the modules that a target stands for.

    Raises:
        AttachError: it is neither a module nor a non-empty list of modules.
    """
    found = list(target) if isinstance(target, list | tuple) else [target]
    modules = [_unwrapped(m) for m in found if isinstance(m, nn.Module)]
    if not modules or len(modules) != len(found):
        odd = next((type(m).__name__ for m in found if not isinstance(m, nn.Module)), "an empty list")
        held = [name for m in found for name, value in getattr(m, "__dict__", {}).items() if isinstance(value, nn.Module)]
        hint = f"; its attribute {held[0]} is one: watch(trainer.{held[0]}, ...)" if held and len(found) == 1 else ""
        raise AttachError(f"cannot watch {odd}: expected an nn.Module or a list of them, or a trainer (docs/trainers.md){hint}")
    return modules


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside the wrappers that libraries put around a whole model."""
    while (place := _AROUND.get(type(module).__name__)) and isinstance(inner := getattr(module, place, None), nn.Module):
        module = inner
    return module


def named_modules(roots: Sequence[nn.Module]) -> list[tuple[nn.Module, str]]:
    """Return every module of the roots with its FQN as it is recorded; a root's own is empty, or its number of several."""
    found = []
    for number, root in enumerate(roots):
        before = layers_before(root)
        for name, module in root.named_modules():
            plain = plain_name(name_in_model(name, before))
            found.append((module, f"{number}.{plain}".rstrip(".") if len(roots) > 1 else plain))
    return found


def nothing_to_watch(roots: Sequence[nn.Module]) -> AttachError:
    """Return the error of a model without any Linear."""
    kinds = ", ".join(type(r).__name__ for r in roots)
    return AttachError(f"{kinds} has no nn.Linear or Fp8Linear in it; there is nothing to watch")


def candidates_of(roots: Sequence[nn.Module], *, may_be_none: bool = False) -> list[Candidate]:
    """Return every module with a 2-D weight named like a Linear's, in order of definition, adapters assigned.

    Raises:
        AttachError: there is none, and there must be one; or a module's library is older than the oldest that is read.
    """
    found: list[Candidate] = []
    by_weight: dict[int, str] = {}
    names = {id(module): fqn for module, fqn in named_modules(roots)}
    for root in roots:
        for name, module in root.named_modules():
            adapter = next((a for a in ADAPTERS if a.matches(module)), None)
            if adapter is None and not isinstance(module, nn.Linear):
                continue
            if adapter is not None:
                require_floor(adapter.name)
            fqn = names[id(module)] or type(module).__name__
            reason = None
            if adapter is None:
                reason = "nn.MultiheadAttention multiplies by its weight without calling it"
            for suffix, part in sublinears_of(adapter, module).items():
                held = stored(part, "weight")
                weight, whole = id(part if held is None else held), fqn + suffix
                reason = part.reason if isinstance(part, SubLinear) else reason
                found.append(Candidate(whole, part, adapter, reason, by_weight.get(weight), _selects(root, name, module)))
                by_weight.setdefault(weight, whole)
    return found


def choose(candidates: Sequence[Candidate], include: Sequence[str], exclude: Sequence[str]) -> list[dict[str, Any]]:
    """Mark the candidates that are not to be watched with the reason, and return each filter with how much it matched.

    In a model that has FP8 modules the plain ones are left alone: they appear in coverage.

    Raises:
        AttachError: nothing is left.
    """
    filters = []
    chosen: dict[str, set[str]] = {"include": set(), "exclude": set()}
    for kind, patterns in (("include", include), ("exclude", exclude)):
        for pattern in patterns:
            matched = match_fqn((c.fqn for c in candidates), pattern)
            chosen[kind].update(matched)
            filters.append({"kind": kind, "pattern": pattern, "matched": len(matched)})
    any_fp8 = any(c.fp8 for c in candidates)
    for c in candidates:
        if c.fqn not in chosen["include"]:
            c.reason = c.reason or "not in include"
        elif c.fqn in chosen["exclude"]:
            c.reason = c.reason or "excluded"
        elif any_fp8 and not c.fp8 and not c.is_intercepted:
            c.reason = c.reason or c._why_not()
    if all(c.reason for c in candidates):
        reasons = sorted({str(c.reason) for c in candidates})
        raise AttachError(
            f"none of {len(candidates)} Linear modules is left to watch ({'; '.join(reasons)});"
            f" check include={list(include)} and exclude={list(exclude)}"
        )
    return filters


def common_recipe(candidates: list[Candidate]) -> dict[str, Any] | None:
    """Return the recipe of most FP8 modules, None when there is none in FP8."""
    recipes = [r for c in candidates if (r := c.recipe()) is not None]
    if not recipes:
        return None
    names = [r.name for r in recipes]
    return recipes[names.index(max(names, key=names.count))].to_dict()


#: By the top-level package that a module's class comes from: no adapter reads these.
_LIBRARIES = {"transformer_engine": "Transformer Engine", "bitsandbytes": "bitsandbytes", "deep_gemm": "DeepGEMM"}
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def modules_outside(roots: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Return FQN, kind and reason of each module that has GEMMs and that no adapter takes; Linears among them are not listed."""
    found = []
    for number, root in enumerate(roots):
        before = layers_before(root)
        for name, module in root.named_modules():
            reason = None if any(a.matches(module) for a in ADAPTERS) else _reason(module)
            if reason is not None:
                whole = name_in_model(name, before)
                fqn = ".".join(([str(number)] if len(roots) > 1 else []) + ([whole] if name else []))
                found.append({"fqn": fqn or type(module).__name__, "kind": type(module).__name__, "reason": reason})
    return found


def _reason(module: nn.Module) -> str | None:
    library = type(module).__module__.split(".")[0]
    parameters = list(module.parameters(recurse=False))
    if library in _LIBRARIES and any(num_dims(p) >= 2 for p in parameters):
        return f"a module of {_LIBRARIES[library]}, of a kind that no adapter reads"
    if isinstance(module, _CONVOLUTIONS):
        return "a convolution: only Linears are watched"
    if isinstance(module, nn.MultiheadAttention):
        return "attention and its fused projections: only Linears are watched"
    wrapped = next((type(p).__name__ for p in parameters if type(p).__module__.startswith("torchao.")), None)
    if wrapped is not None:
        return f"its parameters are {wrapped}: what torchao multiplies by them is not read"
    if stacks_of(module) and not isinstance(module, nn.Linear):
        return "weights of several experts in one tensor: grouped GEMMs are not read"
    return None
