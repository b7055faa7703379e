/* A libnvidia-ml.so.1 that tells what the file named by ZRUN_FAKE_NVML says; its format: zrun/topology/scenario.py.
   With -DOLD_DRIVER it lacks functions that drivers before 2021 do not have.
   gcc -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 fake_nvml.c */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef struct { char legacy[16]; u32 domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { u64 total, free, used; } Memory;
typedef struct { u32 version; u64 total, reserved, free, used; } MemoryV2;
typedef struct { u32 pid; u64 used; u32 instance, compute; } Process;
typedef struct { u32 version; unsigned char cluster[16]; u32 status, clique; unsigned char state, pad[3]; u32 health; } Fabric;
enum { OK, BAD_ARGUMENT = 2, UNSUPPORTED, NOT_FOUND = 6, TOO_SMALL, LOST = 15, MOST = 64, LINKS = 36, SWITCH = 255 };

static struct {
    int gpus, major, minor, cuda, has_mig, num_fails, has_fabric;
    u64 memory;
    char name[96], driver[80];
    int node[MOST], lost[MOST], level[MOST][MOST], num_links[MOST], link[MOST][LINKS], slices[MOST];
    u64 slice_mib[MOST], cpus[MOST][64];
    u32 num_pids[MOST], pids[MOST][16], clique;
    unsigned char cluster[16];
    struct { char function[96]; int code; } fails[32];
} S;

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

static void load(FILE *file) {
    char line[512], w[8][96];
    int a[4096], b[4096];
    memset(&S, 0, sizeof S);
    memset(S.node, -1, sizeof S.node);
    S.major = 8, S.cuda = 12040;
    strcpy(S.name, "GPU");
    strcpy(S.driver, "550.54.15");
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "#\n")] = 0;
        memset(w, 0, sizeof w);
        int n = sscanf(line, "%95s %95s %95s %95s %95s %95s %95s", w[0], w[1], w[2], w[3], w[4], w[5], w[6]);
        int i = atoi(w[1]), j = atoi(w[2]), k = atoi(w[3]), na = numbers(w[1], a, 4096), nb = numbers(w[2], b, 4096);
        if (n < 1) continue;
        if (!strcmp(w[0], "gpus")) S.gpus = i;
        else if (!strcmp(w[0], "driver")) strcpy(S.driver, w[1]);
        else if (!strcmp(w[0], "cuda")) S.cuda = 1000 * i + 10 * j;
        else if (!strcmp(w[0], "memory")) S.memory = (u64)i << 20;
        else if (!strcmp(w[0], "capability")) S.major = i, S.minor = j;
        else if (!strcmp(w[0], "name")) {
            S.name[0] = 0;
            for (int x = 1; x < n; x++) strcat(strcat(S.name, x > 1 ? " " : ""), w[x]);
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

static int code_of(const char *function) {
    for (int i = 0; i < S.num_fails; i++) if (!strcmp(S.fails[i].function, function)) return S.fails[i].code;
    return OK;
}

/* A handle is 1 + the GPU's index, and 256 more for each slice of it. */
static int gpu_of(const void *handle) { return (int)(((size_t)handle - 1) % 256); }
static int slice_of(const void *handle) { return (int)(((size_t)handle - 1) / 256) - 1; }

#define CALL(function) do { int code = code_of(function); if (code) return code; } while (0)
#define CALL_ON(function, handle) \
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
    const char *path = getenv("ZRUN_FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) return 9; /* NVML_ERROR_DRIVER_NOT_LOADED */
    load(file);
    fclose(file);
    return OK;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { (void)code; return "an error of the fake library"; }

int nvmlSystemGetDriverVersion(char *out, u32 size) { CALL("nvmlSystemGetDriverVersion"); snprintf(out, size, "%s", S.driver); return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { CALL("nvmlSystemGetCudaDriverVersion_v2"); *version = S.cuda; return OK; }
int nvmlDeviceGetCount_v2(u32 *count) { CALL("nvmlDeviceGetCount"); *count = (u32)S.gpus; return OK; }
int nvmlDeviceGetHandleByIndex_v2(u32 index, void **out) { CALL("nvmlDeviceGetHandleByIndex"); *out = (void *)(size_t)(index + 1); return OK; }
int nvmlDeviceGetUUID(void *h, char *out, u32 size) {
    CALL_ON("nvmlDeviceGetUUID", h);
    if (slice_of(h) < 0) snprintf(out, size, "GPU-%08x-0000-0000-0000-000000000000", gpu);
    else snprintf(out, size, "MIG-%08x-0000-0000-0000-%012x", gpu, slice_of(h));
    return OK;
}
int nvmlDeviceGetName(void *h, char *out, u32 size) {
    CALL_ON("nvmlDeviceGetName", h);
    if (slice_of(h) < 0) snprintf(out, size, "%s", S.name);
    else snprintf(out, size, "%s MIG %lluMiB", S.name, S.slice_mib[gpu]);
    return OK;
}
int nvmlDeviceGetMemoryInfo(void *h, Memory *out) {
    CALL_ON("nvmlDeviceGetMemoryInfo", h);
    out->total = out->free = slice_of(h) < 0 ? S.memory : S.slice_mib[gpu] << 20;
    out->used = 0;
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
    *major = S.major, *minor = S.minor;
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

#ifndef OLD_DRIVER
int nvmlDeviceGetMemoryInfo_v2(void *h, MemoryV2 *out) {
    CALL_ON("nvmlDeviceGetMemoryInfo_v2", h);
    out->total = out->free = S.memory;
    out->used = out->reserved = 0;
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
