/* Preloaded: a system that lies. It is told by the environment.

   BADCLOCK=FILE: the time of day is wrong by the seconds in FILE, a 64-bit number that may change at any time.
   BADLOCK=1: every lock of a file or folder is granted, as on some network file systems. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define REAL(name)                                          \
    static __typeof__(name) *real;                          \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name);

static volatile int64_t *wrong_by;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("BADCLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *found = mmap(0, 4096, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (found != MAP_FAILED) wrong_by = found;
}

int clock_gettime(clockid_t which, struct timespec *now) {
    REAL(clock_gettime)
    int failed = real(which, now);
    if (!failed && wrong_by && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) now->tv_sec += *wrong_by;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    REAL(gettimeofday)
    int failed = real(now, zone);
    if (!failed && wrong_by) now->tv_sec += *wrong_by;
    return failed;
}

time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}

int flock(int fd, int how) {
    REAL(flock)
    return getenv("BADLOCK") ? 0 : real(fd, how);
}
