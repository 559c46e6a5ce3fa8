/* Preloaded into a job: its wall clock jumps, and its writes to files take long, as a file says that all processes map.
 * Monotonic clocks go on as they are: they do not jump on a real machine either. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct trouble {
    volatile long clock_seconds; /* added to the wall clock */
    volatile long disk_micros;   /* before each write and sync */
};
static struct trouble steady;
static struct trouble* trouble = &steady;

__attribute__((constructor)) static void map_trouble(void) {
    const char* path = getenv("UNSTEADY");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void* there = mmap(NULL, sizeof *trouble, PROT_READ, MAP_SHARED, file, 0);
    if (there != MAP_FAILED) trouble = there;
    close(file);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int clock_gettime(clockid_t clock, struct timespec* now) {
    static int (*next)(clockid_t, struct timespec*);
    if (!next) next = NEXT(clock_gettime);
    int failed = next(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += trouble->clock_seconds;
    return failed;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
    (void)zone;
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t* kept) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (kept) *kept = exact.tv_sec;
    return exact.tv_sec;
}

/* A deadline of the wall clock is told to the kernel, whose clock has not jumped. */
int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const struct timespec* until) {
    static int (*next)(pthread_cond_t*, pthread_mutex_t*, const struct timespec*);
    if (!next) next = NEXT(pthread_cond_timedwait);
    struct timespec real = *until;
    struct timespec now;
    NEXT(clock_gettime)(CLOCK_MONOTONIC, &now);
    if (real.tv_sec > now.tv_sec + 1000000000L) real.tv_sec -= trouble->clock_seconds; /* not a monotonic one */
    return next(condition, mutex, &real);
}

static void delay(int file) {
    struct stat what;
    if (!trouble->disk_micros) return;
    int kept = errno;
    if (!fstat(file, &what) && S_ISREG(what.st_mode)) {
        struct timespec pause = {trouble->disk_micros / 1000000, trouble->disk_micros % 1000000 * 1000};
        nanosleep(&pause, NULL);
    }
    errno = kept;
}

#define SLOW(result, name, parameters, arguments)              \
    result name parameters {                                   \
        static result(*next) parameters;                       \
        if (!next) next = (result(*) parameters)dlsym(RTLD_NEXT, #name); \
        delay(file);                                           \
        return next arguments;                                 \
    }

SLOW(ssize_t, write, (int file, const void* from, size_t count), (file, from, count))
SLOW(ssize_t, pwrite64, (int file, const void* from, size_t count, off64_t at), (file, from, count, at))
SLOW(int, fsync, (int file), (file))
SLOW(int, fdatasync, (int file), (file))
