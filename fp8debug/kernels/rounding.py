"""Random numbers and the Hadamard transform of a cast, in plain torch ops: equal tensors give equal bits on every device.

Stochastic rounding draws from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11): a function of
a counter, the place of an element, and of a key, the cast's seed and a checksum of the tensor. So nothing has a state: the
global generators are neither read nor advanced, a recomputed tensor is rounded as it was before, eager and compiled code agree,
and two tensors that differ are rounded independently.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
#: Bits of a random number: as many as an FP32 mantissa has.
_RANDOM_BITS = 24
#: Size of the transform, and its random signs, fixed in Transformer Engine for NVFP4 (``get_wgrad_sign_vector``).
HADAMARD = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def philox(counter: Tensor, key: tuple[Tensor, Tensor]) -> Tensor:
    """Return four random words for each counter, int64 ``[len(counter), 4]``, each below 2^32.

    Args:
        counter: int64 ``[n]``, the low two words of the counter; the others are 0.
        key: int64 ``[]``, two words below 2^32.
    """
    c0, c1 = counter & _MASK, counter >> 32
    c2, c3 = torch.zeros_like(counter), torch.zeros_like(counter)
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        # The product of two words fills 64 bits; a signed shift, masked, gives its upper half all the same.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & _MASK) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32 & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack((c0, c1, c2, c3), 1)


def uniform(x: Tensor, seed: int) -> Tensor:
    """Return a random number in [0, 1) for each element, multiples of 2^-24, which the tensor's bits and the seed decide.

    Args:
        x: FP32, any shape.
        seed: below 2^64.

    Returns:
        FP32 of x's shape.
    """
    bits = x.contiguous().view(torch.int32).reshape(-1).long()
    place = torch.arange(bits.numel(), dtype=torch.int64, device=x.device)
    checksum = (bits * (2 * place + 1)).sum()
    key = (checksum ^ seed & _MASK) & _MASK, (checksum >> 32 ^ seed >> 32) & _MASK
    words = philox(place[: -(-bits.numel() // 4)], key).reshape(-1)[: bits.numel()]
    return ((words >> (32 - _RANDOM_BITS)).float() * 2.0**-_RANDOM_BITS).reshape(x.shape)


@cache
def _matrix(device: torch.device) -> Tensor:
    """Return diag(signs) @ H / 4 in FP64, H by Sylvester's construction: orthogonal."""
    h = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while len(h) < HADAMARD:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    signs = torch.tensor(SIGNS, dtype=torch.float64, device="cpu")
    return (signs[:, None] * h * HADAMARD**-0.5).to(device)


def hadamard(x: Tensor, dim: int, *, undo: bool = False) -> Tensor:
    """Transform groups of 16 neighbours along a dimension: x' = x diag(signs) H / 4; those after the last whole group stay.

    The matrix is orthogonal, so that two operands transformed along the dimension that their GEMM contracts have the same
    product (arXiv 2509.25149, section 4.3). Sums are in FP64 and rounded to FP32 once. A NaN or Inf spreads over its group.

    Args:
        x: FP32 ``[rows, columns]``.
        dim: 0 or 1.
        undo: the inverse.
    """
    whole = x.shape[dim] // HADAMARD * HADAMARD
    if not whole or not x.numel():
        return x
    matrix = _matrix(x.device)
    part = x.narrow(dim, 0, whole).double()
    part = part.t() if dim == 0 else part
    groups = part.reshape(-1, HADAMARD) @ (matrix.t() if undo else matrix)
    made = groups.reshape(part.shape).float()
    made = made.t() if dim == 0 else made
    return made if whole == x.shape[dim] else torch.cat([made, x.narrow(dim, whole, x.shape[dim] - whole)], dim)
