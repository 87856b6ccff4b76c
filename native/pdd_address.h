/* What a port tells of a registration, so that one peer can write there. */
#ifndef PDD_ADDRESS_H
#define PDD_ADDRESS_H

#include "pdd_copy.h"

struct nic_address {
    uint64_t key, base;
    uint32_t num_bytes;
    uint8_t bytes[MAX_ADDRESS_BYTES];
};

struct target_address {
    uint64_t length_bytes;
    uint32_t num_nics;
    struct nic_address nics[MAX_NICS];
    uint32_t copies; /* 1: the rest has a meaning */
    char machine[MACHINE_BYTES];
    uint8_t name[COPY_NAME_BYTES], token[16];
};

/* Returns its length; -ENOSPC. */
int pdd_write_address(const struct target_address *target, uint8_t *bytes, uint32_t max_bytes);
/* False: it is none, as far as one can see without knowing the provider. */
bool pdd_read_address(const uint8_t *bytes, uint32_t num_bytes, struct target_address *target);

#endif
