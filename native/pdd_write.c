/* A write on the progress thread: from its command to its one end.
 *
 *     taken --> ready (peer's list) <--> armed (watch's list)      while pieces are left to post
 *                     |
 *                     v
 *               posted or ended, no list --> done when its last message has come back
 */
#include "pdd_port.h"

#include <sys/uio.h>

static const uint64_t YIELD_NS = 200 * 1000;        /* EAGAIN is mostly short: sleeping at once spoils the p99 */
static const uint64_t MAX_RETRY_NS = 20 * 1000000;  /* ... and for a dead peer it lasts for ever */

static uint64_t layer_goal(const struct write *write) { return write->spec.counter_base + write->cursor.layer + 1; }

static bool all_posted(const struct write *write) { return write->cursor.layer == write->spec.num_layers; }

static void finish(struct pdd_port *port, struct write *write)
{
    struct pdd_event event = {
        .kind = PDD_WRITE_DONE,
        .error = write->error,
        .slot = write->slot,
        .token = write->spec.token,
        .num_pieces = write->posted_pieces,
        .num_bytes = write->posted_bytes,
    };
    list_remove(&write->link);
    port->live[write->slot] = NULL;
    /* From the push on the write belongs to the caller's thread, which frees it. */
    pdd_push_event(port, &event);
}

/* Puts a write where it now belongs. */
static void place_write(struct pdd_port *port, struct write *write)
{
    list_remove(&write->link);
    if (write->ended || all_posted(write)) {
        if (!write->in_flight)
            finish(port, write);
    } else if (write->watch && write->watch->seen < layer_goal(write)) {
        list_append(&write->watch->armed, &write->link);
    } else {
        list_append(&write->peer->ready, &write->link);
    }
}

void pdd_take_write(struct pdd_port *port, struct write *write)
{
    list_init(&write->link);
    port->live[write->slot] = write;
    write->peer = pdd_find_peer(port, write->spec.peer);
    write->watch = pdd_find_watch(port, write->spec.watch);
    if (port->failed) {
        write->error = port->failed;
        write->ended = true;
    }
    place_write(port, write);
}

/* Posts no more of it. It is done when what libfabric holds of it has come back. */
void pdd_end_write(struct pdd_port *port, struct write *write, int error)
{
    if (!write->error)
        write->error = error;
    write->ended = true;
    place_write(port, write);
}

void pdd_cancel_write(struct pdd_port *port, struct write *write)
{
    if (!all_posted(write)) /* else it is too late to stop: it ends as it ends */
        pdd_end_write(port, write, ECANCELED);
}

/* Ends it now, without waiting for its messages: their completions will not be read any more. */
void pdd_abandon_write(struct pdd_port *port, struct write *write, int error)
{
    write->in_flight = 0;
    pdd_end_write(port, write, error);
}

void pdd_message_done(struct pdd_port *port, struct message *message, int error)
{
    struct peer *peer = message->peer;
    struct write *write = message->write;
    peer->free_messages[peer->num_free++] = (uint32_t)(message - peer->messages);
    peer->stalled_since_ns = peer->retry_ns = 0;
    port->in_flight--;
    write->in_flight--;
    if (error)
        pdd_end_write(port, write, error);
    else if (!write->in_flight && (write->ended || all_posted(write)))
        finish(port, write);
}

/* ---- one message ---- */
struct batch {
    struct iovec local[MAX_IOV];
    struct fi_rma_iov remote[MAX_IOV];
    uint32_t num_iov, weight;
    uint64_t bytes;
    struct cursor next;
};

static void advance(const struct pdd_write *spec, struct cursor *cursor)
{
    if (++cursor->piece < spec->num_pieces)
        return;
    cursor->piece = 0;
    if (++cursor->page < spec->num_pages)
        return;
    cursor->page = 0;
    cursor->layer++;
}

/* Adds a piece, to the last pair if both its sides go on where that ends. False: it does not fit any more. */
static bool add_piece(struct batch *batch, uint64_t local, uint64_t remote, uint64_t key, uint64_t bytes,
                      uint32_t max_iov)
{
    if (batch->num_iov) {
        struct iovec *last = &batch->local[batch->num_iov - 1];
        struct fi_rma_iov *target = &batch->remote[batch->num_iov - 1];
        if ((uint64_t)last->iov_base + last->iov_len == local && target->addr + target->len == remote) {
            last->iov_len += bytes;
            target->len += bytes;
            return true;
        }
    }
    if (batch->num_iov == max_iov)
        return false;
    batch->local[batch->num_iov] = (struct iovec){.iov_base = (void *)local, .iov_len = bytes};
    batch->remote[batch->num_iov] = (struct fi_rma_iov){.addr = remote, .len = bytes, .key = key};
    batch->num_iov++;
    return true;
}

/* As many pieces as one message takes, all of one layer: the next may not have been computed. */
static void fill(const struct pdd_port *port, const struct write *write, struct batch *batch)
{
    const struct pdd_write *spec = &write->spec;
    uint64_t max_bytes = port->max_message_bytes < JOINED_BYTES ? port->max_message_bytes : JOINED_BYTES;
    uint64_t source = spec->source_base + write->cursor.layer * spec->source_layer_bytes;
    uint64_t target = spec->target_base + write->cursor.layer * spec->target_layer_bytes;
    batch->num_iov = batch->weight = 0;
    batch->bytes = 0;
    batch->next = write->cursor;
    while (batch->next.layer == write->cursor.layer && batch->weight < MAX_WEIGHT) {
        const struct pdd_piece *piece = &spec->pieces[batch->next.piece];
        uint64_t bytes = piece->length_bytes;
        uint64_t source_page = spec->source_pages[batch->next.page], target_page = spec->target_pages[batch->next.page];
        uint64_t from = source + source_page * spec->source_page_bytes + piece->source_offset_bytes;
        uint64_t to = target + target_page * spec->target_page_bytes + piece->target_offset_bytes;
        if ((batch->weight && batch->bytes + bytes > max_bytes) ||
            !add_piece(batch, from, to, spec->key, bytes, port->max_iov))
            break;
        batch->weight++;
        batch->bytes += bytes;
        advance(spec, &batch->next);
    }
}

static int post_message(struct pdd_port *port, struct write *write)
{
    struct peer *peer = write->peer;
    struct message *message = &peer->messages[peer->free_messages[peer->num_free - 1]];
    void *descriptor = pdd_find_memory(port, write->spec.memory)->descriptor, *descriptors[MAX_IOV];
    struct batch batch;
    fill(port, write, &batch);
    for (uint32_t i = 0; i < batch.num_iov; i++)
        descriptors[i] = descriptor;
    struct fi_msg_rma posted = {
        .msg_iov = batch.local,
        .desc = descriptors,
        .iov_count = batch.num_iov,
        .addr = peer->address,
        .rma_iov = batch.remote,
        .rma_iov_count = batch.num_iov,
        .context = message,
        .data = write->spec.immediate | (batch.weight - 1),
    };
    ssize_t rc = fi_writemsg(peer->endpoint.ep, &posted, FI_REMOTE_CQ_DATA | FI_COMPLETION);
    if (rc)
        return (int)rc;
    message->write = write;
    peer->num_free--;
    port->in_flight++;
    write->in_flight++;
    write->cursor = batch.next;
    write->posted_pieces += batch.weight;
    write->posted_bytes += batch.bytes;
    add_stat(&port->stats.num_messages, 1);
    add_stat(&port->stats.num_pieces, batch.weight);
    add_stat(&port->stats.num_bytes, batch.bytes);
    return 0;
}

/* ---- all of them ---- */
/* The longer a peer has refused, the longer until it is asked again: a quarter of that time. */
static void stall(struct pdd_port *port, struct peer *peer)
{
    add_stat(&port->stats.num_busy, 1);
    if (!peer->stalled_since_ns)
        peer->stalled_since_ns = port->now_ns;
    uint64_t refused_ns = port->now_ns - peer->stalled_since_ns;
    uint64_t wait_ns = refused_ns / 4 < MAX_RETRY_NS ? refused_ns / 4 : MAX_RETRY_NS;
    peer->retry_ns = refused_ns < YIELD_NS ? port->now_ns : port->now_ns + wait_ns;
}

static unsigned post_peer(struct pdd_port *port, struct peer *peer)
{
    unsigned num_posted = 0;
    while (num_posted < POSTS_PER_TURN && peer->num_free && !list_empty(&peer->ready)) {
        struct write *write = (struct write *)peer->ready.next;
        int rc = post_message(port, write);
        if (rc == -FI_EAGAIN) {
            stall(port, peer);
            return num_posted;
        }
        peer->stalled_since_ns = peer->retry_ns = 0;
        if (rc) {
            add_stat(&port->stats.num_errors, 1);
            pdd_end_write(port, write, error_number(-rc));
            continue;
        }
        num_posted++;
        place_write(port, write);
    }
    return num_posted;
}

/* One turn for each peer that has something to post and has not just refused. Returns the messages posted. */
unsigned pdd_post(struct pdd_port *port)
{
    unsigned num_posted = 0;
    for (uint32_t i = 0; i < port->num_peers; i++) {
        struct peer *peer = &port->peers[i];
        if (peer->place.handle && !list_empty(&peer->ready) && peer->retry_ns <= port->now_ns)
            num_posted += post_peer(port, peer);
    }
    return num_posted;
}

/* Moves writes whose next layer has been computed to their peers. Returns how many. */
unsigned pdd_sample_watches(struct pdd_port *port)
{
    unsigned num_moved = 0;
    for (uint32_t i = 0; i < port->num_watches; i++) {
        struct watch *watch = &port->watches[i];
        if (!watch->place.handle || list_empty(&watch->armed))
            continue;
        uint64_t counter = atomic_load_explicit(watch->counter, memory_order_acquire);
        if (counter == watch->seen)
            continue;
        watch->seen = counter;
        for (struct link *link = watch->armed.next, *next; link != &watch->armed; link = next) {
            struct write *write = (struct write *)link;
            next = link->next;
            if (layer_goal(write) <= counter) {
                place_write(port, write);
                num_moved++;
            }
        }
    }
    return num_moved;
}
