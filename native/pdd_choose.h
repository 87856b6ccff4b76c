/* Which provider a port runs over, and what follows from that for everything else.
 *
 * Decisions only: fi_getinfo comes in as an argument, so that a recorded answer of a NIC that is not here decides the
 * same as the NIC would.
 */
#ifndef PDD_CHOOSE_H
#define PDD_CHOOSE_H

#include <rdma/fabric.h>
#include <rdma/fi_eq.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* fi_getinfo, or a list that answers for it. */
typedef int pdd_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags,
                        const struct fi_info *hints, struct fi_info **list);

/* What an fi_info says to those who post, register and close. What is not here is not needed: an order of arrivals
 * (pieces are counted, whichever comes first), and whether local descriptors are wanted (they are always given). */
struct pdd_terms {
    uint32_t max_iov;           /* ranges in one message */
    uint32_t max_in_flight;     /* messages of one endpoint inside libfabric */
    uint64_t max_message_bytes; /* of which the target counts one arrival */
    uint32_t key_bytes;
    bool chooses_keys;          /* we ask for a key; else the provider gives one */
    bool virtual_addresses;     /* targets are named by their address; else by their offset in the registration */
    bool binds_memory;          /* a key is valid only once it is bound to its endpoint, and is closed before that */
    bool device_memory;         /* CUDA memory can be registered as what it is */
    bool dmabuf;                /* ... also by a dma-buf */
    bool requires_p2p;          /* the endpoint must be told never to copy device memory through the host */
    bool listens;               /* endpoints take TCP connections, which are closed while libfabric looks */
    bool lingers;               /* an endpoint works only inside our calls, and is not safe to close: shm */
    enum fi_wait_obj wait_object; /* to try first */
};

/* What to ask libfabric for. `device_caps`: FI_HMEM if CUDA memory is to be registered, else 0. NULL: no memory. */
struct fi_info *pdd_make_hints(const char *provider, uint64_t device_caps);

/* False: not usable, `why` says it in words that follow the provider's name. */
bool pdd_usable(const struct fi_info *info, char *why, size_t why_bytes);

/* Of a usable info. */
struct pdd_terms pdd_terms(const struct fi_info *info);

/* The first usable info of the first of `providers` (exact names, separated by commas) on this host's address; an efa
 * host may also be the name of its NIC. For fi_freeinfo. NULL: `why` lists what was there and why it is not usable, or
 * is empty. */
struct fi_info *pdd_choose(const char *providers, const char *host, uint64_t device_caps, pdd_getinfo *getinfo,
                           char *why, size_t why_bytes);

/* Names of the providers that could be asked for, separated by commas. */
void pdd_list_offers(pdd_getinfo *getinfo, char *text, size_t text_bytes);

#endif
