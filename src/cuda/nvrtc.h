/* SPDX-License-Identifier: Apache-2.0 */
/* nvrtc.h -- NVIDIA's run-time compiler, opened at run time: CUDA text to a cubin, with registers and spills.
 *
 * Versions 12.x and 13 do, wherever they lie: FV_NVRTC_PATH, already in the process, a Python's site-packages (nvidia/cu13/lib,
 * nvidia/cuda_nvrtc/lib), CONDA_PREFIX, the loader's own folders, CUDA_HOME, CUDA_PATH, /usr/local/cuda.
 * It is not loaded until something must be compiled: where its version can be told from the folder it lies in, a start from the
 * cache does without its 100 MB. Compiling starts no process and writes no file. */
#ifndef FV__NVRTC_H
#define FV__NVRTC_H

#include "jit/jit_cache.h"

typedef struct fv__nvrtc fv__nvrtc;

/* max_major: the driver's CUDA version, as it loads nothing that a later major version made; 0: any.
 * FV_E_COMPILE: there is none; the text says where it was looked for. */
fv_status fv__nvrtc_open(int max_major, const fv__log *log, fv__nvrtc **nvrtc, fv_error *err);
void fv__nvrtc_close(fv__nvrtc **nvrtc);            /* the library stays loaded; NULL is fine */

const char *fv__nvrtc_name(const fv__nvrtc *nvrtc); /* "nvrtc 13.0" */
const char *fv__nvrtc_path(const fv__nvrtc *nvrtc); /* "/usr/local/cuda/lib64/libnvrtc.so.13", or "libnvrtc.so.13" when the loader knew it */

/* An fv__jit_compile_fn; user is the fv__nvrtc. texts[0] is the source, the others are what it includes. The target is request->arch, or
 * the nearest below that this NVRTC knows: machine code within a generation, else PTX for the driver to translate.
 * out->info gets one line for each kernel (fv__nvrtc_kernel reads them). At most as many compilations as CPUs run at once in this process. */
fv_status fv__nvrtc_compile(void *nvrtc, const fv__jit_request *request, fv__jit_output *out, fv_error *err);

/* Whether requests can be compiled in parts here: a linker of its version is there, and more than one CPU. Loads both. */
bool fv__nvrtc_links(fv__nvrtc *nvrtc);

typedef struct fv__nvrtc_kernel_info {
    char name[96];
    int registers, stack, spill_stores, spill_loads, barriers, shared;      /* bytes but for registers and barriers */
} fv__nvrtc_kernel_info;

/* Kernel i of what fv__nvrtc_compile reported; false: there are no more. */
bool fv__nvrtc_kernel(const char *info, int i, fv__nvrtc_kernel_info *kernel);

#endif
