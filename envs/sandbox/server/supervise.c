/* A command's own processes: the supervisor, which starts it, tells how it ended and waits until all of it is gone; and
 * the command itself, until it becomes its program.
 */
#define _GNU_SOURCE
#include "server.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { STATE_FD = 9 }; /* where a shell session leaves its folder and its variables */

static void limit(int what, uint64_t value)
{
    if (value > 0)
        setrlimit(what, &(struct rlimit){value, value});
}

static void fail(int code, const char *what, int why)
{
    dprintf(STDERR_FILENO, "%s: %s\n", what, why == ENOENT && code == 127 ? "command not found" : strerror(why));
    _exit(code);
}

static bool supervised_by_init; /* by process 1 of a sandbox, and not in a test without isolation */

static void run(const int *to, int input, const struct program *program)
{
    const char *cwd = program->cwd;
    setsid();
    dup2(input, STDIN_FILENO);
    dup2(to[OUT], STDOUT_FILENO);
    dup2(to[ERR], STDERR_FILENO);
    if (to[STATE] == STATE_FD)
        fcntl(STATE_FD, F_SETFD, 0);
    else if (to[STATE] >= 0)
        dup2(to[STATE], STATE_FD);
    limit(RLIMIT_FSIZE, limits.max_file_bytes);
    limit(RLIMIT_NPROC, limits.max_processes);
    limit(RLIMIT_AS, limits.max_process_bytes);
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    if (chdir(cwd) != 0) {
        if (to[STATE] < 0)
            fail(126, cwd, errno);
        /* A shell session whose folder was removed goes on, as a shell's does. */
        dprintf(STDERR_FILENO, "%s: %s; back in the working folder\n", cwd, strerror(errno));
    }
    if (supervised_by_init)
        filter_calls();
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    extern char **environ;
    environ = program->variables;
    execvp(program->argv[0], program->argv);
    fail(errno == ENOENT || errno == ENOTDIR ? 127 : 126, program->argv[0], errno);
}

static void close_all_but(int kept)
{
    dup2(kept, 0);
    if (syscall(SYS_close_range, 1u, ~0u, 0) != 0) /* Linux before 5.9, or a filter that does not know the call */
        for (int fd = 1; fd < 1024; fd++)
            close(fd);
}

void supervise(const int *to, int input, const struct program *program)
{
    supervised_by_init = getppid() == 1;
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    pid_t leader = vfork(); /* it shares this memory until it runs its program: nothing is copied */
    if (leader == 0)
        run(to, input, program);
    struct ending ending = {.status = leader < 0 ? -errno : 0};
    close_all_but(to[STATUS]);
    if (leader < 0) {
        (void)!write(0, &ending, sizeof ending);
        _exit(0);
    }
    for (;;) {
        int status;
        pid_t pid = waitpid(-1, &status, 0);
        if (pid < 0)
            _exit(0);
        if (pid != leader)
            continue;
        ending.status = status;
        /* Whoever ended before it is a zombie by now; whoever is left runs on. */
        while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
            ;
        ending.others = pid == 0;
        (void)!write(0, &ending, sizeof ending);
        if (pid < 0)
            _exit(0);
    }
}
