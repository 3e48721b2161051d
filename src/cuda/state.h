/* SPDX-License-Identifier: Apache-2.0 */
/* state.h -- what the CUDA backend keeps: of a context, of a plan. */
#ifndef FV__CUDA_STATE_H
#define FV__CUDA_STATE_H

#include "attend.h"
#include "jit.h"
#include "plan.cuh"

/* One of a context; made by fv__cuda_open, freed by fv__cuda_close. */
struct fv__cuda {
    fv__cuda_device *device;
    fv__jit_cache *cache;
    fv__cuda_jit *jit;
    CUdeviceptr faults;                 /* d_faults: what kernels count with */
    d_faults *faults_host;              /* pinned: what they tell the host */
    CUdeviceptr faults_mapped;          /* the same, as kernels address it */
    CUstream stream;                    /* for the library's own few calls */
    struct fv__cuda_ops *ops;           /* ops.c */
};

fv__attend_device fv__cuda_limits(const fv__cuda_facts *facts);

#endif
