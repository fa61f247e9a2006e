/* Commands: each has a supervisor, which starts it, tells how it ended, and stays until all of its processes are gone.
 *
 * The supervisor is a fork of this process that waits. What this process learns from it: the exit status of the
 * command's own process (a pipe), and, by its end, that nothing of the command is left.
 */
#define _GNU_SOURCE
#include "server.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    FLOOD_BYTES = 64 * 1024 * 1024,
    DRAIN_BYTES = 2 * 1024 * 1024, /* what a pipe can hold at most, and more */
    STATE_BYTES = 2 * 1024 * 1024, /* more than a program can be started with */
    KILL_MS = 2000,
    HAS_INPUT = 1,
    WANTS_STATE = 2,
};
enum { TIMED_OUT = 1, OUT_OF_MEMORY = 2, FLOODED = 4, NO_PROCESS = 8 };
struct command {
    struct command *next;
    uint32_t id;
    pid_t supervisor; /* 0: it has ended */
    int from[STREAMS], input;
    struct capture kept[3];
    uint8_t *pending; /* what the command has not yet taken of its stdin */
    size_t pending_at, pending_size;
    bool pending_end;
    int64_t started_at, late_at, give_up_at;
    uint64_t oom_before;
    uint32_t flags;
    struct ending ending;
    bool ended, reported, desperate;
};

static struct command *commands;
static struct {
    uint32_t id, killed;
    bool waiting, only_background;
    int64_t give_up_at, asked_at;
} kill_all;

static struct command *find(uint32_t id)
{
    for (struct command *command = commands; command != NULL; command = command->next)
        if (command->id == id && !command->reported)
            return command;
    return NULL;
}

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static char **take_list(struct cursor *request, uint32_t count)
{
    if (count > MAX_FRAME_BYTES / 2) {
        request->bad = true;
        return NULL;
    }
    char **list = calloc((size_t)count + 1, sizeof *list);
    for (uint32_t i = 0; i < count && list != NULL; i++)
        list[i] = (char *)take_text(request);
    return list;
}

static bool open_pipes(struct command *command, int *to, int *input, uint32_t asked)
{
    for (int stream = 0; stream < STREAMS; stream++) {
        int ends[2];
        if (stream == STATE && (asked & WANTS_STATE) == 0)
            continue;
        if (pipe2(ends, O_CLOEXEC) != 0)
            return false;
        command->from[stream] = ends[0];
        to[stream] = ends[1];
        fcntl(ends[0], F_SETFL, O_NONBLOCK);
    }
    if ((asked & HAS_INPUT) == 0) {
        *input = open("/dev/null", O_RDONLY | O_CLOEXEC);
        return *input >= 0;
    }
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0)
        return false;
    *input = ends[0];
    command->input = ends[1];
    fcntl(ends[1], F_SETFL, O_NONBLOCK);
    return true;
}

static void report(struct command *command);

void command_start(uint32_t id, struct cursor *request)
{
    uint32_t timeout_ms = take_u32(request), max_output = take_u32(request), asked = take_u32(request);
    uint32_t argc = take_u32(request), envc = take_u32(request);
    const char *cwd = take_text(request);
    char **argv = take_list(request, argc), **variables = take_list(request, envc);
    struct command *command = calloc(1, sizeof *command);
    int to[STREAMS] = {-1, -1, -1, -1}, input = -1;
    command->id = id;
    command->input = -1;
    for (int stream = 0; stream < STREAMS; stream++)
        command->from[stream] = -1;
    command->kept[OUT].limit = command->kept[ERR].limit = max_output;
    command->kept[STATE].limit = STATE_BYTES;
    command->started_at = now_ms();
    command->late_at = command->started_at + timeout_ms;
    command->oom_before = oom_kills();
    command->next = commands;
    commands = command;
    bool ready = !request->bad && argc > 0 && argv != NULL && variables != NULL;
    if (ready && open_pipes(command, to, &input, asked)) {
        oom_prefer(true);
        command->supervisor = fork();
        if (command->supervisor == 0)
            supervise(to, input, &(struct program){cwd, argv, variables});
        oom_prefer(false);
    } else {
        command->supervisor = -1;
        errno = ready ? errno : EINVAL;
    }
    if (command->supervisor < 0) {
        command->supervisor = 0;
        command->ending.status = -errno;
        command->ended = true;
    }
    for (int stream = 0; stream < STREAMS; stream++)
        close_fd(&to[stream]);
    close_fd(&input);
    free(argv);
    free(variables);
    if (command->ended)
        report(command);
}

static void feed(struct command *command)
{
    while (command->pending_at < command->pending_size) {
        ssize_t count =
            write(command->input, command->pending + command->pending_at, command->pending_size - command->pending_at);
        if (count < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (count < 0) { /* nobody reads it any more */
            close_fd(&command->input);
            break;
        }
        command->pending_at += (size_t)count;
    }
    free(command->pending);
    command->pending = NULL;
    command->pending_at = command->pending_size = 0;
    if (command->pending_end)
        close_fd(&command->input);
    send_frame(OP_TAKEN, command->id, NULL, 0);
}

/* One piece of stdin; an empty one is its end. The client sends the next when this one is taken. */
bool command_input(uint32_t id, const uint8_t *data, size_t size)
{
    struct command *command = find(id);
    if (command == NULL || command->input < 0)
        return false;
    command->pending_end = size == 0;
    if (size > 0) {
        command->pending = malloc(size);
        memcpy(command->pending, data, size);
        command->pending_size = size;
    }
    feed(command);
    return true;
}

static void drain(struct command *command, int stream, size_t at_most)
{
    static uint8_t data[CHUNK_BYTES];
    struct capture *kept = &command->kept[stream];
    for (size_t taken = 0; command->from[stream] >= 0 && taken < at_most;) {
        ssize_t count = read(command->from[stream], data, sizeof data);
        if (count < 0)
            return;
        if (count == 0)
            close_fd(&command->from[stream]);
        taken += (size_t)count;
        if (!command->reported)
            capture_add(kept, data, (size_t)count);
    }
}

static void end_now(struct command *command, uint32_t why)
{
    if (command->give_up_at != 0 || command->supervisor == 0)
        return;
    command->flags |= why;
    command->give_up_at = now_ms() + KILL_MS;
    kill_descendants(command->supervisor);
    kill(command->supervisor, SIGCONT);
}

static uint32_t exit_code(const struct command *command)
{
    int status = command->ending.status;
    if (status < 0)
        return 126;
    return (uint32_t)(WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
}

static void report(struct command *command)
{
    for (int stream = 0; stream < STATUS; stream++)
        drain(command, stream, DRAIN_BYTES);
    const struct capture *out = &command->kept[OUT], *err = &command->kept[ERR], *state = &command->kept[STATE];
    if (oom_kills() > command->oom_before)
        command->flags |= OUT_OF_MEMORY;
    if (command->ending.status == -EAGAIN)
        command->flags |= NO_PROCESS;
    bool left = command->supervisor != 0 && (command->ending.others || command->give_up_at != 0);
    struct {
        uint32_t code, flags, left, failed, out_head, out_tail, err_head, err_tail, state;
        uint64_t out_total, err_total;
    } head = {
        exit_code(command), command->flags, left ? (uint32_t)count_descendants(command->supervisor) : 0,
        command->ending.status < 0 ? (uint32_t)-command->ending.status : 0,
        (uint32_t)capture_head(out), (uint32_t)capture_tail(out),
        (uint32_t)capture_head(err), (uint32_t)capture_tail(err),
        (uint32_t)(state->total == state->held ? state->held : 0),
        out->total, err->total,
    };
    size_t size = (size_t)head.out_head + head.out_tail + head.err_head + head.err_tail + head.state;
    uint8_t *body = malloc(size + 1), *at = body;
    for (const struct capture *kept = out; kept <= err; kept++) {
        if (kept->held > 0)
            memcpy(at, kept->bytes, capture_head(kept));
        at += capture_head(kept);
        capture_copy_tail(kept, at);
        at += capture_tail(kept);
    }
    if (head.state > 0)
        memcpy(at, state->bytes, head.state);
    send_parts(OP_EXIT, command->id, &head, sizeof head, body, size);
    free(body);
    free(command->pending);
    command->pending = NULL;
    close_fd(&command->input);
    for (int stream = 0; stream < 3; stream++) {
        free(command->kept[stream].bytes);
        command->kept[stream] = (struct capture){0};
    }
    command->reported = true;
}

void command_kill(uint32_t id)
{
    struct command *command = find(id);
    if (command != NULL)
        end_now(command, 0);
}

/* Everything, or only what ended commands have left behind. Told when it is gone. */
void command_kill_all(uint32_t id, bool only_background)
{
    if (kill_all.waiting) /* the one before: this one kills no less */
        send_frame(OP_KILLED, kill_all.id, (uint32_t[2]){kill_all.killed, 0}, 8);
    kill_all.id = id;
    kill_all.killed = 0;
    kill_all.waiting = true;
    kill_all.only_background = only_background;
    kill_all.asked_at = now_ms();
    kill_all.give_up_at = kill_all.asked_at + KILL_MS;
    for (struct command *command = commands; command != NULL; command = command->next) {
        if (command->supervisor == 0 || (only_background && !command->reported))
            continue;
        kill_all.killed += (uint32_t)kill_descendants(command->supervisor);
        kill(command->supervisor, SIGCONT);
    }
    if (!only_background && getpid() == 1)
        kill(-1, SIGKILL); /* no fork can outrun it */
}

/* Whether what is to be killed is a command's: those that were there when it was asked. */
static bool is_meant(const struct command *command)
{
    return command->supervisor != 0 && command->started_at <= kill_all.asked_at &&
           (!kill_all.only_background || command->reported);
}

static bool is_supervisor(pid_t pid)
{
    for (struct command *command = commands; command != NULL; command = command->next)
        if (command->supervisor == pid)
            return true;
    return false;
}

void commands_reap(void)
{
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        for (struct command *command = commands; command != NULL; command = command->next) {
            if (command->supervisor != pid)
                continue;
            command->supervisor = 0;
            if (!command->ended) { /* it was killed before it could tell: by its own command, or for memory */
                ssize_t told = command->from[STATUS] < 0
                                   ? -1
                                   : read(command->from[STATUS], &command->ending, sizeof command->ending);
                if (told != sizeof command->ending)
                    command->ending = (struct ending){.status = SIGKILL};
                command->ended = true;
            }
            if (WIFSIGNALED(status))
                kill_strays(is_supervisor);
        }
    }
}

static bool may_report(const struct command *command)
{
    /* After a kill, only when everything is gone. */
    return command->ended && (command->give_up_at == 0 || command->supervisor == 0);
}

void commands_tick(void)
{
    int64_t now = now_ms();
    bool busy = false;
    for (struct command **link = &commands; *link != NULL;) {
        struct command *command = *link;
        if (!command->reported) {
            if (command->give_up_at == 0 && command->supervisor != 0 && !command->ended && now >= command->late_at)
                end_now(command, TIMED_OUT);
            if (command->give_up_at != 0 && command->supervisor != 0 && now >= command->give_up_at) {
                if (getpid() == 1 && !command->desperate) {
                    /* Something has outrun the stopping, with the help of others. Nothing outruns this, and it takes
                       all of the sandbox's processes. */
                    command->desperate = true;
                    command->give_up_at = now + KILL_MS;
                    kill(-1, SIGKILL);
                } else {
                    report(command); /* with what could not be killed */
                    kill(command->supervisor, SIGKILL);
                }
            } else if (may_report(command)) {
                report(command);
            }
        }
        busy |= is_meant(command);
        if (command->reported && command->supervisor == 0) {
            for (int stream = 0; stream < STREAMS; stream++)
                close_fd(&command->from[stream]);
            *link = command->next;
            free(command);
        } else {
            link = &command->next;
        }
    }
    if (kill_all.waiting && (!busy || now >= kill_all.give_up_at)) {
        size_t left = 0;
        for (struct command *command = commands; command != NULL; command = command->next)
            if (is_meant(command))
                left += count_descendants(command->supervisor);
        uint32_t told[2] = {kill_all.killed, (uint32_t)left};
        send_frame(OP_KILLED, kill_all.id, told, sizeof told);
        kill_all.waiting = false;
    }
}

int commands_wait_ms(void)
{
    int64_t first = -1;
    for (struct command *command = commands; command != NULL; command = command->next) {
        int64_t at = command->give_up_at != 0 ? command->give_up_at : command->late_at;
        if (!command->reported && (first < 0 || at < first))
            first = at;
    }
    if (kill_all.waiting && (first < 0 || kill_all.give_up_at < first))
        first = kill_all.give_up_at;
    if (first < 0)
        return -1;
    int64_t left = first - now_ms();
    return left < 0 ? 0 : left > 1000000 ? 1000000 : (int)left;
}

size_t commands_poll(struct pollfd *polled, size_t room)
{
    size_t count = 0;
    for (struct command *command = commands; command != NULL && count + STREAMS + 1 <= room; command = command->next) {
        for (int stream = 0; stream < STREAMS; stream++)
            polled[count++] = (struct pollfd){.fd = command->from[stream], .events = POLLIN};
        int input = command->pending_size > 0 ? command->input : -1;
        polled[count++] = (struct pollfd){.fd = input, .events = POLLOUT};
    }
    return count;
}

void commands_ready(const struct pollfd *polled, size_t count)
{
    struct command *command = commands;
    for (size_t at = 0; at < count; at += STREAMS + 1, command = command->next) {
        for (int stream = 0; stream < STATUS; stream++) {
            if (polled[at + (size_t)stream].revents == 0)
                continue;
            drain(command, stream, CHUNK_BYTES);
            if (!command->reported && command->kept[stream].total > FLOOD_BYTES)
                end_now(command, FLOODED);
        }
        if (polled[at + STATUS].revents != 0 && command->from[STATUS] >= 0) {
            if (read(command->from[STATUS], &command->ending, sizeof command->ending) == sizeof command->ending)
                command->ended = true;
            close_fd(&command->from[STATUS]);
        }
        if (polled[at + STREAMS].revents != 0 && command->input >= 0)
            feed(command);
    }
}
