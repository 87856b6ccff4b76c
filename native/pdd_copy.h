/* Copies between two ports of one machine: the target's port copies from memory of the writer that it has mapped.
 *
 *     writer (pdd_copy.c)                           target (pdd_serve.c)
 *     connect, hello: ring, bells, token,  ------>  who may, from which memory into which
 *             descriptor of the source     <-ring--  accepted: a job that is refused would be a write that failed
 *     jobs                                 --ring->  copy, count
 *                                          <-ring--  how many are done
 *
 * The writer never maps what it writes to. So a fence is nothing but the target serving no more, a writer that hangs or
 * dies cannot reach anybody's page, and whatever stands in the ring is checked like any message from outside. What is not
 * guarded against is a process of the same user that means harm: it could stop our thread by its bells, whose flags it
 * shares with us, as it could stop the whole process.
 *
 * A Unix socket with an abstract name introduces the two; while it is open, the other side lives.
 */
#ifndef PDD_COPY_H
#define PDD_COPY_H

#include "pdd_port.h"

enum {
    COPY_VERSION = 3,
    COPY_JOBS = 1024,           /* in a ring; a power of two */
    COPY_BYTES = 8 << 20,       /* asked for and not done: bounds what a cancel must wait for */
    COPY_BYTES_PER_TURN = 1 << 20,
    MAX_READERS = 1024,
    COPY_BACKLOG = 128,         /* connections that wait to be accepted */
    COPY_NAME_BYTES = 16,
    MACHINE_BYTES = 64,
};

/* ---- what crosses: only ever read with every field checked ---- */
struct copy_job {
    uint32_t immediate; /* with weight */
    uint32_t reserved;
    uint64_t source_offset_bytes;
    uint64_t target_offset_bytes;
    uint64_t length_bytes;
};

struct copy_ring {
    _Alignas(PDD_CACHE_LINE) _Atomic uint32_t tail; /* writer: jobs put in */
    _Atomic uint32_t stopped;                       /* writer: sources may change from now on */
    _Atomic uint32_t wake_at;                       /* writer: wants its bell when `head` gets there */
    _Atomic uint32_t writer_sleeps;
    _Alignas(PDD_CACHE_LINE) _Atomic uint32_t head; /* target: jobs done */
    _Atomic uint32_t reader_sleeps;
    _Atomic uint32_t accepted;                      /* target: jobs may come */
    _Alignas(PDD_CACHE_LINE) struct copy_job jobs[COPY_JOBS];
};

enum copy_message_kind { COPY_HELLO = 0x70646431 };

struct copy_message {
    uint32_t kind;
    uint32_t version; /* with the descriptors of the ring, the target's bell, the writer's, and the source */
    uint64_t length_bytes; /* of the source */
    uint8_t token[16];
};

/* ---- one side each ---- */
enum tag_kind { TAG_LISTENER, TAG_READER_SOCKET, TAG_READER_BELL, TAG_COPIER_SOCKET, TAG_COPIER_BELL };

/* What an event of the epoll descriptor is about. */
struct tag {
    enum tag_kind kind;
    void *owner;
};

struct copier_job {
    struct write *write;
    uint64_t bytes;
};

/* Our way from one memory to one peer of this machine. */
struct copier {
    struct link link; /* on `copiers` */
    struct peer *peer;
    uint32_t memory; /* its handle */
    int socket, reader_bell, bell;
    struct tag socket_tag, bell_tag;
    struct copy_ring *ring; /* NULL: not connected */
    bool accepted;          /* the target has said so, which it cannot take back */
    bool announced;         /* the target sees all jobs, or was woken */
    bool left;              /* the target went while nothing was asked of it: a failure if it is wanted again */
    uint32_t head, tail;
    uint64_t bytes_in_flight, progress_ns;
    struct retry reconnect;
    struct copier_job jobs[COPY_JOBS];
};

/* A memory of a peer of this machine that writes to us. */
struct reader {
    struct link link; /* on `readers` */
    int socket, bell, writer_bell;
    struct tag socket_tag, bell_tag;
    struct memory *memory; /* NULL: it has not said hello */
    struct copy_ring *ring;
    uint32_t head;
    const uint8_t *source; /* NULL: not mapped */
    uint64_t source_bytes, since_ns;
};

struct copying {
    char machine[MACHINE_BYTES];    /* equal for processes that can do this with each other */
    uint8_t name[COPY_NAME_BYTES]; /* of the listener */
    int listener, epoll;
    struct tag listener_tag;
    struct link copiers, readers;
    uint32_t num_readers;
    uint64_t attended_ns;
};

/* pdd_copying.c: what both sides share. All on the progress thread, open and close apart. */
void pdd_copying_open(struct pdd_port *port);
void pdd_copying_close(struct pdd_port *port);
void pdd_copying_socket_name(const uint8_t *name, void *address, uint32_t *address_bytes);
bool pdd_copying_same_user(int socket);
bool pdd_copying_is_bell(int fd);
int pdd_copying_listen(struct copying *copying, int fd, struct tag *tag);
void pdd_copying_close_fd(struct copying *copying, int *fd);
void *pdd_copying_map_sealed(int fd, uint64_t length_bytes, int protection);
unsigned pdd_attend_copies(struct pdd_port *port);
bool pdd_copies_may_sleep(struct pdd_port *port);
void pdd_copies_awake(struct pdd_port *port);

/* pdd_copy.c: the writer */
struct copier *pdd_find_copier(struct pdd_port *port, struct peer *peer, uint32_t memory);
void pdd_free_copiers(struct pdd_port *port, const struct peer *peer);
bool pdd_is_copied_to(const struct pdd_port *port, const struct peer *peer);
bool pdd_copier_ready(struct pdd_port *port, struct copier *copier);
int pdd_post_copy(struct pdd_port *port, struct copier *copier, struct write *write);
void pdd_announce_copies(struct pdd_port *port);
unsigned pdd_reap_copies(struct pdd_port *port);
void pdd_fail_copier(struct pdd_port *port, struct copier *copier, int error);
void pdd_fail_copiers(struct pdd_port *port, int error);
void pdd_forget_source(struct pdd_port *port, uint32_t handle);
bool pdd_copier_may_sleep(struct copier *copier);
unsigned pdd_check_copiers(struct pdd_port *port);
uint64_t pdd_copies_patience(const struct pdd_port *port);

/* pdd_serve.c: the target */
void pdd_accept_readers(struct pdd_port *port);
void pdd_hear_reader(struct pdd_port *port, struct reader *reader);
void pdd_close_reader(struct pdd_port *port, struct reader *reader);
void pdd_close_readers_of(struct pdd_port *port, const struct memory *memory);
unsigned pdd_serve_readers(struct pdd_port *port);
bool pdd_reader_may_sleep(struct reader *reader);

/* pdd_bytes.c */
void pdd_copy_bytes(uint8_t *to, const uint8_t *from, uint64_t length_bytes);

#endif
