"""Three runs for each cure: the fault with its cure, the fault, and what training is without the fault; and how they compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8debug
from fp8debug.rules import Finding, Severity
from tests.recording.models import Net, batch, net
from tests.recording.moe import Routed

AT, EVERY = 9, 3
#: Losses at the end that are compared; by how much a cured loss may lie above what training is without the fault: FP8's own
#: noise on this bench is below 1 %.
LAST, MAX_GAP = 6, 0.01
#: By how much a site may be noisier than without the fault, dB.
MAX_DEFICIT_DB = 1.5


class Deep(nn.Module):
    """Six equal layers, whose inputs may grow with depth."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(128) for _ in range(6))
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(6))
        self.head = nn.Linear(128, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, x.flip(-1)], -1)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + functional.gelu(layer(norm(x)))
        out: Tensor = self.head(x)
        return out


def deep(recipe: str | None) -> nn.Module:
    """Return ``Deep``, converted."""
    torch.manual_seed(0)
    return fp8debug.convert(Deep(), recipe, {"head": None}) if recipe else Deep()


def wide(recipe: str | None) -> nn.Module:
    """Return a Linear of 4,096 inputs between two others: of a row, 1x128 confines an outlier to 3 %."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 64), nn.GELU(), nn.Linear(64, 16))
    return fp8debug.convert(model, recipe, {"3": None}) if recipe else model


def mixture(recipe: str | None) -> nn.Module:
    """Return a mixture of experts with its router in high precision."""
    torch.manual_seed(0)
    model = Routed(64, 4, 2, depth=1)
    return fp8debug.convert(model, recipe, {"*.select": None}) if recipe else model


def gated(recipe: str | None) -> Net:
    """Return two gated blocks; the head stays in high precision."""
    return net(recipe, {"head": None} if recipe else None)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a run is trained.

    Attributes:
        micro: microbatches of a step.
        sums_in_fp32: the program adds up the gradients of microbatches in FP32 buffers of its own.
        masters: the optimizer holds FP32 copies of the weights.
        dtype: of the weights.
        lr: learning rate of AdamW.
        eps: of AdamW.
        betas: of AdamW.
        serves: compare inference at every sampled step: ``bf16`` by default, ``fp8`` by the training's own path; by a copy in
            FP8 ``fp8 of rounded`` weights, which an export in BF16 left of them, or ``fp8 but`` for one module.
        loss_scale: the loss is multiplied by it, and gradients are divided by it before they are clipped.
        clip: norm that gradients are clipped to.
        resumes: step at which the run is resumed, from a checkpoint of the weights; the first sampled one of a second part.
        saves_moments: the checkpoint has the optimizer's state.
    """

    steps: int = 24
    micro: int = 1
    sums_in_fp32: bool = False
    masters: bool = False
    dtype: torch.dtype = torch.float32
    lr: float = 1e-2
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.95)
    serves: str | None = None
    loss_scale: float = 1.0
    clip: float | None = None
    resumes: int | None = None
    saves_moments: bool = True


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A fault and a cure.

    Attributes:
        fault: name for ``inject``; None for one that the setting makes.
        made: what the setting makes, in words.
        code: of the rule whose cure is applied.
        finding: name of the rule's finding; None where any is meant.
        cure: what is applied, in words.
        build: recipe -> model.
        recipe: of the model.
        module: that bears the fault.
        options: of the fault.
        setting: of the sick run.
        recommended: apply what ``recommend`` makes of the findings.
        change: (model) -> None, made after the fault is planted.
        cured: the setting with the cure; None: the same.
        situation: the fault is a situation that lasts (outliers, padding), so that the reference is the same in BF16; else the
            reference is a run without it.
        budget: for ``recommend``.
        at: step from which the fault acts.
        cured_options: of the fault in the cured run, where the cure takes a part of it away.
        what_if: recipes that the sick run records beside its own; None for the default ones.
    """

    fault: str | None
    code: str
    cure: str
    build: Callable[[str | None], nn.Module] = gated
    recipe: str = "blockwise"
    module: str | None = "blocks.1.down"
    options: Mapping[str, Any] = field(default_factory=dict)
    setting: Setting = Setting()
    reference: Setting | None = None
    recommended: bool = False
    change: Callable[[nn.Module], None] | None = None
    cured: Setting | None = None
    situation: bool = False
    budget: float = 1.0
    what_if: tuple[str, ...] | None = None
    cured_options: Mapping[str, Any] | None = None
    made: str = "BF16 weights"
    finding: str | None = None
    at: int = AT

    @property
    def name(self) -> str:
        """Fault and cure in one word."""
        return f"{self.fault or self.made}/{self.cure}".replace(" ", "_")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a trial gave.

    Attributes:
        proposed: the finding's cure.
        found: whether the sick run has the finding.
        losses: mean of the last losses: without the fault, with it, with the cure.
        sqnr_db: of the finding's site in the same three runs; None where it is not in FP8, or the finding has none.
        left: findings above information in the cured run, and the one that was cured.
    """

    proposed: str
    found: bool
    losses: tuple[float, float, float]
    sqnr_db: tuple[float | None, float | None, float | None]
    left: tuple[str, ...]

    @property
    def helps(self) -> bool:
        """Whether loss and site are back, and nothing is found."""
        healthy, _, cured = self.losses
        is_back = cured <= healthy * (1 + MAX_GAP)
        before, _, after = self.sqnr_db
        is_site_back = before is None or after is None or after >= before - MAX_DEFICIT_DB
        return self.found and is_back and is_site_back and not self.left


def _copies(model: nn.Module) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().float().clone()) for p in model.parameters()]


def trained(model: nn.Module, path: Path, setting: Setting, serving: nn.Module | None = None, **watched: Any) -> list[float]:
    """Train and record a model; return its losses.

    Args:
        model: to train.
        path: of the run.
        setting: how.
        serving: the model of ``setting.serves`` where that is a copy.
        watched: options of ``watch``.
    """
    weights = list(model.parameters())
    held = _copies(model) if setting.masters else weights

    def adam() -> torch.optim.Optimizer:
        return torch.optim.AdamW(held, lr=setting.lr, eps=setting.eps, betas=setting.betas)

    def part(steps: range, resume_from: int | None) -> Iterator[float]:
        with fp8debug.watch(model, path, every=EVERY, resume_from=resume_from, **watched) as watch:
            for step in steps:
                total = _passes(model, setting, step, sums)
                for gradient, p, copy in zip(sums, weights, held, strict=True):
                    if setting.sums_in_fp32:
                        copy.grad = gradient.to(copy.dtype, copy=True)
                        gradient.zero_()
                    elif setting.masters and p.grad is not None:
                        copy.grad, p.grad = p.grad.float(), None
                for copy in held:
                    if copy.grad is not None and setting.loss_scale != 1:
                        copy.grad /= setting.loss_scale
                if setting.clip is not None:
                    nn.utils.clip_grad_norm_(held, setting.clip)
                optimizer.step()
                optimizer.zero_grad()
                if setting.masters:
                    with torch.no_grad():
                        for p, copy in zip(weights, held, strict=True):
                            p.copy_(copy)
                if setting.serves and step % EVERY == 0:
                    watch.compare_inference(batch(1000)[0], inference=_served(model, serving, setting))
                more: dict[str, Any] = {} if setting.loss_scale == 1 else {"loss_scale": setting.loss_scale}
                watch.step(loss=total, **more)
                yield total

    optimizer, sums = adam(), [torch.zeros_like(p, dtype=torch.float32) for p in weights]
    if setting.resumes is None:
        return list(part(range(setting.steps), None))
    losses = list(part(range(setting.resumes), None))
    saved, optimizer = optimizer.state_dict(), adam()
    if setting.saves_moments:
        optimizer.load_state_dict(saved)
    return losses + list(part(range(setting.resumes, setting.steps), setting.resumes))


def _passes(model: nn.Module, setting: Setting, step: int, sums: Sequence[Tensor]) -> float:
    """Run a step's microbatches, with their gradients added to ``sums`` where the program does so; return the loss."""
    total = 0.0
    for number in range(setting.micro):
        x, classes = batch(step * setting.micro + number)
        loss = functional.cross_entropy(model(x.to(setting.dtype)).float(), classes) / setting.micro
        (loss * setting.loss_scale).backward()
        total += loss.item()
        if setting.sums_in_fp32:
            for gradient, p in zip(sums, model.parameters(), strict=True):
                gradient += 0.0 if p.grad is None else p.grad
                p.grad = None
    return total


def _served(model: nn.Module, serving: nn.Module | None, setting: Setting) -> nn.Module | None:
    """Return the path of inference, a copy with the weights of this step; None for the default one."""
    if serving is None:
        return model if setting.serves == "fp8" else None
    weights = model.state_dict()
    if setting.serves == "fp8 of rounded":
        weights = {name: value.bfloat16().to(value.dtype) for name, value in weights.items()}
    serving.load_state_dict(weights)
    return serving


def tried(trial: Trial, folder: Path) -> Outcome:
    """Train the three runs of a trial."""

    def made(*, planted: bool, options: Mapping[str, Any] = trial.options) -> nn.Module:
        model = trial.build(trial.recipe).to(trial.setting.dtype)
        if planted and trial.fault is not None:
            fp8debug.inject(model, trial.fault, module=trial.module, step=trial.at, **options)
        return model

    def trains(model: nn.Module, name: str, setting: Setting, what_if: tuple[str, ...] | None) -> list[float]:
        serving = None
        if setting.serves not in (None, "bf16", "fp8"):
            serving = trial.build(trial.recipe).to(trial.setting.dtype)
        if serving is not None and setting.serves == "fp8 but":
            leaves: Any = serving.get_submodule(trial.module or "")
            leaves.set_recipe("bf16")
        beside = {} if what_if is None else {"what_if": what_if}
        return trained(model, folder / name, setting, serving, **beside)

    sick = trains(made(planted=True), "sick", trial.setting, trial.what_if)
    run = fp8debug.Run(folder / "sick")
    found = fp8debug.triage(run)
    finding = next((f for f in found if f.code == trial.code and trial.finding in (None, f.name)), None)
    healthy_model = made(planted=trial.situation)
    if trial.situation:
        module: Any = healthy_model.get_submodule(trial.module or "")
        module.set_recipe("bf16")
    healthy = trains(healthy_model, "healthy", trial.reference or trial.setting, ())
    cured_model = made(planted=True, options=trial.options if trial.cured_options is None else trial.cured_options)
    if trial.recommended:
        fallbacks = fp8debug.recommend(run, found, trial.budget)
        assert fallbacks, f"nothing is recommended for {trial.name}"
        fp8debug.apply(cured_model, fallbacks)
    if trial.change:
        trial.change(cured_model)
    cured = trains(cured_model, "cured", trial.cured or trial.setting, ())
    left = fp8debug.triage(folder / "cured")
    return Outcome(
        proposed=finding.cure if finding else "",
        found=finding is not None,
        losses=(_end(healthy), _end(sick), _end(cured)),
        sqnr_db=(_sqnr(folder / "healthy", finding), _sqnr(folder / "sick", finding), _sqnr(folder / "cured", finding)),
        left=tuple(
            f"{f.code} {f.name} {f.module}"
            for f in left
            if f.severity > Severity.INFO or (finding is not None and (f.code, f.name) == (finding.code, finding.name))
        ),
    )


def _end(losses: Sequence[float]) -> float:
    return fmean(losses[-LAST:])


def _sqnr(path: Path, finding: Finding | None) -> float | None:
    """Return the median SQNR of the finding's site over the last sampled steps."""
    if finding is None or not (finding.module and finding.gemm and finding.tensor):
        return None
    table = fp8debug.Run(path).table(("step", "sqnr_db", "reference", "actual"), finding.module, finding.gemm, finding.tensor)
    wanted = [r["sqnr_db"] for r in table.to_pylist() if r["actual"] and r["reference"] in ("operand", "shadow")]
    wanted = [db for db in wanted[-3:] if db is not None]
    return sorted(wanted)[len(wanted) // 2] if wanted else None
