# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention: a row of blocks is a request whose pages are the blocks that it reads."""

import math

import numpy as np

from .. import Batch
from . import _arrays as arrays
from . import _core as core
from .prefill import _Wrapper, _upcast_query
from .quantization import segment_packbits
from .utils import check_pos_encoding_mode, check_shape_dtype_device, check_sizes, refuse_given


def convert_bsr_mask_layout(mask, indptr):
    """[blocks, R, C] flags to the flat order of a custom mask: per block row, [R, blocks of the row * C]."""
    offsets = arrays.host_ints(indptr)
    rows = [mask[int(a): int(b)] for a, b in zip(offsets[:-1], offsets[1:])]
    rows = [arrays.permute(x, (1, 0, 2)).reshape(-1) for x in rows]
    torch = arrays.torch_of(mask)
    if torch is not None:
        return torch.cat(rows) if rows else mask.reshape(-1)
    return np.concatenate(rows) if rows else mask.reshape(-1)


class BlockSparseAttentionWrapper(_Wrapper):
    """Attention under a block-sparse (BSR) mask of M rows and N keys in blocks of R x C."""

    def __init__(self, float_workspace_buffer, backend="auto"):
        super().__init__(float_workspace_buffer, "NHD", backend)

    def plan(self, indptr, indices, M, N, R, C, num_qo_heads, num_kv_heads, head_dim, mask=None, packed_mask=None, causal=False, pos_encoding_mode="NONE",
             use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
             o_data_type="float16", non_blocking=True, block_mask=None, kv_block_lens=None, q2k_indices=None, q2k_num=None, kv_splits=None, use_clc=None,
             q_scale=None, k_scale=None, v_scale=None):
        """indptr [M / R + 1], indices: the blocks of each row of blocks. mask: bool [blocks, R, C] inside blocks; packed_mask: the same per block row
        [R, blocks * C], bits low first, each block row from a byte border."""
        check_pos_encoding_mode(pos_encoding_mode)
        check_sizes(num_qo_heads, num_kv_heads, head_dim=head_dim, R=R, C=C)
        if block_mask is not None:
            raise ValueError("block_mask is only supported for the vsa_sm100_blk128, vsa_sm100_blk64, and vsa_sm120_blk64 backends: give indptr and indices")
        refuse_given(kv_block_lens=kv_block_lens, q2k_indices=q2k_indices, q2k_num=q2k_num, kv_splits=kv_splits, use_clc=use_clc, q_scale=q_scale, k_scale=k_scale,
                     v_scale=v_scale)
        if indptr is None or indices is None:
            raise ValueError("indptr and indices are required for non-VSA backends.")
        if arrays.size_of(indices) and int(indices.max()) * C >= N:
            raise ValueError(f"indices out of bound: the largest is {int(indices.max())}; there are N / C = {N // C} blocks of keys")
        if M % R or N % C:
            raise ValueError(f"M = {M} must be a multiple of R = {R}, and N = {N} of C = {C}")
        offsets = arrays.host_ints(indptr)
        if len(offsets) != M // R + 1:
            raise ValueError(f"indptr has {len(offsets)} entries; expected M / R + 1 = {M // R + 1}")
        blocks = offsets[1:] - offsets[:-1]
        rows = np.arange(M // R + 1, dtype=np.int64) * R
        args, masked = None, mask is not None or packed_mask is not None
        if masked:
            if packed_mask is None:
                if tuple(mask.shape) != (int(offsets[-1]), R, C):
                    raise ValueError(f"mask has the shape {tuple(mask.shape)}; expected blocks, R, C = {(int(offsets[-1]), R, C)}")
                packed_mask = segment_packbits(convert_bsr_mask_layout(mask, offsets), offsets.astype(np.int64) * R * C, bitorder="little")[0]
            args = {"bits": arrays.to_device(packed_mask, self._float_workspace_buffer)}
        o_name = arrays.dtype_name(o_data_type)
        q_name = arrays.dtype_name(q_data_type)
        if not q_name.startswith("fp8") and o_name == "f16":
            o_name = q_name         # the default says float16 whatever the queries are
        self._types = self._set_dtypes(q_data_type, kv_data_type, o_name)
        spec = self._plan_spec(num_q_heads=num_qo_heads, num_kv_heads=num_kv_heads, dim_qk=head_dim, dim_v=head_dim, sm_scale=sm_scale, causal=causal,
                               logits_soft_cap=logits_soft_cap, pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta,
                               custom_mask=masked)
        lengths = blocks.astype(np.int64) * C
        self._keep_lse_offset(spec, lengths, rows)
        ids = arrays.to_numpy(indices) if self._device == "cpu" else arrays.to_device(indices, self._float_workspace_buffer)
        if self._device != "cpu":
            ids = (None, ids)
        decode = R == 1
        batch = Batch(rows=None if decode else rows, lengths=lengths, page_size=C, num_pages=N // C, page_indptr=offsets, page_ids=ids, args=args)
        need = core.Need(M // R, M, max(int(lengths.sum()), 1), max(int(offsets[-1]), 1))
        self.M, self.N, self.R, self.C = M, N, R, C
        self._rows_total = M
        self._attention.update(spec, batch, need, core.Mode(decode=decode), core.stream_of(self._float_workspace_buffer))

    begin_forward = plan

    def run(self, q, k, v, scale_q=None, scale_k=None, scale_v=None, out=None, lse=None, return_lse=False, enable_pdl=None):
        """q [M, heads, dim], k and v [N, kv_heads, dim]. Returns out [M, heads, dim], and lse [M, heads] in base 2 with return_lse."""
        self._planned()
        self._check_query(q, k)
        if q.shape[0] != self.M or k.shape[0] != self.N:
            raise ValueError(f"q has {q.shape[0]} rows and k {k.shape[0]}; plan() was told M = {self.M} and N = {self.N}")
        pages = (self.N // self.C, self.C)
        k, v = (_as_pages(x, pages) for x in (k, v))
        if self._q_dtype.startswith("fp8"):
            q, scale_q = _upcast_query(q, scale_q, self._o_dtype)
        self._take_options()
        return core.run(self._attention, q, k, v, out=out, lse=lse, return_lse=return_lse, q_scale=scale_q, k_scale=scale_k, v_scale=scale_v,
                        lse_offset=self._lse_offset)

    def forward(self, q, k, v, scale_q=None, scale_k=None, scale_v=None, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, logits_soft_cap=None,
                sm_scale=None, rope_scale=None, rope_theta=None):
        """Deprecated: run() with the options of plan() said again. As upstream's, they stay for later runs, until the next plan()."""
        self._planned()
        self._respec(pos_encoding_mode=pos_encoding_mode, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta)
        return self.run(q, k, v, scale_q, scale_k, scale_v)


def _as_pages(x, pages):
    """[tokens, heads, dim] as [pages, tokens of a page, heads, dim]: splitting the first axis is a view whatever the strides."""
    return arrays.reshape(x, pages + tuple(x.shape[1:]))


class VariableBlockSparseAttentionWrapper(_Wrapper):
    """Attention under a mask of blocks of any sizes, another one for each KV head. Tensors are [heads, tokens, dim]."""

    def __init__(self, float_workspace_buffer, backend="auto"):
        super().__init__(float_workspace_buffer, "HND", backend)

    def plan(self, block_mask_map, block_row_sz, block_col_sz, num_qo_heads, num_kv_heads, head_dim, causal=False, pos_encoding_mode="NONE",
             use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True, q_data_type="float16",
             kv_data_type=None, q_scale=None, k_scale=None, v_scale=None):
        """block_mask_map: bool [kv_heads, MB, NB]; block_row_sz [kv_heads, MB], block_col_sz [kv_heads, NB]: sizes of the blocks."""
        check_pos_encoding_mode(pos_encoding_mode)
        check_sizes(num_qo_heads, num_kv_heads, head_dim=head_dim)
        refuse_given(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        kept, row_sizes, col_sizes = arrays.to_numpy(block_mask_map) != 0, arrays.host_ints(block_row_sz), arrays.host_ints(block_col_sz)
        heads, num_rows, num_cols = kept.shape
        if heads != num_kv_heads or row_sizes.shape != (heads, num_rows) or col_sizes.shape != (heads, num_cols):
            raise ValueError(f"block_mask_map {kept.shape}, block_row_sz {row_sizes.shape} and block_col_sz {col_sizes.shape} do not fit {num_kv_heads} KV heads")
        qo_len, kv_len = int(row_sizes[0].sum()), int(col_sizes[0].sum())
        if (row_sizes < 0).any() or (col_sizes < 0).any():
            raise ValueError("block_row_sz and block_col_sz are sizes: none may be below 0")
        if (row_sizes.sum(1) != qo_len).any() or (col_sizes.sum(1) != kv_len).any():
            raise ValueError("the blocks of every head must add up to the same number of rows, and of keys")
        page = math.gcd(*(int(x) for x in np.unique(col_sizes) if x)) if col_sizes.any() else 1
        ids, counts = self._page_lists(kept, col_sizes, page, kv_len)
        rows = np.concatenate(([0], np.cumsum(row_sizes.reshape(-1), dtype=np.int64)))
        indptr = np.concatenate(([0], np.cumsum(counts)))
        lengths = counts * page
        self._types = self._set_dtypes(q_data_type, kv_data_type, None)
        group = num_qo_heads // num_kv_heads
        spec = self._plan_spec(num_q_heads=group, num_kv_heads=1, dim_qk=head_dim, dim_v=head_dim, sm_scale=sm_scale, causal=causal,
                               logits_soft_cap=logits_soft_cap, pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta)
        self._refuse_alibi(pos_encoding_mode)
        self._shape = (num_qo_heads, num_kv_heads, group, qo_len, kv_len, head_dim, page)
        page_ids = ids if self._device == "cpu" else (ids, arrays.to_device(ids, self._float_workspace_buffer))
        batch = Batch(rows=rows, lengths=lengths, page_size=page, num_pages=heads * kv_len // page, page_indptr=indptr, page_ids=page_ids)
        need = core.Need(heads * num_rows, max(int(rows[-1]), 1), max(int(lengths.sum()), 1), max(len(ids), 1))
        self._attention.update(spec, batch, need, core.Mode(), core.stream_of(self._float_workspace_buffer))

    begin_forward = plan

    @staticmethod
    def _refuse_alibi(pos_encoding_mode):
        if pos_encoding_mode == "ALIBI":
            raise NotImplementedError("ALIBI with VariableBlockSparseAttentionWrapper")

    @staticmethod
    def _page_lists(kept, col_sizes, page, kv_len):
        """Pages of every (head, block row), head after head: K and V are seen as one pool of all heads' keys."""
        ids, counts = [], []
        pages_a_head = kv_len // page
        for h in range(kept.shape[0]):
            block_of_page = np.repeat(np.arange(kept.shape[2]), col_sizes[h] // page)
            for row in kept[h]:
                mine = np.flatnonzero(row[block_of_page]) + h * pages_a_head
                ids.append(mine)
                counts.append(len(mine))
        return np.concatenate(ids).astype(np.int32) if ids else np.zeros(0, np.int32), np.array(counts, np.int64)

    def run(self, q, k, v, out=None, lse=None, return_lse=False, enable_pdl=None):
        """q [heads, rows, dim], k and v [kv_heads, keys, dim]. Returns out [heads, rows, dim], and lse [heads, rows] in base 2 with return_lse."""
        self._planned()
        self._check_query(q, k)
        num_q_heads, num_kv_heads, group, qo_len, kv_len, dim, page = self._shape
        check_shape_dtype_device(q, (num_q_heads, qo_len, dim), None, None, "q")
        check_shape_dtype_device(k, (num_kv_heads, kv_len, dim), None, None, "k")
        pages = (num_kv_heads * kv_len // page, page, 1, dim)
        rows = arrays.reshape(arrays.permute(arrays.reshape(q, (num_kv_heads, group, qo_len, dim)), (0, 2, 1, 3)), (num_kv_heads * qo_len, group, dim))
        wanted = return_lse or lse is not None
        self._take_options()
        made = core.run(self._attention, rows, arrays.reshape(k, pages), arrays.reshape(v, pages), return_lse=wanted)
        o = made[0] if wanted else made
        o = arrays.reshape(arrays.permute(arrays.reshape(o, (num_kv_heads, qo_len, group, dim)), (0, 2, 1, 3)), (num_q_heads, qo_len, dim))
        if out is not None:
            check_shape_dtype_device(out, (num_q_heads, qo_len, dim), self._o_dtype, arrays.device_of(q), "out")
            out[:] = o
            o = out
        if not wanted:
            return o
        s = made[1].reshape(num_kv_heads, qo_len, group)
        s = arrays.permute(s, (0, 2, 1)).reshape(num_q_heads, qo_len)
        if lse is not None:
            check_shape_dtype_device(lse, (num_q_heads, qo_len), "f32", arrays.device_of(q), "lse")
            lse[:] = s
            s = lse
        return (o, s) if return_lse else o

    def forward(self, q, k, v, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None):
        """Deprecated: run() with the options of plan() said again. As upstream's, they stay for later runs, until the next plan()."""
        self._planned()
        self._refuse_alibi(pos_encoding_mode)
        self._respec(pos_encoding_mode=pos_encoding_mode, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta)
        return self.run(q, k, v)


__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper", "convert_bsr_mask_layout"]
