/* The first and the last bytes of a stream, in bounded memory: when more than `limit` came, one half each. */
#include "server.h"

#include <stdlib.h>
#include <string.h>

static size_t half(const struct capture *capture) { return capture->limit / 2; }

static void make_room(struct capture *capture, size_t wanted)
{
    if (wanted <= capture->room)
        return;
    size_t room = capture->room * 2 > wanted ? capture->room * 2 : wanted;
    if (room > capture->limit)
        room = capture->limit;
    uint8_t *bytes = realloc(capture->bytes, room);
    if (bytes == NULL) { /* what is held stays; the rest is counted only */
        capture->limit = capture->held;
        return;
    }
    capture->bytes = bytes;
    capture->room = room;
}

void capture_add(struct capture *capture, const uint8_t *data, size_t size)
{
    capture->total += size;
    size_t space = capture->limit - capture->held;
    size_t fits = size < space ? size : space;
    if (fits > 0) {
        make_room(capture, capture->held + fits);
        if (capture->room >= capture->held + fits) {
            memcpy(capture->bytes + capture->held, data, fits);
            capture->held += fits;
        }
        data += fits;
        size -= fits;
    }
    /* What comes now overwrites the oldest byte of the second half. */
    size_t ring = capture->held - half(capture);
    if (size == 0 || ring == 0 || capture->held < capture->limit)
        return;
    if (size > ring) {
        capture->next = (capture->next + size - ring) % ring;
        data += size - ring;
        size = ring;
    }
    uint8_t *start = capture->bytes + half(capture);
    size_t to_end = ring - capture->next;
    size_t first = size < to_end ? size : to_end;
    memcpy(start + capture->next, data, first);
    memcpy(start, data + first, size - first);
    capture->next = (capture->next + size) % ring;
}

size_t capture_head(const struct capture *capture)
{
    return capture->total > capture->held ? half(capture) : capture->held;
}

size_t capture_tail(const struct capture *capture) { return capture->held - capture_head(capture); }

void capture_copy_tail(const struct capture *capture, uint8_t *to)
{
    size_t ring = capture_tail(capture);
    if (ring == 0)
        return;
    const uint8_t *start = capture->bytes + half(capture);
    memcpy(to, start + capture->next, ring - capture->next);
    memcpy(to + ring - capture->next, start, capture->next);
}
