/* SPDX-License-Identifier: Apache-2.0 */
/* core.h -- macros and tiny inlines that every file may use; includes nothing of ours but the public header. */
#ifndef FV__CORE_H
#define FV__CORE_H

#include "foveal/foveal.h"

#define FV__MAX_DIM      576        /* widest head */
#define FV__MAX_VARIANTS 8          /* variants of one problem */
#define FV__MAX_PARAMS   12         /* parameters of one variant */
#define FV__MAX_LEVELS   16         /* segments that a row may lie in */
#define FV__KEY_BLOCK    64         /* keys that the planner counts as one block; cuts lie on its borders */
#define FV__NO_BOUND     (1 << 30)  /* "infinite" for int parameters; positions stay below it */

#define FV__COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

static inline int64_t fv__min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t fv__max64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int32_t fv__min32(int32_t a, int32_t b) { return a < b ? a : b; }
static inline int32_t fv__max32(int32_t a, int32_t b) { return a > b ? a : b; }
static inline int64_t fv__div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t fv__round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

#endif
