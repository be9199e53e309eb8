"""A walk through docs/parity.md against an engine that calls its model as vLLM does, and dumps as SGLang writes them."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import fp8debug.parity.hook as hook_file
from fp8debug.parity import compare_paths, record_path
from fp8debug.parity.sglang import convert_sglang
from fp8debug_cli.main import cli
from tests.parity.toy_models import toy_model

WIDTH, HEADS, INNER, VOCABULARY, LAYERS, PADDED = 64, 4, 128, 300, 2, 320


class RMSNorm(nn.Module):
    """A norm that adds the residual first, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.variance_epsilon = 1e-6

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        total = x if residual is None else residual.add_(x)
        y = total.float()
        y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype) * self.weight
        return y if residual is None else (x.copy_(y), total)


class ParallelLinear(nn.Module):
    """A Linear that returns its bias beside its output."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return functional.linear(x, self.weight), None


class SiluAndMul(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(x[..., :INNER]) * x[..., INNER:]


class LogitsProcessor(nn.Module):
    def forward(self, head: nn.Module, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, head.get_parameter("weight"))[:, :VOCABULARY]


class Head(nn.Module):
    """A head that is no function: the engine multiplies by its weight, with rows that pad the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(PADDED, WIDTH))


def _rotated(x: Tensor, positions: Tensor) -> Tensor:
    size = x.shape[-1]
    angles = positions[:, None].float() / 10000.0 ** (torch.arange(0, size, 2) / size)
    cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None].to(x.dtype) for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1) * sin


class Attention(nn.Module):
    """Causal attention within each sequence of a flat batch."""

    scaling = (WIDTH // HEADS) ** -0.5

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        sequence = (positions == 0).cumsum(0)
        mask = (sequence[:, None] == sequence) & (positions[:, None] >= positions)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scaling)
        return out[0].transpose(0, 1).reshape(len(positions), WIDTH)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = ParallelLinear(WIDTH, 3 * WIDTH), ParallelLinear(WIDTH, WIDTH)
        self.attn = Attention()

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x)[0].reshape(len(x), 3, HEADS, -1).unbind(1)
        out = self.attn(_rotated(q, positions), _rotated(k, positions), v, positions)
        return self.o_proj(out)[0]  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = ParallelLinear(WIDTH, 2 * INNER), ParallelLinear(INNER, WIDTH)
        self.act_fn = SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = SelfAttention(), Mlp()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(), RMSNorm()

    def forward(self, positions: Tensor, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            x, residual = self.input_layernorm(x), x.clone()
        else:
            x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.self_attn(positions, x), residual)
        return self.mlp(x), residual


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(PADDED, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = RMSNorm()

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            x, residual = layer(positions, x, residual)
        return self.norm(x, residual)[0]  # type: ignore[no-any-return]


class EngineModel(nn.Module):
    """A model as vLLM has it: hidden states from the forward pass, logits of chosen rows afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.lm_head, self.logits_processor = Trunk(), Head(), LogitsProcessor()

    def forward(
        self, input_ids: Tensor, positions: Tensor, intermediate_tensors: Any = None, inputs_embeds: Any = None
    ) -> Tensor:
        return self.model(input_ids, positions)  # type: ignore[no-any-return]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.logits_processor(self.lm_head, hidden_states)  # type: ignore[no-any-return]

    def load(self, state: dict[str, Tensor]) -> None:
        """Load the training's weights, joined as engines join them."""
        for name, parameter in self.named_parameters():
            parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
            last = name.split(".")[-2]
            value = torch.cat([state[name.replace(last, part)] for part in parts.get(last, (last,))])
            parameter.data = parameter.data.to(value.dtype)
            parameter.data[: len(value)] = value


class LLM:
    """An engine with vLLM's two calls."""

    def __init__(self, model: EngineModel) -> None:
        self.model = model

    def apply_model(self, func: Callable[[nn.Module], Any]) -> list[Any]:
        return [func(self.model)]

    @torch.inference_mode()
    def generate(self, prompts: list[dict[str, list[int]]]) -> None:
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        flat, positions = (
            torch.tensor([f(i, t) for one in ids for i, t in enumerate(one)]) for f in (lambda i, t: t, lambda i, t: i)
        )
        hidden = self.model(input_ids=flat, positions=positions, intermediate_tensors=None, inputs_embeds=None)
        ends = torch.tensor([len(one) for one in ids]).cumsum(0)
        self.model.compute_logits(hidden[ends - 1])  # the sampler's rows
        for end, one in zip(ends.tolist(), ids, strict=True):  # prompt_logprobs, one request after the other
            self.model.compute_logits(hidden[end - len(one) : end - 1])


TOKENS = [[int(t) for t in torch.randint(VOCABULARY, (n,), generator=torch.Generator().manual_seed(n))] for n in (24, 31)]


@pytest.fixture(scope="module")
def training() -> Any:
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    return toy_model("LlamaForCausalLM", "LlamaConfig", **sizes, vocab_size=VOCABULARY, rope_theta=10000.0).bfloat16()


@pytest.fixture
def hook(tmp_path: Path) -> Iterator[Any]:
    """The hook file, copied beside a user's script."""
    shutil.copy(Path(hook_file.__file__), tmp_path / "hook.py")
    spec = importlib.util.spec_from_file_location("hook", tmp_path / "hook.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hook"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["hook"]


def _paths(training: Any, hook: Any, folder: Path, spoil: Callable[[EngineModel], None] = lambda _: None) -> tuple[str, str]:
    model = EngineModel()
    model.load(training.state_dict())
    with torch.no_grad():
        spoil(model)
    length = max(map(len, TOKENS))
    padded = torch.tensor([one + [0] * (length - len(one)) for one in TOKENS])
    mask = torch.tensor([[1] * len(one) + [0] * (length - len(one)) for one in TOKENS])
    batch = {"input_ids": padded, "attention_mask": mask, "use_cache": False}
    record_path(training, batch, folder / "train")
    llm = LLM(model)
    llm.apply_model(lambda model: hook.PathRecorder(model, folder / "rollout").start() and None)
    llm.generate([{"prompt_token_ids": ids} for ids in TOKENS])
    return str(folder / "train"), str(folder / "rollout")


def test_equal_paths_of_an_engine_are_silent(training: Any, hook: Any, tmp_path: Path) -> None:
    report = compare_paths(*_paths(training, hook, tmp_path))
    assert not report and not report.problems, report.to_dict()
    compared = {m.module: m for m in report.modules}
    assert {"model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj", "model.norm", "lm_head"} <= compared.keys()
    norm = compared["model.layers.1.post_attention_layernorm"]
    assert norm.input is not None and norm.input < 1e-4, "the residual is part of what a norm of vLLM reads"
    assert compared["lm_head"].weight == 0.0 and compared["lm_head"].num_rows == (62, 55)
    assert report.metrics["num_tokens"] == sum(map(len, TOKENS)) - len(TOKENS)
    assert 1 <= report.metrics["token_mult_prob_error"] < 1.01


def _stale(model: EngineModel) -> None:
    weight = model.get_parameter("model.layers.1.mlp.gate_up_proj.weight")
    weight[INNER:] += 0.3 * weight[INNER:].float().std() * torch.randn(INNER, WIDTH, generator=torch.Generator().manual_seed(1))


def _softmax(model: EngineModel) -> None:
    for module in model.modules():
        if isinstance(module, Attention):
            module.scaling *= 3


def _head(model: EngineModel) -> None:
    weight = model.lm_head.weight
    scale = weight.float().abs().amax() / 448
    weight.copy_((weight.float() / scale).to(torch.float8_e4m3fn).float() * scale)


def _epsilon(model: EngineModel) -> None:
    model.get_submodule("model.layers.1.post_attention_layernorm").variance_epsilon = 1e-4  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("spoil", "code", "module"),
    [
        (_stale, "F301", "model.layers.1.mlp.up_proj"),
        (_softmax, "F306", "model.layers.0.self_attn"),
        (_head, "F303", "lm_head"),
        (_epsilon, "F306", "model.layers.1.post_attention_layernorm"),
    ],
)
def test_a_difference_of_an_engine_is_named(
    spoil: Callable[[EngineModel], None], code: str, module: str, training: Any, hook: Any, tmp_path: Path
) -> None:
    train, rollout = _paths(training, hook, tmp_path, spoil)
    result = CliRunner().invoke(cli, ["parity", train, rollout, "--format", "json"])
    assert result.exit_code == 1
    first = json.loads(result.output)["findings"][0]
    assert (first["code"], first["module"]) == (code, module), first["message"]


def _dumped_by_sglang(model: EngineModel, folder: Path) -> str:
    """Dump a pass as SGLang's hooks do: outputs of leaf modules by name, those after the trunk in the next pass's file."""
    folder.mkdir()
    current: dict[str, Any] = {}
    files = iter(range(9))

    def hook(name: str) -> Callable[..., None]:
        def write(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if name == "model":
                told = {"input_ids": args[0], "positions": args[1], "seq_lens": torch.tensor([len(one) for one in TOKENS])}
                current.update({f"model.forward_batch_info.{key}": value.cpu() for key, value in told.items()})
                torch.save(dict(current), folder / f"Pass{next(files):05d}.pt")
                current.clear()
            found = [o.clone() for o in (output if isinstance(output, tuple) else (output,)) if o is not None]
            current[name] = found[0] if len(found) == 1 else found

        return write

    for name, module in model.named_modules():
        if name == "model" or (name and not any(True for _ in module.children())):
            module.register_forward_hook(hook(name))
    engine = LLM(model)
    for _ in range(2):
        engine.generate([{"prompt_token_ids": ids} for ids in TOKENS])
    return str(folder)


@pytest.mark.parametrize(
    ("spoil", "module"), [(lambda _: None, None), (_stale, "model.layers.1.mlp.up_proj"), (_softmax, "model.layers.0.self_attn")]
)
def test_a_dump_of_sglang_beside_a_training(
    spoil: Callable[[EngineModel], None], module: str | None, training: Any, hook: Any, tmp_path: Path
) -> None:
    train, _ = _paths(training, hook, tmp_path)
    model = EngineModel()
    model.load(training.state_dict())
    with torch.no_grad():
        spoil(model)
    convert_sglang(_dumped_by_sglang(model, tmp_path / "sglang"), tmp_path / "engine")
    report = compare_paths(train, tmp_path / "engine")
    assert not report.problems
    if module is None:
        assert not report and {"model.norm", "model.layers.1.self_attn.k_proj"} <= {m.module for m in report.modules}
    else:
        assert report[0].code == "F306" and str(report[0].module).startswith(module), report[0].message


def test_a_table_of_names_leads_an_engine_to_its_training(training: Any, hook: Any, tmp_path: Path) -> None:
    train, rollout = _paths(training, hook, tmp_path, _stale)
    for file in Path(rollout).glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors, metadata = {key: opened.get_tensor(key) for key in opened.keys()}, opened.metadata()
        renamed = {
            k.replace("model.layers", "decoder.blocks").replace("gate_up_proj", "linear_fc1"): v for k, v in tensors.items()
        }
        save_file(renamed, file, metadata)
    table = tmp_path / "names.toml"
    table.write_text('[fused]\nlinear_fc1 = ["gate_proj", "up_proj"]\n\n[rename]\n"^decoder\\\\.blocks" = "model.layers"\n')
    result = CliRunner().invoke(cli, ["parity", train, rollout, "--names", str(table), "--format", "json"])
    assert result.exit_code == 1, result.output
    first = json.loads(result.output)["findings"][0]
    assert (first["code"], first["module"]) == ("F301", "model.layers.1.mlp.up_proj"), first["message"]
