// Makes writes to safetensors files and their syncs fail with EIO while the file named by FAILING_WRITES exists.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int fails(int fd) {
  const char *order = getenv("FAILING_WRITES");
  char link[64], path[4096];
  if (!order || access(order, F_OK)) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return strstr(path, "/checkpoints/") != NULL;
}

#define FAIL_OR(name, result, types, values)                      \
  result name types {                                             \
    static result (*original) types;                              \
    if (!original) original = dlsym(RTLD_NEXT, #name);            \
    if (fails(fd)) { errno = EIO; return -1; }                    \
    return original values;                                       \
  }

FAIL_OR(write, ssize_t, (int fd, const void *data, size_t size), (fd, data, size))
FAIL_OR(pwrite, ssize_t, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
FAIL_OR(pwrite64, ssize_t, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
FAIL_OR(writev, ssize_t, (int fd, const struct iovec *parts, int count), (fd, parts, count))
FAIL_OR(pwritev, ssize_t, (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at))
FAIL_OR(pwritev64, ssize_t, (int fd, const struct iovec *parts, int count, off64_t at), (fd, parts, count, at))
FAIL_OR(fsync, int, (int fd), (fd))
FAIL_OR(fdatasync, int, (int fd), (fd))
