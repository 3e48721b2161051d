/* SPDX-License-Identifier: Apache-2.0 */
/* jit_disk.c -- a folder of entries that several processes share without a lock between them.
 *
 *   <root>/<version>/tmp.<pid>.<n>                    being written, under flock by its writer
 *   <root>/<version>/<arch>/<xx>/<hash>-<by>.<kind>   whole, put there by rename
 *
 *   (1) an entry appears by rename only: a reader sees the old one, the new one or none;
 *   (2) a temporary file is locked for as long as its writer lives. The kernel drops the lock when the writer dies, however that
 *       happens, so whoever gets the lock may remove the file. Nobody ever waits for it;
 *   (3) folders and entries are opened relative to an open folder, never through a link, and each is checked after it was opened:
 *       owned by this user (or root), writable by nobody else;
 *   (4) time stamps are never looked at.
 *
 * Between creating a temporary file and locking it, a sweeper may take it away. Then the rename finds nothing, and the writer writes again.
 */
#include "jit/jit_disk.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define STRING_(x) #x
#define STRING(x) STRING_(x)
#define VERSION_FOLDER STRING(FV_VERSION_MAJOR) "." STRING(FV_VERSION_MINOR) "." STRING(FV_VERSION_PATCH)

static int because(char why[FV__JIT_WHY_CHARS], const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Writes the reason and returns -1, keeping errno. */
static int because(char why[FV__JIT_WHY_CHARS], const char *format, ...)
{
    const int error = errno;
    va_list args;
    va_start(args, format);
    vsnprintf(why, FV__JIT_WHY_CHARS, format, args);
    va_end(args);
    errno = error;
    return -1;
}

/* ------------------------------------------------------------------------------------------------------------ folders */

/* NULL: nobody but its owner can have put it there. */
static const char *distrust(const struct stat *st, bool shared)
{
    if (!shared && st->st_uid != geteuid() && st->st_uid != 0) return "belongs to somebody else";
    if (st->st_mode & S_IWOTH) return "can be written by everybody (chmod o-w makes it usable)";
    if (!shared && (st->st_mode & S_IWGRP)) return "can be written by its group (chmod g-w makes it usable)";
    return NULL;
}

/* Takes an open folder, or fails with a reason when it cannot be trusted. Returns fd, or -1 with EPERM. */
static int trusted(int fd, const char *root, const char *name, bool shared, char why[FV__JIT_WHY_CHARS])
{
    struct stat st;
    const char *fault = fstat(fd, &st) ? "cannot be examined" : distrust(&st, shared);
    if (!fault) return fd;
    close(fd);
    errno = EPERM;
    return because(why, "%.200s%s%s %s", root, *name ? "/" : "", name, fault);
}

/* A folder below an open one. -1 and ENOENT: not there. */
static int open_below(const fv__jit_disk *disk, int parent, const char *name, bool create, char why[FV__JIT_WHY_CHARS])
{
    const int flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    int fd = openat(parent, name, flags);
    if (fd < 0 && errno == ENOENT && create) {
        if (mkdirat(parent, name, 0700) && errno != EEXIST)
            return because(why, "%.200s/%s cannot be created: %s", disk->root, name, strerror(errno));
        fd = openat(parent, name, flags);
    }
    if (fd < 0) return because(why, "%.200s/%s cannot be opened: %s", disk->root, name, strerror(errno));
    return trusted(fd, disk->root, name, disk->shared, why);
}

/* Makes the folders of `path` behind its first `keep` bytes; those that exist are fine. */
static void make_folders(const char *path, size_t keep)
{
    char part[PATH_MAX];
    const size_t length = strlen(path);
    if (length >= sizeof part) return;
    memcpy(part, path, length + 1);
    for (size_t i = keep ? keep : 1; i <= length; i++) {
        if (part[i] != '/' && part[i] != 0) continue;
        const char kept = part[i];
        part[i] = 0;
        if (i > keep) mkdir(part, 0700);
        part[i] = kept;
    }
}

/* A link to the root is followed where the user made it, never in a directory that everybody can write. */
static bool link_is_fine(const fv__jit_disk *disk)
{
    struct stat st;
    if (lstat(disk->root, &st) || !S_ISLNK(st.st_mode)) return true;
    return !disk->no_link && (disk->shared || st.st_uid == geteuid() || st.st_uid == 0);
}

static int open_root(const fv__jit_disk *disk, bool create, char why[FV__JIT_WHY_CHARS])
{
    if (!link_is_fine(disk)) {
        errno = EPERM;
        return because(why, "%.200s is a symbolic link that somebody else may have made", disk->root);
    }
    const int flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC | (disk->no_link ? O_NOFOLLOW : 0);
    int fd = open(disk->root, flags);
    if (fd < 0 && errno == ENOENT && create) {
        make_folders(disk->root, disk->must_exist);
        fd = open(disk->root, flags);
    }
    if (fd < 0) return because(why, "%.200s cannot be %s: %s", disk->root, create ? "created" : "opened", strerror(errno));
    return trusted(fd, disk->root, "", disk->shared, why);
}

static int open_version(const fv__jit_disk *disk, bool create, char why[FV__JIT_WHY_CHARS])
{
    const int root = open_root(disk, create, why);
    if (root < 0) return -1;
    const int fd = open_below(disk, root, VERSION_FOLDER, create, why);
    const int error = errno;
    close(root);
    errno = error;
    return fd;
}

/* The folder of entries whose hash begins like this one's. */
static int open_shelf(const fv__jit_disk *disk, int version, const char *arch, const fv__jit_key *key, bool create,
                      char why[FV__JIT_WHY_CHARS])
{
    char shelf[3];
    snprintf(shelf, sizeof shelf, "%02x", (unsigned)(key->hi >> 56));
    const int folder = open_below(disk, version, arch, create, why);
    if (folder < 0) return -1;
    const int fd = open_below(disk, folder, shelf, create, why);
    const int error = errno;
    close(folder);
    errno = error;
    return fd;
}

/* ------------------------------------------------------------------------------------------------------------ reading */

/* Anything that is not a plain file of ours (a pipe would hang the reader) counts as damage: compiling again replaces it. */
static fv__jit_found read_file(const fv__jit_disk *disk, int shelf, const char *name, void **bytes, size_t *size, char why[FV__JIT_WHY_CHARS])
{
    struct stat st;
    const int fd = openat(shelf, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) {
        if (errno == ENOENT) return FV__JIT_MISS;
        because(why, "%s cannot be opened: %s", name, strerror(errno));
        return FV__JIT_DAMAGED;
    }
    const char *fault = fstat(fd, &st) ? "cannot be examined" : !S_ISREG(st.st_mode) ? "is not a file" : distrust(&st, disk->shared);
    if (!fault && (uint64_t)st.st_size > FV__JIT_MAX_ENTRY) fault = "is too long";
    if (!fault) {
        *size = (size_t)st.st_size;
        *bytes = fv__jit_read_at(fd, 0, *size);
        if (!*bytes) fault = "cannot be read";
    }
    close(fd);
    if (!fault) return FV__JIT_HIT;
    because(why, "%s %s", name, fault);
    return FV__JIT_DAMAGED;
}

static fv__jit_found read_entry(const fv__jit_disk *disk, int shelf, const char *name, const fv__jit_key *key, fv__jit_blob **blob,
                                char why[FV__JIT_WHY_CHARS])
{
    void *bytes = NULL;
    size_t size = 0;
    const fv__jit_found found = read_file(disk, shelf, name, &bytes, &size, why);
    if (found != FV__JIT_HIT) return found;
    const char *fault = NULL;
    *blob = fv__jit_entry_read(bytes, size, &fault);
    if (*blob && !fv__jit_same(&(*blob)->key, key)) {
        fault = "it is the entry of something else";
        fv__jit_blob_free(*blob);
        bytes = *blob = NULL;
    }
    if (*blob) return FV__JIT_HIT;
    free(bytes);
    because(why, "%s is damaged: %s", name, fault);
    return FV__JIT_DAMAGED;
}

/* Whatever compiler made it. Among several, the one whose name sorts first, so that all processes take the same. */
static fv__jit_found read_any(const fv__jit_disk *disk, int shelf, const fv__jit_key *key, const char *kind, fv__jit_blob **blob,
                              char why[FV__JIT_WHY_CHARS])
{
    char prefix[FV__JIT_NAME_CHARS], best[NAME_MAX + 1] = "";
    const fv__jit_key any = { key->hi, key->lo, 0 };
    fv__jit_file_name(&any, kind, prefix);
    const int copy = openat(shelf, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *folder = copy < 0 ? NULL : fdopendir(copy);
    if (!folder) {
        if (copy >= 0) close(copy);
        return FV__JIT_MISS;
    }
    for (struct dirent *e; (e = readdir(folder)); ) {
        const char *dot = strrchr(e->d_name, '.');
        if (strncmp(e->d_name, prefix, strlen(prefix)) || !dot || strcmp(dot + 1, kind)) continue;
        if (!*best || strcmp(e->d_name, best) < 0) strcpy(best, e->d_name);
    }
    closedir(folder);
    return *best ? read_entry(disk, shelf, best, &any, blob, why) : FV__JIT_MISS;
}

fv__jit_found fv__jit_disk_read(const fv__jit_disk *disk, const fv__jit_key *key, const char *kind, const char *arch,
                                fv__jit_blob **blob, char why[FV__JIT_WHY_CHARS])
{
    *blob = NULL;
    const int version = open_version(disk, false, why);
    const int shelf = version < 0 ? -1 : open_shelf(disk, version, arch, key, false, why);
    const int error = errno;
    if (version >= 0) close(version);
    if (shelf < 0) return error == ENOENT ? FV__JIT_MISS : FV__JIT_REFUSED;

    fv__jit_found found = FV__JIT_MISS;
    if (key->compiler) {
        char name[FV__JIT_NAME_CHARS];
        fv__jit_file_name(key, kind, name);
        found = read_entry(disk, shelf, name, key, blob, why);
    }
    if (found == FV__JIT_MISS && (disk->shared || !key->compiler)) found = read_any(disk, shelf, key, kind, blob, why);
    close(shelf);
    return found;
}

/* ------------------------------------------------------------------------------------------------------------ writing */

/* A new temporary file, locked: the first number that no other writer of this process has just now. */
static int make_temporary(int version, char name[64], char why[FV__JIT_WHY_CHARS])
{
    for (int n = 0; n < 1000; n++) {
        snprintf(name, 64, "tmp.%ld.%d", (long)getpid(), n);
        const int fd = openat(version, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (fd >= 0) {
            flock(fd, LOCK_EX | LOCK_NB);       /* where it is not supported, sweepers go by the pid */
            return fd;
        }
        if (errno != EEXIST) break;
    }
    return because(why, "no file can be created: %s", strerror(errno));
}

/* A folder that somebody put in the place of an entry is the only thing that rename cannot replace; it stays, and we do without. */
static bool write_and_rename(int version, int shelf, const char *name, const void *bytes, size_t size, char why[FV__JIT_WHY_CHARS])
{
    char temporary[64];
    for (int attempt = 0; attempt < 3; attempt++) {
        const int fd = make_temporary(version, temporary, why);
        if (fd < 0) return false;
        const bool written = fv__jit_write_all(fd, bytes, size) && !fsync(fd);
        const bool done = written && !renameat(version, temporary, shelf, name);
        const int error = errno;
        if (!done) unlinkat(version, temporary, 0);
        close(fd);
        if (done) return true;
        because(why, "%s cannot be written: %s", name, strerror(error));
        if (!written || error != ENOENT) return false;
    }
    return false;
}

bool fv__jit_disk_write(const fv__jit_disk *disk, const fv__jit_key *key, const char *kind, const char *arch,
                        const void *bytes, size_t size, char why[FV__JIT_WHY_CHARS])
{
    char name[FV__JIT_NAME_CHARS];
    fv__jit_file_name(key, kind, name);
    const int version = open_version(disk, true, why);
    const int shelf = version < 0 ? -1 : open_shelf(disk, version, arch, key, true, why);
    const bool done = shelf >= 0 && write_and_rename(version, shelf, name, bytes, size, why);
    if (shelf >= 0) close(shelf);
    if (version >= 0) close(version);
    return done;
}

/* ----------------------------------------------------------------------------------------------------------- sweeping */

static bool writer_is_dead(int version, const char *name)
{
    const int fd = openat(version, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) return false;
    const bool got = !flock(fd, LOCK_EX | LOCK_NB);
    const bool no_locks = !got && errno != EWOULDBLOCK && errno != EINTR;
    close(fd);
    if (!no_locks) return got;
    const long pid = strtol(name + strlen("tmp."), NULL, 10);
    return pid > 0 && kill((pid_t)pid, 0) && errno == ESRCH;
}

void fv__jit_disk_sweep(const fv__jit_disk *disk)
{
    char why[FV__JIT_WHY_CHARS];
    const int version = open_version(disk, false, why);
    DIR *folder = version < 0 ? NULL : fdopendir(version);
    if (!folder) {
        if (version >= 0) close(version);
        return;
    }
    for (struct dirent *e; (e = readdir(folder)); )
        if (!strncmp(e->d_name, "tmp.", 4) && writer_is_dead(version, e->d_name)) unlinkat(version, e->d_name, 0);
    closedir(folder);
}
