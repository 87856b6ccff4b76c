/* Memory to register, and the words in which libfabric is told of it. */
#ifndef PDD_REGION_H
#define PDD_REGION_H

#include "pdd_choose.h"
#include "pdd_fabric.h"

#include <rdma/fi_domain.h>
#include <sys/uio.h>

/* Arguments of fi_mr_regattr. `attr` points into the same struct: not to be copied. */
struct pdd_registration {
    struct fi_mr_attr attr;
    uint64_t flags;
    struct iovec range;
#ifdef FI_MR_DMABUF
    struct fi_mr_dmabuf dmabuf;
#endif
};

static inline bool pdd_on_device(const struct pdd_region *region) { return region->cuda_device >= 0; }

/* 0, or -EOPNOTSUPP: this provider cannot take the region for what it is. `key` counts where we choose it. */
int pdd_describe_region(const struct pdd_region *region, const struct pdd_terms *terms, uint64_t key,
                        struct pdd_registration *registration);

#endif
