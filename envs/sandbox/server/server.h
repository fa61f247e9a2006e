/* The server inside a sandbox: what its parts share. wire.py describes the frames, in the same words. */
#ifndef AGENTGRAD_SERVER_H
#define AGENTGRAD_SERVER_H

#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum {
    CHUNK_BYTES = 64 * 1024,
    MAX_FRAME_BYTES = 4 * 1024 * 1024,
    QUEUE_BYTES = 1024 * 1024, /* past this, nothing new is produced for the client until it has read */
    HEADER_BYTES = 12,
    MAX_CONNECTIONS = 64, /* to the proxy's port, at once */
    SILENCE_MS = 300 * 1000, /* a client says something more often than that, or it is gone */
};

/* From the client. */
enum { OP_EXEC = 'E', OP_INPUT = 'I', OP_KILL = 'K', OP_KILL_ALL = 'A', OP_READ = 'R', OP_WRITE = 'W', OP_PING = 'P',
       OP_BEAT = 'B', OP_TOOK = 'T' };
/* To the client. */
enum { OP_HELLO = 'h', OP_TAKEN = 'i', OP_EXIT = 'x', OP_KILLED = 'k', OP_DATA = 'd', OP_DONE = 'f', OP_PONG = 'p',
       OP_OPENED = 'o', OP_CLOSED = 'c' };

struct limits {
    uint64_t max_file_bytes;
    uint64_t max_processes;    /* of the user, as a resource limit; 0: something outside counts them */
    uint64_t max_process_bytes; /* address space of each process; 0: something outside counts memory */
    int oom_fd;                /* the cgroup's file that counts killings for memory; -1: look for it */
    int proxy_port;            /* 0: no way to the network */
};
extern struct limits limits;

/* A payload that is read from the front. `bad` is set when it ends too early. */
struct cursor {
    const uint8_t *at, *end;
    bool bad;
};
uint32_t take_u32(struct cursor *cursor);
const char *take_text(struct cursor *cursor);

/* server.c: the queue of frames to the client. */
void send_frame(int op, uint32_t id, const void *payload, size_t size);
void send_parts(int op, uint32_t id, const void *head, size_t head_size, const void *body, size_t body_size);
size_t queued_bytes(void);
int64_t now_ms(void);

/* capture.c: the head and the tail of a stream. */
struct capture {
    uint8_t *bytes;
    size_t limit, room, held, next;
    uint64_t total;
};
void capture_add(struct capture *capture, const uint8_t *data, size_t size);
size_t capture_head(const struct capture *capture);
size_t capture_tail(const struct capture *capture);
void capture_copy_tail(const struct capture *capture, uint8_t *to);

/* process.c: which processes descend from which, and killing all of them. */
size_t count_descendants(pid_t root);
size_t kill_descendants(pid_t root);
void kill_strays(bool (*is_ours)(pid_t));
uint64_t oom_kills(void);
void oom_open(void);
void oom_prefer(bool forked);

/* supervise.c: what runs in a command's own processes. */
enum { OUT, ERR, STATE, STATUS, STREAMS };
struct ending {
    int32_t status; /* as of waitpid(2); below 0: -errno of the start */
    int32_t others; /* other processes of the command are still there */
};
struct program {
    const char *cwd;
    char **argv, **variables;
};
void filter_calls(void); /* filter.c */
void supervise(const int *to, int input, const struct program *program) __attribute__((noreturn));

/* command.c */
void command_start(uint32_t id, struct cursor *request);
bool command_input(uint32_t id, const uint8_t *data, size_t size);
void command_kill(uint32_t id);
void command_kill_all(uint32_t id, bool only_background);
void commands_reap(void);
void commands_tick(void);
int commands_wait_ms(void);
size_t commands_poll(struct pollfd *polled, size_t room);
void commands_ready(const struct pollfd *polled, size_t count);

/* files.c */
void file_read(uint32_t id, struct cursor *request);
void file_write(uint32_t id, struct cursor *request);
void files_pump(void);
bool files_waiting(void);

/* proxy.c: connections from inside to the client. */
void proxy_open(void);
bool proxy_input(uint32_t id, const uint8_t *data, size_t size);
void proxy_took(uint32_t id);
size_t proxy_poll(struct pollfd *polled, size_t room);
void proxy_ready(const struct pollfd *polled, size_t count);

#endif
