/* The calls of pdd_fabric.h as the caller's thread sees them: check, reserve, hand over, and take events. */
#include "pdd_port.h"

#include <unistd.h>

/* ---- control calls ---- */
static int call_and_wait(struct pdd_port *port, struct call *call)
{
    struct command command = {.kind = COMMAND_CALL, .pointer = call};
    if (port->closed)
        return -ESHUTDOWN;
    sem_init(&call->done, 0, 0);
    if (!pdd_ring_push(&port->commands, &command))
        return -EAGAIN;
    pdd_wake(port);
    while (sem_wait(&call->done) && errno == EINTR)
        ;
    sem_destroy(&call->done);
    return call->result;
}

int pdd_register(pdd_port *port, const struct pdd_region *region, struct pdd_memory *memory)
{
    struct call call = {.function = pdd_do_register, .region = region, .memory = memory};
    uint64_t end;
    memset(memory, 0, sizeof *memory);
    if (!region->address || !region->length_bytes ||
        __builtin_add_overflow(region->address, region->length_bytes, &end))
        return -EINVAL;
    if (pdd_on_device(region) ? region->fd >= 0 : region->dmabuf_fd >= 0)
        return -EINVAL;
    return call_and_wait(port, &call);
}

int pdd_release(pdd_port *port, uint32_t memory)
{
    struct call call = {.function = pdd_do_release, .handle = memory};
    return call_and_wait(port, &call);
}

int pdd_add_peer(pdd_port *port, const uint8_t *address, uint32_t address_bytes, uint32_t *peer)
{
    struct call call = {.function = pdd_do_add_peer, .bytes = address, .length_bytes = address_bytes};
    int rc = call_and_wait(port, &call);
    *peer = rc ? 0 : call.handle;
    return rc;
}

int pdd_drop_peer(pdd_port *port, uint32_t peer)
{
    struct call call = {.function = pdd_do_drop_peer, .handle = peer};
    return call_and_wait(port, &call);
}

int pdd_get_peer(pdd_port *port, uint32_t peer, struct pdd_peer_info *info)
{
    struct call call = {.function = pdd_do_get_peer, .handle = peer, .peer_info = info};
    return call_and_wait(port, &call);
}

int pdd_watch(pdd_port *port, uint64_t counter_address, int32_t wake_fd, uint32_t *watch)
{
    struct call call = {.function = pdd_do_watch, .address = counter_address, .fd = wake_fd};
    if (!counter_address || counter_address % sizeof(uint64_t))
        return -EINVAL;
    int rc = call_and_wait(port, &call);
    *watch = rc ? 0 : call.handle;
    return rc;
}

int pdd_unwatch(pdd_port *port, uint32_t watch)
{
    struct call call = {.function = pdd_do_unwatch, .handle = watch};
    return call_and_wait(port, &call);
}

/* ---- writes ---- */
/* The end of the furthest piece: base + (num_layers - 1) * layer_bytes + page * page_bytes + offset + length. False: it
 * does not fit 64 bits. */
static bool furthest(uint64_t base, uint64_t layer_bytes, uint64_t num_layers, uint64_t page_bytes, uint64_t page,
                     uint64_t offset, uint64_t length, uint64_t *end)
{
    uint64_t layers, pages;
    return !__builtin_mul_overflow(layer_bytes, num_layers - 1, &layers) &&
           !__builtin_mul_overflow(page_bytes, page, &pages) && !__builtin_add_overflow(base, layers, end) &&
           !__builtin_add_overflow(*end, pages, end) && !__builtin_add_overflow(*end, offset, end) &&
           !__builtin_add_overflow(*end, length, end);
}

static uint32_t greatest(const uint32_t *pages, uint32_t number)
{
    uint32_t found = 0;
    for (uint32_t i = 0; i < number; i++)
        found = pages[i] > found ? pages[i] : found;
    return found;
}

/* Nothing outside the two registrations is read or written, and no address wraps round. */
static int check_write(struct pdd_port *port, const struct pdd_write *spec)
{
    const struct memory *memory = pdd_find_memory(port, spec->memory);
    const struct peer *peer = pdd_find_peer(port, spec->peer);
    uint64_t source_end, target_end, total, last_goal;
    if (!peer || !memory || (spec->watch && !pdd_find_watch(port, spec->watch)))
        return -ENOENT;
    if (!spec->num_layers || !spec->num_pages || !spec->num_pieces || spec->immediate & WEIGHT_MASK)
        return -EINVAL;
    if (spec->watch && __builtin_add_overflow(spec->counter_base, spec->num_layers, &last_goal))
        return -ERANGE;
    if (__builtin_mul_overflow((uint64_t)spec->num_layers * spec->num_pages, spec->num_pieces, &total) || total >> 24)
        return -E2BIG;
    uint32_t source_page = greatest(spec->source_pages, spec->num_pages);
    uint32_t target_page = greatest(spec->target_pages, spec->num_pages);
    for (uint32_t i = 0; i < spec->num_pieces; i++) {
        const struct pdd_piece *piece = &spec->pieces[i];
        if (!piece->length_bytes)
            return -EINVAL;
        if (piece->length_bytes > port->max_message_bytes)
            return -EMSGSIZE;
        if (!furthest(spec->target_base, spec->target_layer_bytes, spec->num_layers, spec->target_page_bytes,
                      target_page, piece->target_offset_bytes, piece->length_bytes, &target_end) ||
            !furthest(spec->source_base, spec->source_layer_bytes, spec->num_layers, spec->source_page_bytes,
                      source_page, piece->source_offset_bytes, piece->length_bytes, &source_end) ||
            spec->source_base < memory->region.address ||
            source_end > memory->region.address + memory->region.length_bytes ||
            target_end > peer->length_bytes)
            return -ERANGE;
    }
    return 0;
}

/* A write and its arrays in one block. */
static struct write *copy_write(const struct pdd_write *spec)
{
    size_t pieces_bytes = spec->num_pieces * sizeof *spec->pieces;
    size_t pages_bytes = spec->num_pages * sizeof *spec->source_pages;
    struct write *write = malloc(sizeof *write + pieces_bytes + 2 * pages_bytes);
    if (!write)
        return NULL;
    memset(write, 0, sizeof *write);
    uint8_t *pieces = (uint8_t *)(write + 1);
    uint8_t *source_pages = pieces + pieces_bytes, *target_pages = source_pages + pages_bytes;
    write->spec = *spec;
    write->spec.pieces = memcpy(pieces, spec->pieces, pieces_bytes);
    write->spec.source_pages = memcpy(source_pages, spec->source_pages, pages_bytes);
    write->spec.target_pages = memcpy(target_pages, spec->target_pages, pages_bytes);
    return write;
}

int pdd_submit(pdd_port *port, const struct pdd_write *spec)
{
    if (port->closed)
        return -ESHUTDOWN;
    int rc = check_write(port, spec);
    if (rc)
        return rc;
    if (!port->num_free_slots)
        return -EAGAIN;
    struct write *write = copy_write(spec);
    if (!write)
        return -ENOMEM;
    write->slot = port->free_slots[--port->num_free_slots];
    port->slot_writes[write->slot] = write;
    port->slot_cancelled[write->slot] = false;
    struct command command = {.kind = COMMAND_WRITE, .pointer = write};
    pdd_ring_push(&port->commands, &command); /* cannot be full: see allocate() */
    pdd_wake(port);
    return 0;
}

int pdd_cancel(pdd_port *port, uint64_t token)
{
    for (uint32_t slot = 0; slot < port->max_writes; slot++) {
        if (!port->slot_writes[slot] || port->slot_writes[slot]->spec.token != token || port->slot_cancelled[slot])
            continue;
        struct command command = {.kind = COMMAND_CANCEL, .number = slot};
        port->slot_cancelled[slot] = true;
        if (!port->closed && pdd_ring_push(&port->commands, &command))
            pdd_wake(port);
        return 0;
    }
    return -ENOENT;
}

/* ---- events ---- */
int pdd_event_fd(const pdd_port *port) { return port->event_fd; }

static void take_back(struct pdd_port *port, const struct pdd_event *event)
{
    if (event->kind == PDD_WRITE_DONE) {
        free(port->slot_writes[event->slot]);
        port->slot_writes[event->slot] = NULL;
        port->free_slots[port->num_free_slots++] = event->slot;
    } else if (event->kind == PDD_COUNT_REACHED) {
        port->counts_reserved--;
    } else if (event->kind == PDD_STRAY) {
        atomic_fetch_sub(&port->strays_waiting, 1);
    }
}

int pdd_drain(pdd_port *port, struct pdd_event *events, uint32_t max_events)
{
    uint64_t ignored;
    uint32_t number = 0;
    /* First the flag, then the ring: an event pushed in between signals once too often, never too seldom. */
    if (atomic_load(&port->signalled) && read(port->event_fd, &ignored, sizeof ignored) > 0)
        atomic_store(&port->signalled, false);
    while (number < max_events && pdd_ring_pop(&port->events, &events[number]))
        take_back(port, &events[number++]);
    if (!pdd_ring_empty(&port->events))
        pdd_signal_events(port);
    return (int)number;
}

#define COPY_STAT(name) stats->name = atomic_load_explicit(&port->stats.name, memory_order_relaxed)
void pdd_get_stats(const pdd_port *port, struct pdd_stats *stats)
{
    COPY_STAT(num_messages);
    COPY_STAT(num_pieces);
    COPY_STAT(num_bytes);
    COPY_STAT(num_arrived);
    COPY_STAT(num_strays);
    COPY_STAT(num_strays_unnamed);
    COPY_STAT(num_errors);
    COPY_STAT(num_busy);
    COPY_STAT(num_wakeups);
    COPY_STAT(num_copied_bytes);
    COPY_STAT(num_failed_paths);
    COPY_STAT(num_failed_copiers);
    COPY_STAT(num_unknown);
}

int pdd_get_nic_stats(const pdd_port *port, uint32_t nic, struct pdd_nic_stats *stats)
{
    if (nic >= port->num_nics)
        return -ENOENT;
    const struct nic *counted = &port->nics[nic];
    stats->num_bytes = atomic_load_explicit(&counted->num_bytes, memory_order_relaxed);
    stats->num_arrived = atomic_load_explicit(&counted->num_arrived, memory_order_relaxed);
    stats->num_failed_paths = atomic_load_explicit(&counted->num_failed_paths, memory_order_relaxed);
    return 0;
}
