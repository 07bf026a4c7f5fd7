/* A wall clock of its own for all processes that preload this: CLOCK_REALTIME plus the seconds in a shared file.

   The monotonic clocks stay as they are, and so do the absolute times that the kernel waits for. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *shift;
static long long none;

static long long seconds(void) {
    if (!shift) {
        const char *path = getenv("PPCONSOLE_TEST_CLOCK");
        int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        void *page = file < 0 ? MAP_FAILED : mmap(0, sizeof none, PROT_READ, MAP_SHARED, file, 0);
        if (file >= 0) close(file);
        shift = page == MAP_FAILED ? &none : page;
    }
    return *shift;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int clock_gettime(clockid_t clock, struct timespec *now) {
    static __typeof__(&clock_gettime) real;
    if (!real) real = REAL(clock_gettime);
    int code = real(clock, now);
    if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += seconds();
    return code;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}

int sem_timedwait(sem_t *sem, const struct timespec *until) {
    struct timespec at = {until->tv_sec - seconds(), until->tv_nsec};
    return REAL(sem_timedwait)(sem, &at);
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until) {
    /* The clock of a condition is not known here; one that is far from the wall clock is monotonic. */
    struct timespec now, at = *until;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (at.tv_sec - now.tv_sec > 30LL * 365 * 86400) at.tv_sec -= seconds();
    return REAL(pthread_cond_timedwait)(cond, mutex, &at);
}
