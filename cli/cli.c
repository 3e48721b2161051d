/* SPDX-License-Identifier: Apache-2.0 */
/* cli.c -- messages, options, files, time. */
#include "cli.h"

#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <sched.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_OPTIONS 48

static void complain(const char *format, va_list args)
{
    fflush(stdout);
    fputs("foveal: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
}

int cli_fail(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    complain(format, args);
    va_end(args);
    return CLI_FAILED;
}

int cli_misuse(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    complain(format, args);
    va_end(args);
    return CLI_USAGE;
}

int cli_failed(const char *what, const fv_error *err)
{
    return cli_fail("%s: %s (%s)", what, err->text[0] ? err->text : fv_status_text(err->status),
                    fv_status_name(err->status));
}

/* ---- options ---- */

static void print_help(const char *usage, const cli_option *options)
{
    printf("usage: foveal %s\n\noptions:\n", usage);
    for (const cli_option *o = options; o->name; o++) {
        char left[64];
        snprintf(left, sizeof left, "--%s%s%s", o->name, o->arg ? " " : "", o->arg ? o->arg : "");
        printf("  %-24s %s\n", left, o->help);
    }
    printf("  %-24s %s\n", "--help", "this text");
}

/* Is `word` one of the words of `choices`, which blanks divide? Answers the word in `choices`' own
 * memory order. */
static bool is_choice(const char *choices, const char *word)
{
    const size_t length = strlen(word);
    for (const char *c = choices; *c;) {
        const size_t n = strcspn(c, " ");
        if (n == length && !memcmp(c, word, n))
            return true;
        c += n + strspn(c + n, " ");
    }
    return false;
}

static int set_option(const cli_option *o, char *text)
{
    switch (o->kind) {
    case CLI_FLAG:
        *(bool *)o->value = true;
        return CLI_GO_ON;
    case CLI_TEXT:
        *(const char **)o->value = text;
        return CLI_GO_ON;
    case CLI_INT:
        if (cli_int(text, (int64_t)o->low, (int64_t)o->high, o->value))
            return CLI_GO_ON;
        return cli_misuse("--%s %s: expected a whole number from %.0f to %.0f", o->name, text,
                          o->low, o->high);
    case CLI_REAL:
        if (cli_real(text, o->low, o->high, o->value))
            return CLI_GO_ON;
        return cli_misuse("--%s %s: expected a number from %g to %g", o->name, text, o->low,
                          o->high);
    case CLI_CHOICE:
        if (is_choice(o->choices, text)) {
            *(const char **)o->value = text;
            return CLI_GO_ON;
        }
        return cli_misuse("--%s %s: expected one of: %s", o->name, text, o->choices);
    }
    return CLI_USAGE;
}

int cli_parse(const char *usage, const cli_option *options, int argc, char **argv, int *first)
{
    struct option table[MAX_OPTIONS + 2] = { { 0 } };
    int n = 0;
    for (; options[n].name && n < MAX_OPTIONS; n++)
        table[n] =
            (struct option){ options[n].name, options[n].arg ? required_argument : no_argument,
                             NULL, 256 + n };
    table[n] = (struct option){ "help", no_argument, NULL, 'h' };

    opterr = 0;
    optind = 1;
    for (int c; (c = getopt_long(argc, argv, ":h", table, NULL)) != -1;) {
        if (c == 'h') {
            print_help(usage, options);
            return CLI_OK;
        }
        if (c == ':')
            return cli_misuse("%s: needs a value (see foveal %s --help)", argv[optind - 1],
                              argv[0]);
        if (c < 256)
            return cli_misuse("%s: no such option (see foveal %s --help)", argv[optind - 1],
                              argv[0]);
        const int code = set_option(&options[c - 256], optarg);
        if (code != CLI_GO_ON)
            return code;
    }
    *first = optind;
    return CLI_GO_ON;
}

int cli_open(const cli_device *device, fv_ctx **ctx)
{
    fv_error err = { 0 };
    const fv_open_desc desc = { .device = device->device, .cpu_isa = device->cpu,
                                .num_threads = (int32_t)device->threads };
    if (fv_open(&desc, ctx, &err) == FV_OK)
        return CLI_OK;
    cli_failed("cannot open the device", &err);
    return err.status == FV_E_INVALID ? CLI_USAGE : CLI_FAILED;
}

int cli_threads(const cli_device *device)
{
    int64_t n = device->threads;
    const char *given = getenv("FV_NUM_THREADS");
    if (n > 0 || (given && cli_int(given, 1, 4096, &n)))
        return (int)n;
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

/* ---- small things ---- */

void *need(size_t count, size_t size)
{
    void *memory = calloc(count ? count : 1, size ? size : 1);
    if (!memory) {
        cli_fail("out of memory: %zu x %zu bytes", count, size);
        exit(CLI_FAILED);
    }
    return memory;
}

void *need_more(void *memory, size_t count, size_t size)
{
    size_t bytes;
    void *more =
        __builtin_mul_overflow(count, size, &bytes) ? NULL : realloc(memory, bytes ? bytes : 1);
    if (!more) {
        cli_fail("out of memory: %zu x %zu bytes", count, size);
        exit(CLI_FAILED);
    }
    return more;
}

bool cli_int(const char *text, int64_t low, int64_t high, int64_t *out)
{
    char *end;
    errno = 0;
    const long long x = strtoll(text, &end, 10);
    if (errno || end == text || *end || isspace((unsigned char)text[0]) || x < low || x > high)
        return false;
    *out = x;
    return true;
}

bool cli_real(const char *text, double low, double high, double *out)
{
    char *end;
    errno = 0;
    const double x = strtod(text, &end);
    if (errno || end == text || *end || isspace((unsigned char)text[0]) || !isfinite(x) ||
        x < low || x > high)
        return false;
    *out = x;
    return true;
}

char *cli_read_file(const char *path, size_t *size)
{
    FILE *file = fopen(path, "rb");
    if (!file)
        return NULL;
    char *text = NULL;
    size_t n = 0, room = 0;
    do {
        room = room ? 2 * room : 1 << 16;
        text = need_more(text, room + 1, 1);
        n += fread(text + n, 1, room - n, file);
    } while (n == room);
    const int problem = ferror(file) ? errno : 0;
    fclose(file);
    if (problem) {
        free(text);
        errno = problem;
        return NULL;
    }
    text[n] = 0;
    *size = n;
    return text;
}

FILE *cli_create(const char *path)
{
    return strcmp(path, "-") == 0 ? stdout : fopen(path, "wb");
}

bool cli_close(FILE *file)
{
    const bool good = fflush(file) == 0 && !ferror(file);
    return (file == stdout || fclose(file) == 0) && good;
}

double cli_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int64_t cli_available_memory(void)
{
    char line[128];
    long long kib = -1;
    FILE *file = fopen("/proc/meminfo", "r");
    while (file && kib < 0 && fgets(line, sizeof line, file))
        sscanf(line, "MemAvailable: %lld kB", &kib);
    if (file)
        fclose(file);
    if (kib >= 0)
        return kib * 1024;
    return (int64_t)sysconf(_SC_AVPHYS_PAGES) * sysconf(_SC_PAGESIZE);
}
