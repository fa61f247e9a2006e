/* What a command's processes may not ask of the kernel, although they are of the same user as process 1: to change its
 * limits or its place in the scheduler, and to reach keys. Everything else that they could do to it, its being
 * undumpable and process 1 forbids. A filter of system calls (seccomp(2)); where the kernel has none, there is none.
 */
#define _GNU_SOURCE
#include "server.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define OWN_ARCH AUDIT_ARCH_X86_64
#define COMPAT_ARCH AUDIT_ARCH_I386
/* The same calls of 32-bit programs, by that table's numbers. */
enum { C_PRLIMIT = 340, C_SCHEDULER = 156, C_PARAM = 154, C_ATTR = 351, C_AFFINITY = 241, C_PRIORITY = 97,
       C_IOPRIO = 289, C_ADD_KEY = 286, C_REQUEST_KEY = 287, C_KEYCTL = 288 };
#elif defined(__aarch64__)
#define OWN_ARCH AUDIT_ARCH_AARCH64
#endif

enum { MAX_RULES = 128, PROCESS_1 = 1, WHICH_USER = 2, IO_WHICH_USER = 3 };

struct build {
    struct sock_filter rules[MAX_RULES];
    unsigned short count;
};

static void add(struct build *build, unsigned short code, unsigned k, unsigned char yes, unsigned char no)
{
    build->rules[build->count++] = (struct sock_filter){code, yes, no, k};
}

static void load_argument(struct build *build, unsigned number)
{
    add(build, BPF_LD | BPF_W | BPF_ABS, (unsigned)(offsetof(struct seccomp_data, args) + 8 * number), 0, 0);
}

/* The number of the call is loaded; each rule loads it again when it does not apply. */
static void refuse(struct build *build, unsigned call, unsigned why)
{
    add(build, BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1);
    add(build, BPF_RET | BPF_K, SECCOMP_RET_ERRNO | why, 0, 0);
}

static void refuse_where(struct build *build, unsigned call, unsigned argument, unsigned value)
{
    add(build, BPF_JMP | BPF_JEQ | BPF_K, call, 0, 4);
    load_argument(build, argument);
    add(build, BPF_JMP | BPF_JEQ | BPF_K, value, 0, 1);
    add(build, BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM, 0, 0);
    add(build, BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr), 0, 0);
}

struct calls {
    unsigned prlimit, scheduler, param, attr, affinity, priority, ioprio, add_key, request_key, keyctl;
};

static void add_rules(struct build *build, const struct calls *calls)
{
    const unsigned of_process[] = {calls->prlimit, calls->scheduler, calls->param, calls->attr, calls->affinity};
    add(build, BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr), 0, 0);
    for (size_t i = 0; i < sizeof of_process / sizeof *of_process; i++)
        refuse_where(build, of_process[i], 0, PROCESS_1);
    refuse_where(build, calls->priority, 1, PROCESS_1);
    refuse_where(build, calls->priority, 0, WHICH_USER);
    refuse_where(build, calls->ioprio, 1, PROCESS_1);
    refuse_where(build, calls->ioprio, 0, IO_WHICH_USER);
    refuse(build, calls->add_key, ENOSYS);
    refuse(build, calls->request_key, ENOSYS);
    refuse(build, calls->keyctl, ENOSYS);
    add(build, BPF_RET | BPF_K, SECCOMP_RET_ALLOW, 0, 0);
}

void filter_calls(void)
{
#ifdef OWN_ARCH
    struct build build = {.count = 0};
    static const struct calls own = {SYS_prlimit64, SYS_sched_setscheduler, SYS_sched_setparam, SYS_sched_setattr,
                                     SYS_sched_setaffinity, SYS_setpriority, SYS_ioprio_set, SYS_add_key,
                                     SYS_request_key, SYS_keyctl};
#ifdef COMPAT_ARCH
    static const struct calls compat = {C_PRLIMIT, C_SCHEDULER, C_PARAM, C_ATTR, C_AFFINITY, C_PRIORITY, C_IOPRIO,
                                        C_ADD_KEY, C_REQUEST_KEY, C_KEYCTL};
    struct build other = {.count = 0};
    add_rules(&other, &compat);
    add(&build, BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch), 0, 0);
    add(&build, BPF_JMP | BPF_JEQ | BPF_K, COMPAT_ARCH, 0, (unsigned char)other.count);
    for (unsigned short i = 0; i < other.count; i++)
        build.rules[build.count++] = other.rules[i];
    /* A third table of numbers, x32, begins here; nothing uses it. */
    add(&build, BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr), 0, 0);
    add(&build, BPF_JMP | BPF_JGE | BPF_K, 0x40000000u, 0, 1);
    add(&build, BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS, 0, 0);
#endif
    add_rules(&build, &own);
    struct sock_fprog program = {build.count, build.rules};
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, &program);
#endif
}
