/* Watches: layer counters that writes can be armed on. Runs on the progress thread while the caller waits. */
#include "pdd_place.h"

struct watch *pdd_find_watch(struct pdd_port *port, uint32_t handle)
{
    return find_place(port->watches, sizeof(struct watch), port->num_watches, handle);
}

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
