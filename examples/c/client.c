/* A client in C, without gRPC and without a protobuf library. It follows docs/protocol.md, on the host driver.
 *
 *   cc -std=gnu11 -O2 -o client client.c
 *   ./client ENDPOINT          (the directory of a tenant: <runtime>/host/tenants/default)
 *
 * It opens a session, registers a model, borrows 130 pages, writes to them, publishes a segment, attaches it, reads it,
 * releases everything and says Goodbye. Every call waits for its answer, so there is one call in flight at a time. */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { MAX_FRAME = 65536, MAX_DESCRIPTORS = 64, PAGES = 130 };

/* The fields of Frame, in handoff.proto. */
enum { HELLO = 2, ALLOCATE = 3, RELEASE = 4, ACK = 6, GOODBYE = 7, CREATE_SEGMENT = 8, SEAL_SEGMENT = 9,
       ATTACH_SEGMENT = 10, DETACH_SEGMENT = 11, DELETE_SEGMENT = 12, ACKNOWLEDGED = 14, REGISTER_MODEL = 16,
       WELCOME = 20, DELIVERY = 21, REPLY = 22 };

static void fail(const char *what)
{
    fprintf(stderr, "client: %s\n", what);
    exit(1); /* The kernel closes and unmaps everything; the broker sees the process end. */
}

/* --- protobuf: writing --- */

struct message {
    size_t size;
    uint8_t bytes[2048];
};

static void put_byte(struct message *to, uint8_t byte)
{
    if (to->size == sizeof to->bytes)
        fail("a message is too long for this example");
    to->bytes[to->size++] = byte;
}

static void put_varint(struct message *to, uint64_t value)
{
    for (; value > 127; value >>= 7)
        put_byte(to, (uint8_t)(value | 128));
    put_byte(to, (uint8_t)value);
}

static void put_number(struct message *to, unsigned field, uint64_t value)
{
    put_varint(to, (uint64_t)field << 3);
    put_varint(to, value);
}

static void put_bytes(struct message *to, unsigned field, const void *bytes, size_t size)
{
    put_varint(to, (uint64_t)field << 3 | 2);
    put_varint(to, size);
    for (size_t i = 0; i < size; i++)
        put_byte(to, ((const uint8_t *)bytes)[i]);
}

static void put_text(struct message *to, unsigned field, const char *text)
{
    put_bytes(to, field, text, strlen(text));
}

/* --- protobuf: reading --- */

struct slice {
    const uint8_t *at, *end;
};

static uint64_t get_varint(struct slice *from)
{
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
        if (from->at == from->end)
            break;
        uint8_t byte = *from->at++;
        value |= (uint64_t)(byte & 127) << shift;
        if (byte < 128)
            return value;
    }
    fail("the broker sent a malformed message");
    return 0;
}

/* Take the next field: a number into *number, or bytes into *bytes. Return its field number, 0 at the end. */
static unsigned get_field(struct slice *from, uint64_t *number, struct slice *bytes)
{
    if (from->at == from->end)
        return 0;
    uint64_t key = get_varint(from), skipped = key % 8 == 1 ? 8 : key % 8 == 5 ? 4 : 0;
    *number = 0;
    *bytes = (struct slice){NULL, NULL};
    if (key % 8 == 0) {
        *number = get_varint(from);
    } else {
        uint64_t size = key % 8 == 2 ? get_varint(from) : skipped;
        if (size > (uint64_t)(from->end - from->at) || (key % 8 != 2 && !skipped))
            fail("the broker sent a malformed message");
        *bytes = (struct slice){from->at, from->at + size};
        from->at += size;
    }
    return (unsigned)(key >> 3);
}

/* Find one field of a message. Return 0 if it is missing: then it has its default. */
static int find(struct slice message, unsigned field, uint64_t *number, struct slice *bytes)
{
    uint64_t value;
    struct slice content;
    int found = 0;
    for (unsigned one; (one = get_field(&message, &value, &content));)
        if (one == field) {
            *number = value;
            *bytes = content;
            found = 1;
        }
    return found;
}

static uint64_t number_in(struct slice message, unsigned field)
{
    uint64_t number = 0;
    struct slice bytes;
    return find(message, field, &number, &bytes) ? number : 0;
}

static struct slice message_in(struct slice message, unsigned field)
{
    uint64_t number;
    struct slice bytes = {NULL, NULL};
    find(message, field, &number, &bytes);
    return bytes;
}

static void text_in(struct slice message, unsigned field, char *text, size_t room)
{
    struct slice bytes = message_in(message, field);
    size_t size = (size_t)(bytes.end - bytes.at);
    if (size >= room)
        fail("the broker sent a text that is too long");
    if (size)
        memcpy(text, bytes.at, size);
    text[size] = 0;
}

/* --- frames --- */

struct broker {
    int socket;
    uint64_t request_id, taken; /* The last request, and how many Deliveries were taken on this connection. */
    uint8_t frame[MAX_FRAME];
    int descriptors[MAX_DESCRIPTORS]; /* Those that came with the frame. */
    size_t count;
};

static void send_frame(struct broker *broker, unsigned kind, const struct message *body)
{
    struct message frame = {0};
    put_number(&frame, 1, broker->request_id);
    if (broker->taken)
        put_number(&frame, ACKNOWLEDGED, broker->taken);
    put_bytes(&frame, kind, body->bytes, body->size);
    if (send(broker->socket, frame.bytes, frame.size, MSG_NOSIGNAL) < 0)
        perror("client: send"); /* The broker may have said why: the next receive tells. */
}

/* Receive one frame and its descriptors, and return its content; *kind is 0 if the kind is unknown. */
static struct slice receive_frame(struct broker *broker, unsigned *kind)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(MAX_DESCRIPTORS * sizeof(int))];
    } control;
    struct iovec buffer = {broker->frame, sizeof broker->frame};
    struct msghdr packet = {.msg_iov = &buffer, .msg_iovlen = 1, .msg_control = &control,
                            .msg_controllen = sizeof control};
    ssize_t size;
    do
        size = recvmsg(broker->socket, &packet, MSG_CMSG_CLOEXEC);
    while (size < 0 && errno == EINTR); /* With a timeout, a stop and `fg` end the wait. */
    if (size < 0)
        perror("client: recvmsg");
    if (size <= 0)
        fail("the broker is gone");
    broker->count = 0;
    for (struct cmsghdr *one = CMSG_FIRSTHDR(&packet); one; one = CMSG_NXTHDR(&packet, one))
        if (one->cmsg_level == SOL_SOCKET && one->cmsg_type == SCM_RIGHTS) {
            broker->count = (one->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            memcpy(broker->descriptors, CMSG_DATA(one), broker->count * sizeof(int));
        }
    if (packet.msg_flags & (MSG_TRUNC | MSG_CTRUNC))
        fail("a packet was cut: this process has no descriptor left, or the peer is not a broker");
    struct slice frame = {broker->frame, broker->frame + size}, content;
    uint64_t number;
    for (*kind = WELCOME; *kind <= REPLY; (*kind)++)
        if (find(frame, *kind, &number, &content))
            return content;
    *kind = 0;
    return frame;
}

/* Return the result of a Reply, from the expected field. A refusal ends the program with its message. */
static struct slice result_of(struct slice reply, unsigned expected)
{
    uint64_t number;
    struct slice result;
    char sentence[4096];
    if (find(reply, 1, &number, &result)) { /* google.rpc.Status: 1 code, 2 message, 3 details */
        text_in(result, 2, sentence, sizeof sentence);
        fail(sentence);
    }
    if (!find(reply, expected, &number, &result))
        fail("the broker answered something else");
    return result;
}

/* --- calls --- */

/* A call that brings no descriptors. */
static struct slice call(struct broker *broker, unsigned kind, const struct message *request, unsigned expected)
{
    unsigned answer;
    broker->request_id++;
    send_frame(broker, kind, request);
    struct slice content = receive_frame(broker, &answer);
    if (answer != REPLY)
        fail("a Reply was expected");
    return result_of(content, expected);
}

/* What a call brings: extents, mapped side by side into one range of addresses. */
struct memory {
    uint8_t *base;
    size_t bytes, mapped, extents;
    uint64_t ids[PAGES], generation;
};

/* Map the descriptors of one Delivery, and close them. Only then the Delivery is taken. */
static void take(struct broker *broker, struct slice delivery, struct memory *memory, int access)
{
    uint64_t size = number_in(delivery, 3), id;
    struct slice ids = message_in(delivery, 4);
    if (!memory->base) { /* The first Delivery: for a segment it has the size. */
        if (number_in(delivery, 7))
            memory->bytes = number_in(delivery, 7);
        memory->base = mmap(NULL, memory->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory->base == MAP_FAILED)
            fail("no addresses are left");
    }
    memory->generation = number_in(delivery, 5);
    for (size_t i = 0; i < broker->count; i++) {
        id = get_varint(&ids);
        if (size > memory->bytes - memory->mapped || memory->extents == PAGES)
            fail("the broker sent more than was asked for");
        if (mmap(memory->base + memory->mapped, size, access, MAP_SHARED | MAP_FIXED, broker->descriptors[i], 0)
            == MAP_FAILED)
            fail("an extent cannot be mapped");
        close(broker->descriptors[i]);
        memory->ids[memory->extents++] = id;
        memory->mapped += size;
    }
    broker->taken++;
}

/* A call that brings descriptors. The next frame says what was taken; only a call that goes on needs an Ack for that. */
static struct slice borrow(struct broker *broker, unsigned kind, const struct message *request, unsigned expected,
                           struct memory *memory, int access)
{
    struct message nothing = {0};
    struct slice content, reply;
    uint64_t number;
    unsigned answer;
    broker->request_id++;
    send_frame(broker, kind, request);
    for (;;) {
        content = receive_frame(broker, &answer);
        if (answer == REPLY)
            return result_of(content, expected);
        if (answer != DELIVERY)
            fail("a Delivery was expected");
        take(broker, content, memory, access);
        if (find(content, 6, &number, &reply)) /* The last Delivery of a call that succeeded has its Reply. */
            return result_of(reply, expected);
        send_frame(broker, ACK, &nothing);
    }
}

static void unmap(struct memory *memory)
{
    if (munmap(memory->base, memory->bytes))
        fail("munmap");
}

/* --- the program --- */

static void enter(struct broker *broker, const char *endpoint, uint64_t *granularity)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct message hello = {0};
    unsigned kind;
    char text[256], driver[64];
    if ((size_t)snprintf(address.sun_path, sizeof address.sun_path, "%s/handoff.sock", endpoint)
        >= sizeof address.sun_path)
        fail("the path of the endpoint is too long");
    broker->socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    struct timeval patience = {.tv_sec = 5}; /* For the Welcome. */
    setsockopt(broker->socket, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (connect(broker->socket, (struct sockaddr *)&address, sizeof address)) {
        perror(address.sun_path);
        fail("no broker");
    }
    broker->request_id = 1;
    put_number(&hello, 1, 1); /* protocol_version */
    put_text(&hello, 3, "C example");
    send_frame(broker, HELLO, &hello);
    struct slice welcome = receive_frame(broker, &kind);
    if (kind == REPLY)
        result_of(welcome, 0);
    if (kind != WELCOME || broker->count != 1)
        fail("a Welcome with one descriptor was expected");
    close(broker->descriptors[0]); /* The socket of notices: this program does not want them. */
    if (!number_in(welcome, 10))
        fail("this broker is too old: it knows neither register_model nor acknowledged");
    *granularity = number_in(welcome, 6);
    text_in(welcome, 3, text, sizeof text);
    text_in(welcome, 5, driver, sizeof driver);
    if (strcmp(driver, "host"))
        fail("this example maps memory of the host driver only");
    struct timeval forever = {0};
    setsockopt(broker->socket, SOL_SOCKET, SO_RCVTIMEO, &forever, sizeof forever);
    printf("welcome: %s on %s, granularity %llu\n", text, driver, (unsigned long long)*granularity);
}

static void borrow_pages(struct broker *broker, const char *model, uint64_t granularity)
{
    struct memory memory = {.bytes = PAGES * granularity};
    struct message request = {0}, ids = {0}, release = {0};
    put_text(&request, 2, model);
    put_number(&request, 4, granularity);
    put_number(&request, 5, PAGES);
    borrow(broker, ALLOCATE, &request, 2, &memory, PROT_READ | PROT_WRITE);
    for (size_t page = 0; page < memory.extents; page++)
        memset(memory.base + page * granularity, (int)page, 4096);
    printf("borrowed %zu pages, the last one reads %d\n", memory.extents, memory.base[129 * granularity + 4095]);
    unmap(&memory); /* First: a release promises that nothing is mapped any more. */
    for (size_t i = 0; i < memory.extents; i++)
        put_varint(&ids, memory.ids[i]);
    put_bytes(&release, 2, ids.bytes, ids.size);
    struct slice released = call(broker, RELEASE, &release, 3);
    printf("released %llu bytes\n", (unsigned long long)number_in(released, 1));
}

static void share_segment(struct broker *broker, const char *model, uint64_t granularity)
{
    struct memory written = {0}, read = {0};
    struct message create = {0}, seal = {0}, attach = {0}, detach = {0}, destroy = {0};
    char name[512];
    put_text(&create, 2, model);
    put_text(&create, 3, "greeting");
    put_number(&create, 5, 2 * granularity);
    struct slice segment = borrow(broker, CREATE_SEGMENT, &create, 6, &written, PROT_READ | PROT_WRITE);
    text_in(segment, 1, name, sizeof name);
    strcpy((char *)written.base, "hello from C");
    mprotect(written.base, written.bytes, PROT_READ); /* No process writes to it after the seal. */
    put_number(&seal, 2, written.generation);
    call(broker, SEAL_SEGMENT, &seal, 6);
    put_text(&attach, 2, name);
    borrow(broker, ATTACH_SEGMENT, &attach, 6, &read, PROT_READ);
    printf("segment %s: %zu bytes, reads \"%s\"\n", name, read.bytes, (char *)read.base);
    unmap(&read);
    unmap(&written);
    put_number(&detach, 2, written.generation);
    for (int hold = 0; hold < 2; hold++) /* The create is one, the attach another. */
        call(broker, DETACH_SEGMENT, &detach, 7);
    put_text(&destroy, 2, name);
    call(broker, DELETE_SEGMENT, &destroy, 6);
}

int main(int count, char **arguments)
{
    static struct broker broker;
    struct message request = {0}, nothing = {0};
    uint64_t granularity;
    char model[512];
    if (count != 2) {
        fprintf(stderr, "usage: %s ENDPOINT     (see the top of client.c)\n", arguments[0]);
        return 2;
    }
    enter(&broker, arguments[1], &granularity);
    put_text(&request, 2, "from-c");
    text_in(call(&broker, REGISTER_MODEL, &request, 9), 1, model, sizeof model);
    printf("registered %s\n", model);
    borrow_pages(&broker, model, granularity);
    share_segment(&broker, model, granularity);
    call(&broker, GOODBYE, &nothing, 5);
    printf("last answer: goodbye\n");
    close(broker.socket);
    return 0;
}
