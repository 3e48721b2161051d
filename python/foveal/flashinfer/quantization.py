# SPDX-License-Identifier: Apache-2.0
"""Packing of masks."""

import numpy as np

from . import _arrays as arrays

_WEIGHTS = {"little": [1, 2, 4, 8, 16, 32, 64, 128], "big": [128, 64, 32, 16, 8, 4, 2, 1]}


def _weights(bitorder):
    if bitorder not in _WEIGHTS:
        raise ValueError(f"bitorder {bitorder!r}; it is 'little' or 'big'")
    return _WEIGHTS[bitorder]


def packbits(x, bitorder="big"):
    """Flags to bits, eight a byte: uint8 [ceil(n / 8)]. As numpy.packbits: the default is the high bit first; attention takes "little"."""
    weights = _weights(bitorder)
    torch = arrays.torch_of(x)
    if torch is None:
        return np.packbits(np.asarray(x).reshape(-1).astype(bool), bitorder=bitorder)
    flags = (x.reshape(-1) != 0).to(torch.uint8)
    if flags.shape[0] % 8:
        flags = torch.nn.functional.pad(flags, (0, 8 - flags.shape[0] % 8))
    return (flags.reshape(-1, 8) * torch.tensor(weights, dtype=torch.uint8, device=x.device)).sum(1, dtype=torch.int32).to(torch.uint8)


def segment_packbits(x, indptr, bitorder="big"):
    """Packs each segment x[indptr[i]:indptr[i + 1]] from a byte of its own. Returns (uint8 bytes, byte offsets [segments + 1] int32)."""
    _weights(bitorder)
    offsets = arrays.host_ints(indptr, "indptr").astype(np.int64)
    lengths = np.diff(offsets)
    if len(offsets) < 1 or offsets[0] < 0 or (lengths < 0).any() or offsets[-1] > arrays.size_of(x):
        raise ValueError(f"indptr must rise from 0 or more to at most the {arrays.size_of(x)} entries of x")
    starts = np.concatenate(([0], np.cumsum((lengths + 7) // 8)))
    torch = arrays.torch_of(x)
    if torch is None:
        flat = np.asarray(x).reshape(-1).astype(bool)
        spread = np.zeros(int(starts[-1]) * 8, bool)
        for i in range(len(lengths)):
            spread[starts[i] * 8: starts[i] * 8 + lengths[i]] = flat[offsets[i]: offsets[i + 1]]
        return np.packbits(spread, bitorder=bitorder), starts.astype(np.int32)
    new_indptr = torch.from_numpy(starts.astype(np.int32)).to(x.device)
    flat = x.reshape(-1)
    if (lengths[:-1] % 8 == 0).all():
        return packbits(flat[int(offsets[0]): int(offsets[-1])], bitorder), new_indptr
    shift = torch.from_numpy(np.repeat(starts[:-1] * 8 - offsets[:-1], lengths)).to(x.device)
    spread = torch.zeros(int(starts[-1]) * 8, dtype=torch.bool, device=x.device)
    spread[shift + torch.arange(int(offsets[0]), int(offsets[-1]), device=x.device)] = flat[int(offsets[0]): int(offsets[-1])] != 0
    return packbits(spread, bitorder), new_indptr


__all__ = ["packbits", "segment_packbits"]
