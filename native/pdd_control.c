/* The rare calls: memory, peers and watches. They run on the progress thread while the caller waits, so that libfabric
 * sees one thread only, and so that the caller's thread may look up handles without a lock. */
#include "pdd_address.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/random.h>
#include <unistd.h>

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
static int register_with_key(struct nic *nic, struct memory *memory, struct fid_mr **mr)
{
    enum { MAX_TRIES = 16 }; /* of 32 random bits, a second time is rare enough */
    struct pdd_registration registration;
    int rc, num_tries = 0;
    do {
        uint64_t key = 0;
        if (nic->terms.chooses_keys && getrandom(&key, sizeof key, 0) != sizeof key)
            return -EIO;
        if (nic->terms.key_bytes < sizeof key)
            key &= (1ull << 8 * nic->terms.key_bytes) - 1;
        rc = pdd_describe_region(&memory->region, &nic->terms, key, &registration);
        if (!rc)
            rc = fi_mr_regattr(nic->domain, &registration.attr, registration.flags, mr);
    } while (nic->terms.chooses_keys && rc == -FI_ENOKEY && ++num_tries < MAX_TRIES);
    return rc;
}

/* Only writes to this endpoint shall find the key. */
static int bind_memory(const struct nic *nic, struct fid_mr *mr, struct endpoint *endpoint)
{
    if (!nic->terms.binds_memory)
        return 0;
    int rc = fi_mr_bind(mr, &endpoint->ep->fid, 0);
    return rc ? rc : fi_mr_enable(mr);
}

/* Its key, and the endpoint where its one peer writes. */
static int register_at(struct pdd_port *port, struct memory *memory, uint32_t number, struct nic_address *out)
{
    struct nic *nic = &port->nics[number];
    size_t num_bytes = 0;
    int rc = register_with_key(nic, memory, &memory->at[number].mr);
    if (!rc)
        rc = pdd_endpoint_open(port, nic, NULL, &memory->at[number].endpoint);
    if (!rc)
        rc = bind_memory(nic, memory->at[number].mr, &memory->at[number].endpoint);
    if (!rc)
        rc = pdd_endpoint_name(&memory->at[number].endpoint, out->bytes, &num_bytes);
    if (rc)
        return rc;
    memory->at[number].descriptor = fi_mr_desc(memory->at[number].mr);
    out->num_bytes = (uint32_t)num_bytes;
    out->key = fi_mr_key(memory->at[number].mr);
    out->base = nic->terms.virtual_addresses ? memory->region.address : 0;
    return 0;
}

static int register_everywhere(struct pdd_port *port, struct memory *memory, struct target_address *out)
{
    memory->at = calloc(port->num_nics, sizeof *memory->at);
    if (!memory->at)
        return -ENOMEM;
    if (getrandom(memory->token, sizeof memory->token, 0) != sizeof memory->token)
        return -EIO;
    out->length_bytes = memory->region.length_bytes;
    out->num_nics = port->num_nics;
    if (port->copying) {
        out->copies = 1;
        memcpy(out->machine, port->copying->machine, sizeof out->machine);
        memcpy(out->name, port->copying->name, sizeof out->name);
        memcpy(out->token, memory->token, sizeof out->token);
    }
    int rc = 0;
    for (uint32_t i = 0; i < port->num_nics && !rc; i++)
        rc = register_at(port, memory, i, &out->nics[i]);
    return rc;
}

static int close_key(struct memory *memory, uint32_t number)
{
    int rc = memory->at[number].mr ? fi_close(&memory->at[number].mr->fid) : 0;
    memory->at[number].mr = NULL;
    return rc;
}

/* The endpoint goes first, and with it a message that is half here; but not before a key that is bound to it. */
static int close_at(struct pdd_port *port, struct memory *memory, uint32_t number)
{
    int rc = port->nics[number].terms.binds_memory ? close_key(memory, number) : 0;
    pdd_endpoint_close(&memory->at[number].endpoint);
    return rc ? rc : close_key(memory, number);
}

int pdd_free_memory(struct pdd_port *port, struct memory *memory)
{
    int rc = 0;
    for (uint32_t i = 0; memory->at && i < port->num_nics; i++) {
        int closed = close_at(port, memory, i);
        rc = rc ? rc : closed;
    }
    free(memory->at);
    memory->at = NULL;
    if (memory->place.taken && memory->fd >= 0)
        close(memory->fd);
    leave_place(&memory->place);
    return rc;
}

int pdd_do_register(struct pdd_port *port, struct call *call)
{
    struct memory *memory = take_place(port->memories, sizeof *memory, &port->num_memories, MAX_MEMORIES);
    struct target_address address = {0};
    if (!memory)
        return -ENOSPC;
    memory->region = (struct pdd_region){
        .address = call->address,
        .length_bytes = call->length_bytes,
        .iface = FI_HMEM_SYSTEM,
        .dmabuf_fd = -1,
    };
    memory->fd = call->fd < 0 ? -1 : fcntl(call->fd, F_DUPFD_CLOEXEC, 0);
    int rc = call->fd >= 0 && memory->fd < 0 ? -errno : register_everywhere(port, memory, &address);
    if (!rc)
        rc = pdd_write_address(&address, call->memory->address, sizeof call->memory->address);
    if (rc < 0) {
        pdd_free_memory(port, memory);
        return rc;
    }
    call->memory->address_bytes = (uint32_t)rc;
    call->memory->memory = memory->place.handle;
    return 0;
}

/* shm's endpoints stay until the port closes: see must_linger in pdd_path.c. */
static int close_keys_only(struct pdd_port *port, struct memory *memory)
{
    int rc = 0;
    for (uint32_t i = 0; i < port->num_nics; i++) {
        int closed = close_key(memory, i);
        rc = rc ? rc : closed;
        list_remove(&memory->at[i].endpoint.link);
    }
    return rc;
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
    pdd_close_readers_of(port, memory);
    pdd_forget_source(port, call->handle);
    memory->place.handle = 0;
    return port->nics[0].terms.lingers ? close_keys_only(port, memory) : pdd_free_memory(port, memory);
}

/* ---- peers ---- */
/* What comes over a network must not be taken for an address that is longer than it is. */
static bool is_address(const struct nic *nic, const struct nic_address *address)
{
    const uint8_t *bytes = address->bytes;
    switch (nic->info->addr_format) {
    case FI_SOCKADDR_IN:
        return address->num_bytes == sizeof(struct sockaddr_in) &&
               ((const struct sockaddr_in *)(const void *)bytes)->sin_family == AF_INET;
    case FI_SOCKADDR_IN6:
        return address->num_bytes == sizeof(struct sockaddr_in6) &&
               ((const struct sockaddr_in6 *)(const void *)bytes)->sin6_family == AF_INET6;
    case FI_ADDR_STR:
        return address->num_bytes > 1 && !bytes[address->num_bytes - 1] && !strncmp((const char *)bytes, "fi_", 3);
    default:
        return address->num_bytes == nic->address_bytes;
    }
}

/* As many as the side with more NICs has: where both have as many, number n goes to number n, as rails are wired. */
static int open_paths(struct pdd_port *port, struct peer *peer, const struct target_address *target)
{
    uint32_t number = port->num_nics > target->num_nics ? port->num_nics : target->num_nics;
    peer->paths = calloc(number, sizeof *peer->paths);
    if (!peer->paths)
        return -ENOMEM;
    for (uint32_t i = 0; i < number; i++) {
        const struct nic_address *remote = &target->nics[i % target->num_nics];
        struct path *path = &peer->paths[peer->num_paths];
        path->peer = peer;
        path->nic = &port->nics[i % port->num_nics];
        path->key = remote->key;
        path->base = remote->base;
        memcpy(path->remote, remote->bytes, sizeof path->remote);
        if (!is_address(path->nic, remote))
            return -EINVAL;
        peer->num_paths++;
        int rc = pdd_path_init(path);
        if (rc)
            return rc;
    }
    return 0;
}

void pdd_free_peer(struct pdd_port *port, struct peer *peer)
{
    bool lingers = false;
    if (peer->copier)
        pdd_copier_free(port, peer->copier);
    peer->copier = NULL;
    for (uint32_t i = 0; i < peer->num_paths; i++) {
        pdd_path_close(port, &peer->paths[i]);
        lingers |= peer->paths[i].messages != NULL;
    }
    if (lingers)
        return;
    free(peer->paths);
    peer->paths = NULL;
    peer->num_paths = 0;
    leave_place(&peer->place);
}

int pdd_do_add_peer(struct pdd_port *port, struct call *call)
{
    struct target_address target;
    if (!pdd_read_address(call->bytes, (uint32_t)call->length_bytes, &target))
        return -EINVAL;
    struct peer *peer = take_place(port->peers, sizeof *peer, &port->num_peers, MAX_PEERS);
    if (!peer)
        return -ENOSPC;
    list_init(&peer->ready);
    peer->length_bytes = target.length_bytes;
    int rc = open_paths(port, peer, &target);
    if (!rc && target.copies && port->copying && !memcmp(target.machine, port->copying->machine, MACHINE_BYTES)) {
        peer->copier = pdd_copier_new(port, peer, target.name, target.token);
        rc = peer->copier ? 0 : -ENOMEM;
    }
    if (rc) {
        pdd_free_peer(port, peer);
        return rc;
    }
    call->handle = peer->place.handle;
    return 0;
}

/* What did complete shall not be called cancelled. */
static void take_completions(struct pdd_port *port, struct peer *peer)
{
    for (uint32_t i = 0; i < peer->num_paths; i++)
        while (peer->paths[i].endpoint.ep && pdd_read_cq(port, &peer->paths[i].endpoint))
            ;
    pdd_reap_copies(port);
}

int pdd_do_drop_peer(struct pdd_port *port, struct call *call)
{
    struct peer *peer = pdd_find_peer(port, call->handle);
    if (!peer)
        return -ENOENT;
    take_completions(port, peer);
    peer->place.handle = 0;
    /* Nothing reads the sources from here on, so that their writes may end. */
    pdd_free_peer(port, peer);
    for (uint32_t slot = 0; slot < port->max_writes; slot++)
        if (port->live[slot] && port->live[slot]->peer == peer)
            pdd_abandon_write(port, port->live[slot], ECANCELED);
    return 0;
}

int pdd_do_get_peer(struct pdd_port *port, struct call *call)
{
    const struct peer *peer = pdd_find_peer(port, call->handle);
    if (!peer)
        return -ENOENT;
    *call->peer_info = (struct pdd_peer_info){
        .copies = peer->copier && !peer->copier->reconnect.pause_ns,
        .num_paths = peer->num_paths,
    };
    for (uint32_t i = 0; i < peer->num_paths; i++)
        call->peer_info->num_open += !peer->paths[i].reopen.pause_ns; /* not: failed since it last worked */
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
