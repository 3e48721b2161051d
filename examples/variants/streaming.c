/* SPDX-License-Identifier: Apache-2.0 */
/* streaming.c -- a stream without end in a cache of fixed size. The cache holds the first `sinks` tokens of the stream for ever, which models lean on
 * heavily, and the most recent ones behind them; its keys are stored un-rotated, and positions are places in the cache, not in the stream: key j sits
 * at position j however much was dropped before it. So q and k turn here, inside attention, and nothing in the cache changes when tokens are
 * dropped. `recent` cuts the window tighter than the cache is. */
FV_META("RoPE by place in the cache; visible where k_pos < sinks or q_pos - recent < k_pos <= q_pos")

FV_PARAMS(
    FV_INT(rotary_dim, problem, required, 32)
    FV_INT(interleaved, problem, 0, 0)
    FV_NUMBER(base, problem, 10000, 10000)
    FV_FLOATS(frequencies, problem, rotary_dim/2, frequencies)
    FV_INT(sinks, run, 4, 4)
    FV_INT(recent, run, inf, 40)
)
FV_REQUIRE(sinks >= 0)
FV_REQUIRE(recent >= 1)
FV_PAIRS(rotary_dim, interleaved)
FV_TURNS(frequencies)
FV_LAST_KEY(position)

#ifdef FV_SPEC
FV_QUERY { return v_rotate(x, at.q_pos, a->frequencies.data[at.index]); }
FV_KEY { return v_rotate(x, at.k_pos, a->frequencies.data[at.index]); }
FV_VISIBLE { return at.k_pos <= at.q_pos && (at.k_pos < a->sinks || at.k_pos > at.q_pos - a->recent); }
#else
FV_QUERY { return v_rotate(x, at.q_pos, v_read(a->frequencies, at.index)); }
FV_KEY { return v_rotate(x, at.k_pos, v_read(a->frequencies, at.index)); }
FV_VISIBLE
{
    const v_mask kept = v_or(v_ilt(at.k_pos, v_seti(a->sinks)), v_igt(at.k_pos, at.q_pos - a->recent));
    return v_and(v_ile(at.k_pos, at.q_pos), kept);
}
#endif
