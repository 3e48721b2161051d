/* SPDX-License-Identifier: Apache-2.0 */
/* simt.cpp -- the simple kernels (appends, copies, norms, samples and the like) played on the CPU, for machines without a GPU: the same texts, compiled as
 * C++. Linked with cuda.c into a driver whose launches run them. As blocks run one after another, shared memory is static. */
#define MAX_THREADS 1024
#define STACK (64 << 10)
#define __shared__ static
#include "fibers.h"
#include "convert.h"

static inline uint64_t __cvta_generic_to_shared(const void *p) { return (uint64_t)p; }

/* ------------------------------------------------------------------------------------------------------------- kernels */

#define FV_PTX_CUH                      /* machine instructions: convert.h has those that are met here */
#include "../../src/cuda/base.cuh"
#include "../../src/cuda/plan.cuh"
#include "../../src/cuda/ops.cuh"
#include "../../src/cuda/rows.cuh"
#include "../../src/cuda/companions.cuh"
#include "../../src/cuda/sample.cuh"
namespace of_append {
#include "../../src/cuda/kernels/append.cu"
}
namespace of_rope {
#include "../../src/cuda/kernels/rope.cu"
}
namespace of_merge {
#include "../../src/cuda/kernels/merge.cu"
}
namespace of_copy {
#include "../../src/cuda/kernels/copy_pages.cu"
}
namespace of_norm {
#include "../../src/cuda/kernels/norm.cu"
}
namespace of_act {
#include "../../src/cuda/kernels/act.cu"
}
namespace of_filter {
#include "../../src/cuda/kernels/filter.cu"
}
namespace of_sample {
#include "../../src/cuda/kernels/sample.cu"
}
namespace of_verify {
#include "../../src/cuda/kernels/verify.cu"
}
namespace of_stale {
#include "../../src/cuda/kernels/stale.cu"
}

static const struct { const char *name; void (*fn)(const void *); } kernels[] = {
    { "append", [](const void *p) { of_append::append(*(const d_append *)p); } },
    { "rope", [](const void *p) { of_rope::rope(*(const d_rope *)p); } },
    { "merge", [](const void *p) { of_merge::merge(*(const d_merge *)p); } },
    { "copy_pages", [](const void *p) { of_copy::copy_pages(*(const d_copies *)p); } },
    { "norm_rows", [](const void *p) { of_norm::norm_rows(*(const d_norm *)p); } },
    { "act", [](const void *p) { of_act::act(*(const d_act *)p); } },
    { "filter", [](const void *p) { of_filter::filter(*(const d_filter *)p); } },
    { "sample", [](const void *p) { of_sample::sample(*(const d_sample *)p); } },
    { "verify", [](const void *p) { of_verify::verify(*(const d_verify *)p); } },
    { "stale", [](const void *p) { of_stale::stale(*(const d_stale *)p); } },
};

/* cuda.c calls this where it is linked in. */
extern "C" void fake_play(const char *name, const unsigned *grid, const unsigned *block, void **parameters)
{
    body = NULL;
    for (const auto &k : kernels) if (!strcmp(k.name, name)) body = k.fn;
    if (!body) return;
    parameter = parameters[0];
    num_threads = (int)block[0];
    blockDim = { block[0], 1, 1 };
    gridDim = { grid[0], grid[1], 1 };
    for (unsigned y = 0; y < grid[1]; y++)
        for (unsigned x = 0; x < grid[0]; x++) {
            blockIdx = { x, y, 0 };
            run_block();
        }
}
