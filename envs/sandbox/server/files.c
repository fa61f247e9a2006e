/* Files of the sandbox, read and written in pieces: process 1 sees what the commands see, and follows their links only
 * inside. What is no plain file (a pipe, a device) is refused before it can block anything.
 */
#define _GNU_SOURCE
#include "server.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FIRST = 1, LAST = 2 };

struct file {
    struct file *next;
    uint32_t id;
    int fd;
    uint64_t left; /* of what may be read */
};

static struct file *reading, *writing;

static void done(uint32_t id, int why) { send_frame(OP_DONE, id, &(int32_t){why}, 4); }

static int open_plain(const char *path, int flags, mode_t mode)
{
    struct stat about;
    if (stat(path, &about) == 0 && !S_ISREG(about.st_mode)) {
        errno = S_ISDIR(about.st_mode) ? EISDIR : EINVAL;
        return -1;
    }
    return open(path, flags | O_NONBLOCK | O_CLOEXEC | O_NOCTTY, mode);
}

static struct file *add(struct file **list, uint32_t id, int fd)
{
    struct file *file = calloc(1, sizeof *file);
    *file = (struct file){.next = *list, .id = id, .fd = fd};
    *list = file;
    return file;
}

static void drop(struct file **list, struct file *file)
{
    while (*list != file)
        list = &(*list)->next;
    *list = file->next;
    close(file->fd);
    free(file);
}

void file_read(uint32_t id, struct cursor *request)
{
    uint64_t max_bytes = take_u32(request);
    const char *path = take_text(request);
    int fd = request->bad ? -1 : open_plain(path, O_RDONLY, 0);
    if (fd < 0) {
        done(id, request->bad ? EINVAL : errno);
        return;
    }
    add(&reading, id, fd)->left = max_bytes;
}

bool files_waiting(void) { return reading != NULL; }

void files_pump(void)
{
    static uint8_t data[CHUNK_BYTES];
    for (struct file *file = reading, *next; file != NULL; file = next) {
        next = file->next;
        if (queued_bytes() > QUEUE_BYTES)
            return;
        ssize_t count = read(file->fd, data, sizeof data);
        int why = count < 0 ? errno : (uint64_t)count > file->left ? EFBIG : 0;
        if (why == 0 && count > 0) {
            file->left -= (uint64_t)count;
            send_frame(OP_DATA, file->id, data, (size_t)count);
            continue;
        }
        done(file->id, why);
        drop(&reading, file);
    }
}

/* The folders above a path, as mkdir -p makes them. */
static int make_folders(const char *path)
{
    char *copy = strdup(path);
    for (char *at = copy + 1; (at = strchr(at, '/')) != NULL; at++) {
        *at = 0;
        if (mkdir(copy, 0777) != 0 && errno != EEXIST && errno != EROFS && errno != EACCES) {
            int why = errno;
            free(copy);
            return why;
        }
        *at = '/';
    }
    free(copy);
    return 0;
}

static int write_whole(int fd, const uint8_t *data, size_t size)
{
    while (size > 0) {
        ssize_t count = write(fd, data, size);
        if (count < 0)
            return errno;
        data += count;
        size -= (size_t)count;
    }
    return 0;
}

/* One piece of a file: the first one opens it, the last one is answered; so is a failure, and what follows it is
   thrown away. */
void file_write(uint32_t id, struct cursor *request)
{
    uint32_t flags = take_u32(request), mode = take_u32(request);
    const char *path = take_text(request);
    struct file *file = writing;
    while (file != NULL && file->id != id)
        file = file->next;
    int why = request->bad ? EINVAL : 0;
    if (why == 0 && (flags & FIRST) != 0) {
        why = make_folders(path);
        int fd = why == 0 ? open_plain(path, O_WRONLY | O_CREAT | O_TRUNC, mode) : -1;
        if (why == 0 && fd < 0)
            why = errno;
        if (fd >= 0) {
            file = add(&writing, id, fd);
            if (fchmod(fd, mode) != 0 && errno != EPERM)
                why = errno;
        }
    } else if (file == NULL) {
        return;
    }
    uint64_t size = (uint64_t)(request->end - request->at);
    if (why == 0 && limits.max_file_bytes != 0 && (uint64_t)lseek(file->fd, 0, SEEK_CUR) + size > limits.max_file_bytes)
        why = EFBIG;
    if (why == 0)
        why = write_whole(file->fd, request->at, size);
    if (why == 0 && (flags & LAST) == 0)
        return;
    done(id, why);
    if (file != NULL)
        drop(&writing, file);
}
