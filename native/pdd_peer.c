/* Peers: registrations of other ports, and the ways there. Runs on the progress thread while the caller waits. */
#include "pdd_address.h"
#include "pdd_place.h"

#include <netinet/in.h>

struct peer *pdd_find_peer(struct pdd_port *port, uint32_t handle)
{
    return find_place(port->peers, sizeof(struct peer), port->num_peers, handle);
}

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
    pdd_free_copiers(port, peer);
    peer->copies = false;
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
        peer->copies = true;
        memcpy(peer->copy_name, target.name, sizeof peer->copy_name);
        memcpy(peer->copy_token, target.token, sizeof peer->copy_token);
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
        .copies = pdd_is_copied_to(port, peer),
        .num_paths = peer->num_paths,
    };
    for (uint32_t i = 0; i < peer->num_paths; i++)
        call->peer_info->num_open += !peer->paths[i].reopen.pause_ns; /* not: failed since it last worked */
    return 0;
}
