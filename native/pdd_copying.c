/* What both sides of a copy share: who may meet, the sockets, and what wakes the progress thread. */
#include "pdd_copy.h"

#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static const uint64_t ATTEND_EVERY_NS = 1000000; /* while busy; asleep, the epoll descriptor wakes us */

/* Abstract sockets are of one network namespace, and only the same user is served. */
static bool name_machine(char *name)
{
    char boot[37] = "";
    struct stat network;
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    bool known = file && fread(boot, 1, 36, file) == 36 && !stat("/proc/self/ns/net", &network);
    if (file)
        fclose(file);
    if (known)
        snprintf(name, MACHINE_BYTES, "%s/%llx/%x", boot, (unsigned long long)network.st_ino, (unsigned)geteuid());
    return known;
}

void pdd_copying_socket_name(const uint8_t *name, void *address, uint32_t *address_bytes)
{
    struct sockaddr_un *where = address;
    memset(where, 0, sizeof *where);
    where->sun_family = AF_UNIX;
    int used = snprintf(where->sun_path + 1, sizeof where->sun_path - 1, "pdd-");
    for (int i = 0; i < COPY_NAME_BYTES; i++)
        used += snprintf(where->sun_path + 1 + used, sizeof where->sun_path - 1 - (size_t)used, "%02x", name[i]);
    *address_bytes = (uint32_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)used);
}

bool pdd_copying_same_user(int socket)
{
    struct ucred peer;
    socklen_t bytes = sizeof peer;
    return !getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) && peer.uid == geteuid();
}

/* Of a bell only that it was rung, and of the listener that somebody came: what stays readable, whatever we read or
 * cannot accept, would keep us awake for ever. */
int pdd_copying_listen(struct copying *copying, int fd, struct tag *tag)
{
    bool once = tag->kind == TAG_READER_BELL || tag->kind == TAG_COPIER_BELL || tag->kind == TAG_LISTENER;
    struct epoll_event event = {.events = once ? EPOLLIN | EPOLLET : EPOLLIN, .data.ptr = tag};
    return epoll_ctl(copying->epoll, EPOLL_CTL_ADD, fd, &event) ? -errno : 0;
}

/* Of eventfds that do not block: another process made it, and we read and write it on the progress thread. */
bool pdd_copying_is_bell(int fd)
{
    static const char expected[] = "anon_inode:[eventfd]";
    char path[32], name[sizeof expected];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return readlink(path, name, sizeof name) == sizeof expected - 1 && !memcmp(name, expected, sizeof expected - 1) &&
           fcntl(fd, F_GETFL) & O_NONBLOCK;
}

/* A bell is open in two processes: closing it here does not take it out of the epoll set. */
void pdd_copying_close_fd(struct copying *copying, int *fd)
{
    if (*fd < 0)
        return;
    epoll_ctl(copying->epoll, EPOLL_CTL_DEL, *fd, NULL);
    close(*fd);
    *fd = -1;
}

/* Maps what cannot shrink under us: a page that is gone would be a SIGBUS. NULL: it can, or is too short. */
void *pdd_copying_map_sealed(int fd, uint64_t length_bytes, int protection)
{
    struct stat status;
    int seals = fcntl(fd, F_GET_SEALS);
    if (!length_bytes || seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &status) ||
        (uint64_t)status.st_size < length_bytes)
        return NULL;
    void *map = mmap(NULL, length_bytes, protection, MAP_SHARED, fd, 0);
    return map == MAP_FAILED ? NULL : map;
}

static int open_listener(struct copying *copying)
{
    struct sockaddr_un address;
    uint32_t address_bytes;
    if (getrandom(copying->name, sizeof copying->name, 0) != sizeof copying->name)
        return -EIO;
    pdd_copying_socket_name(copying->name, &address, &address_bytes);
    copying->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    copying->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (copying->listener < 0 || copying->epoll < 0 ||
        bind(copying->listener, (struct sockaddr *)&address, address_bytes) || listen(copying->listener, COPY_BACKLOG))
        return -errno;
    copying->listener_tag = (struct tag){.kind = TAG_LISTENER};
    return pdd_copying_listen(copying, copying->listener, &copying->listener_tag);
}

/* The peers, and with them the copiers, are gone already. */
void pdd_copying_close(struct pdd_port *port)
{
    struct copying *copying = port->copying;
    if (!copying)
        return;
    while (!list_empty(&copying->readers))
        pdd_close_reader(port, (struct reader *)copying->readers.next);
    if (copying->listener >= 0)
        close(copying->listener);
    if (copying->epoll >= 0)
        close(copying->epoll);
    free(copying);
    port->copying = NULL;
}

/* Where a sandbox hides what machine this is, or lets nobody bind a socket, the port goes on without copies. */
void pdd_copying_open(struct pdd_port *port)
{
    struct copying *copying = calloc(1, sizeof *copying);
    if (!copying)
        return;
    port->copying = copying;
    copying->listener = copying->epoll = -1;
    list_init(&copying->copiers);
    list_init(&copying->readers);
    if (!name_machine(copying->machine) || open_listener(copying))
        pdd_copying_close(port);
}

/* ---- what has happened on sockets and bells ---- */
static void clear_bell(int fd)
{
    uint64_t ignored;
    while (read(fd, &ignored, sizeof ignored) < 0 && errno == EINTR)
        ;
}

static void attend(struct pdd_port *port, const struct tag *tag)
{
    switch (tag->kind) {
    case TAG_LISTENER:
        pdd_accept_readers(port);
        break;
    case TAG_READER_SOCKET:
        pdd_hear_reader(port, tag->owner);
        break;
    case TAG_READER_BELL:
        clear_bell(((struct reader *)tag->owner)->bell);
        break;
    case TAG_COPIER_SOCKET: /* the target says nothing: it has gone */
        pdd_fail_copier(port, tag->owner, ECONNRESET);
        break;
    case TAG_COPIER_BELL:
        clear_bell(((struct copier *)tag->owner)->bell);
        break;
    }
}

/* One event at a time: what it closes may be what the next one would have been about. */
unsigned pdd_attend_copies(struct pdd_port *port)
{
    struct epoll_event event;
    unsigned num_done = 0;
    if (!port->copying || port->now_ns - port->copying->attended_ns < ATTEND_EVERY_NS)
        return 0;
    port->copying->attended_ns = port->now_ns;
    while (num_done < 64 && epoll_wait(port->copying->epoll, &event, 1, 0) == 1) {
        attend(port, event.data.ptr);
        num_done++;
    }
    return num_done;
}

/* Asks the other sides for their bells. False: there is something to do already. */
bool pdd_copies_may_sleep(struct pdd_port *port)
{
    bool may = true;
    if (!port->copying)
        return true;
    for (struct link *link = port->copying->readers.next; link != &port->copying->readers; link = link->next)
        may = pdd_reader_may_sleep((struct reader *)link) && may;
    for (struct link *link = port->copying->copiers.next; link != &port->copying->copiers; link = link->next)
        may = pdd_copier_may_sleep((struct copier *)link) && may;
    return may;
}

/* The bells are not wanted any more; what woke us is looked at in this turn. */
void pdd_copies_awake(struct pdd_port *port)
{
    struct copying *copying = port->copying;
    if (!copying)
        return;
    copying->attended_ns = 0;
    for (struct link *link = copying->readers.next; link != &copying->readers; link = link->next)
        if (((struct reader *)link)->ring)
            atomic_store(&((struct reader *)link)->ring->reader_sleeps, 0);
    for (struct link *link = copying->copiers.next; link != &copying->copiers; link = link->next)
        if (((struct copier *)link)->ring)
            atomic_store(&((struct copier *)link)->ring->writer_sleeps, 0);
}
