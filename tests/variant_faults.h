/* SPDX-License-Identifier: Apache-2.0 */
/* variant_faults.h -- texts with a fault that the C compiler and NVRTC both name by its line and by the word: rows of { line, text, word }. */
#ifndef VARIANT_FAULTS_H
#define VARIANT_FAULTS_H

#define META "FV_META(\"x\")\n"
#define VARIANT_FAULTS \
    { 3, META "FV_PARAMS(FV_NUMBER(gain, run, 1, 1))\nFV_SCORE { return s * a->gian; }\n", "gian" }, \
    { 5, META "FV_PARAMS(\n    FV_NUMBER(gain, run, 1, 1)\n)\nFV_VISIBLE { return v_below(at.k_pos, at.q_pos); }\n", "v_below" }, \
    { 5, META "#ifdef FV_SPEC\nFV_SINK { return 1; }\n#else\nFV_SINK { return at.nothing; }\n#endif\n", "nothing" }, \
    { 3, META "FV_PARAMS(FV_INT(d, problem, 2, 2) FV_INT(i, problem, 0, 0))\nFV_QUERY { return x.lo; }\nFV_PAIRS(d, i)\n", "" }, \
    { 4, META "FV_PARAMS(FV_INT(d, problem, 2, 2) FV_INT(i, problem, 0, 0))\nFV_PAIRS(d, i)\nFV_KEY { return v_rotate(x, at.k_pos); }\n", \
      "argument" }, \
    { 2, META "FV_VALUE { return v +; }\n", "" }, \
    { 2, META "FV_OUTPUT { return o * denominator; }\n", "denominator" }, \
    { 4, META "\nFV_WEIGHT {\n    retrun s;\n}\n", "retrun" }, \
    { 2, META "#error this text is old\nFV_SCORE { return s; }\n", "old" },

#endif
