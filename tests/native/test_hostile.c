/* The other side of a copy says and writes anything: a writer that breaks the rules to a port, and a target that does to
 * a port that writes. What it is connected to is closed, counted, and everything else goes on. */
#include "pdd_address.h"

#include "checks.h"
#include "fake_fabric.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { PAGE = 4096, ARENA = 16 * PAGE, MAX_SENT = 8 };

char check_context[128];
static uint64_t random_state = 88172645463325252ull;
static uint64_t below(uint64_t limit) { return next_random(&random_state) % limit; }
static uint64_t any_number(void) { return next_random(&random_state) >> below(64); }

struct bench {
    pdd_port *source, *target;
    uint8_t *from, *to, *guarded;
    int from_fd;
    struct pdd_memory source_memory, target_memory;
    struct target_address address;
    uint32_t peer;
};

/* ---- an honest pair ---- */
static pdd_port *open_port(void)
{
    struct pdd_options options = {.providers = "fake", .hosts = "a", .copies = 1};
    char message[256];
    pdd_port *port;
    CHECK(!pdd_open(&options, &port, message, sizeof message));
    return port;
}

static int make_memfd(uint64_t bytes, int seals)
{
    int fd = memfd_create("hostile", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(fd >= 0 && !ftruncate(fd, (off_t)bytes) && (!seals || !fcntl(fd, F_ADD_SEALS, seals)));
    return fd;
}

static void setup(struct bench *bench)
{
    memset(bench, 0, sizeof *bench);
    bench->source = open_port();
    bench->target = open_port();
    bench->from_fd = make_memfd(ARENA, F_SEAL_SHRINK);
    bench->from = mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_SHARED, bench->from_fd, 0);
    /* A page on each side that nobody may touch. */
    bench->guarded = mmap(NULL, ARENA + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    bench->to = bench->guarded + PAGE;
    CHECK(bench->from != MAP_FAILED && bench->guarded != MAP_FAILED);
    CHECK(!mprotect(bench->to, ARENA, PROT_READ | PROT_WRITE));
    CHECK(!register_host(bench->source, (uint64_t)bench->from, ARENA, bench->from_fd, &bench->source_memory));
    CHECK(!register_host(bench->target, (uint64_t)bench->to, ARENA, -1, &bench->target_memory));
    CHECK(pdd_read_address(bench->target_memory.address, bench->target_memory.address_bytes, &bench->address));
    CHECK(!pdd_add_peer(bench->source, bench->target_memory.address, bench->target_memory.address_bytes, &bench->peer));
}

static void teardown(struct bench *bench)
{
    pdd_free(bench->source);
    pdd_free(bench->target);
    munmap(bench->from, ARENA);
    munmap(bench->guarded, ARENA + 2 * PAGE);
    close(bench->from_fd);
}

static struct pdd_event next_event(pdd_port *port)
{
    struct pdd_event event;
    struct pollfd fd = {.fd = pdd_event_fd(port), .events = POLLIN};
    do
        while (!pdd_drain(port, &event, 1))
            CHECK(poll(&fd, 1, CHECK_PATIENCE_MS) == 1);
    while (event.kind == PDD_STRAY);
    return event;
}

static void submit(struct bench *bench, uint32_t peer, uint32_t imm)
{
    static const uint32_t page = 3;
    static const struct pdd_piece whole = {0, 0, PAGE};
    const struct pdd_write write = {
        .source_base = (uint64_t)bench->from,
        .source_page_bytes = PAGE,
        .target_page_bytes = PAGE,
        .peer = peer,
        .memory = bench->source_memory.memory,
        .immediate = imm,
        .num_layers = 1,
        .num_pages = 1,
        .num_pieces = 1,
        .source_pages = &page,
        .target_pages = &page,
        .pieces = &whole,
    };
    CHECK(!pdd_submit(bench->source, &write));
}

/* Others are served. */
static void probe(struct bench *bench)
{
    static uint32_t generation;
    uint32_t imm = 4000u << 20 | (++generation & 0x1fff) << 7;
    CHECK(!pdd_expect(bench->target, imm, 1));
    submit(bench, bench->peer, imm);
    struct pdd_event event = next_event(bench->source);
    CHECK(event.kind == PDD_WRITE_DONE && !event.error);
    event = next_event(bench->target);
    CHECK(event.kind == PDD_COUNT_REACHED && event.immediate == imm);
}

static struct pdd_stats stats_of(const pdd_port *port)
{
    struct pdd_stats stats;
    pdd_get_stats(port, &stats);
    return stats;
}

static uint64_t num_errors(const pdd_port *port) { return stats_of(port).num_errors; }

/* ---- a writer that breaks the rules ---- */
struct stranger {
    int socket, ring_fd, source_fd, bells[2];
    struct copy_ring *ring;
};

static void connect_stranger(const struct bench *bench, struct stranger *stranger)
{
    struct sockaddr_un address;
    uint32_t bytes;
    pdd_copying_socket_name(bench->address.name, &address, &bytes);
    stranger->socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK(!connect(stranger->socket, (struct sockaddr *)&address, bytes));
    stranger->ring_fd = make_memfd(sizeof *stranger->ring, F_SEAL_SHRINK);
    stranger->source_fd = make_memfd(ARENA, F_SEAL_SHRINK);
    stranger->ring = mmap(NULL, sizeof *stranger->ring, PROT_READ | PROT_WRITE, MAP_SHARED, stranger->ring_fd, 0);
    CHECK(stranger->ring != MAP_FAILED);
    for (int i = 0; i < 2; i++)
        stranger->bells[i] = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
}

static void leave(struct stranger *stranger)
{
    munmap(stranger->ring, sizeof *stranger->ring);
    close(stranger->socket);
    close(stranger->ring_fd);
    close(stranger->source_fd);
    close(stranger->bells[0]);
    close(stranger->bells[1]);
}

/* False: the other side has hung up. */
static bool say(struct stranger *stranger, const void *bytes, size_t num_bytes, const int *fds, uint32_t num_fds)
{
    struct iovec data = {.iov_base = (void *)bytes, .iov_len = num_bytes};
    union {
        struct cmsghdr header;
        uint8_t bytes[CMSG_SPACE(MAX_SENT * sizeof(int))];
    } control;
    struct msghdr header = {.msg_iov = &data, .msg_iovlen = 1};
    memset(&control, 0, sizeof control);
    if (num_fds) {
        header.msg_control = &control;
        header.msg_controllen = CMSG_SPACE(num_fds * sizeof(int));
        control.header.cmsg_level = SOL_SOCKET;
        control.header.cmsg_type = SCM_RIGHTS;
        control.header.cmsg_len = CMSG_LEN(num_fds * sizeof(int));
        memcpy(CMSG_DATA(&control.header), fds, num_fds * sizeof(int));
    }
    return sendmsg(stranger->socket, &header, MSG_NOSIGNAL) == (ssize_t)num_bytes;
}

static bool say_hello(const struct bench *bench, struct stranger *stranger, uint64_t length_bytes)
{
    struct copy_message hello = {.kind = COPY_HELLO, .version = COPY_VERSION, .length_bytes = length_bytes};
    const int fds[] = {stranger->ring_fd, stranger->bells[0], stranger->bells[1], stranger->source_fd};
    memcpy(hello.token, bench->address.token, sizeof hello.token);
    return say(stranger, &hello, sizeof hello, fds, 4);
}

static void expect_hung_up(struct stranger *stranger)
{
    struct pollfd fd = {.fd = stranger->socket, .events = POLLIN | POLLHUP};
    uint8_t byte;
    CHECK(poll(&fd, 1, CHECK_PATIENCE_MS) == 1);
    CHECK(recv(stranger->socket, &byte, 1, 0) <= 0);
}

static void ring_bell(struct stranger *stranger)
{
    uint64_t one = 1;
    CHECK(write(stranger->bells[0], &one, sizeof one) == sizeof one);
}

static struct copy_job good_job(void) { return (struct copy_job){.immediate = 7 << 20, .length_bytes = PAGE}; }

static void put_job(struct stranger *stranger, struct copy_job job)
{
    uint32_t tail = atomic_load(&stranger->ring->tail);
    stranger->ring->jobs[tail % COPY_JOBS] = job;
    atomic_store(&stranger->ring->tail, tail + 1);
    ring_bell(stranger);
}

static void wait_for_head(struct stranger *stranger, uint32_t head)
{
    for (int i = 0; i < CHECK_PATIENCE_MS && atomic_load(&stranger->ring->head) != head; i++)
        poll(NULL, 0, 1);
    CHECK(atomic_load(&stranger->ring->head) == head);
}

/* The one that keeps to the rules is served: what follows is refused for what it is. */
static void test_a_stranger_with_the_token_is_served(void)
{
    struct bench bench;
    struct stranger stranger;
    setup(&bench);
    connect_stranger(&bench, &stranger);
    CHECK(say_hello(&bench, &stranger, ARENA));
    for (uint32_t i = 1; i <= 3 * COPY_JOBS; i++) {
        put_job(&stranger, good_job());
        if (i % (COPY_JOBS / 4) == 0)
            wait_for_head(&stranger, i);
    }
    leave(&stranger);
    probe(&bench);
    teardown(&bench);
}

static void test_bad_jobs(void)
{
    static const uint64_t wild[] = {1, ARENA - PAGE + 1, ARENA, ~0ull, ~0ull - PAGE + 1, 1ull << 63};
    struct bench bench;
    struct stranger stranger;
    setup(&bench);
    for (int round = 0; round < 60; round++) {
        uint64_t before = num_errors(bench.target), number = below(2) ? wild[below(6)] : any_number();
        struct copy_job job = good_job();
        switch (round % 5) {
        case 0:
            job.source_offset_bytes = number < ARENA - PAGE + 1 ? ARENA : number;
            break;
        case 1:
            job.target_offset_bytes = number < ARENA - PAGE + 1 ? ARENA : number;
            break;
        case 2:
            job.length_bytes = number <= ARENA ? 0 : number;
            break;
        default:
            break;
        }
        connect_stranger(&bench, &stranger);
        CHECK(say_hello(&bench, &stranger, ARENA));
        if (round % 5 == 3)
            atomic_store(&stranger.ring->stopped, 1 + (uint32_t)any_number());
        if (round % 5 == 4)
            atomic_store(&stranger.ring->tail, COPY_JOBS + 1 + (uint32_t)below(~0u - COPY_JOBS - 1));
        put_job(&stranger, job);
        expect_hung_up(&stranger);
        CHECK(num_errors(bench.target) > before);
        leave(&stranger);
        probe(&bench);
    }
    teardown(&bench);
}

/* Everything in the ring changes while it is served. */
static void test_a_ring_of_noise(void)
{
    struct bench bench;
    struct stranger stranger;
    setup(&bench);
    for (int round = 0; round < 20; round++) {
        connect_stranger(&bench, &stranger);
        CHECK(say_hello(&bench, &stranger, ARENA));
        for (int i = 0; i < 2000; i++) {
            uint32_t at = atomic_load(&stranger.ring->tail);
            struct copy_job job = good_job();
            if (below(64) == 0)
                job.target_offset_bytes = any_number();
            stranger.ring->jobs[at % COPY_JOBS] = job;
            atomic_store(&stranger.ring->wake_at, (uint32_t)any_number());
            atomic_store(&stranger.ring->writer_sleeps, (uint32_t)below(3));
            atomic_store(&stranger.ring->reader_sleeps, (uint32_t)below(3));
            atomic_store(&stranger.ring->head, (uint32_t)any_number());
            atomic_store(&stranger.ring->tail, below(256) ? at + 1 : (uint32_t)any_number());
            ring_bell(&stranger);
        }
        probe(&bench);
        leave(&stranger);
    }
    probe(&bench);
    teardown(&bench);
}

static int bad_fd(void)
{
    int pair[2];
    switch (below(7)) {
    case 0:
        return make_memfd(ARENA, 0); /* can shrink */
    case 1:
        return make_memfd(16, F_SEAL_SHRINK);
    case 2:
        return open("/dev/null", O_RDWR | O_CLOEXEC);
    case 3:
        return eventfd(1, EFD_CLOEXEC); /* would block */
    case 4:
        return epoll_create1(EPOLL_CLOEXEC);
    case 5:
        CHECK(!pipe2(pair, O_CLOEXEC));
        close(pair[1]); /* always readable */
        return pair[0];
    default:
        return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    }
}

/* Each has something that no port says; none may leave a descriptor behind. */
static void say_something_wrong(const struct bench *bench, struct stranger *stranger, int round)
{
    struct copy_message message = {.kind = COPY_HELLO, .version = COPY_VERSION, .length_bytes = ARENA};
    int fds[MAX_SENT] = {stranger->ring_fd, stranger->bells[0], stranger->bells[1], stranger->source_fd}, bad = bad_fd();
    for (int i = 4; i < MAX_SENT; i++)
        fds[i] = bad;
    memcpy(message.token, bench->address.token, sizeof message.token);
    switch (round % 8) {
    case 0: /* more descriptors, and less */
        say(stranger, &message, sizeof message, fds, 5 + (uint32_t)below(3));
        break;
    case 1:
        say(stranger, &message, sizeof message, fds, (uint32_t)below(4));
        break;
    case 2:
        message.token[below(sizeof message.token)] ^= 1;
        say(stranger, &message, sizeof message, fds, 4);
        break;
    case 3:
        message.version++;
        say(stranger, &message, sizeof message, fds, 4);
        break;
    case 4: /* what is not a ring, not a bell, or not a source */
        fds[below(4)] = bad;
        say(stranger, &message, sizeof message, fds, 4);
        break;
    case 5: /* twice */
        say_hello(bench, stranger, ARENA);
        say_hello(bench, stranger, ARENA);
        break;
    case 6: /* longer and shorter */
        say(stranger, &message, below(2) ? sizeof message - 1 : 1, fds, 4);
        break;
    default: /* a source that is longer than it is */
        say_hello(bench, stranger, below(2) ? ARENA + 1 + any_number() : 0);
    }
    close(bad);
}

static void test_bad_messages(void)
{
    struct bench bench;
    struct stranger stranger;
    setup(&bench);
    probe(&bench);
    int num_fds = count_fds();
    for (int round = 0; round < 300; round++) {
        uint64_t before = num_errors(bench.target);
        snprintf(check_context, sizeof check_context, "round %d: ", round);
        connect_stranger(&bench, &stranger);
        say_something_wrong(&bench, &stranger, round);
        expect_hung_up(&stranger);
        CHECK(num_errors(bench.target) > before);
        leave(&stranger);
        if (round % 10 == 0)
            probe(&bench);
    }
    check_context[0] = 0;
    probe(&bench);
    CHECK(count_fds() == num_fds);
    teardown(&bench);
}

/* ---- a target that breaks the rules ---- */
/* Its address is one that says: copies are made for you here. */
static uint32_t add_hostile_peer(struct bench *bench, int *listener)
{
    struct target_address told = bench->address;
    struct sockaddr_un address;
    uint32_t bytes, peer;
    uint8_t told_bytes[1024];
    for (size_t i = 0; i < sizeof told.name; i++)
        told.name[i] = (uint8_t)below(256);
    pdd_copying_socket_name(told.name, &address, &bytes);
    *listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK(!bind(*listener, (struct sockaddr *)&address, bytes) && !listen(*listener, 4));
    int num_bytes = pdd_write_address(&told, told_bytes, sizeof told_bytes);
    CHECK(num_bytes > 0 && !pdd_add_peer(bench->source, told_bytes, (uint32_t)num_bytes, &peer));
    return peer;
}

/* Takes the hello and lets the writer in; returns the ring. */
static struct copy_ring *take_ring(int end, int *bell)
{
    struct copy_message message;
    struct iovec data = {.iov_base = &message, .iov_len = sizeof message};
    uint8_t control[256];
    struct msghdr header = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    int fds[4];
    uint64_t one = 1;
    CHECK(recvmsg(end, &header, MSG_CMSG_CLOEXEC) == sizeof message && message.kind == COPY_HELLO);
    CHECK(CMSG_FIRSTHDR(&header)->cmsg_len == CMSG_LEN(sizeof fds));
    memcpy(fds, CMSG_DATA(CMSG_FIRSTHDR(&header)), sizeof fds);
    struct copy_ring *ring = mmap(NULL, sizeof *ring, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
    CHECK(ring != MAP_FAILED);
    CHECK(ftruncate(fds[0], 0)); /* sealed: nobody takes it from under the writer */
    close(fds[0]);
    close(fds[1]);
    close(fds[3]);
    *bell = fds[2];
    atomic_store(&ring->accepted, 1);
    CHECK(write(*bell, &one, sizeof one) == sizeof one);
    return ring;
}

static void test_a_target_that_lies(void)
{
    enum { JOBS = 20 };
    struct bench bench;
    setup(&bench);
    probe(&bench);
    int num_fds = count_fds();
    for (int round = 0; round < 40; round++) {
        int listener, bell;
        uint64_t one = 1, before = num_errors(bench.source);
        uint32_t peer = add_hostile_peer(&bench, &listener);
        snprintf(check_context, sizeof check_context, "round %d: ", round);
        for (int i = 0; i < JOBS; i++)
            submit(&bench, peer, 9 << 20);
        int end = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        CHECK(end >= 0);
        struct copy_ring *ring = take_ring(end, &bell);
        while (atomic_load(&ring->tail) != JOBS)
            poll(NULL, 0, 1);
        switch (round % 4) {
        case 0: /* done is what was never asked for */
            atomic_store(&ring->head, JOBS + 1 + (uint32_t)below(~0u - JOBS - 1));
            break;
        case 1:
            CHECK(send(end, "hello", 5, MSG_NOSIGNAL) == 5);
            break;
        case 2: /* the rest is the writer's own */
            memset((void *)ring, 0xa5, sizeof *ring);
            break;
        default:
            atomic_store(&ring->head, 1 + (uint32_t)below(JOBS));
            close(end);
        }
        CHECK(write(bell, &one, sizeof one) == sizeof one);
        for (int i = 0; i < JOBS; i++)
            CHECK(next_event(bench.source).kind == PDD_WRITE_DONE);
        CHECK(round % 2 || num_errors(bench.source) > before);
        munmap(ring, sizeof *ring);
        close(bell);
        if (round % 4 != 3)
            close(end);
        close(listener);
        CHECK(!pdd_drop_peer(bench.source, peer));
        probe(&bench);
    }
    check_context[0] = 0;
    CHECK(count_fds() == num_fds);
    teardown(&bench);
}

static bool is_copied_to(struct bench *bench, uint32_t peer)
{
    struct pdd_peer_info info;
    CHECK(!pdd_get_peer(bench->source, peer, &info));
    return info.copies;
}

/* The kernel takes the connection, and the hello, for a process that hangs. */
static void test_a_target_that_never_lets_in_is_reached_over_nics(void)
{
    enum { JOBS = 20 };
    struct bench bench;
    int listener;
    setup(&bench);
    CHECK(!is_copied_to(&bench, bench.peer)); /* not tried yet */
    probe(&bench);
    CHECK(is_copied_to(&bench, bench.peer));
    uint32_t peer = add_hostile_peer(&bench, &listener);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < JOBS; i++)
            submit(&bench, peer, 9 << 20);
        CHECK(!is_copied_to(&bench, peer));
        fake_skip_ns(6 * 1000000000ull); /* as long as any silence may last */
        for (int i = 0; i < JOBS; i++) {
            struct pdd_event event = next_event(bench.source);
            CHECK(event.kind == PDD_WRITE_DONE && !event.error);
        }
    }
    CHECK(!is_copied_to(&bench, peer) && !pdd_drop_peer(bench.source, peer));
    uint64_t num_failed = stats_of(bench.source).num_failed_copiers;
    CHECK(num_failed && stats_of(bench.source).num_failed_paths == num_failed);
    probe(&bench);
    close(listener);
    CHECK(!pdd_release(bench.target, bench.target_memory.memory)); /* idle, it leaves */
    for (int i = 0; i < CHECK_PATIENCE_MS && is_copied_to(&bench, bench.peer); i++)
        poll(NULL, 0, 1);
    CHECK(!is_copied_to(&bench, bench.peer) && stats_of(bench.source).num_failed_copiers == num_failed);
    submit(&bench, bench.peer, 9 << 20); /* ... and is wanted again */
    CHECK(next_event(bench.source).kind == PDD_WRITE_DONE);
    CHECK(stats_of(bench.source).num_failed_copiers == num_failed + 1);
    teardown(&bench);
}

/* ---- one memory and another ---- */
static uint8_t *add_memory(struct bench *bench, int seals, struct pdd_memory *memory)
{
    int fd = make_memfd(ARENA, seals);
    uint8_t *map = mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(map != MAP_FAILED && !register_host(bench->source, (uint64_t)map, ARENA, fd, memory));
    close(fd);
    return map;
}

static void submit_layers(struct bench *bench, uint64_t token, const struct pdd_memory *memory, uint8_t *base,
                          uint32_t num_layers)
{
    static const uint32_t pages[8] = {1, 5, 3, 9, 7, 2, 12, 10};
    static const struct pdd_piece whole = {0, 0, PAGE};
    const struct pdd_write write = {
        .token = token,
        .source_base = (uint64_t)base,
        .source_page_bytes = PAGE,
        .target_page_bytes = PAGE,
        .peer = bench->peer,
        .memory = memory->memory,
        .immediate = 9 << 20,
        .num_layers = num_layers,
        .num_pages = 8,
        .num_pieces = 1,
        .source_pages = pages,
        .target_pages = pages,
        .pieces = &whole,
    };
    CHECK(!pdd_submit(bench->source, &write));
}

/* What the target cannot map it gets over NICs, and copies of the rest go on. */
static void test_a_memory_that_can_shrink_harms_no_other(void)
{
    struct bench bench;
    struct pdd_memory other;
    setup(&bench);
    probe(&bench);
    uint8_t *map = add_memory(&bench, 0, &other);
    for (uint64_t i = 0; i < 400; i++)
        submit_layers(&bench, i, i == 200 ? &other : &bench.source_memory, i == 200 ? map : bench.from, 1);
    for (int i = 0; i < 400; i++) {
        struct pdd_event event = next_event(bench.source);
        CHECK(event.kind == PDD_WRITE_DONE && (!event.error || event.token == 200));
    }
    CHECK(is_copied_to(&bench, bench.peer));
    probe(&bench);
    munmap(map, ARENA);
    teardown(&bench);
}

static void test_a_memory_that_is_released_ends_its_own_copies_only(void)
{
    enum { LAYERS = 20000 };
    struct bench bench;
    struct pdd_memory other;
    setup(&bench);
    probe(&bench);
    uint8_t *map = add_memory(&bench, F_SEAL_SHRINK, &other);
    submit_layers(&bench, 1, &other, map, 1);
    CHECK(!next_event(bench.source).error);
    submit_layers(&bench, 2, &bench.source_memory, bench.from, LAYERS);
    submit_layers(&bench, 3, &other, map, LAYERS);
    poll(NULL, 0, 2);
    CHECK(!pdd_release(bench.source, other.memory));
    for (int i = 0; i < 2; i++) {
        struct pdd_event event = next_event(bench.source);
        CHECK(event.kind == PDD_WRITE_DONE && (event.token == 3 || (!event.error && event.num_pieces == 8 * LAYERS)));
    }
    munmap(map, ARENA);
    teardown(&bench);
}

/* ---- strangers that wait ---- */
static void test_whoever_says_nothing_is_hung_up_on(void)
{
    struct bench bench;
    struct stranger silent, next;
    setup(&bench);
    connect_stranger(&bench, &silent);
    probe(&bench); /* it has been accepted by now, and may stay for a while */
    fake_skip_ns(6 * 1000000000ull);
    connect_stranger(&bench, &next);
    expect_hung_up(&silent);
    CHECK(say_hello(&bench, &next, ARENA));
    put_job(&next, good_job());
    wait_for_head(&next, 1);
    leave(&silent);
    leave(&next);
    teardown(&bench);
}

/* Without a descriptor for whoever has come, the port sleeps all the same. */
static void test_a_connection_that_cannot_be_accepted_costs_nothing(void)
{
    struct bench bench;
    struct rlimit before, none;
    struct sockaddr_un address;
    uint32_t bytes;
    setup(&bench);
    probe(&bench);
    pdd_copying_socket_name(bench.address.name, &address, &bytes);
    int end = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), first_free = dup(end);
    close(first_free);
    CHECK(!getrlimit(RLIMIT_NOFILE, &before));
    none = (struct rlimit){.rlim_cur = (rlim_t)first_free, .rlim_max = before.rlim_max};
    CHECK(!setrlimit(RLIMIT_NOFILE, &none));
    uint64_t num_wakeups = stats_of(bench.target).num_wakeups;
    CHECK(!connect(end, (struct sockaddr *)&address, bytes));
    poll(NULL, 0, 200);
    CHECK(stats_of(bench.target).num_wakeups - num_wakeups < 100);
    CHECK(!setrlimit(RLIMIT_NOFILE, &before));
    close(end);
    probe(&bench);
    teardown(&bench);
}

int main(void)
{
    fake_start(2, (struct fake_odds){0});
    test_a_stranger_with_the_token_is_served();
    test_bad_jobs();
    test_a_ring_of_noise();
    test_bad_messages();
    test_a_target_that_lies();
    test_a_target_that_never_lets_in_is_reached_over_nics();
    test_a_memory_that_can_shrink_harms_no_other();
    test_a_memory_that_is_released_ends_its_own_copies_only();
    test_whoever_says_nothing_is_hung_up_on();
    test_a_connection_that_cannot_be_accepted_costs_nothing();
    CHECK(!fake_num_open());
    puts("ok");
    return 0;
}
