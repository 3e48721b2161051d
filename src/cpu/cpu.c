/* SPDX-License-Identifier: Apache-2.0 */
/* cpu.c -- the levels: one table each, made of what the templates define per level; which ones the machine has; which one to use. */
#include "cpu.h"
#include "../os.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#if defined __x86_64__
#include <cpuid.h>
#if defined __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

/* ---- what the machine has ---- */

#if defined __x86_64__
/* Register state that the system saves for us: bits of XCR0. */
static uint64_t saved_state(void)
{
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return 0;    /* OSXSAVE */
    __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    return (uint64_t)d << 32 | a;
}

/* The system saves tiles only for processes that have asked for it. Threads that run already may use them too. */
static bool ask_for_tiles(void)
{
#if defined __linux__ && defined SYS_arch_prctl
    enum { ASK = 0x1023, TILE_DATA = 18 };      /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
#else
    return false;
#endif
}

static uint32_t detect(void)
{
    uint32_t a = 0, b = 0, c = 0, d = 0, features = 0;
    const uint64_t saved = saved_state();
    const bool ymm = (saved & 0x06) == 0x06, zmm = (saved & 0xE6) == 0xE6, tiles = (saved & 0x60000) == 0x60000;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    if (ymm && c >> 12 & 1) features |= FV__CPU_HAS_FMA;
    if (ymm && c >> 29 & 1) features |= FV__CPU_HAS_F16C;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return features;
    const bool integers = c >> 11 & 1;           /* VNNI: every machine with AVX512_BF16 has it */
    if (ymm && b >> 5 & 1) features |= FV__CPU_HAS_AVX2;
    const uint32_t wide = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;    /* F, DQ, BW, VL */
    if (zmm && (b & wide) == wide) {
        features |= FV__CPU_HAS_AVX512;
        if (d >> 23 & 1) features |= FV__CPU_HAS_AVX512FP16;
    }
    if (tiles && d >> 24 & 1 && ask_for_tiles()) {
        if (d >> 22 & 1) features |= FV__CPU_HAS_AMX_BF16;
        if (d >> 25 & 1) features |= FV__CPU_HAS_AMX_INT8;
    }
    if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && features & FV__CPU_HAS_AVX512 && integers && a >> 5 & 1)
        features |= FV__CPU_HAS_AVX512BF16;
    return features;
}
#else
static uint32_t detect(void) { return 0; }
#endif

static uint32_t found;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void find(void) { found = detect(); }

uint32_t fv__cpu_features(void)
{
    pthread_once(&once, find);
    return found;
}

/* ---- the tables ---- */

#define FV_ISA(level)                                                                                                                   \
    extern const fv__cpu_isa fv__cpu_isa_##level;                                                                                       \
    extern const uint32_t fv__isa_needs_##level;                                                                                        \
    bool fv__available_##level(void);                                                                                                   \
    bool fv__available_##level(void) { return (fv__cpu_features() & fv__isa_needs_##level) == fv__isa_needs_##level; }
#include "isas.inc"
#undef FV_ISA

static const fv__cpu_isa *const levels[] = {
#define FV_ISA(level) &fv__cpu_isa_##level,
#include "isas.inc"
#undef FV_ISA
};

int fv__cpu_isa_count(void) { return FV__COUNT(levels); }

/* The i-th by rank: few enough to count how many are lower. */
const fv__cpu_isa *fv__cpu_isa_at(int i)
{
    for (int candidate = 0; candidate < FV__COUNT(levels); candidate++) {
        int lower = 0;
        for (int other = 0; other < FV__COUNT(levels); other++)
            lower += levels[other]->rank < levels[candidate]->rank || (levels[other]->rank == levels[candidate]->rank && other < candidate);
        if (lower == i) return levels[candidate];
    }
    return NULL;
}

/* ---- the choice ---- */

static fv_status refuse(const char *name, const char *why, fv_error *err)
{
    char have[160] = "";
    for (int i = 0; i < fv__cpu_isa_count(); i++) {
        const fv__cpu_isa *isa = fv__cpu_isa_at(i);
        if (!isa->available()) continue;
        const size_t used = strlen(have);
        snprintf(have + used, sizeof have - used, "%s%s", used ? ", " : "", isa->name);
    }
    return fv__fail(err, FV_E_INVALID, "cpu_isa", 0, 0, "%s: %s; this machine has %s", name, why, have);
}

const fv__cpu_isa *fv__cpu_isa_choose(const char *name, fv_error *err)
{
    if (!name) name = fv__os_env("FV_CPU");
    for (int i = fv__cpu_isa_count() - 1; i >= 0; i--) {
        const fv__cpu_isa *isa = fv__cpu_isa_at(i);
        if (name && strcmp(name, isa->name)) continue;
        if (isa->available()) return isa;
        if (!name) continue;
        refuse(name, "the machine lacks this CPU level", err);
        return NULL;
    }
    refuse(name ? name : "cpu", "there is no CPU level of this name", err);
    return NULL;
}
