/* Preloaded: calls that write to a store's file (data.mdb, *.log, *.index, *.new) fail when told to, the first
   of them half done.

   badio_arm(k, error, times): from the k-th such call on, so many fail with that errno; 0 for none.
   badio_calls(): such calls since then. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static long calls, first, failing, error_number;

void badio_arm(long k, long error, long times) {
    calls = 0;
    first = k;
    error_number = error;
    failing = times;
}

long badio_calls(void) { return calls; }

static int ends(const char *path, ssize_t length, const char *end) {
    ssize_t size = (ssize_t)strlen(end);
    return length >= size && !memcmp(path + length - size, end, (size_t)size);
}

static int fails(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path);
    if (!ends(path, length, "data.mdb") && !ends(path, length, ".log") && !ends(path, length, ".index") &&
        !ends(path, length, ".new"))
        return 0;
    long call = __sync_add_and_fetch(&calls, 1);
    if (!first || call < first || call >= first + failing) return 0;
    return call == first ? 2 : 1;
}

#define REAL(name)                                          \
    static __typeof__(name) *real;                          \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name);
#define REFUSE return (errno = (int)error_number, -1)

#define POSITIONED(name, offset_type)                                              \
    ssize_t name(int fd, const void *data, size_t count, offset_type offset) {     \
        REAL(name)                                                                 \
        int how = fails(fd);                                                       \
        if (!how) return real(fd, data, count, offset);                            \
        if (how == 2) (void)!real(fd, data, count / 2, offset);                    \
        REFUSE;                                                                    \
    }
POSITIONED(pwrite, off_t)
POSITIONED(pwrite64, off64_t)

#define SCATTERED(name, offset_type)                                                   \
    ssize_t name(int fd, const struct iovec *parts, int count, offset_type offset) {   \
        REAL(name)                                                                     \
        int how = fails(fd);                                                           \
        if (!how) return real(fd, parts, count, offset);                               \
        if (how == 2 && count > 1) (void)!real(fd, parts, count / 2, offset);          \
        REFUSE;                                                                        \
    }
SCATTERED(pwritev, off_t)
SCATTERED(pwritev64, off64_t)

ssize_t write(int fd, const void *data, size_t count) {
    REAL(write)
    if (fails(fd)) REFUSE;
    return real(fd, data, count);
}

#define PLAIN(name)              \
    int name(int fd) {           \
        REAL(name)               \
        if (fails(fd)) REFUSE;   \
        return real(fd);         \
    }
PLAIN(fsync)
PLAIN(fdatasync)

int ftruncate(int fd, off_t length) {
    REAL(ftruncate)
    if (fails(fd)) REFUSE;
    return real(fd, length);
}

int ftruncate64(int fd, off64_t length) {
    REAL(ftruncate64)
    if (fails(fd)) REFUSE;
    return real(fd, length);
}
