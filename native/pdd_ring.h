/* A ring for one writer and one reader. Neither ever waits: a full ring refuses, an empty one gives nothing.
 *
 * Head and tail only grow; the slot is their low bits. Each side keeps a stale copy of the other's index on its own
 * cache line and looks at the real one only when the copy says full or empty.
 */
#ifndef PDD_RING_H
#define PDD_RING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PDD_CACHE_LINE 64

struct pdd_ring {
    uint8_t *slots;
    uint32_t slot_bytes;
    uint32_t mask;
    _Alignas(PDD_CACHE_LINE) _Atomic uint32_t tail; /* next to write */
    uint32_t seen_head;
    _Alignas(PDD_CACHE_LINE) _Atomic uint32_t head; /* next to read */
    uint32_t seen_tail;
};

/* Room for at least `num_slots`. False: no memory. */
static inline bool pdd_ring_init(struct pdd_ring *ring, uint32_t num_slots, uint32_t slot_bytes)
{
    uint32_t capacity = 1;
    while (capacity < num_slots)
        capacity <<= 1;
    memset(ring, 0, sizeof *ring);
    ring->slots = calloc(capacity, slot_bytes);
    ring->slot_bytes = slot_bytes;
    ring->mask = capacity - 1;
    return ring->slots != NULL;
}

static inline bool pdd_ring_push(struct pdd_ring *ring, const void *slot)
{
    uint32_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    if (tail - ring->seen_head > ring->mask) {
        ring->seen_head = atomic_load_explicit(&ring->head, memory_order_acquire);
        if (tail - ring->seen_head > ring->mask)
            return false;
    }
    memcpy(ring->slots + (size_t)(tail & ring->mask) * ring->slot_bytes, slot, ring->slot_bytes);
    /* Sequentially consistent, not just release: the writer next looks whether the reader sleeps. */
    atomic_store(&ring->tail, tail + 1);
    return true;
}

static inline bool pdd_ring_pop(struct pdd_ring *ring, void *slot)
{
    uint32_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    if (head == ring->seen_tail) {
        ring->seen_tail = atomic_load(&ring->tail);
        if (head == ring->seen_tail)
            return false;
    }
    memcpy(slot, ring->slots + (size_t)(head & ring->mask) * ring->slot_bytes, ring->slot_bytes);
    atomic_store_explicit(&ring->head, head + 1, memory_order_release);
    return true;
}

/* For the reader. */
static inline bool pdd_ring_empty(const struct pdd_ring *ring)
{
    return atomic_load_explicit(&ring->head, memory_order_relaxed) == atomic_load(&ring->tail);
}

#endif
