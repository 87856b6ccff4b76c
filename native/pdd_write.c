/* A write on the progress thread: from its command to its one end.
 *
 *     taken --> ready (peer's list) <--> armed (watch's list)      while pieces are left to post
 *                     |
 *                     v
 *               posted or ended, no list --> done when its last message has come back
 */
#include "pdd_copy.h"

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
        .first_ns = write->first_ns,
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
    write->copier = pdd_find_copier(port, write->peer, write->spec.memory);
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

/* A message has come back, or a copy is done. */
void pdd_part_done(struct pdd_port *port, struct write *write, int error)
{
    write->in_flight--;
    if (!error)
        write->peer->stuck_since_ns = 0;
    if (error)
        pdd_end_write(port, write, error);
    else if (!write->in_flight && (write->ended || all_posted(write)))
        finish(port, write);
}

/* ---- one message ---- */
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
static bool add_piece(struct batch *batch, uint64_t local, uint64_t remote, uint64_t bytes, uint32_t max_iov)
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
    batch->remote[batch->num_iov] = (struct fi_rma_iov){.addr = remote, .len = bytes};
    batch->num_iov++;
    return true;
}

/* As many pieces as one message takes, all of one layer: the next may not have been computed. */
void pdd_fill_batch(const struct pdd_port *port, const struct write *write, uint32_t max_iov, struct batch *batch)
{
    const struct pdd_write *spec = &write->spec;
    uint64_t max_bytes = least(port->max_message_bytes, JOINED_BYTES);
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
        if ((batch->weight && batch->bytes + bytes > max_bytes) || !add_piece(batch, from, to, bytes, max_iov))
            break;
        batch->weight++;
        batch->bytes += bytes;
        advance(spec, &batch->next);
    }
}

void pdd_batch_posted(struct pdd_port *port, struct write *write, const struct batch *batch)
{
    write->in_flight++;
    write->cursor = batch->next;
    write->posted_pieces += batch->weight;
    write->posted_bytes += batch->bytes;
    add_stat(&port->stats.num_messages, 1);
    add_stat(&port->stats.num_pieces, batch->weight);
    add_stat(&port->stats.num_bytes, batch->bytes);
}

/* ---- all of them ---- */
/* Posts the next message of a write by the best way. -EAGAIN: every way is busy; other errors: there is none; 1: one
 * has failed, and perhaps the write with it. */
static int post_next(struct pdd_port *port, struct write *write)
{
    struct peer *peer = write->peer;
    struct path *path;
    if (write->copier && pdd_copier_ready(port, write->copier)) {
        peer->stuck_since_ns = 0; /* a copier that hangs is given up by itself, and then the NICs are tried */
        return pdd_post_copy(port, write->copier, write);
    }
    while ((path = pdd_choose_path(port, peer))) {
        int rc = pdd_post_message(port, path, write);
        if (!rc)
            return 0;
        if (rc != -FI_EAGAIN) {
            add_stat(&port->stats.num_errors, 1);
            if (path->nic->terms.lingers) /* it stays open, and would be asked again at once */
                return -error_number(-rc);
            pdd_fail_path(port, path, error_number(-rc));
            return 1;
        }
    }
    return pdd_has_open_path(peer) ? -FI_EAGAIN : peer->error ? -peer->error : -EHOSTUNREACH;
}

/* Nothing has gone out or come back for long, though there may always be a path that is being tried. */
static bool is_stuck(const struct pdd_port *port, struct peer *peer)
{
    if (!peer->stuck_since_ns)
        peer->stuck_since_ns = port->now_ns;
    return port->now_ns - peer->stuck_since_ns > MAX_SILENCE_NS;
}

static unsigned post_peer(struct pdd_port *port, struct peer *peer)
{
    unsigned num_posted = 0;
    while (num_posted < POSTS_PER_TURN && !list_empty(&peer->ready)) {
        struct write *write = (struct write *)peer->ready.next;
        int rc = post_next(port, write);
        if (rc == -FI_EAGAIN && (num_posted || !is_stuck(port, peer)))
            break;
        if (rc == -FI_EAGAIN)
            rc = peer->error ? -peer->error : -ETIMEDOUT;
        if (rc < 0) {
            pdd_end_write(port, write, -rc);
        } else if (!rc) {
            num_posted++;
            place_write(port, write);
        }
    }
    if (num_posted)
        peer->stuck_since_ns = 0;
    return num_posted;
}

/* One turn for each peer that has something to post. Returns the messages posted. */
unsigned pdd_post(struct pdd_port *port)
{
    unsigned num_posted = 0;
    for (uint32_t i = 0; i < port->num_peers; i++) {
        struct peer *peer = &port->peers[i];
        if (!peer->place.handle)
            continue;
        if (list_empty(&peer->ready))
            peer->stuck_since_ns = 0;
        else
            num_posted += post_peer(port, peer);
    }
    if (num_posted && port->copying)
        pdd_announce_copies(port);
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
