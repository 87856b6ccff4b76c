/* Counting arrivals: what tells a decoder that all of a handoff has been placed. See struct count. */
#include "pdd_port.h"

#include <sched.h>

#define ARMED (1ull << 63)
#define REACHED (1ull << 62)
#define FIELD_MASK 0xffffffull

static uint64_t make_word(uint32_t immediate, uint64_t goal)
{
    return ARMED | (uint64_t)(immediate >> GENERATION_SHIFT & GENERATION_MASK) << 48 | goal << 24;
}

static bool names(uint64_t word, uint32_t immediate)
{
    return word & ARMED && (word >> 48 & GENERATION_MASK) == (immediate >> GENERATION_SHIFT & GENERATION_MASK);
}

static uint64_t goal_of(uint64_t word) { return word >> 24 & FIELD_MASK; }

static uint64_t pieces_of(uint64_t word) { return word & FIELD_MASK; }

static uint64_t with_reached(uint64_t word) { return pieces_of(word) >= goal_of(word) ? word | REACHED : word; }

static struct count *count_for(const struct pdd_port *port, uint32_t immediate)
{
    return (struct count *)&port->counts[immediate >> SLOT_SHIFT];
}

/* ---- caller's thread ---- */
/* The goal was reached when it was set: the progress thread tells so, since only it writes events. */
static void reached_by_caller(struct pdd_port *port, uint32_t immediate)
{
    struct command command = {.kind = COMMAND_REACHED, .number = immediate};
    atomic_fetch_sub(&port->num_armed, 1);
    pdd_ring_push(&port->commands, &command);
    pdd_wake(port);
}

int pdd_expect(pdd_port *port, uint32_t immediate, uint32_t num_pieces)
{
    struct count *count = count_for(port, immediate);
    uint64_t word = atomic_load(&count->word);
    if (port->closed)
        return -ESHUTDOWN;
    if (immediate & WEIGHT_MASK || num_pieces > FIELD_MASK)
        return -EINVAL;
    if (word & ARMED && !(word & REACHED))
        return -EEXIST;
    if (port->counts_reserved == MAX_COUNTS)
        return -EAGAIN;
    port->counts_reserved++;
    atomic_fetch_add(&port->num_armed, 1);
    word = with_reached(make_word(immediate, num_pieces));
    atomic_store(&count->word, word);
    if (word & REACHED)
        reached_by_caller(port, immediate);
    else if (!port->wakes)
        pdd_wake(port); /* it polls faster while something is expected */
    return 0;
}

int pdd_change_expected(pdd_port *port, uint32_t immediate, uint32_t num_pieces)
{
    struct count *count = count_for(port, immediate);
    uint64_t word = atomic_load(&count->word), changed;
    if (immediate & WEIGHT_MASK || num_pieces > FIELD_MASK)
        return -EINVAL;
    do {
        if (!names(word, immediate))
            return -ENOENT;
        if (word & REACHED)
            return 0;
        changed = with_reached(make_word(immediate, num_pieces) | pieces_of(word));
    } while (!atomic_compare_exchange_weak(&count->word, &word, changed));
    if (changed & REACHED)
        reached_by_caller(port, immediate);
    return 0;
}

int64_t pdd_arrived(const pdd_port *port, uint32_t immediate)
{
    uint64_t word = atomic_load(&count_for(port, immediate)->word);
    return names(word, immediate) ? (int64_t)pieces_of(word) : 0;
}

int64_t pdd_unexpect(pdd_port *port, uint32_t immediate)
{
    struct count *count = count_for(port, immediate);
    uint64_t word = atomic_load(&count->word);
    do {
        if (!names(word, immediate))
            return 0;
    } while (!atomic_compare_exchange_weak(&count->word, &word, 0));
    if (!(word & REACHED)) { /* else the event exists, and gives the reservation back when it is drained */
        atomic_fetch_sub(&port->num_armed, 1);
        port->counts_reserved--;
    }
    return (int64_t)pieces_of(word);
}

/* ---- progress thread ---- */
static void add_stray(struct pdd_port *port, uint32_t immediate, uint32_t weight)
{
    uint32_t i = 0;
    add_stat(&port->stats.num_strays, weight);
    while (i < port->num_strays && port->strays[i].immediate != immediate)
        i++;
    if (i == MAX_STRAYS) {
        add_stat(&port->stats.num_strays_unnamed, weight);
        return;
    }
    if (i == port->num_strays) {
        port->strays[i].immediate = immediate;
        port->strays[i].num_pieces = 0;
        port->num_strays++;
    }
    port->strays[i].num_pieces += weight;
}

void pdd_push_strays(struct pdd_port *port)
{
    while (port->num_strays && atomic_load(&port->strays_waiting) < MAX_STRAYS) {
        port->num_strays--;
        struct pdd_event event = {
            .kind = PDD_STRAY,
            .immediate = port->strays[port->num_strays].immediate,
            .num_pieces = port->strays[port->num_strays].num_pieces,
        };
        atomic_fetch_add(&port->strays_waiting, 1);
        pdd_push_event(port, &event);
    }
}

void pdd_push_reached(struct pdd_port *port, uint32_t immediate)
{
    struct count *count = count_for(port, immediate);
    struct pdd_event event = {
        .kind = PDD_COUNT_REACHED,
        .immediate = immediate,
        .first_ns = count->first_ns,
        .last_ns = count->last_ns,
    };
    pdd_push_event(port, &event);
    sched_yield(); /* somebody waits for just this, and is often woken on our own core */
}

void pdd_count_arrival(struct pdd_port *port, uint32_t data)
{
    uint32_t weight = (data & WEIGHT_MASK) + 1, immediate = data & ~(uint32_t)WEIGHT_MASK;
    struct count *count = count_for(port, immediate);
    uint64_t word = atomic_load(&count->word), counted;
    add_stat(&port->stats.num_arrived, weight);
    do {
        if (!names(word, immediate) || word & REACHED || pieces_of(word) + weight > FIELD_MASK) {
            add_stray(port, immediate, weight);
            return;
        }
        counted = with_reached(word + weight);
    } while (!atomic_compare_exchange_weak(&count->word, &word, counted));
    if (!pieces_of(word))
        count->first_ns = count->last_ns = monotonic_ns();
    if (counted & REACHED) {
        if (pieces_of(word))
            count->last_ns = monotonic_ns();
        atomic_fetch_sub(&port->num_armed, 1);
        pdd_push_reached(port, immediate);
    }
}
