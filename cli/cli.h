/* SPDX-License-Identifier: Apache-2.0 */
/* cli.h -- what the sub-commands of `foveal` share: exit codes, messages, options, files, time.
 *
 * A command is a function of (argc, argv) that returns an exit code. Its options are a table:
 * parsing, --help and the checks of ranges come from that table. Memory that runs out ends the
 * process here with a message (need): a command has nothing to save.
 */
#ifndef CLI_H
#define CLI_H

#include "foveal/foveal.h"

#include <stdio.h>

enum {
    CLI_OK = 0,
    CLI_FAILED = 1,                     /* the work failed: a check, a device, a file that cannot be
                                           written */
    CLI_USAGE = 2,                     /* what was asked makes no sense: options, malformed input */
};

typedef struct cli_command {
    const char *name, *summary;
    int (*run)(int argc, char **argv);
} cli_command;

int cmd_replay(int argc, char **argv);
int cmd_info(int argc, char **argv);
int cmd_plan(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int cmd_variant(int argc, char **argv);
int cmd_jit(int argc, char **argv);

/* ---- messages: "foveal: ..." on standard error; the return value is the exit code ---- */

int cli_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
int cli_misuse(const char *format, ...) __attribute__((format(printf, 1, 2)));
int cli_failed(const char *what, const fv_error *err);      /* the library said no */

/* What came from files and arguments, for people: bytes that a terminal would act upon, and those that are no UTF-8, are written as \xNN. A line's end
 * and a tab stay. */
void cli_print(FILE *out, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- options ---- */

typedef enum cli_kind {
    CLI_FLAG,                           /* bool */
    CLI_INT,                            /* int64_t in [low, high] */
    CLI_REAL,                           /* double in [low, high] */
    CLI_TEXT,                           /* const char *, of argv */
    CLI_CHOICE,                         /* const char *, one of the words in `choices` ("a b c") */
} cli_kind;

typedef struct cli_option {
    const char *name;                   /* without the dashes; NULL ends the table */
    const char *arg;                    /* what stands behind it in --help; NULL for flags */
    const char *help;
    cli_kind kind;
    void *value;                        /* holds the default before, the given value after */
    double low, high;
    const char *choices;
} cli_option;

#define CLI_GO_ON (-1)

/* Reads options; *first becomes the index of the first argument that is none. CLI_GO_ON, or the
 * exit code (--help: 0). `usage` is printed in front of the table by --help. */
int cli_parse(const char *usage, const cli_option *options, int argc, char **argv, int *first);

#define CLI_MAX_THREADS 1024            /* as fv_open_desc.num_threads */

/* Options that every command with a context takes. */
typedef struct cli_device {
    const char *device, *cpu;
    int64_t threads;
} cli_device;

#define CLI_DEVICE_OPTIONS(d)                                                                     \
    { "device", "NAME", "cpu or cuda:N (default: FV_DEVICE, else cpu)",                           \
      CLI_TEXT, &(d).device, 0, 0, NULL },                                                        \
    { "threads", "N", "CPU workers (default: all CPUs of this process)",                          \
      CLI_INT, &(d).threads, 1, CLI_MAX_THREADS, NULL },                                          \
    { "cpu", "ISA", "highest CPU level: scalar, avx2, avx512, ...", CLI_TEXT, &(d).cpu, 0, 0, NULL }

/* CLI_OK, or prints and returns the exit code. Refuses what the environment says of threads and
 * logs where it means nothing; the library would go on without. */
int cli_open(const cli_device *device, fv_ctx **ctx);
int cli_threads(const cli_device *device);                  /* how many threads a CPU context of it
                                                               has */

/* ---- small things ---- */

void *need(size_t count, size_t size);                      /* zeroed; never NULL */
void *need_more(void *memory, size_t count, size_t size);   /* realloc; never NULL */
bool cli_int(const char *text, int64_t low, int64_t high, int64_t *out);
bool cli_real(const char *text, double low, double high, double *out);

/* ---- files; "-" is standard input, or standard output ---- */

/* A file of at most `most` MiB, a NUL behind its end, for the caller to free. NULL: the reason has been told, as of a misuse. */
char *cli_read_file(const char *path, size_t most, size_t *size);
const char *cli_input_name(const char *path);               /* for messages */
FILE *cli_create(const char *path);
bool cli_close(FILE *file);                                 /* false: something was not written */
int cli_unwritten(const char *path);                        /* says so; CLI_FAILED */

/* Could this file be created, or written over? Says so long before there is something to write, and
 * leaves the file as it is. CLI_OK, or prints and returns the exit code. */
int cli_writable(const char *path);

/* A file that a command is given. path NULL: it is not given. */
typedef struct cli_file {
    const char *what;                   /* "--json", "the trace" */
    const char *path;
    bool written;
} cli_file;

/* Bytes of the mark of UTF-8 that editors put in front of a text: 3 or 0. */
size_t cli_mark_size(const char *text, size_t size);

/* Refuses to write over a file that is read, or to write two things into one. */
int cli_distinct(const cli_file *files, int count);

/* ---- machine ---- */

double cli_now(void);                                      /* seconds of a clock that never jumps */
int64_t cli_available_memory(void);                         /* bytes that may be used without
                                                               swapping */

/* A mixer with full avalanche; chain hashes by mixing a state with the next value. */
static inline uint64_t mix64(uint64_t state, uint64_t value)
{
    uint64_t x = state * 0x9e3779b97f4a7c15u + value + 0x632be59bd9b4e019u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static inline int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

#endif
