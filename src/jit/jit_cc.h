/* SPDX-License-Identifier: Apache-2.0 */
/* jit_cc.h -- the system's C compiler: one text to the bytes of a shared library.
 *
 * Nouns
 *   compiler   the first of FV_CC (words with blanks between, nothing is expanded), cc, gcc, clang that PATH has
 *   source     texts[0] of a request: all of the program, it includes nothing
 *
 * It is started by posix_spawn, without a shell, with LC_ALL=C and without the variables that would make it read or write files of its own accord.
 * Source, object, library and diagnostics are memory files: nothing is ever written to a folder, so whoever is killed leaves nothing behind. What is
 * blocked, handled or waited for in the host's process does not matter. A compilation that takes longer than a minute is ended; a terminal's Ctrl-C
 * ends it as it ends the host. */
#ifndef FV__JIT_CC_H
#define FV__JIT_CC_H

#include "jit/jit_cache.h"

enum { FV__CC_WORDS = 16 };

typedef struct fv__cc {
    char path[1024];                /* the program; "" : none was found */
    char words[1024];               /* FV_CC, cut by NULs */
    char *argv[FV__CC_WORDS + 1];   /* its words; points into `words`: not to be copied */
    int num_words;
    char name[256];                 /* for keys: path, size and date of the program, and its words */
} fv__cc;

/* Looks for the compiler; starts nothing. FV_E_COMPILE: there is none, and what to install. */
fv_status fv__cc_find(fv__cc *cc, fv_error *err);

/* An fv__jit_compile_fn; user is an fv__cc that was found. texts[0].name stands in the source's #line: a complaint about it becomes
 * FV_E_COMPILE with that name as the field, its line as the value and the compiler's words in the text. */
fv_status fv__cc_compile(void *cc, const fv__jit_request *request, fv__jit_output *out, fv_error *err);

/* After so many seconds a program is ended. For tests to change. */
extern int fv__cc_seconds;

#endif
