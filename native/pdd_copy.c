/* The writer's side of copies within one machine: jobs go into a ring, and come back as a number that are done. */
#include "pdd_copy.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* The kernel takes connections for a target that hangs: until one is let in, nothing is lost by giving it up. */
static const uint64_t MAX_ACCEPT_NS = 1000000000ull;

/* ---- connection ---- */
static bool send_message(int socket, const struct copy_message *message, const int *fds, uint32_t num_fds)
{
    struct iovec data = {.iov_base = (void *)message, .iov_len = sizeof *message};
    union {
        struct cmsghdr header;
        uint8_t bytes[CMSG_SPACE(4 * sizeof(int))];
    } control;
    struct msghdr header = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = &control};
    header.msg_controllen = CMSG_SPACE(num_fds * sizeof(int));
    memset(&control, 0, sizeof control);
    control.header.cmsg_level = SOL_SOCKET;
    control.header.cmsg_type = SCM_RIGHTS;
    control.header.cmsg_len = CMSG_LEN(num_fds * sizeof(int));
    memcpy(CMSG_DATA(&control.header), fds, num_fds * sizeof(int));
    return sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof *message;
}

static int make_ring(struct copier *copier)
{
    int fd = memfd_create("pdd-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return -errno;
    if (ftruncate(fd, sizeof *copier->ring) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) ||
        !(copier->ring = pdd_copying_map_sealed(fd, sizeof *copier->ring, PROT_READ | PROT_WRITE))) {
        close(fd);
        return -ENOMEM;
    }
    return fd;
}

static int introduce(struct copying *copying, struct copier *copier, const struct pdd_region *source, int ring_fd)
{
    struct sockaddr_un address;
    uint32_t address_bytes;
    struct copy_message hello = {.kind = COPY_HELLO, .version = COPY_VERSION, .length_bytes = source->length_bytes};
    int fds[4] = {ring_fd, copier->reader_bell, copier->bell, source->fd};
    memcpy(hello.token, copier->peer->copy_token, sizeof hello.token);
    pdd_copying_socket_name(copier->peer->copy_name, &address, &address_bytes);
    if (ring_fd < 0 || copier->socket < 0 || copier->bell < 0 || copier->reader_bell < 0)
        return -EMFILE;
    if (connect(copier->socket, (struct sockaddr *)&address, address_bytes))
        return -errno;
    if (!pdd_copying_same_user(copier->socket) || !send_message(copier->socket, &hello, fds, 4))
        return -ECONNREFUSED;
    int rc = pdd_copying_listen(copying, copier->socket, &copier->socket_tag);
    return rc ? rc : pdd_copying_listen(copying, copier->bell, &copier->bell_tag);
}

static void disconnect(struct copying *copying, struct copier *copier)
{
    if (copier->ring) {
        atomic_store(&copier->ring->stopped, 1); /* before any source changes: see serve_job */
        munmap(copier->ring, sizeof *copier->ring);
    }
    copier->ring = NULL;
    copier->accepted = false;
    pdd_copying_close_fd(copying, &copier->socket);
    pdd_copying_close_fd(copying, &copier->bell);
    pdd_copying_close_fd(copying, &copier->reader_bell);
}

static int start(struct pdd_port *port, struct copier *copier)
{
    copier->head = copier->tail = 0;
    copier->bytes_in_flight = 0;
    copier->progress_ns = port->now_ns;
    copier->socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    copier->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    copier->reader_bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int ring_fd = make_ring(copier);
    int rc = introduce(port->copying, copier, &pdd_find_memory(port, copier->memory)->region, ring_fd);
    if (ring_fd >= 0)
        close(ring_fd);
    if (rc) {
        disconnect(port->copying, copier);
        retry_later(&copier->reconnect, port->now_ns);
    }
    return rc;
}

static void free_copier(struct pdd_port *port, struct copier *copier)
{
    disconnect(port->copying, copier);
    list_remove(&copier->link);
    free(copier);
}

static struct copier *new_copier(struct pdd_port *port, struct peer *peer, uint32_t memory)
{
    struct copier *copier = calloc(1, sizeof *copier);
    if (!copier)
        return NULL;
    copier->peer = peer;
    copier->memory = memory;
    copier->announced = true;
    copier->socket = copier->bell = copier->reader_bell = -1;
    copier->socket_tag = (struct tag){.kind = TAG_COPIER_SOCKET, .owner = copier};
    copier->bell_tag = (struct tag){.kind = TAG_COPIER_BELL, .owner = copier};
    list_append(&port->copying->copiers, &copier->link);
    return copier;
}

/* Made when a write first wants it; it connects when it has something to post. NULL: only NICs go there. */
struct copier *pdd_find_copier(struct pdd_port *port, struct peer *peer, uint32_t memory)
{
    if (!peer->copies || pdd_find_memory(port, memory)->region.fd < 0)
        return NULL;
    for (struct link *link = port->copying->copiers.next; link != &port->copying->copiers; link = link->next)
        if (((struct copier *)link)->peer == peer && ((struct copier *)link)->memory == memory)
            return (struct copier *)link;
    return new_copier(port, peer, memory);
}

/* The writes that they have jobs of are the caller's to end. */
void pdd_free_copiers(struct pdd_port *port, const struct peer *peer)
{
    for (struct link *link = peer->copies ? port->copying->copiers.next : NULL, *next;
         link && link != &port->copying->copiers; link = next) {
        next = link->next;
        if (((struct copier *)link)->peer == peer)
            free_copier(port, (struct copier *)link);
    }
}

bool pdd_is_copied_to(const struct pdd_port *port, const struct peer *peer)
{
    for (const struct link *link = peer->copies ? port->copying->copiers.next : NULL;
         link && link != &port->copying->copiers; link = link->next)
        if (((const struct copier *)link)->peer == peer && ((const struct copier *)link)->accepted)
            return true;
    return false;
}

static bool is_accepted(struct copier *copier)
{
    copier->accepted = copier->accepted || (copier->ring && atomic_load(&copier->ring->accepted));
    return copier->accepted;
}

static void count_failure(struct pdd_port *port)
{
    add_stat(&port->stats.num_failed_copiers, 1);
    add_stat(&port->stats.num_failed_paths, 1);
}

/* True while this is the way to the peer. After a failure it is only once the target has let us in: the NICs carry what
 * would wait for that. */
bool pdd_copier_ready(struct pdd_port *port, struct copier *copier)
{
    if (copier->left)
        count_failure(port);
    copier->left = false;
    if (!copier->ring && (copier->reconnect.after_ns > port->now_ns || start(port, copier)))
        return false;
    return is_accepted(copier) || !copier->reconnect.pause_ns;
}

/* ---- jobs ---- */
/* Asks for the next copy of a write. -EAGAIN: the ring is full. */
int pdd_post_copy(struct pdd_port *port, struct copier *copier, struct write *write)
{
    const struct memory *memory = pdd_find_memory(port, write->spec.memory);
    struct batch batch;
    if (!copier->accepted || copier->tail - copier->head == COPY_JOBS || copier->bytes_in_flight >= COPY_BYTES)
        return -FI_EAGAIN;
    pdd_fill_batch(port, write, 1, &batch);
    struct copy_job job = {
        .immediate = write->spec.immediate | (batch.weight - 1),
        .source_offset_bytes = (uint64_t)batch.local[0].iov_base - memory->region.address,
        .target_offset_bytes = batch.remote[0].addr,
        .length_bytes = batch.bytes,
    };
    if (copier->tail == copier->head)
        copier->progress_ns = port->now_ns;
    copier->ring->jobs[copier->tail % COPY_JOBS] = job;
    copier->jobs[copier->tail % COPY_JOBS] = (struct copier_job){write, batch.bytes};
    copier->bytes_in_flight += batch.bytes;
    if (!write->first_ns)
        write->first_ns = monotonic_ns();
    atomic_store_explicit(&copier->ring->tail, ++copier->tail, memory_order_release);
    copier->announced = false;
    pdd_batch_posted(port, write, &batch);
    return 0;
}

/* After jobs were put in: the target sees them, or we see that it sleeps. */
void pdd_announce_copies(struct pdd_port *port)
{
    for (struct link *link = port->copying->copiers.next; link != &port->copying->copiers; link = link->next) {
        struct copier *copier = (struct copier *)link;
        if (!copier->announced && copier->ring) {
            atomic_thread_fence(memory_order_seq_cst);
            if (atomic_load(&copier->ring->reader_sleeps) && atomic_exchange(&copier->ring->reader_sleeps, 0))
                pdd_signal_fd(copier->reader_bell);
        }
        copier->announced = true;
    }
}

static void job_done(struct pdd_port *port, struct copier *copier, int error)
{
    struct copier_job job = copier->jobs[copier->head++ % COPY_JOBS];
    copier->bytes_in_flight -= job.bytes;
    pdd_part_done(port, job.write, error);
}

/* -EPROTO: more is said to be done than was asked for. */
static int take_done(struct pdd_port *port, struct copier *copier)
{
    uint32_t head = atomic_load_explicit(&copier->ring->head, memory_order_acquire);
    uint32_t num_done = head - copier->head;
    if (!num_done)
        return 0;
    if (num_done > copier->tail - copier->head)
        return -EPROTO;
    copier->progress_ns = port->now_ns;
    copier->reconnect = (struct retry){0};
    while (copier->head != head)
        job_done(port, copier, 0);
    return (int)num_done;
}

static unsigned reap(struct pdd_port *port, struct copier *copier)
{
    is_accepted(copier);
    int num_done = take_done(port, copier);
    if (num_done >= 0)
        return (unsigned)num_done;
    add_stat(&port->stats.num_errors, 1);
    pdd_fail_copier(port, copier, -num_done);
    return 1;
}

unsigned pdd_reap_copies(struct pdd_port *port)
{
    unsigned num_done = 0;
    if (!port->copying || port->failed)
        return 0;
    for (struct link *link = port->copying->copiers.next; link != &port->copying->copiers; link = link->next)
        if (((struct copier *)link)->ring)
            num_done += reap(port, (struct copier *)link);
    return num_done;
}

/* ---- failure ---- */
static bool waits(const struct copier *copier)
{
    return copier->ring && (!copier->accepted || copier->head != copier->tail);
}

/* Until it is tried again the NICs are the way. What is in the ring may or may not have been copied: its writes end. */
static void give_up(struct pdd_port *port, struct copier *copier, int error)
{
    take_done(port, copier); /* what was done has not failed */
    disconnect(port->copying, copier);
    while (copier->head != copier->tail)
        job_done(port, copier, error);
    retry_later(&copier->reconnect, port->now_ns);
}

void pdd_fail_copier(struct pdd_port *port, struct copier *copier, int error)
{
    if (!copier->ring)
        return;
    copier->left = !waits(copier);
    if (!copier->left)
        count_failure(port);
    give_up(port, copier, error);
}

void pdd_fail_copiers(struct pdd_port *port, int error)
{
    for (struct link *link = port->copying ? port->copying->copiers.next : NULL;
         link && link != &port->copying->copiers; link = link->next)
        pdd_fail_copier(port, (struct copier *)link, error);
}

/* A memory is released: who can read it must not. That is no failure. */
void pdd_forget_source(struct pdd_port *port, uint32_t handle)
{
    for (struct link *link = port->copying ? port->copying->copiers.next : NULL, *next;
         link && link != &port->copying->copiers; link = next) {
        struct copier *copier = (struct copier *)link;
        next = link->next;
        if (copier->memory == handle) {
            if (copier->ring)
                give_up(port, copier, ECANCELED);
            free_copier(port, copier);
        }
    }
}

static uint64_t max_silence_ns(const struct copier *copier)
{
    return copier->accepted ? MAX_SILENCE_NS : MAX_ACCEPT_NS;
}

/* A target that is alive and does nothing for long is given up, as a path is. */
unsigned pdd_check_copiers(struct pdd_port *port)
{
    unsigned num_failed = 0;
    if (!port->copying)
        return 0;
    for (struct link *link = port->copying->copiers.next; link != &port->copying->copiers; link = link->next) {
        struct copier *copier = (struct copier *)link;
        if (waits(copier) && port->now_ns - copier->progress_ns > max_silence_ns(copier)) {
            pdd_fail_copier(port, copier, ETIMEDOUT);
            num_failed++;
        }
    }
    return num_failed;
}

/* ---- sleep ---- */
uint64_t pdd_copies_patience(const struct pdd_port *port)
{
    uint64_t wait_ns = UINT64_MAX;
    for (const struct link *link = port->copying ? port->copying->copiers.next : NULL;
         link && link != &port->copying->copiers; link = link->next)
        if (waits((const struct copier *)link))
            wait_ns = least(wait_ns, max_silence_ns((const struct copier *)link) / 8);
    return wait_ns;
}

/* It wants to be woken when all is done, or when half of it is and more waits to be asked for. */
bool pdd_copier_may_sleep(struct copier *copier)
{
    uint32_t in_flight = copier->tail - copier->head;
    if (!copier->ring || !in_flight)
        return true;
    uint32_t wanted = list_empty(&copier->peer->ready) ? in_flight : (in_flight + 1) / 2;
    atomic_store(&copier->ring->wake_at, copier->head + wanted);
    atomic_store(&copier->ring->writer_sleeps, 1);
    return atomic_load(&copier->ring->head) == copier->head;
}
