/* The progress thread: takes commands, posts, counts and, when nothing moves, sleeps in poll. */
#include "pdd_copy.h"

#include <sched.h>
#include <unistd.h>

static const uint64_t FOREVER_NS = ~0ull;
static const uint64_t POLLED_WATCH_NS = 100 * 1000;
static const uint64_t MS = 1000000;
static const uint64_t BRAKE_NS = 5 * MS;
enum { MAX_FRUITLESS = 1000, /* one large message may come in hundreds of parts, each of which wakes us */
       TRIES_AFTER_BRAKE = 4 };

/* ---- telling the other side ---- */
void pdd_signal_fd(int fd)
{
    uint64_t one = 1;
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

/* Called after a push to `commands`: the thread sees the push, or we see that it sleeps. */
void pdd_wake(struct pdd_port *port)
{
    if (atomic_exchange(&port->sleeping, false))
        pdd_signal_fd(port->wake_fd);
}

void pdd_signal_events(struct pdd_port *port)
{
    if (!atomic_exchange(&port->signalled, true))
        pdd_signal_fd(port->event_fd);
}

void pdd_push_event(struct pdd_port *port, const struct pdd_event *event)
{
    pdd_ring_push(&port->events, event); /* cannot be full: the slot was reserved */
    pdd_signal_events(port);
    port->brief = false; /* whoever is told may want this core */
}

/* ---- completions ---- */
static void end_all(struct pdd_port *port, int error)
{
    for (uint32_t slot = 0; slot < port->max_writes; slot++)
        if (port->live[slot])
            pdd_abandon_write(port, port->live[slot], error);
}

/* Not from inside of a loop over the endpoints: it closes all that post. */
static void fail_port(struct pdd_port *port, int error)
{
    struct pdd_event event = {.kind = PDD_PORT_FAILED, .error = error};
    port->failed = error;
    pdd_fail_peers(port, error);
    end_all(port, error);
    pdd_push_event(port, &event);
}

static unsigned read_error(struct pdd_port *port, struct endpoint *endpoint)
{
    struct fi_cq_err_entry entry = {0};
    if (fi_cq_readerr(endpoint->cq, &entry, 0) != 1)
        return 0;
    add_stat(&port->stats.num_errors, 1);
    /* Where peers write, it is the target's side of someone's broken write: his error, not ours. */
    if (endpoint->path && pdd_complete(port, endpoint->path, entry.op_context, error_number(entry.err)))
        pdd_fail_path(port, endpoint->path, error_number(entry.err));
    return 1;
}

unsigned pdd_read_cq(struct pdd_port *port, struct endpoint *endpoint)
{
    struct fi_cq_data_entry entries[64];
    if (port->failed)
        return 0;
    errno = 0; /* a stale EAGAIN is what libfabric 1.17 takes for its own where a connection is closed, and keeps it */
    ssize_t num_read = fi_cq_read(endpoint->cq, entries, 64);
    if (num_read == -FI_EAVAIL)
        return read_error(port, endpoint);
    if (num_read == -FI_EAGAIN || !num_read)
        return 0;
    if (num_read < 0) {
        if (endpoint->path)
            pdd_fail_path(port, endpoint->path, error_number((int)-num_read));
        else
            port->breaking = error_number((int)-num_read);
        return 0;
    }
    port->now_ns = monotonic_ns();
    for (ssize_t i = 0; i < num_read; i++) {
        if (entries[i].flags & (FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA)) {
            add_stat(&endpoint->nic->num_arrived, ((uint32_t)entries[i].data & WEIGHT_MASK) + 1);
            pdd_count_arrival(port, (uint32_t)entries[i].data);
        } else if (endpoint->path) {
            pdd_complete(port, endpoint->path, entries[i].op_context, 0);
        }
    }
    return (unsigned)num_read;
}

/* Where something may happen: all endpoints that peers write to, and those of ours that have something to send. */
static bool is_active(const struct endpoint *endpoint) { return !endpoint->path || pdd_path_busy(endpoint->path); }

static unsigned read_completions(struct pdd_port *port)
{
    unsigned num_read = 0;
    for (struct link *link = port->endpoints.next, *next; link != &port->endpoints; link = next) {
        next = link->next; /* an error closes the endpoint */
        if (is_active((struct endpoint *)link))
            num_read += pdd_read_cq(port, (struct endpoint *)link);
    }
    if (port->breaking && !port->failed)
        fail_port(port, port->breaking);
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
/* How long until something must be tried without anyone waking us; 0: now, after a yield.
 *
 * To be woken costs more than a short wait, and costs the one who wakes us as well: a wait is spun if the one before it
 * was short. What comes seldom, and what does not come at all, is slept for. */
static uint64_t patience(const struct pdd_port *port)
{
    uint64_t quiet_ns = port->now_ns - port->active_ns, wait_ns = FOREVER_NS;
    if (port->brief && quiet_ns < port->spin_ns)
        return 0;
    for (const struct link *link = port->endpoints.next; link != &port->endpoints; link = link->next)
        if (((const struct endpoint *)link)->path)
            wait_ns = least(wait_ns, pdd_path_patience(port, ((const struct endpoint *)link)->path));
    wait_ns = least(wait_ns, pdd_copies_patience(port));
    for (uint32_t i = 0; i < port->num_watches; i++) {
        const struct watch *watch = &port->watches[i];
        if (watch->place.handle && watch->wake_fd < 0 && !list_empty(&watch->armed) && wait_ns > POLLED_WATCH_NS)
            wait_ns = POLLED_WATCH_NS;
    }
    if (port->num_strays && wait_ns > 100 * MS)
        wait_ns = 100 * MS;
    if (!port->wakes) { /* nobody wakes us for a completion: look less often the longer it was quiet */
        bool hot = port->in_flight || atomic_load(&port->num_armed);
        uint64_t longest_ns = hot ? MS : 10 * MS, shortest_ns = hot ? 0 : MS, pace_ns = quiet_ns / 8;
        pace_ns = pace_ns > longest_ns ? longest_ns : pace_ns;
        pace_ns = pace_ns < 25000 ? shortest_ns : pace_ns;
        wait_ns = pace_ns < wait_ns ? pace_ns : wait_ns;
    }
    return wait_ns;
}

static void reserve_fds(struct pdd_port *port)
{
    nfds_t wanted = 2 + MAX_WATCHES;
    for (const struct link *link = port->endpoints.next; link != &port->endpoints; link = link->next)
        wanted++;
    if (wanted <= port->max_fds)
        return;
    struct pollfd *fds = realloc(port->fds, 2 * wanted * sizeof *fds);
    if (fds) {
        port->fds = fds;
        port->max_fds = 2 * wanted;
    }
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
    for (const struct link *link = port->endpoints.next; link != &port->endpoints; link = link->next) {
        const struct endpoint *endpoint = (const struct endpoint *)link;
        if (!port->failed && endpoint->fd >= 0 && is_active(endpoint) && end < port->max_fds - MAX_WATCHES - 2)
            port->fds[end++] = (struct pollfd){.fd = endpoint->fd, .events = POLLIN};
    }
    if (port->copying)
        port->fds[end++] = (struct pollfd){.fd = port->copying->epoll, .events = POLLIN};
    *first_wake = end;
    end = add_fd(port->fds, *first_wake, end, port->wake_fd);
    for (uint32_t i = 0; i < port->num_watches; i++) {
        struct watch *watch = &port->watches[i];
        if (watch->place.handle && watch->wake_fd >= 0 && !list_empty(&watch->armed))
            end = add_fd(port->fds, *first_wake, end, watch->wake_fd);
    }
    return end;
}

/* True: something was there before the time was over. */
static bool sleep_in_poll(struct pdd_port *port, uint64_t wait_ns, bool completions)
{
    struct timespec timeout = {.tv_sec = (time_t)(wait_ns / 1000000000u), .tv_nsec = (long)(wait_ns % 1000000000u)};
    reserve_fds(port);
    nfds_t first_wake, end = collect_fds(port, &first_wake), first = completions ? 0 : first_wake;
    uint64_t ignored;
    int ready = ppoll(port->fds + first, end - first, wait_ns == FOREVER_NS ? NULL : &timeout, NULL);
    add_stat(&port->stats.num_wakeups, 1);
    for (nfds_t i = first_wake; ready > 0 && i < end; i++) {
        if (port->fds[i].revents & POLLIN && read(port->fds[i].fd, &ignored, sizeof ignored) < 0)
            continue;
        if (port->fds[i].revents & POLLNVAL) /* closed under us: poll its counters instead of spinning on it */
            for (uint32_t w = 0; w < port->num_watches; w++)
                if (port->watches[w].wake_fd == port->fds[i].fd)
                    port->watches[w].wake_fd = -1;
    }
    return ready > 0;
}

/* False: there is something to read already, or libfabric wants another turn. */
static bool may_sleep(struct pdd_port *port)
{
    if (port->failed)
        return true;
    for (struct link *link = port->endpoints.next; link != &port->endpoints; link = link->next) {
        struct endpoint *endpoint = (struct endpoint *)link;
        if (!is_active(endpoint))
            continue;
        struct fid *fids[1] = {&endpoint->cq->fid};
        errno = 0; /* see pdd_read_cq */
        if (endpoint->wait_set ? fi_wait(endpoint->wait_set, 0) != -FI_ETIMEDOUT
                               : endpoint->fd >= 0 && fi_trywait(endpoint->nic->fabric, fids, 1) != FI_SUCCESS)
            return false;
    }
    return pdd_copies_may_sleep(port);
}

/* Something says again and again that it has a completion, and has none: a connection that libfabric 1.17 does not let
 * go of, or one that it cannot accept. Completions are left alone for a moment, and tried again. */
static void brake(struct pdd_port *port)
{
    sleep_in_poll(port, BRAKE_NS, false);
    port->num_fruitless = MAX_FRUITLESS - TRIES_AFTER_BRAKE;
}

static void sleep_for_work(struct pdd_port *port, uint64_t wait_ns)
{
    if (port->num_fruitless >= MAX_FRUITLESS) {
        brake(port);
        return;
    }
    bool may = may_sleep(port), woken = may && sleep_in_poll(port, wait_ns, true);
    port->num_fruitless = woken || !may ? port->num_fruitless + 1 : 0;
    port->brief = woken && monotonic_ns() - port->active_ns < port->spin_ns;
}

static void wait_for_work(struct pdd_port *port)
{
    uint64_t wait_ns = patience(port);
    if (!wait_ns) {
        sched_yield();
        return;
    }
    atomic_store(&port->sleeping, true);
    if (pdd_ring_empty(&port->commands))
        sleep_for_work(port, wait_ns);
    atomic_store(&port->sleeping, false);
    port->now_ns = monotonic_ns(); /* else what fails in the next turn is tried again at once: its pause is over */
    pdd_copies_awake(port);
}

void *pdd_progress(void *argument)
{
    struct pdd_port *port = argument;
    port->now_ns = port->active_ns = monotonic_ns();
    while (!port->stopping) {
        unsigned num_done = take_commands(port);
        num_done += pdd_attend_copies(port);
        num_done += read_completions(port);
        num_done += pdd_serve_readers(port);
        num_done += pdd_reap_copies(port);
        num_done += pdd_sample_watches(port);
        num_done += pdd_post(port);
        pdd_push_strays(port);
        num_done += pdd_check_paths(port);
        port->now_ns = monotonic_ns();
        if (num_done) {
            port->active_ns = port->now_ns;
            port->num_fruitless = 0;
        } else {
            wait_for_work(port);
        }
    }
    end_all(port, ECANCELED);
    return NULL;
}
