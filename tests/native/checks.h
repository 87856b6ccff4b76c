/* What the programs here share. */
#ifndef PDD_TEST_CHECKS_H
#define PDD_TEST_CHECKS_H

#include "pdd_fabric.h"

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* Who waits longer has found a bug. */
enum { CHECK_PATIENCE_MS = 30000 };

/* Said before what does not hold: which seed, which way. */
extern char check_context[128];

#define CHECK(what)                                                                                                    \
    do {                                                                                                               \
        if (!(what)) {                                                                                                 \
            fprintf(stderr, "%s:%d: %s%s does not hold\n", __FILE__, __LINE__, check_context, #what);                  \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define CHECK_FDS_ARE_SHARED /* with the tool's symbolizer */
#endif
#endif

/* Open descriptors of this process; 0 where a tool has some of its own. */
static inline int count_fds(void)
{
#ifdef CHECK_FDS_ARE_SHARED
    return 0;
#endif
    DIR *open = opendir("/proc/self/fd");
    int number = 0;
    CHECK(open);
    while (readdir(open))
        number++;
    closedir(open);
    return number;
}

static inline int register_host(pdd_port *port, uint64_t address, uint64_t length_bytes, int fd,
                                struct pdd_memory *memory)
{
    struct pdd_region region = {address, length_bytes, fd, -1, -1, 0};
    return pdd_register(port, &region, memory);
}

/* Of a test's own. xorshift64*. */
static inline uint64_t next_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1dull;
}

static inline uint64_t seed_state(uint64_t seed) { return (seed + 1) * 0x9e3779b97f4a7c15ull; }

#endif
