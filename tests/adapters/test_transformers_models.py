"""Models of transformers, tiny and untrained: a watch changes no bit, and coverage names what is and what is not recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8debug
from fp8debug.store.flop_shares import gemm_shares
from tests.adapters.linears import same
from tests.training import losses_and_parameters, watched

transformers: Any = pytest.importorskip("transformers", exc_type=ImportError)


def ids(step: int) -> torch.Tensor:
    return torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(step))


def text(step: int) -> dict[str, torch.Tensor]:
    return {"input_ids": ids(step), "labels": ids(step + 9)}


def floats(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


TOKENS = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
#: By name: class of the model, its configuration, and the batch of a step.
MODELS: dict[str, tuple[str, dict[str, Any], Callable[[int], dict[str, torch.Tensor]]]] = {
    "T5ForConditionalGeneration": (
        "T5Config",
        {**TOKENS, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
        text,
    ),
    "MambaForCausalLM": (
        "MambaConfig",
        {**TOKENS, "hidden_size": 32, "state_size": 16, "num_hidden_layers": 2, "time_step_rank": 16},
        text,
    ),
    "ViTForImageClassification": (
        "ViTConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 16}
        | {"patch_size": 4, "num_labels": 4},
        lambda step: {"pixel_values": floats(step, 4, 3, 16, 16), "labels": torch.arange(4)},
    ),
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        {**TOKENS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2}
        | {"decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 16}
        | {"max_source_positions": 32, "max_target_positions": 32, "decoder_start_token_id": 1},
        lambda step: {"input_features": floats(step, 2, 16, 64), "labels": ids(step)},
    ),
    "MixtralForCausalLM": (
        "MixtralConfig",
        {**TOKENS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"num_key_value_heads": 2, "num_local_experts": 4},
        text,
    ),
    "GPT2LMHeadModel": ("GPT2Config", {**TOKENS, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}, text),
}
#: Modules without a row: Mamba multiplies by the weight of one itself, and Mixtral's experts are no Linears.
UNSEEN = {"MambaForCausalLM": "mixer.dt_proj", "MixtralForCausalLM": "mlp.experts."}


def trained(name: str, path: Path | None, converted: bool) -> list[Any]:
    config, options, batch = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**options))
    model = fp8debug.convert(model, "blockwise") if converted else model.bfloat16()
    dtype = next(model.parameters()).dtype
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loss_of(step: int) -> Tensor:
        torch.manual_seed(step)
        inputs = {key: x.to(dtype) if x.is_floating_point() else x for key, x in batch(step).items()}
        loss: Tensor = model(**inputs).loss
        return loss

    with watched(model, path, every=2, optimizer=optimizer) as watch:
        return losses_and_parameters(model, loss_of, steps=3, optimizer=optimizer, watch=watch)


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("converted", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_without_a_watch(tmp_path: Path, name: str, converted: bool) -> None:
    assert same(trained(name, tmp_path / "run", converted), trained(name, None, converted))
    run = fp8debug.Run(tmp_path / "run")
    seen = {row["module"] for row in run.sql("SELECT DISTINCT module FROM sites WHERE actual = ?", [converted]).to_pylist()}
    unseen = {module["fqn"] for module in run.modules} - seen
    assert all(UNSEEN.get(name, "-") in fqn for fqn in unseen), unseen
    assert not [f for f in fp8debug.triage(run) if f.severity.value == "error"]
    shares = gemm_shares(run.modules, run.gemms)
    assert shares is not None and (0 < shares.fp8 < 1) == converted
    if name == "GPT2LMHeadModel":
        convs = {f"transformer.h.{i}.{part}" for i in (0, 1) for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
        assert convs <= (seen if not converted else {rest.fqn for rest in shares.rest})
