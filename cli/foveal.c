/* SPDX-License-Identifier: Apache-2.0 */
/* foveal.c -- the command: a table of sub-commands. Each lives in its cmd_*.c and sees the library
 * through its public header. */
#include "cli.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

static int cmd_version(int argc, char **argv)
{
    (void)argv;
    if (argc > 1)
        return cli_misuse("version takes no arguments");
    printf("foveal %s (ABI %d)\n", fv_version(), FV_ABI_VERSION);
    return CLI_OK;
}

static int cmd_help(int argc, char **argv);

static const cli_command commands[] = {
    { "replay", "serve a real trace at the attention level, check it, measure it", cmd_replay },
    { "plan", "show how a batch given as a small text file is cut into work", cmd_plan },
    { "bench", "time the engine beside the limits of this machine", cmd_bench },
    { "jit", "compile kernels ahead, list them, put them into bundles", cmd_jit },
    { "variant", "check and time an attention variant of your own", cmd_variant },
    { "info", "what this library and this machine can do", cmd_info },
    { "version", "print the version", cmd_version },
    { "help", "this text, or the options of a command: foveal help replay", cmd_help },
};

enum { NUM_COMMANDS = sizeof commands / sizeof commands[0] };

static const cli_command *find(const char *name)
{
    for (int i = 0; i < NUM_COMMANDS; i++)
        if (!strcmp(commands[i].name, name))
            return &commands[i];
    return NULL;
}

static void print_commands(FILE *out)
{
    fputs("usage: foveal COMMAND [OPTIONS]\n\ncommands:\n", out);
    for (int i = 0; i < NUM_COMMANDS; i++)
        fprintf(out, "  %-10s %s\n", commands[i].name, commands[i].summary);
    fputs("\nfoveal COMMAND --help lists the options of a command.\n", out);
}

static int cmd_help(int argc, char **argv)
{
    if (argc < 2) {
        print_commands(stdout);
        return CLI_OK;
    }
    const cli_command *command = find(argv[1]);
    if (!command)
        return cli_misuse("no command \"%s\"; foveal help lists them", argv[1]);
    if (command->run == cmd_help || command->run == cmd_version) {
        printf("foveal %s: %s\n", command->name, command->summary);
        return CLI_OK;
    }
    char help[] = "--help", *arguments[] = { argv[1], help, NULL };
    return command->run(2, arguments);
}

/* A standard stream that is closed would lend its number to the next file that is opened, and what
 * is printed would land there. Opened the wrong way round, it fails as a closed one does. */
static void hold_standard_streams(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd ? O_RDONLY : O_WRONLY) < 0)
            return;
}

int main(int argc, char **argv)
{
    hold_standard_streams();
    if (argc < 2) {
        print_commands(stderr);
        return CLI_USAGE;
    }
    const char *name = argv[1];
    if (!strcmp(name, "--help") || !strcmp(name, "-h"))
        name = "help";
    if (!strcmp(name, "--version"))
        name = "version";
    const cli_command *command = find(name);
    if (!command)
        return cli_misuse("no command \"%s\"; foveal help lists them", name);
    const int code = command->run(argc - 1, argv + 1);
    if ((fflush(stdout) || ferror(stdout)) && code == CLI_OK)
        return cli_fail("standard output could not be written");
    return code;
}
