/* os_write.c: write a whole small file so that it is there entirely or not at all; see os.h. */
#include "base/os.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/status.h"

#define SUFFIX_BYTES 48 /* of the name under which it is written, at most */

#if defined(COLI_NO_FILES)
colibri_status_t coli_os_write_file(const char *path, const void *data, size_t bytes) {
    (void)data, (void)bytes;
    return coli_fail(COLIBRI_ERR_UNSUPPORTED, "'%.300s' cannot be written: this library was built without files", path);
}
#else
#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#define MAX_PATH_UNITS 4096

static bool write_and_rename(const char *temporary, const char *path, const void *data, size_t bytes, int *error) {
    WCHAR from[MAX_PATH_UNITS], to[MAX_PATH_UNITS];
    bool done = MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, temporary, -1, from, MAX_PATH_UNITS) &&
                MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, to, MAX_PATH_UNITS);
    HANDLE file = done ? CreateFileW(from, GENERIC_WRITE, 0, NULL, CREATE_NEW, FILE_ATTRIBUTE_NORMAL, NULL)
                       : INVALID_HANDLE_VALUE;
    DWORD written = 0;
    done = file != INVALID_HANDLE_VALUE && WriteFile(file, data, (DWORD)bytes, &written, NULL) && written == bytes &&
           FlushFileBuffers(file);
    if (!done) *error = (int)GetLastError();
    if (file == INVALID_HANDLE_VALUE) return false;
    CloseHandle(file);
    if (done && MoveFileExW(from, to, MOVEFILE_REPLACE_EXISTING)) return true;
    if (done) *error = (int)GetLastError();
    DeleteFileW(from);
    return false;
}
#else
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static bool write_all(int descriptor, const uint8_t *data, size_t bytes) {
    while (bytes > 0) {
        ssize_t n = write(descriptor, data, bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        data += n;
        bytes -= (size_t)n;
    }
    return fsync(descriptor) == 0 || errno == EINVAL; /* a file system without it */
}

/* A link, a device, a pipe: it stays what it is, and is written to. */
static bool is_special(const char *path) {
    struct stat about;
    return lstat(path, &about) == 0 && !S_ISREG(about.st_mode);
}

static bool write_and_rename(const char *temporary, const char *path, const void *data, size_t bytes, int *error) {
    bool special = is_special(path);
    int flags = O_WRONLY | O_CLOEXEC | (special ? O_TRUNC : O_CREAT | O_EXCL);
    int descriptor = open(special ? path : temporary, flags, 0666);
    bool done = descriptor >= 0 && write_all(descriptor, data, bytes);
    if (!done) *error = errno;
    if (descriptor < 0) return false;
    if (close(descriptor) != 0 && done) *error = errno, done = false;
    if (special) return done;
    if (done && rename(temporary, path) == 0) return true;
    if (done) *error = errno;
    unlink(temporary);
    return false;
}
#endif

colibri_status_t coli_os_write_file(const char *path, const void *data, size_t bytes) {
    size_t length = strlen(path);
    char *temporary = malloc(length + SUFFIX_BYTES);
    if (!temporary) return coli_fail(COLIBRI_ERR_OUT_OF_MEMORY, "no memory for the name of '%.300s'", path);
    memcpy(temporary, path, length);
    /* A name of its own for every writer; should there be such a file nevertheless, it stays and this is an error. */
    snprintf(temporary + length, SUFFIX_BYTES, ".%llx-%llx.partly", (unsigned long long)coli_os_now_ns(),
             (unsigned long long)(uintptr_t)temporary);
    int error = 0;
    bool done = write_and_rename(temporary, path, data, bytes, &error);
    free(temporary);
    if (done) return COLIBRI_OK;
    return coli_fail(COLIBRI_ERR_IO, "cannot write '%.300s': %s (error %d)", path, coli_os_reason(error), error);
}
#endif
