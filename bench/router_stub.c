/* HTTP workers for `baton bench router`: what a peer router forwards to, and what a call costs without any router.

   One thread, epoll. Prints {"ports": [...]} and serves until its standard input ends. POST is answered by max_tokens events
   of a completion, one for every stream at each step; each event's text is "@" and the nanoseconds (CLOCK_MONOTONIC) at which
   it was written. The second listener, a prefill worker, answers one token at once. With a canned answer every POST gets just
   these bytes. GET is answered {}: health and information pages.  */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_LISTENERS = 2, READ_BYTES = 1 << 16, EVENT_BYTES = 1 << 10, MAX_STREAMS = 1 << 14 };

struct connection {
    int fd, is_prefill, stream, blocked;
    uint32_t tokens_left, tokens_in_all; /* of the answer being given */
    int active_at;                       /* place among the active, -1 = none */
    char *in; size_t in_size, in_room;
    char *out; size_t out_size, out_at, out_room;
};

static struct connection *active[MAX_STREAMS];
static int num_active, num_blocked, poller;
static int64_t period_ns;
static char *canned;
static size_t canned_size;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void die(const char *what) {
    fprintf(stderr, "router_stub: %s: %s\n", what, strerror(errno));
    exit(2);
}

static void watch(int operation, int fd, uint32_t mask, void *at) {
    struct epoll_event e = {.events = mask, .data.ptr = at};
    if (epoll_ctl(poller, operation, fd, &e)) die("epoll_ctl");
}

static void set_blocked(struct connection *c, int blocked) {
    if (c->blocked == blocked) return;
    c->blocked = blocked;
    num_blocked += blocked ? 1 : -1;
    watch(EPOLL_CTL_MOD, c->fd, blocked ? EPOLLIN | EPOLLOUT : EPOLLIN, c);
}

static void leave(struct connection *c) { /* the active */
    if (c->active_at < 0) return;
    active[c->active_at] = active[--num_active];
    active[c->active_at]->active_at = c->active_at;
    c->active_at = -1;
}

static void drop(struct connection *c) {
    if (c->blocked) num_blocked--;
    leave(c);
    close(c->fd);
    c->fd = -1; /* freed by whoever walks over connections */
}

static void forget(struct connection *c) {
    free(c->in);
    free(c->out);
    free(c);
}

static void flush(struct connection *c) {
    while (c->out_at < c->out_size) {
        ssize_t n = send(c->fd, c->out + c->out_at, c->out_size - c->out_at, MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN) { set_blocked(c, 1); return; }
        if (n < 0) { drop(c); return; }
        c->out_at += n;
    }
    c->out_at = c->out_size = 0;
    set_blocked(c, 0);
}

static void put(struct connection *c, const char *text, size_t size) {
    if (c->out_size + size > c->out_room) {
        c->out_room = 2 * (c->out_size + size);
        if (!(c->out = realloc(c->out, c->out_room))) die("memory");
    }
    memcpy(c->out + c->out_size, text, size);
    c->out_size += size;
}

static void put_chunk(struct connection *c, const char *text, int size) {
    char head[16];
    put(c, head, snprintf(head, sizeof head, "%x\r\n", size));
    put(c, text, size);
    put(c, "\r\n", 2);
}

#define EVENT "data: {\"id\":\"cmpl-00000000000000000000000000000000\",\"object\":\"text_completion\",\"created\":1700000000,\"model\":\"stub\","

static void put_token(struct connection *c) {
    char text[EVENT_BYTES];
    int size = snprintf(text, sizeof text, EVENT "\"choices\":[{\"index\":0,\"text\":\"@%lld\",\"logprobs\":null,\"finish_reason\":null}]}\n\n",
                        (long long)now_ns());
    if (--c->tokens_left == 0) {
        size += snprintf(text + size, sizeof text - size,
                         EVENT "\"choices\":[{\"index\":0,\"text\":\"\",\"logprobs\":null,\"finish_reason\":\"length\"}],"
                         "\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":%u,\"total_tokens\":%u}}\n\ndata: [DONE]\n\n",
                         c->tokens_in_all, c->tokens_in_all + 1);
        put_chunk(c, text, size);
        put(c, "0\r\n\r\n", 5);
        leave(c);
    } else put_chunk(c, text, size);
    flush(c);
}

static void put_whole(struct connection *c, const char *type, const char *body) {
    char head[256];
    put(c, head, snprintf(head, sizeof head, "HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n", type, strlen(body)));
    put(c, body, strlen(body));
    flush(c);
}

static void answer(struct connection *c, const char *head, const char *body, size_t body_size) {
    if (memcmp(head, "POST", 4)) { put_whole(c, "application/json", "{\"status\":\"ok\",\"model_path\":\"stub\",\"data\":[]}"); return; }
    if (canned) { put(c, canned, canned_size); flush(c); return; }
    const char *at = memmem(body, body_size, "\"max_tokens\":", 13);
    c->tokens_in_all = c->is_prefill || !at ? 1 : strtoul(at + 13, NULL, 10);
    c->tokens_left = c->tokens_in_all;
    at = memmem(body, body_size, "\"stream\":", 9);
    if (!at || at[9 + (at[9] == ' ')] != 't') {
        char text[EVENT_BYTES];
        snprintf(text, sizeof text, "{\"id\":\"cmpl-0\",\"object\":\"text_completion\",\"created\":1700000000,\"model\":\"stub\",\"choices\":[{\"index\":0,"
                 "\"text\":\"@%lld\",\"logprobs\":null,\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":%u,"
                 "\"total_tokens\":%u}}", (long long)now_ns(), c->tokens_in_all, c->tokens_in_all + 1);
        put_whole(c, "application/json", text);
        return;
    }
    const char *response = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n";
    put(c, response, strlen(response));
    if (num_active == MAX_STREAMS) { errno = ENFILE; die("streams"); }
    c->active_at = num_active;
    active[num_active++] = c;
    put_token(c); /* the first token is not part of a step */
}

/* Answer what has come whole; a client sends one request at a time. */
static void on_input(struct connection *c) {
    for (;;) {
        char *end = memmem(c->in, c->in_size, "\r\n\r\n", 4);
        if (!end || c->active_at >= 0) return;
        *end = 0; /* the head becomes a string; its last header needs no end */
        const char *at = strcasestr(c->in, "content-length:");
        size_t head_size = end + 4 - c->in, body_size = at ? strtoul(at + 15, NULL, 10) : 0;
        if (c->in_size < head_size + body_size) { *end = '\r'; return; }
        answer(c, c->in, c->in + head_size, body_size);
        if (c->fd < 0) return;
        c->in_size -= head_size + body_size;
        memmove(c->in, c->in + head_size + body_size, c->in_size);
    }
}

static void on_readable(struct connection *c) {
    if (c->in_size + READ_BYTES > c->in_room) {
        c->in_room = c->in_size + READ_BYTES;
        if (!(c->in = realloc(c->in, c->in_room))) die("memory");
    }
    ssize_t n = recv(c->fd, c->in + c->in_size, c->in_room - c->in_size, 0);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) { drop(c); return; }
    c->in_size += n;
    on_input(c);
}

static void on_new(int listener, int is_prefill) {
    int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
    if (fd < 0) return;
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    struct connection *c = calloc(1, sizeof *c);
    if (!c) die("memory");
    *c = (struct connection){.fd = fd, .is_prefill = is_prefill, .active_at = -1};
    watch(EPOLL_CTL_ADD, fd, EPOLLIN, c);
}

static void step(void) { /* one token for every stream whose client keeps up */
    for (int i = num_active - 1; i >= 0; i--) {
        struct connection *c = active[i];
        if (c->blocked) continue;
        put_token(c); /* may leave the active: another one, already served, takes its place */
        if (c->fd >= 0 && c->active_at < 0) on_input(c);
        if (c->fd < 0) forget(c);
    }
}

static int listen_on_any(int *port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    if (fd < 0 || bind(fd, (struct sockaddr *)&at, size) || listen(fd, 4096) || getsockname(fd, (struct sockaddr *)&at, &size)) die("listen");
    *port = ntohs(at.sin_port);
    return fd;
}

static void read_canned(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) die(path);
    canned_size = ftell(file);
    rewind(file);
    if (!(canned = malloc(canned_size)) || fread(canned, 1, canned_size, file) != canned_size) die(path);
    fclose(file);
}

int main(int argc, char **argv) {
    if (argc != 2 && argc != 3) {
        fprintf(stderr, "usage: router_stub PERIOD_NS [CANNED_ANSWER]\n");
        return 2;
    }
    period_ns = atoll(argv[1]);
    if (argc == 3) read_canned(argv[2]);
    poller = epoll_create1(0);
    if (poller < 0) die("epoll");
    int listeners[MAX_LISTENERS], ports[MAX_LISTENERS];
    for (int i = 0; i < MAX_LISTENERS; i++) {
        listeners[i] = listen_on_any(&ports[i]);
        watch(EPOLL_CTL_ADD, listeners[i], EPOLLIN, &listeners[i]);
    }
    watch(EPOLL_CTL_ADD, STDIN_FILENO, EPOLLIN, NULL);
    printf("{\"ports\": [%d, %d]}\n", ports[0], ports[1]);
    fflush(stdout);
    struct epoll_event ready[512];
    int64_t next_ns = now_ns() + period_ns;
    for (;;) {
        int64_t left_ns = num_active == num_blocked ? 1000000000 : period_ns ? next_ns - now_ns() : 0;
        struct timespec wait = {.tv_sec = left_ns > 0 ? left_ns / 1000000000 : 0, .tv_nsec = left_ns > 0 ? left_ns % 1000000000 : 0};
        int n = epoll_pwait2(poller, ready, 512, &wait, NULL);
        for (int i = 0; i < n; i++) {
            int *listener = ready[i].data.ptr;
            if (!listener) return 0; /* the bench is gone */
            if (listener >= listeners && listener < listeners + MAX_LISTENERS) { on_new(*listener, listener - listeners == 1); continue; }
            struct connection *c = ready[i].data.ptr;
            if (c->fd >= 0 && ready[i].events & EPOLLOUT) flush(c);
            if (c->fd >= 0 && ready[i].events & ~EPOLLOUT) on_readable(c);
            if (c->fd < 0) forget(c);
        }
        if (now_ns() >= next_ns) {
            step();
            next_ns += period_ns;
            if (now_ns() > next_ns) next_ns = now_ns() + period_ns; /* what was missed is not made up for in a burst */
        }
    }
}
