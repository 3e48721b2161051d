# SPDX-License-Identifier: Apache-2.0
"""Names of element types in module names. Keys are torch dtypes where torch is imported, and words."""

_SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "int8": "i8", "uint8": "u8", "int32": "i32",
          "uint32": "u32", "int64": "i64", "uint64": "u64"}


class _Names(dict):
    def __missing__(self, dtype):
        word = str(dtype)
        word = word[6:] if word.startswith("torch.") else getattr(dtype, "name", word)
        if word not in _SHORT:
            raise KeyError(dtype)
        return _SHORT[word]


filename_safe_dtype_map = _Names()

__all__ = ["filename_safe_dtype_map"]
