# SPDX-License-Identifier: Apache-2.0
"""Arrays of either library, told apart where they come in: torch tensors, NumPy arrays (ml_dtypes included), foveal.Tensor.

Outputs are of the kind of the inputs: torch tensors on the inputs' device, else NumPy arrays; an element type that NumPy has no name
for comes back as ml_dtypes' where that is installed, else as a foveal.Tensor over NumPy integers."""

import sys

import numpy as np

from .. import Tensor

_NUMPY = {
    "float32": "f32", "float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "int8": "int8", "uint8": "u8",
    "bool": "u8", "int32": "i32", "int64": "i64", "uint16": "u16", "float64": "f64",
}
_WORDS = {
    "float32": "f32", "float": "f32", "float16": "f16", "half": "f16", "bfloat16": "bf16", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2",
    "int8": "int8", "uint8": "u8", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2", "f32": "f32", "f16": "f16", "bf16": "bf16", "fp16": "f16",
    "fp32": "f32", "fp4_e2m1": "fp4_e2m1",
}
_TORCH_NAMES = {
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "int8": "int8", "u8": "uint8",
    "i32": "int32", "i64": "int64", "bool": "bool",
}
_torch_types = {}


def torch_of(x):
    """The torch module when x is a torch tensor, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else None


def torch_dtypes():
    """{torch dtype: name}, empty without torch."""
    if not _torch_types and "torch" in sys.modules:
        torch = sys.modules["torch"]
        for name, word in _TORCH_NAMES.items():
            if hasattr(torch, word):
                _torch_types[getattr(torch, word)] = "u8" if name == "bool" else name
    return _torch_types


def dtype_name(dtype):
    """The library's name of what callers call a dtype: a word, a torch dtype, a NumPy dtype."""
    if dtype is None:
        return None
    if isinstance(dtype, str):
        word = dtype[6:] if dtype.startswith("torch.") else dtype
        if word in _WORDS:
            return _WORDS[word]
        raise ValueError(f"unknown dtype {dtype!r}")
    name = torch_dtypes().get(dtype)
    if name is None and type(dtype).__module__ != "torch":
        name = _NUMPY.get(np.dtype(dtype).name)
    if name is None:
        raise ValueError(f"unsupported dtype {dtype}; float32, float16, bfloat16, float8_e4m3fn and float8_e5m2 are")
    return name


def dtype_of(x):
    """The library's name of an array's element type."""
    name = _torch_types.get(x.dtype)
    if name is not None:
        return name
    if isinstance(x, Tensor):
        return x.dtype
    if torch_of(x) is not None:
        return torch_dtypes().get(x.dtype) or str(x.dtype)
    return _NUMPY.get(x.dtype.name, x.dtype.name)


def device_of(x):
    """"cpu" or "cuda:N"."""
    if getattr(x, "is_cpu", True):          # torch's, and what NumPy arrays and foveal.Tensor lack
        return "cpu"
    device = x.device
    return f"{device.type}:{device.index or 0}"


def device_name(device):
    """"cpu" or "cuda:N" of what callers call a device: such a word, or a torch device."""
    if isinstance(device, str):
        return "cuda:0" if device == "cuda" else device
    return device.type if device.type == "cpu" else f"{device.type}:{device.index or 0}"


def together(x, y):
    """Do both lie on one device?"""
    return x.device == y.device if torch_of(x) is not None and torch_of(y) is not None else device_of(x) == device_of(y)


def _numpy_dtype(name):
    """(NumPy dtype, whether it needs a foveal.Tensor around it)."""
    if name in ("bf16", "fp8_e4m3", "fp8_e5m2"):
        try:
            import ml_dtypes
        except ImportError:
            return (np.uint16 if name == "bf16" else np.uint8), True
        return getattr(ml_dtypes, _TORCH_NAMES[name]), False
    return np.dtype({"f32": "f4", "f16": "f2", "int8": "i1", "u8": "u1", "i32": "i4", "i64": "i8", "bool": "?"}[name]), False


def empty(shape, name, like):
    """An array for outputs: of the library and on the device of `like`."""
    if name not in _TORCH_NAMES:
        raise ValueError(f"unsupported dtype {name}; float32, float16 and bfloat16 are")
    torch = torch_of(like)
    if torch is not None:
        return like.new_empty(shape, dtype=getattr(torch, _TORCH_NAMES[name]))
    if isinstance(like, Tensor) and name in ("bf16", "fp8_e4m3", "fp8_e5m2"):
        return Tensor(np.empty(shape, np.uint16 if name == "bf16" else np.uint8), name)
    dtype, wrapped = _numpy_dtype(name)
    array = np.empty(shape, dtype)
    return Tensor(array, name) if wrapped else array


def zeros(shape, name, like):
    x = empty(shape, name, like)
    inner = x.array if isinstance(x, Tensor) else x
    if torch_of(inner) is not None:
        inner.zero_()
    else:
        inner[...] = 0
    return x


def permute(x, axes):
    """A view with the axes in another order."""
    if isinstance(x, Tensor):
        return Tensor(permute(x.array, axes), x.dtype)
    return x.permute(axes) if torch_of(x) is not None else x.transpose(axes)


def index(x, where):
    """A view x[where], of a foveal.Tensor, too."""
    return Tensor(x.array[where], x.dtype) if isinstance(x, Tensor) else x[where]


def halves(x):
    """The views x[:, 0] and x[:, 1] of an array with two of them."""
    return x.unbind(1) if torch_of(x) is not None else (index(x, (slice(None), 0)), index(x, (slice(None), 1)))


def reshape(x, shape):
    if isinstance(x, Tensor):
        return Tensor(x.array.reshape(shape), x.dtype)
    return x.reshape(shape)


def retype(x, name):
    """The same bytes as another element type; float8 containers are uint8 in some libraries."""
    return x if dtype_of(x) == name else Tensor(x.array if isinstance(x, Tensor) else x, name)


def strides_of(x):
    """In elements."""
    inner = x.array if isinstance(x, Tensor) else x
    return tuple(inner.stride()) if torch_of(inner) is not None else tuple(s // inner.itemsize for s in inner.strides)


def to_numpy(x):
    """A NumPy array of integers, flags or floats; from a GPU this waits."""
    if x is None or isinstance(x, np.ndarray):
        return x
    torch = torch_of(x)
    if torch is not None:
        x = x if x.is_cpu else x.cpu()
        x = x.float() if x.dtype == torch.bfloat16 else x
        return (x.detach() if x.requires_grad else x).numpy()
    return np.asarray(x)


def host_ints(x, name="an index array"):
    """A NumPy array of int32 or int64. TypeError for numbers that are no integers."""
    if getattr(x, "is_cpu", False) and _torch_types.get(x.dtype) in ("i32", "i64"):     # what callers bring in each step
        return x.numpy()
    a = to_numpy(x)
    if a.dtype.char in "ilq":
        return a
    if a.dtype.kind not in "iu" and a.size:
        raise TypeError(f"{name} has elements of type {a.dtype}; int32 or int64 are read")
    return a.astype(np.int64)


def as_float(x):
    """A Python float of a number, a 0-d or a one-element array; None stays."""
    if x is None or isinstance(x, (float, int)):
        return x
    if hasattr(x, "item"):
        return float(x.item())
    return float(x)


def size_of(x):
    return x.numel() if torch_of(x) is not None else np.size(x)


def number_or_vector(x):
    """A float, an array with more than one entry (a scale per head), or what lies on a GPU as it is: reading it would wait, and break a capture."""
    if x is None or isinstance(x, (float, int)) or not hasattr(x, "shape") or device_of(x) != "cpu":
        return x
    return x if size_of(x) > 1 else as_float(x)


def to_device(x, like):
    """x where `like` lies."""
    torch = torch_of(like)
    if torch is None:
        return to_numpy(x) if torch_of(x) is not None else x
    if torch_of(x) is None:
        x = torch.from_numpy(np.ascontiguousarray(x))
    return x if x.device == like.device else x.to(like.device)


def f32_vector(x, like):
    """A contiguous float32 vector where `like` lies."""
    torch = torch_of(like)
    x = to_device(x, like)
    if torch is not None:
        return x.to(torch.float32).contiguous().reshape(-1)
    return np.ascontiguousarray(x, np.float32).reshape(-1)


def cast(x, name):
    """A copy in another element type, values kept."""
    torch = torch_of(x)
    if torch is not None:
        return x.to(getattr(torch, _TORCH_NAMES[name]))
    if isinstance(x, Tensor):
        import ml_dtypes

        x = x.array.view(getattr(ml_dtypes, _TORCH_NAMES[x.dtype]))
    dtype, wrapped = _numpy_dtype(name)
    if wrapped:
        raise TypeError(f"casting to {name} needs ml_dtypes")
    return x.astype(dtype)
