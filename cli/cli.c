/* SPDX-License-Identifier: Apache-2.0 */
/* cli.c -- messages, options, files, time. */
#include "cli.h"

#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <libgen.h>
#include <math.h>
#include <sched.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAX_OPTIONS 48

/* Bytes of the character at `text` if a terminal may have it as it is, else 0: control characters of one byte and of two (U+0080 to U+009F), and what is
 * no UTF-8. */
static size_t plain_character(const unsigned char *text)
{
    const unsigned char c = text[0];
    if (c < 0x80)
        return (c >= ' ' && c != 0x7f) || c == '\n' || c == '\t';
    const size_t n = c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : 2;
    if (c < 0xc2 || c > 0xf4 || (c == 0xc2 && text[1] < 0xa0))
        return 0;
    for (size_t i = 1; i < n; i++)
        if ((text[i] & 0xc0) != 0x80)
            return 0;
    return n;
}

static void print_plain(FILE *out, const char *text)
{
    while (*text) {
        const size_t n = plain_character((const unsigned char *)text);
        if (n)
            fwrite(text, 1, n, out);
        else
            fprintf(out, "\\x%02x", (unsigned char)*text);
        text += n ? n : 1;
    }
}

static void print_list(FILE *out, const char *format, va_list args)
{
    char *text = NULL;
    if (vasprintf(&text, format, args) < 0)
        return;
    print_plain(out, text);
    free(text);
}

void cli_print(FILE *out, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    print_list(out, format, args);
    va_end(args);
}

static void complain(const char *format, va_list args)
{
    fflush(stdout);
    fputs("foveal: ", stderr);
    print_list(stderr, format, args);
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

/* getopt_long found no option in argv[optind - 1], or in a cluster of letters around optopt. */
static int no_option(const cli_option *options, char **argv)
{
    const char *word = argv[optind - 1];
    if (optopt > 0 && optopt < 256)
        return cli_misuse("-%c: no such option (see foveal %s --help)", optopt, argv[0]);
    if (optopt >= 256)
        return cli_misuse("%s: --%s takes no value", word, options[optopt - 256].name);
    char list[400];
    size_t n = 0;
    int matches = 0;
    const char *name = word + strspn(word, "-");
    const size_t length = strcspn(name, "=");
    for (const cli_option *o = options; o->name; o++)
        if (!strncmp(o->name, name, length) && n < sizeof list) {
            n += (size_t)snprintf(list + n, sizeof list - n, "%s--%s", n ? ", " : "", o->name);
            matches++;
        }
    if (matches > 1)
        return cli_misuse("%s: ambiguous: %s", word, list);
    return cli_misuse("%s: no such option (see foveal %s --help)", word, argv[0]);
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
            return no_option(options, argv);
        const int code = set_option(&options[c - 256], optarg);
        if (code != CLI_GO_ON)
            return code;
    }
    *first = optind;
    return CLI_GO_ON;
}

static int check_environment(const cli_device *device)
{
    static const char levels[] = "off error warn info debug";
    const char *threads = getenv("FV_NUM_THREADS"), *level = getenv("FV_LOG");
    int64_t n;
    if (!device->threads && threads && *threads && !cli_int(threads, 1, CLI_MAX_THREADS, &n))
        return cli_misuse("FV_NUM_THREADS=%s: expected a whole number from 1 to %d", threads,
                          CLI_MAX_THREADS);
    if (level && *level && !is_choice(levels, level))
        return cli_misuse("FV_LOG=%s: expected one of: %s", level, levels);
    return CLI_OK;
}

int cli_open(const cli_device *device, fv_ctx **ctx)
{
    fv_error err = { 0 };
    if (check_environment(device) != CLI_OK)
        return CLI_USAGE;
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
    if (n > 0 || (given && cli_int(given, 1, CLI_MAX_THREADS, &n)))
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

/* ---- files ---- */

static bool is_standard(const char *path) { return strcmp(path, "-") == 0; }

const char *cli_input_name(const char *path)
{
    return is_standard(path) ? "standard input" : path;
}

char *cli_read_file(const char *path, size_t most, size_t *size)
{
    FILE *file = is_standard(path) ? stdin : fopen(path, "rb");
    if (!file) {
        cli_misuse("%s: %s", cli_input_name(path), strerror(errno));
        return NULL;
    }
    const size_t limit = most << 20;
    char *text = NULL;
    size_t n = 0, room = 0;
    do {                                        /* one byte beyond the limit is room enough to see that there is one */
        room = !room ? 1 << 16 : room > limit / 2 ? limit + 1 : 2 * room;
        text = need_more(text, room + 1, 1);
        n += fread(text + n, 1, room - n, file);
    } while (n == room && n <= limit);
    const int problem = ferror(file) ? errno : 0;
    if (file != stdin)
        fclose(file);
    if (problem || n > limit) {
        if (problem)
            cli_misuse("%s: %s", cli_input_name(path), strerror(problem));
        else
            cli_misuse("%s: more than %zu MiB, the most that is read", cli_input_name(path), most);
        free(text);
        return NULL;
    }
    text[n] = 0;
    *size = n;
    return text;
}

size_t cli_mark_size(const char *text, size_t size)
{
    return size >= 3 && !memcmp(text, "\xef\xbb\xbf", 3) ? 3 : 0;
}

FILE *cli_create(const char *path)
{
    return is_standard(path) ? stdout : fopen(path, "wb");
}

bool cli_close(FILE *file)
{
    const bool good = fflush(file) == 0 && !ferror(file);
    return (file == stdout || fclose(file) == 0) && good;
}

int cli_unwritten(const char *path)
{
    return cli_fail("%s could not be written", is_standard(path) ? "standard output" : path);
}

int cli_writable(const char *path)
{
    struct stat st;
    if (is_standard(path) || (!stat(path, &st) && !S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode)))
        return CLI_OK;                          /* pipes and devices are opened once */
    const bool is_new = lstat(path, &st) != 0;
    FILE *file = fopen(path, "ab");
    if (!file)
        return cli_fail("%s cannot be written: %s", path, strerror(errno));
    fclose(file);
    if (is_new)
        remove(path);
    return CLI_OK;
}

/* Where a file lies: that of a new one is its folder and its name there. */
typedef struct place {
    bool known;
    dev_t device;
    ino_t inode;
    char name[256];                     /* of a new file */
} place;

static place place_of(const cli_file *f)
{
    struct stat st;
    place p = { 0 };
    const int standard = f->written ? STDOUT_FILENO : STDIN_FILENO;
    if (is_standard(f->path) ? fstat(standard, &st) == 0 : stat(f->path, &st) == 0) {
        p = (place){ .known = S_ISREG(st.st_mode), .device = st.st_dev, .inode = st.st_ino };
        return p;
    }
    char *folder = strdup(f->path), *name = strdup(f->path);
    if (folder && name && !is_standard(f->path) && stat(dirname(folder), &st) == 0) {
        p = (place){ .known = true, .device = st.st_dev, .inode = st.st_ino };
        snprintf(p.name, sizeof p.name, "%s", basename(name));
    }
    free(folder);
    free(name);
    return p;
}

static bool same_file(const cli_file *a, const cli_file *b)
{
    if (a->written && b->written && is_standard(a->path) && is_standard(b->path))
        return true;
    const place x = place_of(a), y = place_of(b);
    return x.known && y.known && x.device == y.device && x.inode == y.inode &&
           !strcmp(x.name, y.name);
}

int cli_distinct(const cli_file *files, int count)
{
    for (int i = 0; i < count; i++)
        for (int j = 0; j < i; j++) {
            const cli_file *a = &files[j], *b = &files[i];
            if (a->path && b->path && (a->written || b->written) && same_file(a, b))
                return cli_misuse("%s %s is the same file as %s", b->what, b->path, a->what);
        }
    return CLI_OK;
}

/* ---- machine ---- */

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
