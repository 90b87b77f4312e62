/* HTTP/1.1 load generator of `baton bench router`: one thread, epoll, keep-alive connections. See bench/router_bench_load.py.

   Sends whole requests read from a file, notes when each token event of an answer was read, and writes what it saw to two
   files of packed records. It judges nothing: bench/router_bench_figures.py does. Times are CLOCK_MONOTONIC nanoseconds, the clock
   that every process of this host shares, so that instants can be compared with those of the stub workers.

   A connection:  CONNECTING -> IDLE -> WAITING (request out) -> HEAD -> BODY -> IDLE ...
   Any failure ends its request (cut, refused) and the connection is made anew after REST_NS.  */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum {
    READ_BYTES = 1 << 18,
    MAX_HEAD = 1 << 14,   /* of one answer; real ones are under 1 KiB */
    MAX_LINE = 1 << 24,   /* one event, or a whole body that is not a stream */
    MAX_CONNECTING = 128, /* at once: a listener's backlog is finite, and a dropped SYN comes back after a second */
    ID_CHARS = 16
};
#define PLACEHOLDER "@@@@@@@@@@@@@@@@" /* in a request: replaced by its number in hex */
#define REST_NS 50000000LL            /* after a refusal or a cut, so that a server that refuses is not hammered */

enum state { CONNECTING, IDLE, RESTING, WAITING, HEAD, BODY };
enum framing { CHUNK_SIZE, CHUNK_DATA, CHUNK_CRLF, SIZED, UNTIL_CLOSE };
enum outcome { OPEN = 0, DONE = 1, CUT = 2, REFUSED = 3, FAILED = 4 }; /* REFUSED: a status; FAILED: an error event */

struct event { uint32_t number, index; int64_t received_ns, sent_ns; }; /* sent_ns: where the answer's text tells it, else 0 */
struct record {
    uint32_t number; uint16_t status; uint16_t outcome;
    int64_t due_ns, sent_ns, first_ns, end_ns;
    uint32_t num_events, usage_tokens; /* usage_tokens: the server's count, 0 = it gave none */
};
struct request { char *text; uint32_t size; int64_t id_at; };
struct connection {
    int fd; enum state state; enum framing framing;
    int stream, close_after, done;     /* of the answer: SSE; Connection: close; [DONE] was seen */
    int64_t due_ns, left;              /* left: bytes of this chunk or body */
    uint32_t record, out_at, turn;     /* index of the open record; bytes of the request already sent; requests made */
    char *line; uint32_t line_size, line_room;
    char *out; uint32_t out_size;
};

static struct { struct event *at; size_t size, room; } events;
static struct { struct record *at; size_t size, room; } records;
static struct connection *connections;
static struct request *requests;
static uint32_t num_requests, num_connections, num_open, num_connected, num_connecting, num_reconnects, num_late;
static uint32_t next_to_connect, *idle, num_idle;
static int64_t start_ns, stop_ns, end_ns, ramp_ns, nap_ns, earliest_ns;
static double rate;
static uint32_t first_number, max_requests;
static struct sockaddr_in server;
static int poller, timer;
static char read_buffer[READ_BYTES];

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void die(const char *what) {
    fprintf(stderr, "router_load: %s: %s\n", what, strerror(errno));
    exit(2);
}

static void *grow(void *at, size_t *room, size_t need, size_t each) {
    if (need <= *room) return at;
    *room = need > 2 * *room ? need : 2 * *room;
    if (!(at = realloc(at, *room * each))) die("memory");
    return at;
}

static void watch(int operation, struct connection *c, uint32_t mask) {
    struct epoll_event e = {.events = mask, .data.u32 = (uint32_t)(c - connections)};
    if (epoll_ctl(poller, operation, c->fd, &e)) die("epoll_ctl");
}

/* ---- connections ------------------------------------------------------------------------------------------------- */

static void connect_one(struct connection *c) {
    c->state = CONNECTING;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (c->fd < 0) die("socket");
    int on = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    num_connecting++;
    if (connect(c->fd, (struct sockaddr *)&server, sizeof server) && errno != EINPROGRESS) die("connect");
    watch(EPOLL_CTL_ADD, c, EPOLLOUT);
}

static void connect_more(void) {
    while (next_to_connect < num_connections && num_connecting < MAX_CONNECTING) connect_one(&connections[next_to_connect++]);
}

static void rest(struct connection *c, int64_t now) {
    c->state = RESTING;
    c->due_ns = now + REST_NS;
    if (c->due_ns < earliest_ns) earliest_ns = c->due_ns;
}

static void drop(struct connection *c, int64_t now) { /* the socket; a new one follows after a rest */
    close(c->fd);
    c->fd = -1;
    num_reconnects++;
    rest(c, now);
}

static struct record *record_of(struct connection *c) { return &records.at[c->record]; }

static void finish(struct connection *c, enum outcome outcome, int64_t now) {
    struct record *r = record_of(c);
    r->outcome = outcome;
    r->end_ns = now;
    num_open--;
}

/* ---- requests ---------------------------------------------------------------------------------------------------- */

static void send_more(struct connection *c, int64_t now) {
    while (c->out_at < c->out_size) {
        ssize_t n = send(c->fd, c->out + c->out_at, c->out_size - c->out_at, MSG_NOSIGNAL);
        if (n < 0) {
            if (errno == EAGAIN) { watch(EPOLL_CTL_MOD, c, EPOLLIN | EPOLLOUT); return; }
            finish(c, CUT, now);
            drop(c, now);
            return;
        }
        c->out_at += n;
    }
}

static int may_issue(int64_t now) { return now < stop_ns && (!max_requests || records.size < max_requests); }

static void issue(struct connection *c, int64_t due, int64_t now) {
    uint32_t number = first_number + records.size;
    uint32_t which = ((uint32_t)(c - connections) + c->turn++ * num_connections) % num_requests;
    struct request *q = &requests[which];
    free(c->out);
    if (!(c->out = malloc(q->size + 1))) die("memory");
    memcpy(c->out, q->text, q->size);
    if (q->id_at >= 0) {
        char id[ID_CHARS + 1];
        snprintf(id, sizeof id, "%016x", number);
        memcpy(c->out + q->id_at, id, ID_CHARS);
    }
    c->out_size = q->size;
    c->out_at = 0;
    records.at = grow(records.at, &records.room, records.size + 1, sizeof *records.at);
    c->record = records.size++;
    *record_of(c) = (struct record){.number = number, .due_ns = due, .sent_ns = now};
    c->state = WAITING;
    c->line_size = 0;
    num_open++;
    send_more(c, now);
}

static void become_idle(struct connection *c, int64_t now) {
    c->state = IDLE;
    if (rate > 0) idle[num_idle++] = c - connections;
    else if (now >= start_ns && now >= c->due_ns) { if (may_issue(now)) issue(c, now, now); }
    else if (c->due_ns < earliest_ns) earliest_ns = c->due_ns;
}

/* Give work to whoever is due. Closed loop: each connection has its first instant; open loop: each request has. */
static void dispatch(int64_t now) {
    if (rate > 0) {
        static uint64_t num_due;
        if (now < start_ns) earliest_ns = start_ns;
        while (now >= start_ns && may_issue(now)) {
            int64_t due = start_ns + (int64_t)(num_due * 1e9 / rate);
            earliest_ns = due < earliest_ns ? due : earliest_ns;
            if (due > now) break;
            if (!num_idle) { num_late++; break; }
            num_due++;
            issue(&connections[idle[--num_idle]], due, now);
        }
    }
    for (uint32_t i = 0; i < next_to_connect; i++) {
        struct connection *c = &connections[i];
        if (c->state == RESTING && now >= c->due_ns) { if (c->fd < 0) connect_one(c); else become_idle(c, now); }
        else if (c->state == IDLE && rate <= 0 && now >= c->due_ns && may_issue(now)) issue(c, c->due_ns, now);
        if ((c->state == RESTING || (c->state == IDLE && rate <= 0 && c->due_ns > now)) && c->due_ns < earliest_ns)
            earliest_ns = c->due_ns;
    }
}

/* ---- answers ----------------------------------------------------------------------------------------------------- */

static const char *find(const char *text, size_t size, const char *what) { return memmem(text, size, what, strlen(what)); }

/* The string that is the value of a key, behind its quote; NULL where there is none. */
static const char *string_of(const char *line, size_t size, const char *key) {
    const char *at = find(line, size, key), *end = line + size;
    if (!at) return NULL;
    for (at += strlen(key); at < end && *at == ' ';) at++;
    return at + 1 < end && *at == '"' ? at + 1 : NULL;
}

/* Whether a chunk is a token's: it has a text, which may be empty (half a character, a special token) unless the chunk opens or
   ends the answer. `sent` is the instant where the text is one: "@" and nanoseconds, which only our own stub writes. */
static int has_text(const char *line, size_t size, int64_t *sent) {
    const char *text = string_of(line, size, "\"text\":");
    if (!text && !(text = string_of(line, size, "\"content\":"))) return 0;
    *sent = *text == '@' ? strtoll(text + 1, NULL, 10) : 0;
    return *text != '"' || !(string_of(line, size, "\"finish_reason\":") || string_of(line, size, "\"role\":"));
}

static void note_usage(struct record *r, const char *text, size_t size) {
    const char *at = find(text, size, "\"completion_tokens\":");
    if (at) r->usage_tokens = strtoul(at + strlen("\"completion_tokens\":"), NULL, 10);
}

static void note_text(struct record *r, int64_t sent, int64_t now) {
    if (!r->num_events) r->first_ns = now;
    events.at = grow(events.at, &events.room, events.size + 1, sizeof *events.at);
    events.at[events.size++] = (struct event){r->number, r->num_events++, now, sent};
}

static void on_line(struct connection *c, const char *line, size_t size, int64_t now) {
    struct record *r = record_of(c);
    int64_t sent;
    if (size < 6 || memcmp(line, "data:", 5)) return;
    if (find(line, size < 16 ? size : 16, "[DONE]")) { c->done = 1; return; }
    if (has_text(line, size, &sent)) note_text(r, sent, now);
    else if (find(line, size < 32 ? size : 32, "\"error\"")) r->outcome = FAILED;
    note_usage(r, line, size);
}

static void keep(struct connection *c, const char *text, size_t size) {
    size_t room = c->line_room;
    if (c->line_size + size > MAX_LINE) { errno = EMSGSIZE; die("an event or body that never ends"); }
    c->line = grow(c->line, &room, c->line_size + size, 1);
    c->line_room = room;
    memcpy(c->line + c->line_size, text, size);
    c->line_size += size;
}

static void on_payload(struct connection *c, const char *text, size_t size, int64_t now) {
    if (!c->stream) { keep(c, text, size); return; }
    while (size) {
        const char *newline = memchr(text, '\n', size);
        if (!newline) { keep(c, text, size); return; }
        size_t part = newline - text;
        if (c->line_size) {
            keep(c, text, part);
            on_line(c, c->line, c->line_size, now);
            c->line_size = 0;
        } else on_line(c, text, part, now);
        text += part + 1;
        size -= part + 1;
    }
}

static void end_of_answer(struct connection *c, int64_t now) {
    struct record *r = record_of(c);
    int64_t sent;
    if (!c->stream && r->status == 200 && has_text(c->line, c->line_size, &sent)) {
        note_usage(r, c->line, c->line_size);
        note_text(r, sent, now);
    }
    enum outcome outcome = r->status != 200 ? REFUSED : r->outcome == FAILED ? FAILED : c->stream && !c->done ? CUT : DONE;
    finish(c, outcome, now);
    if (c->close_after) drop(c, now);
    else if (outcome == DONE) become_idle(c, now);
    else rest(c, now);
}

static int header_has(const char *head, size_t size, const char *name, const char *value) {
    for (const char *line = head; line < head + size;) {
        const char *end = memmem(line, head + size - line, "\r\n", 2);
        if (!end) end = head + size;
        size_t length = strlen(name);
        if ((size_t)(end - line) > length && !strncasecmp(line, name, length))
            for (const char *at = line + length; at + strlen(value) <= end; at++)
                if (!strncasecmp(at, value, strlen(value))) return 1;
        line = end + 2;
    }
    return 0;
}

/* Returns 0 where this is no HTTP. */
static int on_head(struct connection *c, const char *head, size_t size) {
    if (size < 12 || memcmp(head, "HTTP/1.", 7)) return 0;
    record_of(c)->status = atoi(head + 9);
    c->stream = header_has(head, size, "content-type:", "text/event-stream");
    c->close_after = header_has(head, size, "connection:", "close");
    c->done = 0;
    c->line_size = 0;
    c->state = BODY;
    c->left = 0;
    c->framing = UNTIL_CLOSE;
    if (header_has(head, size, "transfer-encoding:", "chunked")) c->framing = CHUNK_SIZE;
    else {
        const char *at = strcasestr(head, "content-length:");
        if (at && at < head + size) { c->framing = SIZED; c->left = atoll(at + 15); }
    }
    return 1;
}

/* Take from a body; returns the bytes used. The answer is over when the state is no longer BODY. */
static size_t on_body(struct connection *c, const char *text, size_t size, int64_t now) {
    if (c->framing == UNTIL_CLOSE) { on_payload(c, text, size, now); return size; }
    if (c->framing == SIZED || c->framing == CHUNK_DATA) {
        size_t part = (int64_t)size < c->left ? size : (size_t)c->left;
        on_payload(c, text, part, now);
        c->left -= part;
        if (!c->left) { if (c->framing == SIZED) end_of_answer(c, now); else { c->framing = CHUNK_CRLF; c->left = 2; } }
        return part;
    }
    if (c->framing == CHUNK_CRLF) { /* `left` counts down CR and LF; negative: those of the last chunk */
        c->left += c->left > 0 ? -1 : 1;
        if (!c->left && text[0] == '\n') c->framing = CHUNK_SIZE;
        return 1;
    }
    for (size_t i = 0; i < size; i++) { /* CHUNK_SIZE: hex digits are gathered in `left` */
        char d = text[i] | 0x20;
        if (text[i] >= '0' && text[i] <= '9') c->left = c->left * 16 + (text[i] - '0');
        else if (d >= 'a' && d <= 'f') c->left = c->left * 16 + (d - 'a' + 10);
        else if (text[i] == '\n') {
            if (c->left) c->framing = CHUNK_DATA;
            else { c->framing = CHUNK_CRLF; c->left = -2; }
            return i + 1;
        }
    }
    return size;
}

static void on_bytes(struct connection *c, const char *text, size_t size, int64_t now) {
    while (size) {
        if (c->state == WAITING) c->state = HEAD;
        if (c->state == HEAD) {
            uint32_t had = c->line_size;
            keep(c, text, size < MAX_HEAD ? size : MAX_HEAD);
            const char *end = memmem(c->line, c->line_size, "\r\n\r\n", 4);
            if (!end && c->line_size <= MAX_HEAD) return;
            if (!end || !on_head(c, c->line, end + 2 - c->line)) { finish(c, CUT, now); drop(c, now); return; }
            size_t used = end + 4 - c->line - had;
            text += used;
            size -= used;
            if (c->framing == SIZED && !c->left) { end_of_answer(c, now); return; }
            continue;
        }
        if (c->state != BODY) return; /* bytes that nobody asked for */
        int last = c->framing == CHUNK_CRLF && c->left == -1;
        size_t used = on_body(c, text, size, now);
        text += used;
        size -= used;
        if (last) { end_of_answer(c, now); return; }
    }
}

static void on_readable(struct connection *c, int64_t now) {
    for (;;) {
        ssize_t n = recv(c->fd, read_buffer, sizeof read_buffer, 0);
        if (n < 0 && errno == EAGAIN) return;
        if (n > 0) {
            on_bytes(c, read_buffer, n, now_ns());
            if (c->fd < 0 || n < (ssize_t)sizeof read_buffer) return;
            continue;
        }
        if (c->state == BODY && c->framing == UNTIL_CLOSE) { c->close_after = 1; end_of_answer(c, now); return; }
        if (c->state >= WAITING) finish(c, CUT, now);
        if (c->state == IDLE && rate > 0)
            for (uint32_t i = 0; i < num_idle; i++) if (&connections[idle[i]] == c) { idle[i] = idle[--num_idle]; break; }
        drop(c, now);
        return;
    }
}

static void on_ready(struct connection *c, uint32_t mask, int64_t now) {
    if (c->fd < 0) return;
    if (c->state == CONNECTING) {
        int error = 0;
        socklen_t size = sizeof error;
        getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &size);
        num_connecting--;
        if (error) { drop(c, now); return; }
        watch(EPOLL_CTL_MOD, c, EPOLLIN);
        num_connected++;
        become_idle(c, now);
        return;
    }
    if (mask & EPOLLOUT) {
        watch(EPOLL_CTL_MOD, c, EPOLLIN);
        send_more(c, now);
    }
    if (c->fd >= 0 && mask & (EPOLLIN | EPOLLHUP | EPOLLERR)) on_readable(c, now);
}

/* ---- the run ----------------------------------------------------------------------------------------------------- */

static void run(void) {
    struct epoll_event ready[512];
    for (int64_t now = now_ns(); now < end_ns; now = now_ns()) {
        connect_more();
        if (now >= earliest_ns || rate > 0) { earliest_ns = INT64_MAX; dispatch(now); }
        if (!num_open && now >= start_ns && !may_issue(now)) return;
        int64_t wake = earliest_ns < end_ns ? earliest_ns : end_ns;
        if (now < stop_ns && wake > stop_ns) wake = stop_ns;
        if (wake <= now) wake = now + 1000000; /* an open loop without an idle connection: look again in a millisecond */
        struct itimerspec at = {.it_value = {wake / 1000000000LL, wake % 1000000000LL}};
        timerfd_settime(timer, TFD_TIMER_ABSTIME, &at, NULL);
        if (nap_ns) nanosleep(&(struct timespec){.tv_nsec = nap_ns}, NULL);
        int n = epoll_wait(poller, ready, 512, -1);
        now = now_ns();
        for (int i = 0; i < n; i++)
            if (ready[i].data.u32 < num_connections) on_ready(&connections[ready[i].data.u32], ready[i].events, now);
            else { uint64_t ticks; if (read(timer, &ticks, sizeof ticks) < 0 && errno != EAGAIN) die("timer"); }
    }
}

static void read_requests(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) die(path);
    size_t room = 0;
    for (uint32_t size; fread(&size, sizeof size, 1, file) == 1; num_requests++) {
        requests = grow(requests, &room, num_requests + 1, sizeof *requests);
        char *text = malloc(size + 1);
        if (!text || fread(text, 1, size, file) != size) die(path);
        const char *id = find(text, size, PLACEHOLDER);
        requests[num_requests] = (struct request){text, size, id ? id - text : -1};
    }
    fclose(file);
    if (!num_requests) { errno = ENODATA; die(path); }
}

static void write_file(const char *prefix, const char *suffix, const void *at, size_t each, size_t size) {
    char path[4096];
    snprintf(path, sizeof path, "%s%s", prefix, suffix);
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(at, each, size, file) != size || fclose(file)) die(path);
}

int main(int argc, char **argv) {
    if (argc != 14) {
        fprintf(stderr, "usage: router_load PORT REQUESTS OUT CONNECTIONS FIRST_NUMBER MAX_REQUESTS RATE START_NS RAMP_NS STOP_NS "
                        "END_NS NAP_NS HOST\n");
        return 2;
    }
    read_requests(argv[2]);
    num_connections = atoi(argv[4]);
    first_number = strtoul(argv[5], NULL, 10);
    max_requests = strtoul(argv[6], NULL, 10);
    rate = atof(argv[7]);
    start_ns = atoll(argv[8]);
    ramp_ns = atoll(argv[9]);
    stop_ns = atoll(argv[10]);
    end_ns = atoll(argv[11]);
    nap_ns = atoll(argv[12]);
    earliest_ns = start_ns;
    server = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(atoi(argv[1]))};
    if (inet_pton(AF_INET, argv[13], &server.sin_addr) != 1) { errno = EINVAL; die(argv[13]); }
    connections = calloc(num_connections, sizeof *connections);
    idle = calloc(num_connections, sizeof *idle);
    if (!connections || !idle) die("memory");
    for (uint32_t i = 0; i < num_connections; i++)
        connections[i] = (struct connection){.fd = -1, .due_ns = start_ns + ramp_ns / num_connections * i};
    poller = epoll_create1(0);
    timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    struct epoll_event tick = {.events = EPOLLIN, .data.u32 = UINT32_MAX};
    if (poller < 0 || timer < 0 || epoll_ctl(poller, EPOLL_CTL_ADD, timer, &tick)) die("epoll");
    run();
    write_file(argv[3], ".events", events.at, sizeof *events.at, events.size);
    write_file(argv[3], ".requests", records.at, sizeof *records.at, records.size);
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    printf("{\"num_requests\": %zu, \"num_connected\": %u, \"num_reconnects\": %u, \"num_late\": %u, \"cpu_s\": %.6f}\n",
           records.size, num_connected, num_reconnects, num_late,
           usage.ru_utime.tv_sec + usage.ru_stime.tv_sec + 1e-6 * (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec));
    return 0;
}
