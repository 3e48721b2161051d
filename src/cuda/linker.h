/* SPDX-License-Identifier: Apache-2.0 */
/* linker.h -- nvJitLink, opened at run time: cubins with open references to one that a driver loads. It comes with NVRTC, in the same folder or the
 * neighbouring package; without it programs are compiled whole. */
#ifndef FV__CUDA_LINKER_H
#define FV__CUDA_LINKER_H

#include "jit/jit_cache.h"

typedef struct fv__linker {
    void *library;                  /* NULL: none. Stays loaded */
    int (*create)(void **link, uint32_t num_options, const char **options);
    int (*add)(void *link, int type, const void *data, size_t size, const char *name);
    int (*complete)(void *link);
    int (*destroy)(void **link);
    int (*error_size)(void *link, size_t *size);
    int (*error)(void *link, char *text);
    int (*size)(void *link, size_t *size);
    int (*cubin)(void *link, void *cubin);
} fv__linker;

/* Is there one in `folder`, where an NVRTC of this version lies ("": the loader would know)? Opens nothing. */
bool fv__linker_is_there(const char *folder, int major);

/* Loads it, if it can link what NVRTC major.minor makes. */
bool fv__linker_open(const char *folder, int major, int minor, fv__linker *linker);

/* parts[num_parts] for target "sm_90a" into out->data, malloc'ed. False: why is in the log; out stays empty. */
bool fv__linker_link(const fv__linker *linker, const char *target, const fv__jit_output *parts, int num_parts, const fv__log *log, fv__jit_output *out);

#endif
