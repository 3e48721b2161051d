/* SPDX-License-Identifier: Apache-2.0 */
/* rope.h -- rotary embedding inside attention, for caches that hold un-rotated keys: pairs of q turn by q_pos * frequency, pairs of k by
 * k_pos * frequency. Pairs are the first of dim_qk: a qk_tail is turned before. Frequencies come from base and factor (linear, or Llama-3.1 with
 * low_freq_factor and high_freq_factor) unless given. */
FV_META("q and k turned by position * frequencies[pair]")

FV_PARAMS(
    FV_INT(rotary_dim, problem, required, 16)
    FV_INT(interleaved, problem, 0, 0)
    FV_NUMBER(base, problem, 10000, 10000)
    FV_NUMBER(factor, problem, 1, 1)
    FV_NUMBER(low_freq_factor, problem, 0, 0)
    FV_NUMBER(high_freq_factor, problem, 0, 0)
    FV_NUMBER(original_context, problem, 0, 0)
    FV_FLOATS(frequencies, problem, rotary_dim/2, frequencies)
)
FV_REQUIRE(rotary_dim >= 0)
FV_REQUIRE(rotary_dim <= 576)
FV_REQUIRE(interleaved >= 0)
FV_REQUIRE(interleaved <= 1)
FV_PAIRS(rotary_dim, interleaved)
FV_TURNS(frequencies)

#ifdef FV_SPEC
FV_QUERY { return v_rotate(x, at.q_pos, a->frequencies.data[at.index]); }
FV_KEY { return v_rotate(x, at.k_pos, a->frequencies.data[at.index]); }
#else
FV_QUERY { return v_rotate(x, at.q_pos, v_read(a->frequencies, at.index)); }
FV_KEY { return v_rotate(x, at.k_pos, v_read(a->frequencies, at.index)); }
#endif
