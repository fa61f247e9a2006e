/* Which processes descend from which, and how all of them are killed.
 *
 * A command's processes are the descendants of its supervisor. It is a child subreaper (prctl(2)), so a process whose
 * parent ended, after setsid or a double fork too, becomes its child and stays a descendant.
 *
 * Killing them one after the other is a race against a fork bomb, so they are stopped first. A stopped process forks
 * no more and keeps its place in the limit on processes, so each round leaves fewer that run; when two rounds in a row
 * find nobody new, all of them are killed.
 */
#define _GNU_SOURCE
#include "server.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_SEEN = 8192, MAX_ROUNDS = 200 };

struct seen {
    pid_t pid, parent;
    char state;
    int threads;
    bool member;
};

/* All processes that /proc shows, at most MAX_SEEN of them; zombies are marked by their state. */
static size_t look(struct seen *seen)
{
    DIR *folder = opendir("/proc");
    if (folder == NULL)
        return 0;
    size_t count = 0;
    struct dirent *entry;
    while (count < MAX_SEEN && (entry = readdir(folder)) != NULL) {
        if (entry->d_name[0] < '1' || entry->d_name[0] > '9')
            continue;
        char path[64], text[512];
        snprintf(path, sizeof path, "/proc/%.20s/stat", entry->d_name);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            continue;
        ssize_t size = read(fd, text, sizeof text - 1);
        close(fd);
        if (size <= 0)
            continue;
        text[size] = 0;
        const char *after_name = strrchr(text, ')'); /* a name may hold anything, brackets too */
        struct seen *one = &seen[count];
        /* state, parent, 15 others, threads: proc(5) */
        static const char *const fields = " %c %d %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %d";
        if (after_name == NULL ||
            sscanf(after_name + 1, fields, &one->state, &one->parent, &one->threads) != 3)
            continue;
        one->pid = (pid_t)atoi(entry->d_name);
        one->member = false;
        count++;
    }
    closedir(folder);
    return count;
}

/* Marks the descendants of `root`, itself left out. */
static void mark(struct seen *seen, size_t count, pid_t root)
{
    bool grown = true;
    while (grown) {
        grown = false;
        for (size_t i = 0; i < count; i++) {
            if (seen[i].member || seen[i].pid == root)
                continue;
            bool belongs = seen[i].parent == root;
            for (size_t j = 0; j < count && !belongs; j++)
                belongs = seen[j].member && seen[j].pid == seen[i].parent;
            if (belongs)
                seen[i].member = grown = true;
        }
    }
}

/* One whose first thread has ended looks like a zombie while the others run. */
static bool lives(const struct seen *one) { return one->threads > 1 || (one->state != 'Z' && one->state != 'X'); }

size_t count_descendants(pid_t root)
{
    static struct seen seen[MAX_SEEN];
    size_t count = look(seen), living = 0;
    mark(seen, count, root);
    for (size_t i = 0; i < count; i++)
        living += seen[i].member && lives(&seen[i]);
    return living;
}

size_t kill_descendants(pid_t root)
{
    static struct seen seen[MAX_SEEN];
    size_t count = 0;
    int quiet = 0;
    for (int round = 0; round < MAX_ROUNDS && quiet < 2; round++) {
        bool anybody = false;
        count = look(seen);
        mark(seen, count, root);
        for (size_t i = 0; i < count; i++) {
            if (seen[i].member && lives(&seen[i]) && seen[i].state != 'T') {
                kill(seen[i].pid, seen[i].state == 'Z' ? SIGKILL : SIGSTOP); /* that one cannot be seen to stop */
                anybody = true;
            }
        }
        quiet = anybody ? 0 : quiet + 1;
    }
    size_t killed = 0;
    for (size_t i = 0; i < count; i++) {
        if (seen[i].member && lives(&seen[i])) {
            kill(seen[i].pid, SIGKILL);
            killed++;
        }
    }
    return killed;
}

/* A command can kill its own supervisor; its processes are then children of this one, and no command's any more. Which
   ones those are cannot be known for certain while they fork, so process 1 ends all that runs in its sandbox: no fork
   outruns that. */
void kill_strays(bool (*is_ours)(pid_t))
{
    static struct seen seen[MAX_SEEN];
    if (getpid() == 1) {
        kill(-1, SIGKILL);
        return;
    }
    size_t count = look(seen);
    for (size_t i = 0; i < count; i++) {
        if (seen[i].parent == getpid() && lives(&seen[i]) && !is_ours(seen[i].pid)) {
            kill(seen[i].pid, SIGSTOP);
            kill_descendants(seen[i].pid);
            kill(seen[i].pid, SIGKILL);
        }
    }
}

static int own_oom_score = -1;

/* Before this process is undumpable: after that, the file is root's. */
void oom_open(void) { own_oom_score = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC); }

/* Whether the kernel, when memory runs out, should rather take what is forked now: that is how a command gets its
   score, and how this small process is never the one that dies of a command's greed or of files in memory. */
void oom_prefer(bool forked)
{
    if (own_oom_score >= 0)
        (void)!pwrite(own_oom_score, forked ? "500" : "0", forked ? 3 : 1, 0);
}

static uint64_t read_count(int fd)
{
    char text[4096];
    ssize_t size = pread(fd, text, sizeof text - 1, 0);
    if (size <= 0)
        return 0;
    text[size] = 0;
    const char *at = strstr(text, "oom_kill ");
    return at == NULL ? 0 : strtoull(at + strlen("oom_kill "), NULL, 10);
}

/* How often the kernel killed a process of this sandbox for memory, in all; 0 where that cannot be known. */
uint64_t oom_kills(void)
{
    /* cgroup version 2, and 1. */
    static const char *const paths[] = {"/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"};
    if (limits.oom_fd >= 0)
        return read_count(limits.oom_fd);
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        int fd = open(paths[i], O_RDONLY | O_CLOEXEC);
        if (fd >= 0) {
            uint64_t count = read_count(fd);
            close(fd);
            return count;
        }
    }
    return 0;
}
