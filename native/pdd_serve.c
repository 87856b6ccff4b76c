/* The target's side of copies within one machine: whom it serves, and the copying. */
#include "pdd_copy.h"

#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

/* ---- who may ---- */
/* Whoever connects says hello with it. */
static void close_silent_readers(struct pdd_port *port)
{
    for (struct link *link = port->copying->readers.next, *next; link != &port->copying->readers; link = next) {
        struct reader *reader = (struct reader *)link;
        next = link->next;
        if (!reader->memory && port->now_ns - reader->since_ns > MAX_SILENCE_NS)
            pdd_close_reader(port, reader);
    }
}

/* Another user's is closed at once. */
static void accept_reader(struct pdd_port *port, int socket)
{
    struct copying *copying = port->copying;
    struct reader *reader = NULL;
    if (pdd_copying_same_user(socket) && copying->num_readers < MAX_READERS)
        reader = calloc(1, sizeof *reader);
    if (!reader) {
        close(socket);
        return;
    }
    reader->since_ns = port->now_ns;
    reader->socket = socket;
    reader->bell = reader->writer_bell = -1;
    reader->socket_tag = (struct tag){.kind = TAG_READER_SOCKET, .owner = reader};
    reader->bell_tag = (struct tag){.kind = TAG_READER_BELL, .owner = reader};
    list_append(&copying->readers, &reader->link);
    copying->num_readers++;
    if (pdd_copying_listen(copying, socket, &reader->socket_tag))
        pdd_close_reader(port, reader);
}

/* All that wait: the next of which we hear is the next that comes. */
void pdd_accept_readers(struct pdd_port *port)
{
    int socket, num_taken = 0;
    close_silent_readers(port);
    while (num_taken++ < COPY_BACKLOG &&
           (socket = accept4(port->copying->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0)
        accept_reader(port, socket);
}

void pdd_close_reader(struct pdd_port *port, struct reader *reader)
{
    pdd_copying_close_fd(port->copying, &reader->socket);
    pdd_copying_close_fd(port->copying, &reader->bell);
    pdd_copying_close_fd(port->copying, &reader->writer_bell);
    if (reader->source)
        munmap((void *)reader->source, reader->source_bytes);
    if (reader->ring)
        munmap(reader->ring, sizeof *reader->ring);
    list_remove(&reader->link);
    port->copying->num_readers--;
    free(reader);
}

/* The fence: nothing of what its peer has asked for is copied any more. */
void pdd_close_readers_of(struct pdd_port *port, const struct memory *memory)
{
    if (!port->copying)
        return;
    for (struct link *link = port->copying->readers.next, *next; link != &port->copying->readers; link = next) {
        struct reader *reader = (struct reader *)link;
        next = link->next;
        if (reader->memory == memory)
            pdd_close_reader(port, reader);
    }
}

/* ---- what it says ---- */
static struct memory *find_by_token(struct pdd_port *port, const uint8_t *token)
{
    for (uint32_t i = 0; i < port->num_memories; i++)
        if (port->memories[i].place.handle && !memcmp(port->memories[i].token, token, sizeof port->memories[i].token))
            return &port->memories[i];
    return NULL;
}

static bool take_hello(struct pdd_port *port, struct reader *reader, const struct copy_message *message, int *fds)
{
    if (reader->memory || message->version != COPY_VERSION)
        return false;
    reader->memory = find_by_token(port, message->token);
    reader->ring = pdd_copying_map_sealed(fds[0], sizeof *reader->ring, PROT_READ | PROT_WRITE);
    reader->source = pdd_copying_map_sealed(fds[3], message->length_bytes, PROT_READ);
    reader->source_bytes = message->length_bytes;
    if (!reader->memory || !reader->ring || !reader->source || !pdd_copying_is_bell(fds[1]) ||
        !pdd_copying_is_bell(fds[2]))
        return false;
    reader->bell = fds[1];
    reader->writer_bell = fds[2];
    fds[1] = fds[2] = -1;
    if (pdd_copying_listen(port->copying, reader->bell, &reader->bell_tag))
        return false;
    atomic_store(&reader->ring->accepted, 1);
    pdd_signal_fd(reader->writer_bell);
    return true;
}

/* Room for as many as the kernel may put there: it fills what alignment leaves. */
enum { CONTROL_BYTES = CMSG_SPACE(4 * sizeof(int)), MAX_FDS = (CONTROL_BYTES - CMSG_LEN(0)) / sizeof(int) };

static uint32_t take_fds(struct msghdr *header, int *fds)
{
    uint32_t num_fds = 0;
    for (struct cmsghdr *part = CMSG_FIRSTHDR(header); part; part = CMSG_NXTHDR(header, part)) {
        if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS)
            continue;
        num_fds = (uint32_t)((part->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(fds, CMSG_DATA(part), num_fds * sizeof(int));
    }
    return num_fds;
}

/* Takes one message. 0: there is none; -1: it breaks the rules, or the writer has gone. */
static int hear(struct pdd_port *port, struct reader *reader)
{
    struct copy_message message;
    struct iovec data = {.iov_base = &message, .iov_len = sizeof message};
    union {
        struct cmsghdr header;
        uint8_t bytes[CONTROL_BYTES];
    } control;
    struct msghdr header = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    int fds[MAX_FDS];
    ssize_t num_bytes = recvmsg(reader->socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (num_bytes < 0 && (errno == EAGAIN || errno == EINTR))
        return 0;
    uint32_t num_fds = num_bytes < 0 ? 0 : take_fds(&header, fds);
    bool whole = num_bytes == sizeof message && !(header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)), fine = false;
    if (whole && message.kind == COPY_HELLO && num_fds == 4)
        fine = take_hello(port, reader, &message, fds);
    for (uint32_t i = 0; i < num_fds; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    if (num_bytes > 0 && !fine)
        add_stat(&port->stats.num_errors, 1);
    return fine ? 1 : -1;
}

void pdd_hear_reader(struct pdd_port *port, struct reader *reader)
{
    int rc;
    while ((rc = hear(port, reader)) > 0)
        ;
    if (rc < 0)
        pdd_close_reader(port, reader);
}

/* ---- copying ---- */
/* False: it asks for what it may not, or its sources change already. */
static bool serve_job(struct pdd_port *port, struct reader *reader, const struct copy_job *job)
{
    const struct pdd_region *target = &reader->memory->region;
    if (!job->length_bytes || job->length_bytes > target->length_bytes ||
        job->target_offset_bytes > target->length_bytes - job->length_bytes ||
        job->length_bytes > reader->source_bytes ||
        job->source_offset_bytes > reader->source_bytes - job->length_bytes)
        return false;
    pdd_copy_bytes((uint8_t *)target->address + job->target_offset_bytes, reader->source + job->source_offset_bytes,
                   job->length_bytes);
    /* The writer says `stopped` before it changes a source. Not said after the last byte was read: it was right. */
    atomic_thread_fence(memory_order_acquire);
    if (atomic_load_explicit(&reader->ring->stopped, memory_order_relaxed))
        return false;
    pdd_count_arrival(port, job->immediate);
    add_stat(&port->stats.num_copied_bytes, job->length_bytes);
    return true;
}

static void wake_writer(struct reader *reader)
{
    struct copy_ring *ring = reader->ring;
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load(&ring->writer_sleeps) && (int32_t)(reader->head - atomic_load(&ring->wake_at)) >= 0 &&
        atomic_exchange(&ring->writer_sleeps, 0))
        pdd_signal_fd(reader->writer_bell);
}

/* One turn. Returns the jobs done, at least 1 if it had to be closed. */
static unsigned serve(struct pdd_port *port, struct reader *reader)
{
    struct copy_ring *ring = reader->ring;
    uint32_t tail = atomic_load_explicit(&ring->tail, memory_order_acquire);
    uint64_t num_bytes = 0;
    unsigned num_done = 0;
    while (reader->head != tail && num_bytes < COPY_BYTES_PER_TURN) {
        struct copy_job job;
        memcpy(&job, &ring->jobs[reader->head % COPY_JOBS], sizeof job);
        atomic_signal_fence(memory_order_seq_cst); /* and never again: what is checked is what is done */
        if (tail - reader->head > COPY_JOBS || !serve_job(port, reader, &job)) {
            add_stat(&port->stats.num_errors, 1);
            pdd_close_reader(port, reader);
            return num_done + 1;
        }
        num_bytes += job.length_bytes;
        num_done++;
        atomic_store_explicit(&ring->head, ++reader->head, memory_order_release);
    }
    if (num_done)
        wake_writer(reader);
    return num_done;
}

unsigned pdd_serve_readers(struct pdd_port *port)
{
    unsigned num_done = 0;
    if (!port->copying || port->failed)
        return 0;
    for (struct link *link = port->copying->readers.next, *next; link != &port->copying->readers; link = next) {
        struct reader *reader = (struct reader *)link;
        next = link->next;
        if (reader->ring)
            num_done += serve(port, reader);
    }
    return num_done;
}

bool pdd_reader_may_sleep(struct reader *reader)
{
    if (!reader->ring)
        return true;
    atomic_store(&reader->ring->reader_sleeps, 1);
    return atomic_load(&reader->ring->tail) == reader->head;
}
