"""F214: a weight whose values are far too large or too small."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.checkpoints.comparison import explains
from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class ImplausibleMagnitude(FileRule):
    """The dequantized weight is far too large or too small: an inverse scale, or one that was never applied.

    What it detects
        A root mean square of codes * scale_inv that no trained weight has, and the reading that makes it plausible: the
        scale is the inverse (codes / scale), all scales are 1 as after allocation, or the second level is applied the wrong
        way round. And a matrix in 16 bits or more with an rms above max_plain_rms, as a converter makes that takes the bytes
        of E8M0 scales as factors.

    Why it matters
        ``scale`` means two opposite things in the field. Exported the wrong way round it is off by its square, and the loss
        is that of a random model.

    Example
        model.layers.0.mlp.down_proj.weight: rms 2.1e+05; divided by the scale instead it is 0.05.

    Cure
        Store scale_inv, by which one multiplies: x ~= data * scale_inv.

    Thresholds
        - max_rms 16: rms above which a weight is implausible. No published basis, and set on synthetic weights: common
          initializations have 0.02 to 1.
        - min_rms 1e-7: rms below which a nonzero weight is implausible. No published basis.
        - max_plain_rms 1000: the same for a matrix in high precision. No published basis, and set wide: nothing says that it
          was quantized.
        - Scale conventions: numerics.md, 2; seen in vllm #36297, omlx #2159.
    """

    code = "F214"
    name = "implausible-magnitude"
    cure = "store scale_inv, by which one multiplies: x ~= data * scale_inv"

    max_rms: float = 16.0
    min_rms: float = 1e-7
    max_plain_rms: float = 1000.0

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the weights of such a size."""
        for weight, facts in judged.weights:
            rms = facts.rms
            if rms is None or not facts.amax_code or (self.min_rms <= rms <= self.max_rms):
                continue
            if not rms and (facts.num_scale_zero or facts.tensor_scale == 0):
                continue
            if facts.comparison is not None and explains(facts.comparison):
                continue  # the reference tells by which factor (F231, F232, F218)
            limit = self.max_rms if rms > self.max_rms else self.min_rms
            readings = []
            if facts.scale_min and facts.scale_max:
                middle = (facts.scale_min * facts.scale_max) ** 0.5
                second = facts.tensor_scale or 1.0
                if facts.scale_min == facts.scale_max == 1.0:
                    readings.append("all scales are 1: they were never loaded")
                elif self._is_plausible(facts.rms_codes / middle / second):
                    readings.append(
                        f"divided by the scale instead, the rms is {facts.rms_codes / middle / second:.2g}: the scale is inverse"
                    )
                elif facts.tensor_scale and self._is_plausible(facts.rms_codes * middle / second):
                    readings.append(f"with the inverse of the tensor's scale the rms is {facts.rms_codes * middle / second:.2g}")
            more = f"; {readings[0]}" if readings else ""
            yield self.of_weight(weight, Severity.ERROR, f"the weight has an rms of {rms:.3g}{more}", value=rms, threshold=limit)
        yield from self._plain(judged)

    def _plain(self, judged: Judged) -> Iterable[TensorFinding]:
        for tensor, plain in judged.plains:
            is_matrix = len(tensor.shape) > 1 and tensor.name.endswith("weight") and not plain.is_on_grid
            if is_matrix and plain.rms > self.max_plain_rms:
                text = f"the {tensor.dtype} weight has an rms of {plain.rms:.3g}: scales were applied the wrong way, or as bytes"
                cure = "convert the weight again; bytes of E8M0 scales mean 2^(byte - 127)"
                limit = self.max_plain_rms
                yield self.of_tensor(tensor, Severity.ERROR, text, value=plain.rms, threshold=limit, cure=cure)

    def _is_plausible(self, rms: float) -> bool:
        return self.min_rms * 10 <= rms <= self.max_rms


CHECKS.add(ImplausibleMagnitude.code, ImplausibleMagnitude())
