/* SPDX-License-Identifier: Apache-2.0 */
/* test_variant.c -- variants as texts: what every declaration becomes, and for every fault the line
 * that it stands on; then problems and the binding of arguments by name and time. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "os.h"
#include "problem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static fv_error err;

#include "asked.h"

/* --------------------------------------------------------------------------------- declarations */

static const char everything[] =
    "/* a comment with FV_SCORE { in it */\n"
    "FV_META(\"one \\\"two\\\" \" \"three\")\n"
    "FV_PARAMS(\n"
    "    FV_NUMBER(cap, run, required, 5)\n"
    "    FV_NUMBER(open, problem, inf, -2.5e-1)      // another FV_META(\"\")\n"
    "    FV_INT(left, run, inf, 7)\n"
    "    FV_INT(dim, problem, 64, 16)\n"
    "    FV_INT(mode, problem, 0, 1)\n"
    "    FV_FLOATS(slopes, run, heads, none)\n"
    "    FV_FLOATS(turns, problem, dim/2, required)\n"
    "    FV_INTS(parents, batch, rows, none)\n"
    "    FV_BITS(bits, batch)\n"
    "    FV_RANGES(lift, batch, required)\n"
    ")\n"
    "FV_REQUIRE(cap > 0)\n"
    "FV_REQUIRE(cap <= 100)\n"
    "FV_REQUIRE(mode < 2)\n"
    "FV_REQUIRE(mode >= 0)\n"
    "FV_FIRST_KEY(position - left)\n"
    "FV_LAST_KEY(position)\n"
    "FV_LIFTED(lift)\n"
    "FV_EXACT\n"
    "FV_PAIRS(dim, mode)\n"
    "static float help(float x) { return x > '}' ? \"}\"[0] : x; }\n"
    "#ifdef FV_SPEC\n"
    "#if 1\n"
    "FV_SCORE { if (s > 0) { return s; } return -s; }\n"
    "#endif\n"
    "FV_QUERY { return x; }\n"
    "#else\n"
    "FV_SCORE\n"
    "{\n"
    "    return s;    /* } */\n"
    "}\n"
    "FV_QUERY { return x; }\n"
    "#endif\n"
    "FV_VISIBLE { return v_true(); }\n";

static void every_declaration(void **state)
{
    (void)state;
    fv__variant_meta m;
    OK(fv__variant_parse("all_2", everything, &m, &err));
    assert_string_equal(m.name, "all_2");
    assert_string_equal(m.formula, "one \"two\" three");
    assert_int_equal(m.num_params, 10);
    assert_int_equal(m.args_bytes, 9 * 16 + 32);
    static const struct {
        const char *name;
        fv__param_kind kind;
        fv__binding binding;
        fv__default dflt;
        int offset;
    } want[] = {
        { "cap", FV__NUMBER, FV__BIND_RUN, FV__DEFAULT_REQUIRED, 0 },
        { "open", FV__NUMBER, FV__BIND_PROBLEM, FV__DEFAULT_VALUE, 16 },
        { "left", FV__INT, FV__BIND_RUN, FV__DEFAULT_VALUE, 32 },
        { "dim", FV__INT, FV__BIND_PROBLEM, FV__DEFAULT_VALUE, 48 },
        { "mode", FV__INT, FV__BIND_PROBLEM, FV__DEFAULT_VALUE, 64 },
        { "slopes", FV__FLOATS, FV__BIND_RUN, FV__DEFAULT_NONE, 80 },
        { "turns", FV__FLOATS, FV__BIND_PROBLEM, FV__DEFAULT_REQUIRED, 96 },
        { "parents", FV__INTS, FV__BIND_BATCH, FV__DEFAULT_NONE, 112 },
        { "bits", FV__BITS, FV__BIND_BATCH, FV__DEFAULT_REQUIRED, 128 },
        { "lift", FV__RANGES, FV__BIND_BATCH, FV__DEFAULT_REQUIRED, 144 },
    };
    for (int i = 0; i < m.num_params; i++) {
        const fv__param *p = &m.params[i];
        assert_string_equal(p->name, want[i].name);
        assert_int_equal(p->kind, want[i].kind);
        assert_int_equal(p->binding, want[i].binding);
        assert_int_equal(p->dflt, want[i].dflt);
        assert_int_equal(p->offset, want[i].offset);
    }
    assert_true(m.params[0].example == 5 && isinf(m.params[1].value) &&
                m.params[1].example == -0.25);
    assert_true(m.params[2].value == FV__NO_BOUND && m.params[2].example == 7);
    assert_int_equal(m.params[5].count_of, FV__COUNT_HEADS);
    assert_int_equal(m.params[6].count_of, FV__COUNT_HALF);
    assert_int_equal(m.params[6].count, 3);
    assert_int_equal(m.params[7].count_of, FV__COUNT_ROWS);
    assert_true(m.params[0].has_min && m.params[0].min_open && m.params[0].min == 0);
    assert_true(m.params[0].has_max && !m.params[0].max_open && m.params[0].max == 100);
    assert_true(m.params[4].has_max && m.params[4].max_open && m.params[4].has_min &&
                !m.params[4].min_open);
    assert_true(m.first.present && m.first.sign == -1 && m.first.param == 2);
    assert_true(m.last.present && m.last.sign == 0 && m.last.param == -1);
    assert_int_equal(m.lifted, 9);
    assert_true(m.exact);
    assert_int_equal(m.pairs_dim, 3);
    assert_int_equal(m.pairs_interleaved, 4);
    assert_int_equal(m.hooks, 1u << FV__HOOK_SCORE | 1u << FV__HOOK_VISIBLE | 1u << FV__HOOK_QUERY);
}

/* Every hook, in one text or in two where they exclude each other. */
static void every_hook(void **state)
{
    (void)state;
    fv__variant_meta m;
    OK(fv__variant_parse("a",
                         "FV_META(\"x\")\nFV_PARAMS(FV_INT(d, problem, 2, 2) FV_INT(i, problem, 0, "
                         "0) FV_SUMS(sums, run) FV_MAXES(maxes, run))\n"
                         "FV_PAIRS(d, "
                         "i)\nFV_SCORE{}\nFV_VISIBLE{}\nFV_SINK{}\nFV_QUERY{}\nFV_KEY{}\nFV_VALUE{}"
                         "\nFV_OUTPUT{}\nFV_KEY_SUM{}\nFV_ROW_MAX{}",
                         &m, &err));
    assert_int_equal(m.hooks, ((1u << FV__NUM_HOOKS) - 1) & ~(1u << FV__HOOK_WEIGHT));
    OK(fv__variant_parse("a", "FV_META(\"x\")\nFV_WEIGHT { return s; }", &m, &err));
    assert_int_equal(m.hooks, 1u << FV__HOOK_WEIGHT);
    OK(fv__variant_parse("a", "FV_META(\"x\")\nFV_LAST_KEY(position)\nFV_EXACT\nFV_VISIBLE{}", &m,
                         &err));
    assert_int_equal(m.hooks, 1u << FV__HOOK_VISIBLE);
}

#define META "FV_META(\"x\")\n"
#define HOOK "FV_SCORE { return s; }\n"
#define PARAM(p) META "FV_PARAMS(\n" p "\n)\n" HOOK

/* Each text has one fault; `line` is where it stands. */
static const struct { int line; const char *text, *word;
} faults[] = {
    { 2, HOOK, "FV_META" },
    { 2, META, "no hook" },
    { 2, META "FV_LAST_KEY(position)\n" HOOK, "without FV_VISIBLE" },
    { 6, PARAM("FV_INT(a, run, 1, 1)") "FV_FIRST_KEY(position - a)\n", "without FV_VISIBLE" },
    { 3, META HOOK "FV_EXACT\n", "FV_EXACT without" },
    { 2, META "#include <math.h>\n" HOOK, "stands alone" },
    { 2, META "# /**/ include \"x\"\n" HOOK, "no directive" },
    { 2, META "#line 7\n" HOOK, "no directive" },
    { 2, META "%:include <math.h>\n" HOOK, "begin with #" },
    { 1, "FV_META(x)\n" HOOK, "string" },
    { 1, "FV_META()\n" HOOK, "string" },
    { 1, "FV_META(\"\")\n" HOOK, "empty" },
    { 1, "FV_META(\"abc\n)\n" HOOK, "no end" },
    { 2, META META HOOK, "second FV_META" },
    { 2, "FV_META(\"x\"\n" HOOK, "')' expected" },
    { 2, META "/* abc\n" HOOK, "no end" },
    { 3, META "\nFV_NONSENSE(a)\n" HOOK, "FV_NONSENSE" },
    { 2, META "FV_CAP = 3;\n" HOOK, "FV_CAP" },
    { 2, META "static int FV_SCORE { }\n", "start of a line" },
    { 2, META "FV_SCORE(s) { }\n", "'{' expected" },
    { 2, META "FV_SCORE { return (s; }\n", "closes the '('" },
    { 2, META "FV_SCORE { return s;\n\n", "never closed" },
    { 2, META "FV_SCORE {\n if (s) { return s;\n}\n", "never closed" },
    { 3, META HOOK "}\n", "closes nothing" },
    { 3, META HOOK "FV_SCORE { }\n", "second FV_SCORE" },
    { 6, META "#ifdef FV_SPEC\n" HOOK "#else\n" HOOK "FV_SINK { }\n#endif\n",
      "missing behind #ifdef" },
    { 3, META "#ifdef FV_SPEC\n" HOOK "#endif\n", "behind #else" },
    { 3, META "#ifndef FV_SPEC\n" HOOK "#endif\n", "behind #ifdef" },
    { 3, META HOOK "#ifdef FV_SPEC\n", "no #endif" },
    { 3, META HOOK "#else\n", "without #if" },
    { 3, META HOOK "#endif\n", "without #if" },
    { 4, PARAM("FV_NUMBER(a, run, 1, 1)\nFV_NUMBER(a, run, 1, 1)"), "taken" },
    { 4, PARAM("FV_RANGES(a, run, none)\nFV_INT(a_indptr, run, 1, 1)"), "taken" },
    { 3, PARAM("FV_NUMBER(a23456789012345678901234, run, 1, 1)"), "longer" },
    { 3, PARAM("FV_NUMBER(, run, 1, 1)"), "name expected" },
    { 4, PARAM("FV_NUMBER(a, run, 1, 1)\nFV_NUMBER(double, run, 1, 1)"), "'double' cannot name" },
    { 3, PARAM("FV_NUMBER(V_LANES, run, 1, 1)"), "'V_LANES' cannot name" },
    { 3, PARAM("FV_NUMBER(2a, run, 1, 1)"), "name expected" },
    { 3, PARAM("FV_FLOAT(a, run, 1, 1)"), "no kind of parameter" },
    { 3, PARAM("FV_NUMBER(a, sometimes, 1, 1)"), "no binding" },
    { 3, PARAM("FV_NUMBER(a, run, maybe, 1)"), "no default" },
    { 3, PARAM("FV_NUMBER(a, run, none, 1)"), "no default" },
    { 3, PARAM("FV_NUMBER(a, run, 1x, 1)"), "default" },
    { 3, PARAM("FV_NUMBER(a, run, 1)"), "',' expected" },
    { 3, PARAM("FV_NUMBER(a, run, 1, )"), "example" },
    { 3, PARAM("FV_NUMBER(a, run, 1, 1, 1)"), "')' expected" },
    { 3, PARAM("FV_NUMBER a, run, 1, 1"), "'(' expected" },
    { 3, PARAM("FV_INT(a, run, 1.5, 1)"), "whole" },
    { 3, PARAM("FV_INT(a, run, 1, 0.5)"), "whole" },
    { 3, PARAM("FV_INT(a, run, 1e10, 1)"), "whole" },
    { 3, PARAM("FV_FLOATS(a, run, lots, none)"), "no count" },
    { 3, PARAM("FV_FLOATS(a, run, 0, none)"), "count" },
    { 3, PARAM("FV_FLOATS(a, run, heads, 3)"), "default" },
    { 3, PARAM("FV_FLOATS(a, run, heads)"), "',' expected" },
    { 4, PARAM("FV_INT(d, problem, 2, 2)\nFV_FLOATS(a, problem, d/3, none)"), "divided by 2" },
    { 4, PARAM("FV_NUMBER(d, problem, 2, 2)\nFV_FLOATS(a, problem, d/2, none)"), "no count" },
    { 3, PARAM("FV_INTS(a, run, any, frequencies)"), "no default" },
    { 2, PARAM("FV_FLOATS(a, problem, heads, frequencies)"), "rotary_dim/2" },
    { 2, PARAM("FV_INT(d, problem, 2, 2)\nFV_FLOATS(a, problem, d/2, frequencies)"),
      "'rotary_dim'" },
    { 4, PARAM("FV_INT(rotary_dim, run, 2, 2)\nFV_FLOATS(a, problem, rotary_dim/2, frequencies)"),
      "'rotary_dim'" },
    { 4, PARAM("FV_INT(d, batch, 2, 2)\nFV_INTS(a, problem, d/2, none)"), "not be bound before 'd'" },
    { 2,
      PARAM("FV_INT(rotary_dim, problem, 2, 2)\nFV_NUMBER(base, run, 2, 2)\nFV_FLOATS(a, problem, "
            "rotary_dim/2, frequencies)"),
      "'base'" },
    { 3, PARAM("FV_RANGES(a, batch, frequencies)"), "no default" },
    { 3, PARAM("FV_BITS(a)"), "',' expected" },
    { 2, PARAM("FV_SUMS(a, run)"), "without FV_KEY_SUM" },
    { 2, PARAM("FV_MAXES(a, run)"), "without FV_ROW_MAX" },
    { 3, META "FV_PARAMS()\nFV_PARAMS()\n" HOOK, "second FV_PARAMS" },
    { 15,
      PARAM("FV_INT(a,run,1,1)\nFV_INT(b,run,1,1)\nFV_INT(c,run,1,1)\nFV_INT(d,run,1,1)\nFV_INT(e,"
            "run,1,1)\nFV_INT(f,run,1,1)\n"
            "FV_INT(g,run,1,1)\nFV_INT(h,run,1,1)\nFV_INT(i,run,1,1)\nFV_INT(j,run,1,1)\nFV_INT(k,"
            "run,1,1)\nFV_INT(l,run,1,1)\n"
            "FV_INT(m,run,1,1)"),
      "more than 12" },
    { 11,
      PARAM("FV_RANGES(a,run,none)\nFV_RANGES(b,run,none)\nFV_RANGES(c,run,none)\nFV_RANGES(d,run,"
            "none)\nFV_RANGES(e,run,none)\n"
            "FV_RANGES(f,run,none)\nFV_RANGES(g,run,none)\nFV_RANGES(h,run,none)\nFV_RANGES(i,run,"
            "none)"),
      "bytes" },
    { 6, PARAM("FV_NUMBER(a, run, 1, 1)") "FV_REQUIRE(b > 0)\n", "'b'" },
    { 6, PARAM("FV_BITS(a, run)") "FV_REQUIRE(a > 0)\n", "array" },
    { 6, PARAM("FV_NUMBER(a, run, 1, 1)") "FV_REQUIRE(a = 0)\n", "NAME >" },
    { 6, PARAM("FV_NUMBER(a, run, 1, 1)") "FV_REQUIRE(a > b)\n", "NAME >" },
    { 7, PARAM("FV_NUMBER(a, run, 1, 1)") "FV_REQUIRE(a > 0)\nFV_REQUIRE(a >= 0)\n", "same side" },
    { 7, PARAM("FV_NUMBER(a, run, 1, 1)") "\nFV_REQUIRE(a > 1)\n", "default 1" },
    { 6, PARAM("FV_NUMBER(a, run, 1, 0)") "FV_REQUIRE(a >= 1)\n", "example 0" },
    { 2, META "FV_REQUIRE(a > 0)\nFV_PARAMS(FV_NUMBER(a, run, 1, 1))\n" HOOK, "FV_PARAMS above" },
    { 6, PARAM("FV_INT(a, run, 1, 1)") "FV_FIRST_KEY(row - a)\n", "'position'" },
    { 6, PARAM("FV_INT(a, run, 1, 1)") "FV_FIRST_KEY(position - b)\n", "'b'" },
    { 6, PARAM("FV_NUMBER(a, run, 1, 1)") "FV_LAST_KEY(position + a)\n", "FV_INT" },
    { 6, PARAM("FV_INT(a, run, 1, 1)") "FV_LAST_KEY(position * a)\n", "')' expected" },
    { 7, PARAM("FV_INT(a, run, 1, 1)") "FV_LAST_KEY(position)\nFV_LAST_KEY(position)\n",
      "second FV_LAST_KEY" },
    { 6, PARAM("FV_INT(a, run, 1, 1)") "FV_LIFTED(a)\n", "FV_RANGES" },
    { 6, PARAM("FV_RANGES(a, run, none)") "FV_LIFTED(a)\n", "lifts nothing" },
    { 8, PARAM("FV_RANGES(a, run, none)") "FV_LAST_KEY(position)\nFV_LIFTED(a)\nFV_LIFTED(a)\n",
      "second FV_LIFTED" },
    { 4, META HOOK "FV_EXACT\nFV_EXACT\n", "second FV_EXACT" },
    { 6, PARAM("FV_INT(d, problem, 2, 2)") "FV_PAIRS(d, d)\n", "without FV_QUERY" },
    { 6, PARAM("FV_INT(d, problem, 2, 2)") "FV_PAIRS(d)\n", "',' expected" },
    { 3, META HOOK "FV_KEY { return x; }\n", "FV_PAIRS" },
    { 3, META "FV_PARAMS(FV_INT(d, run, 2, 2) FV_INT(i, problem, 0, 0))\nFV_PAIRS(d, i)\nFV_KEY { return x; }\n",
      "'d' says which pairs turn" },
    { 3, META "FV_PARAMS(FV_INT(d, problem, 2, 2) FV_INT(i, batch, 0, 0))\nFV_PAIRS(d, i)\nFV_KEY { return x; }\n",
      "'i' says which pairs turn" },
    { 6, PARAM("FV_INT(a, run, 1, 1)") "FV_TURNS(a)\n", "FV_FLOATS" },
    { 6, PARAM("FV_FLOATS(a, run, any, none)") "FV_TURNS(a)\n", "without FV_KEY" },
    { 7, PARAM("FV_FLOATS(a, run, any, none)") "FV_TURNS(a)\nFV_TURNS(a)\n", "second FV_TURNS" },
    { 3, META HOOK "FV_KEY_SUM { return p; }\n", "no FV_SUMS" },
    { 3, META HOOK "FV_ROW_MAX { return m; }\n", "no FV_MAXES" },
    { 3, META "FV_SINK { return 0; }\nFV_WEIGHT { return s; }\n", "FV_SINK" },
    { 2, META "FV_SCORE { char *s = \"abc; }\n", "no end" },
    { 2, META "FV_SCORE { return 'a; }\n", "no end" },
    { 3, "FV_META(\"x\")\nFV_PARAMS(\n", "expected" },
};

static void every_fault_has_its_line(void **state)
{
    (void)state;
    for (int i = 0; i < FV__COUNT(faults); i++) {
        fv__variant_meta m, before;
        memset(&m, 0x5A, sizeof m);
        memcpy(&before, &m, sizeof m);
        memset(&err, 0, sizeof err);
        const fv_status status = fv__variant_parse("user", faults[i].text, &m, &err);
        if (status != FV_E_COMPILE)
            fail_msg("fault %d is %s:\n%s", i, fv_status_name(status), faults[i].text);
        if (err.value != faults[i].line)
            fail_msg("fault %d: line %lld, not %d: %s\n%s", i, (long long)err.value, faults[i].line,
                     err.text, faults[i].text);
        if (!strstr(err.text, faults[i].word))
            fail_msg("fault %d: \"%s\" does not say \"%s\"", i, err.text, faults[i].word);
        assert_memory_equal(&m, &before, sizeof m);
        assert_int_equal(fv__variant_parse("user", faults[i].text, &m, NULL), FV_E_COMPILE);
    }
}

static void names_of_variants(void **state)
{
    (void)state;
    fv__variant_meta m;
    static const char *const bad[] = {
        NULL, "", "2a", "a-b", "a b", "a/b", "a2345678901234567890123456789012"
    };
    for (int i = 0; i < FV__COUNT(bad); i++)
        REFUSED(fv__variant_parse(bad[i], META HOOK, &m, &err), FV_E_INVALID, "name", "letters");
    REFUSED(fv__variant_parse("a", NULL, &m, &err), FV_E_INVALID, "text", "NULL");
    const size_t much = (1 << 20) + 1;
    char *text = malloc(much + 1);
    memset(text, ' ', much);
    text[much] = 0;
    REFUSED(fv__variant_parse("a", text, &m, &err), FV_E_INVALID, "text", "longer");
    free(text);
}

/* Pieces of the text above cut out, doubled and changed: an answer, never a crash. Sanitizer builds
 * look closer. */
static void broken_texts(void **state)
{
    (void)state;
    uint32_t x = 12345;
    char text[sizeof everything + 64];
    fv__variant_meta m;
    for (int round = 0; round < 20000; round++) {
        size_t n = sizeof everything - 1;
        memcpy(text, everything, sizeof everything);
        for (int edit = 0; edit < 3; edit++) {
            x = x * 1664525 + 1013904223;
            const size_t at = (x >> 8) % n, length = (x >> 3) % 40 + 1;
            if (x >> 31) {
                text[at] = "(){}\"'/*#\\\n,<>0 "[(x >> 5) & 15];
            } else if (at + length < n) {
                memmove(text + at, text + at + length, n - at - length + 1);
                n -= length;
            } else {
                text[at] = 0;
                n = at;
            }
            if (!n) break;
        }
        const fv_status status = fv__variant_parse("user", text, &m, &err);
        assert_true(status == FV_OK || status == FV_E_COMPILE);
        if (status != FV_OK) assert_true(err.value >= 1 && err.value <= 60);
    }
}

/* ------------------------------------------------------------------------------------ built-ins */

static void built_ins(void **state)
{
    (void)state;
    assert_true(fv__variant_count() > 0);
    for (int i = 0; i < fv__variant_count(); i++) {
        const fv_variant *v = fv__variant_builtin(i);
        fv__variant_meta m;
        OK(fv__variant_parse(v->meta.name, v->text, &m, &err));
        assert_memory_equal(&m, &v->meta, sizeof m);
        assert_ptr_equal(fv__variant_find(v->meta.name), v);
        assert_null(v->ctx);
        if (i) assert_true(strcmp(fv__variant_builtin(i - 1)->meta.name, v->meta.name) < 0);
        for (int k = 0; k < m.num_params; k++) assert_int_equal(m.params[k].offset % 16, 0);
    }
    assert_null(fv__variant_find("nothing"));
    assert_null(fv__variant_find(NULL));
    static const char *const needed[] = { "alibi",   "causal", "items", "key_sums",
                                          "mask",    "ranges", "rope",  "row_max",
                                          "sink",    "softcap", "tree", "window" };
    for (int i = 0; i < FV__COUNT(needed); i++) assert_non_null(fv__variant_find(needed[i]));
}

/* ------------------------------------------------------------------------------------- problems */

static fv_problem plain(void)
{
    return (fv_problem){ .q = "bf16",
                         .k = "bf16",
                         .v = "bf16",
                         .o = "f32",
                         .num_q_heads = 8,
                         .num_kv_heads = 2,
                         .dim_qk = 64 };
}

static void problem_defaults(void **state)
{
    (void)state;
    fv__problem p;
    fv_problem given = plain();
    OK(fv__problem_init(&given, &p, &err));
    assert_int_equal(p.q, FV__DTYPE_bf16);
    assert_int_equal(p.o, FV__DTYPE_f32);
    assert_int_equal(p.group, 4);
    assert_int_equal(p.dim_v, 64);
    assert_true(p.scale == 0.125f);
    assert_int_equal(p.alignment, 16);
    assert_int_equal(p.k_scale, FV__SCALE_NONE);
    assert_int_equal(p.hooks, 0);
    fv__problem_free(&p);
    given.num_kv_heads = 0, given.dim_v = 32, given.scale = -2, given.k_scale = "token_head",
    given.v_scale = "head", given.k = "fp8_e4m3";
    given.alignment = 2, given.lse_base2 = true;
    OK(fv__problem_init(&given, &p, &err));
    assert_int_equal(p.num_kv_heads, 8);
    assert_int_equal(p.dim_v, 32);
    assert_true(p.scale == -2 && p.lse_base2);
    assert_int_equal(p.k_scale, FV__SCALE_TOKEN_HEAD);
    assert_int_equal(p.v_scale, FV__SCALE_HEAD);
    fv__problem_free(&p);
    fv_problem latent = plain();
    latent.num_kv_heads = 1, latent.dim_qk = 576, latent.qk_tail = 64, latent.dim_v = 512,
    latent.v_in_k = true, latent.v = NULL;
    OK(fv__problem_init(&latent, &p, &err));
    assert_int_equal(p.v, p.k);
    fv__problem_free(&p);
}

#define BAD_PROBLEM(change, status, field, word)                                                   \
    do {                                                                                           \
        fv__problem bad;                                                                           \
        fv_problem g = plain();                                                                    \
        change;                                                                                    \
        REFUSED(fv__problem_init(&g, &bad, &err), status, field, word);                            \
        assert_int_equal(fv__problem_init(&g, &bad, NULL), status);                                \
    } while (0)

static void problems_refused(void **state)
{
    (void)state;
    fv__problem p;
    REFUSED(fv__problem_init(NULL, &p, &err), FV_E_INVALID, "problem", "NULL");
    BAD_PROBLEM(g.num_kv_heads = 3, FV_E_INVALID, "num_kv_heads", "is 3 and problem.num_q_heads 8");
    BAD_PROBLEM(g.num_q_heads = 0, FV_E_INVALID, "num_q_heads", "0");
    BAD_PROBLEM(g.num_q_heads = -8, FV_E_INVALID, "num_q_heads", "-8");
    BAD_PROBLEM(g.num_kv_heads = -1, FV_E_INVALID, "num_kv_heads", "-1");
    BAD_PROBLEM(g.num_q_heads = 1 << 20, FV_E_INVALID, "num_q_heads", "1048576");
    BAD_PROBLEM(g.q = NULL, FV_E_INVALID, "problem.q", "f16");
    BAD_PROBLEM(g.q = "fp8_e4m3", FV_E_INVALID, "problem.q", "fp8_e4m3");
    BAD_PROBLEM(g.o = "int8", FV_E_INVALID, "problem.o", "int8");
    BAD_PROBLEM(g.k = "float16", FV_E_INVALID, "problem.k", "float16");
    BAD_PROBLEM(g.k = NULL, FV_E_INVALID, "problem.k", "NULL");
    BAD_PROBLEM(g.v = NULL, FV_E_INVALID, "problem.v", "NULL");
    BAD_PROBLEM(g.dim_qk = 0, FV_E_INVALID, "dim_qk", "1 to 576");
    BAD_PROBLEM(g.dim_qk = 577, FV_E_INVALID, "dim_qk", "577");
    BAD_PROBLEM(g.dim_v = 577, FV_E_INVALID, "dim_v", "577");
    BAD_PROBLEM(g.dim_v = -1, FV_E_INVALID, "dim_v", "-1");
    BAD_PROBLEM(g.qk_tail = 64, FV_E_INVALID, "qk_tail", "0 to 63");
    BAD_PROBLEM((g.v_in_k = true, g.dim_v = 65), FV_E_INVALID, "dim_v", "65");
    BAD_PROBLEM((g.v_in_k = true, g.qk_tail = 8, g.dim_v = 60), FV_E_INVALID, "dim_v", "56");
    BAD_PROBLEM((g.v_in_k = true, g.v = "f16"), FV_E_INVALID, "problem.v", "same memory");
    BAD_PROBLEM((g.v_in_k = true, g.v_scale = "head"), FV_E_INVALID, "v_scale", "k_scale");
    BAD_PROBLEM(g.scale = NAN, FV_E_INVALID, "scale", "nan");
    BAD_PROBLEM(g.scale = 1e300, FV_E_INVALID, "scale", "1e+300");
    BAD_PROBLEM(g.scale = 1e-300, FV_E_INVALID, "scale", "1e-300");
    BAD_PROBLEM(g.k_scale = "row", FV_E_INVALID, "k_scale", "row");
    BAD_PROBLEM(g.alignment = 3, FV_E_INVALID, "alignment", "3");
    BAD_PROBLEM(g.alignment = -16, FV_E_INVALID, "alignment", "-16");
    BAD_PROBLEM(g.reserved[6] = 1, FV_E_INVALID, "reserved", "word 6");
    BAD_PROBLEM(g.page_order = "squares", FV_E_INVALID, "page_order", "rows or tiles");
    BAD_PROBLEM((g.page_order = "tiles", g.k = "int8"), FV_E_UNSUPPORTED, "page_order", "int8");
    BAD_PROBLEM((g.page_order = "tiles", g.k = "bf16", g.v = "f32"), FV_E_UNSUPPORTED, "page_order",
                "V is f32");
    BAD_PROBLEM((g.page_order = "tiles", g.k = g.v = "f16", g.dim_qk = 80), FV_E_UNSUPPORTED,
                "page_order", "80 wide");
    BAD_PROBLEM((g.page_order = "tiles", g.k = g.v = "f16", g.dim_v = 16), FV_E_UNSUPPORTED,
                "page_order", "16 wide");
    BAD_PROBLEM((g.page_order = "tiles", g.k = g.v = "f16", g.qk_tail = 32), FV_E_UNSUPPORTED,
                "page_order", "a tail");
    BAD_PROBLEM((g.page_order = "tiles", g.k = g.v = "f16", g.v_in_k = true), FV_E_UNSUPPORTED,
                "page_order", "V in it");
    BAD_PROBLEM((g.k = "fp4_e2m1", g.dim_qk = 40), FV_E_INVALID, "dim_qk", "16");
    BAD_PROBLEM((g.v = "fp4_e2m1", g.dim_v = 8), FV_E_INVALID, "dim_v", "16");
    BAD_PROBLEM((g.k = "fp4_e2m1", g.qk_tail = 16), FV_E_UNSUPPORTED, "qk_tail", "tail");
    BAD_PROBLEM((g.k = "int4", g.dim_qk = 48), FV_E_INVALID, "dim_qk", "32");
    BAD_PROBLEM((g.v = "int4", g.dim_v = 16), FV_E_INVALID, "dim_v", "32");
    BAD_PROBLEM((g.k = "int4", g.qk_tail = 32), FV_E_UNSUPPORTED, "qk_tail", "int4");
    BAD_PROBLEM(g.num_variants = 9, FV_E_INVALID, "num_variants", "0 to 8");
    BAD_PROBLEM(g.num_variants = -1, FV_E_INVALID, "num_variants", "-1");
    BAD_PROBLEM(g.num_variants = 1, FV_E_INVALID, "problem.variants", "NULL");
}

/* ------------------------------------------------------------------------------------ arguments */

/* A problem with up to three variants; arguments of the first. */
static fv_status with(const char *a, const char *b, const char *c, const fv_arg *args, int num_args,
                      fv__problem *p)
{
    fv_variant_use uses[3] = { { .name = a, .args = args, .num_args = num_args },
                               { .name = b },
                               { .name = c } };
    fv_problem given = plain();
    given.variants = uses;
    given.num_variants = 1 + (b != NULL) + (c != NULL);
    return fv__problem_init(&given, p, &err);
}

static fv_arg number(const char *name, double x)
{
    return (fv_arg){ .name = name, .number = x };
}

static fv_arg tensor(const char *name, const fv_tensor *t)
{
    return (fv_arg){ .name = name, .tensor = t };
}

static fv_tensor vector(void *data, const char *dtype, int64_t count)
{
    return (
        fv_tensor){ .data = data, .dtype = dtype, .ndim = 1, .shape = { count }, .stride = { 1 } };
}

static fv_tensor matrix(void *data, const char *dtype, int64_t rows, int64_t columns)
{
    return (fv_tensor){ .data = data,
                        .dtype = dtype,
                        .ndim = 2,
                        .shape = { rows, columns },
                        .stride = { columns, 1 } };
}

static const fv__param *param_of(const fv__problem *p, int use, const char *name, const void **at)
{
    const fv__variant_meta *meta = &p->uses[use].variant->meta;
    for (int k = 0; k < meta->num_params; k++)
        if (!strcmp(meta->params[k].name, name)) {
            *at = p->uses[use].args + meta->params[k].offset;
            return &meta->params[k];
        }
    fail_msg("no parameter %s", name);
    return NULL;
}

static double value_of(const fv__problem *p, int use, const char *name)
{
    const void *at = NULL;
    const fv__param *param = param_of(p, use, name, &at);
    return param->kind == FV__INT ? *(const int32_t *)at : (double)*(const float *)at;
}

static fv_status bind(fv__problem *p, fv__binding when, const fv_arg *args, int n,
                      const fv__bind_shape *shape)
{
    static const char *const others[] = { "k_scale" };
    return fv__problem_bind(p, when, when == FV__BIND_RUN ? "tensors.args" : "batch.args", args, n,
                            others, when == FV__BIND_RUN, shape, &err);
}

static const fv__bind_shape two_requests = { .num_requests = 2,
                                             .total_rows = 10,
                                             .total_keys = 50,
                                             .max_rows = 32,
                                             .mask_rows = -1,
                                             .mask_keys = -1 };

static void variants_by_name(void **state)
{
    (void)state;
    fv__problem p;
    OK(with("causal", "softcap", "window", NULL, 0, &p));
    assert_int_equal(p.num_uses, 3);
    assert_int_equal(p.hooks, 1u << FV__HOOK_SCORE | 1u << FV__HOOK_VISIBLE);
    fv__problem_free(&p);
    REFUSED(with("casual", NULL, NULL, NULL, 0, &p), FV_E_INVALID, "problem.variants[0]", "causal");
    REFUSED(with("", NULL, NULL, NULL, 0, &p), FV_E_INVALID, "problem.variants[0]", "no variant");
    fv_variant_use use = { .name = "window", .variant = fv__variant_find("causal") };
    fv_problem given = plain();
    given.variants = &use, given.num_variants = 1;
    REFUSED(fv__problem_init(&given, &p, &err), FV_E_INVALID, "problem.variants[0]", "handle");
    use.name = NULL;
    OK(fv__problem_init(&given, &p, &err));
    fv__problem_free(&p);
    use.reserved = 4;
    REFUSED(fv__problem_init(&given, &p, &err), FV_E_INVALID, "problem.variants[0]", "reserved");
}

static void window_time(void **state)
{
    (void)state;
    fv__problem p, step;
    OK(with("window", NULL, NULL, NULL, 0, &p));                        /* by default: no bound */
    assert_true(value_of(&p, 0, "left") == FV__NO_BOUND && p.uses[0].planned[0] == FV__NO_BOUND);
    step = p;
    OK(bind(&step, FV__BIND_RUN, &(fv_arg[]){ number("left", 12) }[0], 1, &two_requests));
    assert_true(value_of(&step, 0, "left") == 12 && step.uses[0].planned[0] == FV__NO_BOUND);
    fv__problem_free(&p);

    const fv_arg left = number("left", 100), zero = number("left", 0), wide = number("left", 101),
                 endless = number("left", INFINITY);
    OK(with("window", NULL, NULL, &left, 1, &p));
    assert_true(p.uses[0].planned[0] == 100 && value_of(&p, 0, "left") == 100);
    step = p;
    OK(bind(&step, FV__BIND_RUN, &zero, 1, &two_requests));             /* 0 is 0: only itself */
    assert_true(value_of(&step, 0, "left") == 0);
    step = p;
    REFUSED(bind(&step, FV__BIND_RUN, &wide, 1, &two_requests), FV_E_INVALID, "tensors.args.left",
            "made for 100");
    step = p;
    REFUSED(bind(&step, FV__BIND_RUN, &endless, 1, &two_requests), FV_E_INVALID,
            "tensors.args.left", "made for 100");
    step = p;
    OK(bind(&step, FV__BIND_BATCH, &(fv_arg[]){ number("left", 50) }[0], 1, &two_requests));
    assert_true(step.uses[0].planned[0] == 50);
    REFUSED(bind(&step, FV__BIND_RUN, &left, 1, &two_requests), FV_E_INVALID, "tensors.args.left",
            "made for 50");
    fv__problem_free(&p);

    const fv_arg bad[] = { number("left", -1), number("left", 1.5), number("left", NAN),
                           number("left", -INFINITY) };
    for (int i = 0; i < FV__COUNT(bad); i++)
        assert_int_equal(with("window", NULL, NULL, &bad[i], 1, &p), FV_E_INVALID);
    REFUSED(with("window", NULL, NULL, &bad[0], 1, &p), FV_E_INVALID, "variants[0].args.left",
            "must be >= 0");
    static const double far[] = { 1073741825, 2147483647, 3e9, 1e300, -3e9 };
    for (int i = 0; i < FV__COUNT(far); i++)                            /* not taken for inf */
        REFUSED(with("window", NULL, NULL, &(fv_arg){ .name = "left", .number = far[i] }, 1, &p),
                FV_E_INVALID, "variants[0].args.left", "at most 2^30 = 1073741824, and inf is");
    OK(with("window", NULL, NULL, &(fv_arg){ .name = "left", .number = 1 << 30 }, 1, &p));
    fv__problem_free(&p);
}

static void numbers(void **state)
{
    (void)state;
    fv__problem p;
    OK(with("softcap", NULL, NULL, NULL, 0, &p)); /* due at run time: may still come */
    OK(fv__problem_bound(&p, FV__BIND_BATCH, &err));
    REFUSED(fv__problem_bound(&p, FV__BIND_RUN, &err), FV_E_INVALID, "tensors.args.cap",
            "softcap needs 'cap'");
    static const double bad[] = { 0, -1, NAN, INFINITY, 1e300 };
    for (int i = 0; i < FV__COUNT(bad); i++)
        REFUSED(
            bind(&p, FV__BIND_RUN, &(fv_arg){ .name = "cap", .number = bad[i] }, 1, &two_requests),
            FV_E_INVALID, "cap", "cap");
    OK(bind(&p, FV__BIND_RUN, &(fv_arg){ .name = "cap", .number = 30 }, 1, &two_requests));
    OK(fv__problem_bound(&p, FV__BIND_RUN, &err));
    assert_true(value_of(&p, 0, "cap") == 30);
    float one = 1;
    const fv_tensor t = vector(&one, "f32", 1);
    REFUSED(bind(&p, FV__BIND_RUN, &(fv_arg){ .name = "cap", .tensor = &t }, 1, &two_requests),
            FV_E_INVALID, "cap", "not a tensor");
    fv__problem_free(&p);
}

static void lists(void **state)
{
    (void)state;
    fv__problem p;
    const fv_arg twice[] = { number("left", 5), number("left", 6) };
    REFUSED(with("window", NULL, NULL, twice, 2, &p), FV_E_INVALID, "left", "twice");
    REFUSED(with("window", NULL, NULL, &(fv_arg){ .name = "middle" }, 1, &p), FV_E_INVALID,
            "middle", "no variant");
    REFUSED(with("window", NULL, NULL, &(fv_arg){ .name = NULL }, 1, &p), FV_E_INVALID, "args",
            "no name");
    REFUSED(with("window", NULL, NULL, &(fv_arg){ .name = "left", .reserved = 1 }, 1, &p),
            FV_E_INVALID, "left", "reserved");
    REFUSED(with("window", NULL, NULL, NULL, 2, &p), FV_E_INVALID, "args", "NULL");
    REFUSED(with("window", NULL, NULL, twice, -1, &p), FV_E_INVALID, "args", "-1");
    OK(with("window", "window", "causal", NULL, 0, &p));
    REFUSED(bind(&p, FV__BIND_RUN, twice, 1, &two_requests), FV_E_INVALID, "left", "2 variants");
    REFUSED(bind(&p, FV__BIND_RUN, &(fv_arg){ .name = "rotary_dim" }, 1, &two_requests),
            FV_E_INVALID, "rotary_dim", "no variant");
    OK(bind(&p, FV__BIND_RUN, &(fv_arg){ .name = "k_scale", .number = 3 }, 1,
            &two_requests)); /* somebody else's */
    REFUSED(bind(&p, FV__BIND_BATCH, &(fv_arg){ .name = "k_scale", .number = 3 }, 1, &two_requests),
            FV_E_INVALID, "k_scale", "no variant");
    fv__problem_free(&p);
    OK(with("window", "softcap", NULL, NULL, 0, &p));
    OK(bind(&p, FV__BIND_RUN, &(fv_arg[]){ number("window.right", 3), number("softcap.cap", 7) }[0],
            2, &two_requests));
    assert_true(value_of(&p, 0, "right") == 3 && value_of(&p, 1, "cap") == 7);
    REFUSED(bind(&p, FV__BIND_RUN, &(fv_arg[]){ number("window.right", 3), number("right", 3) }[0],
                 2, &two_requests),
            FV_E_INVALID, "right", "twice");
    fv__problem_free(&p);
    OK(with("window", "window", NULL, NULL, 0, &p));
    REFUSED(bind(&p, FV__BIND_RUN, &(fv_arg[]){ number("right", 3) }[0], 1, &two_requests),
            FV_E_INVALID, "right", "say \"variant.parameter\"");
    REFUSED(bind(&p, FV__BIND_RUN, &(fv_arg[]){ number("window.right", 3) }[0], 1, &two_requests),
            FV_E_INVALID, "right", "fv_variant_use.args of the one that is meant");
    fv__problem_free(&p);
    const fv_arg dim = number("rotary_dim", 32);
    OK(with("rope", NULL, NULL, &dim, 1, &p));
    REFUSED(bind(&p, FV__BIND_BATCH, &dim, 1, &two_requests), FV_E_INVALID, "batch.args.rotary_dim",
            "belongs to problem");
    fv__problem_free(&p);
    OK(with("causal", NULL, NULL, NULL, 0, &p));
    int32_t range[2] = { 0, 5 };
    const fv_tensor t = matrix(range, "i32", 1, 2);
    REFUSED(bind(&p, FV__BIND_RUN, &(fv_arg[]){ tensor("lift", &t) }[0], 1, &two_requests),
            FV_E_INVALID, "tensors.args.lift", "belongs to batch");
    fv__problem_free(&p);
}

static void arrays(void **state)
{
    (void)state;
    fv__problem p;
    float slopes[8] = { 0 };
    OK(with("alibi", "sink", NULL, NULL, 0, &p));
    fv_tensor t = vector(slopes, "f32", 8);
    fv_arg list[2] = { tensor("slopes", &t), tensor("sinks", &t) };
    OK(bind(&p, FV__BIND_RUN, list, 2, &two_requests));
    OK(fv__problem_bound(&p, FV__BIND_RUN, &err));
    const void *at = NULL;
    param_of(&p, 0, "slopes", &at);
    assert_ptr_equal(((const fv_floats *)at)->data, slopes);
    assert_int_equal(((const fv_floats *)at)->count, 8);
    t.dtype = NULL;
    OK(bind(&p, FV__BIND_RUN, list, 1, &two_requests));
#define BAD_TENSOR(change, word)                                                                   \
    do {                                                                                           \
        t = vector(slopes, "f32", 8);                                                              \
        change;                                                                                    \
        REFUSED(bind(&p, FV__BIND_RUN, list, 1, &two_requests), FV_E_INVALID, "slopes", word);     \
    } while (0)
    BAD_TENSOR(t.shape[0] = 7, "7 entries; expected 8");
    BAD_TENSOR(t.shape[0] = -8, "-8");
    BAD_TENSOR(t.dtype = "f16", "f16");
    BAD_TENSOR(t.ndim = 2, "2 axes");
    BAD_TENSOR(t.stride[0] = 2, "stride 2");
    BAD_TENSOR(t.data = NULL, "NULL");
    BAD_TENSOR(t.data = (char *)slopes + 2, "aligned");
    BAD_TENSOR(t.reserved = 1, "reserved");
    list[0].number = 3;
    BAD_TENSOR((void)0, "as the number 3");
    list[0].tensor = NULL;
    BAD_TENSOR((void)0, "not a number");
    fv__problem_free(&p);

    int32_t parents[40] = { 0 };
    OK(with("tree", NULL, NULL, NULL, 0, &p));
    REFUSED(fv__problem_bound(&p, FV__BIND_BATCH, &err), FV_E_INVALID, "batch.args.parents",
            "tree needs");
    static const struct {
        int64_t count;
        fv_status want;
    } rows[] = { { 10, FV_OK }, { 32, FV_OK }, { 9, FV_E_INVALID }, { 31, FV_E_INVALID } };
    for (int i = 0; i < FV__COUNT(rows); i++) {
        t = vector(parents, "i32", rows[i].count);
        assert_int_equal(
            bind(&p, FV__BIND_BATCH, &(fv_arg[]){ tensor("parents", &t) }[0], 1, &two_requests),
            rows[i].want);
    }
    fv__problem_free(&p);
    t = vector(parents, "i32", 11); /* known early, counted when the rows are */
    OK(with("tree", NULL, NULL, &(fv_arg[]){ tensor("parents", &t) }[0], 1, &p));
    REFUSED(bind(&p, FV__BIND_BATCH, NULL, 0, &two_requests), FV_E_INVALID, "parents",
            "11 entries; expected 10");
    fv__problem_free(&p);
}

/* S058 and its relatives: a dense mask that does not fit. */
static void masks(void **state)
{
    (void)state;
    static const int64_t one[] = { 0, 200 }, two[] = { 0, 64, 160 };
    const fv__bind_shape alone = { .num_requests = 1,
                                   .total_rows = 10,
                                   .total_keys = 20,
                                   .bits_offsets = one,
                                   .mask_rows = 10,
                                   .mask_keys = 20 };
    const fv__bind_shape both = { .num_requests = 2,
                                  .total_rows = 10,
                                  .total_keys = 20,
                                  .bits_offsets = two,
                                  .mask_rows = -1,
                                  .mask_keys = -1 };
    uint8_t bits[64] = { 0 };
    fv__problem p;
    OK(with("mask", NULL, NULL, NULL, 0, &p));
    assert_true(fv__problem_has_bits(&p));
    REFUSED(fv__problem_bound(&p, FV__BIND_BATCH, &err), FV_E_INVALID, "batch.args.bits",
            "mask needs 'bits'");
    fv_tensor t = matrix(bits, "b1", 10, 15);
    const fv_arg arg = tensor("bits", &t);
    REFUSED(bind(&p, FV__BIND_BATCH, &arg, 1, &alone), FV_E_INVALID, "bits",
            "10 x 15 bits; expected 10 x 20");
    assert_true(err.value == 15 && err.limit == 20);
    t = matrix(bits, "b1", 9, 20);
    REFUSED(bind(&p, FV__BIND_BATCH, &arg, 1, &alone), FV_E_INVALID, "bits",
            "9 x 20 bits; expected 10 x 20");
    t = matrix(bits, "b1", 10, 20);
    OK(bind(&p, FV__BIND_BATCH, &arg, 1, &alone));
    const void *at = NULL;
    param_of(&p, 0, "bits", &at);
    assert_ptr_equal(((const fv_bits *)at)->bits, bits);
    assert_ptr_equal(((const fv_bits *)at)->offsets, one);
    t.stride[0] = 24;
    REFUSED(bind(&p, FV__BIND_BATCH, &arg, 1, &alone), FV_E_INVALID, "bits", "dense");
    t = matrix(bits, "b1", 10, 20);
    REFUSED(bind(&p, FV__BIND_BATCH, &arg, 1, &both), FV_E_INVALID, "bits", "2 requests");
    t = vector(bits, "b1", 200);
    OK(bind(&p, FV__BIND_BATCH, &arg, 1, &alone));
    t = vector(bits, "b1", 150);
    REFUSED(bind(&p, FV__BIND_BATCH, &arg, 1, &alone), FV_E_INVALID, "bits",
            "150 bits; expected 200 (10 rows x 20 keys)");
    t = vector(bits, "u8", 25);
    OK(bind(&p, FV__BIND_BATCH, &arg, 1, &alone));
    t = vector(bits, "u8", 20);
    OK(bind(&p, FV__BIND_BATCH, &arg, 1, &both));
    t = vector(bits, "b1", 152);
    REFUSED(bind(&p, FV__BIND_BATCH, &arg, 1, &both), FV_E_INVALID, "bits",
            "152 bits; expected 160");
    t = vector(bits, "i32", 200);
    REFUSED(bind(&p, FV__BIND_BATCH, &arg, 1, &alone), FV_E_INVALID, "bits", "i32");
    REFUSED(bind(&p, FV__BIND_BATCH, &(fv_arg){ .name = "bits", .number = 1 }, 1, &alone),
            FV_E_INVALID, "bits", "not a number");
    fv__problem_free(&p);
    t = vector(bits, "b1", 200);
    REFUSED(with("mask", NULL, NULL, &arg, 1, &p), FV_E_INVALID, "bits", "batch.args");
}

static void range_lists(void **state)
{
    (void)state;
    fv__problem p;
    int32_t ranges[] = { 0, 4, 4, 9, 20, 20 }, offsets[] = { 0, 1, 3, 3 };
    fv_tensor t = matrix(ranges, "i32", 3, 2), o = vector(offsets, "i32", 3);
    OK(with("ranges", NULL, NULL, NULL, 0, &p));
    REFUSED(fv__problem_bound(&p, FV__BIND_BATCH, &err), FV_E_INVALID, "batch.args.ranges",
            "ranges needs");
    const fv_arg both[] = { tensor("ranges_indptr", &o), tensor("ranges", &t) };
    OK(bind(&p, FV__BIND_BATCH, both, 2, &two_requests));
    OK(fv__problem_check_ranges(&p, 2, &err));
    const void *at = NULL;
    param_of(&p, 0, "ranges", &at);
    const fv_ranges *list = at;
    assert_true(list->ranges == ranges && list->indptr == offsets && list->count == 3);

    offsets[2] = 4;
    REFUSED(fv__problem_check_ranges(&p, 2, &err), FV_E_INVALID, "ranges",
            "request 1 the ranges [1, 4) of 3");
    assert_int_equal(err.request, 1);
    offsets[1] = -1;
    REFUSED(fv__problem_check_ranges(&p, 2, &err), FV_E_INVALID, "ranges", "request 0");
    offsets[1] = 3, offsets[2] = 2;
    REFUSED(fv__problem_check_ranges(&p, 2, &err), FV_E_INVALID, "ranges", "request 1");
    offsets[1] = 3, offsets[2] = 3;
    ranges[2] = 3;
    REFUSED(fv__problem_check_ranges(&p, 2, &err), FV_E_INVALID, "ranges", "begins at 3");
    ranges[2] = 10;
    REFUSED(fv__problem_check_ranges(&p, 2, &err), FV_E_INVALID, "ranges", "ends before");
    ranges[2] = 4;

    o = vector(offsets, "i32", 4);
    REFUSED(bind(&p, FV__BIND_BATCH, both, 2, &two_requests), FV_E_INVALID, "ranges",
            "4 entries; expected 3");
    o = vector(offsets, "i64", 3);
    REFUSED(bind(&p, FV__BIND_BATCH, both, 2, &two_requests), FV_E_INVALID, "ranges_indptr", "i64");
    t = matrix(ranges, "i32", 2, 3);
    REFUSED(bind(&p, FV__BIND_BATCH, both + 1, 1, &two_requests), FV_E_INVALID, "ranges",
            "3 columns");
    fv__problem_free(&p);

    OK(with("causal", NULL, NULL, NULL, 0, &p)); /* no list is fine there; offsets alone are not */
    OK(fv__problem_bound(&p, FV__BIND_RUN, &err));
    OK(fv__problem_check_ranges(&p, 2, &err));
    o = vector(offsets, "i32", 3);
    REFUSED(bind(&p, FV__BIND_BATCH, &(fv_arg[]){ tensor("lift_indptr", &o) }[0], 1, &two_requests),
            FV_E_INVALID, "lift", "without 'lift'");
    fv__problem_free(&p);
    OK(with("ranges", NULL, NULL, NULL, 0, &p)); /* an empty list is a list */
    t = matrix(NULL, "i32", 0, 2);
    OK(bind(&p, FV__BIND_BATCH, both + 1, 1, &two_requests));
    OK(fv__problem_bound(&p, FV__BIND_BATCH, &err));
    param_of(&p, 0, "ranges", &at);
    assert_true(((const fv_ranges *)at)->ranges != NULL && ((const fv_ranges *)at)->count == 0);
    fv__problem_free(&p);
}

static void sums(void **state)
{
    (void)state;
    fv__problem p;
    float out[2 * 60];
    OK(with("key_sums", NULL, NULL, NULL, 0, &p));
    REFUSED(fv__problem_bound(&p, FV__BIND_RUN, &err), FV_E_INVALID, "tensors.args.key_sums",
            "key_sums needs");
    fv_tensor t = matrix(out, "f32", 2, 50);
    const fv_arg arg = tensor("key_sums", &t);
    t.stride[0] = 60;
    OK(bind(&p, FV__BIND_RUN, &arg, 1, &two_requests));
    const void *at = NULL;
    param_of(&p, 0, "key_sums", &at);
    assert_true(((const fv_sums *)at)->data == out && ((const fv_sums *)at)->stride == 60);
    t = matrix(out, "f32", 2, 49);
    REFUSED(bind(&p, FV__BIND_RUN, &arg, 1, &two_requests), FV_E_INVALID, "key_sums",
            "[2, 49]; expected [2, 50]");
    t = matrix(out, "f32", 8, 50);
    REFUSED(bind(&p, FV__BIND_RUN, &arg, 1, &two_requests), FV_E_INVALID, "key_sums", "[8, 50]");
    t = matrix(out, "f32", 2, 50);
    t.stride[0] = 40;
    REFUSED(bind(&p, FV__BIND_RUN, &arg, 1, &two_requests), FV_E_INVALID, "key_sums", "overlap");
    fv__problem_free(&p);
    t = matrix(out, "f32", 2, 50);
    REFUSED(with("key_sums", NULL, NULL, &arg, 1, &p), FV_E_INVALID, "key_sums", "tensors.args");
}

/* A caller's rows may be more than the batch's; which are right is known once the batch is. */
static void maxes(void **state)
{
    (void)state;
    fv__problem p;
    float out[12 * 40];
    OK(with("row_max", NULL, NULL, NULL, 0, &p));
    const int64_t rows = two_requests.total_rows, heads = p.num_q_heads;
    assert_true((rows + 2) * 40 <= FV__COUNT(out) && heads <= 40);
    REFUSED(fv__problem_bound(&p, FV__BIND_RUN, &err), FV_E_INVALID, "tensors.args.row_max",
            "row_max needs");
    fv_tensor t = matrix(out, "f32", rows + 2, heads);
    const fv_arg arg = tensor("row_max", &t);
    t.stride[0] = 40;
    OK(bind(&p, FV__BIND_RUN, &arg, 1, &two_requests));
    const void *at = NULL;
    param_of(&p, 0, "row_max", &at);
    assert_true(((const fv_maxes *)at)->data == out && ((const fv_maxes *)at)->stride == 40);
    t = matrix(out, "f32", rows - 1, heads);
    REFUSED(bind(&p, FV__BIND_RUN, &arg, 1, &two_requests), FV_E_INVALID, "row_max", "expected [");
    t = matrix(out, "f32", rows, heads - 1);
    REFUSED(bind(&p, FV__BIND_RUN, &arg, 1, &two_requests), FV_E_INVALID, "row_max", "expected [");
    t = matrix(out, "f32", rows, heads);
    t.stride[0] = heads - 1;
    REFUSED(bind(&p, FV__BIND_RUN, &arg, 1, &two_requests), FV_E_INVALID, "row_max", "overlap");
    fv__problem_free(&p);
    t = matrix(out, "f32", rows, heads);
    REFUSED(with("row_max", NULL, NULL, &arg, 1, &p), FV_E_INVALID, "row_max", "tensors.args");
}

/* The frequencies that a variant gets by default are those of fv_rope_frequencies. */
static void frequencies(void **state)
{
    (void)state;
    fv__problem p;
    const fv_arg llama[] = { number("rotary_dim", 64),      number("base", 500000),
                             number("factor", 8),           number("low_freq_factor", 1),
                             number("high_freq_factor", 4), number("original_context", 8192) };
    float want[32], own[8] = { 1, 0.5f, 0.25f, 0.125f, 1, 1, 1, 1 };
    OK(fv_rope_frequencies(&(fv_rope_desc){ .rotary_dim = 64,
                                            .base = 500000,
                                            .factor = 8,
                                            .low_freq_factor = 1,
                                            .high_freq_factor = 4,
                                            .original_context = 8192 },
                           want, &err));
    OK(with("rope", NULL, NULL, llama, 6, &p));
    const void *at = NULL;
    param_of(&p, 0, "frequencies", &at);
    assert_int_equal(((const fv_floats *)at)->count, 32);
    assert_memory_equal(((const fv_floats *)at)->data, want, sizeof want);
    fv__problem_free(&p);

    const fv_tensor t = vector(own, "f32", 8);
    OK(with("rope", NULL, NULL,
            &(fv_arg[]){ tensor("frequencies", &t), number("rotary_dim", 16) }[0], 2, &p));
    param_of(&p, 0, "frequencies", &at);
    assert_ptr_equal(((const fv_floats *)at)->data, own);
    assert_null(p.uses[0].owned);
    fv__problem_free(&p);
    REFUSED(with("rope", NULL, NULL,
                 &(fv_arg[]){ tensor("frequencies", &t), number("rotary_dim", 18) }[0], 2, &p),
            FV_E_INVALID, "frequencies", "8 entries; expected 9");
    REFUSED(with("rope", NULL, NULL, NULL, 0, &p), FV_E_INVALID, "rotary_dim",
            "rope needs 'rotary_dim'");
    const double bad[] = { 15, 66, -2 }; /* odd, wider than the head, negative */
    for (int i = 0; i < FV__COUNT(bad); i++)
        assert_int_equal(
            with("rope", NULL, NULL, &(fv_arg[]){ number("rotary_dim", bad[i]) }[0], 1, &p),
            FV_E_INVALID);
    REFUSED(with("rope", NULL, NULL, &(fv_arg[]){ number("rotary_dim", 16), number("base", -1) }[0],
                 2, &p),
            FV_E_INVALID, "base", "positive");
    fv__os_fail_at = 1;
    REFUSED(with("rope", NULL, NULL, llama, 6, &p), FV_E_NO_MEMORY, "problem.variants[0]",
            "no memory");
    fv__os_fail_at = 0;
}

/* ------------------------------------------------------------------------------- users' variants */

static void silent(void *user, fv_log_level level, const char *line)
{
    (void)user, (void)level, (void)line;
}

static void users_variants(void **state)
{
    (void)state;
    static const char text[] = META "FV_PARAMS(FV_NUMBER(gain, run, 1, 2))\n"
                                    "#ifdef FV_SPEC\nFV_SCORE { return s * a->gain; }\n"
                                    "#else\nFV_SCORE { return s * a->gain; }\n#endif\n";
    fv_ctx *ctx = NULL;
    fv_variant *v = NULL;
    OK(fv_open(&(fv_open_desc){ .device = "cpu",
                                .num_threads = 1,
                                .cache_dir = "/dev/null/none",
                                .log = silent },
               &ctx, &err));
    REFUSED(fv_variant_create(NULL, "a", text, &v, &err), FV_E_INVALID, "ctx", "NULL");
    REFUSED(fv_variant_create(ctx, "a", text, NULL, &err), FV_E_INVALID, "variant", "NULL");
    REFUSED(fv_variant_create(ctx, "a", META, &v, &err), FV_E_COMPILE, "a", "line 2");
    REFUSED(fv_variant_create(ctx, "causal", text, &v, &err), FV_E_INVALID, "name", "built-in");
    assert_null(v);
    fv__os_fail_at = 1;
    REFUSED(fv_variant_create(ctx, "a", text, &v, &err), FV_E_NO_MEMORY, "text", "no memory");
    fv__os_fail_at = 0;
    char changing[sizeof text];                         /* the text is copied */
    memcpy(changing, text, sizeof text);
    OK(fv_variant_create(ctx, "gain", changing, &v, &err));
    memset(changing, 'x', sizeof changing);
    assert_string_equal(v->text, text);
    assert_string_equal(v->meta.name, "gain");
    assert_int_equal(fv_close(&ctx), FV_E_BUSY);

    fv__problem p;
    fv_variant_use use = { .variant = v };
    fv_problem given = plain();
    given.variants = &use, given.num_variants = 1;
    OK(fv__problem_init(&given, &p, &err));
    OK(bind(&p, FV__BIND_RUN, &(fv_arg){ .name = "gain", .number = 3 }, 1, &two_requests));
    assert_true(value_of(&p, 0, "gain") == 3);
    fv__problem_free(&p);

    __atomic_add_fetch(&v->users, 1, __ATOMIC_SEQ_CST); /* as a plan does */
    assert_int_equal(fv_variant_destroy(&v), FV_E_BUSY);
    __atomic_sub_fetch(&v->users, 1, __ATOMIC_SEQ_CST);
    OK(fv_variant_destroy(&v));
    assert_null(v);
    OK(fv_variant_destroy(&v));
    OK(fv_variant_destroy(NULL));
    OK(fv_close(&ctx));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_declaration),
        cmocka_unit_test(every_hook),
        cmocka_unit_test(every_fault_has_its_line),
        cmocka_unit_test(names_of_variants),
        cmocka_unit_test(broken_texts),
        cmocka_unit_test(built_ins),
        cmocka_unit_test(problem_defaults),
        cmocka_unit_test(problems_refused),
        cmocka_unit_test(variants_by_name),
        cmocka_unit_test(window_time),
        cmocka_unit_test(numbers),
        cmocka_unit_test(lists),
        cmocka_unit_test(arrays),
        cmocka_unit_test(masks),
        cmocka_unit_test(range_lists),
        cmocka_unit_test(sums), cmocka_unit_test(maxes),
        cmocka_unit_test(frequencies),
        cmocka_unit_test(users_variants),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
