/* SPDX-License-Identifier: Apache-2.0 */
/* asked.h -- calls of the library in cmocka tests, which must succeed or be refused. Whoever includes it has `static fv_error err` before. */
#ifndef FOVEAL_TESTS_ASKED_H
#define FOVEAL_TESTS_ASKED_H

#define OK(call)                                                                                   \
    do {                                                                                           \
        memset(&err, 0, sizeof err);                                                               \
        if ((call) != FV_OK) fail_msg("%s: %s", #call, err.text);                                  \
    } while (0)

/* The call fails with this status, the message and the field hold these words. */
#define REFUSED(call, wanted, field_word, text_word)                                               \
    do {                                                                                           \
        memset(&err, 0, sizeof err);                                                               \
        const fv_status refused_status = (call);                                                   \
        if (refused_status != (wanted)) fail_msg("%s: %s (%s)", #call, fv_status_name(refused_status), err.text); \
        assert_int_equal(err.status, refused_status);                                              \
        if (!strstr(err.field, field_word)) fail_msg("%s: the field is \"%s\"", #call, err.field); \
        if (!strstr(err.text, text_word)) fail_msg("%s: the text is \"%s\"", #call, err.text);     \
    } while (0)

#endif
