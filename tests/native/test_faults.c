/* Single faults: of the provider, of a network, and of a peer that is killed with 10 000 writes under way. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "checks.h"
#include "fake_fabric.h"
#include "pdd_fabric.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <malloc.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 512, PAGES = 64, ARENA = PAGES * PAGE, MANY = 10000, FIRST_ADDRESS = 12 + 17 };

char check_context[128];

struct side {
    pdd_port *port;
    uint8_t *bytes;
    int fd;
    struct pdd_memory memory;
};

static struct side open_side(const char *provider, const char *hosts, bool copies)
{
    struct pdd_options options = {.providers = provider, .hosts = hosts, .max_writes = MANY + 1, .copies = copies};
    char message[512] = "";
    struct side side = {.fd = memfd_create("side", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
    CHECK(!ftruncate(side.fd, ARENA) && !fcntl(side.fd, F_ADD_SEALS, F_SEAL_SHRINK));
    side.bytes = mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_SHARED, side.fd, 0);
    CHECK(side.bytes != MAP_FAILED && !pdd_open(&options, &side.port, message, sizeof message));
    CHECK(!register_host(side.port, (uint64_t)side.bytes, ARENA, side.fd, &side.memory));
    return side;
}

static void close_side(struct side *side)
{
    pdd_free(side->port);
    munmap(side->bytes, ARENA);
    close(side->fd);
}

static uint32_t meet(const struct side *source, const struct pdd_memory *target)
{
    uint32_t peer;
    CHECK(!pdd_add_peer(source->port, target->address, target->address_bytes, &peer));
    return peer;
}

static void submit(const struct side *source, uint32_t peer, uint64_t token, uint32_t num_pages)
{
    static uint32_t pages[PAGES];
    static const struct pdd_piece whole = {0, 0, PAGE};
    for (uint32_t i = 0; i < PAGES; i++)
        pages[i] = i * 5 % PAGES; /* no two are neighbours */
    const struct pdd_write write = {
        .token = token,
        .source_base = (uint64_t)source->bytes,
        .source_page_bytes = PAGE,
        .target_page_bytes = PAGE,
        .peer = peer,
        .memory = source->memory.memory,
        .immediate = 3 << 20,
        .num_layers = 1,
        .num_pages = num_pages,
        .num_pieces = 1,
        .source_pages = pages,
        .target_pages = pages,
        .pieces = &whole,
    };
    CHECK(!pdd_submit(source->port, &write));
}

static struct pdd_event next_event(pdd_port *port)
{
    struct pdd_event event;
    struct pollfd fd = {.fd = pdd_event_fd(port), .events = POLLIN};
    while (!pdd_drain(port, &event, 1))
        CHECK(poll(&fd, 1, CHECK_PATIENCE_MS) == 1);
    return event;
}

/* Each of the first `number` tokens once. Returns how many ended in error. */
static uint32_t take_ends(const struct side *source, uint32_t number)
{
    bool *seen = calloc(number, sizeof *seen);
    uint32_t num_failed = 0;
    CHECK(seen);
    for (uint32_t i = 0; i < number; i++) {
        struct pdd_event event = next_event(source->port);
        CHECK(event.kind == PDD_WRITE_DONE && event.token < number && !seen[event.token]);
        seen[event.token] = true;
        num_failed += event.error != 0;
    }
    free(seen);
    return num_failed;
}

static struct pdd_stats stats_of(const struct side *side)
{
    struct pdd_stats stats;
    pdd_get_stats(side->port, &stats);
    return stats;
}

/* ---- the provider ---- */
static void test_completions_that_come_twice_are_counted(void)
{
    fake_start(1, (struct fake_odds){.twice = 1000});
    struct side source = open_side("fake", "a", false), target = open_side("fake", "a", false);
    uint32_t peer = meet(&source, &target.memory);
    for (uint32_t i = 0; i < 100; i++) {
        submit(&source, peer, 0, 1);
        CHECK(!take_ends(&source, 1));
    }
    while (fake_arrived() != 100)
        poll(NULL, 0, 1);
    CHECK(stats_of(&source).num_unknown >= 90 && !stats_of(&source).num_errors);
    close_side(&source);
    close_side(&target);
    CHECK(!fake_num_open());
}

/* Its messages are never told of again: neither a silence nor a drop may touch the writes that have ended. */
static void test_a_port_that_fails_with_messages_under_way(void)
{
    fake_start(2, (struct fake_odds){0});
    struct side source = open_side("fake", "a,b", false), target = open_side("fake", "a", false);
    uint32_t peer = meet(&source, &target.memory);
    fake_hold(true);
    for (uint32_t i = 0; i < 50; i++)
        submit(&source, peer, i, PAGES);
    while (!fake_num_under_way())
        poll(NULL, 0, 1);
    fake_break_targets();
    CHECK(!pdd_get_peer(source.port, peer, &(struct pdd_peer_info){0})); /* so that it looks */
    bool failed = false;
    for (uint32_t num_ended = 0; num_ended < 50 || !failed;) {
        struct pdd_event event = next_event(source.port);
        CHECK(event.kind == PDD_PORT_FAILED || (event.kind == PDD_WRITE_DONE && event.error));
        failed |= event.kind == PDD_PORT_FAILED;
        num_ended += event.kind == PDD_WRITE_DONE;
    }
    for (int i = 0; i < 3; i++) {
        fake_skip_ns(6 * 1000000000ull);
        submit(&source, peer, 0, 1);
        CHECK(take_ends(&source, 1) == 1);
    }
    CHECK(!pdd_drop_peer(source.port, peer));
    close_side(&source);
    close_side(&target);
    CHECK(!fake_num_open() && !fake_num_under_way());
}

/* Nothing else wakes the port than its own clock: what waits behind the messages ends with them. */
static void test_a_peer_that_falls_silent(void)
{
    fake_start(3, (struct fake_odds){0});
    struct side source = open_side("fake", "a,b", false), target = open_side("fake", "a", false);
    uint32_t peer = meet(&source, &target.memory);
    fake_hold(true);
    for (uint32_t i = 0; i < MANY; i++)
        submit(&source, peer, i, 2);
    while (!fake_num_under_way())
        poll(NULL, 0, 1);
    poll(NULL, 0, 20); /* it sleeps by now */
    fake_skip_ns(6 * 1000000000ull);
    CHECK(take_ends(&source, MANY) == MANY);
    CHECK(stats_of(&source).num_failed_paths == 2);
    fake_hold(false);
    fake_skip_ns(31 * 1000000000ull);
    submit(&source, peer, 0, PAGES);
    CHECK(!take_ends(&source, 1));
    close_side(&source);
    close_side(&target);
    CHECK(!fake_num_open());
}

/* What a path refused before its last write was cancelled is not held against it later. */
static void test_a_path_that_was_busy_before_it_was_idle(void)
{
    fake_start(6, (struct fake_odds){.busy = 1000});
    struct side source = open_side("fake", "a", false), target = open_side("fake", "a", false);
    uint32_t peer = meet(&source, &target.memory);
    submit(&source, peer, 0, PAGES);
    while (!stats_of(&source).num_busy)
        poll(NULL, 0, 1);
    CHECK(!pdd_cancel(source.port, 0) && take_ends(&source, 1) == 1);
    poll(NULL, 0, 20); /* it sleeps by now */
    fake_skip_ns(6 * 1000000000ull);
    uint64_t num_busy = stats_of(&source).num_busy;
    submit(&source, peer, 0, PAGES);
    for (int i = 0; i < CHECK_PATIENCE_MS && stats_of(&source).num_busy < num_busy + 3; i++)
        poll(NULL, 0, 1);
    fake_calm();
    CHECK(!take_ends(&source, 1) && !stats_of(&source).num_failed_paths);
    close_side(&source);
    close_side(&target);
    CHECK(!fake_num_open());
}

/* Over shm a path is never closed: what fails to be posted there must not be tried for ever. */
static void test_a_path_that_stays_open_and_takes_nothing(void)
{
    fake_start(5, (struct fake_odds){.post_error = 1000});
    fake_rename("shm");
    struct side source = open_side("shm", "a", false), target = open_side("shm", "a", false);
    uint32_t peer = meet(&source, &target.memory);
    for (uint32_t i = 0; i < 20; i++)
        submit(&source, peer, i, PAGES);
    CHECK(take_ends(&source, 20) == 20 && stats_of(&source).num_errors == 20);
    fake_calm();
    submit(&source, peer, 0, PAGES);
    CHECK(!take_ends(&source, 1));
    close_side(&source);
    close_side(&target);
    CHECK(!fake_num_open());
}

static void test_registrations_that_fail(void)
{
    fake_start(4, (struct fake_odds){0});
    struct side side = open_side("fake", "a,b,c", false);
    uint32_t num_open = fake_num_open();
    struct pdd_memory memory;
    pdd_close(side.port);
    pdd_free(side.port);
    CHECK(num_open && !fake_num_open());
    fake_start(4, (struct fake_odds){.register_error = 1000});
    char message[256];
    struct pdd_options options = {.providers = "fake", .hosts = "a,b,c", .max_writes = 1 << 21};
    CHECK(pdd_open(&options, &side.port, message, sizeof message) == -E2BIG && strstr(message, "1048576"));
    options.max_writes = 1;
    CHECK(!pdd_open(&options, &side.port, message, sizeof message));
    num_open = fake_num_open();
    for (int i = 0; i < 100; i++) {
        CHECK(register_host(side.port, (uint64_t)side.bytes, ARENA, side.fd, &memory) < 0);
        CHECK(fake_num_open() == num_open && !memory.memory && !memory.address_bytes);
    }
    close_side(&side);
}

/* Copies are a default: who cannot have them, say in a sandbox, is reached over NICs. */
static void test_a_machine_without_copies(void)
{
    static const char *const refused[] = {"fopen", "bind"};
    for (int i = 0; i < 4; i++) {
        struct side sides[2];
        int num_fds = count_fds();
        fake_start(6, (struct fake_odds){0});
        for (int k = 0; k < 2; k++) { /* once it writes, once it is written to */
            struct pdd_info info;
            bool alone = k == i / 2;
            fake_refuse(alone ? refused[i % 2] : NULL);
            sides[k] = open_side("fake", "a", true);
            pdd_get_info(sides[k].port, &info);
            CHECK(info.copies == !alone);
        }
        fake_refuse(NULL);
        submit(&sides[0], meet(&sides[0], &sides[1].memory), 0, PAGES);
        CHECK(!take_ends(&sides[0], 1) && !stats_of(&sides[1]).num_copied_bytes);
        close_side(&sides[0]);
        close_side(&sides[1]);
        CHECK(!fake_num_open() && count_fds() == num_fds);
    }
}

/* ---- the network ---- */
static int connect_to(const struct pdd_memory *memory)
{
    struct sockaddr_in address;
    memcpy(&address, memory->address + FIRST_ADDRESS, sizeof address);
    int end = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(address.sin_family == AF_INET && !connect(end, (struct sockaddr *)&address, sizeof address));
    return end;
}

/* Whoever connects to a registration and says nothing is hung up on at its release: libfabric would go on with a
 * listener that is freed. */
static void test_strangers_do_not_outlive_a_registration(void)
{
    static const uint8_t noise[64] = {3, 1, 0, 8};
    struct side source = open_side("net,tcp", "127.0.0.1", false), target = open_side("net,tcp", "127.0.0.1", false);
    for (int round = 0; round < 20; round++) {
        struct pdd_memory memory;
        uint8_t byte;
        int ends[3];
        CHECK(!register_host(target.port, (uint64_t)target.bytes, ARENA, -1, &memory));
        for (int i = 0; i < 3; i++)
            ends[i] = connect_to(&memory);
        uint32_t peer = meet(&source, &target.memory); /* served, so the strangers' connections were taken too */
        submit(&source, peer, 0, PAGES);
        CHECK(!take_ends(&source, 1));
        CHECK(!pdd_release(target.port, memory.memory));
        for (int i = 0; i < 3; i++) {
            struct pollfd fd = {.fd = ends[i], .events = POLLIN};
            CHECK(poll(&fd, 1, CHECK_PATIENCE_MS) == 1 && recv(ends[i], &byte, 1, 0) <= 0);
            send(ends[i], noise, sizeof noise, MSG_NOSIGNAL);
            close(ends[i]);
        }
        submit(&source, peer, 0, PAGES);
        CHECK(!take_ends(&source, 1));
        CHECK(!pdd_drop_peer(source.port, peer));
    }
    close_side(&source);
    close_side(&target);
}

static void wait_for_fds(int number)
{
    for (int i = 0; i < CHECK_PATIENCE_MS && count_fds() != number; i++)
        poll(NULL, 0, 1);
    CHECK(count_fds() == number);
}

/* Copies leave an EAGAIN in the progress thread's errno, which libfabric 1.17 takes for its own. */
static void test_connections_that_come_and_go_leave_nothing(void)
{
    struct side source = open_side("net,tcp", "127.0.0.1", true), target = open_side("net,tcp", "127.0.0.1", true);
    uint32_t peer = meet(&source, &target.memory);
    for (int i = 0; i < 3; i++) {
        submit(&source, peer, 0, PAGES);
        CHECK(!take_ends(&source, 1));
    }
    int num_fds = count_fds();
    for (int i = 0; i < 10; i++) {
        int end = connect_to(&target.memory);
        poll(NULL, 0, 10); /* it has been accepted */
        close(end);
        poll(NULL, 0, 10);
    }
    wait_for_fds(num_fds);
    close_side(&source);
    close_side(&target);
}

/* Half a message, and gone: libfabric 1.17 says for ever that there is something. */
static void test_a_connection_that_breaks_off_costs_no_core(void)
{
    static const uint8_t request[48] = {3};
    struct side source = open_side("net,tcp", "127.0.0.1", false), target = open_side("net,tcp", "127.0.0.1", false);
    uint32_t peer = meet(&source, &target.memory);
    for (int i = 0; i < 3; i++) {
        int end = connect_to(&target.memory);
        CHECK(send(end, request, sizeof request, MSG_NOSIGNAL) == sizeof request);
        poll(NULL, 0, 50);
        close(end);
    }
    poll(NULL, 0, 100);
    uint64_t num_wakeups = stats_of(&target).num_wakeups;
    poll(NULL, 0, 500);
    CHECK(stats_of(&target).num_wakeups - num_wakeups < 2000);
    for (int i = 0; i < 10; i++) {
        submit(&source, peer, 0, PAGES);
        CHECK(!take_ends(&source, 1));
    }
    close_side(&source);
    close_side(&target);
}

static void test_a_port_that_closes_takes_its_strangers_along(void)
{
    enum { STRANGERS = 20 };
    int num_fds = count_fds(), ends[STRANGERS];
    struct side side = open_side("net,tcp", "127.0.0.1", false), other = open_side("net,tcp", "127.0.0.1", false);
    for (int i = 0; i < STRANGERS; i++)
        ends[i] = connect_to(&side.memory);
    uint32_t peer = meet(&other, &side.memory); /* served, so the strangers' connections were taken too */
    submit(&other, peer, 0, PAGES);
    CHECK(!take_ends(&other, 1));
    close_side(&side);
    close_side(&other);
    for (int i = 0; i < STRANGERS; i++)
        close(ends[i]);
    CHECK(count_fds() == num_fds);
}

/* ---- a peer that is killed ---- */
struct child {
    pid_t pid;
    struct pdd_memory memory;
};

static const char *const BOTH = "127.0.0.1,127.0.0.2";

/* Before this process has threads. */
static int start_child(bool copies, pid_t *pid)
{
    int ends[2];
    CHECK(!pipe2(ends, O_CLOEXEC));
    *pid = fork();
    CHECK(*pid >= 0);
    if (!*pid) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        struct side side = open_side("net,tcp", BOTH, copies);
        CHECK(write(ends[1], &side.memory, sizeof side.memory) == sizeof side.memory);
        while (true)
            pause();
    }
    close(ends[1]);
    return ends[0];
}

static void stop_and_kill(pid_t pid, const struct side *source, uint32_t peer)
{
    int status;
    CHECK(!kill(pid, SIGSTOP) && waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status));
    for (uint32_t i = 0; i < MANY; i++)
        submit(source, peer, i, 4);
    CHECK(!kill(pid, SIGKILL) && waitpid(pid, &status, 0) == pid);
}

/* Writes to another, and returns how many of the lost ones have ended until that one has. */
static uint32_t serve_other(const struct side *source, uint32_t other, bool *seen)
{
    uint32_t num_ended = 0;
    submit(source, other, MANY, PAGES);
    while (true) {
        struct pdd_event event = next_event(source->port);
        CHECK(event.kind == PDD_WRITE_DONE && event.token <= MANY && !seen[event.token]);
        if (event.token == MANY) {
            CHECK(!event.error);
            return num_ended;
        }
        seen[event.token] = true;
        num_ended++;
    }
}

/* The others are served while its writes end; then nothing of it is left. Over TCP nobody says that it is gone for good:
 * its ways are given up after some seconds, which are skipped. */
static void lose_peer(const struct side *source, uint32_t other, pid_t pid, const struct pdd_memory *memory)
{
    int num_fds = count_fds(), num_tries = 0;
    uint32_t peer = meet(source, memory);
    bool *seen = calloc(MANY + 1, sizeof *seen);
    submit(source, peer, 0, PAGES);
    CHECK(seen && !take_ends(source, 1));
    stop_and_kill(pid, source, peer);
    for (uint32_t num_ended = 0; num_ended < MANY; num_tries++) {
        CHECK(num_tries < 300);
        num_ended += serve_other(source, other, seen);
        poll(NULL, 0, 20);
        fake_skip_ns(2 * 1000000000ull);
    }
    free(seen);
    CHECK(!pdd_drop_peer(source->port, peer));
    for (int i = 0; i < CHECK_PATIENCE_MS / 10 && count_fds() > num_fds; i++)
        poll(NULL, 0, 10);
    CHECK(count_fds() == num_fds);
}

static size_t heap_bytes(void)
{
#ifdef __clang__ /* with a sanitizer, which has a heap of its own and looks at its end */
    return 0;
#else
    return mallinfo2().uordblks;
#endif
}

static void test_killed_peers(bool copies, const pid_t *pids, const int *pipes, int number)
{
    struct side source = open_side("net,tcp", BOTH, copies), target = open_side("net,tcp", BOTH, copies);
    uint32_t other = meet(&source, &target.memory);
    size_t before = 0;
    submit(&source, other, 0, PAGES);
    CHECK(!take_ends(&source, 1));
    for (int i = 0; i < number; i++) {
        struct pdd_memory memory;
        CHECK(read(pipes[i], &memory, sizeof memory) == sizeof memory);
        close(pipes[i]);
        lose_peer(&source, other, pids[i], &memory);
        before = i ? before : heap_bytes();
    }
    CHECK(heap_bytes() <= before + 64 * 1024); /* libfabric forgets some bytes of each connection */
    close_side(&source);
    close_side(&target);
}

int main(void)
{
    enum { CHILDREN = 3 };
    pid_t pids[2][CHILDREN];
    int pipes[2][CHILDREN];
    for (int i = 0; i < 2 * CHILDREN; i++)
        pipes[i / CHILDREN][i % CHILDREN] = start_child(i / CHILDREN, &pids[i / CHILDREN][i % CHILDREN]);
    test_killed_peers(false, pids[0], pipes[0], CHILDREN);
    test_killed_peers(true, pids[1], pipes[1], CHILDREN);
    test_completions_that_come_twice_are_counted();
    test_a_port_that_fails_with_messages_under_way();
    test_a_peer_that_falls_silent();
    test_a_path_that_stays_open_and_takes_nothing();
    test_registrations_that_fail();
    test_a_machine_without_copies();
    test_a_path_that_was_busy_before_it_was_idle();
    test_strangers_do_not_outlive_a_registration();
    test_connections_that_come_and_go_leave_nothing();
    test_a_connection_that_breaks_off_costs_no_core();
    test_a_port_that_closes_takes_its_strangers_along();
    puts("ok");
    return 0;
}
