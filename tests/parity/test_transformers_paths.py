"""Paths of small models of transformers: differences that reports tell of, and equal paths by other kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import fp8debug
from fp8debug.errors import RunError, UsageError
from fp8debug.parity import ParityReport, compare_paths, record_path
from fp8debug.parity.compare import Limits
from fp8debug.parity.dump import execution
from fp8debug.parity.measures import nmse
from fp8debug_cli.main import cli
from tests.parity.toy_models import classes_of

KINDS = {kind: classes_of(f"{kind}ForCausalLM", f"{kind}Config") for kind in ("Llama", "Qwen2", "Qwen3Moe", "Gemma")}
GPT2 = classes_of("GPT2LMHeadModel", "GPT2Config")
WIDTH = 128
SIZES = {
    **{"vocab_size": 300, "hidden_size": WIDTH, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128},
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


def model_of(kind: str = "Llama", **more: Any) -> Any:
    """Return a decoder in BF16 with weights of the size that training gives them."""
    of_model, of_config = KINDS[kind]
    model = of_model(of_config(**{**SIZES, **(EXPERTS if "Moe" in kind else {}), **more})).eval().requires_grad_(False)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.02 if "embed" in name else parameter.shape[-1] ** -0.5)
        else:
            parameter.normal_(float(name.endswith("norm.weight") and kind != "Gemma"), 0.1)
    return model.bfloat16()


def tokens(number: int = 64) -> Tensor:
    return torch.randint(300, (2, number), generator=torch.Generator().manual_seed(7))


def compared(train: Any, rollout: Any, folder: Path, ids: Tensor | None = None, other: Tensor | None = None) -> ParityReport:
    ids = tokens() if ids is None else ids
    record_path(train, {"input_ids": ids}, folder / "train")
    record_path(rollout, {"input_ids": ids if other is None else other}, folder / "rollout")
    return compare_paths(folder / "train", folder / "rollout")


def cast(x: Tensor, granularity: str = "128x128") -> Tensor:
    kind = fp8debug.Cast(format="e4m3fn", granularity=granularity, scaling="current")
    return fp8debug.dequantize(fp8debug.quantize(x.float(), kind), kind, torch.float32).to(x.dtype)


class Adapted(nn.Module):
    """A Linear with an adapter, as PEFT has it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.scaling = base, {"default": 2.0}
        parts = [nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)]
        for part in parts:
            nn.init.normal_(part.weight, 0, 0.1)
            part.to(base.weight.dtype)
        self.lora_A, self.lora_B = (nn.ModuleDict({"default": part}) for part in parts)
        self.requires_grad_(False)
        self.product = parts[1].weight.float() @ parts[0].weight.float()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + 2.0 * self.lora_B["default"](self.lora_A["default"](x))
        return out


def adapted(model: Any) -> Any:
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    return model


def merged(model: Any, factor: float) -> Any:
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        linear = layer.self_attn.q_proj
        linear.base_layer.weight.add_((factor * linear.product).to(torch.bfloat16))
        layer.self_attn.q_proj = linear.base_layer
    return model


def _no_adapter() -> tuple[Any, Any]:
    model = model_of()
    return adapted(model), model


def _unscaled_adapter() -> tuple[Any, Any]:
    train = adapted(model_of())
    return train, merged(train, 1.0)


def _gain() -> tuple[Any, Any]:
    train = model_of()
    rollout = copy.deepcopy(train)
    weight = rollout.model.layers[1].input_layernorm.weight
    weight.add_(0.03 * torch.randn_like(weight))
    return train, rollout


def _gain_in_fp8() -> tuple[Any, Any]:
    train = model_of()
    rollout = copy.deepcopy(train)
    weight = rollout.model.layers[1].input_layernorm.weight
    weight.copy_(weight.to(torch.float8_e4m3fn).to(weight.dtype))
    return train, rollout


def _router() -> tuple[Any, Any]:
    train = model_of("Qwen3Moe")
    rollout = copy.deepcopy(train)
    for layer in rollout.model.layers:
        layer.mlp.gate.weight.copy_(cast(layer.mlp.gate.weight, "tensorwise"))
    return train, rollout


def _expert() -> tuple[Any, Any]:
    train = model_of("Qwen3Moe")
    rollout = copy.deepcopy(train)
    weight = rollout.model.layers[1].mlp.experts.down_proj
    weight[3].add_(0.05 * weight.float().std().to(weight.dtype) * torch.randn_like(weight[3]))
    return train, rollout


def _layer() -> tuple[Any, Any]:
    train = model_of()
    rollout = copy.deepcopy(train)
    rollout.model.layers = rollout.model.layers[:2]
    rollout.model.config = copy.deepcopy(rollout.model.config)
    rollout.model.config.num_hidden_layers = 2
    return train, rollout


def _embedding() -> tuple[Any, Any]:
    train = model_of("Gemma")
    rollout = copy.deepcopy(train)
    rollout.model.embed_tokens.embed_scale = torch.ones_like(rollout.model.embed_tokens.embed_scale)
    return train, rollout


def _bias() -> tuple[Any, Any]:
    train = model_of("Qwen2")
    rollout = copy.deepcopy(train)
    for layer in rollout.model.layers:
        layer.self_attn.q_proj.bias = None
    return train, rollout


def _experts_of_each_token() -> tuple[Any, Any]:
    train = model_of("Qwen3Moe")
    rollout = model_of("Qwen3Moe", num_experts_per_tok=1)
    rollout.load_state_dict(train.state_dict())
    return train, rollout


def _scale_of_attention() -> tuple[Any, Any]:
    train = model_of()
    rollout = copy.deepcopy(train)
    rollout.model.layers[2].self_attn.scaling *= 0.97  # less than by another kernel; what lies before has the same bits
    return train, rollout


def _with_biases(size: float) -> Any:
    model = model_of("Qwen2")  # whose biases make q and k large
    for layer in model.model.layers:
        layer.self_attn.q_proj.bias.normal_(0, size)
        layer.self_attn.k_proj.bias.normal_(0, size)
    return model


def _attention_behind_noise() -> tuple[Any, Any]:
    train: Any = fp8debug.convert(model_of(), "blockwise", overrides={"lm_head": None})
    rollout = copy.deepcopy(train)
    rollout.config._attn_implementation = "eager"
    rollout.model.layers[2].self_attn.scaling = 0.0
    return train, rollout


def _attention_of_large_scores() -> tuple[Any, Any]:
    train = _with_biases(30.0)
    rollout = copy.deepcopy(train)
    rollout.config._attn_implementation = "eager"
    rollout.model.layers[0].self_attn.scaling = 0.0
    return train, rollout


@dataclass(frozen=True)
class Difference:
    make: Callable[[], tuple[Any, Any]]
    code: str
    module: str
    says: str
    num_findings: int = 1


DIFFERENCES = [
    Difference(_no_adapter, "F301", "model.layers.0.self_attn.q_proj", "that of the base, without the adapter"),
    Difference(_unscaled_adapter, "F301", "model.layers.0.self_attn.q_proj", "the adapter's product 0.5 times"),
    Difference(_gain, "F301", "model.layers.1.input_layernorm", "a copy of another step"),
    Difference(_gain_in_fp8, "F303", "model.layers.1.input_layernorm", "as rounding to FP8 makes"),
    Difference(_router, "F303", "model.layers.0.mlp.gate", "as rounding to FP8 makes"),
    Difference(_expert, "F301", "model.layers.1.mlp.experts.3.down_proj", "a copy of another step"),
    Difference(_layer, "F308", "model.layers.2", "run in the training alone, and model.norm behind differs"),
    Difference(_embedding, "F306", "model.embed_tokens", "of the same tokens the rollout makes an output that is 0.0"),
    Difference(_experts_of_each_token, "F305", "model.layers.0.mlp.gate", "to 2 experts in training and to 1 in the rollout"),
    Difference(_scale_of_attention, "F306", "model.layers.2.self_attn", "and its q_proj, k_proj, v_proj agree"),
    Difference(_attention_behind_noise, "F306", "model.layers.2.self_attn", "its q_proj, k_proj, v_proj by 0.0"),
    Difference(_attention_of_large_scores, "F306", "model.layers.0.self_attn", "and its q_proj, k_proj, v_proj agree"),
    Difference(_bias, "F301", "model.layers.0.self_attn.q_proj", "the rollout has no bias"),
]


@pytest.mark.parametrize("case", DIFFERENCES, ids=lambda case: case.make.__name__)
def test_a_difference_has_its_cause(case: Difference, tmp_path: Path) -> None:
    report = compared(*case.make(), tmp_path)
    told = [(f.code, f.module, f.message) for f in report]
    assert len(report) == case.num_findings, told
    assert (report[0].code, report[0].module) == (case.code, case.module), told
    assert case.says in report[0].message, told


class Parts(nn.Module):
    """Three projections, each a Linear or all of them rows of one Linear with an adapter."""

    def __init__(self, parts: tuple[nn.Linear, ...], joined: Adapted | None = None) -> None:
        super().__init__()
        named: dict[str, nn.Module] = dict(zip(("q_proj", "k_proj", "v_proj"), parts, strict=False))
        self.embed_tokens = nn.Embedding(300, WIDTH)
        self.self_attn = nn.ModuleDict(named if joined is None else {"qkv_proj": joined})

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        return torch.cat([part(x) for part in self.self_attn.values()], -1)


def test_a_part_of_a_joined_module_without_the_adapter(tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts = tuple(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
    base = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
    base.weight.data = torch.cat([part.weight.data for part in parts])
    joined = Adapted(base)
    for number in (0, 2):  # in training the adapter is merged into q and v
        parts[number].weight.data += 2.0 * joined.product[number * WIDTH : (number + 1) * WIDTH]
    train, rollout = Parts(parts), Parts((), joined)
    rollout.embed_tokens = train.embed_tokens
    report = compared(train.requires_grad_(False), rollout.requires_grad_(False), tmp_path)
    assert [(f.code, f.module) for f in report] == [("F301", "self_attn.k_proj")]
    assert "the training's weight is that of the base, without the adapter that the rollout adds" in report[0].message


def _merged() -> tuple[Any, Any]:
    train = adapted(model_of())
    return train, merged(train, 2.0)


def _eager() -> tuple[Any, Any]:
    train = model_of()
    rollout = copy.deepcopy(train)
    rollout.config._attn_implementation = "eager"
    return train, rollout


def _batched_experts() -> tuple[Any, Any]:
    train = model_of("Qwen3Moe")
    rollout = copy.deepcopy(train)
    rollout.set_experts_implementation("batched_mm")
    return train, rollout


def _wide() -> tuple[Any, Any]:
    train = model_of()
    return train, copy.deepcopy(train).float()


def _large_scores() -> tuple[Any, Any]:
    train = model_of()
    for layer in train.model.layers:
        layer.self_attn.q_proj.weight.mul_(4)
        layer.self_attn.k_proj.weight.mul_(4)
    rollout = copy.deepcopy(train)
    rollout.config._attn_implementation = "eager"
    return train, rollout


def _large_scores_in_fp8() -> tuple[Any, Any]:
    train, rollout = (fp8debug.convert(model, "blockwise", overrides={"lm_head": None}) for model in _large_scores())
    return train, rollout


def _largest_scores() -> tuple[Any, Any]:
    train = _with_biases(30.0)
    rollout = copy.deepcopy(train)
    rollout.config._attn_implementation = "eager"
    return train, rollout


@pytest.mark.parametrize("make", [_merged, _eager, _batched_experts, _wide, _large_scores, _large_scores_in_fp8, _largest_scores])
def test_equal_paths_by_other_kernels_are_silent(make: Callable[[], tuple[Any, Any]], tmp_path: Path) -> None:
    report = compared(*make(), tmp_path)
    assert not report, [(f.code, f.module, f.message) for f in report]


@pytest.mark.parametrize("name", ["o_proj", "v_proj"])
def test_a_layer_of_zeros_does_not_tell_which_kernel_attention_has(name: str, tmp_path: Path) -> None:
    train, rollout = _eager()
    for model in (train, rollout):
        getattr(model.model.layers[0].self_attn, name).weight.zero_()
    report = compared(train, rollout, tmp_path)
    assert not report, [(f.code, f.module, f.message) for f in report]


@pytest.mark.parametrize("scores", [4.0, 32.0, 256.0, 4096.0])
@pytest.mark.parametrize("difference", [0.0, 1e-5, 1e-3])
def test_noise_of_attention_is_below_its_limit_and_a_dropped_mask_above(scores: float, difference: float) -> None:
    torch.manual_seed(0)
    q, k, v = ((torch.randn(4, 256, 64) * size**0.5).bfloat16() for size in (scores, scores, 1.0))

    def attended(q: Tensor, k: Tensor, is_eager: bool = False, is_causal: bool = True) -> Any:
        s = (q @ k.mT if is_eager else q.float() @ k.float().mT) / 8
        s = s + torch.full((256, 256), float("-inf")).triu(1) if is_causal else s
        return (s.softmax(-1, dtype=torch.float32).to(s.dtype) @ v.to(s.dtype)).float().numpy()

    other = [(x.float() + torch.randn(x.shape) * (scores * difference) ** 0.5) for x in (q, k)]
    noise = nmse(attended(q, k), attended(q, k, is_eager=True) if difference == 0 else attended(*other))
    real = nmse(attended(q, k), attended(q, k, is_causal=False))
    limits = Limits(1e-5, 1e-4).of_scores(scores**2)
    limit = max(limits.attention, limits.passed_on("self_attn", difference))
    assert noise is not None and real is not None
    assert 1.5 * noise < limit < real / 1.5


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_shared_expert_that_one_path_counts_is_no_other_routing(is_shared: bool, tmp_path: Path) -> None:
    model = model_of("Qwen3Moe")
    compared(model, model, tmp_path)
    key = "model.layers.1.mlp.gate.indices"
    for file in (tmp_path / "rollout").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors, header = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()
        if key in tensors:
            break
    more = torch.full_like(tensors[key][:, :1], 8)
    if not is_shared:
        more[::3] = 9  # routed: not all tokens get the same
    tensors[key] = torch.cat([tensors[key], more], 1)
    save_file(tensors, file, header)
    report = compare_paths(tmp_path / "train", tmp_path / "rollout")
    assert [f.code for f in report] == ([] if is_shared else ["F305"])


def test_rows_behind_other_tokens_are_not_compared(tmp_path: Path) -> None:
    other = tokens()
    other[:, 20:24] = (other[:, 20:24] + 3) % 300
    model = model_of()
    report = compared(model, model, tmp_path, other=other)
    assert [(f.code, f.module) for f in report] == [("F308", None)]
    assert "at position 20" in report[0].message


@pytest.mark.parametrize("kind", ["Llama", "Qwen3Moe"])
def test_noise_that_grows_through_casts_is_no_finding(kind: str, tmp_path: Path) -> None:
    train = model_of(kind)
    rollout = copy.deepcopy(train)
    rollout.config._attn_implementation = "eager"
    for model in (train, rollout):
        model.lm_head.weight.mul_(2)
        fp8debug.convert(model, "blockwise", overrides={"lm_head": None})
    report = compared(train, rollout, tmp_path)
    assert report.metrics["token_mult_prob_error"] > 1.05
    assert not report, [(f.code, f.module, f.message) for f in report]
    (note,) = report.problems
    assert "no recorded module differs beyond noise, which grows to 0.0" in note


def test_a_head_alone_that_reads_other_numbers_is_no_noise(tmp_path: Path) -> None:
    train = model_of()
    train.lm_head.weight.mul_(2)
    rollout = copy.deepcopy(train)
    weight = rollout.model.layers[1].mlp.down_proj.weight
    weight.add_(0.5 * weight.float().std().to(weight.dtype) * torch.randn_like(weight))
    for model, name in ((train, "train"), (rollout, "rollout")):
        record_path(model, {"input_ids": tokens()}, tmp_path / name, include=("lm_head",))
    report = compare_paths(tmp_path / "train", tmp_path / "rollout")
    assert [(f.code, str(f.severity)) for f in report] == [("F308", "warning")]


def test_a_plain_file_says_nothing_of_order_and_names_do(tmp_path: Path) -> None:
    train = model_of()
    rollout = copy.deepcopy(train)
    weight = rollout.model.layers[1].self_attn.o_proj.weight
    weight.add_(0.3 * weight.float().std().to(weight.dtype) * torch.randn_like(weight))
    for model, name in ((train, "train"), (rollout, "rollout")):
        found: dict[str, Tensor] = {}

        def write(own: str, into: dict[str, Tensor]) -> Callable[..., None]:
            return lambda module, args, out: into.update({own: out.detach().flatten(0, 1).clone()})

        for own, module in model.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding) or own.endswith("norm"):
                module.register_forward_hook(write(own, found))
        model(input_ids=tokens())
        save_file({"tokens": tokens(), **found}, tmp_path / f"{name}.safetensors")
    report = compare_paths(tmp_path / "train.safetensors", tmp_path / "rollout.safetensors")
    assert [(f.code, f.module) for f in report] == [("F306", "model.layers.1.self_attn.o_proj")]
    assert "no weight of it was recorded, so that a stale one may be the cause as well" in report[0].message


def _padded(model: Any, ids: Tensor, number: int) -> dict[str, Tensor]:
    """Return a batch with padding on the left, whose positions count it."""
    padding = torch.zeros(len(ids), number, dtype=torch.long)
    mask = torch.cat([padding, torch.ones_like(ids)], 1)
    return {
        "input_ids": torch.cat([padding, ids], 1),
        "attention_mask": mask,
        "position_ids": torch.arange(mask.shape[1]).expand_as(mask),
    }


def _fp8(model: Any) -> Any:
    model.lm_head.weight.mul_(2)
    return fp8debug.convert(model, "blockwise", overrides={"lm_head": None})


def test_learned_positions_that_count_padding_are_named(tmp_path: Path) -> None:
    model = _activation("gelu", torch.bfloat16)
    record_path(model, {"input_ids": tokens()}, tmp_path / "train")
    record_path(model, _padded(model, tokens(), 8), tmp_path / "rollout")
    report = compare_paths(tmp_path / "train", tmp_path / "rollout")
    assert [(f.code, str(f.severity)) for f in report] == [("F308", "warning"), ("F306", "warning")]
    assert report[0].tensor == "positions" and "at 0 in training and at 8 in the rollout" in report[0].message


@pytest.mark.parametrize("is_fp8", [False, True], ids=["BF16", "FP8"])
@pytest.mark.parametrize("factor", [1.0, 0.8], ids=["shifted", "another theta"])
@pytest.mark.parametrize("are_recorded", [False, True], ids=["positions by default", "positions recorded"])
def test_rotary_embeddings_are_judged_by_attention(factor: float, are_recorded: bool, is_fp8: bool, tmp_path: Path) -> None:
    train = _fp8(model_of()) if is_fp8 else model_of()
    rollout = copy.deepcopy(train)
    rollout.model.rotary_emb.inv_freq.mul_(factor)
    padded = _padded(rollout, tokens(), 8)
    if not are_recorded:  # transformers counts the padding
        del padded["position_ids"]
    record_path(train, {"input_ids": tokens()}, tmp_path / "train")
    record_path(rollout, padded, tmp_path / "rollout")
    report = compare_paths(tmp_path / "train", tmp_path / "rollout")
    if factor == 1.0:  # rotary embeddings depend on differences alone
        assert not report, [(f.code, f.module, f.message) for f in report]
        assert "nothing else that was recorded differs" in report.problems[0]
        assert ("at 0 in training and at 8 in the rollout" in report.problems[0]) is are_recorded
    else:
        assert (report[0].code, str(report[0].severity)) == ("F308" if are_recorded else "F306", "warning")
        assert {f.module for f in report[1:]} <= {"model.layers.0.self_attn"}


def test_a_path_without_the_first_token_is_named(tmp_path: Path) -> None:
    model, ids = model_of(), tokens()
    with pytest.raises(RunError, match=rf"rollout starts 1 token later, without {int(ids[0, 0])}: begin-of-sequence"):
        compared(model, model, tmp_path, ids, ids[:, 1:])


def _logprobs(model: Any, ids: Tensor, temperature: float, top_p: float) -> Tensor:
    z = model(input_ids=ids).logits.float() / temperature
    p, order = z.softmax(-1).sort(-1, descending=True)
    kept = torch.zeros_like(z, dtype=torch.bool).scatter(-1, order, p.cumsum(-1) - p < top_p)
    found = z.masked_fill(~kept, -torch.inf).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    return torch.cat([torch.full((len(ids), 1), torch.nan), found], 1).flatten()


@pytest.mark.parametrize(
    ("temperature", "top_p", "says"), [(0.7, 1.0, "a temperature of 0.7"), (1.0, 0.9, "as after top-p"), (1.0, 1.0, None)]
)
def test_log_probabilities_alone_are_those_of_the_other_paths_logits(
    temperature: float, top_p: float, says: str | None, tmp_path: Path
) -> None:
    model, ids = model_of(), tokens()
    model.lm_head.weight.mul_(2)
    record_path(model, {"input_ids": ids}, tmp_path / "train")
    save_file({"tokens": ids, "logprobs": _logprobs(model, ids, temperature, top_p)}, tmp_path / "rollout.safetensors")
    report = compare_paths(tmp_path / "train", tmp_path / "rollout.safetensors")
    assert report.metrics["token_mult_prob_error"] > 1.05 or says is None
    assert [f.code for f in report] == ([] if says is None else ["F308"])
    assert all("the other path's logits" in f.message and str(says) in f.message for f in report)


def _activation(kind: str, dtype: torch.dtype) -> Any:
    model = GPT2[0](GPT2[1](vocab_size=300, n_embd=WIDTH, n_layer=2, n_head=4, activation_function=kind))
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.1)
    return model.to(dtype).eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("kinds", "dtype", "says"),
    [
        (("gelu_new", "gelu"), torch.float32, "the training computes GELU by tanh, the rollout GELU"),
        (("gelu_pytorch_tanh", "gelu"), torch.bfloat16, "the training computes GELU by tanh, the rollout GELU"),
        (("gelu", "gelu_new"), torch.bfloat16, "the training computes GELU, the rollout GELU by tanh"),
        (("gelu_new", "gelu_python"), torch.float16, "the training computes GELU by tanh, the rollout GELU"),
        (("relu", "silu"), torch.bfloat16, "the training computes ReLU, the rollout SiLU"),
        (("gelu_new", "gelu_pytorch_tanh"), torch.bfloat16, None),
        (("gelu_python", "gelu"), torch.bfloat16, None),
        (("gelu_new", "gelu_pytorch_tanh"), torch.float16, None),
        (("gelu_new", "gelu_pytorch_tanh"), torch.float32, None),
    ],
)
def test_another_activation_function_has_its_name(
    kinds: tuple[str, str], dtype: torch.dtype, says: str | None, tmp_path: Path
) -> None:
    train, rollout = (_activation(kind, dtype) for kind in kinds)
    report = compared(train, rollout, tmp_path)
    assert [(f.code, f.module) for f in report] == ([] if says is None else [("F306", "transformer.h.0.mlp.act")])
    assert all(str(says) in f.message for f in report)


def test_recorded_runs_by_another_attention_kernel_are_silent(tmp_path: Path) -> None:
    for model, name in zip(_eager(), ("train", "rollout"), strict=True):
        fp8debug.convert(model, "blockwise", overrides={"lm_head": None})
        with fp8debug.watch(model, tmp_path / name, every=1, what_if=(), inference=True), torch.no_grad():
            model(input_ids=tokens())
    report = compare_paths(tmp_path / "train", tmp_path / "rollout")
    assert not report, [(f.code, f.module, f.message) for f in report]


_OF_LAYERS = {
    "transformers": "input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.attn self_attn.o_proj self_attn"
    " post_attention_layernorm mlp.gate mlp.experts.0.up_proj mlp.experts.0.act_fn mlp.experts.0.down_proj mlp.experts mlp"
    " post_feedforward_layernorm",
    "gpt2": "ln_1 attn.c_attn attn.c_proj ln_2 mlp.c_fc mlp.act mlp.c_proj",
    "megatron": "self_attention.linear_qkv self_attention.core_attention self_attention.linear_proj pre_mlp_layernorm mlp.router"
    " mlp.linear_fc1 mlp.linear_fc2",
    "llama": "attention_norm attention.wq attention.wk attention.wv attention.wo ffn_norm feed_forward.w1 feed_forward.w2",
    "opt": "self_attn_layer_norm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj final_layer_norm fc1"
    " activation_fn fc2",
    "vit": "norm1 attn.qkv attn.proj norm2 mlp.up mlp.down",
    "mla": "input_layernorm self_attn.q_a_proj self_attn.q_a_layernorm self_attn.q_b_proj self_attn.kv_a_proj_with_mqa"
    " self_attn.kv_b_proj self_attn.o_proj post_attention_layernorm",
}


@pytest.mark.parametrize("stack", _OF_LAYERS)
def test_names_are_sorted_as_they_run(stack: str) -> None:
    layers = [f"model.layers.{number}.{name}" for number in (0, 2, 10) for name in _OF_LAYERS[stack].split()]
    names = ["model.embed_tokens", "model.rotary_emb", *layers, "model.norm", "lm_head"]
    mixed = list(names)
    Random(0).shuffle(mixed)
    assert sorted(mixed, key=execution) == names


def test_another_model_is_not_a_layer_of_one_path(tmp_path: Path) -> None:
    report = compared(model_of(), _activation("gelu", torch.bfloat16), tmp_path)
    assert [(f.code, f.module) for f in report] == [("F301", "lm_head")]
    (problem,) = report.problems
    assert problem.startswith("only 1 of ") and "another model, or map names with --names TABLE" in problem


def test_one_path_given_twice_and_a_run_beside_a_dump_are_mistakes(tmp_path: Path) -> None:
    record_path(model_of(), {"input_ids": tokens()}, tmp_path / "dump")
    twice = CliRunner().invoke(cli, ["parity", str(tmp_path / "dump"), f"{tmp_path / 'dump'}/"])
    assert isinstance(twice.exception, UsageError) and "was given twice" in str(twice.exception)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text("{}")
    with pytest.raises(RunError, match=r"is a recorded run and .* is none"):
        compare_paths(tmp_path / "run", tmp_path / "dump")
