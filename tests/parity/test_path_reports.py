"""Public reports of train and rollout that parted, each rebuilt as two small recordings; the answer was written first."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fp8debug
from fp8debug.errors import RunError
from fp8debug.linear import Fp8Linear
from fp8debug.parity import compare_paths, record_path
from fp8debug.parity.compare import judge
from fp8debug.parity.measures import Measures
from fp8debug.parity.report import metric_words
from tests.bench.parity_models import Decoder, Experts, Gated, rollout, tokens, training

Paths = tuple[Path, Path]


@dataclass(frozen=True, kw_only=True)
class Report:
    """A public report.

    Attributes:
        reference: repository and number.
        make: records both paths into a folder.
        code: of the first finding; None where there is nothing to find.
        module: of the first finding.
        also: further modules that it has to name; None where others may be named.
        says: what its message has to hold.
    """

    reference: str
    make: Callable[[Path], Paths]
    code: str | None
    module: str | None = None
    also: frozenset[str] | None = None
    says: str = ""


def recorded(train: nn.Module, engine: nn.Module, folder: Path, seed: int = 0) -> Paths:
    record_path(train, tokens(seed), folder / "train")
    record_path(engine, tokens(seed), folder / "rollout")
    return folder / "train", folder / "rollout"


def _gate_and_up_left_out(folder: Path) -> Paths:
    model = training("llama", 0, "mxfp8")
    engine = rollout(model, False)
    for name, module in engine.named_modules():
        if name.endswith(("gate_proj", "up_proj")) and isinstance(module, Fp8Linear):
            module.set_recipe("bf16")
    return recorded(model, engine, folder)


def _halves_of_experts_swapped(folder: Path) -> Paths:
    model = training("moe", 0)
    engine = rollout(model, False)
    for name, module in engine.named_modules():
        if isinstance(module, Gated) and name.startswith("layers.1."):
            module.gate_proj.weight, module.up_proj.weight = module.up_proj.weight, module.gate_proj.weight
    return recorded(model, engine, folder)


class Adapted(nn.Module):
    """A Linear with an adapter, as PEFT names its parts; ``times`` is how often the adapter's product is added."""

    def __init__(self, base: nn.Linear, times: int = 1, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        rows, columns = base.weight.shape
        self.base_layer, self.times, self.scaling = base, times, {"default": 1.0}
        down, up = (nn.Linear(*sizes, bias=False, dtype=torch.bfloat16) for sizes in ((columns, 8), (8, rows)))
        self.lora_A, self.lora_B = nn.ModuleDict({"default": down}), nn.ModuleDict({"default": up})
        for part in (down, up):
            part.weight.data = (torch.randn(part.weight.shape, generator=generator) * 0.15).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + self.times * self.lora_B["default"](self.lora_A["default"](x))
        return out

    def delta(self) -> Tensor:
        up, down = (part["default"].get_parameter("weight").float() for part in (self.lora_B, self.lora_A))
        return up @ down


def adapted(model: Decoder, times: int) -> Decoder:
    """Return the model with adapters at every down_proj; at one layer it is added several times."""
    model = copy.deepcopy(model)
    for number, layer in enumerate(model.layers):
        mlp: Any = layer.mlp
        mlp.down_proj = Adapted(mlp.down_proj, times if number == 1 else 1, number)
    return model.requires_grad_(False)


def merged(model: Decoder) -> Decoder:
    """Return the engine's copy, whose weights hold the adapters' products."""
    engine = copy.deepcopy(model)
    for layer in engine.layers:
        mlp: Any = layer.mlp
        part: Any = mlp.down_proj
        part.base_layer.weight.data = (part.base_layer.weight.float() + part.delta()).bfloat16()
        mlp.down_proj = part.base_layer
    return engine


def _adapter_added_twice(folder: Path) -> Paths:
    model = training("llama", 0, None)
    return recorded(adapted(model, 2), adapted(model, 1), folder)


def _adapter_added_twice_and_merged(folder: Path) -> Paths:
    model = training("llama", 0, None)
    return recorded(adapted(model, 2), merged(adapted(model, 1)), folder)


def _adapters_merged(folder: Path) -> Paths:
    model = training("llama", 0, None)
    return recorded(adapted(model, 1), merged(adapted(model, 1)), folder)


def _scales_never_loaded(folder: Path) -> Paths:
    model = training("moe", 0)
    engine = rollout(model, False)
    mlp = engine.layers[1].mlp
    assert isinstance(mlp, Experts)
    for expert in mlp.experts:
        assert isinstance(expert, Gated)
        expert.down_proj.weight.data[:] = float("nan")
    return recorded(model, engine, folder)


def _own_logprobs(folder: Path, change: Callable[[Tensor, Tensor], Tensor]) -> Paths:
    """Record equal paths; the rollout also reports log-probabilities made of its logits by ``change``."""
    model = training("llama", 0)
    paths = recorded(model, rollout(model, False), folder)
    batch = tokens(0)
    logits = model(batch).float()
    for path, values in zip(paths, (logits.log_softmax(-1), change(logits, batch)), strict=True):
        table = values.gather(-1, batch.roll(-1, 1)[..., None])[..., 0].roll(1, 1)
        table[:, 0] = float("nan")
        file = next(f for f in sorted(path.iterdir()) if "tokens" in load_file(f))
        extra = {"logprobs": table.flatten().contiguous(), "tokens": batch}
        save_file(extra, path / "pass00000-call999999.safetensors", {"format": "fp8debug-parity", "pass": "0"})
        assert file
    return paths


def _logprob_of_the_likeliest(folder: Path) -> Paths:
    return _own_logprobs(folder, lambda logits, _: logits.log_softmax(-1).amax(-1, keepdim=True).expand_as(logits))


def _logprob_at_another_temperature(folder: Path) -> Paths:
    return _own_logprobs(folder, lambda logits, _: (logits / 0.6).log_softmax(-1))


def _never_synchronized(folder: Path) -> Paths:
    model = training("llama", 0)
    engine = rollout(model, False)
    generator = torch.Generator().manual_seed(1)
    for parameter in engine.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * parameter.float().std() * 0.05
        parameter.data = (parameter.float() + noise).to(parameter.dtype)
    return recorded(model, engine, folder)


def _rotary_in_bf16(folder: Path) -> Paths:
    """Rotate queries and keys by angles of FP32 in training and of BF16 in the engine."""
    model = training("llama", 0)
    engine = rollout(model, False)
    for path, dtype in ((model, torch.float32), (engine, torch.bfloat16)):
        for layer in path.layers:
            attention: Any = layer.self_attn
            attention.attend = _rotated(dtype, attention.attend)
    return recorded(model, engine, folder)


def _rotated(dtype: torch.dtype, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[-2], dtype=torch.float32) * 40
        angles = (places[:, None] / 1e4 ** torch.linspace(0, 1, q.shape[-1] // 2)).to(dtype).float()
        return attend(_turned(q, angles), _turned(k, angles), v)

    return attended


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1).to(x.dtype)


GATED = [f"layers.{layer}.mlp.{part}" for layer in range(3) for part in ("gate_proj", "up_proj")]
HALVES = [f"layers.1.mlp.experts.{n}.{part}" for n in range(4) for part in ("gate_proj", "up_proj")]
DOWN = [f"layers.1.mlp.experts.{n}.down_proj" for n in range(4)]
REPORTS = {
    "an ignore list that hits more": Report(
        reference="verl #7519",
        make=_gate_and_up_left_out,
        code="F307",
        module=GATED[0],
        also=frozenset(GATED[1:]),
    ),
    "halves of the experts' weights swapped": Report(
        reference="verl #7986",
        make=_halves_of_experts_swapped,
        code="F301",
        module=HALVES[0],
        also=frozenset(HALVES[1:]),
        says="training's layers.1.mlp.experts.0.up_proj: parts of layers.1.mlp.experts.0 are exchanged",
    ),
    "an adapter added twice in training": Report(
        reference="miles #3232",
        make=_adapter_added_twice,
        code="F306",
        module="layers.1.mlp.down_proj",
    ),
    "an adapter added twice in training, merged in the rollout": Report(
        reference="miles #3232",
        make=_adapter_added_twice_and_merged,
        code="F306",
        module="layers.1.mlp.down_proj",
    ),
    "adapters merged in the rollout": Report(reference="miles #3232", make=_adapters_merged, code=None),
    "expert scales never loaded": Report(
        reference="vime #248", make=_scales_never_loaded, code="F308", module=DOWN[0], says="NaN"
    ),
    "log-probability of the likeliest token": Report(
        reference="NeMo-RL #3297", make=_logprob_of_the_likeliest, code="F308", module=None, says="rollout's log-probabilities"
    ),
    "log-probability at another temperature": Report(
        reference="NeMo-RL #935", make=_logprob_at_another_temperature, code="F308", module=None, says="temperature of 0.6"
    ),
    "weights that are never synchronized": Report(
        reference="trl #5312", make=_never_synchronized, code="F301", module="embed_tokens", says="alike"
    ),
    "rotary angles in BF16": Report(reference="prime-rl #1167", make=_rotary_in_bf16, code="F306", module="layers.0.self_attn"),
}


@pytest.mark.parametrize("recipe", [None, "blockwise"])
def test_recorded_runs_leave_merged_adapters_out(recipe: str | None, tmp_path: Path) -> None:
    model = adapted(training("llama", 0, recipe), 1)
    for path, name in ((model, "train"), (merged(model), "rollout")):
        with fp8debug.watch(path, tmp_path / name, inference=True, every=1), torch.no_grad():
            path(tokens(0))
    report = compare_paths(tmp_path / "train", tmp_path / "rollout")
    assert not report and ("layers.0.mlp.down_proj.base_layer", "training") in report.unmatched


def test_a_weight_of_another_layer_has_its_owner(tmp_path: Path) -> None:
    model = training("llama", 0)
    engine = rollout(model, False)
    engine.layers[0], engine.layers[1] = engine.layers[1], engine.layers[0]
    (finding,) = compare_paths(*recorded(model, engine, tmp_path))
    told = "layers.0.input_layernorm: the rollout's weight is training's layers.1.input_layernorm: names are mapped wrongly"
    assert (finding.code, finding.module) == ("F301", "layers.0.input_layernorm") and finding.message.startswith(told)


def test_nan_in_both_paths_is_no_parity(tmp_path: Path) -> None:
    model = training("llama", 0)
    model.layers[1].get_submodule("mlp.up_proj").get_parameter("weight")[0] = float("nan")
    (finding,) = compare_paths(*recorded(model, rollout(model, False), tmp_path))
    assert (finding.code, finding.module, str(finding.severity)) == ("F308", "layers.1.mlp.up_proj", "error")
    save_file({"mask": torch.full((3, 4), -torch.inf), "head": torch.ones(3, 4)}, tmp_path / "masked.safetensors")
    assert not compare_paths(tmp_path / "masked.safetensors", tmp_path / "masked.safetensors")


def test_a_factor_of_a_norm_is_no_grid(tmp_path: Path) -> None:
    model = training("llama", 0)
    engine = rollout(model, False)
    engine.layers[1].get_submodule("post_attention_layernorm").get_parameter("weight").mul_(1.02)
    (finding,) = compare_paths(*recorded(model, engine, tmp_path))
    assert finding.code == "F302" and "the rollout's weight is 1.02" in finding.message


def test_few_tokens_in_common_are_reported(tmp_path: Path) -> None:
    model, batch = training("llama", 0), tokens(0)
    record_path(model, batch, tmp_path / "train")
    other = batch.clone()
    other[:, 5:] = (other[:, 5:] + 1) % 300
    record_path(model, other, tmp_path / "rollout")
    report = compare_paths(tmp_path / "train", tmp_path / "rollout")
    assert report.problems == ["only 10 of 96 tokens are in both paths; record both on the same tokens"]
    (finding,) = report
    assert finding.code == "F308" and finding.tensor == "tokens" and finding.value == 5
    assert "at position 5 of a sequence" in finding.message


def test_more_sequences_longer_ones_and_other_padding_are_no_other_tokens(tmp_path: Path) -> None:
    model, batch = training("llama", 0), tokens(0)
    padded = torch.cat([batch[:, :20], torch.full((len(batch), 6), 3)], 1)
    longer = torch.cat([batch[:, :20], torch.full((len(batch), 4), 7)], 1)
    for name, x in (("all", batch), ("first", batch[:1]), ("short", batch[:, :9]), ("pad3", padded), ("pad7", longer)):
        record_path(model, x, tmp_path / name)
    for a, b in (("all", "first"), ("short", "all"), ("pad3", "pad7"), ("pad3", "all")):
        assert not list(compare_paths(tmp_path / a, tmp_path / b)), (a, b)


def test_no_token_in_common_names_the_first_that_differs(tmp_path: Path) -> None:
    model, batch = training("llama", 0), tokens(0)
    record_path(model, batch, tmp_path / "train")
    begun = torch.cat([torch.full((len(batch), 1), 299), batch], 1)[:1]
    record_path(model, begun, tmp_path / "rollout")
    with pytest.raises(RunError, match=r"no token in common \(at position 0 one has id \d+, the other 299\)"):
        compare_paths(tmp_path / "train", tmp_path / "rollout")


class HeadNorm(nn.Module):
    """A decoder's embedding and the norm of its heads, as Qwen3 has them: several rows for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(300, 64)
        self.q_norm = nn.RMSNorm(16)
        self.lm_head = nn.Linear(64, 300)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        y: Tensor = self.lm_head(self.q_norm(x.view(*x.shape[:2], 4, 16)).reshape(x.shape))
        return y


def test_rows_of_heads_follow_their_tokens(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = HeadNorm(), torch.randint(0, 300, (4, 24))
    record_path(model, batch, tmp_path / "train")
    record_path(model, batch.flip(0)[:, :17], tmp_path / "rollout")
    report = compare_paths(tmp_path / "train", tmp_path / "rollout")
    assert not list(report)
    assert next(m for m in report.modules if m.module == "q_norm").input == 0
    model.q_norm.eps = 0.3
    record_path(model, batch.flip(0), tmp_path / "other")
    (finding,) = compare_paths(tmp_path / "train", tmp_path / "other")
    assert (finding.code, finding.module) == ("F306", "q_norm")


class JoinedExperts(nn.Module):
    """Experts as transformers runs them: rows sorted by expert go through one activation function."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(300, 32)
        self.gate = nn.Linear(32, 4, bias=False)
        self.experts = nn.Module()
        self.experts.act_fn = nn.SiLU()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids).reshape(-1, 32)
        order = self.gate(x).topk(2).indices.ravel().argsort(stable=True) // 2
        rows = self.experts.act_fn(x[order])  # type: ignore[operator]  # a module
        return torch.zeros_like(x).index_add(0, order, rows).view(*input_ids.shape, 32)


def test_rows_of_experts_have_no_order_of_tokens(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = JoinedExperts(), torch.randint(0, 300, (4, 24))
    record_path(model, batch, tmp_path / "train")
    for name, x in (("order", batch.flip(0)), ("shorter", batch[:, :17])):
        record_path(model, x, tmp_path / name)
        assert not list(compare_paths(tmp_path / "train", tmp_path / name)), name


def test_a_cast_of_most_modules_is_one_finding_where_one_of_them_loses_less(tmp_path: Path) -> None:
    """An input with few large values loses less by its cast than the others; it is no kernel of its own."""
    names = [f"layers.{number}.mlp.down_proj" for number in range(4)]
    errors = [9e-5, 6e-4, 7e-4, 6e-4]
    modules = [
        Measures(module=name, theirs=name, kind="Linear", num_rows=(64, 64), input=0.0, output=error, weight=0.0,
                 error=(2.7e-6, error))
        for name, error in zip(names, errors, strict=True)
    ]  # fmt: skip
    (finding,) = judge(modules)
    assert finding.code == "F304" and finding.module == names[0] and list(finding.also) == names[1:]


@pytest.mark.parametrize("name", REPORTS)
def test_a_report(name: str, tmp_path: Path) -> None:
    report = REPORTS[name]
    found = list(compare_paths(*report.make(tmp_path)))
    told = [(f.code, f.module, f.also, f.message) for f in found]
    if report.code is None:
        assert not found, told
        return
    assert found, "nothing was found"
    assert (found[0].code, found[0].module) == (report.code, report.module), told
    assert report.also is None or set(found[0].also) == report.also, told
    assert report.says in found[0].message, told


def test_metrics_in_words() -> None:
    known = {"num_tokens": 94, "logprob_error": 0.04354, "logprob_max": 0.1274, "kl": 0.001332, "top1_flip_rate": 0.09375}
    assert metric_words(known) == [
        "94 tokens",
        "their log-probabilities differ by 0.0435 nats on average, 0.127 at most",
        "KL 0.00133 nats",
        "the most probable token differs at 9.38 %",
    ]
    assert metric_words({"kl": None, "other": 1.0}) == []
