/* A libnvidia-ml.so.1 that tells what the file named by ZRUN_FAKE_NVML says; its format: zrun/topology/scenario.py.
   What is added to the file while a process runs is true from then on: counters grow, GPUs are lost, an xid is an event.
   With -DOLD_DRIVER it lacks functions that drivers before 2021 do not have.
   gcc -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 fake_nvml.c */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef struct { char legacy[16]; u32 domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { u64 total, free, used; } Memory;
typedef struct { u32 version; u64 total, reserved, free, used; } MemoryV2;
typedef struct { u32 pid; u64 used; u32 instance, compute; } Process;
typedef struct { u32 version; unsigned char cluster[16]; u32 status, clique; unsigned char state, pad[3]; u32 health; } Fabric;
typedef struct { u32 gpu, memory; } Rates;
typedef struct { void *device; u64 type, data; u32 instance, compute; } Event;
typedef struct { int next; u64 wanted[64]; } EventSet;
enum { OK, BAD_ARGUMENT = 2, UNSUPPORTED, NOT_FOUND = 6, TOO_SMALL, NO_DRIVER = 9, TIMEOUT, LOST = 15 };
enum { MOST = 64, LINKS = 36, SWITCH = 255, XIDS = 256, XID_EVENT = 8 };

static struct {
    int gpus, cuda, has_mig, num_fails, has_fabric, num_xids, has_ecc, has_remaps, has_slowed;
    int major[MOST], minor[MOST];
    u64 memory[MOST], used[MOST], ecc[MOST][2];
    char name[MOST][96], driver[80];
    int has_sensors[MOST], sensors[MOST][6], slowed[MOST], remap[MOST], lanes[MOST][2];
    struct { int gpu, number; } xids[XIDS];
    int node[MOST], lost[MOST], level[MOST][MOST], num_links[MOST], link[MOST][LINKS], slices[MOST];
    u64 slice_mib[MOST], cpus[MOST][64];
    u32 num_pids[MOST], pids[MOST][16], clique;
    unsigned char cluster[16];
    struct { char function[96]; int code; } fails[32];
} S;
static struct stat seen; /* of the file, when it was read */

static int numbers(const char *text, int *out, int most) {
    int count = 0;
    while (isdigit((unsigned char)*text)) {
        char *end;
        long first = strtol(text, &end, 10), last = first;
        if (*end == '-') last = strtol(end + 1, &end, 10);
        for (; first <= last && count < most; first++) out[count++] = (int)first;
        text = *end == ',' ? end + 1 : end;
    }
    return count;
}

static int level_of(const char *name) {
    static const char *names[] = {"PIX", "PXB", "PHB", "NODE", "SYS"};
    for (int i = 0; i < 5; i++) if (!strcmp(name, names[i])) return 10 * (i + 1);
    return 50;
}

static void set_name(char *out, char words[][96], int first, int n) {
    out[0] = 0;
    for (int x = first; x < n; x++) {
        if (x > first) strncat(out, " ", 95 - strlen(out));
        strncat(out, words[x], 95 - strlen(out));
    }
}

static void load(FILE *file) {
    char line[512], w[10][96];
    int a[4096], b[4096];
    memset(&S, 0, sizeof S);
    memset(S.node, -1, sizeof S.node);
    S.cuda = 12040;
    for (int x = 0; x < MOST; x++) S.major[x] = 8, strcpy(S.name[x], "GPU");
    strcpy(S.driver, "550.54.15");
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "#\n")] = 0;
        memset(w, 0, sizeof w);
        int n = sscanf(line, "%95s %95s %95s %95s %95s %95s %95s %95s %95s %95s", w[0], w[1], w[2], w[3], w[4], w[5],
                       w[6], w[7], w[8], w[9]);
        int i = atoi(w[1]), j = atoi(w[2]), k = atoi(w[3]), na = numbers(w[1], a, 4096), nb = numbers(w[2], b, 4096);
        if (n < 1) continue;
        if (!strcmp(w[0], "gpus")) S.gpus = i;
        else if (!strcmp(w[0], "driver")) strcpy(S.driver, w[1]);
        else if (!strcmp(w[0], "cuda")) S.cuda = 1000 * i + 10 * j;
        else if (!strcmp(w[0], "memory")) for (int x = 0; x < MOST; x++) S.memory[x] = (u64)i << 20;
        else if (!strcmp(w[0], "capability")) for (int x = 0; x < MOST; x++) S.major[x] = i, S.minor[x] = j;
        else if (!strcmp(w[0], "board")) for (int x = 0; x < na; x++) {
            S.memory[a[x]] = (u64)j << 20, S.major[a[x]] = k, S.minor[a[x]] = atoi(w[4]);
            set_name(S.name[a[x]], w, 5, n);
        }
        else if (!strcmp(w[0], "used")) for (int x = 0; x < na; x++) S.used[a[x]] = (u64)j << 20;
        else if (!strcmp(w[0], "sensors")) for (int x = 0; x < na; x++) {
            S.has_sensors[a[x]] = 1;
            for (int y = 0; y < 6; y++) S.sensors[a[x]][y] = atoi(w[2 + y]);
        }
        else if (!strcmp(w[0], "slowed")) for (int x = 0; x < na; x++) S.has_slowed = 1, S.slowed[a[x]] = j;
        else if (!strcmp(w[0], "ecc")) for (int x = 0; x < na; x++)
            S.has_ecc = 1, S.ecc[a[x]][0] = (u64)j, S.ecc[a[x]][1] = (u64)k;
        else if (!strcmp(w[0], "remap")) for (int x = 0; x < na; x++)
            S.has_remaps = 1, S.remap[a[x]] = w[2][0] == 'f' ? 2 : 1;
        else if (!strcmp(w[0], "pcie")) for (int x = 0; x < na; x++) S.lanes[a[x]][0] = j, S.lanes[a[x]][1] = k;
        else if (!strcmp(w[0], "xid")) for (int x = 0; x < na && S.num_xids < XIDS; x++)
            S.xids[S.num_xids].gpu = a[x], S.xids[S.num_xids++].number = j;
        else if (!strcmp(w[0], "name")) {
            set_name(S.name[0], w, 1, n);
            for (int x = 1; x < MOST; x++) strcpy(S.name[x], S.name[0]);
        } else if (!strcmp(w[0], "node")) {
            na = numbers(w[3], a, 4096);
            for (int x = 0; x < nb; x++) {
                S.node[b[x]] = i;
                for (int y = 0; y < na; y++) S.cpus[b[x]][a[y] / 64] |= 1ull << a[y] % 64;
            }
        } else if (!strcmp(w[0], "path")) {
            for (int x = 0; x < na; x++) for (int y = 0; y < nb; y++)
                S.level[a[x]][b[y]] = S.level[b[y]][a[x]] = level_of(w[3]);
        } else if (!strcmp(w[0], "link")) {
            while (k--) S.link[i][S.num_links[i]++] = j, S.link[j][S.num_links[j]++] = i;
        } else if (!strcmp(w[0], "switch")) {
            for (int x = 0; x < na; x++) for (int y = 0; y < j; y++) S.link[a[x]][S.num_links[a[x]]++] = SWITCH;
        } else if (!strcmp(w[0], "fabric")) {
            S.has_fabric = 1, S.clique = (u32)j;
            for (int x = 0; x < 16 && w[1][2 * x] && w[1][2 * x + 1]; x++) {
                u32 byte = 0;
                sscanf(w[1] + 2 * x, "%2x", &byte);
                S.cluster[x] = (unsigned char)byte;
            }
        } else if (!strcmp(w[0], "mig")) {
            for (int x = 0; x < na; x++) S.slices[a[x]] = j, S.slice_mib[a[x]] = (u64)k, S.has_mig = 1;
            for (int x = 0; x < na; x++) if (!j) S.slices[a[x]] = -1;
        } else if (!strcmp(w[0], "process")) S.pids[i][S.num_pids[i]++] = (u32)j;
        else if (!strcmp(w[0], "lost")) for (int x = 0; x < na; x++) S.lost[a[x]] = 1;
        else if (!strcmp(w[0], "fails")) {
            strcpy(S.fails[S.num_fails].function, w[1]);
            S.fails[S.num_fails++].code = j;
        }
    }
}

static int read_file(void) {
    const char *path = getenv("ZRUN_FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) return NO_DRIVER;
    stat(path, &seen);
    load(file);
    fclose(file);
    return OK;
}

/* Read the file again if it was written to. */
static void refresh(void) {
    struct stat now;
    const char *path = getenv("ZRUN_FAKE_NVML");
    if (!path || stat(path, &now)) return;
    int is_same = now.st_size == seen.st_size && now.st_mtim.tv_sec == seen.st_mtim.tv_sec;
    if (!is_same || now.st_mtim.tv_nsec != seen.st_mtim.tv_nsec) read_file();
}

static int code_of(const char *function) {
    for (int i = 0; i < S.num_fails; i++) if (!strcmp(S.fails[i].function, function)) return S.fails[i].code;
    return OK;
}

/* A handle is 1 + the GPU's index, and 256 more for each slice of it. */
static int gpu_of(const void *handle) { return (int)(((size_t)handle - 1) % 256); }
static int slice_of(const void *handle) { return (int)(((size_t)handle - 1) / 256) - 1; }

#define CALL(function) do { int code = code_of(function); if (code) return code; } while (0)
#define CALL_ON(function, handle) \
    refresh(); \
    CALL(function); \
    int gpu = gpu_of(handle); \
    (void)gpu; \
    if (S.lost[gpu]) return LOST

static void fill_pci(Pci *pci, int bus) {
    memset(pci, 0, sizeof *pci);
    pci->bus = (u32)bus;
    sprintf(pci->legacy, "0000:%02X:00.0", bus);
    sprintf(pci->bus_id, "00000000:%02X:00.0", bus);
}

int nvmlInitWithFlags(u32 flags) {
    (void)flags;
    int code = read_file();
    return code ? code : code_of("nvmlInit");
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { (void)code; return "an error of the fake library"; }

int nvmlSystemGetDriverVersion(char *out, u32 size) { CALL("nvmlSystemGetDriverVersion"); snprintf(out, size, "%s", S.driver); return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { CALL("nvmlSystemGetCudaDriverVersion_v2"); *version = S.cuda; return OK; }
int nvmlDeviceGetCount_v2(u32 *count) { CALL("nvmlDeviceGetCount"); *count = (u32)S.gpus; return OK; }
int nvmlDeviceGetHandleByIndex_v2(u32 index, void **out) { CALL("nvmlDeviceGetHandleByIndex"); *out = (void *)(size_t)(index + 1); return OK; }
static void write_uuid(const void *h, char *out, u32 size) {
    if (slice_of(h) < 0) snprintf(out, size, "GPU-%08x-0000-0000-0000-000000000000", gpu_of(h));
    else snprintf(out, size, "MIG-%08x-0000-0000-0000-%012x", gpu_of(h), slice_of(h));
}
int nvmlDeviceGetUUID(void *h, char *out, u32 size) {
    CALL_ON("nvmlDeviceGetUUID", h);
    write_uuid(h, out, size);
    return OK;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
    CALL("nvmlDeviceGetHandleByUUID");
    char each[96];
    for (int gpu = 0; gpu < S.gpus; gpu++) for (int slice = 0; slice <= (S.slices[gpu] > 0 ? S.slices[gpu] : 0); slice++) {
        *out = (void *)(size_t)(1 + gpu + 256 * slice);
        write_uuid(*out, each, sizeof each);
        if (!strcmp(each, uuid)) return OK;
    }
    return NOT_FOUND;
}
int nvmlDeviceGetName(void *h, char *out, u32 size) {
    CALL_ON("nvmlDeviceGetName", h);
    if (slice_of(h) < 0) snprintf(out, size, "%s", S.name[gpu]);
    else snprintf(out, size, "%s MIG %lluMiB", S.name[gpu], S.slice_mib[gpu]);
    return OK;
}
int nvmlDeviceGetMemoryInfo(void *h, Memory *out) {
    CALL_ON("nvmlDeviceGetMemoryInfo", h);
    out->total = slice_of(h) < 0 ? S.memory[gpu] : S.slice_mib[gpu] << 20;
    out->used = slice_of(h) < 0 ? S.used[gpu] : 0;
    out->free = out->total - out->used;
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, u32 *count, Process *out) {
    CALL_ON("nvmlDeviceGetComputeRunningProcesses", h);
    u32 room = *count;
    *count = S.num_pids[gpu];
    if (room < *count || !out) return *count ? TOO_SMALL : OK;
    for (u32 i = 0; i < *count; i++) out[i] = (Process){S.pids[gpu][i], 0, 0, 0};
    return OK;
}
int nvmlDeviceGetPciInfo_v3(void *h, Pci *out) { CALL_ON("nvmlDeviceGetPciInfo", h); fill_pci(out, 0x10 + gpu); return OK; }
int nvmlDeviceGetCudaComputeCapability(void *h, int *major, int *minor) {
    CALL_ON("nvmlDeviceGetCudaComputeCapability", h);
    *major = S.major[gpu], *minor = S.minor[gpu];
    return OK;
}
int nvmlDeviceGetCpuAffinity(void *h, u32 size, u64 *out) {
    CALL_ON("nvmlDeviceGetCpuAffinity", h);
    if (S.node[gpu] < 0) return UNSUPPORTED;
    memset(out, 0, size * sizeof *out);
    memcpy(out, S.cpus[gpu], (size < 64 ? size : 64) * sizeof *out);
    return OK;
}
int nvmlDeviceGetNvLinkState(void *h, u32 link, u32 *active) {
    CALL_ON("nvmlDeviceGetNvLinkState", h);
    if (link >= (u32)S.num_links[gpu]) return S.num_links[gpu] ? BAD_ARGUMENT : UNSUPPORTED;
    *active = 1;
    return OK;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *h, u32 link, Pci *out) {
    CALL_ON("nvmlDeviceGetNvLinkRemotePciInfo", h);
    if (link >= (u32)S.num_links[gpu]) return BAD_ARGUMENT;
    fill_pci(out, S.link[gpu][link] == SWITCH ? 0xC0 + (int)link : 0x10 + S.link[gpu][link]);
    return OK;
}
int nvmlDeviceGetTopologyCommonAncestor(void *a, void *b, u32 *level) {
    CALL_ON("nvmlDeviceGetTopologyCommonAncestor", a);
    int other = gpu_of(b);
    if (S.lost[other]) return LOST;
    int same = S.node[gpu] >= 0 && S.node[gpu] == S.node[other];
    *level = (u32)(S.level[gpu][other] ? S.level[gpu][other] : same ? 40 : 50);
    return OK;
}

#define SENSOR(function, place, factor) \
    int function(void *h, u32 *out) { \
        CALL_ON(#function, h); \
        if (!S.has_sensors[gpu]) return UNSUPPORTED; \
        *out = (u32)S.sensors[gpu][place] * factor; \
        return OK; \
    }
#define SENSOR_OF(function, place) \
    int function(void *h, u32 kind, u32 *out) { \
        (void)kind; \
        CALL_ON(#function, h); \
        if (!S.has_sensors[gpu]) return UNSUPPORTED; \
        *out = (u32)S.sensors[gpu][place]; \
        return OK; \
    }
#define LANES(function, place) \
    int function(void *h, u32 *out) { \
        CALL_ON(#function, h); \
        if (!S.lanes[gpu][1]) return UNSUPPORTED; \
        *out = (u32)S.lanes[gpu][place]; \
        return OK; \
    }
SENSOR(nvmlDeviceGetPowerUsage, 1, 1000)
SENSOR(nvmlDeviceGetEnforcedPowerLimit, 2, 1000)
SENSOR_OF(nvmlDeviceGetTemperature, 0)
SENSOR_OF(nvmlDeviceGetClockInfo, 4)
SENSOR_OF(nvmlDeviceGetMaxClockInfo, 5)
LANES(nvmlDeviceGetCurrPcieLinkWidth, 0)
LANES(nvmlDeviceGetMaxPcieLinkWidth, 1)
int nvmlDeviceGetUtilizationRates(void *h, Rates *out) {
    CALL_ON("nvmlDeviceGetUtilizationRates", h);
    if (!S.has_sensors[gpu]) return UNSUPPORTED;
    out->gpu = (u32)S.sensors[gpu][3], out->memory = 0;
    return OK;
}
int nvmlDeviceGetTotalEccErrors(void *h, u32 kind, u32 counter, u64 *out) {
    (void)counter;
    CALL_ON("nvmlDeviceGetTotalEccErrors", h);
    if (!S.has_ecc) return UNSUPPORTED;
    *out = S.ecc[gpu][kind];
    return OK;
}

/* Events: an xid that is added to the file. */
int nvmlEventSetCreate(EventSet **out) {
    CALL("nvmlEventSetCreate");
    refresh();
    *out = calloc(1, sizeof **out);
    (*out)->next = S.num_xids;
    return OK;
}
int nvmlEventSetFree(EventSet *set) { free(set); return OK; }
int nvmlDeviceRegisterEvents(void *h, u64 types, EventSet *set) {
    CALL_ON("nvmlDeviceRegisterEvents", h);
    set->wanted[gpu] |= types;
    return OK;
}
int nvmlEventSetWait_v2(EventSet *set, Event *out, u32 timeout_ms) {
    CALL("nvmlEventSetWait");
    for (u32 waited = 0;; waited += 20) {
        refresh();
        while (set->next < S.num_xids) {
            int which = set->next++, gpu = S.xids[which].gpu;
            if (!(set->wanted[gpu] & XID_EVENT)) continue;
            *out = (Event){(void *)(size_t)(gpu + 1), XID_EVENT, (u64)S.xids[which].number, ~0u, ~0u};
            return OK;
        }
        if (waited >= timeout_ms) return TIMEOUT;
        nanosleep(&(struct timespec){0, 20000000}, NULL);
    }
}

#ifndef OLD_DRIVER
int nvmlDeviceGetCurrentClocksEventReasons(void *h, u64 *out) {
    CALL_ON("nvmlDeviceGetCurrentClocksEventReasons", h);
    if (!S.has_slowed) return UNSUPPORTED;
    *out = (u64)S.slowed[gpu];
    return OK;
}
int nvmlDeviceGetRemappedRows(void *h, u32 *corrected, u32 *uncorrected, u32 *pending, u32 *failed) {
    CALL_ON("nvmlDeviceGetRemappedRows", h);
    if (!S.has_remaps) return UNSUPPORTED;
    *corrected = 0, *uncorrected = S.remap[gpu] != 0, *pending = S.remap[gpu] == 1, *failed = S.remap[gpu] == 2;
    return OK;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *h, void **out) {
    CALL_ON("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", h);
    if (slice_of(h) < 0) return BAD_ARGUMENT;
    *out = (void *)(size_t)(gpu + 1);
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(void *h, MemoryV2 *out) {
    CALL_ON("nvmlDeviceGetMemoryInfo_v2", h);
    out->total = S.memory[gpu], out->used = S.used[gpu], out->reserved = 0;
    out->free = out->total - out->used;
    return OK;
}
int nvmlDeviceGetMemoryAffinity(void *h, u32 size, u64 *out, u32 scope) {
    (void)scope;
    CALL_ON("nvmlDeviceGetMemoryAffinity", h);
    if (S.node[gpu] < 0) return UNSUPPORTED;
    memset(out, 0, size * sizeof *out);
    out[S.node[gpu] / 64] = 1ull << S.node[gpu] % 64;
    return OK;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void *h, u32 link, u32 *type) {
    CALL_ON("nvmlDeviceGetNvLinkRemoteDeviceType", h);
    if (link >= (u32)S.num_links[gpu]) return BAD_ARGUMENT;
    *type = S.link[gpu][link] == SWITCH ? 2 : 0;
    return OK;
}
int nvmlDeviceGetMigMode(void *h, u32 *current, u32 *pending) {
    CALL_ON("nvmlDeviceGetMigMode", h);
    if (!S.has_mig) return UNSUPPORTED;
    *current = *pending = S.slices[gpu] != 0;
    return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(void *h, u32 *count) { CALL_ON("nvmlDeviceGetMaxMigDeviceCount", h); *count = 7; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, u32 index, void **out) {
    CALL_ON("nvmlDeviceGetMigDeviceHandleByIndex", h);
    if ((int)index >= S.slices[gpu]) return NOT_FOUND;
    *out = (void *)((size_t)h + 256 * (index + 1));
    return OK;
}
int nvmlDeviceGetGpuFabricInfoV(void *h, Fabric *out) {
    CALL_ON("nvmlDeviceGetGpuFabricInfoV", h);
    if (!S.has_fabric) return UNSUPPORTED;
    memcpy(out->cluster, S.cluster, 16);
    out->status = 0, out->clique = S.clique, out->state = 3;
    return OK;
}
#endif
