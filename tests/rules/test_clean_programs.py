"""Correct programs of other people's making: no rule warns of them, and the fallback list is empty."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8debug
from fp8debug.adapters.interception.sublinears import stacks_of
from fp8debug.adapters.watching.coverage import modules_outside
from fp8debug.fallback import recommend
from fp8debug.rules import Finding, Severity, triage
from fp8debug.store.read.run import Run
from tests.adapters.linears import ScaledLinear
from tests.shortened import shortened
from tests.synthetic import build

WIDTH, TOKENS = 64, 256


class Reward(nn.Module):
    """A head of one output: each row of grad_output is its own amax."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.score = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.score(torch.tanh(self.up(x))) - x[:, :1]).square().mean()
        return out


class Top2(nn.Module):
    """Experts of which each token takes two, beside one that all take: a row of the router's gradient is +g and -g."""

    def __init__(self) -> None:
        super().__init__()
        self.pre, self.shared = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.pre(x)
        best, chosen = self.gate(h).topk(2)
        outputs = torch.stack([expert(h) for expert in self.experts], 1)
        taken = outputs.gather(1, chosen[..., None].expand(-1, -1, WIDTH)) * best.softmax(-1)[..., None]
        out: Tensor = (taken.sum(1) + self.shared(h) - x.roll(1, -1)).square().mean()
        return out


class Vit(nn.Module):
    """Parameters of three dimensions that are no experts, and a classifier beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token, self.positions = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.zeros(1, 17, WIDTH))
        self.patch, self.up, self.down = nn.Linear(48, WIDTH), nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(16, 16, -1)[..., :48]
        h = torch.cat([self.cls_token.expand(16, -1, -1), self.patch(x)], 1) + self.positions
        h = h + self.down(nn.functional.gelu(self.up(self.norm(h + h.mean(1, keepdim=True)))))
        return nn.functional.cross_entropy(self.head(self.norm(h)[:, 0]), torch.arange(16))


class TiedHead(nn.Module):
    """A head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.argmax(1)
        return nn.functional.cross_entropy(self.head(torch.tanh(self.up(self.embed(tokens)))), (tokens * 7 + 3) % WIDTH)


class PowersOfTwo(nn.Module):
    """An input that FP8 holds exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.b(torch.relu(self.a(torch.exp2((2 * x).round())))) - x).square().mean()
        return out


class Adapted(nn.Module):
    """A frozen base Linear in FP8, its adapters in BF16, as LoRA trains them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.a = nn.ModuleList(nn.Linear(WIDTH, 16, bias=False) for _ in range(3))
        self.b = nn.ModuleList(nn.Linear(16, WIDTH, bias=False) for _ in range(3))
        self.base.requires_grad_(False)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for base, a, b in zip(self.base, self.a, self.b, strict=True):
            h = torch.tanh(base(h) + b(a(h)))
        out: Tensor = (self.head(h) - x).square().mean()
        return out


def recorded(model: nn.Module, path: Path, num_steps: int = 24, num_microbatches: int = 1) -> Run:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with fp8debug.watch(model, path, every=4) as watch:
        for _ in range(num_steps):
            for _ in range(num_microbatches):
                loss = model(torch.randn(TOKENS, WIDTH))
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=loss)
    return Run(path)


def faults(run: Run) -> list[tuple[str, str | None, str]]:
    return [(f.code, f.module, f.message) for f in triage(run) if f.severity > Severity.INFO]


@pytest.mark.parametrize("make", [Reward, Top2, Vit, TiedHead, PowersOfTwo])
def test_a_converted_model_is_clean(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    run = recorded(fp8debug.convert(make(), "blockwise"), tmp_path / "run")
    assert faults(run) == []
    assert "F109" not in [f.code for f in triage(run)] or make is Top2
    assert recommend(run, triage(run), 1.0) == []


@pytest.mark.parametrize("is_off", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_linear_with_one_output_sends_back_lies_on_the_grid(tmp_path: Path, dtype: torch.dtype, is_off: bool) -> None:
    """Rows of grad_output are multiples of the critic's only weight row, which is FP8: a cast changes nothing, and is there.

    Where FP8 is off in the Linear before it, that is found all the same.
    """
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(WIDTH, 128), nn.Tanh(), nn.Linear(128, 128), nn.Linear(128, 1)).to(dtype)
    fp8debug.convert(critic, "blockwise")
    if is_off:
        fp8debug.inject(critic, "silent_bf16", module="2", step=0)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3)
    with fp8debug.watch(critic, tmp_path / "run", every=2) as watch:
        for _ in range(8):
            x = torch.randn(TOKENS, WIDTH, dtype=dtype)
            loss = (critic(x) - x[:, :1]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=loss)
    run = Run(tmp_path / "run")
    site = "module = '2' AND gemm = 'dgrad' AND tensor = 'grad_output' AND reference = 'operand' AND actual"
    query = f"SELECT min(sqnr_db) AS db FROM sites WHERE {site}"
    assert run.sql(query).to_pylist()[0]["db"] > 45
    assert [(f.code, f.module, str(f.severity)) for f in triage(run)] == [("F111", "2", "warning")] * is_off


def test_a_plain_model_is_clean(tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert list(triage(recorded(Reward(), tmp_path / "run"))) == []


@pytest.mark.parametrize("in_fp8", ["base", "adapters"])
def test_lora_is_clean(tmp_path: Path, in_fp8: str) -> None:
    torch.manual_seed(0)
    model = Adapted()
    for part in (model.base,) if in_fp8 == "base" else (model.a, model.b):
        fp8debug.convert(part, "blockwise")
    run = recorded(model, tmp_path / "run")
    assert list(triage(run)) == []


@pytest.mark.parametrize("recipe", shortened(["tensorwise", "rowwise", "rowwise_with_gw_hp"], 3))
def test_torchao_with_its_head_left_out_is_clean(tmp_path: Path, recipe: str) -> None:
    torchao = pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    model = Adapted()
    config = replace(torchao.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    model.base.requires_grad_(True)
    torchao.convert_to_float8_training(model, config=config, module_filter_fn=lambda module, fqn: fqn != "head")
    run = recorded(model, tmp_path / "run")
    assert list(triage(run)) == []


class HeavyTailed(nn.Module):
    """Activations of many magnitudes, between Linears over ``_scaled_mm``."""

    def __init__(self, scales: str) -> None:
        super().__init__()
        self.up, self.down = ScaledLinear(WIDTH, 2 * WIDTH), ScaledLinear(2 * WIDTH, WIDTH)
        for linear in (self.up, self.down):
            linear.scales = scales

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.layer_norm(x.bfloat16(), (WIDTH,))
        out: Tensor = (self.down(torch.exp(3 * self.up(x))) - x).float().square().mean()
        return out


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("scales", shortened(["first", "second", "outside"], 2))
def test_scales_that_a_program_applies_elsewhere_are_clean(tmp_path: Path, scales: str, num_microbatches: int) -> None:
    """One operand gets the product of both, or the result is multiplied: each operand alone is off by a factor."""
    torch.manual_seed(0)
    run = recorded(HeavyTailed(scales).bfloat16(), tmp_path / "run", num_microbatches=num_microbatches)
    assert [f for f in triage(run) if f.code != "F105"] == [], "the activations spread as far as F105 says"


MODULES = (*((f"layers.{i}.{role}", 256, 256) for i in range(4) for role in ("a", "b")), ("head", 256, 512))


def left_out(path: Path, names: set[str]) -> dict[str | None, Finding]:
    entries = {
        name: {"requested": None, "fp8": name not in names, "kind": "Linear" if name in names else "Float8Linear"}
        for name, _, _ in MODULES
    }
    run = build(path, modules=MODULES, module_entries=entries, num_steps=20, recipes=dict.fromkeys(names))
    findings = triage(run)
    assert {f.code for f in findings} <= {"F110"}
    return {f.module: f for f in findings}


def test_bf16_by_design_is_no_finding_and_a_sibling_that_differs_a_warning(tmp_path: Path) -> None:
    def severities(name: str, *names: str) -> Mapping[str | None, str]:
        return {module: str(f.severity) for module, f in left_out(tmp_path / name, set(names)).items()}

    assert severities("none") == {}
    assert severities("head", "head") == {}
    assert severities("first layer", "layers.0.a", "layers.0.b") == {}
    assert severities("last layers", *(f"layers.{i}.{role}" for i in (2, 3) for role in "ab")) == {}
    assert severities("one role", *(f"layers.{i}.a" for i in range(4))) == {}
    assert severities("one of many", "layers.2.a") == {"layers.2.a": "warning"}
    assert severities("a layer between", "layers.2.a", "layers.2.b") == {"layers.2.a": "warning"}
    found = left_out(tmp_path / "both", {"layers.2.a", "head"})
    assert {module: str(f.severity) for module, f in found.items()} == {"layers.2.a": "warning"}
    assert found["layers.2.a"].also == (), "the head, which a filter left out, is not told with it"
    assert found["layers.2.a"].message == "a plain nn.Linear in high precision, and 3 of its 3 siblings run in FP8"


class Experts(nn.Module):
    """Stacks of matrices, as each rank holds them under expert parallelism."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.zeros(num, 32, 64)), nn.Parameter(torch.zeros(num, 64, 32))


def test_parameters_of_three_dimensions_that_are_no_experts() -> None:
    assert stacks_of(Vit()) == []
    assert [stacks_of(Experts(num)) for num in (1, 4)] == [["w1", "w2"]] * 2
    assert [entry["fqn"] for entry in modules_outside([Vit()])] == []


def test_an_outlier_of_a_plain_model_is_judged_by_what_fp8_would_do(tmp_path: Path) -> None:
    def outlier(x: Tensor) -> Tensor:
        spread: Any = torch.ones(WIDTH)
        spread[3] = 3e6
        out: Tensor = x * spread
        return out

    class Wide(Reward):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(outlier(x)) * 1e-6

    found = {}
    for name, is_converted in (("plain", False), ("fp8", True)):
        torch.manual_seed(0)
        model = fp8debug.convert(Wide(), "tensorwise_current") if is_converted else Wide()
        with fp8debug.watch(model, tmp_path / name, every=2, plain_recipe="tensorwise_current") as watch:
            for _ in range(6):
                watch.step(loss=model(torch.randn(TOKENS, WIDTH)))
        found[name] = [f for f in triage(Run(tmp_path / name)) if f.code == "F105"]
    (plain,), (fp8,) = found["plain"], found["fp8"]
    assert (plain.module, plain.severity) == ("up", Severity.WARNING) and fp8.severity is Severity.ERROR
    assert (plain.module, plain.cast, plain.value) == (fp8.module, fp8.cast, fp8.value)
    assert "would underflow in FP8 at step" in plain.message


@pytest.mark.parametrize("name", ["relative_position_bias", "pos_emb", "bias_table", "rel_pos", "alibi", "mask"])
def test_tables_of_three_dimensions_are_no_experts(name: str) -> None:
    module = nn.Module()
    module.register_parameter(name, nn.Parameter(torch.zeros(8, 16, 16)))
    assert stacks_of(module) == []
    for weight in ("weight", "w13", "gate_up_proj", "post_weight", "relu_weight"):
        module.register_parameter(weight, nn.Parameter(torch.zeros(8, 16, 16)))
    assert stacks_of(module) == ["weight", "w13", "gate_up_proj", "post_weight", "relu_weight"]


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("judged", ["discriminator", "generator"])
def test_gradients_of_another_models_loss_are_emptied_on_purpose(judged: str, joined: bool, tmp_path: Path) -> None:
    """The generator's loss gives the discriminator gradients, which the discriminator's own step begins by emptying."""
    torch.manual_seed(0)
    generator, discriminator = (
        fp8debug.convert(nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, width)), "blockwise")
        for width in (WIDTH, 16)
    )
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (generator, discriminator)]
    model = discriminator if judged == "discriminator" else generator
    with fp8debug.watch(model, tmp_path / "run", every=2):
        for _ in range(12):
            real, noise = torch.randn(TOKENS, WIDTH) + 1, torch.randn(TOKENS, WIDTH)
            optimizers[1].zero_grad()
            true = nn.functional.softplus(-discriminator(real)).mean()
            false = nn.functional.softplus(discriminator(generator(noise).detach())).mean()
            for loss in [true + 0.5 * false] if joined else [true, false]:
                loss.backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            nn.functional.softplus(-discriminator(generator(noise))).mean().backward()
            optimizers[0].step()
    assert [name for name in faults(Run(tmp_path / "run")) if name[0] in ("F134", "F149")] == []


def _surgery(model: nn.Module, losses: Callable[[], tuple[Tensor, Tensor]]) -> None:
    """Join the gradients of two losses in parts of the program's own choice, each found by a backward pass."""
    given = []
    for loss in losses():
        model.zero_grad()
        loss.backward()
        given.append([p.grad for p in model.parameters()])
    for p, first, second in zip(model.parameters(), *given, strict=True):
        p.grad = 0.7 * first + 1.1 * second


def _by_grad(model: nn.Module, losses: Callable[[], tuple[Tensor, Tensor]]) -> None:
    """The same by ``torch.autograd.grad``."""
    parameters = list(model.parameters())
    for p, first, second in zip(parameters, *(torch.autograd.grad(loss, parameters) for loss in losses()), strict=True):
        p.grad = 0.7 * first + 1.1 * second


def _inner_loop(model: nn.Module, losses: Callable[[], tuple[Tensor, Tensor]]) -> None:
    """Look at one loss's gradients, and train on the other's."""
    first, second = losses()
    torch.autograd.grad(first, list(model.parameters()))
    model.zero_grad()
    second.backward()


def _of_the_input(model: nn.Module, losses: Callable[[], tuple[Tensor, Tensor]]) -> None:
    """A penalty's pass, which asks for the gradient of the input alone."""
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    size = torch.autograd.grad(model(x).sum(), x)[0].square().mean()
    model.zero_grad()
    (losses()[0] * (1 + size)).backward()


def _ascent(model: nn.Module, losses: Callable[[], tuple[Tensor, Tensor]]) -> None:
    """Step uphill first, as SAM does, and train on the gradient found there."""
    model.zero_grad()
    losses()[0].backward()
    moves = [0.01 * p.grad for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves, strict=True):
            p.add_(move)
    model.zero_grad()
    losses()[1].backward()
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves, strict=True):
            p.sub_(move)


@pytest.mark.parametrize("backward", [_surgery, _by_grad, _inner_loop, _of_the_input, _ascent])
def test_gradients_of_several_losses_are_joined_on_purpose(backward: Callable[..., None], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = fp8debug.convert(nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 64)), "blockwise")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def losses() -> tuple[Tensor, Tensor]:
        out = model(torch.randn(TOKENS, WIDTH))
        return (out - 1).square().mean(), model(torch.randn(TOKENS, WIDTH)).abs().mean()

    with fp8debug.watch(model, tmp_path / "run", every=1):
        for _ in range(5):
            backward(model, losses)
            optimizer.step()
    assert [name for name in faults(Run(tmp_path / "run")) if name[0] in ("F123", "F134", "F149")] == []
