/* The process number 1 of a sandbox: it runs commands and moves files for the client at the other end of one channel.
 *
 * stdin and stdout are the channel. When it ends, because the client closed it or died, this process exits, and the
 * kernel ends every other process of the sandbox with it. It never blocks: all that it waits for is in one poll().
 *
 * Commands run as the same user, so they could look into this process; it makes itself undumpable, which closes its
 * memory and its open files to them. Signals from inside do not reach process 1, which has no handler.
 */
#define _GNU_SOURCE
#include "server.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/keyctl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MAX_POLLED = 8192, VERSION = 1 };

struct limits limits = {.oom_fd = -1};

static struct {
    uint8_t *bytes;
    size_t room, start, end;
} inbox, outbox;

/* When the client last said something. A container engine that is killed can leave the channel open for ever. */
static int64_t heard_at;

static void die(const char *what)
{
    fprintf(stderr, "sandbox server: %s: %s\n", what, strerror(errno));
    _exit(70);
}

int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

uint32_t take_u32(struct cursor *cursor)
{
    uint32_t value = 0;
    if (cursor->end - cursor->at < 4) {
        cursor->bad = true;
        return 0;
    }
    memcpy(&value, cursor->at, 4);
    cursor->at += 4;
    return value;
}

const char *take_text(struct cursor *cursor)
{
    const uint8_t *end = memchr(cursor->at, 0, (size_t)(cursor->end - cursor->at));
    if (end == NULL) {
        cursor->bad = true;
        return "";
    }
    const char *text = (const char *)cursor->at;
    cursor->at = end + 1;
    return text;
}

size_t queued_bytes(void) { return outbox.end - outbox.start; }

static void queue(const void *data, size_t size)
{
    if (outbox.end + size > outbox.room && outbox.start > 0) {
        memmove(outbox.bytes, outbox.bytes + outbox.start, queued_bytes());
        outbox.end -= outbox.start;
        outbox.start = 0;
    }
    if (outbox.end + size > outbox.room) {
        outbox.room = (outbox.end + size) * 2;
        outbox.bytes = realloc(outbox.bytes, outbox.room);
        if (outbox.bytes == NULL)
            die("memory");
    }
    memcpy(outbox.bytes + outbox.end, data, size);
    outbox.end += size;
}

void send_parts(int op, uint32_t id, const void *head, size_t head_size, const void *body, size_t body_size)
{
    uint8_t header[HEADER_BYTES] = {0};
    uint32_t size = (uint32_t)(head_size + body_size);
    memcpy(header, &size, 4);
    memcpy(header + 4, &id, 4);
    header[8] = (uint8_t)op;
    queue(header, sizeof header);
    if (head_size > 0)
        queue(head, head_size);
    if (body_size > 0)
        queue(body, body_size);
}

void send_frame(int op, uint32_t id, const void *payload, size_t size) { send_parts(op, id, payload, size, NULL, 0); }

/* The channel has ended. Process 1 takes all others with it; elsewhere they are killed one by one. */
static void leave(void)
{
    if (getpid() != 1)
        kill_descendants(getpid());
    _exit(0);
}

static void flush(void)
{
    while (queued_bytes() > 0) {
        ssize_t count = write(STDOUT_FILENO, outbox.bytes + outbox.start, queued_bytes());
        if (count < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (count < 0)
            leave();
        outbox.start += (size_t)count;
    }
    outbox.start = outbox.end = 0;
    if (outbox.room > 2 * QUEUE_BYTES) { /* a large result has been sent: the memory is the sandbox's */
        free(outbox.bytes);
        outbox.bytes = NULL;
        outbox.room = 0;
    }
}

static void handle(int op, uint32_t id, const uint8_t *payload, size_t size)
{
    struct cursor request = {payload, payload + size, false};
    switch (op) {
    case OP_EXEC: command_start(id, &request); break;
    case OP_INPUT:
        if (!command_input(id, payload, size) && !proxy_input(id, payload, size))
            send_frame(OP_TAKEN, id, NULL, 0); /* nobody is there to take it any more */
        break;
    case OP_KILL: command_kill(id); break;
    case OP_KILL_ALL: command_kill_all(id, take_u32(&request) != 0); break;
    case OP_READ: file_read(id, &request); break;
    case OP_WRITE: file_write(id, &request); break;
    case OP_PING: send_frame(OP_PONG, id, NULL, 0); break;
    case OP_BEAT: break;
    case OP_TOOK: proxy_took(id); break;
    default: errno = EPROTO; die("unknown frame");
    }
}

static void receive(void)
{
    if (inbox.room == 0) {
        inbox.room = MAX_FRAME_BYTES + HEADER_BYTES + CHUNK_BYTES;
        inbox.bytes = malloc(inbox.room);
        if (inbox.bytes == NULL)
            die("memory");
    }
    ssize_t count = read(STDIN_FILENO, inbox.bytes + inbox.end, inbox.room - inbox.end);
    if (count < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (count <= 0)
        leave();
    inbox.end += (size_t)count;
    heard_at = now_ms();
    while (inbox.end - inbox.start >= HEADER_BYTES) {
        const uint8_t *frame = inbox.bytes + inbox.start;
        uint32_t size, id;
        memcpy(&size, frame, 4);
        memcpy(&id, frame + 4, 4);
        if (size > MAX_FRAME_BYTES) {
            errno = EMSGSIZE;
            die("frame");
        }
        if (inbox.end - inbox.start < HEADER_BYTES + (size_t)size)
            break;
        handle(frame[8], id, frame + HEADER_BYTES, size);
        inbox.start += HEADER_BYTES + size;
    }
    if (inbox.start > 0) {
        memmove(inbox.bytes, inbox.bytes + inbox.start, inbox.end - inbox.start);
        inbox.end -= inbox.start;
        inbox.start = 0;
    }
}

static void serve(int children)
{
    static struct pollfd polled[MAX_POLLED];
    for (;;) {
        polled[0] = (struct pollfd){.fd = STDIN_FILENO, .events = POLLIN};
        polled[1] = (struct pollfd){.fd = queued_bytes() > 0 ? STDOUT_FILENO : -1, .events = POLLOUT};
        polled[2] = (struct pollfd){.fd = children, .events = POLLIN};
        size_t first = 3, commands = commands_poll(polled + first, MAX_POLLED - first);
        size_t proxied = proxy_poll(polled + first + commands, MAX_POLLED - first - commands);
        int64_t silent_ms = now_ms() - heard_at;
        if (silent_ms >= SILENCE_MS)
            leave();
        int wait_ms = files_waiting() && queued_bytes() < QUEUE_BYTES ? 0 : commands_wait_ms();
        if (wait_ms < 0 || wait_ms > SILENCE_MS - silent_ms)
            wait_ms = (int)(SILENCE_MS - silent_ms);
        if (poll(polled, first + commands + proxied, wait_ms) < 0 && errno != EINTR)
            die("poll");
        if (polled[2].revents != 0) {
            struct signalfd_siginfo ignored[16];
            while (read(children, ignored, sizeof ignored) > 0)
                ;
        }
        /* The output of a command is read before its end is noticed. Requests change the table that `polled` was made
           from, so they come after it has been used. */
        commands_ready(polled + first, commands);
        proxy_ready(polled + first + commands, proxied);
        if (polled[0].revents != 0)
            receive();
        commands_reap();
        commands_tick();
        files_pump();
        flush();
    }
}

/* The helper that a shell session's last act runs: its current folder and its exported variables, each ended by NUL. */
static int write_state(int fd)
{
    extern char **environ;
    char *cwd = getcwd(NULL, 0);
    FILE *out = fdopen(fd, "w");
    if (out == NULL)
        return 1;
    fprintf(out, "%s%c", cwd == NULL ? "" : cwd, 0);
    for (char **variable = environ; *variable != NULL; variable++)
        fprintf(out, "%s%c", *variable, 0);
    return fclose(out) == 0 ? 0 : 1;
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "state") == 0)
        return write_state(atoi(argv[2]));
    if (argc != 6) {
        fprintf(stderr, "usage: server MAX_FILE_BYTES MAX_PROCESSES MAX_PROCESS_BYTES OOM_FD PROXY_PORT\n");
        return 64;
    }
    limits.max_file_bytes = strtoull(argv[1], NULL, 10);
    limits.max_processes = strtoull(argv[2], NULL, 10);
    limits.max_process_bytes = strtoull(argv[3], NULL, 10);
    limits.oom_fd = atoi(argv[4]);
    limits.proxy_port = atoi(argv[5]);

    if (getpid() == 1) /* the keys of whoever started this are not the sandbox's */
        syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, NULL);
    oom_open();
    prctl(PR_SET_DUMPABLE, 0);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    umask(022);
    signal(SIGPIPE, SIG_IGN);
    sigset_t children_set;
    sigemptyset(&children_set);
    sigaddset(&children_set, SIGCHLD);
    sigprocmask(SIG_SETMASK, &children_set, NULL);
    int children = signalfd(-1, &children_set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (children < 0)
        die("signalfd");
    for (int fd = 0; fd < 2; fd++) {
        fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
        fcntl(fd, F_SETFD, FD_CLOEXEC);
    }
    if (limits.oom_fd >= 0)
        fcntl(limits.oom_fd, F_SETFD, FD_CLOEXEC);
    if (limits.proxy_port != 0)
        proxy_open();
    heard_at = now_ms();
    uint32_t version = VERSION;
    send_frame(OP_HELLO, 0, &version, sizeof version);
    serve(children);
}
