# SPDX-License-Identifier: Apache-2.0
"""Declarations that callers pass on in jit_args. The engine has sinks built in; the text only has to be there."""

attention_sink_decl = {"fa2": "AttentionSink", "fa3": "AttentionSink"}

__all__ = ["attention_sink_decl"]
