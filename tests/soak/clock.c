/* A process's own time of day: the system's and as many seconds more as stand in the file that CLOCK_FILE names.
 *
 * Loaded with LD_PRELOAD. The monotonic clock stays what it is, as it does when somebody sets a machine's time. A wait
 * until a time of day is shifted back by what the process is off; a wait until a time of the monotonic clock, whose
 * numbers are small, is left alone.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <threads.h>
#include <time.h>
#include <unistd.h>

static volatile const int64_t *shared;

__attribute__((constructor)) static void open_file(void) {
    const char *name = getenv("CLOCK_FILE");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *found = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (found != MAP_FAILED) shared = found;
}

static int64_t off(void) { return shared ? *shared : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += off();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into) *into = now.tv_sec;
    return now.tv_sec;
}

int timespec_get(struct timespec *now, int base) {
    return base == TIME_UTC && clock_gettime(CLOCK_REALTIME, now) == 0 ? base : 0;
}

static struct timespec real(const struct timespec *until) {
    struct timespec mine = *until;
    if (mine.tv_sec > 1000000000) mine.tv_sec -= off();
    return mine;
}

#define NEXT(type, name) \
    static type next; \
    if (!next) next = (type)dlsym(RTLD_NEXT, name)

typedef int (*wait_condition)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
typedef int (*wait_c11)(cnd_t *, mtx_t *, const struct timespec *);
typedef int (*wait_semaphore)(sem_t *, const struct timespec *);

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static wait_condition next;
    /* Of this one there is an older version under the same name. */
    if (!next) next = (wait_condition)dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!next) next = (wait_condition)dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec mine = real(until);
    return next(condition, mutex, &mine);
}

/* glibc's own calls the one above from inside, where nothing can be put in its place. librdkafka waits with it. */
int cnd_timedwait(cnd_t *restrict condition, mtx_t *restrict mutex, const struct timespec *restrict until) {
    NEXT(wait_c11, "cnd_timedwait");
    struct timespec mine = real(until);
    return next(condition, mutex, &mine);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    NEXT(wait_semaphore, "sem_timedwait");
    struct timespec mine = real(until);
    return next(semaphore, &mine);
}
