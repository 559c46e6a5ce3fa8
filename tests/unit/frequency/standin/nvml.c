/* A driver library with NVML's names and calling conventions, for GPUs with a
 * 405 / 600 ... 1980 MHz clock. The state of the first is a file (STANDIN_STATE), so that a second
 * process, the guard, sees the same device, as it would with a real driver; there are
 * further GPUs i = 1, 2, 3 where files STANDIN_STATE.i exist.
 *
 * State file: "<locked MHz or 0> <permitted> <throttled MHz or 0>\n". A second file, of that name and ".power", holds
 * the power limit in mW while it is not the 400 W of the start; 200 to 520 W can be set. A third one, ".health", holds
 * "<uncorrected ECC errors> <remapping pending> <remapping failed> <lost>", and ".xid" the number of an XID error, which
 * is reported once. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct device { int index; };
static struct device gpus[4] = {{0}, {1}, {2}, {3}};
#define gpu gpus[0]
static int initialised = 0;

struct state { unsigned locked, permitted, throttled; };

static const char *file_of(struct device *d) {
  static char path[4096];
  const char *base = getenv("STANDIN_STATE");
  if (d->index == 0) return base;
  snprintf(path, sizeof path, "%s.%d", base, d->index);
  return path;
}

static int known(struct device *d) {
  FILE *f;
  if (d == gpus) return 1;
  if (d < gpus || d > gpus + 3 || !(f = fopen(file_of(d), "r"))) return 0;
  fclose(f);
  return 1;
}

static struct state load(struct device *d) {
  struct state s = {0, 1, 0};
  FILE *f = fopen(file_of(d), "r");
  if (f) {
    if (fscanf(f, "%u %u %u", &s.locked, &s.permitted, &s.throttled) != 3) abort();
    fclose(f);
  }
  return s;
}

static void store(struct device *d, struct state s) {
  FILE *f = fopen(file_of(d), "w");
  fprintf(f, "%u %u %u\n", s.locked, s.permitted, s.throttled);
  fclose(f);
}

int nvmlInitWithFlags(unsigned flags) { return flags ? 2 : (initialised++, 0); }
int nvmlShutdown(void) { return initialised-- > 0 ? 0 : 1; }

const char *nvmlErrorString(int code) {
  switch (code) {
    case 2: return "Invalid Argument";
    case 4: return "Insufficient Permissions";
    case 6: return "Not Found";
    case 7: return "Insufficient Size";
    case 10: return "Timeout";
    case 15: return "GPU is lost";
    default: return "Unknown Error";
  }
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **out) {
  if (!initialised) return 1;
  if (index > 3 || !known(gpus + index)) return 2;
  *out = gpus + index;
  return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *id, struct device **out) {
  if (strcmp(id, "00000000:1B:00.0")) return 6;
  *out = &gpu;
  return 0;
}

int nvmlDeviceGetHandleByUUID(const char *id, struct device **out) {
  if (strcmp(id, "GPU-00000000-1111-2222-3333-444444444444")) return 6;
  *out = &gpu;
  return 0;
}

int nvmlDeviceGetName(struct device *d, char *name, unsigned length) {
  if (!known(d)) return 2;
  snprintf(name, length, "Stand-in GPU");
  return 0;
}

static int list(unsigned *count, unsigned *out, const unsigned *values, unsigned have) {
  unsigned room = *count;
  *count = have;
  if (!out || room < have) return 7;
  memcpy(out, values, have * sizeof(*values));
  return 0;
}

int nvmlDeviceGetSupportedMemoryClocks(struct device *d, unsigned *count, unsigned *out) {
  static const unsigned clocks[] = {2619, 1593};
  return known(d) ? list(count, out, clocks, 2) : 2;
}

int nvmlDeviceGetSupportedGraphicsClocks(struct device *d, unsigned memory, unsigned *count, unsigned *out) {
  static const unsigned fast[] = {1980, 1755, 1500, 1200, 900, 600}, slow[] = {405};
  if (!known(d)) return 2;
  if (memory == 2619) return list(count, out, fast, 6);
  if (memory == 1593) return list(count, out, slow, 1);
  return 6;
}

int nvmlDeviceGetClockInfo(struct device *d, int type, unsigned *mhz) {
  struct state s;
  if (!known(d) || type != 1) return 2;
  s = load(d);
  *mhz = s.locked ? s.locked : 1980;
  if (s.throttled && *mhz > s.throttled) *mhz = s.throttled;
  return 0;
}

int nvmlDeviceSetGpuLockedClocks(struct device *d, unsigned low, unsigned high) {
  struct state s;
  if (!known(d) || low != high) return 2;
  s = load(d);
  if (!s.permitted) return 4;
  s.locked = low;
  store(d, s);
  return 0;
}

int nvmlDeviceResetGpuLockedClocks(struct device *d) {
  struct state s;
  if (!known(d)) return 2;
  s = load(d);
  if (!s.permitted) return 4;
  s.locked = 0;
  store(d, s);
  return 0;
}

static const char *power_file(struct device *d) {
  static char path[4200];
  snprintf(path, sizeof path, "%s.power", file_of(d));
  return path;
}

int nvmlDeviceGetPowerManagementLimit(struct device *d, unsigned *milliwatts) {
  FILE *f;
  if (!known(d)) return 2;
  *milliwatts = 400000;
  if ((f = fopen(power_file(d), "r"))) {
    if (fscanf(f, "%u", milliwatts) != 1) abort();
    fclose(f);
  }
  return 0;
}

int nvmlDeviceGetPowerManagementLimitConstraints(struct device *d, unsigned *lowest, unsigned *highest) {
  if (!known(d)) return 2;
  *lowest = 200000;
  *highest = 520000;
  return 0;
}

int nvmlDeviceSetPowerManagementLimit(struct device *d, unsigned milliwatts) {
  FILE *f;
  if (!known(d) || milliwatts < 200000 || milliwatts > 520000) return 2;
  if (!load(d).permitted) return 4;
  if (milliwatts == 400000) return remove(power_file(d)) ? 999 : 0;
  f = fopen(power_file(d), "w");
  fprintf(f, "%u\n", milliwatts);
  fclose(f);
  return 0;
}

int nvmlDeviceGetPowerUsage(struct device *d, unsigned *milliwatts) {
  if (!known(d)) return 2;
  *milliwatts = 412345;
  return 0;
}

static const char *beside(struct device *d, const char *ending) {
  static char path[4200];
  snprintf(path, sizeof path, "%s.%s", file_of(d), ending);
  return path;
}

struct health { unsigned uncorrected, pending, failed, lost; };

static struct health health_of(struct device *d) {
  struct health h = {0, 0, 0, 0};
  FILE *f = fopen(beside(d, "health"), "r");
  if (f) {
    if (fscanf(f, "%u %u %u %u", &h.uncorrected, &h.pending, &h.failed, &h.lost) != 4) abort();
    fclose(f);
  }
  return h;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
  if (!initialised) return 1;
  for (*count = 0; *count < 4 && known(gpus + *count);) ++*count;
  return 0;
}

int nvmlDeviceGetTotalEccErrors(struct device *d, int type, int counter, unsigned long long *count) {
  if (!known(d) || type != 1 || counter != 0) return 2;
  *count = health_of(d).uncorrected;
  return health_of(d).lost ? 15 : 0;
}

int nvmlDeviceGetRemappedRows(struct device *d, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failed) {
  struct health h;
  if (!known(d)) return 2;
  h = health_of(d);
  *corrected = *uncorrected = 0;
  *pending = h.pending;
  *failed = h.failed;
  return h.lost ? 15 : 0;
}

/* A set of events: the bits of the registered devices. */
struct events { unsigned devices; };
static struct events only;

struct event {
  struct device *device;
  unsigned long long type, data;
  unsigned gpu_instance, compute_instance;
};

int nvmlEventSetCreate(struct events **out) {
  only.devices = 0;
  *out = &only;
  return 0;
}

int nvmlDeviceRegisterEvents(struct device *d, unsigned long long types, struct events *set) {
  if (!known(d) || types != 8 || set != &only) return 2;
  set->devices |= 1u << d->index;
  return 0;
}

int nvmlEventSetWait_v2(struct events *set, struct event *out, unsigned milliseconds) {
  if (set != &only || milliseconds) return 2;
  for (struct device *d = gpus; d < gpus + 4; d++) {
    FILE *f = (set->devices >> d->index & 1) ? fopen(beside(d, "xid"), "r") : NULL;
    if (!f) continue;
    memset(out, 0, sizeof *out);
    if (fscanf(f, "%llu", &out->data) != 1) abort();
    fclose(f);
    remove(beside(d, "xid"));
    out->device = d;
    out->type = 8;
    return 0;
  }
  return 10;
}
