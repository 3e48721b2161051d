/* SPDX-License-Identifier: Apache-2.0 */
/* os.c -- Linux: CPUs this process may use, the clock, aligned memory. */
#include "os.h"

#include <elf.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

long fv__os_fail_at;

static int cpus_of_affinity(void)
{
    for (int bits = 1024; bits <= 1 << 20;
         bits *= 4) { /* the call fails while the set is smaller than the kernel's */
        cpu_set_t *set = CPU_ALLOC((size_t)bits);
        if (!set) break;
        const size_t bytes = CPU_ALLOC_SIZE((size_t)bits);
        const int count = sched_getaffinity(0, bytes, set) ? 0 : CPU_COUNT_S(bytes, set);
        CPU_FREE(set);
        if (count > 0) return count;
    }
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (int)online : 1;
}

/* One number, or two, of a small file; how many were read. "max" counts as none. */
static int read_numbers(const char *path, long long *a, long long *b)
{
    FILE *file = fopen(path, "re");
    if (!file) return 0;
    const int n = fscanf(file, "%lld %lld", a, b);
    fclose(file);
    return n < 0 ? 0 : n;
}

/* CPUs that the group at `path` and its parents allow under `root`; 0: no quota. version 2 keeps
 * both numbers in one file. */
static int quota_of(const char *root, char *path, bool version2)
{
    int best = 0;
    for (;;) {
        char file[1200];
        long long quota = 0, period = 0, ignored = 0;
        snprintf(file, sizeof file, "%s%s/%s", root, path,
                 version2 ? "cpu.max" : "cpu.cfs_quota_us");
        bool found =
            read_numbers(file, &quota, version2 ? &period : &ignored) >= (version2 ? 2 : 1);
        if (found && !version2) {
            snprintf(file, sizeof file, "%s%s/cpu.cfs_period_us", root, path);
            found = read_numbers(file, &period, &ignored) >= 1;
        }
        if (found && quota > 0 && period > 0) {
            const long long cpus = (quota + period / 2) / period;
            const int allowed = cpus < 1 ? 1 : cpus > 1 << 20 ? 1 << 20 : (int)cpus;
            if (!best || allowed < best) best = allowed;
        }
        char *slash = strrchr(path, '/');
        if (!slash) return best;
        *slash = 0;
    }
}

/* Is `name` an entry of the comma-separated list? */
static bool lists(const char *list, const char *name)
{
    const size_t n = strlen(name);
    for (const char *at = list; (at = strstr(at, name)); at += n)
        if ((at == list || at[-1] == ',') && (at[n] == 0 || at[n] == ',')) return true;
    return false;
}

/* /proc/self/cgroup: lines of "id:controllers:path"; version 2 has id 0 and no controllers. */
static int cpus_of_quota(void)
{
    FILE *file = fopen("/proc/self/cgroup", "re");
    if (!file) return 0;
    char line[1024];
    int best = 0;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        char *controllers = strchr(line, ':');
        char *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path) continue;
        *path++ = 0;
        controllers++;
        const bool version2 = !*controllers;
        if (!version2 && !lists(controllers, "cpu")) continue;
        if (!strcmp(path, "/")) *path = 0;
        const int allowed =
            quota_of(version2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu", path, version2);
        if (allowed && (!best || allowed < best)) best = allowed;
    }
    fclose(file);
    return best;
}

int fv__os_num_cpus(void)
{
    const int affinity = cpus_of_affinity(), quota = cpus_of_quota();
    return quota && quota < affinity ? quota : affinity;
}

int64_t fv__os_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

const char *fv__os_env(const char *name)
{
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

bool fv__os_is_cut_off(int fd)
{
    Elf64_Ehdr head;
    struct stat st;
    if (fstat(fd, &st) || pread(fd, &head, sizeof head, 0) != (ssize_t)sizeof head ||
        memcmp(head.e_ident, ELFMAG, SELFMAG) || head.e_ident[EI_CLASS] != ELFCLASS64 ||
        head.e_phentsize != sizeof(Elf64_Phdr))
        return false;
    const uint64_t size = (uint64_t)st.st_size;
    for (int i = 0; i < head.e_phnum; i++) {
        Elf64_Phdr part;
        const uint64_t at = head.e_phoff + (uint64_t)i * sizeof part;
        if (at > INT64_MAX - sizeof part || pread(fd, &part, sizeof part, (off_t)at) != (ssize_t)sizeof part)
            return true;
        if (part.p_type == PT_LOAD && (part.p_offset > size || part.p_filesz > size - part.p_offset))
            return true;
    }
    return false;
}

/* Counts down without a lock; what lies below 0 is "never" as well. */
static bool fails_now(void)
{
    if (__atomic_load_n(&fv__os_fail_at, __ATOMIC_RELAXED) <= 0) return false;
    return __atomic_sub_fetch(&fv__os_fail_at, 1, __ATOMIC_RELAXED) == 0;
}

void *fv__os_alloc(const fv_allocator *allocator, size_t bytes)
{
    if (fails_now() || bytes > SIZE_MAX - 64) return NULL;
    bytes = bytes ? (bytes + 63) / 64 * 64 : 64;
    return allocator ? allocator->allocate(allocator->user, bytes, 64) : aligned_alloc(64, bytes);
}

void fv__os_free(const fv_allocator *allocator, void *memory, size_t bytes)
{
    if (!memory) return;
    bytes = bytes ? (bytes + 63) / 64 * 64 : 64;
    if (allocator)
        allocator->release(allocator->user, memory, bytes);
    else
        free(memory);
}
