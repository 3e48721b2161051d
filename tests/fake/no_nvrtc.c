/* SPDX-License-Identifier: Apache-2.0 */
/* no_nvrtc.c -- a compiler for tests that launch kernels on the driver of cuda.c, where nothing runs: whatever it is given becomes an empty image. */
#include <stddef.h>
#include <string.h>

static const char image[64] = "\177ELF";

int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return 0; }
const char *nvrtcGetErrorString(int result) { return result ? "NVRTC_ERROR" : "NVRTC_SUCCESS"; }

static const int archs[] = { 80, 86, 89, 90, 100, 120 };
int nvrtcGetNumSupportedArchs(int *count) { *count = sizeof archs / sizeof *archs; return 0; }
int nvrtcGetSupportedArchs(int *out) { memcpy(out, archs, sizeof archs); return 0; }
int nvrtcCreateProgram(void **p, const char *text, const char *name, int n, const char *const *headers, const char *const *names)
{
    (void)text, (void)name, (void)n, (void)headers, (void)names;
    *p = (void *)image;
    return 0;
}
int nvrtcDestroyProgram(void **p) { *p = NULL; return 0; }
int nvrtcCompileProgram(void *p, int n, const char *const *options) { (void)p, (void)n, (void)options; return 0; }
int nvrtcGetProgramLogSize(void *p, size_t *size) { (void)p; *size = 1; return 0; }
int nvrtcGetProgramLog(void *p, char *log) { (void)p; *log = 0; return 0; }
int nvrtcGetCUBINSize(void *p, size_t *size) { (void)p; *size = sizeof image; return 0; }
int nvrtcGetCUBIN(void *p, char *cubin) { (void)p; memcpy(cubin, image, sizeof image); return 0; }
int nvrtcGetPTXSize(void *p, size_t *size) { (void)p; *size = 1; return 0; }
int nvrtcGetPTX(void *p, char *ptx) { (void)p; *ptx = 0; return 0; }
