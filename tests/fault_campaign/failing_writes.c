// Makes writes and syncs below checkpoints/ and tensorboard/, and the making of files there, fail while the file named by
// FAILING_WRITES exists. It holds the number of the error: EIO of a broken disk, ENOSPC of a full one, EROFS of one that
// was made read-only, which refuses new files, new names and removals, too.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static int order(void) {
  const char *name = getenv("FAILING_WRITES");
  char text[16];
  if (!name) return 0;
  int file = syscall(SYS_openat, AT_FDCWD, name, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  ssize_t size = syscall(SYS_read, file, text, sizeof text - 1);
  syscall(SYS_close, file);
  if (size <= 0) return 0;
  text[size] = 0;
  return atoi(text);
}

static int is_target(const char *path) {
  return strstr(path, "/checkpoints/") || strstr(path, "/tensorboard/");
}

static int fails(int fd) {
  char link[64], path[4096];
  int error = order();
  if (!error) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return is_target(path) ? error : 0;
}

static int is_read_only(const char *path) {
  return path && is_target(path) && order() == EROFS;
}

#define FAIL_OR(name, result, types, values)                            \
  result name types {                                                   \
    static result (*original) types;                                    \
    if (!original) original = dlsym(RTLD_NEXT, #name);                  \
    int error = fails(fd);                                              \
    if (error) { errno = error; return -1; }                            \
    return original values;                                             \
  }

#define READ_ONLY_OR(name, types, values)                               \
  int name types {                                                      \
    static int (*original) types;                                       \
    if (!original) original = dlsym(RTLD_NEXT, #name);                  \
    if (is_read_only(path)) { errno = EROFS; return -1; }               \
    return original values;                                             \
  }

#define OPEN_OR(name, types, values)                                    \
  int name types {                                                      \
    static int (*original) types;                                       \
    if (!original) original = dlsym(RTLD_NEXT, #name);                  \
    mode_t mode = 0;                                                    \
    if (flags & (O_CREAT | O_TMPFILE)) {                                \
      va_list rest;                                                     \
      va_start(rest, flags);                                            \
      mode = va_arg(rest, mode_t);                                      \
      va_end(rest);                                                     \
    }                                                                   \
    if (flags & (O_CREAT | O_WRONLY | O_RDWR) && is_read_only(path)) {  \
      errno = EROFS;                                                    \
      return -1;                                                        \
    }                                                                   \
    return original values;                                             \
  }

FAIL_OR(write, ssize_t, (int fd, const void *data, size_t size), (fd, data, size))
FAIL_OR(pwrite, ssize_t, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
FAIL_OR(pwrite64, ssize_t, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
FAIL_OR(writev, ssize_t, (int fd, const struct iovec *parts, int count), (fd, parts, count))
FAIL_OR(pwritev, ssize_t, (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at))
FAIL_OR(pwritev64, ssize_t, (int fd, const struct iovec *parts, int count, off64_t at), (fd, parts, count, at))
FAIL_OR(ftruncate, int, (int fd, off_t size), (fd, size))
FAIL_OR(ftruncate64, int, (int fd, off64_t size), (fd, size))
FAIL_OR(fsync, int, (int fd), (fd))
FAIL_OR(fdatasync, int, (int fd), (fd))
OPEN_OR(open, (const char *path, int flags, ...), (path, flags, mode))
OPEN_OR(open64, (const char *path, int flags, ...), (path, flags, mode))
OPEN_OR(openat, (int folder, const char *path, int flags, ...), (folder, path, flags, mode))
OPEN_OR(openat64, (int folder, const char *path, int flags, ...), (folder, path, flags, mode))
READ_ONLY_OR(mkdir, (const char *path, mode_t mode), (path, mode))
READ_ONLY_OR(mkdirat, (int folder, const char *path, mode_t mode), (folder, path, mode))
READ_ONLY_OR(rename, (const char *path, const char *to), (path, to))
READ_ONLY_OR(renameat, (int folder, const char *path, int other, const char *to), (folder, path, other, to))
READ_ONLY_OR(unlink, (const char *path), (path))
READ_ONLY_OR(rmdir, (const char *path), (path))
