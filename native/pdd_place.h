/* Tables of what callers name by handles. An old handle never names the next owner of its place. */
#ifndef PDD_PLACE_H
#define PDD_PLACE_H

#include "pdd_port.h"

static inline struct place *place_at(void *table, size_t entry_bytes, uint32_t index)
{
    return (struct place *)((uint8_t *)table + entry_bytes * index);
}

/* Takes a free place; NULL when the table is full. `mark` is how many places were ever used. */
static inline void *take_place(void *table, size_t entry_bytes, uint32_t *mark, uint32_t limit)
{
    uint32_t index = 0;
    while (index < *mark && place_at(table, entry_bytes, index)->taken)
        index++;
    if (index == limit)
        return NULL;
    if (index == *mark)
        ++*mark;
    struct place *place = place_at(table, entry_bytes, index);
    uint32_t uses = place->uses + 1;
    memset(place, 0, entry_bytes);
    place->uses = uses;
    place->taken = true;
    place->handle = (uses & 0x7fff) << 16 | (index + 1);
    return place;
}

static inline void *find_place(void *table, size_t entry_bytes, uint32_t mark, uint32_t handle)
{
    uint32_t index = (handle & 0xffff) - 1;
    if (index >= mark || place_at(table, entry_bytes, index)->handle != handle)
        return NULL;
    return place_at(table, entry_bytes, index);
}

static inline void leave_place(struct place *place)
{
    place->handle = 0;
    place->taken = false;
}

#endif
