/* The way to the network, where the task asked for one: connections to a port of 127.0.0.1 are handed to the client.
 *
 * The sandbox itself has no network but its own loopback. The client speaks HTTP's proxy protocol and decides which
 * hosts may be reached; this file only carries bytes, one piece at a time each way: the next one waits until the other
 * end has taken it, so that nobody keeps what a peer does not read. Ids of connections have their highest bit set.
 */
#define _GNU_SOURCE
#include "server.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { FIRST_ID = 0x80000000u, PROBE_S = 15 };

struct connection {
    uint32_t id;
    int fd;
    uint8_t *pending;
    size_t pending_at, pending_size;
    bool unread; /* the client has not yet taken the last piece */
    bool told;   /* the client knows that nothing more comes */
};

static int listener = -1;
static struct connection connections[MAX_CONNECTIONS];
static uint32_t next_id = FIRST_ID;

void proxy_open(void)
{
    for (int i = 0; i < MAX_CONNECTIONS; i++)
        connections[i].fd = -1;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)limits.proxy_port)};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&at, sizeof at) != 0 || listen(listener, 32) != 0) {
        fprintf(stderr, "sandbox server: no proxy on port %d: %s\n", limits.proxy_port, strerror(errno));
        _exit(71);
    }
}

static void end(struct connection *connection)
{
    send_frame(OP_CLOSED, connection->id, NULL, 0);
    close(connection->fd);
    free(connection->pending);
    *connection = (struct connection){.fd = -1};
}

static struct connection *find(uint32_t id)
{
    for (int i = 0; i < MAX_CONNECTIONS && listener >= 0; i++)
        if (connections[i].fd >= 0 && connections[i].id == id)
            return &connections[i];
    return NULL;
}

static void accept_all(void)
{
    for (int i = 0; i < MAX_CONNECTIONS; i++) {
        if (connections[i].fd >= 0)
            continue;
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0)
            return;
        connections[i] = (struct connection){.id = next_id, .fd = fd};
        next_id = (next_id + 1) | FIRST_ID;
        send_frame(OP_OPENED, connections[i].id, NULL, 0);
    }
}

static void forward(struct connection *connection)
{
    while (connection->pending_at < connection->pending_size) {
        ssize_t count = write(connection->fd, connection->pending + connection->pending_at,
                              connection->pending_size - connection->pending_at);
        if (count < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (count < 0) {
            end(connection);
            return;
        }
        connection->pending_at += (size_t)count;
    }
    free(connection->pending);
    connection->pending = NULL;
    connection->pending_at = connection->pending_size = 0;
    send_frame(OP_TAKEN, connection->id, NULL, 0);
}

bool proxy_input(uint32_t id, const uint8_t *data, size_t size)
{
    if ((id & FIRST_ID) == 0)
        return false;
    struct connection *connection = find(id);
    if (connection == NULL) { /* it has ended meanwhile */
        send_frame(OP_CLOSED, id, NULL, 0);
        return true;
    }
    uint8_t *pending = size == 0 ? NULL : malloc(size);
    if (pending == NULL) { /* the other side has closed */
        end(connection);
        return true;
    }
    memcpy(pending, data, size);
    free(connection->pending);
    connection->pending = pending;
    connection->pending_at = 0;
    connection->pending_size = size;
    forward(connection);
    return true;
}

void proxy_took(uint32_t id)
{
    struct connection *connection = find(id);
    if (connection != NULL)
        connection->unread = false;
}

size_t proxy_poll(struct pollfd *polled, size_t room)
{
    if (listener < 0 || room < MAX_CONNECTIONS + 1)
        return 0;
    bool free_slot = false;
    for (int i = 0; i < MAX_CONNECTIONS; i++) {
        struct connection *connection = &connections[i];
        free_slot = free_slot || connection->fd < 0;
        bool may_read = queued_bytes() < QUEUE_BYTES && !connection->unread && !connection->told;
        short events = (short)((may_read ? POLLIN : 0) | (connection->pending_size > 0 ? POLLOUT : 0));
        polled[i + 1] = (struct pollfd){.fd = connection->fd, .events = events}; /* without events: its failure */
    }
    polled[0] = (struct pollfd){.fd = free_slot ? listener : -1, .events = POLLIN};
    return MAX_CONNECTIONS + 1;
}

/* Nothing more comes from inside; it may still be answered. A program that has closed both ways looks the same, until
   the kernel has forgotten its end, about a minute later: then a probe is refused, and the connection ends. */
static void half_closed(struct connection *connection)
{
    int yes = 1, seconds = PROBE_S;
    setsockopt(connection->fd, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds);
    setsockopt(connection->fd, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof seconds);
    setsockopt(connection->fd, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);
    connection->told = true;
    send_frame(OP_DATA, connection->id, NULL, 0);
}

void proxy_ready(const struct pollfd *polled, size_t count)
{
    static uint8_t data[CHUNK_BYTES];
    if (count == 0)
        return;
    for (int i = 0; i < MAX_CONNECTIONS; i++) {
        struct connection *connection = &connections[i];
        short ready = polled[i + 1].revents;
        if (connection->fd < 0 || polled[i + 1].fd != connection->fd || ready == 0)
            continue;
        if ((ready & POLLOUT) != 0)
            forward(connection);
        if (connection->fd < 0 || (ready & (POLLIN | POLLHUP | POLLERR)) == 0)
            continue;
        if (connection->unread || connection->told) { /* not asked for what can be read: it has failed */
            end(connection);
            continue;
        }
        ssize_t size = read(connection->fd, data, sizeof data);
        if (size > 0) {
            connection->unread = true;
            send_frame(OP_DATA, connection->id, data, (size_t)size);
        } else if (size == 0)
            half_closed(connection);
        else if (errno != EAGAIN && errno != EINTR)
            end(connection);
    }
    if (polled[0].revents != 0)
        accept_all();
}
