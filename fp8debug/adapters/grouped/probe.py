"""The probe of one 3-D weight: what a grouped GEMM read and gave, all experts together, without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8debug.adapters.base import same_cast, turned
from fp8debug.adapters.grouped.gemms import SeenGroupedGemm, by_expert, contracted, decoded, expert_of
from fp8debug.adapters.interception.sublinears import CASTS, FAST, SubLinear, SubLinearProbe, record_tokens
from fp8debug.kernels.dispatch import describe, statistics
from fp8debug.kernels.gemm_error import OutputError, damage_of
from fp8debug.kernels.reference import FORMAT_OF
from fp8debug.kernels.slot_rows import by_name
from fp8debug.metrics import Pair, Source
from fp8debug.observer.host_copy import HostCopy
from fp8debug.observer.isolation import isolated
from fp8debug.observer.observer import Observer, RowKey
from fp8debug.observer.rechecks import WhatIfSlots
from fp8debug.recipes import Cast
from fp8debug.types import RESULTS, Gemm, Quantized, Reference, TensorRole, not_observed_code


@dataclass
class SavedGroupedGemm:
    """Tensors that the backward pass of one grouped GEMM needs: its input and weight as the autograd function saved them."""

    x: Tensor
    weight: Tensor
    offs: Tensor
    output: OutputError | None = None
    grad_output: Tensor | None = None


class GroupProbe(SubLinearProbe):
    """Of one 3-D weight ``[E, N, K]``.

    Args:
        observer: where it records.
        module: FQN of the module and name of the parameter.
        sublinear: the parameter.
    """

    def __init__(self, observer: Observer, module: str, sublinear: SubLinear) -> None:
        super().__init__(observer, module, sublinear)
        self._empty: set[int] = set()
        self._counts: tuple[int, Tensor] | None = None
        self._pending: list[tuple[int, HostCopy | Tensor]] = []

    @isolated
    def take_fprop(self, x: Tensor, weight: Tensor, gemm: SeenGroupedGemm) -> SavedGroupedGemm:
        """Record fprop.

        Args:
            x: ``[M, K]``, high precision.
            weight: ``[E, K, N]``, high precision, as the GEMM reads it.
            gemm: the GEMM.
        """
        line = SavedGroupedGemm(x, weight, gemm.offs)
        if gemm.is_overwritten:
            self.give_up("an operand or the result of its forward GEMM was overwritten before the end of its forward pass")
            return line
        self._tokens(gemm.offs)
        mine = expert_of(torch.arange(x.shape[0], dtype=torch.int64, device=x.device), gemm.offs)
        self._tokens_of((Gemm.FPROP, TensorRole.INPUT), x, gemm, mine)
        if Gemm.FPROP not in self._weights_seen:
            self._weights_seen.add(Gemm.FPROP)
            self._weight_of(Gemm.FPROP, weight, gemm)
        rows = self._sample(x.shape[0], x.device)
        line.output = self._compare(Gemm.FPROP, x, weight, gemm, mine, rows)
        return line

    @isolated
    def take_backward(self, line: SavedGroupedGemm, gemms: list[SeenGroupedGemm]) -> None:
        """Record dgrad and wgrad: the one with a 3-D operand, and the one with a 3-D result."""
        grad = line.grad_output
        if grad is None:
            return
        if any(one.is_overwritten for one in gemms):
            self.report_once(
                "not recorded in full: an operand or the result of its dgrad or wgrad was overwritten before it was read"
            )
            gemms = [one for one in gemms if not one.is_overwritten]
        mine = expert_of(torch.arange(grad.shape[0], dtype=torch.int64, device=grad.device), line.offs)
        dgrad = next((h for h in gemms if h.second.dim() == 3 and h.first.shape == grad.shape), None)
        wgrad = next((h for h in gemms if h.second.dim() == 2), None)
        if dgrad is not None:
            self._tokens_of((Gemm.DGRAD, TensorRole.GRAD_OUTPUT), grad, dgrad, mine)
            turned = line.weight.transpose(-2, -1)
            if Gemm.DGRAD not in self._weights_seen:
                self._weights_seen.add(Gemm.DGRAD)
                self._weight_of(Gemm.DGRAD, turned, dgrad)
            self._compare(Gemm.DGRAD, grad, turned, dgrad, mine, self._sample(grad.shape[0], grad.device))
        if wgrad is None:
            text = "not recorded in full: no wgrad in FP8 was observed in its backward pass"
            self.report_once(text, not_observed_code(Gemm.WGRAD, in_fp8=True))
        else:
            self._wgrad(line.x, grad, wgrad, mine)
        if line.output is not None and self._output_key is not None:
            self._merge(self._output_key, [damage_of(line.output, grad)], grad.device)

    def _tokens_of(self, site: tuple[Gemm, TensorRole], x: Tensor, gemm: SeenGroupedGemm, mine: Tensor) -> None:
        """Record an operand ``[M, ..]``; rows of no expert, which hold anything, count as zeros."""
        outside = (mine == len(gemm.offs))[:, None]
        codes = gemm.first.view(torch.uint8).masked_fill(outside, 0).view(gemm.first.dtype)
        scales = gemm.scale_first.reshape(len(codes), -1).masked_fill(outside, 1)
        self._rows_of(site, Source(x.masked_fill(outside, 0)), codes, scales, WhatIfSlots(), gemm.cast)

    def _rows_of(
        self,
        site: tuple[Gemm, TensorRole],
        source: Source,
        codes: Tensor,
        scales: Tensor,
        what_if: WhatIfSlots | None,
        cast: Cast | None = None,
        *,
        is_turned: bool = False,
    ) -> None:
        """Record an operand with a scale a row or block, and the what-if casts beside it where ``what_if`` is given."""
        cast = cast or same_cast(format=FORMAT_OF[codes.dtype], granularity="rowwise")
        named = turned(cast) if is_turned else cast
        CASTS.setdefault(self.sublinear, {})[site] = named
        q = Quantized(codes, scales.reshape(len(codes), -1).contiguous())
        if what_if is not None:
            self._operand(*site, source, (q, cast), what_if)
            return
        found = describe(source, cast, q)
        self._record((RowKey(*site, str(named), Reference.OPERAND, self.actual),), [found], source)

    def _weight_of(self, which: Gemm, weight: Tensor, gemm: SeenGroupedGemm) -> None:
        """Record a weight ``[E, c, s]`` that contracts c: a scale a column of each expert, so a row of ``[E * s, c]``."""
        lines = weight.transpose(-2, -1).reshape(-1, weight.shape[-2])
        codes = gemm.second.transpose(-2, -1).reshape(lines.shape)
        is_fprop = which is Gemm.FPROP
        what_if, site = self._what_if_weight if is_fprop else None, (which, TensorRole.WEIGHT)
        self._rows_of(site, Source(lines), codes, gemm.scale_second, what_if, gemm.cast, is_turned=not is_fprop)
        if gemm.is_fast:
            FAST.setdefault(self.sublinear, set()).add(which)
        FAST.setdefault(self.sublinear, set())

    def _compare(
        self, which: Gemm, x: Tensor, weight: Tensor, gemm: SeenGroupedGemm, mine: Tensor, rows: Tensor | slice
    ) -> OutputError:
        """Record sampled rows of fprop's or dgrad's result beside the shadow and the exact GEMM."""
        expert, experts = mine[rows], len(gemm.offs)
        shadow = by_expert(x[rows].bfloat16(), expert, lambda e: weight[e].bfloat16(), experts).bfloat16().float()
        codes = gemm.first.view(torch.uint8)[rows].view(gemm.first.dtype)
        first = decoded(codes, gemm.scale_first.reshape(len(gemm.first), -1)[rows], gemm.block)
        scale_second = gemm.scale_second.reshape(experts, gemm.second.shape[-1], -1)
        exact = by_expert(first, expert, lambda e: decoded(gemm.second[e].t(), scale_second[e], gemm.block).t(), experts)
        picked = torch.where((expert < experts)[:, None], gemm.result[rows].float(), 0.0)
        return self._results(which, shadow, exact, picked, rows)

    def _wgrad(self, x: Tensor, grad: Tensor, gemm: SeenGroupedGemm, mine: Tensor) -> None:
        """Record sampled columns of wgrad's result; scales of rows change from expert to expert and have no row of their own."""
        experts, columns = len(gemm.offs), self._sample(x.shape[1], x.device)
        if gemm.first.shape != grad.t().shape or gemm.second.shape != x.shape:
            self.report_once(
                f"not recorded in full: a wgrad of {list(gemm.first.shape)} by {list(gemm.second.shape)} is not read"
            )
            return
        a, b = gemm.first.t(), gemm.second.view(torch.uint8)[:, columns].view(gemm.second.dtype)
        parts = [contracted(grad.bfloat16(), x[:, columns].bfloat16(), mine, e) for e in range(experts)]
        if gemm.cast is not None:
            self._contracted_blocks(TensorRole.GRAD_OUTPUT, grad, gemm.first.t(), gemm.scale_first, gemm.cast, mine, experts)
            self._contracted_blocks(TensorRole.INPUT, x, gemm.second, gemm.scale_second, gemm.cast, mine, experts)
            left = decoded(gemm.first, gemm.scale_first, gemm.block).t()
            right = decoded(b.t(), gemm.scale_second[columns], gemm.block).t()
            exact = [contracted(left, right, mine, e) for e in range(experts)]
        else:
            scale_a, scale_b = gemm.scale_first.reshape(experts, 1, -1), gemm.scale_second.reshape(experts, 1, -1)[:, :, columns]
            exact = [contracted(a.float() * scale_a[e], b.float() * scale_b[e], mine, e) for e in range(experts)]
        found = gemm.result[:, :, columns].float().reshape(-1, parts[0].shape[1])
        self._results(Gemm.WGRAD, torch.cat(parts).bfloat16().float(), torch.cat(exact), found, columns)

    def _contracted_blocks(
        self, role: TensorRole, x: Tensor, codes: Tensor, scales: Tensor, cast: Cast, mine: Tensor, experts: int
    ) -> None:
        """Record an operand of wgrad ``[M, ..]`` in blocks of tokens, of which each belongs to one expert.

        Args:
            role: grad_output or input.
            x: ``[M, n]`` in high precision.
            codes: ``[M, n]``.
            scales: ``[n, blocks of tokens]``.
            cast: of the transposed tensor.
            mine: the expert of each token.
            experts: their number, which stands for none.
        """
        outside = (mine == experts)[:, None]
        codes = codes.view(torch.uint8).masked_fill(outside, 0).view(codes.dtype)
        named = turned(cast)
        CASTS.setdefault(self.sublinear, {})[Gemm.WGRAD, role] = named
        source = Source(x.masked_fill(outside, 0))
        self._operand(Gemm.WGRAD, role, source, (Quantized(codes, scales.t().contiguous()), named), WhatIfSlots())

    def _results(self, which: Gemm, shadow: Tensor, exact: Tensor, found: Tensor, sample: Tensor | slice) -> OutputError:
        is_whole = which is not Gemm.WGRAD
        pair = Pair(source=Source(shadow), y=found, whole_rows=is_whole)
        formats = self._names(which) or " @ ".join(["e4m3fn rowwise"] * 2)
        key = RowKey(which, RESULTS[which], formats, Reference.SHADOW, self.actual)
        if which is Gemm.FPROP:
            self._output_key = (key,)
        against = Pair(source=Source(exact), y=found, whole_rows=is_whole)
        contributions = [by_name(statistics(pair)), by_name(statistics(against))]
        self._merge((key, key._replace(reference=Reference.EXACT)), contributions, shadow.device)
        return OutputError(None, pair, sample if isinstance(sample, Tensor) else None)

    def _names(self, which: Gemm) -> str:
        casts = CASTS.get(self.sublinear, {})
        return " @ ".join(str(cast) for (gemm, _), cast in casts.items() if gemm is which)

    def _tokens(self, offs: Tensor) -> None:
        """Count the tokens of each expert, over the microbatches of a step."""
        counts = offs.diff(prepend=offs.new_zeros(1))
        if self._counts is None and not self._pending:
            self.observer.after_step.append(self._settle)
        before = None if self._counts is None else self._counts[1]
        self._counts = self.observer.step, counts if before is None else before + counts

    def _settle(self) -> None:
        """Once a step has ended, start reading its counts; tell those that have arrived, and each expert without tokens once."""
        if self._counts is not None:
            step, counts = self._counts
            self._counts = None
            self._pending.append((step, HostCopy(counts) if counts.is_cuda else counts))
        while self._pending:
            step, arriving = self._pending[0]
            if isinstance(arriving, HostCopy) and not arriving.is_done():
                self.observer.after_step.append(self._settle)
                return
            self._pending.pop(0)
            tokens = (arriving.result() if isinstance(arriving, HostCopy) else arriving).tolist()
            if self.sublinear.index == 0:  # the other weights of the module see the same
                record_tokens(self.observer, step, self.module, tokens)
            empty = {e for e, count in enumerate(tokens) if not count}
            if new := sorted(empty - self._empty):
                names = ", ".join(map(str, new))
                text = f"recorded; of {len(tokens)} experts {names} had no tokens at step {step}"
                self.observer.report(self.module, text, False)
            self._empty |= empty
