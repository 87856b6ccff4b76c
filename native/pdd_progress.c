/* The progress thread: takes commands, posts, counts and, when nothing moves, sleeps in poll. */
#include "pdd_port.h"

#include <sched.h>
#include <unistd.h>

static const uint64_t FOREVER_NS = ~0ull;
static const uint64_t POLLED_WATCH_NS = 100 * 1000;
static const uint64_t MS = 1000000;

/* ---- telling the other side ---- */
static void signal_fd(int fd)
{
    uint64_t one = 1;
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

/* Called after a push to `commands`: the thread sees the push, or we see that it sleeps. */
void pdd_wake(struct pdd_port *port)
{
    if (atomic_exchange(&port->sleeping, false))
        signal_fd(port->wake_fd);
}

void pdd_signal_events(struct pdd_port *port)
{
    if (!atomic_exchange(&port->signalled, true))
        signal_fd(port->event_fd);
}

void pdd_push_event(struct pdd_port *port, const struct pdd_event *event)
{
    pdd_ring_push(&port->events, event); /* cannot be full: the slot was reserved */
    pdd_signal_events(port);
}

/* ---- completions ---- */
static void end_all(struct pdd_port *port, int error)
{
    for (uint32_t slot = 0; slot < port->max_writes; slot++)
        if (port->live[slot])
            pdd_abandon_write(port, port->live[slot], error);
}

static void fail_port(struct pdd_port *port, int error)
{
    struct pdd_event event = {.kind = PDD_PORT_FAILED, .error = error};
    port->failed = error;
    end_all(port, error);
    pdd_push_event(port, &event);
}

static unsigned read_error(struct pdd_port *port, struct endpoint *endpoint)
{
    struct fi_cq_err_entry entry = {0};
    if (fi_cq_readerr(endpoint->cq, &entry, 0) != 1)
        return 0;
    add_stat(&port->stats.num_errors, 1);
    /* Without a context it is the target's side of someone's broken write: his error, not ours. */
    if (entry.op_context)
        pdd_message_done(port, entry.op_context, error_number(entry.err));
    return 1;
}

unsigned pdd_read_cq(struct pdd_port *port, struct endpoint *endpoint)
{
    struct fi_cq_data_entry entries[64];
    if (port->failed)
        return 0;
    ssize_t num_read = fi_cq_read(endpoint->cq, entries, 64);
    if (num_read == -FI_EAVAIL)
        return read_error(port, endpoint);
    if (num_read == -FI_EAGAIN || !num_read)
        return 0;
    if (num_read < 0) {
        fail_port(port, error_number((int)-num_read));
        return 0;
    }
    port->now_ns = monotonic_ns();
    for (ssize_t i = 0; i < num_read; i++) {
        if (entries[i].flags & (FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA))
            pdd_count_arrival(port, (uint32_t)entries[i].data);
        else if (entries[i].op_context)
            pdd_message_done(port, entries[i].op_context, 0);
    }
    return (unsigned)num_read;
}

/* Endpoints on which something may happen: all where peers write to us, and those of ours that have something to send.
 * Returns the first from `*place` on and moves that on; NULL: no more. */
static struct endpoint *next_active(struct pdd_port *port, uint32_t *place)
{
    for (; *place <= port->num_memories + port->num_peers; ++*place) {
        uint32_t i = *place;
        struct endpoint *found = NULL;
        if (i < port->num_memories) {
            found = port->memories[i].place.handle ? &port->memories[i].endpoint : NULL;
        } else if (i < port->num_memories + port->num_peers) {
            struct peer *peer = &port->peers[i - port->num_memories];
            bool busy = peer->place.handle && (peer->num_free < port->max_in_flight || !list_empty(&peer->ready));
            found = busy ? &peer->endpoint : NULL;
        } else {
            found = &port->endpoint;
        }
        if (found) {
            ++*place;
            return found;
        }
    }
    return NULL;
}

static unsigned read_completions(struct pdd_port *port)
{
    unsigned num_read = 0;
    uint32_t place = 0;
    for (struct endpoint *endpoint; (endpoint = next_active(port, &place));)
        num_read += pdd_read_cq(port, endpoint);
    return num_read;
}

/* ---- commands ---- */
static unsigned take_commands(struct pdd_port *port)
{
    struct command command;
    unsigned num_taken = 0;
    while (pdd_ring_pop(&port->commands, &command)) {
        num_taken++;
        switch (command.kind) {
        case COMMAND_WRITE:
            pdd_take_write(port, command.pointer);
            break;
        case COMMAND_CANCEL:
            if (port->live[command.number])
                pdd_cancel_write(port, port->live[command.number]);
            break;
        case COMMAND_REACHED:
            pdd_push_reached(port, command.number);
            break;
        case COMMAND_CALL: {
            struct call *call = command.pointer;
            call->result = call->function(port, call);
            sem_post(&call->done);
            break;
        }
        case COMMAND_STOP:
            port->stopping = true;
            break;
        }
    }
    return num_taken;
}

/* ---- waiting ---- */
/* How long until something must be tried without anyone waking us; 0: now, after a yield. */
static uint64_t patience(const struct pdd_port *port)
{
    uint64_t quiet_ns = port->now_ns - port->active_ns, wait_ns = FOREVER_NS;
    if (quiet_ns < port->spin_ns)
        return 0;
    for (uint32_t i = 0; i < port->num_peers; i++) {
        const struct peer *peer = &port->peers[i];
        if (!peer->place.handle || list_empty(&peer->ready) || !peer->stalled_since_ns)
            continue;
        uint64_t retry_ns = peer->retry_ns > port->now_ns ? peer->retry_ns - port->now_ns : 0;
        wait_ns = retry_ns < wait_ns ? retry_ns : wait_ns;
    }
    for (uint32_t i = 0; i < port->num_watches; i++) {
        const struct watch *watch = &port->watches[i];
        if (watch->place.handle && watch->wake_fd < 0 && !list_empty(&watch->armed) && wait_ns > POLLED_WATCH_NS)
            wait_ns = POLLED_WATCH_NS;
    }
    if (port->num_strays && wait_ns > 100 * MS)
        wait_ns = 100 * MS;
    if (port->endpoint.fd < 0) { /* nobody wakes us for a completion: look less often the longer it was quiet */
        bool hot = port->in_flight || atomic_load(&port->num_armed);
        uint64_t longest_ns = hot ? MS : 5 * MS, shortest_ns = hot ? 0 : MS, pace_ns = quiet_ns / 8;
        pace_ns = pace_ns > longest_ns ? longest_ns : pace_ns;
        pace_ns = pace_ns < 25000 ? shortest_ns : pace_ns;
        wait_ns = pace_ns < wait_ns ? pace_ns : wait_ns;
    }
    return wait_ns;
}

static nfds_t add_fd(struct pollfd *fds, nfds_t first, nfds_t end, int fd)
{
    for (nfds_t i = first; i < end; i++) /* two watches may share an fd, which can be read only once */
        if (fds[i].fd == fd)
            return end;
    fds[end] = (struct pollfd){.fd = fd, .events = POLLIN};
    return end + 1;
}

/* Fills the poll set: first the CQs, from `*first_wake` on what must be read to become unreadable. Returns its end. */
static nfds_t collect_fds(struct pdd_port *port, nfds_t *first_wake)
{
    nfds_t end = 0;
    uint32_t place = 0;
    for (struct endpoint *endpoint; (endpoint = next_active(port, &place));)
        if (endpoint->fd >= 0)
            port->fds[end++] = (struct pollfd){.fd = endpoint->fd, .events = POLLIN};
    *first_wake = end;
    end = add_fd(port->fds, *first_wake, end, port->wake_fd);
    for (uint32_t i = 0; i < port->num_watches; i++) {
        struct watch *watch = &port->watches[i];
        if (watch->place.handle && watch->wake_fd >= 0 && !list_empty(&watch->armed))
            end = add_fd(port->fds, *first_wake, end, watch->wake_fd);
    }
    return end;
}

static void sleep_in_poll(struct pdd_port *port, uint64_t wait_ns)
{
    struct timespec timeout = {.tv_sec = (time_t)(wait_ns / 1000000000u), .tv_nsec = (long)(wait_ns % 1000000000u)};
    nfds_t first_wake, end = collect_fds(port, &first_wake);
    uint64_t ignored;
    int ready = ppoll(port->fds, end, wait_ns == FOREVER_NS ? NULL : &timeout, NULL);
    add_stat(&port->stats.num_wakeups, 1);
    for (nfds_t i = first_wake; ready > 0 && i < end; i++) {
        if (port->fds[i].revents & POLLIN && read(port->fds[i].fd, &ignored, sizeof ignored) < 0)
            continue;
        if (port->fds[i].revents & POLLNVAL) /* closed under us: poll its counters instead of spinning on it */
            for (uint32_t w = 0; w < port->num_watches; w++)
                if (port->watches[w].wake_fd == port->fds[i].fd)
                    port->watches[w].wake_fd = -1;
    }
}

/* False: there is something to read already, or libfabric wants another turn. */
static bool may_sleep(struct pdd_port *port)
{
    uint32_t place = 0;
    if (port->failed)
        return true;
    for (struct endpoint *endpoint; (endpoint = next_active(port, &place));) {
        struct fid *fids[1] = {&endpoint->cq->fid};
        if (endpoint->wait_set ? fi_wait(endpoint->wait_set, 0) != -FI_ETIMEDOUT
                               : endpoint->fd >= 0 && fi_trywait(port->fabric, fids, 1) != FI_SUCCESS)
            return false;
    }
    return true;
}

static void wait_for_work(struct pdd_port *port)
{
    uint64_t wait_ns = patience(port);
    if (!wait_ns) {
        sched_yield();
        return;
    }
    atomic_store(&port->sleeping, true);
    if (pdd_ring_empty(&port->commands) && may_sleep(port))
        sleep_in_poll(port, wait_ns);
    atomic_store(&port->sleeping, false);
}

void *pdd_progress(void *argument)
{
    struct pdd_port *port = argument;
    port->now_ns = port->active_ns = monotonic_ns();
    while (!port->stopping) {
        unsigned num_done = take_commands(port);
        num_done += read_completions(port);
        num_done += pdd_sample_watches(port);
        num_done += pdd_post(port);
        pdd_push_strays(port);
        port->now_ns = monotonic_ns();
        if (num_done)
            port->active_ns = port->now_ns;
        else
            wait_for_work(port);
    }
    end_all(port, ECANCELED);
    return NULL;
}
