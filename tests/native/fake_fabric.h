/* A provider called "fake" that misbehaves as a seed says. It is linked in front of libfabric (--wrap of fi_getinfo and
 * fi_fabric), which still answers for every other provider. Its network is this process. Clocks can be put forward
 * (--wrap of clock_gettime), and the system can say no (--wrap of fopen and bind). */
#ifndef PDD_FAKE_FABRIC_H
#define PDD_FAKE_FABRIC_H

#include <stdbool.h>
#include <stdint.h>

/* Each of 1000. */
struct fake_odds {
    uint32_t busy, storm; /* EAGAIN once, or up to 200 times */
    uint32_t post_error;  /* fi_writemsg says another error */
    uint32_t late;        /* a completion is not there yet, each time that the CQ is read */
    uint32_t error;       /* a completion in error: placed or not, counted or not */
    uint32_t twice;       /* a completion comes twice */
    uint32_t stray;       /* an arrival that nobody sent, of an immediate with slot >= FAKE_STRAY_SLOT */
    uint32_t foreign;     /* a completion whose context is nobody's */
    uint32_t cq_error;    /* fi_cq_read fails, where a path posts */
    uint32_t port_error;  /* ... where peers write: the port is broken */
    uint32_t open_error;  /* of fabric, domain, endpoint, CQ, AV, or the address put into it */
    uint32_t register_error;
};

enum { FAKE_STRAY_SLOT = 2048, FAKE_SLOTS = 32, FAKE_GENERATIONS = 256 };

/* From here on, with another kind of NIC for each seed. Nothing is open. */
void fake_start(uint64_t seed, struct fake_odds odds);
/* Only good weather from here on. */
void fake_calm(void);
/* It takes the name of another provider, and is treated as that one, until the next start. Nothing is open. */
void fake_rename(const char *provider);
/* Messages are taken and not delivered, until it is taken back. */
void fake_hold(bool hold);
/* What peers write to fails at its next read. */
void fake_break_targets(void);
/* Of the C library, "fopen" or "bind" fails, as in a sandbox. NULL: none. */
void fake_refuse(const char *function);
/* Puts CLOCK_MONOTONIC forward. */
void fake_skip_ns(uint64_t ns);
/* Pieces that fi_cq_read has told of: all, and by immediate, for the first slots and generations. */
uint64_t fake_arrived(void);
uint64_t fake_arrived_of(uint32_t immediate);
/* Libfabric's objects that are not closed. */
uint32_t fake_num_open(void);
uint32_t fake_num_under_way(void);

#endif
