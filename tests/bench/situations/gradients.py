"""Gradients that are lost, summed twice, summed in BF16, or scaled wrong on their way to the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8debug
from tests.bench.situations import situation
from tests.bench.situations.stack import (
    DOWN,
    E4M3,
    LARGEST,
    UP,
    VOCABULARY,
    Block,
    BlockLinear,
    Cast,
    InInputType,
    Model,
    TwoExperts,
    _Product,
    batch,
    copy_plain_run,
    cross_entropy,
    expanded,
    scales_of,
    train,
    with_fault,
)


@situation(
    1, "AMD-AGI/Primus#1046", "the gradients of one microbatch alone reach weight.grad", "wrong",
    gemms=("wgrad",), tensors=("grad_weight",), words=("sum",), misleading=("fp32", "bf16"),
)  # fmt: skip
def one_microbatch_accumulates(folder: Path) -> None:
    def record(path: Path, *, sick: bool) -> None:
        model = Model()
        kept: dict[str, Tensor] = {}

        def drop(step: int, number: int) -> None:
            for name, p in model.named_parameters():
                if sick and p.grad is not None:
                    if number:
                        p.grad.copy_(kept[name])
                    else:
                        kept[name] = p.grad.clone()

        train(model, path, micro=4, steps=12, after_backward=drop)

    record(folder / "sick", sick=True)
    record(folder / "clean", sick=False)


@situation(
    1, "verl-project/verl#6609", "an auxiliary loss is summed, not averaged: its gradient outweighs the main one", "right",
    quiet=True,
)  # fmt: skip
def auxiliary_loss_too_large(folder: Path) -> None:
    class WithLoss(Model):
        def forward(self, tokens: Tensor) -> Any:
            out = super().forward(tokens)
            return out, out.float().logsumexp(-1).square().sum() * 30.0

    def loss_of(out: Any, classes: Tensor) -> Tensor:
        loss: Tensor = cross_entropy(out[0], classes) + out[1] - out[1].detach()
        return loss

    model = WithLoss()
    train(model, folder / "sick", loss_of=loss_of, steps=40, optimizer=torch.optim.SGD(model.parameters(), lr=3e-3))


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, classes: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return functional.cross_entropy(logits.float(), classes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        return torch.zeros_like(logits), None


@situation(
    2, "NVIDIA/Megatron-LM#1750",
    "the fused cross entropy writes zeros over its gradient: grad_norm 0, nothing is learned, nothing is NaN",
    first="silent", quiet=True, words=("gradient", "grad_output"),
)  # fmt: skip
def no_gradient(folder: Path) -> None:
    def loss_of(out: Any, classes: Tensor) -> Tensor:
        loss: Tensor = _NoGradient.apply(out, classes)
        return loss

    train(Model(), folder / "sick", loss_of=loss_of)
    copy_plain_run(folder / "clean")


@situation(
    2, "NVIDIA/Megatron-LM#6660",
    "the gradient buffer is added to itself with every microbatch: gradients grow as 2^N",
    first="silent", tensors=("grad_weight",), gemms=("wgrad",), words=("sum", "accumul"), misleading=("eps", "smooth"),
)  # fmt: skip
def doubled_gradients(folder: Path) -> None:
    def record(path: Path, *, sick: bool) -> None:
        model = Model()

        def double(step: int, number: int) -> None:
            if sick and number < 3:
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad.mul_(2)

        train(model, path, micro=4, steps=12, after_backward=double)

    record(folder / "sick", sick=True)
    record(folder / "clean", sick=False)


@situation(
    3, "NVIDIA/TransformerEngine#2769",
    "the fused backward writes the weight gradient into a scratch buffer, and main_grad is never updated",
    first="silent", modules=DOWN, codes=("F134", "F143", "F128", "F149"), words=("gradient",),
    misleading=("eps", "smooth", "scale"),
)  # fmt: skip
def gradient_in_a_scratch_buffer(folder: Path) -> None:
    model = Model()

    def lose(step: int, number: int) -> None:
        weight = model.get_parameter("blocks.1.down.weight")
        assert weight.grad is not None
        weight.grad.zero_()

    train(model, folder / "sick", after_backward=lose, micro=2)
    train(Model(), folder / "clean", micro=2)


@situation(
    4, "deepspeedai/DeepSpeed#7839",
    "gradients are not emptied after a step: each step gets the sum of all steps before it",
    first="silent", codes=("F134", "F149"), words=("gradient",), misleading=("eps", "smooth", "scale_rounding"),
)  # fmt: skip
def gradients_never_emptied(folder: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    vars(optimizer)["zero_grad"] = lambda set_to_none=True: None
    train(model, folder / "sick", optimizer=optimizer)
    copy_plain_run(folder / "clean")


@situation(
    5, "deepspeedai/DeepSpeed#8588",
    "gradients are divided by the loss scale that has just grown, not by the one of their backward pass: half of them is lost",
    first="silent", codes=("F126", "F134", "F149"), words=("gradient",), misleading=("eps", "smooth", "bf16"),
)  # fmt: skip
def halved_when_the_scale_grows(folder: Path) -> None:
    model, scale = Model(), 4.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with fp8debug.watch(model, folder / "sick", every=1) as watch:
        for step in range(32):
            tokens, classes = batch(step)
            loss = cross_entropy(model(tokens), classes)
            (loss * scale).backward()
            scale *= 2.0 if step % 4 == 3 else 1.0
            for p in model.parameters():
                assert p.grad is not None
                p.grad.div_(scale)
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=loss, loss_scale=scale)


@situation(
    5, "deepspeedai/DeepSpeed#1800",
    "gradients of many microbatches are accumulated in BF16",
    first="silent", gemms=("wgrad",), tensors=("grad_weight",), codes=("F123",), words=("bf16",),
    misleading=("eps", "smooth", "scale"),
)  # fmt: skip
def accumulated_in_bf16(folder: Path) -> None:
    train(Model(InInputType).bfloat16(), folder / "sick", steps=4, every=1, micro=32, lr=1e-3)


@situation(
    5, "unslothai/unsloth-zoo#1261",
    "the clipping factor is cast to FP16 before it is used: it rounds to zero, and so do the gradients of FP16 weights",
    first="right", codes=("F134", "F143", "F149"), words=("gradient",), misleading=("eps", "smooth", "scale_rounding"),
)  # fmt: skip
def clipping_factor_rounds_to_zero(folder: Path) -> None:
    model = Model()
    narrow = [p for module in model.modules() if isinstance(module, BlockLinear) for p in module.parameters()]

    def clip(step: int, number: int) -> None:
        given = [p.grad for p in model.parameters() if p.grad is not None]
        factor = 1.0 / torch.stack([g.norm() for g in given]).norm()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(factor.half().float() if any(p is one for one in narrow) else factor)

    train(model, folder / "sick", after_backward=clip, loss_of=lambda out, classes: cross_entropy(out, classes) * 2.0**32)


@situation(
    6, "NVIDIA/TransformerEngine#3437",
    "two modules share a weight, and delayed wgrads set its gradient in place of adding to it: one use alone counts",
    first="silent", codes=("F134", "F149"), words=("gradient",), misleading=("eps", "smooth", "scale"),
)  # fmt: skip
def tied_weights_do_not_accumulate(folder: Path) -> None:
    def tied() -> Model:
        model = Model()
        model.blocks[1].down.weight = model.blocks[0].down.weight
        return model

    class Fault(BlockLinear):
        """Keeps the weight gradient back until the end of the backward pass, and sets it then."""

        def product(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
            out = super().product(gemm, a, b, shape)
            if gemm == "wgrad":
                self.late = out.float()
            return out

    model = tied()
    for block in model.blocks:
        block.down.__class__ = Fault

    def backward_dw(step: int, number: int) -> None:
        for block in reversed(model.blocks):
            block.down.weight.grad = block.down.late

    train(model, folder / "sick", after_backward=backward_dw)
    train(tied(), folder / "clean")


@situation(
    8, "NVIDIA/Megatron-LM#5487",
    "after an evaluation the gradient buffer still holds the BF16 weights that were gathered in it: gradients are added to them",
    first="silent", codes=("F127", "F134", "F149"), words=("gradient",), misleading=("smooth", "eps", "scale_rounding"),
)  # fmt: skip
def gradients_on_top_of_weights(folder: Path) -> None:
    model = Model()

    def before(step: int) -> None:
        if step == 12:
            for p in model.parameters():
                p.grad = p.detach().bfloat16().float()

    train(model, folder / "sick", before=before)


class _WithoutWgrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: BlockLinear) -> Tensor:
        ctx.layer, ctx.shape = layer, x.shape
        ctx.save_for_backward(weight)
        first, second = layer.cast("fprop", "input", x), layer.cast("fprop", "weight", weight)
        return layer.product("fprop", first, second, (len(x), len(weight)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weight,), layer = ctx.saved_tensors, ctx.layer
        first, second = layer.cast("dgrad", "grad_output", grad), layer.cast("dgrad", "weight", weight.t())
        return layer.product("dgrad", first, second, ctx.shape), None, None


@situation(
    8, "NVIDIA/TransformerEngine#3234",
    "a Linear whose weight is one of a group computes no weight gradient: weight.grad stays None, and the weight where it began",
    first="silent", modules=UP, codes=("F135", "F143", "F149"), words=("gradient",),
    misleading=("smooth", "eps", "scale_rounding", "master"),
)  # fmt: skip
def no_weight_gradient(folder: Path) -> None:
    class Fault(BlockLinear):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = _WithoutWgrad.apply(x.reshape(-1, x.shape[-1]), self.weight, self)
            return out.reshape(*x.shape[:-1], -1)

    train(with_fault(Fault, *UP), folder / "sick")


class _Fused(BlockLinear):
    """A Linear whose wgrad goes to ``main_grad``; autograd gets a placeholder from a buffer that all share."""

    placeholder = torch.zeros(0)

    def product(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
        out = super().product(gemm, a, b, shape)
        if gemm != "wgrad":
            return out
        main: Tensor = self.__dict__.setdefault("main_grad", torch.zeros(tuple(shape)))
        main += out
        return type(self).placeholder[: out.numel()].reshape(out.shape)


@situation(
    9, "NVIDIA/Megatron-LM#6565",
    "a shared placeholder that is not zeroed is added to the gradient which the fused wgrad has accumulated already",
    first="silent", codes=("F134", "F149"), tensors=("grad_weight",), words=("gradient",),
    misleading=("smooth", "eps", "scale_rounding", "bf16"),
)  # fmt: skip
def stale_placeholder(folder: Path) -> None:
    for name in ("sick", "clean"):
        model = Model(_Fused)
        layers = [module for module in model.modules() if isinstance(module, _Fused)]
        random = torch.Generator().manual_seed(1)
        _Fused.placeholder = torch.randn(128 * 384, generator=random) * 1e-3 * (name == "sick")

        def add(step: int, micro: int, layers: Sequence[_Fused] = layers) -> None:
            for layer in layers:  # what data parallelism's hook does for weights with zero_out_wgrad
                assert layer.weight.grad is not None
                layer.weight.grad = layer.weight.grad + layer.__dict__.pop("main_grad")

        train(model, folder / name, after_backward=add)


class _ChunkedHead(nn.Module):
    """Norm, and a head that computes loss and gradients in chunks of tokens, its weight's gradient summed in one dtype."""

    def __init__(self, model: Model, chunks: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.body, self.chunks, self.dtype = model, chunks, dtype
        model.head = BlockLinear(128, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the features before the head ``[tokens, width]``."""
        model, x = self.body, self.body.embed(tokens)
        for block in model.blocks:
            x = block(x)
        out: Tensor = model.norm(x)
        return out

    def loss(self, features: Tensor, classes: Tensor) -> Tensor:
        """Return the mean loss, with the gradients of head and features taken chunk by chunk."""
        head, total = self.body.head, features.new_zeros(())
        parts: list[Tensor] = []
        summed = torch.zeros_like(head.weight, dtype=self.dtype)
        for x, target in zip(features.detach().chunk(self.chunks), classes.chunk(self.chunks), strict=True):
            x.requires_grad_()
            loss = functional.cross_entropy(head(x).float(), target, reduction="sum") / len(classes)
            into_x, into_weight = torch.autograd.grad(loss, (x, head.weight))
            summed += into_weight.to(self.dtype)
            total += loss.detach()
            parts.append(into_x)
        head.weight.grad = summed.float()
        surrogate = (features * torch.cat(parts)).sum()
        return surrogate - surrogate.detach() + total


@situation(
    9, "linkedin/Liger-Kernel#1391",
    "the gradient of the head is accumulated over chunks of tokens in BF16: rounded after each of them",
    first="silent", modules=("body.head",), gemms=("wgrad",), tensors=("grad_weight",), codes=("F123",),
    words=("bf16", "fp32"), misleading=("eps", "smooth", "scale layout"),
)  # fmt: skip
def chunks_accumulated_in_bf16(folder: Path) -> None:
    for name, dtype in (("sick", torch.bfloat16), ("clean", torch.float32)):
        model = _ChunkedHead(Model(), 32, dtype)
        train(model, folder / name, steps=6, every=1, loss_of=model.loss)


class _Twice(nn.Module):
    """A gated MLP whose square Linear is applied twice."""

    def __init__(self, linear: Callable[..., nn.Module], width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.norm, self.inner = nn.RMSNorm(width), nn.RMSNorm(width)
        self.mix = linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mix(self.inner(functional.silu(self.mix(self.norm(x))).to(x.dtype)))
        return out


@situation(
    10, "pytorch/pytorch#180952",
    "a pipeline that splits the weight gradient off counts one of two uses of a shared weight twice",
    first="silent", modules=("blocks.0.mix", "blocks.1.mix"), codes=("F134", "F149"), words=("gradient",),
    misleading=("smooth", "eps", "scale_rounding", "bf16"),
)  # fmt: skip
def one_use_counted_twice(folder: Path) -> None:
    class Fault(BlockLinear):
        num = 0

        def product(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
            out = super().product(gemm, a, b, shape)
            if gemm == "wgrad":
                self.num += 1
                return out * 2 if self.num % 2 == 0 else out
            return out

    train(Model(Fault, block=_Twice), folder / "sick")
    train(Model(block=_Twice), folder / "clean")


@situation(
    12, "allenai/allennlp#5426",
    "gradients are clipped while they are still multiplied by the loss scale: divided by it, they are far too small",
    first="silent", codes=("F126", "F134", "F143", "F149"), words=("clip", "loss scale"), misleading=("smooth", "amax", "bf16"),
)  # fmt: skip
def clipped_before_they_are_unscaled(folder: Path) -> None:
    scale = 2.0**16
    for name in ("sick", "clean"):
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with fp8debug.watch(model, folder / name, every=2) as watch:
            for step in range(32):
                tokens, classes = batch(step)
                loss = cross_entropy(model(tokens), classes)
                (loss * scale).backward()
                if name == "sick":
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for p in model.parameters():
                    assert p.grad is not None
                    p.grad.div_(scale)
                if name == "clean":
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                watch.step(loss=loss, loss_scale=scale)


class _Half(BlockLinear):
    """A Linear under an autocast to FP16: input, output and their gradients are in FP16, the weight in FP32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.half()).half()


@situation(
    12, "engichang1467/Open-Rig3R#35",
    "an autocast to FP16 without a loss scale: gradients of a mean over many tokens vanish before they are cast to FP8",
    first="silent", gemms=("dgrad", "wgrad"), tensors=("grad_output",), words=("loss scal", "fp16"),
    misleading=("smooth", "amax", "learning rate", "optimizer", "history"),
)  # fmt: skip
def fp16_without_a_loss_scale(folder: Path) -> None:
    def mean(out: Any, classes: Tensor) -> Tensor:  # as over 256 times as many tokens
        return cross_entropy(out, classes) / 256

    train(Model(_Half), folder / "sick", loss_of=mean)
    model, scale = Model(_Half), 2.0**12

    def unscale(step: int, number: int) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.div_(scale)

    train(model, folder / "clean", loss_of=lambda out, classes: mean(out, classes) * scale, after_backward=unscale)


class _CachedCopy(BlockLinear):
    """A Linear that keeps a BF16 copy of its weight until the step ends, as an autocast does until it is left."""

    is_safe = False
    copy: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.copy is None or (self.is_safe and torch.is_grad_enabled()):
            self.copy = self.weight.bfloat16()
        out: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), self.copy.float(), self)
        return out.reshape(*x.shape[:-1], len(self.weight))


@situation(
    13, "pytorch/pytorch#112583",
    "a pass without gradients fills the autocast's cache of weights: the pass with gradients takes copies that have no history",
    first="right", codes=("F135", "F143", "F149"), words=("gradient",),
    misleading=("smooth", "eps", "scale_rounding", "master", "loss scal"),
)  # fmt: skip
def cached_without_a_history(folder: Path) -> None:
    class Safe(_CachedCopy):
        is_safe = True

    for name, linear in (("sick", _CachedCopy), ("clean", Safe)):
        model = Model(linear)

        def evaluate(step: int, model: Model = model) -> None:
            for module in model.modules():
                if isinstance(module, _CachedCopy):
                    module.copy = None
            with torch.no_grad():
                model(batch(step)[0])

        train(model, folder / name, before=evaluate)


def _train_scaled(path: Path, *, divisor: float = 2.0**16, steps_first: bool = False) -> None:
    """Train under a loss scale of 2^16, by which the gradients are divided, or by another number, before the optimizer's step.

    Args:
        path: where it is recorded.
        divisor: of the gradients.
        steps_first: the optimizer takes a step before that, too.
    """
    scale, model = 2.0**16, Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fp8debug.watch(model, path, every=2) as watch:
        for step in range(32):
            tokens, classes = batch(step)
            loss = cross_entropy(model(tokens), classes)
            (loss * scale).backward()
            if steps_first:
                optimizer.step()
            for p in model.parameters():
                assert p.grad is not None
                p.grad.div_(divisor)
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=loss, loss_scale=scale)


@situation(
    13, "IAHispano/Applio#860",
    "the optimizer steps with gradients that are still multiplied by the loss scale, before the scaler takes its own step",
    first="silent", codes=("F126", "F127", "F134", "F149"), words=("loss scale",), misleading=("smooth", "amax", "bf16"),
)  # fmt: skip
def a_step_before_the_scalers(folder: Path) -> None:
    _train_scaled(folder / "sick", steps_first=True)
    _train_scaled(folder / "clean")


class _FusedLoss(torch.autograd.Function):
    """Mean cross entropy of a head's product, which keeps log-sum-exp and computes the logits again in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, classes: Tensor, dtype: torch.dtype) -> Tensor:
        logits = (x.bfloat16().to(dtype) @ weight.bfloat16().to(dtype).t()).float()
        total = logits.logsumexp(-1)
        ctx.save_for_backward(x.bfloat16(), weight.bfloat16(), classes, total)
        return (total - logits.gather(1, classes[:, None])[:, 0]).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, classes, total = ctx.saved_tensors
        into = (x.float() @ weight.float().t() - total[:, None]).exp()
        into[torch.arange(len(into)), classes] -= 1
        into *= grad / len(into)
        return into @ weight.float(), into.t() @ x.float(), None, None


class _WithoutHead(nn.Module):
    """A model whose head is multiplied with inside the loss; its logits are large, as after a long training."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body, self.dtype = Model(), dtype
        with torch.no_grad():
            self.body.head.weight.mul_(24)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the features before the head ``[tokens, width]``."""
        x = self.body.embed(tokens)
        for block in self.body.blocks:
            x = block(x)
        out: Tensor = self.body.norm(x)
        return out

    def loss(self, features: Tensor, classes: Tensor) -> Tensor:
        """Return the mean loss."""
        out: Tensor = _FusedLoss.apply(features, self.body.head.weight, classes, self.dtype)
        return out


@situation(
    14, "marin-community/marin#8217",
    "the fused loss has BF16 logits in its forward pass and computes them again in FP32: its probabilities do not add up to 1",
    first="silent", quiet=True, words=("gemms outside", "outside the linears", "loss function", "logits"),
)  # fmt: skip
def logits_rounded_in_forward_alone(folder: Path) -> None:
    for name, dtype in (("sick", torch.bfloat16), ("clean", torch.float32)):
        model = _WithoutHead(dtype)
        train(model, folder / name, loss_of=model.loss, lr=5e-4)


@situation(
    14, "Modalities/modalities#464",
    "the cross entropy of BF16 logits is not computed in FP32: losses lie on BF16's grid, their gradients are rounded twice",
    first="silent", quiet=True,
    words=("bf16 loss", "loss in bf16", "losses in bf16", "losses are bf16", "losses are rounded", "rounded to bf16",
           "bf16 values"),
)  # fmt: skip
def loss_in_bf16(folder: Path) -> None:
    for name in ("sick", "clean"):

        def loss_of(out: Tensor, classes: Tensor, name: str = name) -> Tensor:
            logits = out.bfloat16()
            return functional.cross_entropy(logits if name == "sick" else logits.float(), classes)

        train(Model(), folder / name, loss_of=loss_of)


class _NoFloor(BlockLinear):
    """A Linear whose gradients are cast by multiplying with the scale, without a least amax."""

    least = 0.0

    def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
        if tensor != "grad_output":
            return super().cast(gemm, tensor, x)
        x = x.contiguous()
        scale = 1 / scales_of(x, (1, 128), LARGEST[E4M3], self.least)
        return (x.float() * expanded(scale, x.shape, (1, 128))).clamp(-448, 448).to(E4M3), 1 / scale


@situation(
    15, "AI-Hypercomputer/maxtext#3721",
    "each NaN in a gradient is set to zero before the optimizer sees it: the loss looks fine",
    first="false alarm", modules=UP, gemms=("dgrad", "wgrad"), tensors=("grad_output",), codes=("F103",), words=("nan", "eps"),
    misleading=("smooth", "learning rate", "loss scal", "optimizer"),
)  # fmt: skip
def nan_gradients_are_zeroed(folder: Path) -> None:
    for name, least in (("sick", 0.0), ("clean", 1e-12)):
        model = Model()
        layer: Any = model.blocks[1].up
        layer.__class__, layer.least = _NoFloor, least
        with torch.no_grad():  # a dead channel: its gradients are zeros
            layer.weight[5] = 0
            model.blocks[1].down.weight[:, 5] = 0

        def sanitize(step: int, number: int, model: Model = model) -> None:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.nan_to_num_(nan=0.0)

        train(model, folder / name, after_backward=sanitize)


@situation(
    16, "THUDM/slime#1842",
    "gradients are divided by the loss scale twice: by the training loop, and by the step of the optimizer once more",
    first="right", codes=("F126", "F134", "F143", "F149"), words=("loss scale",),
    misleading=("smooth", "amax", "bf16", "learning rate"),
)  # fmt: skip
def unscaled_twice(folder: Path) -> None:
    _train_scaled(folder / "sick", divisor=2.0**32)
    _train_scaled(folder / "clean")


class _Clamped(torch.autograd.Function):
    """Clamp whose gradient passes at the limits too, or not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float, passes: bool) -> Tensor:
        ctx.save_for_backward(x.abs() <= limit if passes else x.abs() < limit)
        return x.clamp(-limit, limit)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inside,) = ctx.saved_tensors
        return grad * inside, None, None


class _FakeQuantized(BlockLinear):
    """A Linear whose weight is rounded to 4 bits in groups of 32 with a straight-through estimator, as in QAT.

    Attributes:
        passes: rounded values that lie at the largest code have gradients.
    """

    passes = True

    def forward(self, x: Tensor) -> Tensor:
        groups = self.weight.reshape(-1, 32)
        scale = groups.detach().abs().amax(1, keepdim=True) / 7
        scaled = groups / scale
        rounded = scaled + (scaled.round() - scaled).detach()
        weight = (_Clamped.apply(rounded, 7.0, self.passes) * scale).view_as(self.weight)
        out: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), weight, self)
        return out.reshape(*x.shape[:-1], len(self.weight))


@situation(
    16, "pytorch/ao#4806",
    "the clamp of a fake quantization has no gradient at its limits, where each rounded value of the largest code lies",
    first="false alarm", gemms=("wgrad",), tensors=("grad_weight",), codes=("F128", "F134", "F143", "F149"), words=("gradient",),
    misleading=("smooth", "amax_eps", "scale_rounding", "learning rate", "loss scal", "bf16"),
)  # fmt: skip
def gradient_stops_at_the_clamp(folder: Path) -> None:
    class Fault(_FakeQuantized):
        passes = False

    train(Model(Fault), folder / "sick")
    train(Model(_FakeQuantized), folder / "clean")


class _PerToken(torch.autograd.Function):
    """Cross entropy of each token, whose backward pass reads the gradient of its result once for all tokens, or for each."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, classes: Tensor, reads_first: bool) -> Tensor:
        ctx.save_for_backward(logits, classes)
        ctx.reads_first = reads_first
        return functional.cross_entropy(logits.float(), classes, reduction="none")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, classes = ctx.saved_tensors
        into = logits.float().softmax(-1)
        into[torch.arange(len(into)), classes] -= 1
        return (into * (grad[0] if ctx.reads_first else grad[:, None])).to(logits.dtype), None, None


@situation(
    16, "linkedin/Liger-Kernel#968",
    "the fused loss without a reduction multiplies all gradients by that of the first token: none where that one is masked",
    first="silent", quiet=True, words=("gradient", "grad_output", "loss function"),
)  # fmt: skip
def gradient_of_the_first_token(folder: Path) -> None:
    for name in ("sick", "clean"):
        number = [0]

        def loss_of(out: Tensor, classes: Tensor, name: str = name, number: list[int] = number) -> Tensor:
            used = torch.rand(len(classes), generator=torch.Generator().manual_seed(number[0])) < 0.5
            used[0] = number[0] % 4 != 1  # some batches begin with a prompt
            number[0] += 1
            losses: Tensor = _PerToken.apply(out, classes, name == "sick")
            return (losses * used).sum() / used.sum()

        train(Model(), folder / name, loss_of=loss_of)


@situation(
    16, "simchowitzlabpublic/nano-world-model#22",
    "gradients are clipped before the backward pass: those of the microbatches before it, the last one joins them as it is",
    first="silent", codes=("F134", "F149"), words=("clip", "microbatch", "sum"),
    misleading=("smooth", "amax_eps", "scale_rounding", "learning rate", "loss scal", "bf16"),
)  # fmt: skip
def clipped_before_the_backward_pass(folder: Path) -> None:
    for name in ("sick", "clean"):
        model = Model()

        def clip(step: int, number: int, model: Model = model, last: int = 0 if name == "sick" else 1) -> None:
            if number == last:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        train(model, folder / name, micro=2, after_backward=clip)


class _Sparse(nn.Module):
    """A dense gated MLP, and two experts behind it."""

    def __init__(self, linear: Callable[..., nn.Module], width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.dense, self.experts = Block(linear, width, hidden, bias), TwoExperts(linear, width, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, width]``."""
        out: Tensor = self.experts(self.dense(x))
        return out


@situation(
    17, "deepspeedai/DeepSpeed#6545",
    "gradients of experts are divided by the ranks that share them, not by all ranks of data: ep_size times too large",
    first="misled", codes=("F134", "F149"), tensors=("grad_weight",), words=("times", "factor", "multipl"),
    modules=tuple(f"blocks.{i}.experts.{one}.{name}" for i in range(2) for one in ("first", "second")
                  for name in ("gate", "up", "down")),
    misleading=("smooth", "amax_eps", "scale_rounding", "learning rate", "loss scal", "bf16"),
)  # fmt: skip
def experts_gradients_times_ep_size(folder: Path) -> None:
    for name in ("sick", "clean"):
        model = Model(block=_Sparse)

        def average(step: int, number: int, model: Model = model, is_sick: bool = name == "sick") -> None:
            for key, p in model.named_parameters():
                if is_sick and number and ".experts." in key and p.grad is not None:
                    p.grad.mul_(4)

        train(model, folder / name, micro=2, after_backward=average, optimizer=torch.optim.SGD(model.parameters(), lr=0.3))


@situation(
    17, "facebookresearch/fairscale#263",
    "the norm that gradients are clipped to is summed of squares in FP16: it is Inf beyond 256, and all gradients become zeros",
    first="silent", codes=("F134", "F143", "F149"), words=("clip", "norm", "after wgrad", "zeros, though"),
    misleading=("smooth", "amax_eps", "scale_rounding", "learning rate", "loss function", "mask"),
)  # fmt: skip
def norm_overflows_in_fp16(folder: Path) -> None:
    for name, dtype in (("sick", torch.float16), ("clean", torch.float32)):
        model, number = Model(), [0]

        def loss_of(out: Tensor, classes: Tensor, number: list[int] = number) -> Tensor:
            number[0] += 1
            num = 20 + 100 * (number[0] % 4)  # sums over batches of other sizes
            return functional.cross_entropy(out[:num].float(), classes[:num], reduction="sum")

        def clip(step: int, micro: int, model: Model = model, dtype: torch.dtype = dtype) -> None:
            given = [p.grad for p in model.parameters() if p.grad is not None]
            norms = torch.stack([g.norm() for g in given]).to(dtype)
            factor = (1.0 / (norms.square().sum().sqrt().float() + 1e-6)).clamp(max=1.0)
            for g in given:
                g.mul_(factor)

        train(model, folder / name, loss_of=loss_of, after_backward=clip)


@situation(
    17, "NVIDIA/Megatron-LM#5222",
    "layers share two buffers of gradients, and nobody waits: a part of one layer's is the next one's wgrad when it is reduced",
    first="silent", modules=DOWN, codes=("F134", "F149"), tensors=("grad_weight",), words=("gradient",),
    misleading=("smooth", "amax_eps", "scale_rounding", "learning rate", "loss scal", "bf16"),
)  # fmt: skip
def wgrad_of_the_next_layer(folder: Path) -> None:
    model = Model()

    def overwrite(step: int, number: int) -> None:
        ours, theirs = (model.get_parameter(f"blocks.{i}.down.weight").grad for i in (1, 0))
        assert ours is not None and theirs is not None
        if step % 4 != 3:  # else the reduction was in time
            num = ours.numel() // 4
            ours.view(-1)[:num] = theirs.view(-1)[:num]

    train(model, folder / "sick", after_backward=overwrite)
    copy_plain_run(folder / "clean")
