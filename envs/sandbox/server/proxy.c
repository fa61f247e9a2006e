/* The way to the network, where the task asked for one: connections to a port of 127.0.0.1 are handed to the client.
 *
 * The sandbox itself has no network but its own loopback. The client speaks HTTP's proxy protocol and decides which
 * hosts may be reached; this file only carries bytes. Ids of connections have their highest bit set.
 */
#define _GNU_SOURCE
#include "server.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MAX_CONNECTIONS = 64 };

struct connection {
    uint32_t id;
    int fd;
    uint8_t *pending;
    size_t pending_at, pending_size;
    bool told; /* the client knows that nothing more comes */
};

static int listener = -1;
static struct connection connections[MAX_CONNECTIONS];
static uint32_t next_id = 0x80000000u;

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
    if (!connection->told)
        send_frame(OP_CLOSED, connection->id, NULL, 0);
    if (connection->pending_size > 0)
        send_frame(OP_TAKEN, connection->id, NULL, 0);
    close(connection->fd);
    free(connection->pending);
    *connection = (struct connection){.fd = -1};
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
        next_id = (next_id + 1) | 0x80000000u;
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
    for (int i = 0; i < MAX_CONNECTIONS && listener >= 0; i++) {
        struct connection *connection = &connections[i];
        if (connection->fd < 0 || connection->id != id)
            continue;
        if (size == 0) { /* the other side has closed */
            connection->told = true;
            end(connection);
            return false;
        }
        connection->pending = malloc(size);
        memcpy(connection->pending, data, size);
        connection->pending_size = size;
        forward(connection);
        return true;
    }
    return false;
}

size_t proxy_poll(struct pollfd *polled, size_t room)
{
    if (listener < 0 || room < MAX_CONNECTIONS + 1)
        return 0;
    polled[0] = (struct pollfd){.fd = listener, .events = POLLIN};
    for (int i = 0; i < MAX_CONNECTIONS; i++) {
        struct connection *connection = &connections[i];
        bool may_read = queued_bytes() < QUEUE_BYTES && !connection->told;
        short events = (short)((may_read ? POLLIN : 0) | (connection->pending_size > 0 ? POLLOUT : 0));
        polled[i + 1] = (struct pollfd){.fd = events == 0 ? -1 : connection->fd, .events = events};
    }
    return MAX_CONNECTIONS + 1;
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
        ssize_t size = read(connection->fd, data, sizeof data);
        if (size > 0)
            send_frame(OP_DATA, connection->id, data, (size_t)size);
        else if (size == 0 && !connection->told) { /* a half-closed connection may still be answered */
            connection->told = true;
            send_frame(OP_CLOSED, connection->id, NULL, 0);
        } else if (size < 0 && errno != EAGAIN && errno != EINTR)
            end(connection);
    }
    if (polled[0].revents != 0)
        accept_all();
}
