/* SPDX-License-Identifier: Apache-2.0 */
/* nvrtc.c -- a compiler of kernels for the processor it runs on: player.cpp with a program's texts, by the C++ compiler that FAKE_CXX names, into a
 * library in place of a cubin. For the attention kernel; other programs become an ELF image that does nothing (simt.cpp plays them).
 * FAKE_PLAYER: the folder of player.cpp. Built as a library that FV_NVRTC_PATH points at. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct program { char folder[64], name[128]; char *image; size_t size; } program;

static int put(const program *p, const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", p->folder, name);
    FILE *f = fopen(path, "w");
    if (!f) return 1;
    fputs(text, f);
    return fclose(f);
}

int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return 0; }
const char *nvrtcGetErrorString(int result) { return result ? "NVRTC_ERROR_COMPILATION" : "NVRTC_SUCCESS"; }
int nvrtcGetNumSupportedArchs(int *count) { *count = 2; return 0; }
int nvrtcGetSupportedArchs(int *archs) { archs[0] = 80; archs[1] = 90; return 0; }
int nvrtcGetProgramLogSize(program *p, size_t *size) { (void)p; *size = 1; return 0; }
int nvrtcGetProgramLog(program *p, char *log) { (void)p; *log = 0; return 0; }
int nvrtcGetCUBINSize(program *p, size_t *size) { *size = p->size; return 0; }
int nvrtcGetCUBIN(program *p, char *cubin) { memcpy(cubin, p->image, p->size); return 0; }
int nvrtcGetPTXSize(program *p, size_t *size) { return nvrtcGetCUBINSize(p, size); }
int nvrtcGetPTX(program *p, char *ptx) { return nvrtcGetCUBIN(p, ptx); }

int nvrtcCreateProgram(program **out, const char *text, const char *name, int num_headers, const char *const *headers, const char *const *names)
{
    program *p = *out = calloc(1, sizeof *p);
    const char *temp = getenv("TMPDIR"), *slash = strrchr(name, '/');
    snprintf(p->folder, sizeof p->folder, "%s/foveal-play-XXXXXX", temp && strlen(temp) < 30 ? temp : "/tmp");
    snprintf(p->name, sizeof p->name, "%s", slash ? slash + 1 : name);
    if (!mkdtemp(p->folder) || put(p, p->name, text)) return 1;
    for (int i = 0; i < num_headers; i++) if (put(p, names[i], headers[i])) return 1;
    return 0;
}

int nvrtcDestroyProgram(program **p)
{
    char command[256];
    snprintf(command, sizeof command, "rm -rf '%s'", (*p)->folder);
    if (system(command)) perror("rm");
    free((*p)->image);
    free(*p);
    *p = NULL;
    return 0;
}

int nvrtcCompileProgram(program *p, int num_options, const char *const *options)
{
    char command[1024], path[128];
    (void)num_options, (void)options;
    if (!strstr(p->name, "attend")) {
        p->image = calloc(1, p->size = 64);
        memcpy(p->image, "\177ELF", 4);
        return 0;
    }
    snprintf(command, sizeof command, "%s -std=c++17 -O1 -w -fPIC -shared -U_FORTIFY_SOURCE -DPLAYED='\"%s\"' -I '%s' '%s/player.cpp' -o '%s/out.so' >&2",
             getenv("FAKE_CXX") ? getenv("FAKE_CXX") : "c++", p->name, p->folder, getenv("FAKE_PLAYER") ? getenv("FAKE_PLAYER") : ".", p->folder);
    if (system(command)) return 6;
    snprintf(path, sizeof path, "%s/out.so", p->folder);
    FILE *f = fopen(path, "r");
    if (!f) return 6;
    fseek(f, 0, SEEK_END);
    p->size = (size_t)ftell(f);
    p->image = malloc(p->size);
    rewind(f);
    const size_t got = fread(p->image, 1, p->size, f);
    fclose(f);
    return got == p->size ? 0 : 6;
}
