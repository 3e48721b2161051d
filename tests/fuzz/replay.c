/* SPDX-License-Identifier: Apache-2.0 */
/* replay.c -- feeds files, and all files of folders, to a fuzzer's entry point, in the order of their names. Linked to each fuzz_NAME.c where no
 * fuzzing compiler is used; a crash or a sanitizer's report ends the program. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static long num_inputs;

static int replay_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    struct stat info;
    if (!file || fstat(fileno(file), &info)) {
        fprintf(stderr, "replay: %s cannot be read\n", path);
        if (file) fclose(file);
        return 1;
    }
    const size_t size = (size_t)info.st_size;
    uint8_t *data = malloc(size ? size : 1);            /* of exactly this size: what reads past it is seen */
    const int bad = !data || fread(data, 1, size, file) != size;
    fclose(file);
    if (bad) fprintf(stderr, "replay: %s cannot be read\n", path);
    else LLVMFuzzerTestOneInput(data, size);
    free(data);
    num_inputs++;
    return bad;
}

static int visible(const struct dirent *entry) { return entry->d_name[0] != '.'; }

static int replay_path(const char *path)
{
    struct stat info;
    if (stat(path, &info) || !S_ISDIR(info.st_mode)) return replay_file(path);
    struct dirent **entries;
    const int n = scandir(path, &entries, visible, alphasort);
    int bad = n < 0;
    for (int i = 0; i < n; i++) {
        char inner[4096];
        if (snprintf(inner, sizeof inner, "%s/%s", path, entries[i]->d_name) >= (int)sizeof inner) bad = 1;
        else bad |= replay_file(inner);
        free(entries[i]);
    }
    if (n >= 0) free(entries);
    return bad;
}

int main(int argc, char **argv)
{
    int bad = 0;
    for (int i = 1; i < argc; i++) bad |= replay_path(argv[i]);
    printf("%ld inputs\n", num_inputs);
    return bad || num_inputs == 0;
}
