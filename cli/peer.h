/* SPDX-License-Identifier: Apache-2.0 */
/* peer.h -- attention of other projects, out of their own shared libraries: what foveal bench times
 * beside the engine on a CPU.
 *
 * Nouns
 *   kind     a library and a type of its K and V: "torch bf16", "ggml q8_0"
 *   problem  decode or one causal prompt, dense, each head's keys in one piece: the layout that
 *            these libraries like best
 *   way      how the problem is put to the library: "" as its users do, others with what they might
 *            know
 *
 * Nothing is needed to build, and nothing has to be there at run time: prototypes are our own, of
 * plain C functions alone, and libraries are looked for when a case asks. They stay loaded, as they
 * have threads of their own.
 */
#ifndef PEER_H
#define PEER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct peer_problem {
    int64_t requests, q_heads, kv_heads, rows, keys, dim;
    bool causal;                        /* rows = keys */
    float scale;
    uint16_t *q, *k, *v;                /* bf16 [requests][heads][rows or keys][dim] */
} peer_problem;

typedef struct peer_kind peer_kind;

typedef struct peer {
    const peer_kind *kind;
    void *functions;
    char name[48];                      /* with the version, for a row */
    char why[512];                      /* why it is absent */
} peer;

struct peer_kind {
    const char *name;
    const char *kv_dtype;               /* what the engine stores for the comparison */
    const char *file;                   /* the library's ... */
    const char *needs[3];               /* ... and those beside it that it needs; NULL ends them */
    const char *package;                /* where it lies within a Python's site-packages */
    const char *ways[3];                /* what a row calls them; NULL ends them */

    /* The library's functions, or NULL with a reason in `p`. May add the version to p->name. */
    void *(*open)(void *library, int threads, peer *p);
    void (*shut)(void *functions);
    /* The problem, ready to run; NULL: not in this way. Borrows the problem. */
    void *(*prepare)(void *functions, const peer_problem *problem, int way);
    bool (*run)(void *prepared);
    void (*row)(void *prepared, int64_t request, int64_t head, int64_t row, double *out);
    void (*close)(void *prepared);
};

extern const peer_kind peer_torch, peer_ggml_f16, peer_ggml_q8;

/* Looks in `folders` ("a:b", NULL: none), where the loader looks, and in the site-packages of the
 * python3 on PATH. false: absent, with a reason. */
bool peer_open(const peer_kind *kind, const char *folders, int threads, peer *out);
void peer_close(peer *p);

/* The folder that a loaded library lies in. */
void peer_folder(void *library, char *out, size_t size);

/* Fills `slots`, one pointer a name, from the library and those it needs. false: p->why names the
 * first that there is not (p NULL: never mind). */
bool peer_functions(void *library, const char *const *names, void *slots, peer *p);

#endif
