/* An LD_PRELOAD layer that makes chosen file calls below one directory fail, hang, fall short or flip a bit.
 *
 * FOREBAY_SHIM names a control file of struct control, mapped shared by every process: the tests write it, the calls read it.
 * A call counts when its path (or the path its descriptor was opened with) lies below `root` and holds `match`.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { NONE, OPEN, PWRITE, FSYNC, PREAD, RENAME, LINK, UNLINK, DIRFSYNC };
enum { HANG = -1, SHORT = -2, FLIP = -3 };

struct control {
    atomic_int call;      /* which of the calls above */
    atomic_int action;    /* an errno, or HANG, SHORT, FLIP */
    atomic_int remaining; /* how many more times */
    atomic_int hits;      /* how many times it has struck */
    char root[512];
    char match[128];
};

static struct control *control;
static char *paths[65536];

__attribute__((constructor)) static void start(void) {
    const char *name = getenv("FOREBAY_SHIM");
    int fd = name ? (int)open(name, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *at = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at != MAP_FAILED) control = at;
    close(fd);
}

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }
#define REAL(type, name, ...)                                   \
    static type (*real_call)(__VA_ARGS__);                      \
    if (!real_call) real_call = (type(*)(__VA_ARGS__))real(name)

static int below(const char *path) {
    size_t size = strlen(control->root);
    return size && path && !strncmp(path, control->root, size) && strstr(path + size, control->match) != NULL;
}

/* The action to take on this call now, 0 for none; a hang ends when the control no longer says so. */
static int strike(int call, const char *path) {
    if (!control || atomic_load(&control->call) != call || !below(path)) return 0;
    int left = atomic_load(&control->remaining);
    do {
        if (left <= 0) return 0;
    } while (!atomic_compare_exchange_weak(&control->remaining, &left, left - 1));
    int action = atomic_load(&control->action);
    atomic_fetch_add(&control->hits, 1);
    if (action != HANG) return action;
    struct timespec pause = {0, 10 * 1000 * 1000};
    while (atomic_load(&control->action) == HANG && atomic_load(&control->call) == call) nanosleep(&pause, NULL);
    return 0;
}

#define FAIL(call, path)                                        \
    int action = strike(call, path);                            \
    if (action > 0) {                                           \
        errno = action;                                         \
        return -1;                                              \
    }

static const char *path_of(int fd) { return fd >= 0 && fd < 65536 ? paths[fd] : NULL; }

static int note(int fd, const char *path) {
    if (fd >= 0 && fd < 65536 && control && control->root[0] && !strncmp(path, control->root, strlen(control->root))) {
        free(paths[fd]);
        paths[fd] = strdup(path);
    }
    return fd;
}

#define OPEN_AS(name)                                           \
    int name(const char *path, int flags, ...) {                \
        REAL(int, #name, const char *, int, ...);               \
        va_list rest;                                           \
        va_start(rest, flags);                                  \
        mode_t mode = va_arg(rest, mode_t);                     \
        va_end(rest);                                           \
        if (!(flags & O_DIRECTORY)) {                           \
            FAIL(OPEN, path);                                   \
        }                                                       \
        return note(real_call(path, flags, mode), path);        \
    }
OPEN_AS(open)
OPEN_AS(open64)

int close(int fd) {
    REAL(int, "close", int);
    if (fd >= 0 && fd < 65536 && paths[fd]) {
        char *path = paths[fd];
        paths[fd] = NULL;
        free(path);
    }
    return real_call(fd);
}

/* By whole blocks, as direct I/O is cut short. */
static size_t shorter(size_t size) { return size > 8192 ? size / 2 / 4096 * 4096 : size > 4096 ? 4096 : size; }

#define PWRITE_AS(name)                                                      \
    ssize_t name(int fd, const void *data, size_t size, off_t offset) {      \
        REAL(ssize_t, #name, int, const void *, size_t, off_t);              \
        FAIL(PWRITE, path_of(fd));                                           \
        return real_call(fd, data, action == SHORT ? shorter(size) : size, offset); \
    }
PWRITE_AS(pwrite)
PWRITE_AS(pwrite64)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(ssize_t, "write", int, const void *, size_t);
    FAIL(PWRITE, path_of(fd));
    return real_call(fd, data, action == SHORT ? shorter(size) : size);
}

static ssize_t flipped(ssize_t got, char *data, int action) {
    if (got > 0 && action == FLIP) data[got / 3] ^= 1;
    return got;
}

#define PREAD_AS(name)                                                       \
    ssize_t name(int fd, void *data, size_t size, off_t offset) {            \
        REAL(ssize_t, #name, int, void *, size_t, off_t);                    \
        FAIL(PREAD, path_of(fd));                                            \
        return flipped(real_call(fd, data, action == SHORT ? shorter(size) : size, offset), data, action); \
    }
PREAD_AS(pread)
PREAD_AS(pread64)

#define PREADV_AS(name)                                                      \
    ssize_t name(int fd, const struct iovec *parts, int count, off_t offset) { \
        REAL(ssize_t, #name, int, const struct iovec *, int, off_t);         \
        FAIL(PREAD, path_of(fd));                                            \
        struct iovec first = parts[0];                                       \
        if (action == SHORT) first.iov_len = shorter(first.iov_len);         \
        ssize_t got = action ? real_call(fd, &first, 1, offset) : real_call(fd, parts, count, offset); \
        return flipped(got, first.iov_base, action);                         \
    }
PREADV_AS(preadv)
PREADV_AS(preadv64)

/* What Python calls where the C library has it. */
#define PREADV2_AS(name)                                                     \
    ssize_t name(int fd, const struct iovec *parts, int count, off_t offset, int flags) { \
        REAL(ssize_t, #name, int, const struct iovec *, int, off_t, int);    \
        FAIL(PREAD, path_of(fd));                                            \
        struct iovec first = parts[0];                                       \
        if (action == SHORT) first.iov_len = shorter(first.iov_len);         \
        ssize_t got = action ? real_call(fd, &first, 1, offset, flags) : real_call(fd, parts, count, offset, flags); \
        return flipped(got, first.iov_base, action);                         \
    }
PREADV2_AS(preadv2)
PREADV2_AS(preadv64v2)

ssize_t read(int fd, void *data, size_t size) {
    REAL(ssize_t, "read", int, void *, size_t);
    FAIL(PREAD, path_of(fd));
    return flipped(real_call(fd, data, action == SHORT ? shorter(size) : size), data, action);
}

static int is_directory(int fd) {
    struct stat found;
    return fstat(fd, &found) == 0 && S_ISDIR(found.st_mode);
}

int fsync(int fd) {
    REAL(int, "fsync", int);
    if (path_of(fd)) {
        FAIL(is_directory(fd) ? DIRFSYNC : FSYNC, path_of(fd));
    }
    return real_call(fd);
}

#define TWO_PATHS(name, call)                                   \
    int name(const char *from, const char *to) {                \
        REAL(int, #name, const char *, const char *);           \
        FAIL(call, to);                                         \
        return real_call(from, to);                             \
    }
TWO_PATHS(rename, RENAME)
TWO_PATHS(link, LINK)

int linkat(int from_dir, const char *from, int to_dir, const char *to, int flags) {
    REAL(int, "linkat", int, const char *, int, const char *, int);
    FAIL(LINK, to);
    return real_call(from_dir, from, to_dir, to, flags);
}

int unlink(const char *path) {
    REAL(int, "unlink", const char *);
    FAIL(UNLINK, path);
    return real_call(path);
}
