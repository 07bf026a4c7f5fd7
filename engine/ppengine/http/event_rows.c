/* Events of single tokens: a message of the core has one for each of hundreds of streams, on as many connections.
   Nothing of a stream is in the processor's caches when its token comes. Here a stream is one line of them, and the
   lines of the next streams are fetched while the kernel sends. `event_library.py` has the same structures,
   and gives GROUPS_MOST. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>

enum {
    CHUNK_MOST = 4096, /* bytes of a chunk without its size */
    AHEAD = 4, /* streams that are fetched before their turn */
    LINE = 64,
};

typedef struct {
    const char *bytes; /* JSON with its quotes; NULL: not known */
    uint32_t size, characters;
} text;

typedef struct {
    double at;               /* time of the token before */
    const char *head, *tail; /* bytes around the text; the tail has the end of the chunk */
    uint32_t head_size, tail_size;
    uint32_t known;      /* tokens that have come */
    uint32_t characters; /* of the tokens since the row began */
    int32_t descriptor, client;
} row;

typedef struct { /* tokens of a client whose tokens before came at the same time */
    double at;
    int32_t client;
    uint32_t count;
} group;

typedef struct {
    const int32_t *rows; /* numbers of rows, -1 for a request without one */
    const uint32_t *offsets, *tokens;
    uint32_t count;
    double now;
} message;

typedef struct {
    uint32_t left_count, unknown_count, group_count;
    uint32_t sent; /* bytes of the last chunk, if the kernel took a part of it; otherwise 0 */
    uint32_t *left;    /* tokens without a row, and those that it cannot send */
    uint32_t *unknown; /* tokens whose text is not known */
    group groups[GROUPS_MOST];
} result;

static group *group_of(result *out, double at, int32_t client) {
    uint32_t number = 0;
    while (number < out->group_count && (out->groups[number].at != at || out->groups[number].client != client))
        number++;
    if (number == GROUPS_MOST)
        return NULL;
    if (number == out->group_count)
        out->groups[out->group_count++] = (group){at, client, 0};
    return &out->groups[number];
}

static void fetch(const row *rows, const text *texts, uint32_t texts_size, const message *in, uint32_t at) {
    if (at + AHEAD < in->count) {
        if (in->rows[at + AHEAD] >= 0)
            __builtin_prefetch(&rows[in->rows[at + AHEAD]]);
        if (in->tokens[at + AHEAD] < texts_size)
            __builtin_prefetch(&texts[in->tokens[at + AHEAD]]);
    }
    uint32_t next = at + AHEAD / 2;
    if (next < in->count && in->rows[next] >= 0 && in->tokens[next] < texts_size) {
        const row *to = &rows[in->rows[next]];
        for (uint32_t byte = 0; byte < to->head_size; byte += LINE)
            __builtin_prefetch(to->head + byte);
        __builtin_prefetch(to->tail);
        __builtin_prefetch(texts[in->tokens[next]].bytes);
    }
}

/* Write the size of a chunk and return the byte behind it. */
static char *write_size(char *end, uint32_t size) {
    int shift = 28;
    while (shift && !(size >> shift))
        shift -= 4;
    for (; shift >= 0; shift -= 4)
        *end++ = "0123456789abcdef"[size >> shift & 15];
    *end++ = '\r';
    *end++ = '\n';
    return end;
}

static char *append(char *end, const char *bytes, uint32_t size) {
    memcpy(end, bytes, size);
    return end + size;
}

/* Send the events of a message from token `begin` on. Return the number behind the last token that was looked at: less
   than all of them if the kernel took a part of its chunk. */
uint32_t send_events(
    row *rows, const text *texts, uint32_t texts_size, const message *in, uint32_t begin, result *out
) {
    char chunk[CHUNK_MOST + 16];
    out->left_count = out->unknown_count = out->group_count = out->sent = 0;
    for (uint32_t at = begin; at < in->count; at++) {
        fetch(rows, texts, texts_size, in, at);
        row *to = in->rows[at] < 0 ? NULL : &rows[in->rows[at]];
        if (!to || to->known != in->offsets[at]) {
            out->left[out->left_count++] = at;
            continue;
        }
        uint32_t token = in->tokens[at];
        if (token >= texts_size || !texts[token].bytes) {
            out->unknown[out->unknown_count++] = at;
            continue;
        }
        const text *spoken = &texts[token];
        uint32_t size = to->head_size + spoken->size + to->tail_size;
        group *counted = size > CHUNK_MOST ? NULL : group_of(out, to->at, to->client);
        ssize_t sent = 0;
        char *end = chunk;
        if (counted) {
            end = write_size(end, size - 2);
            end = append(end, to->head, to->head_size);
            end = append(end, spoken->bytes, spoken->size);
            end = append(end, to->tail, to->tail_size);
            sent = send(to->descriptor, chunk, end - chunk, MSG_DONTWAIT | MSG_NOSIGNAL);
        }
        if (sent <= 0) {
            out->left[out->left_count++] = at;
            continue;
        }
        counted->count++;
        to->at = in->now;
        to->known++;
        to->characters += spoken->characters;
        if (sent < end - chunk) {
            out->sent = sent;
            return at + 1;
        }
    }
    return in->count;
}
