/* The rare calls: memory, peers and watches. They run on the progress thread while the caller waits, so that libfabric
 * sees one thread only, and so that the caller's thread may look up handles without a lock. */
#include "pdd_port.h"

#include <netinet/in.h>
#include <sys/random.h>

/* ---- places and handles ---- */
static struct place *place_at(void *table, size_t entry_bytes, uint32_t index)
{
    return (struct place *)((uint8_t *)table + entry_bytes * index);
}

/* Takes a free place; NULL when the table is full. `mark` is how many places were ever used. */
static void *take_place(void *table, size_t entry_bytes, uint32_t *mark, uint32_t limit)
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

static void *find_place(void *table, size_t entry_bytes, uint32_t mark, uint32_t handle)
{
    uint32_t index = (handle & 0xffff) - 1;
    if (index >= mark || place_at(table, entry_bytes, index)->handle != handle)
        return NULL;
    return place_at(table, entry_bytes, index);
}

static void leave_place(struct place *place)
{
    place->handle = 0;
    place->taken = false;
}

/* shm works only inside our own calls: an endpoint that is never called again places and sends nothing. And closing one
 * is not safe: a peer in the same process uses its queues without a mapping of its own. So only its handle goes; the
 * port's close takes the endpoint, unless messages of it are still out there: then the process's end does. */
static bool must_linger(const struct pdd_port *port) { return port->terms.lingers; }

static bool has_messages_out(const struct pdd_port *port, const struct peer *peer)
{
    return peer->endpoint.ep && peer->num_free < port->max_in_flight;
}

struct peer *pdd_find_peer(struct pdd_port *port, uint32_t handle)
{
    return find_place(port->peers, sizeof(struct peer), port->num_peers, handle);
}

struct memory *pdd_find_memory(struct pdd_port *port, uint32_t handle)
{
    return find_place(port->memories, sizeof(struct memory), port->num_memories, handle);
}

struct watch *pdd_find_watch(struct pdd_port *port, uint32_t handle)
{
    return find_place(port->watches, sizeof(struct watch), port->num_watches, handle);
}

/* ---- memory ---- */
/* Keys that we may choose are random: who was not given one does not guess it. */
static int register_with_key(struct pdd_port *port, struct memory *memory)
{
    const struct pdd_terms *terms = &port->terms;
    struct pdd_registration registration;
    int rc;
    do {
        uint64_t key = 0;
        if (terms->chooses_keys && getrandom(&key, sizeof key, 0) != sizeof key)
            return -EIO;
        if (terms->key_bytes < sizeof key)
            key &= (1ull << 8 * terms->key_bytes) - 1;
        rc = pdd_describe_region(&memory->region, terms, key, &registration);
        if (!rc)
            rc = fi_mr_regattr(port->domain, &registration.attr, registration.flags, &memory->mr);
    } while (terms->chooses_keys && rc == -FI_ENOKEY);
    return rc;
}

/* Only writes to this endpoint shall find the key. */
static int bind_memory(const struct pdd_port *port, struct memory *memory)
{
    if (!port->terms.binds_memory)
        return 0;
    int rc = fi_mr_bind(memory->mr, &memory->endpoint.ep->fid, 0);
    return rc ? rc : fi_mr_enable(memory->mr);
}

static int close_key(struct memory *memory)
{
    int rc = memory->mr ? fi_close(&memory->mr->fid) : 0;
    memory->mr = NULL;
    return rc;
}

/* The endpoint goes first, and with it a message that is half here; but not before a key that is bound to it. */
int pdd_free_memory(struct pdd_port *port, struct memory *memory)
{
    int rc = port->terms.binds_memory ? close_key(memory) : 0;
    pdd_endpoint_close(&memory->endpoint);
    leave_place(&memory->place);
    return rc ? rc : close_key(memory);
}

int pdd_do_register(struct pdd_port *port, struct call *call)
{
    struct memory *memory = take_place(port->memories, sizeof *memory, &port->num_memories, MAX_MEMORIES);
    struct pdd_memory *out = call->memory;
    size_t address_bytes = 0;
    if (!memory)
        return -ENOSPC;
    memory->region = (struct pdd_region){
        .address = call->address,
        .length_bytes = call->length_bytes,
        .iface = FI_HMEM_SYSTEM,
        .dmabuf_fd = -1,
    };
    int rc = register_with_key(port, memory);
    if (!rc)
        rc = pdd_endpoint_open(port, &memory->endpoint);
    if (!rc)
        rc = bind_memory(port, memory);
    if (!rc)
        rc = pdd_endpoint_name(&memory->endpoint, out->address, &address_bytes);
    if (rc) {
        pdd_free_memory(port, memory);
        return rc;
    }
    memory->descriptor = fi_mr_desc(memory->mr);
    out->memory = memory->place.handle;
    out->address_bytes = (uint32_t)address_bytes;
    out->key = fi_mr_key(memory->mr);
    out->base = port->terms.virtual_addresses ? memory->region.address : 0;
    return 0;
}

/* Writes that read from this memory end. */
int pdd_do_release(struct pdd_port *port, struct call *call)
{
    struct memory *memory = pdd_find_memory(port, call->handle);
    if (!memory)
        return -ENOENT;
    for (uint32_t slot = 0; slot < port->max_writes; slot++)
        if (port->live[slot] && port->live[slot]->spec.memory == call->handle)
            pdd_cancel_write(port, port->live[slot]);
    memory->place.handle = 0;
    return must_linger(port) ? close_key(memory) : pdd_free_memory(port, memory);
}

/* ---- peers ---- */
/* What comes over a network must not be taken for an address that is longer than it is. */
static bool is_address(const struct pdd_port *port, const uint8_t *address, uint32_t bytes)
{
    if (bytes > MAX_ADDRESS_BYTES)
        return false;
    switch (port->fabric_info->addr_format) {
    case FI_SOCKADDR_IN:
        return bytes == sizeof(struct sockaddr_in) && ((const struct sockaddr_in *)address)->sin_family == AF_INET;
    case FI_SOCKADDR_IN6:
        return bytes == sizeof(struct sockaddr_in6) && ((const struct sockaddr_in6 *)address)->sin6_family == AF_INET6;
    case FI_ADDR_STR:
        return bytes > 1 && !address[bytes - 1] && !strncmp((const char *)address, "fi_", 3);
    default:
        return bytes == port->address_bytes;
    }
}

static int allocate_messages(struct peer *peer, uint32_t number)
{
    peer->messages = calloc(number, sizeof *peer->messages);
    peer->free_messages = calloc(number, sizeof *peer->free_messages);
    if (!peer->messages || !peer->free_messages)
        return -ENOMEM;
    for (peer->num_free = 0; peer->num_free < number; peer->num_free++) {
        peer->messages[peer->num_free].peer = peer;
        peer->free_messages[peer->num_free] = peer->num_free;
    }
    return 0;
}

/* The endpoint first: it knows the messages. */
void pdd_free_peer(struct pdd_port *port, struct peer *peer)
{
    if (must_linger(port) && has_messages_out(port, peer))
        return;
    pdd_endpoint_close(&peer->endpoint);
    free(peer->messages);
    free(peer->free_messages);
    peer->messages = NULL;
    peer->free_messages = NULL;
    leave_place(&peer->place);
}

int pdd_do_add_peer(struct pdd_port *port, struct call *call)
{
    _Alignas(16) uint8_t address[MAX_ADDRESS_BYTES];
    if (call->length_bytes > sizeof address)
        return -EINVAL;
    memcpy(address, call->bytes, call->length_bytes);
    if (!is_address(port, address, (uint32_t)call->length_bytes))
        return -EINVAL;
    struct peer *peer = take_place(port->peers, sizeof *peer, &port->num_peers, MAX_PEERS);
    if (!peer)
        return -ENOSPC;
    list_init(&peer->ready);
    int rc = allocate_messages(peer, port->max_in_flight);
    if (!rc)
        rc = pdd_endpoint_open(port, &peer->endpoint);
    if (!rc && fi_av_insert(peer->endpoint.av, address, 1, &peer->address, 0, NULL) != 1)
        rc = -EINVAL;
    if (rc) {
        pdd_free_peer(port, peer);
        return rc;
    }
    call->handle = peer->place.handle;
    return 0;
}

int pdd_do_drop_peer(struct pdd_port *port, struct call *call)
{
    struct peer *peer = pdd_find_peer(port, call->handle);
    if (!peer)
        return -ENOENT;
    while (pdd_read_cq(port, &peer->endpoint)) /* what did complete shall not be called cancelled */
        ;
    port->in_flight -= port->max_in_flight - peer->num_free;
    peer->place.handle = 0;
    if (!must_linger(port) || !has_messages_out(port, peer))
        pdd_endpoint_close(&peer->endpoint); /* nothing reads the sources from here on */
    for (uint32_t slot = 0; slot < port->max_writes; slot++)
        if (port->live[slot] && port->live[slot]->peer == peer)
            pdd_abandon_write(port, port->live[slot], ECANCELED);
    pdd_free_peer(port, peer);
    return 0;
}

/* ---- watches ---- */
int pdd_do_watch(struct pdd_port *port, struct call *call)
{
    struct watch *watch = take_place(port->watches, sizeof *watch, &port->num_watches, MAX_WATCHES);
    if (!watch)
        return -ENOSPC;
    watch->counter = (const _Atomic uint64_t *)call->address;
    watch->wake_fd = call->fd;
    list_init(&watch->armed);
    call->handle = watch->place.handle;
    return 0;
}

int pdd_do_unwatch(struct pdd_port *port, struct call *call)
{
    struct watch *watch = pdd_find_watch(port, call->handle);
    if (!watch)
        return -ENOENT;
    /* Also those that are not armed at this moment: their later layers would be. */
    for (uint32_t slot = 0; slot < port->max_writes; slot++)
        if (port->live[slot] && port->live[slot]->watch == watch)
            pdd_cancel_write(port, port->live[slot]);
    leave_place(&watch->place);
    return 0;
}
