/* Memory: keys and endpoints of registrations. Runs on the progress thread while the caller waits. */
#include "pdd_address.h"
#include "pdd_place.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/random.h>
#include <unistd.h>

struct memory *pdd_find_memory(struct pdd_port *port, uint32_t handle)
{
    return find_place(port->memories, sizeof(struct memory), port->num_memories, handle);
}

/* Keys that we may choose are random: who was not given one does not guess it. */
static int register_with_key(struct nic *nic, const struct pdd_region *region, struct fid_mr **mr)
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
        rc = pdd_describe_region(region, &nic->terms, key, &registration);
        if (!rc)
            rc = fi_mr_regattr(nic->domain, &registration.attr, registration.flags, mr);
    } while (nic->terms.chooses_keys && rc == -FI_ENOKEY && ++num_tries < MAX_TRIES);
    return rc;
}

/* A kernel or a driver without dma-buf may still know the address, by a module of the device's maker. */
static int register_region(struct nic *nic, const struct pdd_region *region, struct fid_mr **mr)
{
    struct pdd_region by_address = *region;
    by_address.dmabuf_fd = -1;
    int rc = register_with_key(nic, region, mr);
    return rc && region->dmabuf_fd >= 0 && nic->terms.dmabuf ? register_with_key(nic, &by_address, mr) : rc;
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
    int rc = register_region(nic, &memory->region, &memory->at[number].mr);
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
    if (port->copying && !pdd_on_device(&memory->region)) {
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
    int key = port->nics[number].terms.binds_memory ? close_key(memory, number) : 0;
    int endpoint = pdd_endpoint_close(&memory->at[number].endpoint);
    int rest = close_key(memory, number);
    return key ? key : endpoint ? endpoint : rest;
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
    if (memory->place.taken && memory->region.fd >= 0)
        close(memory->region.fd);
    leave_place(&memory->place);
    return rc;
}

/* What peers of this machine are given can only be read. -1: this system does not let us, and they are given none. */
static int open_for_readers(int fd)
{
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return open(path, O_RDONLY | O_CLOEXEC);
}

int pdd_do_register(struct pdd_port *port, struct call *call)
{
    struct memory *memory = take_place(port->memories, sizeof *memory, &port->num_memories, MAX_MEMORIES);
    struct target_address address = {0};
    if (!memory)
        return -ENOSPC;
    memory->region = *call->region;
    memory->region.fd = port->copying && call->region->fd >= 0 ? open_for_readers(call->region->fd) : -1;
    int rc = register_everywhere(port, memory, &address);
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
    int rc = port->nics[0].terms.lingers ? close_keys_only(port, memory) : pdd_free_memory(port, memory);
    if (rc) /* its peer may still write to it: nothing but the end of the port is sure to stop that */
        port->breaking = error_number(-rc);
    return rc;
}
