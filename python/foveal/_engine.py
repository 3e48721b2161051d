# SPDX-License-Identifier: Apache-2.0
"""What the plug-ins of serving engines share: a step's batch over a page table, planned once for each kind of layer that runs it.

Nouns
  table      2-D page ids, a row a request (or row table_rows[r], on the host)
  step       rows and lengths of a batch on the host, and its table; made once a forward pass
  kind       what a layer's plan depends on: element types, heads, dims, scale, window, soft cap, sinks"""

import numpy as np

from . import Batch
from .flashinfer import _arrays as arrays
from .flashinfer import _core as core


class Step:
    """rows [n + 1], lengths [n] and table_rows [n] (or None) are NumPy arrays; table a tensor [*, width]. planned: kinds that have a plan for this step."""

    __slots__ = ("rows", "lengths", "table", "table_rows", "causal", "planned")

    def __init__(self, rows, lengths, table, table_rows=None, causal=True):
        self.rows, self.lengths, self.table, self.table_rows, self.causal = rows, lengths, table, table_rows, causal
        self.planned = set()


class Layers:
    """Plans by kind, kept from step to step."""

    def __init__(self):
        self._attentions = {}

    def run(self, step, q, k, v, out, *, scale, window=None, soft_cap=None, sinks=None, slopes=None):
        """q [rows, heads, dim], k and v [pages, page_size, kv_heads, dim], out [rows, heads, dim_v]. window: keys that a row sees, its own included."""
        spec = core.make_spec(arrays.dtype_of(q), arrays.dtype_of(k), arrays.dtype_of(q), q.shape[1], k.shape[2], q.shape[2], v.shape[3], sm_scale=scale,
                              causal=step.causal, window_left=-1 if not window or window < 0 else window - 1, logits_soft_cap=soft_cap)
        args = None
        if slopes is not None:
            spec = spec._replace(variants=spec.variants + (("alibi", ()),))
            args = {"slopes": arrays.f32_vector(slopes, q)}
        key = (arrays.device_of(q), spec, k.shape[1])
        attention = self._attentions.get(key)
        if attention is None:
            attention = self._attentions[key] = core.Attention(key[0])
        if key not in step.planned:
            self._plan(attention, spec, step, k, q)
            step.planned.add(key)
        core.run(attention, q, k, v, out=out, sinks=sinks, args=args)

    @staticmethod
    def _plan(attention, spec, step, k, q):
        cpu = q.device.type == "cpu"
        rows, n = step.rows, len(step.lengths)
        decode = bool((np.diff(rows) == 1).all())
        used = int((-(-step.lengths // k.shape[1])).sum())
        batch = Batch(rows=None if decode else rows, lengths=step.lengths, page_size=k.shape[1], num_pages=k.shape[0],
                      page_ids=step.table if cpu else (None, step.table), table_rows=step.table_rows, num_requests=n)
        need = core.Need(n, max(int(rows[-1]), 1), max(int(step.lengths.sum()), 1), max(used, 1))
        attention.update(spec, batch, need, core.Mode(decode=decode), core.stream_of(q))


def append_slots(new_k, new_v, k, v, slots):
    """Rows into pages: slots are page * page_size + offset, -1 skips."""
    from . import append

    append(core.context_for(arrays.device_of(new_k)), new_k, new_v, k, v, slots=slots)
