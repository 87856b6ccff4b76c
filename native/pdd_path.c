/* Paths: from one NIC of ours to one of a peer's. Messages go where most credit is left; a path that fails is closed,
 * which ends what was under way on it, and opened again later.
 *
 *     closed --- a message ---> open --- error, silence ---> closed for a pause, the longer the more often
 *
 * What was under way when it failed may or may not have been counted by the target, so it is never posted a second
 * time: its writes end with the error. What libfabric refused to take goes on over the other paths.
 */
#include "pdd_copy.h"

static const uint64_t YIELD_NS = 200 * 1000;               /* EAGAIN is mostly short: sleeping at once spoils the p99 */
static const uint64_t MAX_RETRY_NS = 20 * 1000000;         /* ... and for a dead peer it lasts for ever */
static const uint64_t IDLE_NS = 1000000000;                /* whoever is wanted is asked far more often */
static const uint64_t CHECK_EVERY_NS = 250 * 1000000;

/* It is opened by the first message: a peer whose pages are copied needs none. */
int pdd_path_init(struct path *path)
{
    uint32_t number = path->nic->terms.max_in_flight;
    path->messages = calloc(number, sizeof *path->messages);
    path->free_messages = calloc(number, sizeof *path->free_messages);
    path->num_free = number;
    if (!path->messages || !path->free_messages)
        return -ENOMEM;
    for (uint32_t i = 0; i < number; i++) {
        path->messages[i].path = path;
        path->free_messages[i] = i;
    }
    return 0;
}

static uint32_t num_in_flight(const struct path *path) { return path->nic->terms.max_in_flight - path->num_free; }

/* Something may happen on its endpoint. */
bool pdd_path_busy(const struct path *path)
{
    return num_in_flight(path) || !list_empty(&path->peer->ready);
}

/* shm works only inside our own calls: an endpoint that is never called again places and sends nothing. And closing one
 * is not safe: a peer in the same process uses its queues without a mapping of its own. So what is out there keeps its
 * endpoint, and its messages, until the process ends. */
static bool must_linger(const struct path *path)
{
    return path->nic->terms.lingers && path->endpoint.ep && num_in_flight(path);
}

/* For good. The endpoint first: it knows the messages. Their writes are the caller's to end. */
void pdd_path_close(struct pdd_port *port, struct path *path)
{
    if (!path->lingers)
        port->in_flight -= num_in_flight(path);
    path->lingers = must_linger(path);
    if (path->lingers) {
        list_remove(&path->endpoint.link); /* nobody looks at it any more */
        return;
    }
    pdd_endpoint_close(&path->endpoint);
    free(path->messages);
    free(path->free_messages);
    path->messages = NULL;
    path->free_messages = NULL;
    path->num_free = path->nic->terms.max_in_flight;
}

/* ---- choice ---- */
static int open_path(struct pdd_port *port, struct path *path)
{
    int rc = pdd_endpoint_open(port, path->nic, path, &path->endpoint);
    if (!rc && fi_av_insert(path->endpoint.av, path->remote, 1, &path->address, 0, NULL) != 1)
        rc = -EINVAL;
    if (rc) {
        pdd_endpoint_close(&path->endpoint);
        retry_later(&path->reopen, port->now_ns);
    }
    return rc;
}

static bool is_open(struct pdd_port *port, struct path *path)
{
    return path->endpoint.ep || (path->reopen.after_ns <= port->now_ns && !open_path(port, path));
}

static bool has_credit(const struct path *path) { return path->num_free && path->bytes_in_flight < PATH_BYTES; }

/* The path with most credit that takes messages now; NULL: none. */
struct path *pdd_choose_path(struct pdd_port *port, struct peer *peer)
{
    struct path *best = NULL;
    for (uint32_t i = 0; i < peer->num_paths; i++) {
        struct path *path = &peer->paths[i];
        if (is_open(port, path) && has_credit(path) && path->retry_ns <= port->now_ns &&
            (!best || path->bytes_in_flight < best->bytes_in_flight))
            best = path;
    }
    return best;
}

/* One that works, though it may be busy. */
bool pdd_has_open_path(const struct peer *peer)
{
    for (uint32_t i = 0; i < peer->num_paths; i++)
        if (peer->paths[i].endpoint.ep)
            return true;
    return false;
}

/* ---- one message ---- */
/* The longer a path has refused, the longer until it is asked again: a quarter of that time. What it refused before
 * nothing was wanted of it for a while is not held against it. */
static void stall(struct pdd_port *port, struct path *path)
{
    add_stat(&port->stats.num_busy, 1);
    if (!path->stalled_since_ns || port->now_ns - path->refused_ns > IDLE_NS)
        path->stalled_since_ns = port->now_ns;
    path->refused_ns = port->now_ns;
    uint64_t refused_ns = port->now_ns - path->stalled_since_ns;
    path->retry_ns = port->now_ns + (refused_ns < YIELD_NS ? 1 : least(refused_ns / 4, MAX_RETRY_NS));
}

/* Posts the next message of a write. -EAGAIN: the path took nothing, and is asked again later. */
int pdd_post_message(struct pdd_port *port, struct path *path, struct write *write)
{
    struct message *message = &path->messages[path->free_messages[path->num_free - 1]];
    const struct memory *memory = pdd_find_memory(port, write->spec.memory);
    void *descriptors[MAX_IOV];
    struct batch batch;
    pdd_fill_batch(port, write, port->max_iov, &batch);
    for (uint32_t i = 0; i < batch.num_iov; i++) {
        descriptors[i] = memory->at[path->nic - port->nics].descriptor;
        batch.remote[i].addr += path->base;
        batch.remote[i].key = path->key;
    }
    struct fi_msg_rma posted = {
        .msg_iov = batch.local,
        .desc = descriptors,
        .iov_count = batch.num_iov,
        .addr = path->address,
        .rma_iov = batch.remote,
        .rma_iov_count = batch.num_iov,
        .context = message,
        .data = write->spec.immediate | (batch.weight - 1),
    };
    uint64_t before_ns = write->first_ns ? write->first_ns : monotonic_ns();
    ssize_t rc = fi_writemsg(path->endpoint.ep, &posted, FI_REMOTE_CQ_DATA | FI_COMPLETION);
    if (rc == -FI_EAGAIN)
        stall(port, path);
    if (rc)
        return (int)rc;
    path->stalled_since_ns = path->retry_ns = 0;
    if (!num_in_flight(path))
        path->progress_ns = port->now_ns;
    message->write = write;
    message->bytes = batch.bytes;
    path->bytes_in_flight += batch.bytes;
    path->num_free--;
    port->in_flight++;
    add_stat(&path->nic->num_bytes, batch.bytes);
    write->first_ns = before_ns;
    pdd_batch_posted(port, write, &batch);
    return 0;
}

static void message_done(struct pdd_port *port, struct message *message, int error)
{
    struct path *path = message->path;
    struct write *write = message->write;
    path->free_messages[path->num_free++] = (uint32_t)(message - path->messages);
    path->stalled_since_ns = path->retry_ns = 0;
    path->progress_ns = port->now_ns;
    if (!error)
        path->reopen = (struct retry){0};
    message->write = NULL;
    path->bytes_in_flight -= message->bytes;
    port->in_flight--;
    pdd_part_done(port, write, error);
}

/* The message of this path that `context` is, while it is under way; else NULL. */
static struct message *find_message(const struct path *path, const void *context)
{
    uintptr_t offset = (uintptr_t)context - (uintptr_t)path->messages;
    if (offset % sizeof(struct message) || offset / sizeof(struct message) >= path->nic->terms.max_in_flight)
        return NULL;
    struct message *message = &path->messages[offset / sizeof(struct message)];
    return message->write ? message : NULL;
}

/* False: a provider says it twice, or of something that was never posted here. That ends nothing. */
bool pdd_complete(struct pdd_port *port, struct path *path, const void *context, int error)
{
    struct message *message = find_message(path, context);
    if (message)
        message_done(port, message, error);
    else
        add_stat(&port->stats.num_unknown, 1);
    return message != NULL;
}

/* ---- failure ---- */
/* Closes it for a while; the writes that it had messages of end with the error. False: it is closing, or stays open. */
bool pdd_fail_path(struct pdd_port *port, struct path *path, int error)
{
    if (path->failing || path->nic->terms.lingers)
        return false;
    path->failing = true;
    path->peer->error = error;
    while (pdd_read_cq(port, &path->endpoint)) /* what did complete has not failed */
        ;
    pdd_endpoint_close(&path->endpoint);
    for (uint32_t i = 0; i < path->nic->terms.max_in_flight; i++)
        if (path->messages[i].write)
            message_done(port, &path->messages[i], error);
    path->stalled_since_ns = path->retry_ns = 0;
    retry_later(&path->reopen, port->now_ns);
    add_stat(&path->nic->num_failed_paths, 1);
    add_stat(&port->stats.num_failed_paths, 1);
    path->failing = false;
    return true;
}

/* All that we post to anybody: the port has failed. What is not under way then is the caller's to end. */
void pdd_fail_peers(struct pdd_port *port, int error)
{
    for (uint32_t i = 0; i < port->num_peers; i++) {
        struct peer *peer = &port->peers[i];
        for (uint32_t k = 0; peer->place.handle && k < peer->num_paths; k++)
            if (peer->paths[k].endpoint.ep)
                pdd_fail_path(port, &peer->paths[k], error);
    }
    pdd_fail_copiers(port, error);
}

static bool is_silent(const struct path *path, uint64_t now_ns)
{
    return (num_in_flight(path) && now_ns - path->progress_ns > MAX_SILENCE_NS) ||
           (path->stalled_since_ns && now_ns - path->refused_ns < IDLE_NS &&
            now_ns - path->stalled_since_ns > MAX_SILENCE_NS);
}

/* Gives up the paths on which nothing has moved for long. Returns how many: what waited for them must be looked at
 * before the port sleeps. */
unsigned pdd_check_paths(struct pdd_port *port)
{
    unsigned num_failed = 0;
    if (port->now_ns - port->checked_ns < CHECK_EVERY_NS)
        return 0;
    port->checked_ns = port->now_ns;
    for (struct link *link = port->endpoints.next, *next; link != &port->endpoints; link = next) {
        struct endpoint *endpoint = (struct endpoint *)link;
        next = link->next;
        if (endpoint->path && pdd_path_busy(endpoint->path) && is_silent(endpoint->path, port->now_ns))
            num_failed += pdd_fail_path(port, endpoint->path, ETIMEDOUT);
    }
    return num_failed + pdd_check_copiers(port);
}

/* How long until a path wants attention of its own accord. */
uint64_t pdd_path_patience(const struct pdd_port *port, const struct path *path)
{
    uint64_t wait_ns = num_in_flight(path) ? CHECK_EVERY_NS : UINT64_MAX;
    if (!list_empty(&path->peer->ready) && path->stalled_since_ns)
        wait_ns = least(wait_ns, path->retry_ns > port->now_ns ? path->retry_ns - port->now_ns : 0);
    return wait_ns;
}
