/* See pdd_region.h. */
#include "pdd_region.h"

#include <errno.h>
#include <string.h>

/* By dma-buf where the provider understands it (1.20), which needs no kernel module of NVIDIA's; else by address. */
static void describe_device_memory(const struct pdd_region *region, const struct pdd_terms *terms,
                                   struct pdd_registration *registration)
{
    registration->attr.iface = FI_HMEM_CUDA;
    registration->attr.device.cuda = region->cuda_device;
#ifdef FI_MR_DMABUF
    if (terms->dmabuf && region->dmabuf_fd >= 0) {
        registration->dmabuf = (struct fi_mr_dmabuf){
            .fd = region->dmabuf_fd,
            .len = region->length_bytes,
            .base_addr = (void *)region->address,
        };
        registration->attr.dmabuf = &registration->dmabuf;
        registration->flags = FI_MR_DMABUF;
    }
#else
    (void)terms;
#endif
}

int pdd_describe_region(const struct pdd_region *region, const struct pdd_terms *terms, uint64_t key,
                        struct pdd_registration *registration)
{
    if (pdd_on_device(region) && !terms->device_memory)
        return -EOPNOTSUPP;
    memset(registration, 0, sizeof *registration);
    registration->range = (struct iovec){.iov_base = (void *)region->address, .iov_len = region->length_bytes};
    registration->attr.mr_iov = &registration->range;
    registration->attr.iov_count = 1;
    registration->attr.access = FI_WRITE | FI_REMOTE_WRITE;
    registration->attr.requested_key = terms->chooses_keys ? key : 0;
    registration->attr.iface = FI_HMEM_SYSTEM;
    if (pdd_on_device(region))
        describe_device_memory(region, terms, registration);
    return 0;
}
