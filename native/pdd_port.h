/* Inside of a port: who owns what.
 *
 *     caller's thread                          progress thread
 *     pdd_submit, pdd_cancel --- commands ---> takes, posts, counts; all of libfabric's data calls
 *     pdd_drain <--------------- events ------ each in a slot that was reserved beforehand
 *     pdd_expect ... <------- one word per immediate -------> count_arrival
 *     pdd_register ... --- a command, and a semaphore ---> the functions pdd_do_...
 *
 * Fields are grouped by owner. What the progress thread owns, the caller's thread may read only inside a control call,
 * or when nothing but a control call changes it.
 */
#ifndef PDD_PORT_H
#define PDD_PORT_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "pdd_choose.h"
#include "pdd_fabric.h"
#include "pdd_region.h"
#include "pdd_ring.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <semaphore.h>
#include <sys/uio.h>
#include <time.h>

/* Wait sets: only `net` of 1.17 needs one (see pdd_choose.c); 2.0 calls them deprecated. */
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

enum {
    MAX_PEERS = 1024,
    MAX_MEMORIES = 1024,
    MAX_WATCHES = 64,
    MAX_WRITES = 1 << 20,
    MAX_NICS = 8,
    MAX_IOV = 8,
    MAX_ADDRESS_BYTES = 64,  /* of one endpoint, libfabric's own */
    NUM_SLOTS = 4096,        /* of immediates, see pdd/fabric/immediate.py */
    SLOT_SHIFT = 20,
    GENERATION_SHIFT = 7,
    GENERATION_MASK = 0x1fff,
    MAX_WEIGHT = 128,
    WEIGHT_MASK = MAX_WEIGHT - 1,
    MAX_COUNTS = 2 * NUM_SLOTS, /* reached counts that may wait to be drained */
    MAX_STRAYS = 64,            /* stray events likewise; more are joined or only counted */
    MAX_IN_FLIGHT = 128,        /* messages of one path inside libfabric: bounds what a cancel must wait for */
    PATH_BYTES = 4 << 20,       /* ... and their bytes: what a slow NIC has been given, a fast one cannot take back */
    JOINED_BYTES = 1 << 19,     /* pieces are joined into one message up to this: over TCP, 1 MiB is slower */
    MIN_FDS = 2 + MAX_WATCHES + 64,
    POSTS_PER_TURN = 16,        /* messages for one peer before the next peer's turn */
};

/* Of a path with messages under way, of a target with jobs in its ring, of a peer with writes to post. */
static const uint64_t MAX_SILENCE_NS = 5 * 1000000000ull;

static inline uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* ---- intrusive list: a write is on at most one ---- */
struct link {
    struct link *previous, *next;
};

static inline void list_init(struct link *list) { list->previous = list->next = list; }
static inline bool list_empty(const struct link *list) { return list->next == list; }
static inline void list_remove(struct link *link)
{
    link->previous->next = link->next;
    link->next->previous = link->previous;
    list_init(link);
}
static inline void list_append(struct link *list, struct link *link)
{
    link->previous = list->previous;
    link->next = list;
    list->previous->next = link;
    list->previous = link;
}

/* ---- what the progress thread works on ---- */
/* One NIC, with what libfabric opens once for it. */
struct nic {
    char host[256];
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct pdd_terms terms;
    bool wakes;   /* its CQs have an fd */
    size_t address_bytes; /* of its endpoints */
    _Atomic uint64_t num_bytes, num_arrived, num_failed_paths;
};

/* With a CQ of its own: closed with the endpoint, it leaves no completion behind whose context is gone, and rxm, which
 * never takes a closed endpoint out of its CQ's wait object, has nothing to trip over. */
struct endpoint {
    struct link link; /* on the port's `endpoints` while open */
    struct nic *nic;
    struct path *path; /* that posts here; NULL: a peer writes here */
    struct fid_ep *ep; /* NULL: closed */
    struct fid_av *av;
    struct fid_cq *cq;
    struct fid_wait *wait_set; /* NULL: the CQ has its own fd, or none */
    int fd;                    /* readable when the CQ wants to be read; -1: the provider has none */
};

/* Place of a table, first in each entry. A handle is (uses << 16 | index + 1): an old one does not name the next
 * owner. */
struct place {
    uint32_t handle; /* 0: no caller knows it any more */
    uint32_t uses;
    bool taken;
};

struct cursor {
    uint32_t layer, page, piece;
};

struct write {
    struct link link; /* first: on a peer's `ready`, on a watch's `armed`, or on none */
    struct pdd_write spec;
    struct peer *peer;
    struct copier *copier; /* NULL: NICs only */
    struct watch *watch;
    struct cursor cursor; /* next piece to post */
    uint32_t slot;
    uint32_t in_flight; /* messages inside libfabric, and copies asked for */
    int error;
    bool ended; /* nothing more will be posted */
    uint64_t posted_pieces;
    uint64_t posted_bytes;
    uint64_t first_ns; /* of the first post */
};

/* Neighbouring pieces of one layer that travel as one message. */
struct batch {
    struct iovec local[MAX_IOV];
    struct fi_rma_iov remote[MAX_IOV]; /* addresses from the begin of the peer's registration on */
    uint32_t num_iov, weight;
    uint64_t bytes;
    struct cursor next;
};

/* Context of one message. Freed only after the endpoint that knows it is closed. */
struct message {
    struct fi_context2 context; /* first */
    struct path *path;
    struct write *write; /* NULL: not in flight */
    uint64_t bytes;
};

/* What is tried anew later: the longer it fails, the later. */
struct retry {
    uint64_t after_ns;
    uint64_t pause_ns;
};

/* The way from one of our NICs to one of a peer's, with an endpoint of ours that writes to nobody else: a peer that
 * hangs takes nothing with it, and closing it ends what could still read the source or write to the target. */
struct path {
    struct peer *peer;
    struct nic *nic;
    uint64_t key, base; /* of the peer's registration, at its NIC */
    uint8_t remote[MAX_ADDRESS_BYTES];
    struct endpoint endpoint;
    fi_addr_t address;
    struct message *messages;
    uint32_t *free_messages; /* stack of indices */
    uint32_t num_free;
    uint64_t bytes_in_flight; /* what is left of PATH_BYTES is its credit */
    uint64_t stalled_since_ns; /* 0: not stalled. libfabric says EAGAIN since then */
    uint64_t refused_ns;       /* ... the last time */
    uint64_t retry_ns;         /* ... and is asked again then */
    uint64_t progress_ns;      /* last completion, or first message after a pause */
    struct retry reopen;
    bool failing;
    bool lingers;
};

/* A registration of another port. */
struct peer {
    struct place place;
    struct link ready;
    uint64_t length_bytes; /* of the registration */
    bool copies;           /* it is of this machine, and says that it copies */
    uint8_t copy_name[16], copy_token[16];
    struct path *paths;
    uint32_t num_paths;
    int error;               /* of the way that failed last */
    uint64_t stuck_since_ns; /* 0: not stuck. No write could be posted since then, nor has anything come back */
};

struct memory {
    struct place place;
    struct pdd_region region;
    uint8_t token[16]; /* whoever knows it may ask for copies into this memory */
    struct {
        struct fid_mr *mr;
        void *descriptor;
        struct endpoint endpoint;
    } *at; /* by NIC */
};

struct watch {
    struct place place;
    const _Atomic uint64_t *counter;
    int wake_fd; /* -1: polled */
    uint64_t seen;
    struct link armed;
};

/* ---- from the caller's thread to the progress thread ---- */
enum command_kind { COMMAND_WRITE = 1, COMMAND_CANCEL, COMMAND_REACHED, COMMAND_CALL, COMMAND_STOP };

struct command {
    uint32_t kind;
    uint32_t number; /* slot of a write, or immediate */
    void *pointer;
};

/* A control call, on the caller's stack while it waits. */
struct call {
    int (*function)(struct pdd_port *port, struct call *call);
    const struct pdd_region *region;
    uint64_t address, length_bytes;
    uint32_t handle;
    int32_t fd;
    const uint8_t *bytes;
    struct pdd_memory *memory;
    struct pdd_peer_info *peer_info;
    int result;
    sem_t done;
};

/* Count of one immediate in one word, so that arming, counting and a new goal can race without a lock:
 *
 *      63      62       61          48 47         24 23          0
 *    | armed | reached | generation   |    goal     |    count    |
 *
 * Whoever sets `reached` causes the one event. After that the word rests, so that the count can still be asked for. */
struct count {
    _Atomic uint64_t word;
    uint64_t first_ns, last_ns; /* progress thread's */
};

struct pdd_port {
    /* fixed after open */
    struct nic nics[MAX_NICS];
    uint32_t num_nics;
    char provider[64];
    int wake_fd, event_fd;
    uint64_t spin_ns;
    uint32_t max_writes, max_iov;
    uint64_t max_message_bytes;
    bool wakes; /* every NIC's CQs have an fd */
    pthread_t thread;

    /* caller's thread */
    bool closed;
    struct write **slot_writes; /* NULL: free */
    bool *slot_cancelled;
    uint32_t *free_slots;
    uint32_t num_free_slots;
    uint32_t counts_reserved;

    /* shared */
    struct pdd_ring commands, events;
    _Atomic bool sleeping;  /* the progress thread is in poll, or about to be */
    _Atomic bool signalled; /* event_fd is readable, or about to be */
    _Atomic uint32_t num_armed;
    _Atomic uint32_t strays_waiting; /* stray events in the ring */
    struct count counts[NUM_SLOTS];
    struct {
        _Atomic uint64_t num_messages, num_pieces, num_bytes, num_arrived, num_strays, num_strays_unnamed, num_errors,
            num_busy, num_wakeups, num_copied_bytes, num_failed_paths, num_failed_copiers, num_unknown;
    } stats;

    /* progress thread */
    bool stopping;
    bool brief;             /* the last sleep was shorter than spin_ns, and nobody has been told of anything since */
    uint32_t num_fruitless; /* waits in a row that something ended, with nothing done after them */
    int failed;   /* for good: an errno */
    int breaking; /* ... from the end of this turn on */
    uint64_t now_ns, active_ns, checked_ns;
    struct write **live; /* by slot */
    struct link endpoints;
    struct peer peers[MAX_PEERS];
    struct memory memories[MAX_MEMORIES];
    struct watch watches[MAX_WATCHES];
    uint32_t num_peers, num_memories, num_watches; /* high-water marks */
    uint32_t in_flight;                            /* messages inside libfabric */
    struct copying *copying;                       /* NULL: no copies */
    struct pollfd *fds;
    nfds_t max_fds;
    struct {
        uint32_t immediate;
        uint64_t num_pieces;
    } strays[MAX_STRAYS];
    uint32_t num_strays;
};

static inline uint64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline void add_stat(_Atomic uint64_t *stat, uint64_t number)
{
    /* One writer; a torn read is all that has to be avoided. */
    atomic_store_explicit(stat, atomic_load_explicit(stat, memory_order_relaxed) + number, memory_order_relaxed);
}

/* ECANCELED is the caller's word for what he stopped himself; libfabric says it when a connection broke. Numbers from
 * 256 on are libfabric's own. */
static inline int error_number(int error)
{
    if (error == FI_ECANCELED)
        return ECONNABORTED;
    return error > 0 && error < FI_ERRNO_OFFSET ? error : EIO;
}

/* ---- trying again ---- */
static inline void retry_later(struct retry *retry, uint64_t now_ns)
{
    static const uint64_t FIRST_NS = 250 * 1000000ull, LONGEST_NS = 30 * 1000000000ull;
    retry->pause_ns = retry->pause_ns ? least(2 * retry->pause_ns, LONGEST_NS) : FIRST_NS;
    retry->after_ns = now_ns + retry->pause_ns;
}

/* pdd_nic.c */
int pdd_nic_open(struct nic *nic, const char *providers, uint64_t device_caps, char *why, size_t why_bytes);
void pdd_nic_close(struct nic *nic);
int pdd_endpoint_open(struct pdd_port *port, struct nic *nic, struct path *path, struct endpoint *endpoint);
int pdd_endpoint_close(struct endpoint *endpoint);
int pdd_endpoint_name(const struct endpoint *endpoint, uint8_t *address, size_t *address_bytes);

/* pdd_memory.c; find on any thread (see above), the rest on the progress thread */
struct memory *pdd_find_memory(struct pdd_port *port, uint32_t handle);
int pdd_do_register(struct pdd_port *port, struct call *call);
int pdd_do_release(struct pdd_port *port, struct call *call);
int pdd_free_memory(struct pdd_port *port, struct memory *memory);

/* pdd_peer.c, likewise */
struct peer *pdd_find_peer(struct pdd_port *port, uint32_t handle);
int pdd_do_add_peer(struct pdd_port *port, struct call *call);
int pdd_do_drop_peer(struct pdd_port *port, struct call *call);
int pdd_do_get_peer(struct pdd_port *port, struct call *call);
void pdd_free_peer(struct pdd_port *port, struct peer *peer);

/* pdd_watch.c, likewise */
struct watch *pdd_find_watch(struct pdd_port *port, uint32_t handle);
int pdd_do_watch(struct pdd_port *port, struct call *call);
int pdd_do_unwatch(struct pdd_port *port, struct call *call);

/* pdd_path.c, on the progress thread */
int pdd_path_init(struct path *path);
void pdd_path_close(struct pdd_port *port, struct path *path);
bool pdd_path_busy(const struct path *path);
struct path *pdd_choose_path(struct pdd_port *port, struct peer *peer);
bool pdd_has_open_path(const struct peer *peer);
int pdd_post_message(struct pdd_port *port, struct path *path, struct write *write);
bool pdd_complete(struct pdd_port *port, struct path *path, const void *context, int error);
bool pdd_fail_path(struct pdd_port *port, struct path *path, int error);
void pdd_fail_peers(struct pdd_port *port, int error);
unsigned pdd_check_paths(struct pdd_port *port);
uint64_t pdd_path_patience(const struct pdd_port *port, const struct path *path);

/* pdd_write.c, on the progress thread */
void pdd_take_write(struct pdd_port *port, struct write *write);
void pdd_end_write(struct pdd_port *port, struct write *write, int error);
void pdd_cancel_write(struct pdd_port *port, struct write *write);
void pdd_abandon_write(struct pdd_port *port, struct write *write, int error);
void pdd_fill_batch(const struct pdd_port *port, const struct write *write, uint32_t max_iov, struct batch *batch);
void pdd_batch_posted(struct pdd_port *port, struct write *write, const struct batch *batch);
void pdd_part_done(struct pdd_port *port, struct write *write, int error);
unsigned pdd_post(struct pdd_port *port);
unsigned pdd_sample_watches(struct pdd_port *port);

/* pdd_progress.c */
void *pdd_progress(void *port);
void pdd_wake(struct pdd_port *port);
void pdd_signal_fd(int fd);
void pdd_signal_events(struct pdd_port *port);
void pdd_push_event(struct pdd_port *port, const struct pdd_event *event);
unsigned pdd_read_cq(struct pdd_port *port, struct endpoint *endpoint);

/* pdd_count.c */
void pdd_count_arrival(struct pdd_port *port, uint32_t data);
void pdd_push_reached(struct pdd_port *port, uint32_t immediate);
void pdd_push_strays(struct pdd_port *port);

#endif
