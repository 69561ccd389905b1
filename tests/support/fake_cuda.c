/* GPUs without a GPU: the part of libcuda and NVML that membroker calls, over memfds.
 *
 * Built into libcuda.so.1 and libnvidia-ml.so.1 and found through LD_LIBRARY_PATH, so that the real CudaDriver
 * runs on the real cuda-bindings. Both libraries tell one truth and keep none: they look into /proc for who holds
 * a memfd named after this card, so a death in any process shows by itself (a queued packet does not). CUDA's
 * rules are refused with CUDA's numbers. It must never be kinder than a GPU.
 *
 * FAKE_CUDA_CARD names the card (one for each test run), FAKE_CUDA_DEVICES says how many there are (1, or 2, which reach
 * each other), FAKE_CUDA_INIT is what cuInit returns, FAKE_CUDA_LACKS a device attribute that is 0 ("89", or "89@1" for
 * device 1 alone), FAKE_CUDA_MIG makes the first a slice, FAKE_CUDA_VERSION is the driver's. FAKE_CUDA_FAULTS names a
 * file, which may change at any time: each of its lines is a function and what it returns. fake_cuda_contexts(),
 * fake_cuda_rdma() and fake_cuda_asked() tell a test what was asked for.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef unsigned long long u64;
enum {
    OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, NO_CONTEXT = 201, INVALID_DEVICE = 101, INVALID_HANDLE = 400, NOT_FOUND = 500, FAULT = 700,
    NOT_SUPPORTED = 801
};
#define MAX_DEVICES 2
#define GRANULE (2ull << 20)
#define TOTAL (16ull << 30)
#define MAX_RANGES 4096
#define MAX_HELD 4096

struct location { int type, id; };
struct properties { int type, handle_types; struct location location; void *unused; unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; };
struct grant { struct location location; int flags; };
/* What is retained from a mapping has no descriptor, but a mapping of its own that nobody sees. */
struct extent { int fd, imported; u64 size; void *alias; };
struct range { u64 address, size; int flags[MAX_DEVICES]; };
struct table { struct range rows[MAX_RANGES]; int count; };
struct held { u64 inode, size; int pid; };

static struct table reservations, mappings;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int contexts, last_rdma, nvml_users;
/* A context is a pointer to its device's place here, which says whether it has faulted. */
static char the_contexts[MAX_DEVICES];
static __thread char *current_context, *context_below;

#define LOCKED(body) do { pthread_mutex_lock(&lock); int result_ = (body); pthread_mutex_unlock(&lock); return result_; } while (0)

int fake_cuda_contexts(void) { return contexts; }
int fake_cuda_rdma(void) { return last_rdma; }

/* What the file of faults says of a call, or OK. Without the file there are no faults. */
static int fault(const char *call) {
    const char *path = getenv("FAKE_CUDA_FAULTS");
    FILE *file = path ? fopen(path, "re") : NULL;
    char name[64];
    int code, found = OK;
    while (file && !found && fscanf(file, "%63s %d", name, &code) == 2)
        if (!strcmp(name, call)) found = code;
    if (file) fclose(file);
    return found;
}
#define UNLESS_FAULTY(body) do { int fault_ = fault(__func__); if (fault_) return fault_; body; } while (0)

/* What was asked about managed memory, and each wait for the card's work: a line each. */
static char asked[1 << 16];
const char *fake_cuda_asked(void) { return asked; }

static void note(const char *format, ...) {
    va_list values;
    size_t length = strlen(asked);
    va_start(values, format);
    vsnprintf(asked + length, sizeof asked - length, format, values);
    va_end(values);
}

/* The truth: who holds what, from /proc. */

static int devices(void) { const char *env = getenv("FAKE_CUDA_DEVICES"); return env ? atoi(env) : 1; }

/* The name of a device's memfds. That of device 0 begins all others. */
static const char *card(int device) {
    static __thread char name[64];
    const char *env = getenv("FAKE_CUDA_CARD");
    snprintf(name, sizeof name, device ? "fake-cuda-%s+%d" : "fake-cuda-%s", env ? env : "0", device);
    return name;
}

static int add(struct held *held, int count, int pid, u64 inode, u64 size) {
    for (int i = 0; i < count; i++)
        if (held[i].inode == inode && held[i].pid == pid) return count;
    if (count == MAX_HELD) abort();
    held[count] = (struct held){inode, size, pid};
    return count + 1;
}

/* Fill `held` with each extent of a device that some process maps or has open; `per_process` 1 lists mappings of each. */
static int look(struct held *held, int device, int per_process) {
    char path[600], line[4096], marker[80];
    int count = 0;
    snprintf(marker, sizeof marker, "/memfd:%s (", card(device));
    DIR *processes = opendir("/proc");
    for (struct dirent *process; (process = readdir(processes));) {
        if (!isdigit(process->d_name[0])) continue;
        int pid = per_process ? atoi(process->d_name) : 0;
        snprintf(path, sizeof path, "/proc/%s/maps", process->d_name);
        FILE *maps = fopen(path, "re");
        while (maps && fgets(line, sizeof line, maps)) {
            u64 first, last, inode;
            if (strstr(line, marker) && sscanf(line, "%llx-%llx %*s %*s %*s %llu", &first, &last, &inode) == 3)
                count = add(held, count, pid, inode, last - first);
        }
        if (maps) fclose(maps);
        snprintf(path, sizeof path, "/proc/%s/fd", process->d_name);
        DIR *files = per_process ? NULL : opendir(path);
        for (struct dirent *file; files && (file = readdir(files));) {
            struct stat status;
            snprintf(path, sizeof path, "/proc/%s/fd/%s", process->d_name, file->d_name);
            ssize_t length = readlink(path, line, sizeof line - 1);
            if (length < 0) continue;
            line[length] = 0;
            if (strstr(line, marker) && !stat(path, &status)) count = add(held, count, pid, status.st_ino, status.st_size);
        }
        if (files) closedir(files);
    }
    closedir(processes);
    return count;
}

static u64 used(int device) {
    static struct held held[MAX_HELD];
    u64 sum = 0;
    for (int i = look(held, device, 0); i-- > 0;) sum += held[i].size;
    return sum;
}

/* Ranges of addresses. */

static struct range *overlap(struct table *table, u64 address, u64 size) {
    for (int i = 0; i < table->count; i++) {
        struct range *row = &table->rows[i];
        if (address < row->address + row->size && row->address < address + size) return row;
    }
    return NULL;
}

static void drop(struct table *table, struct range *row) { *row = table->rows[--table->count]; }

/* Say whether whole mappings fill the range, side by side. */
static int whole(u64 address, u64 size) {
    for (u64 at = address; at < address + size;) {
        struct range *row = overlap(&mappings, at, 1);
        if (!row || row->address != at || at + row->size > address + size) return 0;
        at += row->size;
    }
    return size > 0;
}

/* libcuda: the device. */

int cuInit(unsigned flags) { const char *code = getenv("FAKE_CUDA_INIT"); return code ? atoi(code) : OK; }
static int driver_version(void) { const char *text = getenv("FAKE_CUDA_VERSION"); return text ? atoi(text) : 13000; }

int cuDriverGetVersion(int *version) { *version = driver_version(); return OK; }
int cuDeviceGetCount(int *count) { *count = devices(); return OK; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal >= 0 && ordinal < devices() ? OK : INVALID_DEVICE; }
int cuDeviceGetUuid(char *uuid, int device) { memcpy(uuid, "fake-cuda-card-0", 16); uuid[15] += device; return OK; }

static int lacks(int attribute, int device) {
    const char *lack = getenv("FAKE_CUDA_LACKS"), *only = lack ? strchr(lack, '@') : NULL;
    return lack && atoi(lack) == attribute && (!only || atoi(only + 1) == device);
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = lacks(attribute, device) ? 0 : attribute == 134 ? -1 : 1;
    return device >= 0 && device < devices() ? OK : INVALID_DEVICE;
}

int cuGetErrorName(int code, const char **name) {
    *name = code == OK ? "CUDA_SUCCESS" : code == INVALID ? "CUDA_ERROR_INVALID_VALUE" : code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
        : code == NO_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT" : code == INVALID_DEVICE ? "CUDA_ERROR_INVALID_DEVICE"
        : code == INVALID_HANDLE ? "CUDA_ERROR_INVALID_HANDLE" : code == FAULT ? "CUDA_ERROR_ILLEGAL_ADDRESS"
        : code == NOT_SUPPORTED ? "CUDA_ERROR_NOT_SUPPORTED" : code == 100 ? "CUDA_ERROR_NO_DEVICE" : NULL;
    return *name ? OK : INVALID;
}

int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &the_contexts[device]; LOCKED((contexts++, OK)); }
int cuDevicePrimaryCtxRelease(int device) { LOCKED(contexts ? (contexts--, OK) : INVALID); }
int cuCtxSetCurrent(void *context) { current_context = context; return OK; }
int cuCtxPushCurrent(void *context) { context_below = current_context; current_context = context; return OK; }
int cuCtxPopCurrent(void **context) { *context = current_context; current_context = context_below; return OK; }

/* What a card is still writing after cuMemcpyHtoD has returned, by device: it is waited for before it is unmapped. */
#define STAGED (64 << 10)
static struct range under_way[MAX_DEVICES];

static int wait_for_copies(void) {
    if (!current_context) return NO_CONTEXT;
    under_way[current_context - the_contexts].size = 0;
    return *current_context ? FAULT : OK;
}
int cuCtxSynchronize(void) { LOCKED((note("cuCtxSynchronize\n"), wait_for_copies())); }

/* libcuda: extents. */

int cuMemGetAllocationGranularity(size_t *granule, const struct properties *properties, int option) { *granule = option ? 2 * GRANULE : GRANULE; return OK; }

static int create(u64 *handle, u64 size, const struct properties *properties) {
    if (!size || size % GRANULE || properties->type != 1 || properties->handle_types != 1) return INVALID;
    /* 1 is the device and 3 a host's NUMA node, which must be given as one. */
    int device = properties->location.type == 1 ? properties->location.id : 0;
    if ((properties->location.type != 1 && properties->location.type != 3) || device < 0 || device >= devices()) return INVALID;
    if (size > TOTAL || used(device) + size > TOTAL) return OUT_OF_MEMORY;
    int fd = memfd_create(card(device), MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, size)) return OUT_OF_MEMORY;
    struct extent *extent = malloc(sizeof *extent);
    *extent = (struct extent){fd, 0, size, NULL};
    last_rdma = properties->rdma;
    *handle = (u64)extent;
    return OK;
}
int cuMemCreate(u64 *handle, size_t size, const struct properties *properties, u64 flags) { UNLESS_FAULTY(LOCKED(create(handle, size, properties))); }

int cuMemGetInfo(size_t *free, size_t *total) {
    if (!current_context) return NO_CONTEXT;
    UNLESS_FAULTY(LOCKED((*total = TOTAL, *free = TOTAL - used(current_context - the_contexts), OK)));
}

int cuMemRelease(u64 handle) {
    struct extent *extent = (struct extent *)handle;
    if (extent->alias) munmap(extent->alias, extent->size); else close(extent->fd);
    free(extent);
    return OK;
}

int cuMemExportToShareableHandle(void *descriptor, u64 handle, int type, u64 flags) {
    struct extent *extent = (struct extent *)handle;
    if (extent->imported) return INVALID;
    *(int *)descriptor = fcntl(extent->fd, F_DUPFD_CLOEXEC, 0);
    return OK;
}

int cuMemImportFromShareableHandle(u64 *handle, void *descriptor, int type) {
    char path[64], name[128] = "";
    struct stat status;
    snprintf(path, sizeof path, "/proc/self/fd/%d", (int)(long)descriptor);
    if (readlink(path, name, sizeof name - 1) < 0 || !strstr(name, card(0)) || fstat((int)(long)descriptor, &status)) return INVALID;
    struct extent *extent = malloc(sizeof *extent);
    *extent = (struct extent){fcntl((int)(long)descriptor, F_DUPFD_CLOEXEC, 0), 1, status.st_size, NULL};
    *handle = (u64)extent;
    return OK;
}

/* libcuda: addresses. */

static int reserve(u64 *address, u64 size, u64 alignment) {
    u64 step = alignment > GRANULE ? alignment : GRANULE;
    if (!size || size % GRANULE || step & (step - 1) || reservations.count == MAX_RANGES) return INVALID;
    void *start = mmap(NULL, size + step, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return OUT_OF_MEMORY;
    *address = ((u64)start + step - 1) / step * step;
    munmap(start, *address - (u64)start);
    munmap((void *)(*address + size), (u64)start + step - *address);
    reservations.rows[reservations.count++] = (struct range){*address, size, {0}};
    return OK;
}
int cuMemAddressReserve(u64 *address, size_t size, size_t alignment, u64 wanted, u64 flags) { LOCKED(reserve(address, size, alignment)); }

static int unreserve(u64 address, u64 size) {
    struct range *row = overlap(&reservations, address, 1);
    if (!row || row->address != address || row->size != size || overlap(&mappings, address, size)) return INVALID;
    munmap((void *)address, size);
    drop(&reservations, row);
    return OK;
}
int cuMemAddressFree(u64 address, size_t size) { LOCKED(unreserve(address, size)); }

static int map(u64 address, u64 size, u64 offset, struct extent *extent) {
    struct range *row = overlap(&reservations, address, 1);
    if (offset || size != extent->size) return NOT_SUPPORTED;
    if (address % GRANULE || !row || address + size > row->address + row->size || overlap(&mappings, address, size)) return INVALID;
    if (mappings.count == MAX_RANGES) return OUT_OF_MEMORY;
    if (extent->alias) {
        mremap(extent->alias, 0, size, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)address);
        mprotect((void *)address, size, PROT_NONE);
    } else
        mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, extent->fd, 0);
    mappings.rows[mappings.count++] = (struct range){address, size, {0}};
    return OK;
}
int cuMemMap(u64 address, size_t size, size_t offset, u64 handle, u64 flags) { LOCKED(map(address, size, offset, (struct extent *)handle)); }

static int retain(u64 *handle, u64 address) {
    struct range *row = overlap(&mappings, address, 1);
    if (!row) return INVALID;
    struct extent *extent = malloc(sizeof *extent);
    *extent = (struct extent){-1, 1, row->size, mremap((void *)row->address, 0, row->size, MREMAP_MAYMOVE)};
    *handle = (u64)extent;
    return OK;
}
int cuMemRetainAllocationHandle(u64 *handle, void *address) { LOCKED(retain(handle, (u64)address)); }

static int unmap(u64 address, u64 size) {
    /* Where nothing is mapped in a reservation it does nothing, as seen on an H200, driver 580.159. */
    if (overlap(&reservations, address, size) && !overlap(&mappings, address, size)) return OK;
    if (!whole(address, size)) return INVALID;
    for (int device = 0; device < MAX_DEVICES; device++) {
        struct range *copy = &under_way[device];
        if (copy->size && copy->address < address + size && address < copy->address + copy->size) the_contexts[device] = 1;
    }
    mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    for (struct range *row; (row = overlap(&mappings, address, size));) drop(&mappings, row);
    return OK;
}
int cuMemUnmap(u64 address, size_t size) { LOCKED(unmap(address, size)); }

static int set_access(u64 address, u64 size, const struct grant *grant) {
    if (!whole(address, size) || grant->location.type != 1) return INVALID;
    if (grant->location.id < 0 || grant->location.id >= devices()) return INVALID_DEVICE;
    for (u64 at = address; at < address + size;) {
        struct range *row = overlap(&mappings, at, 1);
        row->flags[grant->location.id] = grant->flags;
        /* The processor, which plays all devices, may do what any of them may (READ is 1, READ_WRITE 3). */
        int any = 0;
        for (int device = 0; device < MAX_DEVICES; device++) any |= row->flags[device];
        mprotect((void *)row->address, row->size, any == 3 ? PROT_READ | PROT_WRITE : any == 1 ? PROT_READ : PROT_NONE);
        at += row->size;
    }
    return OK;
}
int cuMemSetAccess(u64 address, size_t size, const struct grant *grant, size_t count) { LOCKED(set_access(address, size, grant)); }

static int get_access(u64 *flags, const struct location *location, u64 address) {
    struct range *row = overlap(&mappings, address, 1);
    *flags = row ? row->flags[location->id] : 0;
    return row ? OK : INVALID;
}
int cuMemGetAccess(u64 *flags, const struct location *location, u64 address) { LOCKED(get_access(flags, location, address)); }

/* Say what a copy through the current context comes to: a fault, where its device has no such access to every byte.
 * After it the context is good for nothing. */
static int touch(u64 address, u64 size, int flags) {
    if (!current_context) return NO_CONTEXT;
    if (*current_context) return FAULT;
    for (u64 at = address; at < address + size;) {
        struct range *row = overlap(&mappings, at, 1);
        if (!row || (row->flags[current_context - the_contexts] & flags) != flags) return *current_context = 1, FAULT;
        at = row->address + row->size;
    }
    return OK;
}
static int may_touch(u64 address, u64 size, int flags) { LOCKED(touch(address, size, flags)); }

int cuMemcpyHtoD(u64 to, const void *from, size_t size) {
    int result = may_touch(to, size, 3);
    if (result) return result;
    memcpy((void *)to, from, size);
    LOCKED((under_way[current_context - the_contexts] = (struct range){to, size <= STAGED ? size : 0}, OK));
}
int cuMemcpyDtoH(void *to, u64 from, size_t size) { int result = may_touch(from, size, 1); if (!result) memcpy(to, (void *)from, size); return result; }

/* libcuda: copies beside the caller. They are made when they are waited for, and no sooner. */

#define MAX_STREAMS 16
struct copy { void *to; const void *from; size_t size; };
struct stream { struct copy copies[MAX_RANGES]; int count; void *context; };
struct event { struct stream *stream; int count; void *context; };

int cuMemHostAlloc(void **address, size_t size, unsigned flags) {
    if (!current_context) return NO_CONTEXT;
    *address = size > TOTAL ? NULL : malloc(size);
    return *address ? OK : OUT_OF_MEMORY;
}
int cuMemFreeHost(void *address) { free(address); return current_context ? OK : NO_CONTEXT; }
int cuMemHostRegister(void *address, size_t size, unsigned flags) { return !current_context ? NO_CONTEXT : size > TOTAL ? OUT_OF_MEMORY : OK; }
int cuMemHostUnregister(void *address) { return current_context ? OK : NO_CONTEXT; }

static struct stream *streams[MAX_STREAMS];
static int is_stream(struct stream *stream) {
    for (int i = 0; i < MAX_STREAMS; i++) if (stream && streams[i] == stream) return 1;
    return 0;
}
static int create_stream(struct stream **stream, unsigned flags) {
    int place = 0;
    if (!current_context) return NO_CONTEXT;
    while (place < MAX_STREAMS && streams[place]) place++;
    if (flags > 1 || place == MAX_STREAMS) return INVALID;
    *stream = streams[place] = calloc(1, sizeof **stream);
    (*stream)->context = current_context;
    return OK;
}
int cuStreamCreate(struct stream **stream, unsigned flags) { LOCKED(create_stream(stream, flags)); }
int cuMemcpyAsync(u64 to, u64 from, size_t size, struct stream *stream) {
    if (!current_context) return NO_CONTEXT;
    if (stream->count == MAX_RANGES) abort();
    stream->copies[stream->count++] = (struct copy){(void *)to, (const void *)from, size};
    return OK;
}
static int play(struct stream *stream, int count) {
    for (int i = 0; i < count && i < stream->count; i++) {
        struct copy *copy = &stream->copies[i];
        memcpy(copy->to, copy->from, copy->size);
        copy->size = 0;
    }
    return OK;
}
int cuStreamSynchronize(struct stream *stream) { if (stream) return play(stream, stream->count); LOCKED(wait_for_copies()); }
static int destroy_stream(struct stream *stream) {
    for (int i = 0; i < MAX_STREAMS; i++) if (streams[i] == stream) streams[i] = NULL;
    free(stream);
    return OK;
}
int cuStreamDestroy(struct stream *stream) { LOCKED(destroy_stream(stream)); }
int cuEventCreate(struct event **event, unsigned flags) {
    if (!current_context || flags != 3) return current_context ? INVALID : NO_CONTEXT;
    *event = calloc(1, sizeof **event);
    (*event)->context = current_context;
    return OK;
}
int cuEventRecord(struct event *event, struct stream *stream) {
    if (event->context != stream->context) return INVALID_HANDLE;
    event->stream = stream, event->count = stream->count;
    return OK;
}
int cuEventSynchronize(struct event *event) { return event->stream ? play(event->stream, event->count) : OK; }
int cuEventDestroy(struct event *event) { free(event); return OK; }

/* libcuda: managed memory. Its bytes stay on the host, and the device's figure shows none of them. */

#define PAGE 4096ull
#define MAX_MANAGED 64
enum { HOST = -1, NOWHERE = -2 };
struct page { int read_mostly, preferred, prefetched; unsigned accessed_by; };
struct managed { u64 address, size; struct page *pages; };
static struct managed managed[MAX_MANAGED];

static int allocate_managed(u64 *address, u64 size, unsigned flags) {
    struct managed *row = managed;
    if (!current_context) return NO_CONTEXT;
    if (lacks(83, 0)) return NOT_SUPPORTED;
    if (!size || flags != 1) return INVALID;
    while (row < managed + MAX_MANAGED && row->size) row++;
    if (size > TOTAL || row == managed + MAX_MANAGED) return OUT_OF_MEMORY;
    u64 count = (size + PAGE - 1) / PAGE;
    void *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return OUT_OF_MEMORY;
    madvise(start, size, MADV_DONTFORK);
    *row = (struct managed){(u64)start, size, calloc(count, sizeof *row->pages)};
    for (u64 i = 0; i < count; i++) row->pages[i].preferred = row->pages[i].prefetched = NOWHERE;
    *address = row->address;
    note("cuMemAllocManaged %llu\n", size);
    return OK;
}
int cuMemAllocManaged(u64 *address, size_t size, unsigned flags) { LOCKED(allocate_managed(address, size, flags)); }

static int free_managed(u64 address) {
    if (!current_context) return NO_CONTEXT;
    for (struct managed *row = managed; row < managed + MAX_MANAGED; row++) {
        if (!row->size || row->address != address) continue;
        munmap((void *)address, row->size);
        free(row->pages);
        *row = (struct managed){0};
        note("cuMemFree\n");
        return OK;
    }
    return INVALID;
}
int cuMemFree(u64 address) { LOCKED(free_managed(address)); }

/* The pages of a range that lies in one allocation, widened to whole pages, and the range's place in it for a note. */
static struct page *pages(u64 address, u64 size, u64 *count, u64 *offset) {
    for (struct managed *row = managed; row < managed + MAX_MANAGED; row++) {
        if (!row->size || address < row->address || address - row->address >= row->size) continue;
        *offset = address - row->address;
        if (!size || size > row->size - *offset) return NULL;
        u64 first = *offset / PAGE;
        *count = (*offset + size + PAGE - 1) / PAGE - first;
        return row->pages + first;
    }
    return NULL;
}

/* The one number that CUDA 12.1 took for a location; NOWHERE for a location that is none. */
static int place(struct location location) { return location.type == 2 ? HOST : location.type == 1 ? location.id : NOWHERE; }
static int is_place(int device) { return device == HOST || (device >= 0 && device < devices() && !lacks(89, device)); }

static int advise(const char *form, u64 address, u64 size, int advice, int device) {
    u64 count, offset;
    struct page *page = pages(address, size, &count, &offset);
    int ignored = advice == 1 || advice == 2 || advice == 4;
    if (!current_context) return NO_CONTEXT;
    if (!page || advice < 1 || advice > 6) return INVALID;
    if (!ignored && !is_place(device)) return INVALID_DEVICE;
    note("%s +%llu %llu %d %d\n", form, offset, size, advice, device);
    for (unsigned bit = 1u << (device + 1); count--; page++) {
        if (advice <= 2) page->read_mostly = advice == 1;
        else if (advice <= 4) page->preferred = advice == 3 ? device : NOWHERE;
        else page->accessed_by = advice == 5 ? page->accessed_by | bit : page->accessed_by & ~bit;
    }
    return OK;
}
int cuMemAdvise(u64 address, size_t size, int advice, int device) { LOCKED(advise("cuMemAdvise", address, size, advice, device)); }
int cuMemAdvise_v2(u64 address, size_t size, int advice, struct location location) { LOCKED(advise("cuMemAdvise_v2", address, size, advice, place(location))); }

static int prefetch(const char *form, u64 address, u64 size, int device, struct stream *stream) {
    u64 count, offset;
    struct page *page = pages(address, size, &count, &offset);
    if (!current_context) return NO_CONTEXT;
    if (stream && !is_stream(stream)) return INVALID_HANDLE;
    if (!page) return INVALID;
    if (!is_place(device) || lacks(89, 0)) return INVALID_DEVICE;
    note("%s +%llu %llu %d %s\n", form, offset, size, device, stream ? "stream" : "default");
    while (count--) page++->prefetched = device;
    return OK;
}
int cuMemPrefetchAsync(u64 address, size_t size, int device, struct stream *stream) { LOCKED(prefetch("cuMemPrefetchAsync", address, size, device, stream)); }
int cuMemPrefetchAsync_v2(u64 address, size_t size, struct location location, unsigned flags, struct stream *stream) {
    LOCKED(flags ? INVALID : prefetch("cuMemPrefetchAsync_v2", address, size, place(location), stream));
}

static int range_attribute(int *data, size_t size, int attribute, u64 address, u64 length) {
    u64 count, offset;
    struct page *page = pages(address, length, &count, &offset), all;
    if (!page || attribute < 1 || attribute > 4 || !size || size % sizeof *data) return INVALID;
    for (all = *page; count--; page++) {
        all.read_mostly &= page->read_mostly;
        all.accessed_by &= page->accessed_by;
        if (all.preferred != page->preferred) all.preferred = NOWHERE;
        if (all.prefetched != page->prefetched) all.prefetched = NOWHERE;
    }
    if (attribute == 1) *data = all.read_mostly;
    if (attribute == 2) *data = all.preferred;
    if (attribute == 4) *data = all.prefetched;
    for (int device = HOST; attribute == 3 && size; device++) {
        if (device < devices() && !(all.accessed_by & 1u << (device + 1))) continue;
        *data++ = device < devices() ? device : NOWHERE;
        size -= sizeof *data;
    }
    return OK;
}
int cuMemRangeGetAttribute(void *data, size_t size, int attribute, u64 address, size_t length) { LOCKED(range_attribute(data, size, attribute, address, length)); }

/* Suspending processes: the states of the pids that were named, 0 running, 1 locked, 2 suspended. Nothing is moved. */
static struct { int pid, state; } guests[16];

static int move(int pid, int before, int after) {
    if (pid <= 0) return 304; /* of another user */
    for (int i = 0; i < 16; i++) {
        if (!guests[i].pid) guests[i].pid = pid;
        if (guests[i].pid != pid) continue;
        if (guests[i].state != before) return 401;
        guests[i].state = after;
        return OK;
    }
    return 304;
}

struct lock { unsigned milliseconds, reserved0; u64 reserved1[7]; };
int cuCheckpointProcessLock(int pid, struct lock *lock) { return lock && lock->milliseconds == 1500 ? move(pid, 0, 1) : 1; }
int cuCheckpointProcessCheckpoint(int pid, void *arguments) { return arguments ? 1 : move(pid, 1, 2); }
int cuCheckpointProcessRestore(int pid, void *arguments) { return arguments ? 1 : move(pid, 2, 1); }
int cuCheckpointProcessUnlock(int pid, void *arguments) { return arguments ? 1 : move(pid, 1, 0); }
int cuCheckpointProcessGetState(int pid, int *state) {
    for (*state = 0; *state < 3; ++*state) if (!move(pid, *state, *state)) return OK;
    return 304;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, u64 flags, int *found) {
    Dl_info self;
    dladdr((void *)cuInit, &self);
    void *library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    /* The second form of what changed in CUDA 12.2 goes by the plain name, to whoever is built for that or later. */
    char second[64];
    snprintf(second, sizeof second, "%s_v2", name);
    *function = version >= 12020 ? dlsym(library, second) : NULL;
    if (!*function) *function = dlsym(library, name);
    else if (version > driver_version()) *function = NULL;
    if (found) *found = *function ? 0 : 1;
    return *function ? OK : NOT_FOUND;
}

/* NVML. */

struct memory { u64 total, free, used; };
struct process { unsigned pid; u64 used; unsigned instance, compute; };
enum { NVML_UNINITIALIZED = 1, NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3, NVML_NOT_FOUND = 6, NVML_INSUFFICIENT_SIZE = 7, NVML_GPU_IS_LOST = 15 };
/* A card is a pointer to its device's place here. */
static char the_cards[MAX_DEVICES], the_slice;

int nvmlInitWithFlags(unsigned flags) { LOCKED((nvml_users++, OK)); }
int nvmlShutdown(void) { LOCKED(nvml_users ? (nvml_users--, OK) : NVML_UNINITIALIZED); }
const char *nvmlErrorString(int code) {
    return code == NVML_NOT_FOUND ? "Not Found" : code == NVML_NOT_SUPPORTED ? "Not Supported" : code == NVML_GPU_IS_LOST ? "GPU is lost"
        : "an error of the fake";
}
int nvmlDeviceGetName(void *device, char *name, unsigned length) { UNLESS_FAULTY({ snprintf(name, length, "Fake GPU"); return OK; }); }
int nvmlSystemGetDriverVersion(char *version, unsigned length) { UNLESS_FAULTY({ snprintf(version, length, "1.2.3"); return OK; }); }
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *slice, void **device) { *device = &the_cards[0]; return OK; }
int nvmlDeviceGetIndex(void *device, unsigned *index) {
    UNLESS_FAULTY({ *index = 3 + ((char *)device - the_cards); return device != &the_slice ? OK : NVML_INVALID_ARGUMENT; });
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    int slice = getenv("FAKE_CUDA_MIG") != NULL;
    if (!nvml_users) return NVML_UNINITIALIZED;
    /* The bytes of cuDeviceGetUuid. */
    static const char known[] = "66616b65-2d63-7564-612d-636172642d3";
    if (strlen(uuid) != 40 || strncmp(uuid + 4, known, 35) || strncmp(uuid, slice ? "MIG-" : "GPU-", 4)) return NVML_NOT_FOUND;
    int number = uuid[39] - '0';
    if (number < 0 || number >= devices()) return NVML_NOT_FOUND;
    *device = slice ? &the_slice : &the_cards[number];
    return OK;
}

static int number_of(void *device) { return device == &the_slice ? 0 : (char *)device - the_cards; }

static int memory_info(void *device, struct memory *memory) {
    if (!nvml_users) return NVML_UNINITIALIZED;
    u64 taken = used(number_of(device));
    *memory = (struct memory){TOTAL, TOTAL - taken, taken};
    return OK;
}
int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory) { UNLESS_FAULTY(LOCKED(memory_info(device, memory))); }

static int processes(void *device, unsigned *count, struct process *infos) {
    static struct held held[MAX_HELD];
    unsigned room = infos ? *count : 0, listed = 0;
    int found = look(held, number_of(device), 1);
    for (int i = 0; i < found; i++) {
        unsigned at = 0;
        while (at < listed && infos[at].pid != (unsigned)held[i].pid) at++;
        if (at == room) return *count = found, NVML_INSUFFICIENT_SIZE;
        if (at == listed) infos[listed++] = (struct process){held[i].pid, 0, 0, 0};
        infos[at].used += held[i].size;
    }
    *count = listed;
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process *infos) { UNLESS_FAULTY(LOCKED(processes(device, count, infos))); }
