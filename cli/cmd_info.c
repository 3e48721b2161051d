/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_info.c -- foveal info: prints fv_info. */
#include "cli.h"

#include <stdlib.h>

int cmd_info(int argc, char **argv)
{
    cli_device device = { 0 };
    bool markdown = false, json = false;
    int first;
    const cli_option options[] = {
        { "markdown", NULL, "as markdown (docs/info.md holds this)",
          CLI_FLAG, &markdown, 0, 0, NULL },
        { "json", NULL, "as JSON", CLI_FLAG, &json, 0, 0, NULL },
        CLI_DEVICE_OPTIONS(device),
        { 0 },
    };
    int code = cli_parse("info [--markdown | --json]", options, argc, argv, &first);
    if (code != CLI_GO_ON)
        return code;
    if (first < argc)
        return cli_misuse("info takes no argument \"%s\"", argv[first]);
    if (markdown && json)
        return cli_misuse("--markdown and --json: only one of them");

    fv_ctx *ctx = NULL;
    if ((code = cli_open(&device, &ctx)) != CLI_OK)
        return code;
    const char *format = markdown ? "markdown" : json ? "json" : "text";
    fv_error err = { 0 };
    size_t size = 0;
    char *text = NULL;
    fv_status s = fv_info(ctx, format, NULL, 0, &size, &err);
    if (s == FV_OK) {
        text = need(size, 1);
        s = fv_info(ctx, format, text, size, NULL, &err);
    }
    if (s == FV_OK)
        fputs(text, stdout);
    else
        code = cli_failed("info", &err);
    free(text);
    fv_close(&ctx);
    return code;
}
