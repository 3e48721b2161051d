# SPDX-License-Identifier: Apache-2.0
"""Names of flashinfer.utils that callers use."""

import enum
import functools
import math
import re

import numpy as np

from . import _arrays as arrays


class PosEncodingMode(enum.Enum):
    NONE = 0
    ROPE_LLAMA = 1
    ALIBI = 2


class MaskMode(enum.Enum):
    NON_CAUSAL = 0
    CAUSAL = 1
    CUSTOM = 2
    MULTIITEMSCORING = 3


class TensorLayout(enum.Enum):
    NHD = 0
    HND = 1


log2e = 1.44269504088896340736


# Tuples: an enum's __members__ is more than torch.compile can follow.
_LAYOUTS, _MODES = tuple(TensorLayout.__members__), tuple(PosEncodingMode.__members__)


def check_kv_layout(kv_layout):
    if kv_layout not in _LAYOUTS:
        raise KeyError(f"Invalid kv_layout {kv_layout}; it is NHD or HND")


def check_pos_encoding_mode(mode):
    if mode not in _MODES:
        raise KeyError(f"Invalid pos_encoding_mode {mode}; it is NONE, ROPE_LLAMA or ALIBI")


LSE_BASES, LSE_LAYOUTS = ("log2", "ln"), ("NH", "HN")


def _check_one_of(name, value, values):
    if value not in values:
        raise ValueError(f"{name} must be one of {values}, got {value!r}")


def check_lse_base(lse_base):
    _check_one_of("lse_base", lse_base, LSE_BASES)


def check_lse_layout(lse_layout):
    """NH: [rows, heads]; HN: [heads, rows]."""
    _check_one_of("lse_layout", lse_layout, LSE_LAYOUTS)


def fixed_batch_size(indptr, indices, last_page_len):
    """Requests of a wrapper for graphs, by the page table's buffers, all of which it must have been given."""
    for name, x in (("indptr", indptr), ("indices", indices), ("last_page_len", last_page_len)):
        if x is None:
            raise ValueError(f"paged_kv_{name}_buffer should be a torch.Tensor in cudagraph mode")
    n = len(last_page_len)
    if len(indptr) != n + 1:
        raise ValueError("The size of paged_kv_indptr_buffer should be batch_size + 1")
    return n


def check_sizes(num_qo_heads, num_kv_heads, **sizes):
    """Refuses heads that do not fit and sizes (head_dim=, page_size=) that are no positive integers, by their names."""
    for name, x in (("num_qo_heads", num_qo_heads), ("num_kv_heads", num_kv_heads), *sizes.items()):
        if not hasattr(x, "__index__"):
            raise TypeError(f"{name} is {x!r}; it must be an integer")
        if x < 1:
            raise ValueError(f"{name} is {x}; it must be at least 1")
    if num_qo_heads % num_kv_heads:
        raise ValueError(f"num_qo_heads {num_qo_heads} must be a multiple of num_kv_heads {num_kv_heads}")


def refuse_given(**options):
    """NotImplementedError for the first option that is given."""
    for name, x in options.items():
        if x is not None:
            raise NotImplementedError(f"{name} is not covered")


def next_positive_power_of_2(x):
    return 1 if x < 1 else 1 << (int(x) - 1).bit_length()


def last_positive_power_of_2(x):
    """The largest power of two that is at most x; 1 below 1."""
    return 1 if x < 1 else 1 << (int(x).bit_length() - 1)


def get_alibi_slopes(n_heads, device=None):
    """float32 [n_heads]: 2^(-8 i / n) for the largest power of two n below, and odd powers of 2^(-4 / n) for the rest. A torch tensor where a
    torch device is given, else a NumPy array."""
    n = 2 ** math.floor(math.log2(n_heads))
    slopes = [2.0 ** (-8.0 * i / n) for i in range(1, n + 1)]
    slopes += [2.0 ** (-4.0 * i / n) for i in range(1, 2 * (n_heads - n) + 1, 2)]
    slopes = np.array(slopes, np.float32)
    import sys

    torch = sys.modules.get("torch")
    if torch is None:
        return slopes
    return torch.from_numpy(slopes) if device is None else torch.from_numpy(slopes).to(device)


def check_shape_dtype_device(x, expected_shape, expected_dtype, expected_device, name):
    """ValueError unless an output given by the caller is what the call would make. What is None is not compared."""
    if expected_shape is not None and tuple(x.shape) != tuple(expected_shape):
        raise ValueError(f"Invalid shape of {name}: expected {tuple(expected_shape)}, got {tuple(x.shape)}")
    if expected_dtype is not None and arrays.dtype_of(x) != arrays.dtype_name(expected_dtype):
        raise ValueError(f"Invalid dtype of {name}: expected {expected_dtype}, got {x.dtype}")
    if expected_device is not None and arrays.device_of(x) != arrays.device_name(expected_device):
        raise ValueError(f"Invalid device of {name}: expected {expected_device}, got {arrays.device_of(x)}")


def get_compute_capability(device):
    """(major, minor) of a CUDA device."""
    import torch

    if torch.device(device).type != "cuda":
        raise ValueError(f"{device} is no CUDA device")
    return torch.cuda.get_device_capability(device)


def _is_arch(device, major, minors=None):
    import torch

    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return False
    have = torch.cuda.get_device_capability(device)
    return have[0] == major and (minors is None or have[1] in minors)


def is_sm90a_supported(device):
    return _is_arch(device, 9)


def is_sm100a_supported(device):
    return _is_arch(device, 10)


def is_sm110a_supported(device):
    return _is_arch(device, 11)


def is_sm120a_supported(device):
    return _is_arch(device, 12, (0,))


def is_sm121a_supported(device):
    return _is_arch(device, 12, (1,))


def is_sm12x_supported(device):
    return _is_arch(device, 12)


def is_sm100f_supported(device):
    return _is_arch(device, 10)


def is_cvt_rs_supported(device=None):
    return False


def is_fa3_backend_supported(*args, **kwargs):
    """False: backends are names here, and determine_attention_backend says fa2."""
    return False


def get_device_sm_count(device):
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count


def device_support_pdl(device):
    return False


def determine_attention_backend(*args, **kwargs):
    return "fa2"


def has_flashinfer_jit_cache():
    """True: nothing has to be built ahead."""
    return True


def has_flashinfer_cubin():
    return False


def register_custom_op(name, fn=None, /, *, mutates_args=(), device_types=None, schema=None):
    """A decorator that leaves the function as it is."""
    return (lambda f: f) if fn is None else fn


def register_fake_op(name, fn=None):
    """A decorator that leaves the function as it is."""
    return (lambda f: f) if fn is None else fn


class FP4Tensor:
    """A holder of 4-bit data and its scales, as scripts make it. Nothing here takes one."""

    def __init__(self, data, scale, scale_start_index=0, original_shape=None):
        self.data, self.scale, self.scale_start_index, self.original_shape = data, scale, scale_start_index, original_shape


class LibraryError(Exception):
    """Exists for `except` clauses; nothing here raises it."""


class BackendSupportedError(Exception):
    """Exists for `except` clauses; nothing here raises it."""


class GPUArchitectureError(Exception):
    """Exists for `except` clauses; nothing here raises it."""


@functools.lru_cache(maxsize=32)
def version_at_least(version, base_version):
    """Is a version such as "2.11.0+cu130" at least another one? None is none."""
    def numbers(text):
        return ([int(x) for x in re.findall(r"\d+", str(text).split("+")[0])] + [0, 0])[:3]

    return version is not None and base_version is not None and numbers(version) >= numbers(base_version)


_buffers = {}


def _get_cache_buf(name, nbytes, device):
    """A uint8 torch tensor kept by name and device, at least as large as asked for."""
    import torch

    key = name, str(device)
    if key not in _buffers or _buffers[key].numel() < nbytes:
        _buffers[key] = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return _buffers[key]


def _get_cache_alibi_slopes_buf(num_qo_heads, device):
    """get_alibi_slopes on a device, kept."""
    key = "alibi", num_qo_heads, str(device)
    if key not in _buffers:
        _buffers[key] = get_alibi_slopes(num_qo_heads, device)
    return _buffers[key]


def _get_range_buf(seq_len, device):
    from .decode import _get_range_buf

    return _get_range_buf(seq_len, device)


def _split_scale_param(scale):
    """(tensor, 1.0) or (None, number)."""
    return (scale, 1.0) if arrays.torch_of(scale) is not None else (None, 1.0 if scale is None else float(scale))


def _check_cached_qkv_data_type(q, k, dtype_q, dtype_kv):
    for name, x, dtype in (("q", q, dtype_q), ("k", k, dtype_kv)):
        if x.dtype != dtype:
            raise ValueError(f"The dtype of {name} {x.dtype} does not match the {name}_data_type {dtype} that plan() was given")


def ceil_div(x, y):
    return -(-x // y)


def round_up(x, y):
    return -(-x // y) * y


def canonicalize_torch_dtype(dtype):
    """A torch dtype from its name or from itself."""
    import torch

    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(found, torch.dtype):
        raise TypeError(f"dtype must be a torch dtype or the name of one, not {dtype!r}")
    return found


def is_float8(x):
    return arrays.dtype_of(x) in ("fp8_e4m3", "fp8_e5m2")


def get_indptr(x):
    """Lengths to offsets: a 0 in front of their running sum."""
    torch = arrays.torch_of(x)
    if torch is not None:
        return torch.nn.functional.pad(x.to(torch.int64), (1, 0)).cumsum(0)
    return np.concatenate(([0], np.cumsum(x, dtype=np.int64)))


def expand_4d(x, kv_layout):
    """[tokens, heads, dim] as pages of one token."""
    if len(x.shape) not in (3, 4):
        raise ValueError(f"a cache tensor has 3 or 4 axes, not {len(x.shape)}")
    if len(x.shape) == 4:
        return x
    axis = 1 if kv_layout == "NHD" else 2
    return arrays.index(x, (slice(None),) * axis + (None,))


def expand_5d(x, kv_layout):
    """[tokens, 2, heads, dim] as pages of one token."""
    if len(x.shape) not in (4, 5):
        raise ValueError(f"a combined cache tensor has 4 or 5 axes, not {len(x.shape)}")
    if len(x.shape) == 5:
        return x
    axis = 2 if kv_layout == "NHD" else 3
    return arrays.index(x, (slice(None),) * axis + (None,))


def check_arrays(**given):
    """TypeError for the first that is no array, by its name."""
    for name, x in given.items():
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(f"{name} is {'None' if x is None else 'a ' + type(x).__name__}; it must be an array")


def _two(paged_kv_cache, kv_layout):
    """(k, v) in the given layout, four axes each."""
    if isinstance(paged_kv_cache, (tuple, list)):
        if len(paged_kv_cache) != 2:
            raise ValueError(f"paged_kv_cache has {len(paged_kv_cache)} entries; it is a tensor, or a pair: k and v")
        k, v = paged_kv_cache
        return expand_4d(k, kv_layout), expand_4d(v, kv_layout)
    both = expand_5d(paged_kv_cache, kv_layout)
    if both.shape[1] != 2:
        raise ValueError(f"axis 1 of the combined cache is {both.shape[1]}; it holds K and V: 2")
    return arrays.halves(both)


def _unpack_paged_kv_cache(paged_kv_cache, kv_layout):
    """(k, v) in the given layout."""
    try:
        return tuple(_two(paged_kv_cache, kv_layout))
    except AttributeError:
        pair = paged_kv_cache if isinstance(paged_kv_cache, (tuple, list)) else ()
        check_arrays(**(dict(zip(("paged_kv_cache[0]", "paged_kv_cache[1]"), pair)) if pair else {"paged_kv_cache": paged_kv_cache}))
        raise


def unpack_paged_kv_cache(paged_kv_cache, kv_layout):
    """(k, v) as [pages, page, heads, dim] views, whatever the layout."""
    k, v = _unpack_paged_kv_cache(paged_kv_cache, kv_layout)
    if kv_layout == "HND":
        k, v = arrays.permute(k, (0, 2, 1, 3)), arrays.permute(v, (0, 2, 1, 3))
    return k, v


_check_kv_layout, _check_pos_encoding_mode = check_kv_layout, check_pos_encoding_mode
_expand_4d, _expand_5d = expand_4d, expand_5d

