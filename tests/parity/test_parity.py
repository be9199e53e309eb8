"""Two paths of one model: the module that parts and the cause, other stacks' dumps and names, bad input in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn

import fp8debug
from fp8debug.errors import Fp8DebugError, RunError, UsageError
from fp8debug.parity import compare_paths, record_path
from fp8debug.parity.hook import PathRecorder
from fp8debug.parity.names import Names, matched
from fp8debug.parity.rules import PATHS
from fp8debug.parity.sglang import convert_sglang
from fp8debug.parity.sglang import main as sglang_main
from fp8debug_cli.main import cli
from tests.bench.parity import compared, noisy
from tests.bench.parity_models import FAULTS, rollout, tokens, training
from tests.parity.toy_models import toy_mixtral, toy_model


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_difference_has_its_module_and_cause(fault: str, tmp_path: Path) -> None:
    kind = "moe" if fault == "router flip" else "llama"
    report, planted = compared(kind, fault, 1, tmp_path)
    assert planted is not None and report
    assert report[0].module in planted.module and report[0].code == planted.code, report[0].message


@pytest.mark.parametrize("kind", ["llama", "moe"])
def test_equal_paths_and_noise_are_silent(kind: str, tmp_path: Path) -> None:
    report, _ = compared(kind, "none", 1, tmp_path / "equal")
    assert not report and report.metrics["token_mult_prob_error"] < 1.001
    assert not noisy(kind, 0, tmp_path / "noisy")


def test_a_model_of_transformers_by_another_attention_is_silent_and_its_fp8_is_not(tmp_path: Path) -> None:
    model = toy_mixtral(256, 512).bfloat16()
    batch = {"input_ids": torch.randint(300, (2, 40)), "use_cache": False}
    record_path(model, batch, tmp_path / "sdpa")
    model.set_attn_implementation("eager")
    record_path(model, batch, tmp_path / "eager")
    report = compare_paths(tmp_path / "sdpa", tmp_path / "eager")
    assert not report and not report.problems and not report.unmatched
    assert 1 < report.metrics["token_mult_prob_error"] < 1.01
    fp8debug.convert(model, "blockwise", overrides={"lm_head": None})
    record_path(model, batch, tmp_path / "fp8")
    (finding,) = compare_paths(tmp_path / "sdpa", tmp_path / "fp8")
    assert (finding.code, finding.module) == ("F304", "model.layers.0.self_attn.q_proj") and len(finding.also) == 7


def test_recording_changes_nothing(tmp_path: Path) -> None:
    model, batch = training("llama", 0), tokens(0)
    model.train()
    expected = model(batch)
    record_path(model, batch, tmp_path / "dump")
    assert torch.equal(model(batch), expected) and model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(ValueError, match="holds files already"):
        record_path(model, batch, tmp_path / "dump")


def _both(folder: Path, kind: str = "gpt") -> tuple[Path, Path]:
    model = training(kind, 0)
    record_path(model, tokens(0), folder / "a")
    record_path(rollout(model, False), tokens(0), folder / "b")
    return folder / "a", folder / "b"


def test_a_plain_file_by_module_is_enough(tmp_path: Path) -> None:
    x = {f"layers.{n}.{m}": torch.randn(6, 8) for n in range(3) for m in ("input_layernorm", "self_attn.o_proj", "mlp.down_proj")}
    save_file({**x, "tokens": torch.arange(6)}, tmp_path / "a.safetensors")
    y = {k: v + 0.3 * torch.randn(6, 8) if k >= "layers.1.self" else v for k, v in x.items()}
    save_file({**y, "tokens": torch.arange(6)}, tmp_path / "b.safetensors")
    (finding, *_) = compare_paths(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert (finding.code, finding.module) == ("F306", "layers.1.self_attn.o_proj")


def test_tokens_are_aligned_across_padding_order_and_decoding(tmp_path: Path) -> None:
    ids = torch.tensor([[7, 8, 9, 0], [1, 2, 3, 4]])
    values = torch.randn(2, 4, 8)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    save_file({"m": values.reshape(8, 8), "tokens": ids, "mask": mask}, tmp_path / "a.safetensors")
    engine = tmp_path / "engine"
    engine.mkdir()
    rows = torch.cat([values[1, :3], values[0, :2]])
    first = {"m": rows, "tokens": torch.tensor([1, 2, 3, 7, 8]), "positions": torch.tensor([0, 1, 2, 0, 1])}
    then = {"m": torch.stack([values[0, 2], values[1, 3]]), "tokens": torch.tensor([9, 4]), "positions": torch.tensor([2, 3])}
    save_file(first, engine / "pass0.safetensors")
    save_file(then, engine / "pass1.safetensors")
    report = compare_paths(tmp_path / "a.safetensors", engine)
    assert not report and report.modules[0].output == 0.0


def test_names_of_joined_modules_and_a_table_of_the_user(tmp_path: Path) -> None:
    ours = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj"]
    found, left, others = matched(ours, ["layers.0.self_attn.qkv_proj"], Names())
    assert [(name, second.place) for name, _, second in found] == [(n, p) for p, n in enumerate(ours)] and not left and not others
    (tmp_path / "names.toml").write_text('[fused]\nall_in = ["query", "values"]\n[rename]\n"^blocks" = "layers"\n')
    table = Names.read(tmp_path / "names.toml")
    found, _, _ = matched(["blocks.0.query", "blocks.0.values"], ["layers.0.all_in"], table)
    assert len(found) == 2
    for text, why in (
        ("[fused", "cannot be read as TOML"),
        ("[other]\nx = 1\n", "nothing else"),
        ('[rename]\n"(" = ""\n', "no regular"),
    ):
        (tmp_path / "names.toml").write_text(text)
        with pytest.raises(UsageError, match=why):
            Names.read(tmp_path / "names.toml")


def _experts(folder: Path, joined: str, change: Any = None, fp8: bool = False) -> Path:
    """Write a layer of four experts (16 -> 24 -> 16): a module for each Linear, or one module as an engine has it."""
    generator = torch.Generator().manual_seed(5)
    weights = {
        f"{n}.{key}": torch.randn(*size, generator=generator)
        for n in range(4)
        for key, size in (("gate_proj", (24, 16)), ("up_proj", (24, 16)), ("down_proj", (16, 24)))
    }
    x = torch.randn(6, 16, generator=generator)
    if change is not None:
        change(weights)
    above = "model.layers.0.mlp.experts"
    tensors = {f"{above}.{key}.weight": weight for key, weight in weights.items()} if not joined else {}
    if joined:
        first, second = joined.split()
        w13 = torch.stack([torch.cat([weights[f"{n}.gate_proj"], weights[f"{n}.up_proj"]]) for n in range(4)])
        w2 = torch.stack([weights[f"{n}.down_proj"] for n in range(4)])
        tensors = {f"{above}.{first}": w13, f"{above}.{second}": w2}
        if fp8:
            scales = {
                f"{above}.{name}_scale": w.abs().amax((1, 2), keepdim=True) / 448 for name, w in ((first, w13), (second, w2))
            }
            tensors = {key: (w / scales[f"{key}_scale"]).to(torch.float8_e4m3fn) for key, w in tensors.items()}
            tensors |= {key: scale.reshape(4) for key, scale in scales.items()}
    norm = {"model.layers.0.input_layernorm.output": x}
    save_file({**norm, **tensors, "tokens": torch.arange(6)}, folder / f"{len(list(folder.iterdir()))}.safetensors")
    return max(folder.iterdir())


@pytest.mark.parametrize("joined", ["w13_weight w2_weight", "gate_up_proj down_proj"])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("place", ["2.up_proj", "3.down_proj"])
def test_experts_in_one_tensor_are_compared_with_their_linears(joined: str, fp8: bool, place: str, tmp_path: Path) -> None:
    apart = _experts(tmp_path, "")
    equal = compare_paths(apart, _experts(tmp_path, joined, fp8=fp8))
    assert {f.code for f in equal} <= ({"F303"} if fp8 else set())  # the rollout's FP8 weights, of all modules alike
    assert len([m for m in equal.modules if m.weight is not None]) == 12 and {side for _, side in equal.unmatched} <= {"rollout"}

    def stale(weights: dict[str, torch.Tensor]) -> None:
        weights[place] += 0.5 * torch.randn(weights[place].shape, generator=torch.Generator().manual_seed(1))

    (finding, *_) = compare_paths(apart, _experts(tmp_path, joined, stale, fp8))
    assert (finding.code, finding.module) == ("F301", f"model.layers.0.mlp.experts.{place}")
    (finding, *_) = compare_paths(_experts(tmp_path, joined), _experts(tmp_path, "w13_weight w2_weight", stale, fp8))
    number, _, linear = place.partition(".")
    name = joined.split()[linear == "down_proj"].removesuffix("_weight")
    assert (finding.code, finding.module) == ("F301", f"model.layers.0.mlp.experts.{number}.{name}")


def test_an_expert_of_transformers_that_is_stale_is_named(tmp_path: Path) -> None:
    model = toy_mixtral(64, 96)
    batch = {"input_ids": torch.randint(300, (2, 40)), "use_cache": False}
    record_path(model, batch, tmp_path / "train")
    experts = model.get_submodule("model.layers.1.mlp.experts")
    with torch.no_grad():
        experts.down_proj[2] *= 1.5
    record_path(model, batch, tmp_path / "rollout")
    (finding, *_) = compare_paths(tmp_path / "train", tmp_path / "rollout")
    assert (finding.code, finding.module) == ("F302", "model.layers.1.mlp.experts.2.down_proj")


def test_the_hook_writes_experts_as_outputs_by_inputs(tmp_path: Path) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.randn(2, 16, 48))  # used as x @ W
            self.down_proj = nn.Parameter(torch.randn(2, 24, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, up = (x @ self.gate_up_proj[0]).chunk(2, -1)
            return nn.functional.silu(gate) * up @ self.down_proj[0]

    experts = Experts()
    model = nn.Sequential(nn.Embedding(9, 16), experts)
    record_path(model, torch.arange(6)[None], tmp_path / "dump")
    stored = {key: value for file in (tmp_path / "dump").iterdir() for key, value in load_file(file).items()}
    assert torch.equal(stored["1.gate_up_proj"], experts.gate_up_proj.transpose(1, 2))
    assert torch.equal(stored["1.down_proj"], experts.down_proj.transpose(1, 2))


def test_metrics_are_those_of_the_definitions(tmp_path: Path) -> None:
    a = torch.tensor([float("nan"), -1.0, -2.0, -0.5])
    save_file({"m": torch.ones(4, 2), "tokens": torch.arange(4), "logprobs": a}, tmp_path / "a.safetensors")
    b = a + torch.tensor([0.0, 0.1, -0.2, 0.3])
    save_file({"m": torch.ones(4, 2), "tokens": torch.arange(4), "logprobs": b}, tmp_path / "b.safetensors")
    report = compare_paths(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    d = np.array([0.1, -0.2, 0.3])
    assert report.metrics["token_mult_prob_error"] == pytest.approx(np.exp(np.abs(d)).mean(), rel=1e-6)
    assert report.metrics["kl"] == pytest.approx((np.exp(d) - d - 1).mean(), rel=1e-5)
    assert report.metrics["num_tokens"] == 3
    assert [f.code for f in report] == ["F308"]


def test_dumps_of_sglang_become_ours(tmp_path: Path) -> None:
    source = tmp_path / "sglang"
    source.mkdir()
    info = "model.forward_batch_info."
    told: dict[str, Any] = {f"{info}input_ids": torch.arange(5), f"{info}positions": torch.arange(5)}
    told |= {f"{info}seq_lens": torch.tensor([5])}
    told |= {"model.layers.0.self_attn.o_proj": [torch.randn(5, 8), torch.randn(5, 8)], "model.norm": torch.randn(5, 8)}
    torch.save(told, source / "Pass00000.pt")
    assert convert_sglang(source, tmp_path / "dump") == 3
    torch.save({**told, "model.norm": told["model.norm"] * 1.1}, source / "Pass00000.pt")
    assert sglang_main([str(source), str(tmp_path / "other")]) == 0
    report = compare_paths(tmp_path / "dump", tmp_path / "other")
    assert [(f.code, f.module) for f in report] == [("F306", "model.norm")]
    with pytest.raises(RunError, match=r"Pass00000.pt is a dump of SGLang: python -m fp8debug.parity.sglang"):
        compare_paths(source, source)


def test_a_stored_fp8_weight_is_dequantized(tmp_path: Path) -> None:
    class Engine(nn.Module):
        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__()
            scale = weight.abs().amax() / 448
            self.register_buffer("weight", (weight / scale).to(torch.float8_e4m3fn).t())
            self.register_buffer("weight_scale", scale.reshape(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.get_buffer("weight").float() * self.get_buffer("weight_scale"))

    torch.manual_seed(0)
    train = nn.Sequential(nn.Linear(64, 32, bias=False))
    engine = nn.Sequential(Engine(train.get_parameter("0.weight").detach()))
    x = torch.randn(16, 64)
    record_path(train, x, tmp_path / "a")
    record_path(engine, x, tmp_path / "b")
    report = compare_paths(tmp_path / "a", tmp_path / "b")
    assert report.modules[0].weight_is_fp8 == (False, True) and report[0].code == "F303"


def _spoiled(folder: Path, way: str) -> tuple[Path, Path, str]:
    a, b = _both(folder)
    files = sorted(b.glob("*.safetensors"))
    if way == "truncated":
        files[3].write_bytes(files[3].read_bytes()[:100])
        return a, b, "cannot be read"
    if way == "other tokens":
        file = next(f for f in files if "tokens" in load_file(f))
        save_file({"tokens": load_file(file)["tokens"] + 1}, file)
        return a, b, "no token in common"
    if way == "missing modules":
        for file in files[5:9]:
            file.unlink()
        return a, b, "of one path alone"
    if way == "foreign names":
        c = folder / "c.safetensors"
        save_file({"zzz": torch.ones(4, 2)}, c)
        return a, c, "map their names with --names"
    file = next(f for f in files if any("layers.1.mlp.fc1.output" in k for k in load_file(f)))
    told = load_file(file)
    told["layers.1.mlp.fc1.output"][3, 3] = float("nan")
    save_file(told, file, {"format": "fp8debug-parity", "kind": "Fp8Linear"})
    return a, b, "has NaN or Inf, and not in the other path"


@pytest.mark.parametrize(
    ("way", "code"), [("truncated", 0), ("other tokens", 3), ("missing modules", 0), ("foreign names", 3), ("nan", 1)]
)
def test_bad_input_is_one_line_and_the_rest_is_judged(way: str, code: int, tmp_path: Path) -> None:
    a, b, why = _spoiled(tmp_path, way)
    result = CliRunner().invoke(cli, ["parity", str(a), str(b)])
    if isinstance(result.exception, Fp8DebugError):
        assert why in str(result.exception) and "\n" not in str(result.exception) and code == 3
        return
    assert result.exit_code == code, result.output
    assert why in " ".join(result.output.split())


@pytest.mark.parametrize("form", ["table", "json", "csv", "github", "sarif", "html"])
def test_every_format_names_the_module(form: str, tmp_path: Path) -> None:
    compared("gpt", "scale x2", 0, tmp_path)
    args = ["parity", str(tmp_path / "train"), str(tmp_path / "rollout"), "--modules", "--format", form]
    result = CliRunner().invoke(cli, args)
    assert result.exit_code == 1
    report = compare_paths(tmp_path / "train", tmp_path / "rollout")
    assert str(report[0].module) in result.output.replace("\n", "") and "F302" in result.output
    if form in ("json", "sarif"):
        told: Any = json.loads(result.stdout)
        assert form != "json" or told["findings"][0]["module"] == report[0].module


@pytest.mark.parametrize("form", ["table", "json", "github", "sarif", "html"])
def test_every_format_has_what_could_not_be_read(form: str, tmp_path: Path) -> None:
    compared("gpt", "scale x2", 0, tmp_path)
    file = sorted((tmp_path / "train").iterdir())[5]
    file.write_bytes(file.read_bytes()[:6])
    args = ["parity", str(tmp_path / "train"), str(tmp_path / "rollout"), "--format", form]
    result = CliRunner().invoke(cli, args)
    assert f"{file.name} cannot be read" in " ".join(result.output.split())


def test_equal_paths_end_with_0_and_without_findings(tmp_path: Path) -> None:
    a, b = _both(tmp_path)
    result = CliRunner().invoke(cli, ["parity", str(a), str(b), "--format", "json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["findings"] == []


@pytest.mark.parametrize("rule", PATHS, ids=lambda rule: rule.code)
def test_every_cause_has_a_manual_page(rule: Any) -> None:
    assert list(rule.manual()) == ["What it detects", "Why it matters", "Example", "Cure", "Thresholds"]
    assert all(name in rule.manual()["Thresholds"] for name in rule.thresholds)
    assert rule.code in CliRunner().invoke(cli, ["explain", rule.code]).output


def test_the_hook_file_stands_alone() -> None:
    text = Path(str(PathRecorder.__init__.__code__.co_filename)).read_text("utf-8")
    assert "import fp8debug" not in text and "from fp8debug" not in text


def _gpt2(dtype: torch.dtype, width: int = 64) -> tuple[Any, dict[str, Any]]:
    sizes = {"n_embd": width, "n_layer": 2, "n_head": 4, "vocab_size": 300, "n_positions": 64}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    model = toy_model("GPT2LMHeadModel", "GPT2Config", **sizes, **tokens, attn_implementation="eager").to(dtype)
    return model, {"input_ids": torch.randint(300, (2, 40)), "use_cache": False}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_softmax_scale_is_attentions_own_difference(dtype: torch.dtype, tmp_path: Path) -> None:
    model, batch = _gpt2(dtype)
    record_path(model, batch, tmp_path / "train")
    with PathRecorder(model, tmp_path / "rollout"), torch.no_grad():
        factor = 1.1 if dtype == torch.float32 else 1.5
        for block in model.transformer.h:  # as if the scores had another factor: behind what the recorder sees of c_attn
            block.attn.c_attn.register_forward_hook(lambda _, args, y: torch.cat([y[..., :64] * factor, y[..., 64:]], -1))
        model(**batch)
    report = compare_paths(tmp_path / "train", tmp_path / "rollout")
    assert report.metrics["token_mult_prob_error"] < 1.002, "nothing that the log-probabilities show"
    assert [(f.code, f.module) for f in report] == [("F306", "transformer.h.0.attn")]
    assert report[0].message.endswith("in the rollout, and its c_attn agrees")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_attention_kernel_of_gpt2_is_noise(dtype: torch.dtype, tmp_path: Path) -> None:
    model, batch = _gpt2(dtype)
    record_path(model, batch, tmp_path / "eager")
    model.set_attn_implementation("sdpa")
    record_path(model, batch, tmp_path / "sdpa")
    assert not compare_paths(tmp_path / "eager", tmp_path / "sdpa")


def _cast(x: torch.Tensor, form: torch.dtype = torch.float8_e4m3fn, held: float = 1.0) -> torch.Tensor:
    largest = torch.finfo(form).max
    scale = largest / (held * x.float().abs().amax())
    return ((x.float() * scale).clamp(-largest, largest).to(form).float() / scale).to(x.dtype)


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (_cast, "F304", "one path casts its input"),
        (lambda x: _cast(x, torch.float8_e5m2), "F304", "one path casts its input"),
        (lambda x: _cast(x, held=0.4), "F304", "the rollout's input is a cast of the other path's"),
        (lambda x: _cast(x, held=1000.0), "F304", "the rollout's input is a cast of the other path's"),
        (lambda x: 1.03 * x, "F306", "is 1.03 times training's"),
        (lambda x: x + 0.02 * x.std() * torch.randn_like(x), "F306", "differs by 0.000"),
        (lambda x: x.clamp(-x.std(), x.std()), "F306", "differs by"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_input_that_is_cast_before_its_module(change: Any, code: str, says: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, batch = _gpt2(dtype)
    record_path(model, batch, tmp_path / "train")
    model.transformer.h[1].mlp.c_proj.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))
    record_path(model, batch, tmp_path / "rollout")
    (finding,) = compare_paths(tmp_path / "train", tmp_path / "rollout")
    module = "transformer.h.1.mlp.c_proj" if code == "F304" else "transformer.h.1.mlp"
    assert (finding.code, finding.module) == (code, module) and says in finding.message, finding.message


def test_a_square_weight_of_inputs_by_outputs_is_turned(tmp_path: Path) -> None:
    model, batch = _gpt2(torch.bfloat16)
    record_path(model, batch, tmp_path / "a")
    plain = model.transformer.h[0].attn.c_proj.forward
    model.transformer.h[0].attn.c_proj.forward = lambda x: plain(_cast(x))
    record_path(model, batch, tmp_path / "b")
    (finding,) = report = compare_paths(tmp_path / "a", tmp_path / "b")
    assert (finding.code, finding.module) == ("F307", "transformer.h.0.attn.c_proj"), finding.message
    assert all(m.error[0] is None or m.error[0] < 1e-5 for m in report.modules)
