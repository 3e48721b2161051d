/* SPDX-License-Identifier: Apache-2.0 */
/* jit.h -- from a kernel's text and its options to a function on a device.
 *
 *      program  -->  request  -->  blob  -->  module  -->  function
 *      (names)      (all texts)   (cache)    (driver)
 *
 * Programs are made of the texts that the build embeds (the kernels and the headers of src/cuda) and of texts that are made at run time. */
#ifndef FV__CUDA_JIT_H
#define FV__CUDA_JIT_H

#include "cuda/driver.h"
#include "cuda/nvrtc.h"

typedef struct fv__cuda_program {
    const char *name;               /* of this build of it, for people: "attend_sm80_bf16_d128_causal" */
    const char *source;             /* the text to compile: "attend_sm80.cu" */
    const fv__jit_text *extra;      /* [num_extra] texts beside the embedded ones, e.g. generated headers; they win over those of the same name */
    const char *const *options;     /* [num_options] "-DDIM=128", ... */
    int32_t num_extra;
    int32_t num_options;
    int32_t num_parts;              /* it may be compiled as so many texts at once, which define FV_PART 0, 1, ...; at most 8; 0: whole */
    int32_t max_registers;          /* of a thread of its kernels, where parts do not know the launch bounds */
} fv__cuda_program;

/* The embedded texts, by file name; the last has no name. */
extern const fv__jit_text fv__cuda_sources[];

typedef struct fv__cuda_jit fv__cuda_jit;

/* device NULL: compiles for any arch, loads nothing. The cache is shared with whoever else uses it and must outlive this; so must the device.
 * A missing NVRTC is no error yet: bundles and the cache may have all that is asked for. */
fv_status fv__cuda_jit_open(const fv__cuda_device *device, fv__jit_cache *cache, const fv__log *log, fv__cuda_jit **jit, fv_error *err);
void fv__cuda_jit_close(fv__cuda_jit **jit);                    /* unloads the modules; NULL is fine */

/* Whether programs that can be are compiled in parts: done in a third of the time, where there are CPUs and a linker; but functions of different parts
 * obey the ABI, which costs the attention kernel 5 to 12 % of its speed, and what the compiler says about registers and spills is not about kernels. As it
 * is: FV_JIT_PARTS is 1, and there is a device. */
void fv__cuda_jit_in_parts(fv__cuda_jit *jit, bool in_parts);

/* Function `entry` of `program` on the device. `stream` is the one that the caller is about to use: while it captures, only what is loaded already is
 * handed out, and FV_E_NOT_READY otherwise; nothing is compiled, loaded or allocated then. Blocks; any thread. The function lives until close. */
fv_status fv__cuda_jit_function(fv__cuda_jit *jit, const fv__cuda_program *program, const char *entry, CUstream stream, CUfunction *function,
                                fv_error *err);

/* Compiles, or finds, without loading. arch NULL: the device's. The blob is the cache's. */
fv_status fv__cuda_jit_compile(fv__cuda_jit *jit, const fv__cuda_program *program, const char *arch, const fv__jit_blob **blob, fv_error *err);

/* "sm_80", "sm_90a": with the suffix from 9.0 on, where tensor instructions need it. */
void fv__cuda_arch(int cc_major, int cc_minor, char arch[16]);
/* The archs that kernels are checked and bundled for by default, the last is NULL. */
extern const char *const fv__cuda_archs[];

const char *fv__cuda_jit_compiler(const fv__cuda_jit *jit);     /* "nvrtc 13.0", "" without one */
const char *fv__cuda_jit_compiler_path(const fv__cuda_jit *jit);

typedef struct fv__cuda_jit_stats {
    int64_t modules;                /* loaded */
    int64_t load_ns;                /* in the driver, for that */
} fv__cuda_jit_stats;

void fv__cuda_jit_stats_of(fv__cuda_jit *jit, fv__cuda_jit_stats *stats);

int fv__cuda_arch_number(const char *arch);                     /* 90 of "sm_90a"; 0: it is none */
bool fv__cuda_arch_known(const char *arch);                     /* its devices' shared memory is known, so kernels can be shaped for them */

/* ---- programs.c: what may be compiled for GPUs that are not there. visit is called for each program, with the oldest arch that it is for (90);
 * quick marks a small selection. What it is given is its own only while it runs. */
typedef void fv__cuda_visit_fn(void *user, const fv__cuda_program *program, int oldest, bool quick);

/* The builds of every kernel that are worth checking on devices of an arch. */
void fv__cuda_programs(const char *arch, fv__cuda_visit_fn *visit, void *user);
/* All kernels but attention, as they are always built. */
void fv__cuda_plain_programs(fv__cuda_visit_fn *visit, void *user);
/* The builds of the attention kernel that plans for a problem may ask for: decode or not, invariant or not. */
fv_status fv__cuda_problem_programs(const fv_problem *problem, const char *arch, fv__cuda_visit_fn *visit, void *user, fv_error *err);
/* Those that the lines "checkjit: OPTIONS" of a text ask for ("full": not quick, "sm>=90": from that arch on), or one without options. `embedded`:
 * the text is one of fv__cuda_sources. */
void fv__cuda_text_programs(const char *source, const char *text, bool embedded, fv__cuda_visit_fn *visit, void *user);

#endif
