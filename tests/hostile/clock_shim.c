/* Shifts the wall clock of a process, and only that: CLOCK_REALTIME by the seconds in the file that FOREBAY_TEST_CLOCK names,
   which may change at any time. The monotonic clock stays as it is. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile int64_t *shift;
static int (*real_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void attach(void)
{
    const char *path = getenv("FOREBAY_TEST_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *memory = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *shift, PROT_READ, MAP_SHARED, file, 0);
    real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    if (memory != MAP_FAILED)
        shift = memory;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    if (!real_gettime)
        real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real_gettime(clock, now);
    if (result == 0 && shift && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *shift;
    return result;
}

int gettimeofday(struct timeval *now, void *zone)
{
    struct timespec precise;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result)
{
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (result)
        *result = precise.tv_sec;
    return precise.tv_sec;
}
