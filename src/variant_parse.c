/* SPDX-License-Identifier: Apache-2.0 */
/* variant_parse.c -- reads the declarations of a variant's text (variant.h says which) and nothing
 * else: what lies between braces is the compiler's business. It never runs or compiles anything.
 *
 * Nouns
 *   scanner   a place in the text and its line; skips blanks, comments and preprocessor lines
 *   half      the part of the text behind `#ifdef FV_SPEC` (in double) or behind its `#else` (in
 *             v_* words); outside of both: for both
 * Strict: whatever begins with FV_ at the top level must be a declaration or a hook; each hook must
 * exist in both halves; names must be known before they are used. Every fault names the line on
 * which the wrong thing stands. */
#include "variant.h"

#include <ctype.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_TEXT  (1 << 20)         /* bytes */
#define MAX_IFS   32                /* nested #if */
#define MAX_WORD  64

enum half { BOTH, SPEC, VECTOR, LIVE };

typedef struct scanner {
    const char *name;               /* of the variant, for messages */
    const char *at;
    int line;
    bool line_start;                /* nothing but blanks stands before `at` on its line */
    enum half ifs[MAX_IFS];         /* what each open #if chose; BOTH: not about FV_SPEC; LIVE: #if 1 */
    int if_line[MAX_IFS];
    int num_ifs;
    fv__variant_meta *meta;
    uint32_t hooks[3];              /* by half */
    int hook_line[FV__NUM_HOOKS];
    int meta_line, params_line, pairs_line, turns_line, first_line, last_line, lifted_line,
        exact_line;                 /* 0: there is none */
    int require_line[FV__MAX_PARAMS];
    fv_error *err;
} scanner;

static const char *const hook_names[FV__NUM_HOOKS] = {
    "SCORE", "VISIBLE", "SINK", "QUERY", "KEY", "VALUE", "OUTPUT", "WEIGHT", "KEY_SUM", "ROW_MAX",
};

static fv_status fault(const scanner *s, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static fv_status fault(const scanner *s, int line, const char *format, ...)
{
    char words[280];
    va_list list;
    va_start(list, format);
    vsnprintf(words, sizeof words, format, list);
    va_end(list);
    return fv__fail(s->err, FV_E_COMPILE, s->name, line, 0, "%s, line %d: %s", s->name, line,
                    words);
}

/* ----------------------------------------------------------------------------------- characters */

static void step(scanner *s)
{
    if (*s->at == '\n') {
        s->line++;
        s->line_start = true;
    } else if (!isspace((unsigned char)*s->at)) {
        s->line_start = false;
    }
    s->at++;
}

static fv_status skip_block_comment(scanner *s)
{
    const int line = s->line;
    const bool at_start = s->line_start;
    step(s), step(s);
    while (*s->at && !(s->at[0] == '*' && s->at[1] == '/')) step(s);
    if (!*s->at) return fault(s, line, "this comment has no end");
    step(s), step(s);
    s->line_start = at_start && s->line == line;
    return FV_OK;
}

/* A line comment, or a preprocessor line: to the end of its line; a backslash at the end joins the
 * next one. */
static void skip_line(scanner *s)
{
    while (*s->at && *s->at != '\n') {
        if (s->at[0] == '\\' && s->at[1] == '\n') step(s);
        step(s);
    }
}

static fv_status skip_quoted(scanner *s)
{
    const char quote = *s->at;
    const int line = s->line;
    step(s);
    while (*s->at && *s->at != quote && *s->at != '\n') {
        if (*s->at == '\\' && s->at[1]) step(s);
        step(s);
    }
    if (*s->at != quote)
        return fault(s, line, "this %s has no end", quote == '"' ? "string" : "character constant");
    step(s);
    return FV_OK;
}

static fv_status skip_comments(scanner *s)
{
    for (;;) {
        if (s->at[0] == '/' && s->at[1] == '*')
            FV_TRY(skip_block_comment(s));
        else if (s->at[0] == '/' && s->at[1] == '/')
            skip_line(s);
        else if (isspace((unsigned char)*s->at))
            step(s);
        else
            return FV_OK;
    }
}

static bool is_word(char c)
{
    return isalnum((unsigned char)c) || c == '_';
}

/* Copies the identifier at `at` (cut to MAX_WORD - 1) and steps behind it. "" when there is none.
 */
static void read_word(scanner *s, char *word)
{
    int n = 0;
    if (!isdigit((unsigned char)*s->at))
        while (is_word(*s->at)) {
            if (n < MAX_WORD - 1) word[n++] = *s->at;
            step(s);
        }
    word[n] = 0;
}

/* --------------------------------------------------------------------------- preprocessor lines */

static fv_status open_if(scanner *s, enum half half)
{
    if (s->num_ifs == MAX_IFS) return fault(s, s->line, "more than %d nested #if", MAX_IFS);
    s->if_line[s->num_ifs] = s->line;
    s->ifs[s->num_ifs++] = half;
    return FV_OK;
}

/* The words of a directive behind its name: what #ifdef, #ifndef or #if choose. */
static enum half half_of_condition(const char *directive, const char *condition)
{
    const char *at = strstr(condition, "FV_SPEC");
    const char *end = strpbrk(condition, "\n");
    if (!at || (end && at > end) || is_word(at[7])) return BOTH;
    const bool negative = !strcmp(directive, "ifndef") ||
                          (!strcmp(directive, "if") && condition[strspn(condition, " \t")] == '!');
    return negative ? VECTOR : SPEC;
}

/* The rest of a directive: its line, and those that a comment which begins there goes on to. */
static fv_status skip_directive(scanner *s)
{
    while (*s->at && *s->at != '\n') {
        if (s->at[0] == '/' && s->at[1] == '/') {
            skip_line(s);
        } else if (s->at[0] == '/' && s->at[1] == '*') {
            FV_TRY(skip_block_comment(s));
        } else {
            if (s->at[0] == '\\' && s->at[1] == '\n') step(s);
            step(s);
        }
    }
    return FV_OK;
}

/* #if 0 or #if 1, or else -1. */
static int constant_of(const char *condition)
{
    condition += strspn(condition, " \t");
    if ((*condition != '0' && *condition != '1') || is_word(condition[1])) return -1;
    const char *rest = condition + 1 + strspn(condition + 1, " \t\r");
    return *rest && *rest != '\n' && *rest != '/' ? -1 : *condition - '0';
}

/* What is left out: up to the #else, #elif or #endif of its #if, which is read next. */
static fv_status skip_dead(scanner *s)
{
    int depth = 0;
    for (;;) {
        FV_TRY(skip_comments(s));
        if (*s->at == '#' && s->line_start) {
            const char *word = s->at + 1 + strspn(s->at + 1, " \t");
            const bool ends = !strncmp(word, "endif", 5);
            if (!depth && (ends || !strncmp(word, "el", 2))) return FV_OK;
            depth += !strncmp(word, "if", 2) - ends;
        }
        if (!*s->at) return FV_OK;
        do step(s);
        while (*s->at && *s->at != '\n' && *s->at != '/');
    }
}

/* The text is all that there is: the same on every device, and known to the cache of compiled
 * kernels by its bytes alone. */
static fv_status check_directive(const scanner *s, const char *directive)
{
    static const char *const known[] = {
        "if", "ifdef", "ifndef", "elif", "else", "endif", "define", "undef", "error", "warning",
        "pragma",
    };
    for (int i = 0; i < FV__COUNT(known); i++)
        if (!strcmp(directive, known[i])) return FV_OK;
    if (!strcmp(directive, "include"))
        return fault(s, s->line, "#include: a text stands alone; the v_* words and, in the "
                                 "definition, the functions of <math.h> are there already");
    if (!*directive && (*s->at == '\n' || !*s->at)) return FV_OK;
    return fault(s, s->line, "#%s is no directive of a variant's text", directive);
}

static fv_status read_directive(scanner *s)
{
    char directive[MAX_WORD];
    bool dead = false;
    step(s);
    while (*s->at == ' ' || *s->at == '\t') step(s);
    read_word(s, directive);
    FV_TRY(check_directive(s, directive));
    if (!strcmp(directive, "if") || !strcmp(directive, "ifdef") || !strcmp(directive, "ifndef")) {
        const int constant = strcmp(directive, "if") ? -1 : constant_of(s->at);
        FV_TRY(open_if(s, constant == 1 ? LIVE : half_of_condition(directive, s->at)));
        dead = constant == 0;
    } else if (!strcmp(directive, "else") || !strcmp(directive, "elif")) {
        if (!s->num_ifs) return fault(s, s->line, "#%s without #if", directive);
        enum half *half = &s->ifs[s->num_ifs - 1];
        dead = *half == LIVE;
        *half = *half == SPEC ? VECTOR : *half == VECTOR ? SPEC : *half;
    } else if (!strcmp(directive, "endif")) {
        if (!s->num_ifs) return fault(s, s->line, "#endif without #if");
        s->num_ifs--;
    }
    FV_TRY(skip_directive(s));
    return dead ? skip_dead(s) : FV_OK;
}

static enum half half_here(const scanner *s)
{
    for (int i = s->num_ifs; i > 0; i--)
        if (s->ifs[i - 1] == SPEC || s->ifs[i - 1] == VECTOR) return s->ifs[i - 1];
    return BOTH;
}

/* To the next thing that is neither blank, comment nor directive. */
static fv_status skip_blanks(scanner *s)
{
    for (;;) {
        FV_TRY(skip_comments(s));
        if (*s->at != '#' || !s->line_start) return FV_OK;
        FV_TRY(read_directive(s));
    }
}

/* Steps over a bracket and everything up to its partner. */
static fv_status skip_group(scanner *s)
{
    char open[256];
    int lines[256], depth = 0;
    do {
        FV_TRY(skip_blanks(s));
        const char c = *s->at;
        if (!c) return fault(s, lines[depth - 1], "this '%c' is never closed", open[depth - 1]);
        if (c == '"' || c == '\'') {
            FV_TRY(skip_quoted(s));
            continue;
        }
        if (c == '(' || c == '{' || c == '[') {
            if (depth == 256) return fault(s, s->line, "more than 256 nested brackets");
            lines[depth] = s->line;
            open[depth++] = c;
        } else if (c == ')' || c == '}' || c == ']') {
            const char partner = c == ')' ? '(' : c == '}' ? '{' : '[';
            if (open[--depth] != partner)
                return fault(s, s->line, "'%c' closes the '%c' of line %d", c, open[depth],
                             lines[depth]);
        }
        step(s);
    } while (depth);
    return FV_OK;
}

/* ------------------------------------------------------------------------- inside a declaration */

/* `word` begins here, for the first time. */
static fv_status once(const scanner *s, int *line, const char *word)
{
    if (*line) return fault(s, s->line, "a second %s (the first is on line %d)", word, *line);
    *line = s->line;
    return FV_OK;
}

static fv_status expect(scanner *s, char c, const char *where)
{
    FV_TRY(skip_blanks(s));
    if (*s->at != c) {
        if (!*s->at) return fault(s, s->line, "the text ends inside %s: '%c' is missing", where, c);
        return fault(s, s->line, "'%c' expected in %s, not '%c'", c, where, *s->at);
    }
    step(s);
    return FV_OK;
}

static fv_status expect_word(scanner *s, char *word, const char *what, const char *where)
{
    FV_TRY(skip_blanks(s));
    const int line = s->line;
    read_word(s, word);
    return *word ? FV_OK : fault(s, line, "%s expected in %s", what, where);
}

/* A number as strtod reads it, without names; "inf" and "-inf" are the callers' own words. */
static bool read_number(scanner *s, double *number)
{
    const char *c = s->at;
    if (*c == '+' || *c == '-') c++;
    if (!strncmp(c, "inf", 3) && !is_word(c[3])) {
        *number = *s->at == '-' ? -(double)INFINITY : (double)INFINITY;
        c += 3;
    } else {
        if (!isdigit((unsigned char)*c) && !(*c == '.' && isdigit((unsigned char)c[1])))
            return false;
        char *end;
        *number = strtod(s->at, &end);
        if (is_word(*end)) return false;
        c = end;
    }
    while (s->at < c) step(s);
    return true;
}

static int find_param(const fv__variant_meta *meta, const char *name)
{
    for (int i = 0; i < meta->num_params; i++)
        if (!strcmp(meta->params[i].name, name)) return i;
    return -1;
}

static fv_status expect_param(scanner *s, int *param, const char *where)
{
    char word[MAX_WORD];
    FV_TRY(expect_word(s, word, "a parameter's name", where));
    *param = find_param(s->meta, word);
    return *param >= 0
               ? FV_OK
               : fault(s, s->line, "%s names '%s', which is no parameter of FV_PARAMS above", where,
                       word);
}

static const struct { const char *name; fv__param_kind kind; int bytes;
} kinds[] = {
    { "FV_NUMBER", FV__NUMBER, 16 }, { "FV_INT", FV__INT, 16 },   { "FV_FLOATS", FV__FLOATS, 16 },
    { "FV_INTS", FV__INTS, 16 },     { "FV_BITS", FV__BITS, 16 }, { "FV_RANGES", FV__RANGES, 32 },
    { "FV_SUMS", FV__SUMS, 16 },     { "FV_MAXES", FV__MAXES, 16 },
};

static fv_status expect_param_of(scanner *s, fv__param_kind kind, int *param, const char *where)
{
    int i = 0;
    FV_TRY(expect_param(s, param, where));
    if (s->meta->params[*param].kind == kind) return FV_OK;
    while (kinds[i].kind != kind) i++;
    return fault(s, s->line, "%s takes an %s parameter and '%s' is not one", where, kinds[i].name,
                 s->meta->params[*param].name);
}

/* ----------------------------------------------------------------------------------- parameters */

static fv_status read_binding(scanner *s, fv__param *p, const char *where)
{
    static const char *const names[] = { "problem", "batch", "run" };
    char word[MAX_WORD];
    FV_TRY(expect_word(s, word, "a binding (problem, batch or run)", where));
    for (int i = 0; i < 3; i++)
        if (!strcmp(word, names[i])) {
            p->binding = (fv__binding)i;
            return FV_OK;
        }
    return fault(s, s->line, "'%s' of '%s' is no binding: problem, batch or run", word, p->name);
}

/* FV_INT: whole, and inf is FV__NO_BOUND. */
static fv_status settle_number(scanner *s, const fv__param *p, double *number, const char *what)
{
    if (p->kind != FV__INT) return FV_OK;
    if (isinf(*number)) *number = *number < 0 ? -FV__NO_BOUND : FV__NO_BOUND;
    if (*number != floor(*number) || fabs(*number) > FV__NO_BOUND)
        return fault(s, s->line, "the %s of '%s' must be a whole number of at most 2^30", what,
                     p->name);
    return FV_OK;
}

static fv_status read_number_tail(scanner *s, fv__param *p, const char *where)
{
    FV_TRY(expect(s, ',', where));
    FV_TRY(skip_blanks(s));
    if (!read_number(s, &p->value)) {
        char word[MAX_WORD];
        FV_TRY(expect_word(s, word, "a default (a number, inf or required)", where));
        if (strcmp(word, "required"))
            return fault(s, s->line, "'%s' is no default of '%s': a number, inf or required", word,
                         p->name);
        p->dflt = FV__DEFAULT_REQUIRED;
    } else {
        p->dflt = FV__DEFAULT_VALUE;
        FV_TRY(settle_number(s, p, &p->value, "default"));
    }
    FV_TRY(expect(s, ',', where));
    FV_TRY(skip_blanks(s));
    if (!read_number(s, &p->example))
        return fault(s, s->line, "an example (a number) expected in %s", where);
    return settle_number(s, p, &p->example, "example");
}

static fv_status read_count(scanner *s, fv__param *p, const char *where)
{
    static const struct {
        const char *name;
        fv__count_of count;
    } names[] = {
        { "any", FV__COUNT_ANY },
        { "heads", FV__COUNT_HEADS },
        { "requests", FV__COUNT_REQUESTS },
        { "rows", FV__COUNT_ROWS },
    };
    double number;
    FV_TRY(skip_blanks(s));
    if (read_number(s, &number)) {
        if (number != floor(number) || number < 1 || number > 1 << 24)
            return fault(s, s->line, "the count of '%s' must be a whole number from 1 to 2^24",
                         p->name);
        p->count_of = FV__COUNT_NUMBER;
        p->count = (int32_t)number;
        return FV_OK;
    }
    char word[MAX_WORD];
    FV_TRY(expect_word(s, word, "a count", where));
    for (int i = 0; i < FV__COUNT(names); i++)
        if (!strcmp(word, names[i].name)) {
            p->count_of = names[i].count;
            return FV_OK;
        }
    p->count = find_param(s->meta, word);
    if (p->count < 0 || s->meta->params[p->count].kind != FV__INT)
        return fault(s, s->line,
                     "'%s' is no count of '%s': heads, requests, rows, any, a number, or an FV_INT "
                     "above it as name/2",
                     word, p->name);
    if (s->meta->params[p->count].binding > p->binding)
        return fault(s, s->line, "'%s' has '%s/2' entries and must not be bound before '%s'",
                     p->name, word, word);
    p->count_of = FV__COUNT_HALF;
    FV_TRY(expect(s, '/', where));
    FV_TRY(skip_blanks(s));
    if (!read_number(s, &number) || number != 2)
        return fault(s, s->line, "'%s' can only be divided by 2 in %s", word, where);
    return FV_OK;
}

/* `words`: required, none, frequencies: the first so many of them are allowed. */
static fv_status read_array_default(scanner *s, fv__param *p, int allowed, const char *where)
{
    static const struct {
        const char *name;
        fv__default value;
    } names[] = {
        { "required", FV__DEFAULT_REQUIRED },
        { "none", FV__DEFAULT_NONE },
        { "frequencies", FV__DEFAULT_FREQUENCIES },
    };
    char word[MAX_WORD];
    FV_TRY(expect(s, ',', where));
    FV_TRY(expect_word(s, word, "a default", where));
    for (int i = 0; i < allowed; i++)
        if (!strcmp(word, names[i].name)) {
            p->dflt = names[i].value;
            return FV_OK;
        }
    return fault(s, s->line, "'%s' is no default of '%s': required%s", word, p->name,
                 allowed > 2 ? ", none or frequencies" : " or none");
}

static fv_status read_param_tail(scanner *s, fv__param *p, const char *where)
{
    switch (p->kind) {
    case FV__NUMBER:
    case FV__INT:
        return read_number_tail(s, p, where);
    case FV__FLOATS:
    case FV__INTS:
        FV_TRY(expect(s, ',', where));
        FV_TRY(read_count(s, p, where));
        return read_array_default(s, p, p->kind == FV__FLOATS ? 3 : 2, where);
    case FV__RANGES:
        return read_array_default(s, p, 2, where);
    case FV__BITS:
    case FV__SUMS:
    case FV__MAXES:
        p->dflt = FV__DEFAULT_REQUIRED;
        return FV_OK;
    }
    return FV_OK;
}

/* A member of a struct in C and in C++: the compilers would complain about a line that is not the
 * name's. */
static bool is_keyword(const char *name)
{
    static const char *const words[] = {
        "alignas", "alignof", "and", "asm", "auto", "bitand", "bitor", "bool", "break", "case",
        "catch", "char", "class", "compl", "const", "const_cast", "constexpr", "continue",
        "decltype", "default", "delete", "do", "double", "dynamic_cast", "else", "enum", "explicit",
        "export", "extern", "false", "float", "for", "friend", "goto", "if", "inline", "int",
        "long", "mutable", "namespace", "new", "noexcept", "not", "not_eq", "nullptr", "operator",
        "or", "or_eq", "private", "protected", "public", "register", "reinterpret_cast", "restrict",
        "return", "short", "signed", "sizeof", "static", "static_assert", "static_cast", "struct",
        "switch", "template", "this", "thread_local", "throw", "true", "try", "typedef", "typeid",
        "typename", "typeof", "union", "unsigned", "using", "virtual", "void", "volatile",
        "wchar_t", "while", "xor",
    };
    for (int i = 0; i < FV__COUNT(words); i++)
        if (!strcmp(name, words[i])) return true;
    return false;
}

/* A name may not be another's, nor what a FV_RANGES parameter calls its offsets. */
static fv_status check_name(scanner *s, const char *name)
{
    char offsets[MAX_WORD + 8];
    if (strlen(name) >= sizeof s->meta->params[0].name)
        return fault(s, s->line, "the parameter name '%s' is longer than %zu letters", name,
                     sizeof s->meta->params[0].name - 1);
    if (is_keyword(name) || name[0] == '_' || !strncmp(name, "FV_", 3) || !strncmp(name, "V_", 2))
        return fault(s, s->line,
                     "'%s' cannot name a parameter: it is a word of C, C++ or the library", name);
    for (int i = 0; i < s->meta->num_params; i++) {
        const fv__param *p = &s->meta->params[i];
        snprintf(offsets, sizeof offsets, "%s_indptr", p->name);
        if (!strcmp(name, p->name) || (p->kind == FV__RANGES && !strcmp(name, offsets)))
            return fault(s, s->line, "the parameter name '%s' is taken", name);
    }
    return FV_OK;
}

static fv_status read_param(scanner *s, int kind)
{
    fv__variant_meta *meta = s->meta;
    const char *where = kinds[kind].name;
    char word[MAX_WORD];
    if (meta->num_params == FV__MAX_PARAMS)
        return fault(s, s->line, "more than %d parameters", FV__MAX_PARAMS);
    fv__param p = { .kind = kinds[kind].kind, .offset = meta->args_bytes };
    FV_TRY(expect(s, '(', where));
    FV_TRY(expect_word(s, word, "a name", where));
    FV_TRY(check_name(s, word));
    memcpy(p.name, word, strlen(word) + 1);
    FV_TRY(expect(s, ',', where));
    FV_TRY(read_binding(s, &p, where));
    FV_TRY(read_param_tail(s, &p, where));
    FV_TRY(expect(s, ')', where));
    meta->args_bytes += kinds[kind].bytes;
    if (meta->args_bytes > (int)sizeof ((fv__use *)0)->args)
        return fault(s, s->line, "the parameters take %d bytes, more than %zu", meta->args_bytes,
                     sizeof((fv__use *)0)->args);
    meta->params[meta->num_params++] = p;
    return FV_OK;
}

static fv_status read_params(scanner *s)
{
    FV_TRY(once(s, &s->params_line, "FV_PARAMS"));
    FV_TRY(expect(s, '(', "FV_PARAMS"));
    for (;;) {
        char word[MAX_WORD];
        int kind = 0;
        FV_TRY(skip_blanks(s));
        if (*s->at == ')') break;
        FV_TRY(expect_word(s, word, "a parameter or ')'", "FV_PARAMS"));
        while (kind < FV__COUNT(kinds) && strcmp(word, kinds[kind].name)) kind++;
        if (kind == FV__COUNT(kinds))
            return fault(s, s->line,
                         "'%s' is no kind of parameter (FV_NUMBER, FV_INT, FV_FLOATS, ...)", word);
        FV_TRY(read_param(s, kind));
    }
    step(s);
    return FV_OK;
}

/* --------------------------------------------------------------------------- other declarations */

static fv_status read_meta(scanner *s)
{
    char *out = s->meta->formula;
    size_t n = 0;
    const int line = s->line;
    FV_TRY(once(s, &s->meta_line, "FV_META"));
    FV_TRY(expect(s, '(', "FV_META"));
    FV_TRY(skip_blanks(s));
    if (*s->at != '"') return fault(s, s->line, "FV_META takes the formula as a string");
    while (*s->at == '"') {                             /* strings side by side are one */
        const char *from = s->at + 1;
        FV_TRY(skip_quoted(s));
        for (; from < s->at - 1; from++) {
            if (*from == '\\') from++;
            if (n + 1 >= sizeof s->meta->formula)
                return fault(s, line, "the formula is longer than %zu letters",
                             sizeof s->meta->formula - 1);
            out[n++] = *from;
        }
        FV_TRY(skip_blanks(s));
    }
    out[n] = 0;
    if (!n) return fault(s, line, "the formula of FV_META is empty");
    return expect(s, ')', "FV_META");
}

static fv_status read_require(scanner *s)
{
    int param;
    double number;
    const int line = s->line;
    FV_TRY(expect(s, '(', "FV_REQUIRE"));
    FV_TRY(expect_param(s, &param, "FV_REQUIRE"));
    fv__param *p = &s->meta->params[param];
    if (p->kind != FV__NUMBER && p->kind != FV__INT)
        return fault(s, s->line, "FV_REQUIRE takes a number and '%s' is an array", p->name);
    FV_TRY(skip_blanks(s));
    const char side = *s->at;
    if (side != '<' && side != '>')
        return fault(s, s->line, "FV_REQUIRE takes NAME > | >= | < | <= NUMBER");
    step(s);
    const bool open = *s->at != '=';
    if (!open) step(s);
    FV_TRY(skip_blanks(s));
    if (!read_number(s, &number))
        return fault(s, s->line, "FV_REQUIRE takes NAME > | >= | < | <= NUMBER");
    FV_TRY(expect(s, ')', "FV_REQUIRE"));
    if (side == '>' ? p->has_min : p->has_max)
        return fault(s, line, "a second bound on the same side of '%s'", p->name);
    if (side == '>') {
        p->has_min = true, p->min = number, p->min_open = open;
    } else {
        p->has_max = true, p->max = number, p->max_open = open;
    }
    s->require_line[param] = line;
    return FV_OK;
}

/* position [+|- int parameter] */
static fv_status read_bound(scanner *s, fv__bound *bound, int *line, const char *where)
{
    char word[MAX_WORD];
    int param;
    FV_TRY(once(s, line, where));
    *bound = (fv__bound){ .present = true, .param = -1 };
    FV_TRY(expect(s, '(', where));
    FV_TRY(expect_word(s, word, "'position'", where));
    if (strcmp(word, "position"))
        return fault(s, s->line, "%s begins with 'position', not '%s'", where, word);
    FV_TRY(skip_blanks(s));
    if (*s->at == '+' || *s->at == '-') {
        bound->sign = *s->at == '+' ? 1 : -1;
        step(s);
        FV_TRY(expect_param_of(s, FV__INT, &param, where));
        bound->param = (int16_t)param;
    }
    return expect(s, ')', where);
}

/* The declaration `where` of one parameter of that kind. */
static fv_status read_named(scanner *s, fv__param_kind kind, int *param, int *line,
                            const char *where)
{
    FV_TRY(once(s, line, where));
    FV_TRY(expect(s, '(', where));
    FV_TRY(expect_param_of(s, kind, param, where));
    return expect(s, ')', where);
}

static fv_status read_pairs(scanner *s)
{
    FV_TRY(once(s, &s->pairs_line, "FV_PAIRS"));
    FV_TRY(expect(s, '(', "FV_PAIRS"));
    FV_TRY(expect_param_of(s, FV__INT, &s->meta->pairs_dim, "FV_PAIRS"));
    FV_TRY(expect(s, ',', "FV_PAIRS"));
    FV_TRY(expect_param_of(s, FV__INT, &s->meta->pairs_interleaved, "FV_PAIRS"));
    const int params[] = { s->meta->pairs_dim, s->meta->pairs_interleaved };
    for (int i = 0; i < FV__COUNT(params); i++)
        if (s->meta->params[params[i]].binding != FV__BIND_PROBLEM)
            return fault(s, s->line, "'%s' says which pairs turn and must be bound to the problem",
                         s->meta->params[params[i]].name);
    return expect(s, ')', "FV_PAIRS");
}

static fv_status read_hook(scanner *s, int hook, const char *word)
{
    const enum half half = half_here(s);
    const int line = s->line;
    if ((s->hooks[half] | s->hooks[half == BOTH ? SPEC : BOTH] |
         (half == BOTH ? s->hooks[VECTOR] : 0)) >>
            hook &
        1)
        return fault(s, line, "a second %s in the same half of the text (one is on line %d)", word,
                     s->hook_line[hook]);
    s->hooks[half] |= 1u << hook;
    s->hook_line[hook] = line;
    FV_TRY(skip_blanks(s));
    if (*s->at != '{') return fault(s, line, "'{' expected behind %s", word);
    return skip_group(s);
}

static fv_status read_declaration(scanner *s, const char *word)
{
    if (!strcmp(word, "FV_META")) return read_meta(s);
    if (!strcmp(word, "FV_PARAMS")) return read_params(s);
    if (!strcmp(word, "FV_REQUIRE")) return read_require(s);
    if (!strcmp(word, "FV_FIRST_KEY")) return read_bound(s, &s->meta->first, &s->first_line, word);
    if (!strcmp(word, "FV_LAST_KEY")) return read_bound(s, &s->meta->last, &s->last_line, word);
    if (!strcmp(word, "FV_LIFTED"))
        return read_named(s, FV__RANGES, &s->meta->lifted, &s->lifted_line, word);
    if (!strcmp(word, "FV_PAIRS")) return read_pairs(s);
    if (!strcmp(word, "FV_TURNS"))
        return read_named(s, FV__FLOATS, &s->meta->turns, &s->turns_line, word);
    if (!strcmp(word, "FV_EXACT")) {
        s->meta->exact = true;
        return once(s, &s->exact_line, word);
    }
    for (int hook = 0; hook < FV__NUM_HOOKS; hook++)
        if (!strcmp(word + 3, hook_names[hook])) return read_hook(s, hook, word);
    return fault(s, s->line, "'%s' is neither a declaration nor a hook", word);
}

/* -------------------------------------------------------------------------- the text as a whole */

/* One thing at the top level: a declaration, or something of C that is left to the compiler. */
static fv_status read_item(scanner *s)
{
    char word[MAX_WORD];
    const char c = *s->at;
    if (is_word(c)) {
        const bool first = s->line_start;
        read_word(s, word);
        if (strncmp(word, "FV_", 3)) {
            while (is_word(*s->at)) step(s);            /* a number */
            return FV_OK;
        }
        if (!first) return fault(s, s->line, "%s must stand at the start of a line", word);
        return read_declaration(s, word);
    }
    if (c == '%' && s->at[1] == ':' && s->line_start)
        return fault(s, s->line, "directives of a variant's text begin with #");
    if (c == '"' || c == '\'') return skip_quoted(s);
    if (c == '(' || c == '{' || c == '[') return skip_group(s);
    if (c == ')' || c == '}' || c == ']') return fault(s, s->line, "'%c' closes nothing", c);
    step(s);
    return FV_OK;
}

static bool breaks(const fv__param *p, double x)
{
    return (p->has_min && (p->min_open ? !(x > p->min) : !(x >= p->min))) ||
           (p->has_max && (p->max_open ? !(x < p->max) : !(x <= p->max)));
}

static fv_status check_requirements(scanner *s)
{
    for (int i = 0; i < s->meta->num_params; i++) {
        const fv__param *p = &s->meta->params[i];
        if (p->kind != FV__NUMBER && p->kind != FV__INT) continue;
        if (p->dflt == FV__DEFAULT_VALUE && breaks(p, p->value))
            return fault(s, s->require_line[i],
                         "the default %g of '%s' does not meet its FV_REQUIRE", p->value, p->name);
        if (breaks(p, p->example))
            return fault(s, s->require_line[i],
                         "the example %g of '%s' does not meet its FV_REQUIRE", p->example,
                         p->name);
    }
    return FV_OK;
}

/* The default "frequencies" is computed when the problem is made: its numbers must be known then.
 */
static fv_status check_frequencies(scanner *s)
{
    static const char *const needed[] = {
        "rotary_dim", "base", "factor", "low_freq_factor", "high_freq_factor", "original_context",
    };
    int found = 0;
    for (int i = 0; i < s->meta->num_params; i++) {
        const fv__param *p = &s->meta->params[i];
        if (p->dflt != FV__DEFAULT_FREQUENCIES) continue;
        if (found++) return fault(s, s->params_line, "more than one default 'frequencies'");
        if (p->count_of != FV__COUNT_HALF)
            return fault(s, s->params_line,
                         "the default 'frequencies' of '%s' needs the count rotary_dim/2", p->name);
        for (int k = 0; k < FV__COUNT(needed); k++) {
            const int at = find_param(s->meta, needed[k]);
            if (at < 0 && k) continue;
            if (at < 0 || s->meta->params[at].binding != FV__BIND_PROBLEM)
                return fault(s, s->params_line,
                             "the default 'frequencies' of '%s' needs '%s' bound to the problem",
                             p->name, needed[k]);
        }
    }
    return FV_OK;
}

static bool has_kind(const fv__variant_meta *meta, fv__param_kind kind)
{
    for (int i = 0; i < meta->num_params; i++)
        if (meta->params[i].kind == kind) return true;
    return false;
}

static fv_status check_halves(scanner *s)
{
    const uint32_t spec = s->hooks[BOTH] | s->hooks[SPEC],
                   vector = s->hooks[BOTH] | s->hooks[VECTOR];
    for (int hook = 0; hook < FV__NUM_HOOKS; hook++)
        if ((spec ^ vector) >> hook & 1)
            return fault(s, s->hook_line[hook], "FV_%s is missing %s", hook_names[hook],
                         vector >> hook & 1 ? "behind #ifdef FV_SPEC (in double)"
                                            : "behind #else (in v_* words)");
    s->meta->hooks = vector;
    return FV_OK;
}

/* Bounds say in numbers what FV_VISIBLE never answers: kernels mask by asking it. */
static fv_status check_bounds(scanner *s)
{
    const fv__variant_meta *m = s->meta;
    const bool bounded = m->first.present || m->last.present;
    if (bounded && !(m->hooks >> FV__HOOK_VISIBLE & 1))
        return fault(s, m->first.present ? s->first_line : s->last_line,
                     "%s without FV_VISIBLE, whose answer it states in advance",
                     m->first.present ? "FV_FIRST_KEY" : "FV_LAST_KEY");
    if (m->exact && !bounded)
        return fault(s, s->exact_line, "FV_EXACT without FV_FIRST_KEY or FV_LAST_KEY");
    return FV_OK;
}

static fv_status check_hooks(scanner *s)
{
    const uint32_t hooks = s->meta->hooks;
    const uint32_t turns = 1u << FV__HOOK_QUERY | 1u << FV__HOOK_KEY;
    const uint32_t of_softmax =
        1u << FV__HOOK_SINK | 1u << FV__HOOK_KEY_SUM | 1u << FV__HOOK_ROW_MAX;
    const bool sums = has_kind(s->meta, FV__SUMS), maxes = has_kind(s->meta, FV__MAXES);
    if ((hooks & turns) && s->meta->pairs_dim < 0)
        return fault(s, s->hook_line[hooks >> FV__HOOK_QUERY & 1 ? FV__HOOK_QUERY : FV__HOOK_KEY],
                     "FV_QUERY and FV_KEY get pairs: FV_PAIRS(rotary_dim, interleaved) is missing");
    if (!(hooks & turns) && s->meta->pairs_dim >= 0)
        return fault(s, s->pairs_line, "FV_PAIRS without FV_QUERY or FV_KEY");
    if (!(hooks >> FV__HOOK_KEY & 1) && s->meta->turns >= 0)
        return fault(s, s->turns_line, "FV_TURNS without FV_KEY, which it states in advance");
    if ((hooks >> FV__HOOK_KEY_SUM & 1) && !sums)
        return fault(s, s->hook_line[FV__HOOK_KEY_SUM],
                     "FV_KEY_SUM has no FV_SUMS parameter to add to");
    if (sums && !(hooks >> FV__HOOK_KEY_SUM & 1))
        return fault(s, s->params_line, "an FV_SUMS parameter without FV_KEY_SUM");
    if ((hooks >> FV__HOOK_ROW_MAX & 1) && !maxes)
        return fault(s, s->hook_line[FV__HOOK_ROW_MAX],
                     "FV_ROW_MAX has no FV_MAXES parameter to write to");
    if (maxes && !(hooks >> FV__HOOK_ROW_MAX & 1))
        return fault(s, s->params_line, "an FV_MAXES parameter without FV_ROW_MAX");
    if ((hooks >> FV__HOOK_WEIGHT & 1) && (hooks & of_softmax))
        return fault(s, s->hook_line[FV__HOOK_WEIGHT],
                     "FV_WEIGHT replaces the softmax: FV_SINK, FV_KEY_SUM and FV_ROW_MAX have no "
                     "meaning with it");
    if (!hooks) return fault(s, s->line, "the variant has no hook");
    return check_bounds(s);
}

static fv_status check_whole(scanner *s)
{
    if (s->num_ifs) return fault(s, s->if_line[s->num_ifs - 1], "this #if has no #endif");
    if (!s->meta_line) return fault(s, s->line, "FV_META(\"formula\") is missing");
    FV_TRY(check_requirements(s));
    FV_TRY(check_frequencies(s));
    FV_TRY(check_halves(s));
    if (s->meta->lifted >= 0 && !s->meta->first.present && !s->meta->last.present)
        return fault(s, s->lifted_line,
                     "FV_LIFTED without FV_FIRST_KEY or FV_LAST_KEY lifts nothing");
    return check_hooks(s);
}

static fv_status check_variant_name(const char *name, fv_error *err)
{
    bool good = name && *name && !isdigit((unsigned char)*name) &&
                strlen(name) < sizeof((fv__variant_meta *)0)->name;
    for (const char *c = name; good && *c; c++) good = is_word(*c);
    if (good) return FV_OK;
    return fv__fail(
        err, FV_E_INVALID, "name", name ? (int64_t)strlen(name) : 0,
        (int64_t)sizeof((fv__variant_meta *)0)->name - 1,
        "the name of a variant is 1 to %zu letters, digits and _, and begins with no digit",
        sizeof((fv__variant_meta *)0)->name - 1);
}

fv_status fv__variant_parse(const char *name, const char *text, fv__variant_meta *out,
                            fv_error *err)
{
    FV_TRY(check_variant_name(name, err));
    if (!text)
        return fv__fail(err, FV_E_INVALID, "text", 0, 0, "the text of variant %s is NULL", name);
    const size_t length = strnlen(text, MAX_TEXT + 1);
    if (length > MAX_TEXT)
        return fv__fail(err, FV_E_INVALID, "text", (int64_t)length, MAX_TEXT,
                        "the text of variant %s is longer than 1 MiB", name);
    fv__variant_meta meta = {
        .lifted = -1, .first.param = -1, .last.param = -1, .pairs_dim = -1, .pairs_interleaved = -1,
        .turns = -1
    };
    memcpy(meta.name, name, strlen(name) + 1);
    scanner s = {
        .name = name, .at = text, .line = 1, .line_start = true, .meta = &meta, .err = err
    };
    for (;;) {
        FV_TRY(skip_blanks(&s));
        if (!*s.at) break;
        FV_TRY(read_item(&s));
    }
    FV_TRY(check_whole(&s));
    *out = meta;
    return FV_OK;
}

bool fv__variant_next_define(const char **at, char name[64])
{
    const char *line = *at;
    while (*line) {
        const char *c = line + strspn(line, " \t\r\v\f");
        line += strcspn(line, "\n");
        line += *line == '\n';
        if (*c != '#') continue;
        c += 1 + strspn(c + 1, " \t");
        if (strncmp(c, "define", 6) || is_word(c[6])) continue;
        c += 6 + strspn(c + 6, " \t");
        int n = 0;
        while (n < 63 && is_word(c[n])) n++;
        if (!n || is_word(c[n])) continue; /* a longer name is left alone: nobody else has it */
        memcpy(name, c, (size_t)n);
        name[n] = 0;
        *at = line;
        return true;
    }
    *at = line;
    return false;
}
