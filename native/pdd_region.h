/* Memory to register, and the words in which libfabric is told of it. */
#ifndef PDD_REGION_H
#define PDD_REGION_H

#include "pdd_choose.h"

#include <rdma/fi_domain.h>
#include <sys/uio.h>

struct pdd_region {
    uint64_t address, length_bytes;
    enum fi_hmem_iface iface; /* FI_HMEM_SYSTEM or FI_HMEM_CUDA */
    int device;               /* number of the CUDA device */
    int dmabuf_fd;            /* of exactly this region; -1: none */
};

/* Arguments of fi_mr_regattr. `attr` points into the same struct: not to be copied. */
struct pdd_registration {
    struct fi_mr_attr attr;
    uint64_t flags;
    struct iovec range;
#ifdef FI_MR_DMABUF
    struct fi_mr_dmabuf dmabuf;
#endif
};

/* 0, or -EOPNOTSUPP: this provider cannot take the region for what it is. CUDA memory is never described as the host's:
 * some providers would accept that, and fail or read nonsense at the first write. `key` counts where we choose it. */
int pdd_describe_region(const struct pdd_region *region, const struct pdd_terms *terms, uint64_t key,
                        struct pdd_registration *registration);

#endif
