// Loaded in front of libc (LD_PRELOAD): fails the FAULT_AT-th change of a file whose name has FAULT_NAME in it, and all
// changes after it, with the error number FAULT_ERRNO. A process may set these anew, and reset the count.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static long changes = 0;

void reset_changes(void) { changes = 0; }

long count_changes(void) { return changes; }

static int concerned(int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  const char* name = getenv("FAULT_NAME");
  return name != NULL && strstr(path, name) != NULL;
}

// Return 1, with errno set, if this change is to fail.
static int fails(int fd) {
  int before = errno;
  if (!concerned(fd)) {
    errno = before;
    return 0;
  }
  changes++;
  const char* at = getenv("FAULT_AT");
  errno = before;
  if (at == NULL || changes < atol(at)) return 0;
  errno = atoi(getenv("FAULT_ERRNO"));
  return 1;
}

#define REPLACED(type, name, parameters, arguments)                       \
  type name parameters {                                                  \
    static type(*real) parameters = NULL;                                 \
    if (real == NULL) real = (type(*) parameters)dlsym(RTLD_NEXT, #name); \
    if (fails(fd)) return -1;                                             \
    return real arguments;                                                \
  }

REPLACED(ssize_t, write, (int fd, const void* content, size_t size), (fd, content, size))
REPLACED(ssize_t, pwrite, (int fd, const void* content, size_t size, off_t at), (fd, content, size, at))
REPLACED(ssize_t, pwrite64, (int fd, const void* content, size_t size, off64_t at), (fd, content, size, at))
REPLACED(int, fsync, (int fd), (fd))
REPLACED(int, fdatasync, (int fd), (fd))
REPLACED(int, ftruncate, (int fd, off_t length), (fd, length))
REPLACED(int, ftruncate64, (int fd, off64_t length), (fd, length))
