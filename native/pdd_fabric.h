/* One-sided writes with counted arrivals, over libfabric or within one machine: the whole C API.
 *
 * This file is also the cdef that Python sees: lines that start with '#' are dropped, so nothing here may need them.
 *
 * Rules. A port is opaque. Calls give 0 or a negative errno. Addresses are uint64_t. Nothing calls back. All calls for
 * one port come from one thread; a progress thread per port makes every data call of libfabric. The two meet in
 * lock-free rings, in one atomic word per immediate, and, for the rare calls marked (waits), in a semaphore.
 */
#ifndef PDD_FABRIC_H
#define PDD_FABRIC_H
#include <stdint.h>

typedef struct pdd_port pdd_port;

struct pdd_options {
    const char *providers; /* names in order of choice, separated by commas; exactly these and no other */
    const char *hosts;     /* the address of each NIC to listen on, separated by commas; ignored by shm */
    const uint32_t *cores; /* that the progress thread may run on */
    uint32_t num_cores;    /* 0: on any */
    uint32_t spin_us;      /* waits of the progress thread that follow one shorter than this are spun, as long as this */
    uint32_t max_writes;   /* writes accepted and not yet drained, 2^20 at most; 0: 4096 */
    uint32_t copies;       /* 1: peers of this machine and user may have their pages copied, not sent */
    uint32_t cuda;         /* 1: CUDA memory is going to be registered; a provider that cannot take it is left out */
};

struct pdd_info {
    char provider[64];
    char library_version[16];
    uint32_t pages_per_write;
    uint32_t fences;
    uint32_t num_nics;
    uint32_t copies; /* 1: asked for, and this process can take part in them */
    uint64_t max_write_bytes;
};

/* Memory to register. What is on a GPU is described as that, never as the host's: some providers would accept it, and
 * fail or read nonsense at the first write. */
struct pdd_region {
    uint64_t address;
    uint64_t length_bytes;
    int32_t fd;          /* what the memory is mapped from, beginning at its first byte, a memfd that cannot shrink; peers
                            of this machine read from it. -1: none, then it can be copied to but not from */
    int32_t cuda_device; /* whose memory it is; -1: the host's. Nobody copies to or from a device's, and `fd` is -1 */
    int32_t dmabuf_fd;   /* of exactly this memory of a device, used during the call; -1: none */
    int32_t reserved;
};

/* A registration has endpoints of its own, one for each NIC, where its one peer writes: releasing it closes those too,
 * and with them a message of which half has arrived. Closing the keys alone would let the second half in. Addresses and
 * keys of all of them are in `address`, which pdd_add_peer takes. */
struct pdd_memory {
    uint32_t memory;
    uint32_t address_bytes;
    uint8_t address[1024];
};

struct pdd_piece {
    uint64_t source_offset_bytes;
    uint64_t target_offset_bytes;
    uint64_t length_bytes;
};

/* See Write in pdd/fabric/port.py. The arrays are copied. */
struct pdd_write {
    uint64_t token;
    uint64_t source_base;
    uint64_t source_layer_bytes;
    uint64_t source_page_bytes;
    uint64_t target_base; /* from the begin of the peer's registration on */
    uint64_t target_layer_bytes;
    uint64_t target_page_bytes;
    uint64_t counter_base;
    uint32_t peer;
    uint32_t memory;
    uint32_t watch; /* 0: none */
    uint32_t immediate;
    uint32_t num_layers;
    uint32_t num_pages;
    uint32_t num_pieces;
    uint32_t reserved;
    const uint32_t *source_pages;
    const uint32_t *target_pages;
    const struct pdd_piece *pieces;
};

enum pdd_event_kind { PDD_WRITE_DONE = 1, PDD_COUNT_REACHED = 2, PDD_STRAY = 3, PDD_PORT_FAILED = 4 };

struct pdd_event {
    uint32_t kind;
    int32_t error;       /* WRITE_DONE, PORT_FAILED: 0 or a positive errno */
    uint32_t immediate;  /* COUNT_REACHED, STRAY; weight bits zero */
    uint32_t slot;       /* of no interest to the caller */
    uint64_t token;      /* WRITE_DONE */
    uint64_t num_pieces; /* WRITE_DONE: posted; STRAY: arrived */
    uint64_t num_bytes;  /* WRITE_DONE: posted */
    uint64_t first_ns;   /* CLOCK_MONOTONIC. COUNT_REACHED: of the first arrival; WRITE_DONE: of the first post, or 0 */
    uint64_t last_ns;    /* COUNT_REACHED: of the last arrival */
};

struct pdd_stats {
    uint64_t num_messages;       /* handed to libfabric, and copies asked for */
    uint64_t num_pieces;         /* in those messages */
    uint64_t num_bytes;
    uint64_t num_arrived;        /* pieces counted or stray */
    uint64_t num_strays;         /* pieces */
    uint64_t num_strays_unnamed; /* strays of a storm that got no event of their own */
    uint64_t num_errors;         /* completions in error */
    uint64_t num_busy;           /* times that libfabric said EAGAIN */
    uint64_t num_wakeups;        /* returns from poll */
    uint64_t num_copied_bytes;   /* for peers of this machine, by the target's port */
    uint64_t num_failed_paths;   /* times that a way to a peer was given up */
    uint64_t num_failed_copiers; /* of those: that of copies */
    uint64_t num_unknown;        /* completions of nothing that was under way, for example of one thing twice */
};

struct pdd_nic_stats {
    uint64_t num_bytes;        /* sent */
    uint64_t num_arrived;      /* pieces */
    uint64_t num_failed_paths; /* of those that begin here */
};

/* How a peer is reached at this moment. */
struct pdd_peer_info {
    uint32_t copies;    /* 1: its port has let us in, and copies from memory that has a descriptor; the NICs rest */
    uint32_t num_paths; /* pairs of a NIC of ours and one of the peer's */
    uint32_t num_open;  /* of those; the others failed and have not worked since, though they are tried now and then */
};

/* Opens a port, or writes into `message` why not and what to do. The process's signal handlers stay as they were. */
int pdd_open(const struct pdd_options *options, pdd_port **port, char *message, uint32_t message_bytes);
/* Ends every write with ECANCELED and closes the endpoints (waits). Events can still be drained. */
void pdd_close(pdd_port *port);
/* Closes if need be, and frees what that left. The event fd is closed here. */
void pdd_free(pdd_port *port);

void pdd_get_info(const pdd_port *port, struct pdd_info *info);
void pdd_get_stats(const pdd_port *port, struct pdd_stats *stats);
int pdd_get_nic_stats(const pdd_port *port, uint32_t nic, struct pdd_nic_stats *stats);

/* Control path (waits). A handle is never 0 and is not soon used again for something else. -EOPNOTSUPP: no NIC of this port
 * can take the region for what it is. */
int pdd_register(pdd_port *port, const struct pdd_region *region, struct pdd_memory *memory);
int pdd_release(pdd_port *port, uint32_t memory);
int pdd_add_peer(pdd_port *port, const uint8_t *address, uint32_t address_bytes, uint32_t *peer);
int pdd_drop_peer(pdd_port *port, uint32_t peer);
int pdd_get_peer(pdd_port *port, uint32_t peer, struct pdd_peer_info *info);
int pdd_watch(pdd_port *port, uint64_t counter_address, int32_t wake_fd, uint32_t *watch);
int pdd_unwatch(pdd_port *port, uint32_t watch);

/* Counting: none of these waits or locks. -EAGAIN: too many reached counts wait to be drained. */
int pdd_expect(pdd_port *port, uint32_t immediate, uint32_t num_pieces);
int pdd_change_expected(pdd_port *port, uint32_t immediate, uint32_t num_pieces);
int64_t pdd_arrived(const pdd_port *port, uint32_t immediate);
int64_t pdd_unexpect(pdd_port *port, uint32_t immediate);

/* Each accepted write ends in exactly one PDD_WRITE_DONE. -EAGAIN: no completion slot is free, drain first. */
int pdd_submit(pdd_port *port, const struct pdd_write *write);
int pdd_cancel(pdd_port *port, uint64_t token);

/* Words for an errno, positive or negative, libfabric's own included. */
const char *pdd_strerror(int error);

/* Readable while events wait. */
int pdd_event_fd(const pdd_port *port);
/* Takes at most `max_events` events, oldest first; returns how many. Clears the event fd when it took all. */
int pdd_drain(pdd_port *port, struct pdd_event *events, uint32_t max_events);

#endif
