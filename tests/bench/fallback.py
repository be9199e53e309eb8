"""How good is ``recommend()``? ``python tests/bench/fallback.py [--budgets 0.1 0.25] [--only NAME]``: a table, no assertion.

A small GPT is trained in BF16 to a checkpoint. From there a window of steps runs in BF16, in FP8, and in FP8 with some GEMMs in
BF16, on the same batches. The gap is the KL divergence, on held-out text, of the window's model (run as it trained) from the
one trained in BF16. What a list recovers is 1 - gap(list) / gap(FP8), at a cost that is the FLOP share of its GEMMs.

Of a healthy model the gap is one draw of its rounding: a GEMM in BF16 rounds everything after it anew, which moves the figures
of a list by several hundredths and says nothing of the next checkpoint. So each scenario is drawn several times (--draws),
with other initial weights and batches; gaps are summed over the draws. The oracle gives one list for all of them.

    oracle      the best list that fits the budget among all single GEMMs, all pairs of the ten best of them (all pairs with
                --pairs), and the best of these extended greedily
    recommend   what fp8debug.recommend() makes of the recording of each draw; it may cost far less than the budget
    filled      the same with ``fill=True``, which spends the budget: the one to compare at equal budget; "of oracle" is its share
    first/last  the first module, the last, the second, ...: all GEMMs of each, one by one while they fit

A cast that recommend changes costs nothing, so it may do better than the oracle, which knows BF16 only.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8debug
from examples.train_gpt import rotate, text
from fp8debug.fallback import Fallback
from fp8debug.fallback.measured import gemm_shares, result_errors

GEMMS = ("fprop", "dgrad", "wgrad")
VOCABULARY, WIDTH, HIDDEN, LENGTH, BATCH = 128, 64, 256, 64, 4
Unit = tuple[str, str]


class Block(nn.Module):
    """One transformer layer in four Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (1, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        y = functional.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return out


class Model(nn.Module):
    """A GPT over bytes; its head stays in BF16."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What makes FP8 differ from BF16.

    Attributes:
        name: of the table's row.
        recipe: of every Linear but the head.
        faults: (name, module, options) to plant.
        recipes: other recipes by module.
        prepare: changes the checkpoint's model without changing what it computes.
        depth: blocks.
        seed: of the initial weights.
        lr: learning rate of the window; small where ``prepare`` left weights too small for the rate of the checkpoint.
    """

    name: str
    recipe: str = "blockwise"
    faults: tuple[tuple[str, str, dict[str, Any]], ...] = ()
    recipes: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], None] = lambda model: None
    depth: int = 2
    seed: int = 0
    lr: float = 1e-3


def outlier_channels(*places: tuple[int, float]) -> Callable[[Any], None]:
    """Return what scales one input channel of ``qkv`` in a block up, and its column of weights down by as much."""

    def prepare(model: Any) -> None:
        for number, factor in places:
            block = model.blocks[number]
            block.norm1.weight[3] *= factor
            block.qkv.weight[:, 3] /= factor

    return prepare


E5M2 = fp8debug.get_recipe("blockwise").replace(gemm="fprop", tensor="input", format="e5m2")
SCENARIOS = (
    Scenario(name="stale scale, one layer", recipe="tensorwise_current", faults=(("stale_scale", "blocks.1.down", {}),)),
    Scenario(name="stale scale, first layer", recipe="tensorwise_current", faults=(("stale_scale", "blocks.0.qkv", {}),), seed=1),
    Scenario(name="wrong scale after reload", faults=(("wrong_scale", "blocks.0.up", {}),)),
    Scenario(name="scale rounded down", recipe="blockwise_pow2", faults=(("e8m0_floor", "blocks.1.up", {}),), seed=1),
    Scenario(name="zero tile", faults=(("zero_tile", "blocks.0.down", {}),)),
    Scenario(name="two faults", faults=(("wrong_scale", "blocks.1.proj", {}), ("wrong_format", "blocks.0.up", {})), seed=2),
    Scenario(name="outlier channels", recipe="tensorwise_current", prepare=outlier_channels((0, 2.0**9), (1, 2.0**5)), lr=1e-6),
    Scenario(name="healthy"),
    Scenario(name="healthy, 1 block", depth=1, seed=3),
    Scenario(name="healthy tensorwise", recipe="tensorwise_current", seed=4),
)


class Trial:
    """A checkpoint, its batches, and the gap of any list."""

    def __init__(self, scenario: Scenario, *, pretrain: int, window: int, device: str = "cpu") -> None:
        self.scenario, self.window = scenario, window
        data = text(1 << 17).clamp(max=VOCABULARY - 1).long()
        starts = torch.randint(len(data) - LENGTH - 1, (pretrain + window + 4, BATCH), generator=_generator(scenario.seed))
        self.batches = [torch.stack([data[s : s + LENGTH + 1] for s in row.tolist()]) for row in starts]
        torch.manual_seed(scenario.seed)
        model = Model(scenario.depth)
        optimizer = _optimizer(model)
        self._train(model, optimizer, self.batches[:pretrain])
        with torch.no_grad():
            scenario.prepare(model)
        self.model, self.optimizer_state = model, optimizer.state_dict()
        self.held_out = torch.cat(self.batches[pretrain + window :])
        self.batches = self.batches[pretrain : pretrain + window]
        self.reference = self._log_probabilities(self._run(None))
        self.gap = self.of([])

    def _train(self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Tensor]) -> None:
        for batch in batches:
            loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def _run(self, fallbacks: Sequence[Fallback] | None, watch_in: Path | None = None) -> nn.Module:
        """Train the window from the checkpoint and return the model; None is BF16."""
        scenario, model = self.scenario, copy.deepcopy(self.model)
        if fallbacks is None:
            overrides: dict[str, Any] = {"*": "bf16"}
        else:
            overrides = {**scenario.recipes, "head": None}
        fp8debug.convert(model, scenario.recipe, overrides)
        for name, module, options in scenario.faults if fallbacks is not None else ():
            fp8debug.inject(model, name, module=module, **options)
        fp8debug.apply(model, fallbacks or [])
        optimizer = _optimizer(model)
        optimizer.load_state_dict(copy.deepcopy(self.optimizer_state))
        optimizer.param_groups[0]["lr"] = scenario.lr
        if watch_in is None:
            self._train(model, optimizer, self.batches)
        else:
            with fp8debug.watch(model, watch_in, every=1, shadow="full"):
                self._train(model, optimizer, self.batches)
        return model

    def _log_probabilities(self, model: nn.Module) -> Tensor:
        with torch.no_grad():
            found: Tensor = model(self.held_out[:, :-1]).double().log_softmax(-1)
            return found

    def of(self, fallbacks: Sequence[Fallback]) -> float:
        """Return the gap that a list leaves, in nats per byte; NaN counts as knowing nothing."""
        found = self._log_probabilities(self._run(fallbacks))
        kl = (self.reference.exp() * (self.reference - found)).sum(-1).mean().item()
        return min(kl, math.log(VOCABULARY)) if math.isfinite(kl) else math.log(VOCABULARY)

    def alone_and_removed(self, modules: Sequence[str]) -> dict[str, tuple[float, float]]:
        """Return by module the gap that its fprop in FP8 makes alone, and by how much the gap shrinks without it.

        Both of the weights that BF16 trained, run in FP8 afterwards: what errors do at once, without their effect on training.
        """
        model: Any = self._run([])
        model.load_state_dict(self._run(None).state_dict(), strict=False)
        recipes = {name: model.get_submodule(name).recipe for name in modules}

        def kl(in_fp8: Iterable[str]) -> float:
            for name, recipe in recipes.items():
                model.get_submodule(name).set_recipe(recipe if name in in_fp8 else "bf16")
            found = self._log_probabilities(model)
            return float((self.reference.exp() * (self.reference - found)).sum(-1).mean())

        whole = kl(modules)
        return {m: (kl([m]), whole - kl([other for other in modules if other != m])) for m in modules}


class Draws:
    """The draws of a scenario, their gaps summed."""

    def __init__(self, scenario: Scenario, number: int, *, pretrain: int, window: int) -> None:
        seeds = [scenario.seed + 100 * place for place in range(number)]
        self.trials = [Trial(replace(scenario, seed=seed), pretrain=pretrain, window=window) for seed in seeds]
        self.gap = sum(trial.gap for trial in self.trials)
        self._known: dict[frozenset[Unit], float] = {}

    def recovered(self, lists: Sequence[Sequence[Fallback]]) -> float:
        """Return the share of the gap that lists close, one for each draw."""
        return 1 - sum(trial.of(fallbacks) for trial, fallbacks in zip(self.trials, lists, strict=True)) / self.gap

    def of_units(self, units: Iterable[Unit]) -> float:
        """Return the share of the gap that GEMMs in BF16 close."""
        key = frozenset(units)
        if key not in self._known:
            fallbacks = [Fallback(module=module, gemms=(gemm,)) for module, gemm in sorted(key)]
            self._known[key] = self.recovered([fallbacks] * len(self.trials))
        return self._known[key]


def oracle(trial: Draws, shares: dict[str, float], budget: float, *, every_pair: bool) -> tuple[float, frozenset[Unit]]:
    """Return the best recovery within the budget, and the GEMMs that give it."""
    units = [(module, gemm) for module in shares for gemm in GEMMS]

    def cost(chosen: Iterable[Unit]) -> float:
        return sum(shares[module] for module, _ in chosen)

    singles = sorted((frozenset((unit,)) for unit in units if cost((unit,)) <= budget + 1e-12), key=lambda c: -trial.of_units(c))
    if not singles:
        return 0.0, frozenset()
    good = singles if every_pair else singles[:10]
    candidates = singles + [c for a, b in itertools.combinations(good, 2) if cost(c := a | b) <= budget + 1e-12]
    best = max(candidates, key=trial.of_units)
    while True:
        longer = [c for more in good if not more <= best and cost(c := best | more) <= budget + 1e-12]
        top = max(longer, key=trial.of_units, default=best)
        if trial.of_units(top) <= trial.of_units(best):
            return trial.of_units(best), best
        best = top


def first_and_last(modules: Sequence[str], shares: dict[str, float], budget: float) -> list[Unit]:
    """Return the GEMMs of the first module, the last, the second, ... while they fit."""
    inwards = [m for pair in itertools.zip_longest(modules, reversed(modules)) for m in pair if m is not None]
    chosen: list[Unit] = []
    for module in dict.fromkeys(inwards):
        for gemm in GEMMS:
            if sum(shares[m] for m, _ in chosen) + shares[module] <= budget + 1e-12:
                chosen.append((module, gemm))
    return chosen


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.1, 0.25])
    parser.add_argument("--only", help="scenarios whose name has this in it")
    parser.add_argument("--pretrain", type=int, default=40)
    parser.add_argument("--window", type=int, default=6)
    parser.add_argument("--draws", type=int, default=3, help="of each scenario: other initial weights and batches")
    parser.add_argument("--pairs", action="store_true", help="let the oracle try every pair of GEMMs")
    parser.add_argument(
        "--alone", action="store_true", help="print what the errors of each fprop do alone, by damage and measured"
    )
    parser.add_argument("--singles", action="store_true", help="print what each GEMM alone recovers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'scenario':24} {'gap':>8} {'budget':>6} {'oracle':>6} {'recommend':>9} {'costs':>6} {'filled':>6} {'costs':>6}"
        f" {'of oracle':>9} {'first/last':>10} {'s':>5}"
    )
    for scenario in SCENARIOS:
        if options.only and options.only not in scenario.name:
            continue
        began = time.monotonic()
        draws = Draws(scenario, options.draws, pretrain=options.pretrain, window=options.window)
        with tempfile.TemporaryDirectory() as folder:
            runs = []
            for place, trial in enumerate(draws.trials):
                trial._run([], Path(folder) / f"run{place}")
                runs.append(fp8debug.Run(Path(folder) / f"run{place}"))
            findings = [fp8debug.triage(run) for run in runs]
            shares = gemm_shares(runs[0])
            modules = [module["fqn"] for module in runs[0].modules if module["fqn"] in shares]
            if options.alone:
                _print_alone(draws, runs, modules)
            if options.singles:
                for module in modules:
                    print("   ", module, *(f"{gemm} {draws.of_units([(module, gemm)]):6.1%}" for gemm in GEMMS))
            for budget in options.budgets:
                lists = {
                    name: [fp8debug.recommend(run, found, budget, fill=fill) for run, found in zip(runs, findings, strict=True)]
                    for name, fill in (("default", False), ("filled ", True))
                }
                (ours, filled), (cost, full) = ([f(x) for x in lists.values()] for f in (draws.recovered, _cost))
                prior = draws.of_units(first_and_last(modules, shares, budget))
                best, chosen = oracle(draws, shares, budget, every_pair=options.pairs)
                print(
                    f"{scenario.name:24} {draws.gap / options.draws:8.1e} {budget:6.0%} {best:6.1%} {ours:9.1%} {cost:6.1%}"
                    f" {filled:6.1%} {full:6.1%} {filled / best if best > 0 else math.nan:9.0%} {prior:10.1%}"
                    f" {time.monotonic() - began:5.0f}",
                    flush=True,
                )
                if options.singles:
                    print("    oracle ", *(f"{module}.{gemm}" for module, gemm in sorted(chosen)))
                    for name, of_draws in lists.items():
                        for fallbacks in of_draws:
                            print("   ", name, *(f"{f.module}.{'+'.join(f.gemms)}={f.cast or 'bf16'}" for f in fallbacks))


def _print_alone(draws: Draws, runs: Sequence[fp8debug.Run], modules: Sequence[str]) -> None:
    """Print shares of each draw's gap: by the recorded damage, alone in FP8, and what is gone with this fprop in BF16."""
    for trial, run in zip(draws.trials, runs, strict=True):
        errors, measured = result_errors(run), trial.alone_and_removed(modules)
        for module in modules:
            # The loss is a mean over the tokens of a step: a token's own is that much larger, and its KL half the square.
            damage = (BATCH * LENGTH) ** 2 / 2 * (errors[module, "fprop"].damage_per_row or 0.0)
            shares = [f"{value / trial.gap:6.1%}" for value in (damage, *measured[module])]
            print("   ", f"{module:16} damage {shares[0]} alone {shares[1]} removed {shares[2]}", flush=True)


def _cost(lists: Sequence[Sequence[Fallback]]) -> float:
    """Return the mean cost of the draws' lists."""
    return sum(fallback.cost for fallbacks in lists for fallback in fallbacks) / len(lists)


if __name__ == "__main__":
    main()
